"""A scoring run: read, find the distinct queries, score them, write the output. Resumable at any point."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bidmatch.base.console import Step, progress, say
from bidmatch.base.errors import BidmatchError, ConfigError
from bidmatch.base.files import atomic_file, refuse_inside
from bidmatch.base.input_files import Source
from export.bundle.read import read_manifest
from service.engine import Engine, EngineSettings
from service.scoring.distinct import PART_QUERIES, LogCounts, write_distinct
from service.scoring.layout import recognise
from service.scoring.output import Summary, Tally, output_kind, write_output
from service.scoring.parts import result_schema, score_parts
from service.scoring.queries import BadLines, read_queries
from service.scoring.source import find_files, open_log
from service.scoring.work import InputRecord, Plan, Work, open_work

_Sources = list[tuple[Path, Source | None]]


class ScoreOptions(BaseModel):
    """What to score, and how.

    Attributes:
        bundle: bundle folder.
        inputs: query logs, or folders of them.
        output: file to write; its name says the format.
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
        restart: throw an unfinished run's work away.
        overwrite: replace an output that is there.
    """

    model_config = ConfigDict(frozen=True)

    bundle: Path
    inputs: list[Path] = Field(min_length=1)
    output: Path
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
    restart: bool = False
    overwrite: bool = False


def score_log(options: ScoreOptions) -> Summary:
    """Score a query log. The output appears when it is whole; a run that was stopped is gone on with.

    The output has a row for each match, by query in the order of first appearance, then by rank: `query` as
    first spelled, `count` of the log's rows with its key, `rank` from 1, phrase `id` and `phrase`, `score`,
    its parts `encoder` and `classifier`, `relevance` (null where the bundle has no calibration), and
    `source`, "exact" or "index". It is the same whatever `threads`
    is and however often the run was stopped. Memory does not grow with the log.

    Raises:
        InputError: an input is missing, damaged or has a bad line.
        ConfigError: an option is wrong, or an unfinished run had other ones.
        DamagedError: the bundle is not sound.
        BidmatchError: the output exists, another run writes it, or the disk is full.
    """
    started = time.monotonic()
    if options.output.is_dir():
        raise ConfigError(f"{options.output} is a folder", hint="Name the file to write.")
    if options.min_score is not None and not math.isfinite(options.min_score):
        raise ConfigError(f"a least score of {options.min_score} says nothing", hint="Scores are in -2 to 2.")
    kind = output_kind(options.output)
    files = [file for path in options.inputs for file in find_files(path)]
    if options.output.exists() and any(file.exists() and file.samefile(options.output) for file in files):
        raise ConfigError(f"{options.output} is the input", hint="Name another file to write.")
    sources = [(file, open_log(file)) for file in files]
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
        output_kind=kind,
    )
    try:
        with open_work(options.output, plan, restart=options.restart, overwrite=options.overwrite) as work:
            summary = work.finished()
            if summary is not None:
                work.move_out()
                return Summary.model_validate_json(summary)
            return _run(options, plan, sources, work, started)
    except OSError as problem:
        where = f" ({problem.filename})" if problem.filename else ""
        raise BidmatchError(
            f"stopped: {problem.strerror or problem}{where}",
            hint="What was done so far is kept; the same command goes on with it.",
        ) from problem


def _run(options: ScoreOptions, plan: Plan, sources: _Sources, work: Work, started: float) -> Summary:
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
    counts = _distinct(options, sources, work)
    say(f"{counts.rows:,} queries, {counts.distinct:,} distinct, {counts.empty:,} empty")
    if counts.skipped:
        say(f"{counts.skipped:,} bad lines skipped (first: {counts.first_skipped})")
    scoring = time.monotonic()
    scored = score_parts(engine, work, counts.distinct, options.k, least, options.threads)
    scoring = time.monotonic() - scoring
    about = {"bundle_id": plan.bundle_id, "k": str(plan.k), "min_score": str(plan.min_score)}
    about["min_relevance"] = str(plan.min_relevance)
    with work.writing() as path, progress("writing", counts.distinct, "queries") as step:
        kind, schema = output_kind(options.output), result_schema(engine)
        tally = write_output(_parts(work, counts, step), path, kind, schema, about)
    summary = _summary(options, plan, counts, tally).model_copy(
        update={
            "scored": scored,
            "seconds": round(time.monotonic() - started, 3),
            "scoring_seconds": round(scoring, 3),
            "queries_per_second": round(scored / max(scoring, 1e-9), 1),
        }
    )
    work.seal(summary.model_dump_json())
    work.move_out()
    return summary


def _distinct(options: ScoreOptions, sources: _Sources, work: Work) -> LogCounts:
    """The counts of the log, read now or by the run before; the distinct queries are in the work folder."""
    if work.counts.exists():
        return LogCounts.model_validate_json(work.counts.read_text())
    counts = LogCounts()
    bad = BadLines(options.bad_lines == "skip")
    with progress("reading", sum(file.stat().st_size for file, _ in sources), "bytes") as step:
        chunks = _chunks(options, sources, bad, step)
        write_distinct(chunks, counts, work.queries, work.scratch)
    counts.skipped, counts.first_skipped = bad.count, bad.first
    with atomic_file(work.counts) as partial:
        partial.write_text(counts.model_dump_json())
    return counts


def _chunks(options: ScoreOptions, sources: _Sources, bad: BadLines, step: Step) -> Iterator[list[str]]:
    for file, source in sources:
        if source is None:
            say(f"{file}: empty")
            continue
        layout = recognise(source, options.query_column, options.encoding)
        say(f"{file}: {layout.name}, queries in {layout.column!r}")
        yield from read_queries(source, layout, bad, step.advance)


def _parts(work: Work, counts: LogCounts, step: Step) -> Iterator[Path]:
    for number, start in enumerate(range(0, counts.distinct, PART_QUERIES)):
        yield work.part(number)
        step.advance(min(PART_QUERIES, counts.distinct - start))


def _summary(options: ScoreOptions, plan: Plan, counts: LogCounts, tally: Tally) -> Summary:
    distinct, rows = max(counts.distinct, 1), max(counts.rows, 1)
    return Summary(
        output=str(options.output),
        bundle_id=plan.bundle_id,
        rows=counts.rows,
        distinct=counts.distinct,
        empty=counts.empty,
        skipped=counts.skipped,
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
