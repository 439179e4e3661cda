"""The 8-bit encoder for CPUs: made, measured beside fp32, and taken only where it loses little enough."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from bidmatch.base.console import say
from export.bundle.encoder import QueryVectors, TextEncoder
from export.bundle.format import Candidate, Precision
from export.rescoring import served_exactly
from export.vectors import LabelVectors
from trainer.data.dataset import Interactions
from trainer.metrics import evaluate_ranking, most_filtered, without_filtered

JUDGED = ("P@1", "P@5", "recall@10")
_INT8_INSTRUCTIONS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "avx2")
_LEAST_WORDS = 1_000  # smaller tables, such as those of positions, stay as they are
_TIMED_QUERIES = 500
_TIMED_BATCH = 32


def quantise(fp32: Path, int8: Path, *, products: bool) -> list[str]:
    """Write an encoder with 8-bit weights.

    Word vectors get a scale a word. Products with 8-bit weights, where asked for, get a scale a channel and
    use 7 of the 8 bits: without VNNI, processors add pairs of 8-bit products in 16 bits and saturate, so full
    range would be right on one machine and wrong on the next. They quantise their input as it comes, with one
    scale a batch, so a query's vector then depends a little on its neighbours in the batch.

    Args:
        fp32: the encoder.
        int8: written.
        products: quantise matrix products, too.

    Returns:
        The operator types that were quantised.
    """
    model = onnx.load(str(fp32))
    operators = ["Gather"] if quantise_word_vectors(model) else []
    onnx.save(model, str(int8))
    if not products:
        return operators
    level = logging.root.level
    logging.root.setLevel(logging.ERROR)  # the quantiser warns through the root logger on every file
    try:
        quantize_dynamic(
            model,
            str(int8),
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        logging.root.setLevel(level)
    made = {node.op_type for node in onnx.load(str(int8)).graph.node}
    return operators + (["MatMul"] if "MatMulInteger" in made else [])


def quantise_word_vectors(model: onnx.ModelProto) -> int:
    """Replace, in place, each large table that is gathered from by int8 rows and a float32 scale a row.

    A value x of row r becomes round(x / s_r) in -127..127, s_r the row's largest magnitude / 127.

    Returns:
        How many tables were replaced.
    """
    graph = model.graph
    tables = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    replaced: set[str] = set()
    for node in graph.node:
        table = tables.get(node.input[0]) if node.op_type == "Gather" else None
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if table is None or axis != 0 or len(table.dims) != 2 or table.dims[0] < _LEAST_WORDS:
            nodes.append(node)
            continue
        name, out = table.name, node.output[0]
        if name not in replaced:
            replaced.add(name)
            graph.initializer.extend(_int8_rows(name, onnx.numpy_helper.to_array(table)))
        nodes += [
            helper.make_node("Gather", [f"{name}_int8", node.input[1]], [f"{out}_int8"], f"{node.name}_rows"),
            helper.make_node(
                "Gather", [f"{name}_scale", node.input[1]], [f"{out}_scale"], f"{node.name}_scales"
            ),
            helper.make_node(
                "Cast", [f"{out}_int8"], [f"{out}_float"], f"{node.name}_cast", to=onnx.TensorProto.FLOAT
            ),
            helper.make_node("Mul", [f"{out}_float", f"{out}_scale"], [out], f"{node.name}_scaled"),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    still_used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in still_used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    onnx.checker.check_model(model, full_check=True)
    return len(replaced)


def _int8_rows(name: str, table: np.ndarray) -> list[onnx.TensorProto]:
    scale = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-30) / 127
    rows = np.rint(table / scale).astype(np.int8)
    return [
        onnx.numpy_helper.from_array(rows, f"{name}_int8"),
        onnx.numpy_helper.from_array(scale.astype(np.float32), f"{name}_scale"),
    ]


def int8_instructions() -> str:
    """Which 8-bit instructions this processor has, best first; `none known` where it cannot be told."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "none known"
    flags = set(text.split())
    return " ".join(name for name in _INT8_INSTRUCTIONS if name in flags) or "none known"


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measure_quality(
    queries: QueryVectors, labels: LabelVectors, validation: Interactions, depth: int
) -> dict[str, float]:
    """P@1, P@5 and recall@10 in percent of what is served, but by exact search.

    Args:
        queries: of n texts.
        labels: of L phrases.
        validation: the texts and their labels.
        depth: phrases searched for and, where the bundle does that, re-scored, at least 10.
    """
    more = most_filtered(validation.filtered)
    rows = served_exactly(queries, labels, depth + more, "exact search")
    rows = without_filtered(rows, validation.filtered, depth)
    found = evaluate_ranking(rows, validation.clicks, ks=(1, 5), recall_ks=(10,))
    return {name: round(float(found[name]), 4) for name in JUDGED}


