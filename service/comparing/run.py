"""A comparison: read the log, ask both sides part by part, sum up."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from bidmatch.base.console import progress
from bidmatch.base.errors import ConfigError
from bidmatch.base.files import atomic_file, shown
from service.comparing.answers import no_answers, pair
from service.comparing.changes import change_schema, change_table, check_output
from service.comparing.examples import TopExamples
from service.comparing.figures import Sums
from service.comparing.given import FileSide
from service.comparing.identity import tell_apart
from service.comparing.phrases import PhraseChanges, changes_of, top_changes
from service.comparing.records import CompareOptions, Comparison
from service.comparing.sides import BundleSide, Side, is_bundle
from service.engine import Engine
from service.memory import give_back
from service.scoring.distinct import PART_QUERIES, LogCounts, write_distinct
from service.scoring.layout import recognise
from service.scoring.parts import each_part
from service.scoring.queries import BadLines, read_log
from service.scoring.source import find_inputs, open_log, refuse_among
from service.scoring.writers import OutputFormat, Write, writer


@dataclass(frozen=True)
class _Part:
    """What a part of the log comes to; `phrases` and `changes` are None where they are not asked for."""

    queries: int
    sums: Sums
    examples: TopExamples
    phrases: pa.Table | None
    changes: pa.Table | None


def compare(options: CompareOptions) -> Comparison:
    """Hold the answers of A and B to a log's queries against each other. Memory does not grow with the log,
    nor with files of matches; both go through scratch files.

    Raises:
        ConfigError: an option cannot be used, or nothing tells which phrases are the same.
        InputError: a log or a file of matches is missing, damaged or has a bad line.
        DamagedError: a bundle is not sound.
        BidmatchError: the output is there already, or inside a bundle.
    """
    if options.min_score is not None and not math.isfinite(options.min_score):
        raise ConfigError(f"a least score of {options.min_score} says nothing", hint="Scores are in -2 to 2.")
    logs = find_inputs(options.logs)
    for file in logs:
        # What cannot be read is better known before the bundles are loaded.
        source = open_log(file)
        if source is not None:
            recognise(source, options.query_column, options.encoding)
    with tempfile.TemporaryDirectory(prefix="bidmatch-diff-") as folder:
        scratch = Path(folder)
        files = {
            path: FileSide(path, scratch / f"given{at}")
            for at, path in enumerate(dict.fromkeys((options.a, options.b)))
            if not is_bundle(path)
        }
        form = _output_form(options, logs, list(files.values()))
        bundles = {
            path: BundleSide(path, Engine.load(path))
            for path in dict.fromkeys((options.a, options.b))
            if path not in files
        }
        return _compare(options, logs, files | bundles, form, scratch)


def _output_form(options: CompareOptions, logs: list[Path], files: list[FileSide]) -> OutputFormat | None:
    if options.output is None:
        return None
    refuse_among(options.output, [*options.logs, *(side.path for side in files)])
    inputs = [*logs, *(file for side in files for file in side.files)]
    bundles = [path for path in (options.a, options.b) if is_bundle(path)]
    return check_output(options.output, inputs, bundles, overwrite=options.overwrite)


def _compare(
    options: CompareOptions,
    logs: list[Path],
    sides: dict[Path, BundleSide | FileSide],
    form: OutputFormat | None,
    scratch: Path,
) -> Comparison:
    a, b = sides[options.a], sides[options.b]
    files = [side for side in sides.values() if isinstance(side, FileSide)]
    bundles = [side for side in sides.values() if isinstance(side, BundleSide)]
    counts, bad = LogCounts(), BadLines(skip=options.bad_lines == "skip")
    queries = scratch / "queries.arrow"
    with progress("reading", sum(file.stat().st_size for file in logs), "bytes") as step:
        chunks = read_log(logs, options.query_column, options.encoding, bad, step.advance)
        write_distinct(chunks, counts, queries, scratch / "work")
    if files:
        with progress("reading matches", sum(side.bytes for side in files), "bytes") as step:
            for side in files:
                side.read(bad, step.advance)
    identity = tell_apart(a, b, options.by)
    comparable = _incomparable(a, b) is None
    for side in files:
        side.look_up(queries, identity.by, options.k)
    for bundle in bundles:
        bundle.ask(identity.by, options.k, options.min_score, compared=comparable)
    sums, examples, phrases = _sum_up(options, a, b, queries, counts.distinct, form, scratch)
    ids = _bundle_id(a), _bundle_id(b)
    return Comparison(
        a=shown(options.a),
        b=shown(options.b),
        bundle_a=ids[0],
        bundle_b=ids[1],
        same_bundle=ids[0] is not None and ids[0] == ids[1],
        scores_comparable=comparable,
        by=identity.by,
        k=options.k,
        min_score=options.min_score,
        notes=[*_notes(options, a, b), *identity.notes],
        rows=counts.rows,
        empty=counts.empty,
        skipped=bad.count,
        queries=sums.once,
        traffic=sums.traffic,
        examples=examples.examples(),
        phrases=phrases,
        output=None if options.output is None else str(options.output),
    )


def _sum_up(
    options: CompareOptions,
    a: Side,
    b: Side,
    queries: Path,
    distinct: int,
    form: OutputFormat | None,
    scratch: Path,
) -> tuple[Sums, TopExamples, PhraseChanges]:
    """What all parts of the log come to; the output is written on the way."""
    schema = None if form is None else change_schema(form)
    about = {"a": str(a.path), "b": str(b.path), "k": str(options.k), "min_score": str(options.min_score)}
    nothing = pair(no_answers(), no_answers(), 0)
    none = np.zeros(0, np.int64)
    sums, examples = Sums(nothing, none), TopExamples(nothing, [], none, 0, options.examples)

    def part(number: int, batch: pa.RecordBatch) -> _Part:
        texts, often = batch.column("query").to_pylist(), batch.column("count").to_numpy()
        both = pair(a.answers(number, texts), b.answers(number, texts), len(texts))
        return _Part(
            len(texts),
            Sums(both, often),
            TopExamples(both, texts, often, number * PART_QUERIES, options.examples),
            changes_of(both, often) if options.examples else None,
            None if schema is None else change_table(both, batch, schema),
        )

    def phrase_tables(write: Write | None) -> Iterator[pa.Table]:
        with progress("comparing", distinct, "queries") as step:
            for done in each_part(queries, None, options.threads, part):
                sums.add(done.sums)
                examples.add(done.examples)
                if write is not None:
                    write(done.changes)
                step.advance(done.queries)
                if done.phrases is not None:
                    yield done.phrases
                give_back()

    with ExitStack() as stack:
        write = None
        if options.output is not None and form is not None and schema is not None:
            partial = stack.enter_context(atomic_file(options.output))
            write = stack.enter_context(writer(partial, form, schema, about))
        phrases = top_changes(phrase_tables(write), scratch / "phrases", options.examples)
    return sums, examples, phrases


def _bundle_id(side: BundleSide | FileSide) -> str | None:
    return side.engine.bundle_id if isinstance(side, BundleSide) else None


def _incomparable(a: BundleSide | FileSide, b: BundleSide | FileSide) -> str | None:
    """Why scores of A and B are not comparable; None: they are."""
    if isinstance(a, FileSide) or isinstance(b, FileSide):
        return "scores are not compared: a file's may be on another scale than a bundle's"
    if a.engine.bundle.manifest.model.id != b.engine.bundle.manifest.model.id:
        return "scores are not compared: A and B are of different models"
    if bool(a.engine.candidates) != bool(b.engine.candidates):
        return "scores are not compared: only one of A and B re-scores with wide vectors"
    return None


def _notes(options: CompareOptions, a: BundleSide | FileSide, b: BundleSide | FileSide) -> list[str]:
    notes = []
    if a is b or (_bundle_id(a) is not None and _bundle_id(a) == _bundle_id(b)):
        notes.append(f"A and B are the same {'file' if isinstance(a, FileSide) else 'bundle'}")
    files = [side for side in (a, b) if isinstance(side, FileSide)]
    notes += [f"no match in {side.path} is of a query of the log" for side in files if not side.known]
    if files and options.min_score is not None:
        notes.append("the least score counts for bundles alone, not for files of matches")
    reason = _incomparable(a, b)
    return notes if reason is None else [*notes, reason]
