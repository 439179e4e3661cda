"""Recall under filters, at every selectivity, and whether anything is missing that exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.engine import Engine, EngineSettings
from service.explain import explain
from tests.integration.service.ads import (
    Asked,
    Changes,
    Plain,
    ads_of,
    found_by,
    make_ads,
    make_queries,
    write_bundle,
)

PHRASES = 12_000
K = 100


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Phrases that are broad but for a few, and searches as wide as the bundle has them."""
    folder = tmp_path_factory.mktemp("filters")
    return Engine.load(write_bundle(folder / "bundle", make_ads(PHRASES, seed=1, broad=1.0)))


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Plain:
    return Plain(ads_of(engine), engine.bundle.vectors)


def recall(engine: Engine, plain: Plain, queries: list[str], asked: Asked) -> float:
    """Share of the best that are found; as many are found as there are, and nothing that may not be."""
    scope = plain.scope(asked)
    hit = total = 0
    vectors = engine.encoder.encode(queries).narrow
    for query, vector, found in zip(
        queries, vectors, found_by(engine, queries, asked.options(engine)), strict=True
    ):
        wanted = plain.matches(query, vector, asked, scope)
        assert len(found) == len(wanted) == len({match.id for match in found}), query
        assert all(plain.score_of(match.id) is not None for match in found), query
        hit += len({match.id for match in found} & {match.id for match in wanted})
        total += len(wanted)
    return hit / total if total else 1.0


# Selectivity, and how such a filter is searched.
SHARES = [(0.5, "graph"), (0.3, "graph"), (0.1, "comparison"), (0.01, "comparison"), (0.001, "comparison")]


@pytest.mark.parametrize(("share", "how"), [*SHARES, (1 / PHRASES, "comparison")])
@pytest.mark.parametrize("column", ["rank", "north"])
def test_recall_at_every_selectivity(
    engine: Engine, plain: Plain, share: float, how: str, column: str
) -> None:
    """By a column that says nothing of the text, and by one that allows what lies farthest from the query."""
    values = np.sort([ad.columns[column] for ad in plain.ads])
    count = round(share * PHRASES)
    chosen = {column: {"lte": values[count - 1].item()}}
    asked = Asked(k=K, filter=chosen)
    allowed = int(plain.scope(asked).sum())
    assert count <= allowed <= count + 10
    queries = make_queries(plain.ads, 30, 2) if column == "rank" else ["tent", "tents tent", "best tent 10"]
    explained = explain(engine, queries[0], asked.options(engine), [])
    assert explained["searched"] == how
    if how == "graph":
        # Where many are left out the search is wider, up to twice as wide.
        assert explained["ef"] == min(
            PHRASES, int(engine.index.ef * min(2.0, PHRASES / explained["admitted"]))
        )
    # A few were bought as phrase or exact, which their words find.
    assert 0.9 * allowed <= explained["admitted"] <= allowed
    assert recall(engine, plain, queries, asked) >= 0.98


def test_nothing_is_allowed(engine: Engine, plain: Plain) -> None:
    asked = Asked(k=K, filter={"rank": -1})
    assert recall(engine, plain, ["tent", "red shoes"], asked) == 1.0
    (found,) = found_by(engine, ["tent"], asked.options(engine))
    assert found == []


def anything(rng: np.random.Generator, plain: Plain) -> dict[str, Any]:
    """A filter on one to three columns, of any operator."""
    ad = plain.ads[rng.integers(len(plain.ads))]
    other = plain.ads[rng.integers(len(plain.ads))]
    low, high = sorted(rng.uniform(0, 3, 2).tolist())
    conditions: list[tuple[str, Any]] = [
        ("market", ad.columns["market"]),
        ("market", {"not": ["us", "jp"]}),
        ("language", [ad.columns.get("language") or "en", "fr"]),
        ("language", {"not": "de"}),
        ("advertiser", ad.columns["advertiser"]),
        ("advertiser", [ad.columns["advertiser"], other.columns["advertiser"], "nobody"]),
        ("advertiser", {"not": ad.columns["advertiser"]}),
        ("advertiser", {"gte": "advertiser 2", "lt": "advertiser 5"}),
        ("bid", {"gt": low, "lt": high}),
        ("bid", {"gte": 1}),
        ("bid", {"lte": 0.5, "not": 0.25}),
        ("bid", {"not": [0.5, 1.0]}),
        ("active", False),
        ("active", {"not": False}),
        ("match_type", "broad"),
        ("match_type", {"not": "broad"}),
        ("negative_keywords", (ad.negatives or ["red"])[0]),
        ("negative_keywords", {"not": (other.negatives or ["red"])[0]}),
        ("rank", {"gte": 1000, "lt": 4000}),
        ("north", {"lt": 0.2}),
    ]
    picked = rng.choice(len(conditions), rng.integers(1, 4), replace=False)
    return dict(conditions[at] for at in picked)


@pytest.mark.parametrize("broad", [0.1, 1.0])
def test_any_filter_is_a_look_at_every_phrase(tmp_path: Path, broad: float) -> None:
    """With match types and live phrases beside, in the widest search."""
    path = write_bundle(tmp_path / "bundle", make_ads(2000, seed=3, broad=broad))
    engine = Engine.load(path, EngineSettings(ef=100_000))
    changes = Changes(engine)
    changes.put(make_ads(800, seed=4, broad=broad, prefix="n"))
    changes.put(make_ads(100, seed=5, broad=broad))
    changes.set_state([f"n{at}" for at in range(0, 400, 3)], "paused")
    changes.set_state([f"a{at}" for at in range(50, 400, 3)], "paused")
    plain = changes.plain()
    rng = np.random.default_rng(6)
    queries = make_queries(plain.ads, 1000, 7)
    matches = 0
    for start in range(0, len(queries), 10):
        asked = Asked(k=K, filter=anything(rng, plain))
        scope = plain.scope(asked)
        some = queries[start : start + 10]
        vectors = engine.encoder.encode(some).narrow
        answers = found_by(engine, some, asked.options(engine))
        for query, vector, found in zip(some, vectors, answers, strict=True):
            wrong = plain.difference(found, plain.matches(query, vector, asked, scope))
            assert wrong is None, (wrong, query, asked)
            matches += len(found)
    assert matches > 5000


def test_lists_beside_a_filter(engine: Engine, plain: Plain) -> None:
    rng = np.random.default_rng(8)
    ids = [ad.id for ad in plain.ads]
    queries = make_queries(plain.ads, 5, 9)
    for share in (1.0, 0.5, 0.05, 0.002):
        allow = tuple(rng.choice(ids, int(share * len(ids)), replace=False).tolist())
        deny = tuple(rng.choice(ids, 1000).tolist())
        for chosen in (None, {"market": "us"}, {"rank": {"lt": 30}}):
            asked = Asked(k=K, filter=chosen, allow=allow, deny=deny)
            assert recall(engine, plain, queries, asked) >= 0.98
            assert recall(engine, plain, queries, Asked(k=K, filter=chosen, deny=deny)) >= 0.98
