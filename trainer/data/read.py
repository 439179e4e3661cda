"""Entry point of the readers: any files a user has become one `Dataset`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp

from bidmatch.base.console import progress
from bidmatch.base.errors import InputError
from trainer.data.assemble import Assembled, assemble, assemble_numbered, take_out_filtered
from trainer.data.collect import ALL_BAD_HINT, Collector
from trainer.data.dataset import Dataset, Interactions, ReadReport, SplitRecord
from trainer.data.fingerprint import fingerprint
from trainer.data.folders import Entry, entries
from trainer.data.options import ReadOptions
from trainer.data.recognised import Recognised
from trainer.data.split import split_by_query

__all__ = ["Log", "ReadOptions", "read_dataset", "read_log", "report_lines"]

_BAR_FROM_BYTES = 50_000_000


@dataclass(frozen=True)
class Log:
    """A click log before any split.

    Attributes:
        phrases: the phrase table of `Dataset`.
        interactions: all queries, (N, L).
        report: what was read.
    """

    phrases: pa.Table
    interactions: Interactions
    report: ReadReport


@dataclass(frozen=True)
class _Reading:
    """All files read: their rows assembled, and what to say of them."""

    assembled: Assembled
    given_split: bool
    report: ReadReport


def _read(paths: Sequence[Path], options: ReadOptions) -> _Reading:
    files, notes = entries([Path(path) for path in paths], options)
    if not files:
        raise InputError("no file was named")
    recognised = [(entry.recognise(), entry.part) for entry in files]
    recognised.sort(key=lambda one: not one[0].first)
    collector = Collector(options)
    with _bar(files) as advance:
        for one, part in recognised:
            _read_one(one, collector, part, advance)
    if not collector.queries and not collector.numbered:
        raise _nothing_left(collector, files)
    assembled = _assembled(recognised, collector)
    rows = collector.rows - sum(collector.skipped.values())
    merged = rows - sum(part.clicks.nnz for part in assembled.parts)
    if collector.filters:
        assembled = take_out_filtered(assembled, collector.filters, collector.skipped)
        if not any(part.clicks.nnz for part in assembled.parts):
            raise _nothing_left(collector, files)
    given = any(entry.part for entry in files)
    if given:
        assembled = _keep_test_out_of_training(assembled, notes)
    return _Reading(assembled, given, _report(recognised, collector, assembled, merged, notes))


def _read_one(
    one: Recognised, collector: Collector, part: int, advance: Callable[[int], None] | None
) -> None:
    """Read a file.

    Raises:
        InputError: it cannot be read, or all its lines are bad, even where bad lines are skipped: it is not
            what it was taken for then, and to go on would leave it out as if it were not there.
    """
    rows, bad = collector.rows, collector.bad_lines
    one.read(collector, part, advance)
    rows, bad = collector.rows - rows, collector.bad_lines - bad
    if not bad or bad < rows:
        return
    options = collector.options.model_copy(update={"bad_lines": "stop"})
    try:
        one.read(Collector(options), part)
    except InputError as problem:
        line = "" if problem.line is None else f", line {problem.line}"
        raise InputError(
            problem.reason.removeprefix(f"{problem.file}{line}: "),
            file=problem.file,
            line=problem.line,
            hint=ALL_BAD_HINT,
        ) from None


def _assembled(recognised: Sequence[tuple[Recognised, int]], collector: Collector) -> Assembled:
    """Pairs by number stay so where all refer to one label list; else all pairs become pairs of texts."""
    lists = {id(one.labels): one.labels for one, _ in recognised}
    only = next(iter(lists.values())) if len(lists) == 1 else None
    if only is not None and not collector.queries:
        return assemble_numbered(collector, only)
    collector.spell_out()
    return assemble(collector, None if only is None else only.catalogue)


def _nothing_left(collector: Collector, files: Sequence[Entry]) -> InputError:
    counts = "; ".join(f"{count:,} {reason}" for reason, count in collector.skipped.most_common())
    return InputError(
        "no (query, phrase) pair is left to learn from" + (f" (left out: {counts})" if counts else ""),
        file=files[0].paths[0] if len(files) == 1 else None,
        hint="Every row was left out. Choose a longer date range, or weigh by impressions if clicks are 0."
        if counts
        else "There are no rows below the header. Choose a longer date range and export again.",
    )


@contextmanager
def _bar(files: Sequence[Entry]) -> Iterator[Callable[[int], None] | None]:
    total = sum(path.stat().st_size for entry in files for path in entry.paths if path.is_file())
    if total < _BAR_FROM_BYTES:
        yield None
        return
    done = 0
    with progress("reading", total // 1_000_000, "MB") as step:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if done >= 1_000_000:
                step.advance(done // 1_000_000)
                done %= 1_000_000

        yield advance


def _keep_test_out_of_training(assembled: Assembled, notes: list[str]) -> Assembled:
    train, test = assembled.parts
    both = pc.is_in(train.queries, value_set=test.queries).to_numpy(zero_copy_only=False)
    if not both.any():
        return assembled
    notes.append(f"{int(both.sum()):,} training queries are also test queries and were dropped from training")
    return Assembled(assembled.phrases, (train.take(np.flatnonzero(~both)), test))


def _report(
    recognised: Sequence[tuple[Recognised, int]],
    collector: Collector,
    assembled: Assembled,
    merged: int,
    notes: list[str],
) -> ReadReport:
    parts = assembled.parts
    pairs = sum(part.clicks.nnz for part in parts)
    formats = Counter(one.format for one, _ in recognised)
    names = [name if count == 1 else f"{count} x {name}" for name, count in formats.items()]
    columns: dict[str, list[str]] = {}
    for one, _ in recognised:
        for role, header in one.columns.items():
            if header not in columns.setdefault(role, []):
                columns[role].append(header)
    said = list(notes)
    for one, _ in recognised:
        for note in one.notes:
            line = note if len(recognised) == 1 else f"{one.source.path.name}: {note}"
            if line not in said:
                said.append(line)
    if "match_type" in assembled.phrases.column_names:
        texts = pc.count_distinct(assembled.phrases["text"]).as_py()
        said.append(
            f"{len(assembled.phrases):,} phrases are {texts:,} texts: one text bought in several match types "
            "is several phrases, each with its own clicks"
        )
    filtered = {
        name: int(part.filtered.nnz)
        for name, part in zip(("train", "test"), parts, strict=True)
        if part.filtered is not None
    }
    return ReadReport(
        format="; ".join(names),
        files=[str(one.source.path) for one, _ in recognised],
        queries=sum(len(part) for part in parts),
        phrases=len(assembled.phrases),
        pairs=pairs,
        total_weight=float(sum(part.clicks.sum(dtype=np.float64) for part in parts)),
        rows=collector.rows,
        duplicates_merged=merged,
        filter_pairs=filtered,
        skipped=dict(collector.skipped.most_common()),
        columns={role: " | ".join(headers) for role, headers in columns.items()},
        notes=said,
        fingerprint=fingerprint(assembled.phrases, parts),
    )


def read_log(paths: Sequence[Path], options: ReadOptions | None = None) -> Log:
    """Read logs without splitting them; a test part that the data brings along is put back in.

    Raises:
        InputError: a file cannot be read; see `read_dataset`.
    """
    reading = _read(paths, options or ReadOptions())
    train, test = reading.assembled.parts
    return Log(reading.assembled.phrases, join(train, test), reading.report)


def join(one: Interactions, other: Interactions) -> Interactions:
    """The interactions of two parts with distinct queries over the same phrases, sorted by query."""
    if len(other) == 0:
        return one
    queries = pa.concat_arrays([one.queries, other.queries])
    both = Interactions(
        queries, sp.csr_matrix(sp.vstack([one.clicks, other.clicks])), _join_filtered(one, other)
    )
    return both.take(pc.sort_indices(queries).to_numpy())


def _join_filtered(one: Interactions, other: Interactions) -> sp.csr_matrix | None:
    if one.filtered is None and other.filtered is None:
        return None
    rows = [
        sp.csr_matrix(part.clicks.shape, dtype=bool) if part.filtered is None else part.filtered
        for part in (one, other)
    ]
    return sp.csr_matrix(sp.vstack(rows))


def read_dataset(paths: Sequence[Path], options: ReadOptions | None = None) -> Dataset:
    """Read logs, reports or dataset folders into one `Dataset`, each file recognised by its content.

    A folder with `trn.*` (or `train.*`) and `tst.*` (or `test.*`) files, or of another layout with a test
    part, brings its split along; otherwise `options.test_share` of the queries is held out by hash. Several
    files of any kinds are merged.

    Args:
        paths: files and folders.
        options: how to read them; None: the defaults.

    Raises:
        InputError: a file is missing, of no known kind, holds a bad line (and bad lines stop) or no pair.
    """
    options = options or ReadOptions()
    reading = _read(paths, options)
    train, test = reading.assembled.parts
    if reading.given_split:
        split = SplitRecord(kind="given")
    else:
        train, test = split_by_query(train, options.test_share, options.split_seed, salt="test")
        split = SplitRecord(kind="by_query_hash", share=options.test_share, seed=options.split_seed)
    split = split.model_copy(update={"train_queries": len(train), "test_queries": len(test)})
    return Dataset(reading.assembled.phrases, train, test, split, reading.report)


def report_lines(report: ReadReport, split: SplitRecord | None = None) -> list[str]:
    """What was read, line by line, for a person."""
    lines = [f"recognised: {report.format}"]
    if report.columns:
        lines.append("columns: " + ", ".join(f"{role} = {header}" for role, header in report.columns.items()))
    lines.append(
        f"read: {report.queries:,} queries, {report.phrases:,} phrases, {report.pairs:,} pairs, "
        f"total weight {report.total_weight:,.15g}"
    )
    lines.append(f"rows: {report.rows:,} seen, {report.duplicates_merged:,} duplicates merged")
    lines += [
        f"left out: {count:,} {'row' if count == 1 else 'rows'}: {reason}"
        for reason, count in report.skipped.items()
    ]
    if report.filter_pairs:
        of = ", ".join(f"{count:,} of {name} queries" for name, count in report.filter_pairs.items())
        lines.append(f"filter files: pairs taken out of rankings: {of}")
    lines += [f"note: {note}" for note in report.notes]
    if split is not None:
        how = (
            "as given"
            if split.kind == "given"
            else f"by hash of the query, share {split.share:g}, seed {split.seed}"
        )
        lines.append(
            f"held out: {split.test_queries:,} queries ({how}); {split.train_queries:,} left for training"
        )
    lines.append(f"fingerprint: {report.fingerprint}")
    return lines
