"""The work folder of a scoring run, which makes it resumable, and the one rename that ends it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError, ConfigError
from bidmatch.base.files import PARTIAL_SUFFIX, atomic_file, fsync_path, remove_partials, shown
from service.scoring.output import Written

_FORMAT = 2
_SUCCESS = "_SUCCESS"
_OURS = re.compile(r"part-\d+\.[a-z.]+|_SUCCESS|\..*")
_SAMPLE_BYTES = 1 << 20


class InputRecord(BaseModel):
    """What tells an input file from another: size, time of change, SHA-256 of its first and last MiB."""

    path: str
    bytes: int
    modified_ns: int
    sample_sha256: str

    @classmethod
    def of(cls, path: Path) -> InputRecord:
        """The record of a file as it is now."""
        state = path.stat()
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, state.st_size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
        return cls(
            path=shown(path.resolve()),
            bytes=state.st_size,
            modified_ns=state.st_mtime_ns,
            sample_sha256=digest.hexdigest(),
        )


class Plan(BaseModel):
    """All that decides what the output is. A run is resumed by the same plan alone."""

    format: int = _FORMAT
    bundle_id: str
    # The id leaves the graph out: several threads build another one from the same vectors.
    index_sha256: str
    inputs: list[InputRecord]
    query_column: str | None
    encoding: str | None
    bad_lines: str
    k: int
    min_score: float | None
    min_relevance: float | None
    ef: int | None
    rescore: bool | None
    candidates: int | None
    honour_match_types: bool
    output_kind: str
    rows_per_file: int | None = None
    shard: str | None = None
    unordered: bool = False


class Work:
    """The folder `.OUTPUT.work` beside the output.

    Attributes:
        folder: where it is.
        queries: the distinct queries, an Arrow file; whole where `counts` exists.
        counts: what was counted while they were found.
        scratch: scratch files of finding them.
        parts: results, an Arrow file for each batch of `queries`; none where the output is a folder.
        resumed: whether an earlier run left its queries, and results perhaps, for this one to go on with.
    """

    def __init__(self, output: Path, *, resumed: bool, in_files: bool = False):
        self.folder = work_folder(output)
        self.queries = self.folder / "queries.arrow"
        self.counts = self.folder / "counts.json"
        self.scratch = self.folder / "scratch"
        self.parts = self.folder / "parts"
        self.resumed = resumed
        self._output, self._in_files = output, in_files
        self._written = self.folder / "written.json"
        self._whole = self.folder / "output.whole"
        self._summary = self.folder / "summary.json"

    def part(self, number: int) -> Path:
        """Where the results of a batch of queries are."""
        return self.parts / f"{number:07}.arrow"

    def finished(self) -> str | None:
        """What was sealed, by this run or by one that was killed before it had moved the output out."""
        return self._summary.read_text() if self._summary.exists() else None

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Yields the path to write the output to, inside the folder; `seal` and `move_out` come after."""
        with atomic_file(self._whole) as partial:
            yield partial

    def open_folder(self) -> Written:
        """Make the output's folder, or take it over; how much of it is written.

        Before the first file of a run, what an earlier output left there is removed, `_SUCCESS` first.
        """
        self._output.mkdir(parents=True, exist_ok=True)
        for left in self._output.glob(f".part-*{PARTIAL_SUFFIX}"):
            left.unlink()
        if self._written.exists():
            written = Written.model_validate_json(self._written.read_text())
            if all(any(self._output.glob(f"part-{number:05}.*")) for number in range(written.files)):
                return written
            say(f"files are missing in {self._output}; all are written anew")
        for entry in sorted(self._output.iterdir(), key=lambda entry: entry.name != _SUCCESS):
            if entry.name[0] != ".":
                entry.unlink()
        self.keep(Written())
        return Written()

    def keep(self, written: Written) -> None:
        """Note how much of the output's folder is written, for a run after one that is killed."""
        with atomic_file(self._written) as partial:
            partial.write_text(written.model_dump_json())

    @property
    def begun(self) -> bool:
        """Whether files in the output's folder are this run's."""
        return self._written.exists()

    def seal(self, summary: str) -> None:
        """Declare the output whole, so that nothing but `move_out` is left to do."""
        with atomic_file(self._summary) as partial:
            partial.write_text(summary)

    def move_out(self) -> None:
        """Put the whole output in its place and remove the folder."""
        if self._in_files:
            with atomic_file(self._output / _SUCCESS) as partial:
                partial.touch()
        elif self._whole.exists():
            self._whole.replace(self._output)
            fsync_path(self._output.parent)
        _remove(self.folder, self._output)


