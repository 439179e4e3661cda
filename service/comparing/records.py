"""What is asked of a comparison, and what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from service.comparing.examples import Examples
from service.comparing.figures import Figures
from service.comparing.phrases import PhraseChanges
from service.comparing.sides import By


class CompareOptions(BaseModel):
    """What to compare, and how.

    Attributes:
        a: bundle folder, or file of matches, folder of them, or pattern.
        b: another.
        logs: query logs, folders of them, or patterns.
        k: most matches for one query.
        min_score: leave out phrases with a lesser score, of bundles.
        by: what tells that two phrases are the same; None: see `tell_apart`.
        output: file to write a row for each query to; None: none.
        overwrite: replace an output that is there.
        examples: queries and phrases to name of each kind.
        query_column: name of the log's column with the queries, or its position from 1; None to recognise it.
        encoding: of the log's text files; None to recognise it.
        bad_lines: stop at the first, or skip and count them.
        threads: parts of the log worked on at once.
    """

    model_config = ConfigDict(frozen=True)

    a: Path
    b: Path
    logs: list[Path] = Field(min_length=1)
    k: int = Field(10, ge=1)
    min_score: float | None = None
    by: By | None = None
    output: Path | None = None
    overwrite: bool = False
    examples: int = Field(10, ge=0)
    query_column: str | None = None
    encoding: str | None = None
    bad_lines: Literal["stop", "skip"] = "stop"
    threads: int = Field(1, ge=1)


class Comparison(BaseModel):
    """Two sides on one log.

    Attributes:
        a: path of A; `b` of B.
        bundle_a: id of A's bundle; None: A is a file of matches. `bundle_b` likewise.
        same_bundle: whether A and B are one bundle.
        scores_comparable: whether both are bundles of one model, and both re-score or neither does.
        by: what tells that two phrases are the same.
        k: most matches a query.
        min_score: least score of bundles' matches; None: any.
        notes: what else a reader should know.
        rows: queries of the log, empty ones included.
        empty: those that normalise to nothing, of which nothing else is said here.
        skipped: bad lines that were left out.
        queries: figures with each distinct query once.
        traffic: with each as often as the log has it.
        examples: queries whose answers changed.
        phrases: those that gain or lose most traffic.
        output: the file with a row for each query; None: none.
    """

    a: str
    b: str
    bundle_a: str | None
    bundle_b: str | None
    same_bundle: bool
    scores_comparable: bool
    by: By
    k: int
    min_score: float | None
    notes: list[str]
    rows: int
    empty: int
    skipped: int
    queries: Figures
    traffic: Figures
    examples: Examples
    phrases: PhraseChanges
    output: str | None
