"""Turns a trained model into a bundle."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import onnxruntime
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from bidmatch import __version__
from bidmatch.base.console import say
from bidmatch.base.errors import ConfigError
from bidmatch.base.files import atomic_dir, refuse_folder
from bidmatch.base.versions import versions_of
from export.blend import blend
from export.bundle.encoder import TextEncoder, make_session
from export.bundle.format import (
    ALL_FILES,
    ENCODER_FP32,
    ENCODER_INT8,
    MANIFEST,
    Counts,
    EncoderRecord,
    Manifest,
    Precision,
)
from export.bundle.milvus_client import MilvusAccess, connect
from export.bundle.weights import BlendRecord
from export.bundle.write import finish, write_phrases, write_tokenizer
from export.calibrate import DEPTH as CALIBRATED
from export.calibrate import calibration_for
from export.hnsw import LADDER, RecallTarget, TunedIndex, tune
from export.measure import measure, sample_of, texts_of
from export.milvus import LADDERS, MilvusLoader, MilvusTarget
from export.onnx_graph import OPSET, export_onnx
from export.quantise import choose, int8_instructions, processor, quantise, unjudged
from export.rescoring import Candidates, candidates_for
from export.source import ExportSource
from export.vectors import LabelVectors, check_parity, write_label_vectors

_CONNECT_S = 10.0
_PARITY_QUERIES = 1_000
# Beyond this, one thread would build for minutes; the graph of several threads is never twice the same.
_SERIAL_BUILD_UP_TO = 100_000
_PACKAGES = (
    "torch",
    "transformers",
    "onnx",
    "onnxruntime-gpu",
    "onnxruntime",
    "hnswlib",
    "tokenizers",
    "numpy",
)


class ExportOptions(BaseModel):
    """What an export is asked for.

    Attributes:
        target_recall: recall@k of exact search that the index must reach.
        recall_k: that k.
        quality_bound: points of P@1, P@5 and recall@10 that the quantised encoder may lose.
        threads: CPU threads; 0 for all cores.
        build_threads: threads of the index's build; 0 for one up to 100,000 phrases (then a repeated export
            gives the same index, byte for byte) and `threads` beyond.
        rescore: whether a run with wide heads gives a bundle that re-scores with them.
        half_weight: w_D of the score w_D cos_D + (2 - w_D) cos_C, of narrow and wide vectors alike; None to
            choose on the validation queries.
        candidates: phrases that are re-scored for a query, or its k where that is more; None to choose on the
            validation queries.
        milvus: where the index goes, if into Milvus; None for a file of the bundle.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_recall: float = Field(0.99, gt=0, le=1)
    recall_k: int = Field(100, ge=1)
    quality_bound: float = Field(0.5, ge=0)
    threads: int = Field(0, ge=0)
    build_threads: int = Field(0, ge=0)
    rescore: bool = True
    half_weight: float | None = Field(None, ge=0, le=2)
    candidates: int | None = Field(None, ge=1)
    milvus: MilvusTarget | None = None