def work_folder(output: Path) -> Path:
    """Where a run that writes `output` keeps its work."""
    return output.with_name(f".{output.name}.work")


@contextmanager
def open_work(output: Path, plan: Plan, *, restart: bool, overwrite: bool) -> Iterator[Work]:
    """The work folder of an output, locked; made, or taken over from a run that was stopped.

    Raises:
        BidmatchError: another run works on this output, or the output exists already.
        ConfigError: the work there was done to another plan, and `restart` is false.
    """
    folder = work_folder(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, output):
        remove_partials(output)
        work = Work(output, resumed=False, in_files=plan.rows_per_file is not None)
        begun = work.begun
        # Until the queries are known nothing is done that would be missed, so other options may begin anew.
        if restart or not work.counts.exists():
            _empty(folder)
        state = folder / "plan.json"
        if not begun and work.finished() is None:
            problem = _in_the_way(output, overwrite=overwrite, in_files=plan.rows_per_file is not None)
            if problem is not None:
                if not state.exists():
                    _remove(folder, output)
                raise problem
        if state.exists():
            _same_plan(state, plan, folder)
            work.resumed = True
        else:
            _empty(folder)
            with atomic_file(state) as partial:
                partial.write_text(plan.model_dump_json(indent=2))
        work.parts.mkdir(exist_ok=True)
        try:
            yield work
        finally:
            if folder.exists() and not work.counts.exists():
                _remove(folder, output)


def _in_the_way(output: Path, *, overwrite: bool, in_files: bool) -> BidmatchError | None:
    if not output.exists() or (in_files and output.is_dir() and not any(output.iterdir())):
        return None
    if not overwrite:
        return BidmatchError(
            f"{output} already exists", hint="Name another output, or pass --overwrite to replace it."
        )
    if in_files and not all(_OURS.fullmatch(one.name) and one.is_file() for one in output.iterdir()):
        return BidmatchError(
            f"{output} holds other files than a run's, so --overwrite does not replace it",
            hint="Name another folder.",
        )
    return None


def _remove(folder: Path, output: Path) -> None:
    # By another name first: a folder half removed must never be taken for one half made.
    gone = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    folder.rename(gone)
    fsync_path(output.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _empty(folder: Path) -> None:
    # The counts first and the plan last: without counts, or without a plan, the rest counts for nothing.
    order = {"counts.json": 0, "plan.json": 2}
    for entry in sorted(folder.iterdir(), key=lambda entry: order.get(entry.name, 1)):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def _locked(folder: Path, output: Path) -> Iterator[None]:
    while True:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BidmatchError(
                    f"another run is writing {output}", hint="Wait for it, or name another output."
                ) from None
            # The run that held the lock may have ended, and its folder with it, since the folder was opened.
            if folder.exists() and os.path.samestat(folder.stat(), os.fstat(descriptor)):
                yield
                return
        finally:
            os.close(descriptor)


def _same_plan(state: Path, plan: Plan, folder: Path) -> None:
    try:
        former: dict[str, Any] = Plan.model_validate_json(state.read_text()).model_dump()
    except ValidationError:
        former = {}
    now = plan.model_dump()
    changes = [
        f"{name}: {_shown(former.get(name))}, now {_shown(value)}"
        for name, value in now.items()
        if former.get(name) != value
    ]
    if changes:
        raise ConfigError(
            f"{folder} holds an unfinished run with other settings or input ({'; '.join(changes)})",
            hint="Give what it was started with to go on with it, or --restart to begin anew.",
        )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(
            f"{one['path']} of {one['bytes']:,} bytes, written "
            + datetime.fromtimestamp(one["modified_ns"] / 1e9, UTC).isoformat(" ", "milliseconds")
            for one in value
        )
    return "not given" if value is None else str(value)
