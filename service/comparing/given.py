"""A side that is a file of matches, which something else gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

import numpy as np
import pyarrow as pa

from bidmatch.base.console import say
from bidmatch.base.errors import InputError
from bidmatch.base.strings import hash64
from service.comparing.answers import Answers, one_chunk
from service.comparing.joining import ROWS, join, match_rows
from service.comparing.match_files import MatchFile, recognise_matches, same_columns
from service.comparing.match_rows import read_matches
from service.comparing.sides import SAMPLED, By
from service.scoring.distinct import PART_QUERIES
from service.scoring.queries import BadLines
from service.scoring.source import find_files, open_log

_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


class FileSide:
    """Matches from files. Memory does not grow with them.

    Args:
        path: file, folder of files, or pattern.
        scratch: a folder for scratch files, made here.

    Attributes:
        files: that the path stands for.
        bytes: their size.
        matches: rows read.
        known: matches of queries of the log, of which each phrase counts once; set by `look_up`.

    Raises:
        InputError: there is no file, or one is no file of matches.
    """

    def __init__(self, path: Path, scratch: Path):
        self.path = path
        self.files = find_files(path)
        self.bytes = sum(file.stat().st_size for file in self.files if file.exists())
        self.matches = 0
        self.known = 0
        self._parts: list[MatchFile] = []
        for file in self.files:
            source = open_log(file)
            if source is None:
                say(f"{file}: empty")
            else:
                self._parts.append(recognise_matches(source))
        if not self._parts:
            raise InputError("holds no matches", file=path)
        same_columns([(part.source.path, part.columns) for part in self._parts])
        columns = self._parts[0].columns
        held: list[By] = ["id"] if columns.id is not None else []
        self.holds: frozenset[By] = frozenset([*held, "text"] if columns.phrase is not None else held)
        scratch.mkdir()
        self._scratch = scratch
        self._sample = _Sample()
        self._reader: pa.ipc.RecordBatchFileReader | None = None
        self._reading = Lock()

    def read(self, bad: BadLines, advance: Callable[[int], None]) -> None:
        """Read the files, saying of each how it is read.

        Raises:
            InputError: a line is bad and bad lines stop, or a file is damaged.
        """
        with pa.ipc.new_stream(str(self._rows), ROWS, options=_LZ4) as out:
            for part in self._parts:
                say(f"{part.source.path}: {part.name}, {part.columns}")
                for table in read_matches(part, bad, advance):
                    out.write_table(match_rows(table, self.matches))
                    self.matches += len(table)
                    if "id" in self.holds:
                        self._sample.add(one_chunk(table["id"]), one_chunk(table["phrase"]))

    def sample(self) -> dict[str, str | None]:
        """The ids of least hash, so that samples of two files share what the files share."""
        return self._sample.texts()

    def texts_of(self, ids: list[str]) -> dict[str, str | None]:
        """See `Side`."""
        known = self._sample.texts()
        return {one: known[one] for one in ids if one in known}

    def look_up(self, queries: Path, by: By, k: int) -> None:
        """Find the matches of the log's queries, each phrase once, the first k by rank.

        Args:
            queries: the Arrow file of the log's queries, a batch for each part.
            by: what tells that two phrases are the same.
            k: most matches for a query.
        """
        self.known = join(self._matches, queries, by == "id", k, self._found, self._scratch)
        self._rows.unlink()
        # Not mapped: its pages would count as this process's memory.
        self._reader = pa.ipc.open_file(pa.OSFile(str(self._found)))

    def _matches(self) -> Iterator[pa.Table]:
        with pa.ipc.open_stream(str(self._rows)) as stream:
            yield from (pa.Table.from_batches([batch]) for batch in stream)

    def answers(self, part: int, queries: list[str]) -> Answers:  # noqa: ARG002
        """See `Side`."""
        assert self._reader is not None, "look_up comes first"
        with self._reading:
            batch = self._reader.get_batch(part)
        unknown = np.full(batch.num_rows, np.nan)
        places = batch.column("place").to_numpy() - part * PART_QUERIES
        return Answers(places, batch.column("name"), batch.column("phrase"), unknown, unknown)

    @property
    def _rows(self) -> Path:
        return self._scratch / "rows.arrows"

    @property
    def _found(self) -> Path:
        return self._scratch / "found.arrow"


class _Sample:
    """The ids of least hash, SAMPLED at most, each with a text."""

    def __init__(self) -> None:
        self._hashes = np.empty(0, np.uint64)
        self._rows = pa.table([pa.array([], pa.large_string())] * 2, ["id", "text"])

    def add(self, ids: pa.Array, texts: pa.Array) -> None:
        """See these ids, of which none is null."""
        hashes = hash64(ids)
        if len(self._hashes) == SAMPLED:
            least = np.flatnonzero(hashes < self._hashes[-1])
            hashes, ids, texts = hashes[least], ids.take(least), texts.take(least)
        # Of equal hashes the first is kept.
        self._hashes, at = np.unique(np.concatenate([self._hashes, hashes]), return_index=True)
        self._hashes = self._hashes[:SAMPLED]
        rows = pa.concat_tables([self._rows, pa.table([ids, texts], ["id", "text"])])
        self._rows = rows.take(at[:SAMPLED])

    def texts(self) -> dict[str, str | None]:
        """Each id with its text."""
        ids, texts = (column.to_pylist() for column in self._rows.columns)
        return dict(zip(ids, texts, strict=True))
