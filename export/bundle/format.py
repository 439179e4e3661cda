"""The manifest of a bundle, and the names of the files it speaks of.

A bundle is an immutable folder: `manifest.json`, `encoder.onnx` (and `encoder.int8.onnx` where quantisation
was chosen), `tokenizer.json`, `vectors.npy`, the index over these (`links.npy` and `upper.npy`, the HNSW
graph at level 0 and above; `codes.npy` and `steps.npy`, the vectors in 8 bits), `phrases.arrow`, the tables
that find phrases by id, key and words (`ids.npy`, `keys.npy`, `runs.npy`), where the index's results are
re-scored with wider vectors also `wide.npy` and `wide_scales.npy`, and nothing else. Where Milvus holds the
index its four files are not there.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from export.bundle.relevance import CalibrationRecord
from export.bundle.strict import Record as _Record
from export.bundle.weights import BlendRecord

FORMAT_VERSION = 4
MANIFEST = "manifest.json"
ENCODER_FP32: Final = "encoder.onnx"
ENCODER_INT8: Final = "encoder.int8.onnx"
TOKENIZER = "tokenizer.json"
LINKS = "links.npy"
UPPER = "upper.npy"
CODES = "codes.npy"
STEPS = "steps.npy"
VECTORS = "vectors.npy"
WIDE = "wide.npy"
WIDE_SCALES = "wide_scales.npy"
PHRASES = "phrases.arrow"
IDS = "ids.npy"
KEYS = "keys.npy"
RUNS = "runs.npy"
LOOKUPS = (IDS, KEYS, RUNS)
INDEX_FILES = frozenset({LINKS, UPPER, CODES, STEPS})
REQUIRED_FILES = frozenset({ENCODER_FP32, TOKENIZER, VECTORS, PHRASES, *LOOKUPS}) | INDEX_FILES
WIDE_FILES = frozenset({WIDE, WIDE_SCALES})
ALL_FILES = REQUIRED_FILES | WIDE_FILES | {MANIFEST, ENCODER_INT8}

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
EMBEDDING = "embedding"
WIDE_EMBEDDING = "wide"

Precision = Literal["fp32", "int8"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Metrics = dict[str, float]

_CHECKSUM_BLANK = b"0" * 64


class FileRecord(_Record):
    """What a file of the bundle must be, byte for byte."""

    sha256: Sha256
    bytes: Count


class ModelRecord(_Record):
    """The model that was exported.

    Attributes:
        id: the checkpoint's model id.
        kind: encoder kind, `bag` or `transformer`.
        name: where the encoder's weights started from.
        config: the training run's full configuration.
        not_in_index: what the trained classifier does that an index of one vector a phrase cannot reproduce,
            in words; None where it loses nothing.
    """

    id: str
    kind: str
    name: str
    config: dict[str, Any]
    not_in_index: str | None = None


class Counts(_Record):
    """Sizes of what the bundle was made from; `phrases` is L."""

    phrases: Annotated[int, Field(ge=1)]
    train_queries: Count
    validation_queries: Count
    test_queries: Count


class Parity(_Record):
    """Cosine of ONNX's vectors with torch's, the least of their parts (Φ_D, Φ_C), over `queries` queries."""

    queries: Count
    min_cosine: float
    mean_cosine: float


class Candidate(_Record):
    """One encoder that was considered.

    Attributes:
        precision: its precision.
        quantised_ops: ONNX operator types whose weights are in 8 bits; empty for fp32.
        bytes: size of its file.
        quality: P@1, P@5, recall@10 in percent on the validation queries, by exact search, re-scored where
            the bundle re-scores.
        loss: points of each that it is below fp32 (negative where it is above).
        ms_per_query: mean milliseconds of the encoder alone (tokens are there), one query a call, one thread.
        ms_per_query_batched: the same, 32 queries a call.
        chosen: whether this is what serves on a CPU.
        reason: why, or why not.
    """

    precision: Precision
    quantised_ops: list[str]
    bytes: Count
    quality: Metrics
    loss: Metrics
    ms_per_query: float
    ms_per_query_batched: float
    chosen: bool
    reason: str


class EncoderRecord(_Record):
    """The ONNX encoder: `input_ids`, `attention_mask` int64 (n, t) in, `embedding` float32 (n, dim) out.

    Where the bundle re-scores, also `wide` float32 (n, rescore.dim) out.
    """

    file: Literal["encoder.onnx", "encoder.int8.onnx"]
    precision: Precision
    opset: Annotated[int, Field(ge=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None
    parity: Parity
    quality_bound: float
    candidates: list[Candidate]


class CurvePoint(_Record):
    """Recall of exact search's top k, and time of one query on one thread, at one setting of the index."""

    M: Annotated[int, Field(ge=2)]
    ef_construction: Annotated[int, Field(ge=1)]
    ef: Annotated[int, Field(ge=1)]
    recall: float
    mean_us: float
    p99_us: float


