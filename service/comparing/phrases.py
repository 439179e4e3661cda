"""The phrases that one side answers to more traffic than the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from service.comparing.answers import Pair
from service.scoring.distinct import key_bucket, scattered

_SCHEMA = pa.schema(
    [
        ("key", pa.large_string()),
        ("phrase", pa.large_string()),
        ("gained", pa.int64()),
        ("lost", pa.int64()),
    ]
)


class PhraseChange(BaseModel):
    """A phrase that A and B answer to different queries.

    Attributes:
        phrase: its text, or its id where that is all that is known.
        gained: rows of the log whose query B answers with it and A does not.
        lost: rows whose query A answers with it and B does not.
        change: `gained` less `lost`.
    """

    phrase: str
    gained: int
    lost: int
    change: int


class PhraseChanges(BaseModel):
    """Phrases by their change.

    Attributes:
        gained: those that gain most, the greatest first.
        lost: those that lose most, the greatest first.
    """

    gained: list[PhraseChange]
    lost: list[PhraseChange]


def changes_of(pair: Pair, counts: np.ndarray) -> pa.Table:
    """The traffic that each phrase of some queries gains and loses, a row for each; `key` tells them apart.

    Args:
        pair: the answers to n queries.
        counts: int64 (n,), how often the log has each.
    """
    sides = []
    for answers, chosen, gains in ((pair.b, pair.gained, True), (pair.a, pair.lost, False)):
        traffic = counts[answers.rows[chosen]]
        nothing = np.zeros(len(chosen), np.int64)
        sides.append(
            pa.table(
                [
                    answers.names.take(chosen),
                    answers.phrases.take(chosen),
                    traffic if gains else nothing,
                    nothing if gains else traffic,
                ],
                schema=_SCHEMA,
            )
        )
    return _reduced(pa.concat_tables(sides))


def top_changes(tables: Iterable[pa.Table], folder: Path, most: int) -> PhraseChanges:
    """The phrases of greatest change, exact, in memory that does not grow with the phrases.

    Args:
        tables: of `changes_of`.
        folder: made here, for scratch files.
        most: phrases each way.
    """
    gained: list[PhraseChange] = []
    lost: list[PhraseChange] = []
    for table in scattered(tables, key_bucket, folder):
        whole = _reduced(table)
        gained = sorted([*gained, *_first(whole, most, 1)], key=lambda one: (-one.change, one.phrase))[:most]
        lost = sorted([*lost, *_first(whole, most, -1)], key=lambda one: (one.change, one.phrase))[:most]
    return PhraseChanges(gained=gained, lost=lost)


def _first(table: pa.Table, most: int, sign: int) -> Iterator[PhraseChange]:
    changes = table["gained"].to_numpy() - table["lost"].to_numpy()
    ranked = table.append_column("change", [sign * changes]).sort_by(
        [("change", "descending"), ("phrase", "ascending")]
    )
    for row in ranked.slice(0, most).to_pylist():
        if row["change"] > 0:
            yield PhraseChange(
                phrase=row["phrase"], gained=row["gained"], lost=row["lost"], change=sign * row["change"]
            )


def _reduced(table: pa.Table) -> pa.Table:
    # Ordered aggregates such as "first" need one thread.
    grouped = table.group_by("key", use_threads=False).aggregate(
        [("phrase", "first"), ("gained", "sum"), ("lost", "sum")]
    )
    return grouped.rename_columns(["key", "phrase", "gained", "lost"]).cast(_SCHEMA)
