"""The compiled searches against plain NumPy: rows, scores, rules, and a live graph under threads."""

from __future__ import annotations

import threading

import hnswlib
import numpy as np
import pytest

from export.bundle import _native
from export.bundle.index import pack
from export.bundle.read import GraphArrays
from export.graph import NONE, BuiltIndex, codes_of
from export.hnswlib_file import HEADER_BYTES, IndexHeader

DIM, SPLIT, COUNT = 24, 10, 3_000


def drawn(seed: int, count: int) -> np.ndarray:
    """Vectors whose products float32 holds without rounding: orders can be compared, ties included."""
    return (np.random.default_rng(seed).integers(-8, 9, size=(count, DIM)) / 16).astype(np.float32)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return drawn(0, COUNT)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return drawn(1, 40)


@pytest.fixture(scope="module")
def built(vectors: np.ndarray) -> hnswlib.Index:
    """An index whose labels are not in the order of its nodes."""
    index = hnswlib.Index("ip", DIM)
    index.init_index(COUNT, M=8, ef_construction=100, random_seed=3)
    order = np.random.default_rng(2).permutation(COUNT)
    index.add_items(vectors[order], order, num_threads=1)
    return index


@pytest.fixture(scope="module")
def arrays(built: hnswlib.Index, vectors: np.ndarray) -> GraphArrays:
    return BuiltIndex(built, vectors).graph


def over(arrays: GraphArrays, vectors: np.ndarray, split: int = SPLIT) -> _native.Graph:
    return _native.Graph(
        vectors,
        arrays.codes,
        arrays.steps,
        arrays.links,
        arrays.upper,
        split=split,
        encoder_weight=99.0,
        classifier_weight=99.0,
    )


@pytest.fixture(scope="module")
def graph(arrays: GraphArrays, vectors: np.ndarray) -> _native.Graph:
    return over(arrays, vectors)


