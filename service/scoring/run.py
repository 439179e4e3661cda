"""A scoring run: read, find the distinct queries, score them, write the output. Resumable at any point."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from bidmatch.base.console import Step, progress, say
from bidmatch.base.errors import BidmatchError, ConfigError
from bidmatch.base.files import atomic_file, refuse_inside, refuse_name_not_utf8
from export.bundle.read import read_manifest
from service.engine import Engine, EngineSettings
from service.memory import give_back
from service.scoring.distinct import PART_QUERIES, LogCounts, Shard, write_distinct
from service.scoring.layout import recognise
from service.scoring.output import Summary, Tally, write_file, write_folder
from service.scoring.parts import Job, Scorer, result_schema, scored_parts
from service.scoring.queries import BadLines, read_log
from service.scoring.source import find_inputs, open_log, refuse_among
from service.scoring.work import InputRecord, Plan, Work, open_work
from service.scoring.writers import format_of, name_end


class OutputFolder(BaseModel):
    """How an output that is a folder is divided into files.

    Attributes:
        format: end of the files' names, such as `parquet` or `csv.gz`.
        rows_per_file: rows of each file but the last.
    """

    model_config = ConfigDict(frozen=True)

    format: str = "parquet"
    rows_per_file: int = Field(1_000_000, ge=1)


class ScoreOptions(BaseModel):
    """What to score, and how.

    Attributes:
        bundle: bundle folder.
        inputs: query logs, folders of them, or patterns such as `logs/*.tsv.gz`.
        output: file to write, whose name says the format; or folder.
        folder: how the files of a folder are written; None: the output is one file.
        k: most matches for one query.
        min_score: leave out phrases found by the index with a lesser score.
        min_relevance: or with a lesser relevance, where the bundle has a calibration.
        ef: a wider index search than the bundle's own.
        rescore: whether to re-score with the bundle's wide vectors; None: where it has some.
        candidates: phrases to re-score for a query; None for as many as the bundle says.
        threads: parts scored at once.
        query_column: name of the column with the queries, or its position from 1; None to recognise it.
        encoding: of text files; None to recognise it.
        bad_lines: stop at the first, or skip and count them.
        shard: score these of the distinct queries alone; None: all.
        unordered: write the queries in no particular order, for which less is kept on disk.
        restart: throw an unfinished run's work away.
        overwrite: replace an output that is there.
    """

    model_config = ConfigDict(frozen=True)

    bundle: Path
    inputs: list[Path] = Field(min_length=1)
    output: Path
    folder: OutputFolder | None = None
    k: int = Field(10, ge=1)
    min_score: float | None = None
    min_relevance: float | None = Field(None, ge=0, le=1)
    ef: int | None = Field(None, ge=1)
    rescore: bool | None = None
    candidates: int | None = Field(None, ge=1)
    honour_match_types: bool = True
    threads: int = Field(1, ge=1)
    query_column: str | None = None
    encoding: str | None = None
    bad_lines: Literal["stop", "skip"] = "stop"
    shard: Shard | None = None
    unordered: bool = False
    restart: bool = False
    overwrite: bool = False


def score_log(options: ScoreOptions, scorer: AbstractContextManager[Scorer] | None = None) -> Summary:
    """Score a query log. A run that was stopped is gone on with, by whichever scorer.

    An output of one file appears when it is whole; so does each file of a folder, and `_SUCCESS` after the
    last.

    The output has a row for each match, by query in the order of first appearance, then by rank: `query` as
    first spelled, `count` of the log's rows with its key, `rank` from 1, phrase `id` and `phrase`, `score`,
    its parts `encoder` and `classifier`, `relevance` (null where the bundle has no calibration), and
    `source`, "exact" or "index". It is the same whatever `threads` and `scorer`
    are and however often the run was stopped. Memory does not grow with the log.

    Args:
        options: what to score, and how.
        scorer: gives what scores the parts of the log, asked once all else is known to be well; None:
            `options.threads` of this process.

    Raises:
        InputError: an input is missing, damaged or has a bad line.
        ConfigError: an option is wrong, or an unfinished run had other ones.
        DamagedError: the bundle is not sound.
        BidmatchError: the output exists, another run writes it, or the disk is full.
    """
    started = time.monotonic()
    if options.min_score is not None and not math.isfinite(options.min_score):
        raise ConfigError(f"a least score of {options.min_score} says nothing", hint="Scores are in -2 to 2.")
    end = _output_end(options)
    files = find_inputs(options.inputs)
    _refuse_input_as_output(options, files)
    for file in files:
        # What cannot be read is better known before hours of work than after them.
        source = open_log(file)
        if source is not None:
            recognise(source, options.query_column, options.encoding)
    manifest = read_manifest(options.bundle)
    refuse_inside(options.output, options.bundle, "bundle")
    plan = Plan(
        bundle_id=manifest.bundle_id,
        index_sha256=manifest.index_sha256,
        inputs=[InputRecord.of(file) for file in files],
        query_column=options.query_column,
        encoding=options.encoding,
        bad_lines=options.bad_lines,
        k=options.k,
        min_score=options.min_score,
        min_relevance=options.min_relevance,
        ef=options.ef,
        rescore=options.rescore,
        candidates=options.candidates,
        honour_match_types=options.honour_match_types,
        output_kind=end,
        rows_per_file=None if options.folder is None else options.folder.rows_per_file,
        shard=None if options.shard is None else str(options.shard),
        unordered=options.unordered,
    )
    try:
        with open_work(options.output, plan, restart=options.restart, overwrite=options.overwrite) as work:
            summary = work.finished()
            if summary is not None:
                work.move_out()
                return Summary.model_validate_json(summary)
            with scorer or nullcontext(partial(scored_parts, threads=options.threads)) as ready:
                return _run(options, plan, files, work, ready, started)
    except OSError as problem:
        where = f" ({problem.filename})" if problem.filename else ""
        raise BidmatchError(
            f"stopped: {problem.strerror or problem}{where}",
            hint="What was done so far is kept; the same command goes on with it.",
        ) from problem


def _output_end(options: ScoreOptions) -> str:
    """The end of the output's name, or of its files' names, which says the format."""
    refuse_name_not_utf8(options.output)
    end = name_end(options.output)
    if options.folder is not None:
        format_of(options.folder.format)
        if end is not None:
            raise ConfigError(
                f"{options.output} names a file, and a folder of files is asked for",
                hint="Name a folder, such as --output matches/, and the format with --format.",
            )
        if options.output.name in ("", "..") or options.output.is_file():
            raise ConfigError(f"{options.output} cannot be the output's folder", hint="Name a new folder.")
        return options.folder.format
    if options.output.is_dir():
        raise ConfigError(
            f"{options.output} is a folder",
            hint="Name the file to write, or end the name with / to write a folder of files.",
        )
    if options.unordered:
        raise ConfigError(
            "--unordered is for an output of several files", hint="Name a folder, such as --output matches/."
        )
    if end is None:
        raise ConfigError(
            f"{options.output}: what format is that to be?",
            hint="The name must end with .parquet, .csv, .tsv or .jsonl (text also with .gz or .zst behind "
            "it); with / at its end it is a folder.",
        )
    return end


def _refuse_input_as_output(options: ScoreOptions, files: list[Path]) -> None:
    output = options.output
    refuse_among(output, options.inputs)
    if not output.exists():
        return
    for file in files:
        same = file.exists() and file.samefile(output)
        if same or (options.folder is not None and file.resolve().is_relative_to(output.resolve())):
            raise ConfigError(f"{output} is the input, or holds it", hint="Name another output.")


def _run(
    options: ScoreOptions, plan: Plan, files: list[Path], work: Work, scorer: Scorer, started: float
) -> Summary:
    settings = EngineSettings(
        ef=options.ef,
        rescore=options.rescore,
        candidates=options.candidates,
        honour_match_types=options.honour_match_types,
    )
    engine = Engine.load(options.bundle, settings)
    if engine.bundle.manifest.index_sha256 != plan.index_sha256 or engine.bundle_id != plan.bundle_id:
        raise ConfigError(f"{options.bundle} was replaced just now", hint="Run the command again.")
    least = engine.least_score(options.min_score, options.min_relevance)
    if work.resumed:
        say(f"going on with the run that was stopped ({work.folder})")
    counts = _distinct(options, files, work)
    of = "" if options.shard is None else f" in shard {options.shard} of {counts.read:,}"
    say(f"{counts.rows:,} queries{of}, {counts.distinct:,} distinct, {counts.empty:,} empty")
    if counts.skipped:
        say(f"{counts.skipped:,} bad lines skipped (first: {counts.first_skipped})")
    if counts.left_out:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.left_out.items())
        say(f"rows of reports left out: {reasons}")
    scoring = time.monotonic()
    tally, written, scored = _score(options, plan, engine, least, counts, work, scorer)
    scoring = time.monotonic() - scoring
    summary = _summary(options, plan, counts, tally).model_copy(
        update={
            "files": written,
            "scored": scored,
            "seconds": round(time.monotonic() - started, 3),
            "scoring_seconds": round(scoring, 3),
            "queries_per_second": round(scored / max(scoring, 1e-9), 1),
        }
    )
    work.seal(summary.model_dump_json())
    work.move_out()
    return summary


def _score(
    options: ScoreOptions,
    plan: Plan,
    engine: Engine,
    least: float | None,
    counts: LogCounts,
    work: Work,
    scorer: Scorer,
) -> tuple[Tally, int, int]:
    """Score and write what is not yet: the tally of all, the number of files, how many were scored now."""
    about = {"bundle_id": plan.bundle_id, "k": str(plan.k), "min_score": str(plan.min_score)}
    about["min_relevance"] = str(plan.min_relevance)
    schema = result_schema(engine)
    first = None if options.folder is None else work.open_folder()
    parts = range(0 if first is None else first.part, -(-counts.distinct // PART_QUERIES))
    todo = [number for number in parts if first is not None or not work.part(number).exists()]
    scored = sum(min(PART_QUERIES, counts.distinct - number * PART_QUERIES) for number in todo)
    if scored < counts.distinct:
        say(f"{counts.distinct - scored:,} of {counts.distinct:,} queries were scored before")
    wanted = max(0, counts.distinct - parts.start * PART_QUERIES)
    job = Job(work.queries, parts, options.k, least, work.part if first is None else None)
    with progress("scoring", wanted, "queries") as step, closing(scorer(engine, job)) as results:
        tables = _counted(results, step)
        if options.folder is None or first is None:
            with work.writing() as path:
                return write_file(tables, path, plan.output_kind, schema, about), 1, scored
        written = write_folder(
            tables,
            first,
            options.output,
            plan.output_kind,
            schema,
            about,
            options.folder.rows_per_file,
            work.keep,
        )
        return Tally.of(written.tally), written.files, scored


def _counted(results: Iterable[tuple[pa.Table, int]], step: Step) -> Iterator[pa.Table]:
    for table, queries in results:
        yield table
        step.advance(queries)
        # Pieces that stay lie among those that went, and the heap would grow from part to part.
        give_back()


def _distinct(options: ScoreOptions, files: list[Path], work: Work) -> LogCounts:
    """The counts of the log, read now or by the run before; the distinct queries are in the work folder."""
    if work.counts.exists():
        return LogCounts.model_validate_json(work.counts.read_text())
    counts = LogCounts(bytes=sum(file.stat().st_size for file in files))
    bad = BadLines(options.bad_lines == "skip")
    started = time.monotonic()
    with progress("reading", counts.bytes, "bytes") as step:
        chunks = read_log(files, options.query_column, options.encoding, bad, step.advance)
        write_distinct(
            chunks, counts, work.queries, work.scratch, shard=options.shard, ordered=not options.unordered
        )
    counts.skipped, counts.first_skipped, counts.left_out = bad.count, bad.first, dict(bad.left_out)
    counts.seconds = round(time.monotonic() - started, 3)
    with atomic_file(work.counts) as partial:
        partial.write_text(counts.model_dump_json())
    return counts


def _summary(options: ScoreOptions, plan: Plan, counts: LogCounts, tally: Tally) -> Summary:
    distinct, rows = max(counts.distinct, 1), max(counts.rows, 1)
    return Summary(
        output=str(options.output),
        files=0,
        shard=plan.shard,
        bundle_id=plan.bundle_id,
        rows=counts.rows,
        distinct=counts.distinct,
        empty=counts.empty,
        skipped=counts.skipped,
        left_out=sum(counts.left_out.values()),
        read_rows=counts.read,
        read_bytes=counts.bytes,
        read_seconds=counts.seconds,
        matches=tally.matches,
        exact=tally.exact,
        matched=tally.matched,
        unmatched=counts.distinct - tally.matched,
        coverage=round(100 * tally.matched / distinct, 3),
        traffic_coverage=round(100 * tally.matched_rows / rows, 3),
        matches_per_query=round(tally.matches / distinct, 3),
        score_quantiles=tally.quantiles(),
        first_score_quantiles=tally.quantiles(first_only=True),
        scored=0,
        seconds=0.0,
        scoring_seconds=0.0,
        queries_per_second=0.0,
    )
