"""What a user may say about the files to read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

RESERVED_COLUMNS = frozenset({"id", "text", "train_clicks"})


class ReadOptions(BaseModel):
    """How to read log files. The defaults suit a clean click log and the ads platforms' exports.

    Attributes:
        query_column: header (or 1-based position) of the query column; None: recognised by its name.
        phrase_column: the same for the bid phrase.
        weight_column: the same for the weight.
        weight: which figure of an ads report weighs a pair.
        phrase_columns: further columns of the log to keep as columns of the phrase table (`match_type` is
            kept anyway); each phrase must have one value only.
        number_columns: those of `phrase_columns` that hold numbers; the others hold text.
        encoding: name of the text encoding; None: byte-order mark, else UTF-8.
        quoted: whether `"` quotes fields in a tab-separated click log (in CSV and ads reports it does).
        bad_lines: `stop` at the first bad line, or `skip` and count.
        phrases: file of (id, text) that gives User Behavior Insights' object ids their texts.
        text_fields: fields whose texts, joined, are a query or a phrase, in a format that has several, such
            as title and content; none: the format's own.
        actions: names of the User Behavior Insights events that count as a click.
        test_share: share of queries to hold out where the data has no test part of its own.
        split_seed: salt of the hash that chooses them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    query_column: str | None = None
    phrase_column: str | None = None
    weight_column: str | None = None
    weight: Literal["clicks", "impressions"] = "clicks"
    phrase_columns: tuple[str, ...] = ()
    number_columns: tuple[str, ...] = ()
    encoding: str | None = None
    quoted: bool = False
    bad_lines: Literal["stop", "skip"] = "stop"
    phrases: Path | None = None
    text_fields: tuple[str, ...] = ()
    actions: tuple[str, ...] = ("click", "item_click")
    test_share: float = Field(default=0.1, ge=0, lt=1)
    split_seed: int = Field(default=0, ge=0)

    @field_validator("phrase_columns")
    @classmethod
    def _not_our_own(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        taken = sorted(set(names) & RESERVED_COLUMNS)
        if taken:
            raise ValueError(f"the phrase table has a column {taken[0]!r} of its own; rename the log's")
        return tuple(name for name in dict.fromkeys(names) if name != "match_type")
