"""What can be compared: whatever answers queries; and a bundle as such."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from bidmatch.base.strings import key_array
from export.bundle.format import ALL_FILES
from service.comparing.answers import Answers, one_chunk
from service.engine import Engine
from service.options import MatchOptions
from service.scoring.parts import matches_of

By = Literal["id", "text"]

SAMPLED = 10_000
"""Ids of which it is looked whether the other side has them."""


class Side(Protocol):
    """What answers queries.

    Attributes:
        path: as the user gave it.
        holds: what it can tell phrases by.
    """

    path: Path
    holds: frozenset[By]

    def sample(self) -> dict[str, str | None]:
        """Some of its ids, SAMPLED at most, each with its text if it has one."""

    def texts_of(self, ids: list[str]) -> dict[str, str | None]:
        """Those of some ids that it has, as `sample` gives them. A file knows those of its sample alone."""

    def answers(self, part: int, queries: list[str]) -> Answers:
        """The matches of the queries of one part of the log."""


def is_bundle(path: Path) -> bool:
    """Whether a path is a folder with any file of a bundle, or a run's, which opening it as a bundle says."""
    return path.is_dir() and any((path / name).exists() for name in (*ALL_FILES, "checkpoints"))


class BundleSide:
    """A bundle that answers.

    Args:
        path: its folder.
        engine: the bundle, loaded.
    """

    holds: frozenset[By] = frozenset({"id", "text"})

    def __init__(self, path: Path, engine: Engine):
        self.path, self.engine = path, engine
        self._by: By = "id"
        self._options, self._compared = MatchOptions(), False

    def ask(self, by: By, k: int, min_score: float | None, *, compared: bool) -> None:
        """Say what is asked of all queries.

        Args:
            by: what tells that two phrases are the same.
            k: most matches for a query.
            min_score: leave out phrases with a lesser score.
            compared: whether scores are comparable with the other side's.
        """
        self._options = MatchOptions(k, min_score, distinct=by == "text")
        self._by, self._compared = by, compared

    def sample(self) -> dict[str, str | None]:
        """Ids of rows that are evenly spread: all of a large bundle's would be gigabytes of strings."""
        rows = np.unique(np.linspace(0, len(self.engine) - 1, SAMPLED).astype(np.int64))
        return self._texts(rows if len(self.engine) else rows[:0])

    def texts_of(self, ids: list[str]) -> dict[str, str | None]:
        """See `Side`."""
        return self._texts(np.array(list(self.engine.ids.find(ids).values()), np.int64))

    def _texts(self, rows: np.ndarray) -> dict[str, str | None]:
        phrases = self.engine.phrases(rows)
        return dict(zip(phrases["id"].to_pylist(), phrases["text"].to_pylist(), strict=True))

    def answers(self, part: int, queries: list[str]) -> Answers:  # noqa: ARG002
        """See `Side`."""
        owner, column = matches_of(self.engine, queries, self._options)
        phrases = self.engine.phrases(column("rows"))
        texts = one_chunk(phrases["text"])
        unknown = np.full(len(owner), np.nan)
        return Answers(
            owner,
            one_chunk(phrases["id"]) if self._by == "id" else key_array(texts),
            texts,
            column("scores").astype(np.float64) if self._compared else unknown,
            column("relevance").astype(np.float64) if self.engine.calibration is not None else unknown,
        )