class IndexRecord(_Record):
    """The HNSW index and how its parameters were chosen.

    Attributes:
        M: links a node.
        ef_construction: width of the search at build time.
        ef: width of the search when serving.
        k: the k of recall@k (asked for, or the number of phrases where that is less).
        results: results that a search asks for: k, or the candidates of re-scoring where they are more.
        target_recall: recall@k asked for.
        recall: recall@k reached with `ef`.
        reached: whether that is the target.
        queries: how many queries it was measured on.
        query_source: `validation queries`, or `phrases` where the run kept none.
        seed: seed of the levels.
        build_threads: threads of the build; with more than one the graph depends on their timing.
        build_seconds: wall time of the last build.
        curve: every setting tried.
    """

    M: Annotated[int, Field(ge=2)]
    ef_construction: Annotated[int, Field(ge=1)]
    ef: Annotated[int, Field(ge=1)]
    k: Annotated[int, Field(ge=1)]
    results: Annotated[int, Field(ge=1)]
    target_recall: float
    recall: float
    reached: bool
    queries: Count
    query_source: str
    seed: int
    build_threads: Annotated[int, Field(ge=1)]
    build_seconds: float
    curve: list[CurvePoint]


MilvusIndexType = Literal["HNSW", "DISKANN", "AUTOINDEX", "FLAT"]


class MilvusRecord(_Record):
    """Where the index is that a bundle has in Milvus, instead of in files.

    Attributes:
        uri: of the deployment, without credentials; `BIDMATCH_MILVUS_URI` overrides it.
        alias: what was made to lead to the collection when the bundle was exported.
        index_type: the kind of Milvus' index.
    """

    uri: str
    alias: str
    index_type: MilvusIndexType


def collection_of(vectors_sha256: str) -> str:
    """Name of the Milvus collection that holds `vectors.npy` of this SHA-256, by row.

    By the vectors, not by the alias, which may lead to those of a later bundle, whose rows are others.
    """
    return f"bidmatch_{vectors_sha256[:16]}"


def depth_of(k: int, candidates: int, per_match: int) -> int:
    """How many phrases are searched for, and re-scored, for a query that asks for k (see RescoreRecord)."""
    return max(candidates, per_match * k)


class RescorePoint(_Record):
    """What re-scoring brings and costs with this many candidates.

    Attributes:
        candidates: phrases that exact search by the narrow vectors gives, then ordered by the wide ones.
        quality: P@1, P@5, recall@10 and recall@100 in percent on the validation queries, by the fp32 encoder;
            recall@100 with at least 100 candidates.
        microseconds: mean time of re-scoring them for one query, one thread.
    """

    candidates: Annotated[int, Field(ge=1)]
    quality: Metrics
    microseconds: float


class RescoreRecord(_Record):
    """Search narrow, rank wide: the index's best phrases are ordered by wider vectors, kept in 8 bits.

    Attributes:
        dim: width of the wide vectors.
        encoder_dim: how much of it is Φ_D's, from the left; the rest is Φ_C's.
        candidates: phrases that are re-scored for a query, unless its k asks for more.
        per_match: phrases that are re-scored for each of the k asked for, where that makes more.
        bytes: size of `wide.npy` and `wide_scales.npy` together.
        microseconds: mean time of re-scoring that many for one query, one thread.
        queries: validation queries that quality was measured on; 0 where the run kept none.
        narrow: P@1, P@5, recall@10 (of requests for 10) and recall@100 (of requests for 100) in percent by
            the narrow vectors, through the index, with the encoder that serves.
        rescored: the same after re-scoring.
        curve: every number of candidates tried.
        reason: why these two numbers were chosen.
    """

    dim: Annotated[int, Field(ge=1)]
    encoder_dim: Count
    candidates: Annotated[int, Field(ge=1)]
    per_match: Annotated[int, Field(ge=1)]
    bytes: Count
    microseconds: float
    queries: Count
    narrow: Metrics
    rescored: Metrics
    curve: list[RescorePoint]
    reason: str

    def depth(self, k: int) -> int:
        """How many phrases are searched for, and re-scored, for a query that asks for k."""
        return depth_of(k, self.candidates, self.per_match)


class SplitInfo(_Record):
    """How the held-out queries were chosen (see `trainer.data.dataset.SplitRecord`)."""

    kind: str
    share: float
    seed: int
    train_queries: Count
    test_queries: Count


class DataRecord(_Record):
    """The data the model was trained on."""

    fingerprint: str
    split: SplitInfo