def wanted(queries: np.ndarray, vectors: np.ndarray, allowed: np.ndarray, k: int) -> list[list[int]]:
    scores = np.where(allowed, queries @ vectors.T, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return [[row for row in one if allowed[i, row]] for i, one in enumerate(order.tolist())]


def lists(rows: np.ndarray) -> list[list[int]]:
    return [[row for row in one if row >= 0] for one in rows.tolist()]


@pytest.mark.parametrize("k", [1, 7, 100, COUNT, 2 * COUNT])
def test_exact_search_is_exact(graph, vectors, queries, k):
    rows, encoder, classifier = graph.exact(queries, k)
    assert lists(rows) == wanted(queries, vectors, np.ones((len(queries), COUNT), bool), k)
    assert np.allclose(
        encoder, np.einsum("nd,nkd->nk", queries[:, :SPLIT], vectors[rows][..., :SPLIT]), atol=1e-5
    )
    assert np.allclose(
        classifier, np.einsum("nd,nkd->nk", queries[:, SPLIT:], vectors[rows][..., SPLIT:]), atol=1e-5
    )


def test_a_search_as_wide_as_the_index_is_exact(graph, queries):
    assert np.array_equal(graph.search(queries, 20, COUNT)[0], graph.exact(queries, 20)[0])


def test_the_graph_is_hnswlibs(built, arrays, tmp_path):
    """Link for link, at every level, read from its file another way than the export does."""
    built.save_index(str(tmp_path / "index"))
    raw = (tmp_path / "index").read_bytes()
    header = IndexHeader.parse(raw[:HEADER_BYTES])
    degree = header.max_links

    def node(number: int) -> bytes:
        return raw[HEADER_BYTES + number * header.node_bytes :][: header.node_bytes]

    label = [int.from_bytes(node(n)[header.label_offset :], "little") for n in range(COUNT)]
    place_of = {int(row): set() for row in arrays.upper[:, 0]}
    for place, row in enumerate(arrays.upper[:, 0].tolist()):
        place_of[row].add(place)
    at = HEADER_BYTES + COUNT * header.node_bytes
    tops = []
    for number in range(COUNT):
        count, *ids = np.frombuffer(node(number)[: 4 + 4 * header.max_links0], np.uint32).tolist()
        links = [int(row) for row in arrays.links[label[number]] if row != NONE]
        assert links == [label[one] for one in ids[:count]]
        size = int.from_bytes(raw[at : at + 4], "little")
        levels = np.frombuffer(raw[at + 4 : at + 4 + size], np.uint32).reshape(-1, 1 + degree)
        at += 4 + size
        tops.append(len(levels))
        # Its places, from level 1 up, are later ones first.
        places = sorted(place_of.get(label[number], ()), reverse=True)
        assert len(places) == len(levels)
        for level, (place, (count, *ids)) in enumerate(zip(places, levels.tolist(), strict=True)):
            below = arrays.upper[place, 1]
            assert below == (NONE if level == 0 else places[level - 1])
            found = [int(arrays.upper[one, 0]) for one in arrays.upper[place, 2:] if one != NONE]
            assert found == [label[one] for one in ids[:count]]
    assert at == len(raw)
    assert max(tops) == header.max_level > 1
    assert arrays.upper[0, 0] == label[header.entry]


def test_recall_is_hnswlibs(graph, built, queries):
    exact = graph.exact(queries, 10)[0]

    def recall(rows: np.ndarray) -> float:
        return float(
            np.mean([len(set(a) & set(b)) / 10 for a, b in zip(rows.tolist(), exact.tolist(), strict=True)])
        )

    for ef in (10, 40, 160):
        built.set_ef(ef)
        theirs = recall(built.knn_query(queries, k=10, num_threads=1)[0].astype(np.int64))
        assert recall(graph.search(queries, 10, ef)[0]) == pytest.approx(theirs, abs=0.02)


@pytest.mark.parametrize("dim", [1, 5, 16, 31, 32, 48, 64, 100, 1024, 4096])
def test_codes_order_as_the_vectors_do(dim):
    """Of a graph in which all rows are neighbours, 8 bits must find nearly what exact search does."""
    rng = np.random.default_rng(dim)
    rows = rng.normal(size=(40, dim)).astype(np.float32)
    rows[:, : dim // 3] *= 100
    rows[:, dim // 2 : dim // 2 + 1] = 0
    codes, steps = codes_of(rows)
    assert np.abs(codes * steps - rows).max() <= 0.5001 * steps.max()
    links = np.stack([np.delete(np.arange(40, dtype=np.uint32), one) for one in range(40)])
    graph = over(GraphArrays(links, np.empty((0, 10), np.uint32), codes, steps), rows, dim // 2)
    queries = rng.normal(size=(20, dim)).astype(np.float32) * rng.choice([1e-6, 1, 1e6], (20, 1)).astype("f4")
    exact = graph.exact(queries, 5)[0]
    found = graph.search(queries, 5, 8)[0]
    hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]
    assert np.mean(hits) >= (4.9 if dim > 1 else 1)
    assert np.array_equal(graph.search(queries, 5, 40)[0], exact)
    assert graph.search(np.zeros((1, dim), np.float32), 5, 40)[0].min() >= 0


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001, 0.0])
@pytest.mark.parametrize("k", [1, 10, 200])
def test_rules_leave_no_place_empty_while_rows_exist(graph, vectors, queries, share, k):
    chance = np.random.default_rng(5)
    allowed, off = chance.random(COUNT) < share, chance.random(COUNT) < 0.2
    denied = [np.sort(chance.choice(COUNT, 30, replace=False)).astype(np.int32) for _ in queries]
    offsets = np.cumsum([0, *map(len, denied)])
    admitted = np.tile(allowed & ~off, (len(queries), 1))
    for i, rows in enumerate(denied):
        admitted[i, rows] = False
    common = {"off": pack(off), "denied_offsets": offsets, "denied_rows": np.concatenate(denied)}
    by_graph = graph.search(queries, k, 400, allowed=pack(allowed), admitted=int(allowed.sum()), **common)[0]
    by_bits = graph.exact(queries, k, allowed=pack(allowed), **common)[0]
    by_list = graph.exact(queries, k, rows=np.flatnonzero(allowed).astype(np.int32), **common)[0]
    exact = wanted(queries, vectors, admitted, k)
    assert lists(by_bits) == lists(by_list) == exact
    found = lists(by_graph)
    assert [len(rows) for rows in found] == [len(rows) for rows in exact]
    assert all(admitted[i, row] for i, rows in enumerate(found) for row in rows)
    hits = sum(len(set(a) & set(b)) for a, b in zip(found, exact, strict=True))
    assert hits >= 0.98 * sum(map(len, exact))


def test_a_graph_that_its_own_links_do_not_hold_together_is_searched_exactly(arrays, vectors, queries):
    graph = over(arrays._replace(links=np.full_like(arrays.links, NONE)), vectors)
    assert np.array_equal(graph.search(queries, 50, 100)[0], graph.exact(queries, 50)[0])


def test_links_that_lead_nowhere_are_not_followed(arrays, vectors, queries):
    links, upper = arrays.links.copy(), arrays.upper.copy()
    links[:, 3:] = [[COUNT], [2**31], [2**32 - 2]] * (COUNT // 3)
    upper[1:, 0] = COUNT
    upper[:, 2] = len(upper)
    rows = over(arrays._replace(links=links, upper=upper), vectors).search(queries, 10, 50)[0]
    assert rows.min() >= 0
    assert rows.max() < COUNT


@pytest.mark.parametrize("below", ["itself", "the first"])
def test_levels_that_go_round_end(arrays, vectors, queries, below):
    upper = arrays.upper.copy()
    upper[:, 1] = np.arange(len(upper)) if below == "itself" else 0
    rows = over(arrays._replace(upper=upper), vectors).search(queries, 10, 200)[0]
    assert rows.min() >= 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("codes", lambda array: array[:-1]),
        ("codes", lambda array: array[:, 1:].copy()),
        ("steps", lambda array: array[:, 1:].copy()),
        ("links", lambda array: array[1:]),
        ("links", lambda array: array[0]),
        ("upper", lambda array: array[:, :1].copy()),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, vectors, name, change):
    with pytest.raises(ValueError, match=r"must (be|have)"):
        over(arrays._replace(**{name: change(getattr(arrays, name))}), vectors)


@pytest.mark.parametrize("cut", [1, 5, 1000])
def test_a_file_of_hnswlibs_that_ends_early_is_refused(built, cut, tmp_path):
    built.save_index(str(tmp_path / "index"))
    raw = np.fromfile(tmp_path / "index", np.uint8)
    header = IndexHeader.parse(raw[:HEADER_BYTES].tobytes())
    end = HEADER_BYTES + COUNT * header.node_bytes
    with pytest.raises(ValueError, match=r"ends within|wrong size"):
        _native.hnswlib_upper(raw[:-cut].copy(), end, COUNT, 4 * (1 + header.max_links))


def live(**more: int) -> _native.LiveGraph:
    sizes = {"M": 8, "ef_construction": 100, "seed": 1, "split": SPLIT} | more
    return _native.LiveGraph(DIM, encoder_weight=99.0, classifier_weight=99.0, **sizes)


def test_live_rows_are_found_from_when_they_are_added(vectors, queries):
    graph = live()
    searchable = (np.arange(COUNT) % 7 != 0).astype(np.uint8)
    exact = wanted(queries, vectors, np.tile(searchable.astype(bool), (len(queries), 1)), 10)
    assert lists(graph.search(queries, 10, 50, 0)[0]) == [[] for _ in queries]
    assert graph.append(vectors[:2000], searchable[:2000]) == 0
    assert graph.append(vectors[2000:], searchable[2000:]) == 2000
    assert graph.linked == 0
    assert lists(graph.search(queries, 10, 50, COUNT)[0]) == exact
    assert graph.link(1500) == 1500
    assert graph.link(10**6) == 1500
    assert (graph.linked, len(graph)) == (COUNT, COUNT)
    found = lists(graph.search(queries, 10, 300, COUNT)[0])
    assert sum(len(set(a) & set(b)) for a, b in zip(found, exact, strict=True)) >= 0.99 * 10 * len(queries)
    assert lists(graph.search(queries, 10, 50, COUNT, exactly=True)[0]) == exact


def test_live_rows_under_rules_and_a_limit(vectors, queries):
    graph = live()
    graph.append(vectors, np.ones(COUNT, np.uint8))
    graph.link(2000)
    off = np.random.default_rng(4).random(COUNT) < 0.5
    limit = 2500
    admitted = np.tile(~off & (np.arange(COUNT) < limit), (len(queries), 1))
    exact = wanted(queries, vectors, admitted, 20)
    found = lists(graph.search(queries, 20, 400, limit, off=pack(off))[0])
    assert all(admitted[i, row] for i, rows in enumerate(found) for row in rows)
    assert sum(len(set(a) & set(b)) for a, b in zip(found, exact, strict=True)) >= 0.98 * 20 * len(queries)
    few = np.zeros(COUNT, bool)
    few[[3, 2400, 2600]] = True
    assert [sorted(rows) for rows in lists(graph.search(queries, 20, 50, limit, allowed=pack(few))[0])] == [
        [3, 2400]
    ] * len(queries)


@pytest.mark.parametrize("in_order", [True, False])
def test_copies_hide_nothing_and_are_all_found(vectors, queries, in_order):
    """Phrases of one text have one vector: 300 texts of 40 phrases each, then others."""
    chance = np.random.default_rng(5)
    rows = np.concatenate([vectors[:1000], np.repeat(vectors[1000:1300], 40, axis=0)])
    if not in_order:
        rows = rows[chance.permutation(len(rows))]
    rows = np.concatenate([rows, vectors[2000:2500]])
    graph = live()
    graph.append(rows, np.ones(len(rows), np.uint8))
    graph.link(len(rows))
    scores = queries @ rows.T
    off = chance.random(len(rows)) < 0.5
    for admitted, more in ((np.ones(len(rows), bool), {}), (~off, {"off": pack(off)})):
        for k in (10, 100):
            best = -np.sort(-np.where(admitted, scores, -np.inf), axis=1)[:, :k]
            found = graph.search(queries, k, 200, len(rows), **more)[0]
            assert all(len(set(one)) == k for one in found.tolist())
            assert admitted[found].all()
            hits = np.take_along_axis(scores, found, axis=1) >= best[:, -1:]
            assert hits.mean() >= 0.97


def test_a_copy_stands_in_for_one_that_is_gone(vectors):
    graph = live()
    rows = np.repeat(vectors[:500], 3, axis=0)
    graph.append(rows, np.ones(len(rows), np.uint8))
    graph.link(len(rows))
    off = np.arange(len(rows)) % 3 != 1
    found = graph.search(vectors[:500], 1, 50, len(rows), off=pack(off))[0][:, 0]
    assert (found == 3 * np.arange(500) + 1).mean() >= 0.98


def test_adding_linking_and_searching_at_once(vectors, queries):
    """No search may miss a row that was there before it began, give one beyond its limit, or one twice."""
    graph = live()
    stop = threading.Event()
    faults: list[str] = []

    def search() -> None:
        while not stop.is_set():
            limit = len(graph)
            if limit < 30:
                continue
            found = graph.search(queries[:4], 10, 200, limit)[0]
            exact = graph.search(queries[:4], 10, 200, limit, exactly=True)[0]
            for a, b in zip(found.tolist(), exact.tolist(), strict=True):
                if len(set(a)) != 10 or max(a) >= limit or min(a) < 0:
                    faults.append(f"{a} of {limit}")
                if len(set(a) & set(b)) < 6:
                    faults.append(f"{a} is not {b} of {limit}")

    def link() -> None:
        while not stop.is_set() or graph.linked < len(graph):
            graph.link(16)

    threads = [threading.Thread(target=search) for _ in range(3)] + [threading.Thread(target=link)]
    for thread in threads:
        thread.start()
    for start in range(0, COUNT, 25):
        graph.append(vectors[start : start + 25], np.ones(25, np.uint8))
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]
    assert graph.linked == len(graph) == COUNT
    exact = wanted(queries, vectors, np.ones((len(queries), COUNT), bool), 10)
    found = lists(graph.search(queries, 10, 200, COUNT)[0])
    assert sum(len(set(a) & set(b)) for a, b in zip(found, exact, strict=True)) >= 0.98 * 10 * len(queries)


@pytest.mark.parametrize("width", [8, 30, 64, 65])
def test_wide_scores(width):
    chance = np.random.default_rng(width)
    wide = chance.integers(-127, 128, size=(50, width)).astype(np.int8)
    scales = (chance.random((50, 2)) / 5000).astype(np.float32)
    queries = chance.normal(size=(3, width)).astype(np.float32)
    rows = chance.integers(-1, 50, size=(3, 20))
    split = width // 2
    encoder, classifier = _native.score_wide(
        queries, rows, wide, scales, split=split, encoder_weight=0.7, classifier_weight=1.3
    )
    for part, columns, found, weight in (
        (0, slice(0, split), encoder, 0.7),
        (1, slice(split, None), classifier, 1.3),
    ):
        products = np.einsum("nd,ncd->nc", queries[:, columns], wide[rows][..., columns].astype(np.float32))
        plain = np.where(rows < 0, 0, np.clip(products * scales[rows, part], -weight, weight))
        assert np.allclose(found, plain, atol=1e-5)
    with pytest.raises(IndexError):
        _native.score_wide(
            queries, rows + 40, wide, scales, split=split, encoder_weight=1, classifier_weight=1
        )
