"""One suite on both places of an index: a file of the bundle, and Milvus (Milvus Lite, by its server)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hnswlib
import numpy as np
import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from milvus_server import MilvusServer, in_milvus

from bidmatch.base.files import atomic_dir
from export.bundle import format as fmt
from export.bundle.index import Admitted, Denied, Index, PhraseIndex, exact_topk, pack
from export.bundle.milvus import MilvusIndex
from export.bundle.milvus_client import MilvusAccess
from export.bundle.read import open_bundle
from export.bundle.write import create_vectors, finish, write_phrases
from export.graph import BuiltIndex

COUNT, DIM = 3_000, 16
SLOW = MilvusAccess(timeout_ms=20_000)


@pytest.fixture(scope="module")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    with MilvusServer(tmp_path_factory.mktemp("milvus")) as server:
        yield server


@pytest.fixture(scope="module")
def bundles(
    milvus: MilvusServer, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """3,000 phrases, some of one vector, over the tiny bundle's encoder, in both places."""
    rng = np.random.default_rng(3)
    parts = rng.normal(size=(COUNT, 2, DIM // 2))
    vectors = (parts / np.linalg.norm(parts, axis=-1, keepdims=True)).reshape(COUNT, DIM).astype(np.float32)
    vectors[1_000:1_005] = vectors[0]
    index = hnswlib.Index("ip", DIM)
    index.init_index(COUNT, M=16, ef_construction=200, random_seed=1)
    index.add_items(vectors, np.arange(COUNT), num_threads=1)
    folder = tmp_path_factory.mktemp("congruence")
    table = pa.table(
        {
            "id": [f"p{row}" for row in range(COUNT)],
            "text": [f"red shoes {row}" for row in range(COUNT)],
            "bid": pa.array(range(COUNT), pa.int64()),
        }
    )
    with open_bundle(tiny_bundle) as tiny, atomic_dir(folder / "hnsw") as made:
        ours = {"format_version", "bundle_id", "files", "checksum"}
        fields = {name: value for name, value in tiny.manifest if name not in ours}
        for name in (fmt.ENCODER_FP32, fmt.TOKENIZER):
            (made / name).write_bytes((tiny_bundle / name).read_bytes())
        write_phrases(made, table)
        mapped = create_vectors(made, COUNT, DIM)
        mapped[:] = vectors
        mapped.flush()
        BuiltIndex(index, vectors).save(made)
        counts = fmt.Counts(phrases=COUNT, train_queries=0, validation_queries=0, test_queries=0)
        record = fields["index"].model_copy(update={"ef": 400})
        finish(made, fields | {"counts": counts, "index": record})
    return {"hnsw": folder / "hnsw", "milvus": in_milvus(folder / "hnsw", folder / "milvus", milvus.uri)}


@pytest.fixture(scope="module", params=["hnsw", "milvus"])
def place(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def index(place: str, bundles: dict[str, Path]) -> Iterator[Index]:
    with open_bundle(bundles[place]) as bundle:
        made: Index = PhraseIndex(bundle) if place == "hnsw" else MilvusIndex(bundle, SLOW)
        assert made.failure is None
        yield made


@pytest.fixture(scope="module")
def vectors(bundles: dict[str, Path]) -> np.ndarray:
    with open_bundle(bundles["hnsw"]) as bundle:
        return np.array(bundle.vectors)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    parts = np.random.default_rng(5).normal(size=(40, 2, DIM // 2))
    return (parts / np.linalg.norm(parts, axis=-1, keepdims=True)).reshape(40, DIM).astype(np.float32)


def best(queries: np.ndarray, vectors: np.ndarray, k: int, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and scores of the k best of those kept, by the definition."""
    rows = np.flatnonzero(keep)
    found, scores = exact_topk(queries, vectors[rows], k)
    return rows[found], scores


def check(found, wanted: tuple[np.ndarray, np.ndarray], recall: float = 0.99) -> None:
    rows, scores = wanted
    size = rows.shape[1]
    assert found.rows.dtype == np.int64
    assert found.scores.dtype == np.float32
    assert (found.rows[:, :size] >= 0).all()
    assert (found.rows[:, size:] == -1).all()
    hits = [len(set(mine) & set(theirs)) for mine, theirs in zip(found.rows, rows, strict=True)]
    assert sum(hits) / max(1, rows.size) >= recall
    # The sum of both parts may round otherwise than the whole product, by which rows are ordered.
    assert (np.diff(found.scores[:, :size], axis=1) <= 1e-6).all()
    assert np.allclose(found.scores[:, 0], scores[:, 0], atol=1e-5)


@pytest.mark.parametrize("k", [1, 10, 100, COUNT - 1, COUNT, COUNT + 7])
def test_the_nearest_are_those_of_exact_search(index, queries, vectors, k):
    wanted = best(queries, vectors, k, np.ones(COUNT, bool))
    found = index.search(queries, k)
    assert found.rows.shape == (40, min(k, COUNT))
    check(found, wanted)
    check(index.exact(queries, k), wanted, recall=1)


def test_the_parts_are_those_of_the_halves(index, queries, vectors):
    found = index.search(queries, 5)
    held = vectors[found.rows]
    half = DIM // 2
    assert np.allclose(found.encoder, np.einsum("nd,ncd->nc", queries[:, :half], held[..., :half]), atol=1e-5)
    assert np.allclose(
        found.classifier, np.einsum("nd,ncd->nc", queries[:, half:], held[..., half:]), atol=1e-5
    )


def test_equal_scores_are_in_the_order_of_rows(index, vectors):
    assert index.search(vectors[:1], 6).rows[0].tolist() == [0, 1000, 1001, 1002, 1003, 1004]
    assert index.exact(vectors[:1], 3).rows[0].tolist() == [0, 1000, 1001]


@pytest.mark.parametrize("share", [0, 1 / COUNT, 0.01, 0.15, 0.3, 0.9])
@pytest.mark.parametrize("k", [1, 20, 2_000])
def test_filters_of_any_selectivity(index, queries, vectors, share, k):
    keep = np.zeros(COUNT, bool)
    keep[np.random.default_rng(1).permutation(COUNT)[: round(share * COUNT)]] = True
    admitted = Admitted.of_mask(keep)
    wanted = best(queries, vectors, k, keep) if keep.any() else None
    for found in (index.search(queries, k, admitted=admitted), index.exact(queries, k, admitted=admitted)):
        if wanted is None:
            assert (found.rows == -1).all()
        else:
            check(found, wanted)


@pytest.fixture
def always_asking(index, monkeypatch):
    """Milvus is asked where otherwise few rows would be compared here."""
    if isinstance(index, MilvusIndex):
        monkeypatch.setattr("export.bundle.milvus._COMPARED_ROWS", 0)


@pytest.mark.parametrize("share", [0.02, 0.15, 0.9])
def test_filters_where_the_index_is_asked(index, always_asking, queries, vectors, share):
    keep = np.random.default_rng(1).random(COUNT) < share
    check(index.search(queries, 20, admitted=Admitted.of_mask(keep)), best(queries, vectors, 20, keep))


@pytest.mark.parametrize("share", [0.1, 0.9, 0.999])
def test_rows_that_are_off_are_replaced_by_the_next(index, queries, vectors, share):
    off = np.random.default_rng(2).random(COUNT) < share
    off[exact_topk(queries, vectors, 50)[0]] = True
    wanted = best(queries, vectors, 10, ~off)
    check(index.search(queries, 10, off=pack(off)), wanted)
    check(index.exact(queries, 10, off=pack(off)), wanted)


def test_denied_rows_are_left_out_of_their_query_alone(index, queries, vectors):
    top = exact_topk(queries, vectors, 60)[0]
    rows = [np.sort(top[at]).astype(np.int32) if at % 2 else np.empty(0, np.int32) for at in range(40)]
    denied = Denied(np.cumsum([0, *map(len, rows)]), np.concatenate(rows))
    for found in (index.search(queries, 10, denied=denied), index.exact(queries, 10, denied=denied)):
        for at in range(40):
            keep = np.ones(COUNT, bool)
            keep[rows[at]] = False
            assert set(found.rows[at]) == set(best(queries[at : at + 1], vectors, 10, keep)[0][0])


def test_all_rules_at_once(index, always_asking, queries, vectors):
    rng = np.random.default_rng(9)
    keep, off = rng.random(COUNT) < 0.4, rng.random(COUNT) < 0.3
    rows = np.sort(exact_topk(queries[:1], vectors, 30)[0][0]).astype(np.int32)
    denied = Denied(np.array([0, 30]), rows)
    left = keep & ~off
    left[rows] = False
    found = index.search(queries[:1], 15, admitted=Admitted.of_mask(keep), off=pack(off), denied=denied)
    check(found, best(queries[:1], vectors, 15, left))


@pytest.mark.parametrize(
    ("given", "k", "reason"),
    [
        (np.zeros((1, DIM), np.float32), 0, "k must be"),
        (np.zeros((1, DIM - 1), np.float32), 1, f"width {DIM}"),
        (np.zeros(DIM, np.float32), 1, f"width {DIM}"),
        (np.full((1, DIM), np.nan, np.float32), 1, "finite"),
    ],
)
def test_what_no_search_is_made_with(index, given, k, reason):
    for search in (index.search, index.exact):
        with pytest.raises(ValueError, match=reason):
            search(given, k)


def test_no_vectors(index):
    assert index.search(np.zeros((0, DIM), np.float32), 5).rows.shape == (0, 5)


def test_widths(index):
    few = Admitted.of_mask(np.arange(COUNT) < 10)
    assert index.width(None) == index.ef == 400
    assert index.width(1_000) == 1_000
    assert index.width(10**6) == COUNT
    assert index.width(None, few) == 800
    assert index.compares(few, 400)
    assert not index.compares(None, 400)


@pytest.fixture(scope="module")
def bodies() -> list[dict]:
    return [
        {"query": "red running shoes", "k": 20},
        {"query": "blue boots", "k": 5, "filter": {"bid": {"lt": 900}}},
        {"query": "blue boots", "k": 5, "filter": {"bid": {"lt": 4}}},
        {"query": "tent", "k": 30, "deny": ["p1", "p2"], "min_score": 0.3},
        {"query": "tent", "k": 30, "allow": ["p1", "p2", "none"]},
        {"queries": ["red shoes 7", "socks"], "k": 3, "distinct": True},
        {"query": "red", "k": 0},
        {"query": "red", "filter": {"nothing": 1}},
    ]


def test_answers_over_http_are_the_same_with_live_phrases_and_rules(
    application: Callable, bundles: dict[str, Path], bodies: list[dict], tmp_path: Path
):
    answers = {}
    for place, path in bundles.items():
        asked = application(path, live=tmp_path / place, cache_mb=0, milvus_timeout_ms=20_000)
        assert asked.ask("GET", "/readyz").status_code == 200
        phrases = [
            {"id": "new", "text": "red running shoes", "columns": {"bid": 5}},
            {"id": "p3", "text": "tent for sale"},
        ]
        assert asked.ask("POST", "/phrases", json={"phrases": phrases}).status_code == 200
        assert asked.ask("POST", "/phrases/p9/pause").status_code == 200
        found = [asked.ask("POST", "/match", json=body) for body in bodies]
        explained = asked.ask("POST", "/admin/explain", json={"query": "red shoes", "k": 5})
        answers[place] = [*found, explained]
    for mine, theirs in zip(answers["hnsw"], answers["milvus"], strict=True):
        assert mine.status_code == theirs.status_code
        shown = [re.sub(r"\d\.\d+(e-\d+)?", "#", answer.text) for answer in (mine, theirs)]
        shown = [re.sub(r'"searched":"\w+"', "", one) for one in shown]
        assert shown[0] == shown[1]