class Quality(_Record):
    """Percent on validation queries with the encoder that serves.

    Attributes:
        queries: how many; 0 where the run kept none, and then all tables are empty.
        propensity: A and B of PSP.
        exact: metric -> percent, by exact search with the narrow vectors.
        index: the same through the index.
        served: what is answered: through the index, re-scored where the bundle does that.
    """

    queries: Count
    propensity: Metrics
    exact: Metrics
    index: Metrics
    served: Metrics


class Licence(_Record):
    """The licence of something inside the bundle (SPDX identifier)."""

    what: str
    licence: str
    source: str


class Manifest(_Record):
    """All that is known about a bundle; `manifest.json` holds it and nothing else does.

    Attributes:
        format_version: always `FORMAT_VERSION`; other versions are refused.
        bundle_id: 12 hex digits over the files (the index's excepted) and the index's targets and the number
            of candidates: the same checkpoint and options give the same id. Two builds of the index graph
            may differ.
        created: UTC time, ISO 8601.
        model: what was exported.
        dim: width of the vectors.
        encoder_dim: how much of it is Φ_D's, from the left, half of it unless a head is switched off; the
            rest is Φ_C's.
        metric: always `ip`: inner product of [Φ_D ⊕ N(Φ_C)] and [w_D Φ_D ⊕ w_C N(Ψ)], in [-2, 2].
        blend: the weights w_D and w_C, in the phrases' vectors alone; None for a model of one head.
        counts: sizes.
        files: every file of the bundle but the manifest.
        encoder: the ONNX encoder.
        index: the HNSW index; of Milvus' other kinds `ef` is the width of a search, M counts for nothing.
        milvus: where the index is, if in Milvus; None for files.
        rescore: how the index's results are re-scored with wider vectors; None where they are not.
        data: what it was trained on.
        quality: measured on this very bundle.
        calibration: how likely a phrase of some score was clicked; None where queries were too few to tell.
        measured_on: processor, its 8-bit instructions, cores.
        versions: packages at export.
        licences: of what is inside.
        checksum: SHA-256 of the manifest's bytes with this field's 64 digits as zeros.
    """

    format_version: Literal[4]
    bundle_id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    created: str
    model: ModelRecord
    dim: Annotated[int, Field(ge=1)]
    encoder_dim: Count
    metric: Literal["ip"]
    blend: BlendRecord | None
    counts: Counts
    files: dict[str, FileRecord]
    encoder: EncoderRecord
    index: IndexRecord
    milvus: MilvusRecord | None = None
    rescore: RescoreRecord | None
    data: DataRecord
    quality: Quality
    calibration: CalibrationRecord | None
    measured_on: dict[str, str]
    versions: dict[str, str]
    licences: list[Licence]
    checksum: Sha256

    @property
    def index_sha256(self) -> str:
        """What tells one index over these phrases from another: of the graph, or of Milvus' vectors."""
        return self.files[VECTORS if self.milvus is not None else LINKS].sha256


def targets_of(index: IndexRecord, rescore: RescoreRecord | None) -> dict[str, float | int]:
    """What `bundle_id` takes beside the files."""
    targets: dict[str, float | int] = {"target_recall": index.target_recall, "k": index.k}
    if rescore is not None:
        targets |= {"candidates": rescore.candidates, "per_match": rescore.per_match}
    return targets


def bundle_id(files: dict[str, str], targets: dict[str, float | int]) -> str:
    """Twelve hex digits that name what a bundle answers with.

    The index is left out: a parallel build is never twice the same, and it may be in Milvus; the vectors that
    it is over and the recall it must reach are in it.

    Args:
        files: file name -> hex SHA-256.
        targets: `target_recall` and `k` of the index, `candidates` and `per_match` of re-scoring.
    """
    parts = {name: digest for name, digest in files.items() if name not in INDEX_FILES}
    text = json.dumps([FORMAT_VERSION, parts, targets], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def seal(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`, its `checksum` filled in."""
    blank = manifest.model_copy(update={"checksum": _CHECKSUM_BLANK.decode()})
    raw = (json.dumps(blank.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n").encode()
    return _fill(raw, hashlib.sha256(raw).hexdigest().encode())


def _fill(raw: bytes, digits: bytes) -> bytes:
    head, mark, tail = raw.rpartition(b'"checksum": "')
    if not mark:
        raise ValueError("no checksum field")
    return head + mark + digits + tail[64:]


def checksum_holds(raw: bytes, checksum: str) -> bool:
    """Whether `raw`, the bytes of a manifest, are those that were sealed under `checksum`."""
    try:
        blank = _fill(raw, _CHECKSUM_BLANK)
    except ValueError:
        return False
    return hashlib.sha256(blank).hexdigest() == checksum