def milliseconds_per_query(encoder: TextEncoder, texts: Sequence[str], batch: int) -> float:
    """Mean time of the encoder a query, tokens at hand, `batch` queries a call."""
    calls = [encoder.tokenise(texts[start : start + batch]) for start in range(0, len(texts), batch)]
    encoder.run(*calls[0])
    started = time.perf_counter()
    for ids, mask in calls:
        encoder.run(ids, mask)
    return (time.perf_counter() - started) * 1e3 / len(texts)


def verdict(fp32: Candidate, int8: Candidate, bound: float) -> tuple[bool, str]:
    """Whether the quantised encoder is to serve, and why.

    It must lose at most `bound` points of each of P@1, P@5 and recall@10, and be smaller or faster.
    """
    worst = max(int8.loss, key=lambda name: int8.loss[name])
    if int8.loss[worst] > bound:
        return False, f"loses {int8.loss[worst]:.2f} points of {worst}, more than the bound of {bound:g}"
    smaller, faster = int8.bytes < fp32.bytes, int8.ms_per_query < fp32.ms_per_query
    if not smaller and not faster:
        return False, "neither smaller nor faster"
    gains = " and ".join(word for word, holds in (("smaller", smaller), ("faster", faster)) if holds)
    return True, f"{gains}, and loses at most {max(0.0, int8.loss[worst]):.2f} points (bound {bound:g})"


def _speeds(encoder: TextEncoder, texts: Sequence[str]) -> dict[str, float]:
    """The speeds of a `Candidate` on the first of these texts."""
    timed = texts[:_TIMED_QUERIES]
    return {
        "ms_per_query": round(milliseconds_per_query(encoder, timed, 1), 4),
        "ms_per_query_batched": round(milliseconds_per_query(encoder, timed, _TIMED_BATCH), 4),
    }


def unjudged(file: Path, encoder: TextEncoder, texts: Sequence[str]) -> Candidate:
    """The fp32 encoder, alone where no query is left to judge another on; timed on other texts."""
    return Candidate(
        precision="fp32",
        quantised_ops=[],
        bytes=file.stat().st_size,
        quality={},
        loss={},
        **_speeds(encoder, texts),
        chosen=True,
        reason="there are no validation queries to judge another on",
    )


def choose(
    candidates: Sequence[tuple[Precision, list[str], Path, TextEncoder]],
    validation: Interactions,
    labels: LabelVectors,
    depth: int,
    bound: float,
) -> list[Candidate]:
    """Measure the fp32 and the quantised encoder on held-out queries and choose between them, aloud.

    Args:
        candidates: fp32 first: precision, quantised operators, file, encoder.
        validation: queries and their labels, at least one; encoded in batches of 256 as in offline scoring,
            where one scale serves the most texts and so is coarsest.
        labels: label vectors, made with fp32.
        depth: phrases searched for and, where the bundle does that, re-scored, at least 10.
        bound: points that may be lost.
    """
    texts = validation.queries.to_pylist()
    records: list[Candidate] = []
    for precision, operators, file, encoder in candidates:
        quality = measure_quality(encoder.encode(texts), labels, validation, depth)
        base = records[0].quality if records else quality
        records.append(
            Candidate(
                precision=precision,
                quantised_ops=operators,
                bytes=file.stat().st_size,
                quality=quality,
                loss={name: round(base[name] - quality[name], 4) for name in JUDGED},
                **_speeds(encoder, texts),
                chosen=False,
                reason="",
            )
        )
    fp32, int8 = records
    taken, reason = verdict(fp32, int8, bound)
    for record in records:
        say(
            f"  {record.precision}: "
            + ", ".join(f"{name} {record.quality[name]:.2f}" for name in JUDGED)
            + f"; {record.bytes / 1e6:.1f} MB; {record.ms_per_query:.3f} ms a query, "
            f"{record.ms_per_query_batched:.3f} in batches of {_TIMED_BATCH}, one thread"
        )
    say(f"int8 encoder {'chosen' if taken else 'NOT chosen'} on {len(texts):,} validation queries: {reason}")
    kept = "the quantised one was not taken: " + reason if not taken else "kept for GPUs and for reference"
    return [
        fp32.model_copy(update={"chosen": not taken, "reason": kept}),
        int8.model_copy(update={"chosen": taken, "reason": reason}),
    ]
