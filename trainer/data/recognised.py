"""A file, or a folder's set of files, whose kind is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from bidmatch.base.input_files import Source
from trainer.data.collect import Collector
from trainer.data.labels import Labels


class Read(Protocol):
    """Reads one recognised file into a collector."""

    def __call__(self, collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        """Read; `advance` is told of each block of bytes read from disk."""


@dataclass(frozen=True)
class Recognised:
    """A file whose kind is known.

    Attributes:
        source: the file.
        format: name for people.
        read: reads its pairs.
        columns: role -> header.
        notes: what else to say.
        labels: the label list that its numbers refer to, if it is of that kind.
        first: whether it must be read before the others, which refer to it.
    """

    source: Source
    format: str
    read: Read
    columns: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    labels: Labels | None = None
    first: bool = False


def packed(source: Source) -> str:
    """How a file is packed, for its format's name."""
    return f", {source.packing}" if source.packing else ""


class LabelLists:
    """The label lists that the files of one call refer to, each read once."""

    def __init__(self) -> None:
        self._read: dict[object, Labels] = {}

    def get(self, key: object, read: Callable[[], Labels]) -> Labels:
        """The list known as `key`, read by `read` when it is asked for first."""
        if key not in self._read:
            self._read[key] = read()
        return self._read[key]