def check_free(out: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that is taken before any work is done.

    Raises:
        BidmatchError: it exists, and is not to be overwritten or is no bundle.
    """
    refuse_folder(out, "bundle", _is_bundle, overwrite=overwrite)


def _is_bundle(folder: Path) -> bool:
    """Whether it holds a manifest and other files of a bundle, if damaged or not all, and nothing else."""
    return {MANIFEST} < {entry.name for entry in folder.iterdir()} <= ALL_FILES


@dataclass(frozen=True)
class _Encoders:
    record: EncoderRecord
    chosen: TextEncoder
    labels: LabelVectors
    blend: BlendRecord | None
    candidates: Candidates


def build_bundle(
    source: ExportSource, out: Path, options: ExportOptions, *, overwrite: bool = False
) -> Manifest:
    """Export a trained model to the bundle folder `out`, whole and verified or not at all.

    Args:
        source: the model, its phrases and held-out queries.
        out: the folder to make.
        options: see ExportOptions.
        overwrite: replace what is there.

    Raises:
        BidmatchError: `out` is taken (see `check_free`), ONNX does not compute what torch does, or Milvus
            failed.
        ConfigError: candidates are asked for, but there is nothing to re-score them with.
    """
    source = _as_asked(source, options)
    check_free(out, overwrite=overwrite)
    if source.record.not_in_index:
        say(f"not in the index: {source.record.not_in_index}")
    threads = options.threads or os.cpu_count() or 1
    if options.milvus is not None:
        # Whether it is there is better known before the work than after it.
        access = MilvusAccess()
        connect(access.uri or options.milvus.uri, access.token, _CONNECT_S)
    with atomic_dir(out, overwrite=overwrite) as folder:
        write_phrases(folder, source.phrases)
        write_tokenizer(folder, source.tokenizer.to_str())
        encoders = _make_encoders(folder, source, options, threads)
        loader = None
        if options.milvus is not None:
            loader = MilvusLoader(folder, encoders.labels.narrow, options.milvus, MilvusAccess())
        tuned = _make_index(source, encoders, options, threads, loader)
        if loader is None:
            tuned.index.save(folder)
        quality, rescore = measure(
            folder, source, encoders.chosen, encoders.labels, encoders.candidates, tuned.index, threads
        )
        calibration = calibration_for(
            source.validation.take(sample_of(len(source.validation), len(encoders.labels.narrow))),
            encoders.chosen,
            encoders.labels,
            encoders.candidates.depth(CALIBRATED),
            tuned.index,
            threads,
        )
        manifest = finish(
            folder,
            {
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "model": source.record,
                "dim": source.dim,
                "encoder_dim": source.widths[0][0],
                "metric": "ip",
                "blend": encoders.blend,
                "counts": Counts(
                    phrases=source.phrases.num_rows,
                    train_queries=source.train_queries,
                    validation_queries=len(source.validation),
                    test_queries=source.test_queries,
                ),
                "encoder": encoders.record,
                "index": tuned.record,
                "milvus": None if options.milvus is None else options.milvus.record,
                "rescore": rescore,
                "data": source.data,
                "quality": quality,
                "calibration": calibration,
                "measured_on": {
                    "processor": processor(),
                    "int8_instructions": int8_instructions(),
                    "cores": str(os.cpu_count()),
                    "system": f"{platform.system()} {platform.machine()}",
                },
                "versions": _versions(),
                "licences": source.licences,
            },
        )
    if loader is not None:
        # What the alias leads to is whole, and the bundle of its rows is there.
        loader.flip()
    say(
        f"bundle {manifest.bundle_id}: {manifest.counts.phrases:,} phrases x {manifest.dim}, written to {out}"
    )
    return manifest


def _as_asked(source: ExportSource, options: ExportOptions) -> ExportSource:
    """The source without its wide heads where they are not wanted."""
    if options.candidates is not None and (source.wide_table is None or not options.rescore):
        why = "the run has no wide heads" if options.rescore else "nothing is to be re-scored"
        raise ConfigError(
            f"{options.candidates} candidates are asked for, but {why}",
            hint="Leave --candidates out; `bidmatch train --set wide_dim=512` trains wide heads.",
        )
    return source if options.rescore else replace(source, wide_table=None)


def _make_encoders(folder: Path, source: ExportSource, options: ExportOptions, threads: int) -> _Encoders:
    fp32, int8 = folder / ENCODER_FP32, folder / ENCODER_INT8
    say("writing the encoder as ONNX")
    export_onnx(source.model, fp32, len(source.widths))
    tokenizer = Tokenizer.from_str(source.tokenizer.to_str())
    tokenizer.no_padding()

    def load(file: Path, count: int) -> TextEncoder:
        session = make_session(file.read_bytes(), threads=count)
        return TextEncoder(session, tokenizer, source.dim, source.wide_dim)

    exact = load(fp32, 1)
    queries, kind = texts_of(source)
    parity = check_parity(source.model, exact, queries[:_PARITY_QUERIES])
    say(
        f"ONNX (opset {OPSET}) against torch on {parity.queries:,} {kind}: "
        f"cosine at least {parity.min_cosine:.8f}, mean {parity.mean_cosine:.8f}"
    )
    labels, weights = blend(
        write_label_vectors(folder, source, load(fp32, threads)),
        source.widths[0][0],
        source.validation,
        exact,
        options.half_weight,
    )
    sample = source.validation.take(sample_of(len(source.validation), len(labels.narrow)))
    rescored = candidates_for(sample, exact, labels, options.candidates)
    if not len(source.validation):
        say("no validation queries were kept, so the quantised encoder cannot be judged: fp32 serves")
        chosen, candidates = exact, [unjudged(fp32, exact, queries)]
    else:
        say(f"quantising the encoder (8-bit instructions here: {int8_instructions()})")
        # The three small products of `bag` have no measurable time to gain, and its vectors then depend on
        # the text alone, not on the batch.
        operators = quantise(fp32, int8, products=source.record.kind != "bag")
        small = load(int8, 1)
        entries: list[tuple[Precision, list[str], Path, TextEncoder]] = [
            ("fp32", [], fp32, exact),
            ("int8", operators, int8, small),
        ]
        candidates = choose(entries, sample, labels, rescored.depth(10), options.quality_bound)
        chosen = small if candidates[1].chosen else exact
        if not candidates[1].chosen:
            int8.unlink()
    precision: Precision = "fp32" if chosen is exact else "int8"
    record = EncoderRecord(
        file=ENCODER_FP32 if precision == "fp32" else ENCODER_INT8,
        precision=precision,
        opset=OPSET,
        max_tokens=(tokenizer.truncation or {}).get("max_length"),
        parity=parity,
        quality_bound=options.quality_bound,
        candidates=candidates,
    )
    return _Encoders(record, chosen, labels, weights, rescored)


def _make_index(
    source: ExportSource,
    encoders: _Encoders,
    options: ExportOptions,
    threads: int,
    loader: MilvusLoader | None,
) -> TunedIndex:
    texts, kind = texts_of(source)
    vectors = encoders.labels.narrow
    queries = encoders.chosen.encode([texts[row] for row in sample_of(len(texts), len(vectors))])
    target = RecallTarget(options.target_recall, options.recall_k, encoders.candidates.count)
    if loader is not None and options.milvus is not None:
        ladder = LADDERS[options.milvus.index_type] or LADDER
        return tune(
            vectors,
            queries.narrow,
            kind,
            target,
            threads=threads,
            build_threads=1,
            ladder=ladder,
            build=loader.build,
        )
    serial = len(vectors) <= _SERIAL_BUILD_UP_TO
    build_threads = options.build_threads or (1 if serial else threads)
    if build_threads > 1:
        say(f"{build_threads} threads build the index: its graph depends on their timing (--build-threads 1)")
    return tune(vectors, queries.narrow, kind, target, threads=threads, build_threads=build_threads)


def _versions() -> dict[str, str]:
    found = {"bidmatch": __version__} | versions_of(_PACKAGES)
    found.setdefault("onnxruntime", onnxruntime.__version__)
    return found
