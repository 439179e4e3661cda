"""Each kind of rule that drops a phrase is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.engine import Engine, EngineSettings
from service.explain import explain
from service.live.store import PhraseRow
from tests.integration.service.ads import Ad, Asked, Changes, make_ads, make_queries, write_bundle

RULED = {
    "exact": {"match_type": "exact"},
    "phrase": {"match_type": "Phrase"},
    "all": {"negative_keywords": ["blue", "tent cheap"]},
    "run": {"negative_keywords": ['"cheap tent"']},
    "whole": {"negative_keywords": ["[Cheap  TENT 10]"]},
    "german": {"market": "de", "bid": 0.5},
    "plain": {"market": "us", "bid": 2.0},
}
QUERY = "cheap tent 10"
CHANGED = "changed by a live phrase"
ASKED = Asked(k=5)


def ruled(prefix: str) -> list[Ad]:
    """Phrases near the query, each of which a rule may drop."""
    return [Ad(f"{prefix}-{name}", "tent 10 lamp", columns) for name, columns in RULED.items()]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    ads = [*ruled("b"), *make_ads(300, seed=1, broad=1.0)]
    return Engine.load(write_bundle(tmp_path_factory.mktemp("explain") / "bundle", ads))


def explained(
    changes: Changes, ids: list[str], asked: Asked = ASKED, query: str = QUERY
) -> dict[str, dict[str, Any]]:
    def stored(those: list[str]) -> list[PhraseRow]:
        return [changes.rows[id] for id in those if id in changes.rows]

    found = explain(changes.engine, query, asked.options(changes.engine), ids, stored)
    candidates = {one["id"]: one for one in found["candidates"] if one["dropped"] != CHANGED}
    assert len(candidates) + [one["dropped"] for one in found["candidates"]].count(CHANGED) == len(
        found["candidates"]
    )
    assert set(ids) == (set(ids) & set(candidates)) | set(found["missing"])
    for one in candidates.values():
        assert (one["rank"] is None) == (one["dropped"] is not None)
        assert one["score"] == pytest.approx(sum(one["parts"].values()), abs=1e-5)
    return candidates


@pytest.fixture
def changes(engine: Engine) -> Changes:
    changes = Changes(engine)
    changes.put(ruled("l"))
    return changes


@pytest.mark.parametrize("side", ["b", "l"])
def test_what_advertisers_ruled(changes: Changes, side: str) -> None:
    dropped = {
        name: explained(changes, [f"{side}-{name}"])[f"{side}-{name}"]["dropped"]
        for name in ("exact", "phrase", "all", "run", "whole")
    }
    assert dropped == {
        "exact": "match type: exact, and the query is another",
        "phrase": "match type: phrase, and the query does not contain its words in order",
        "all": "negative keyword: tent cheap",
        "run": 'negative keyword: "cheap tent"',
        "whole": "negative keyword: [Cheap  TENT 10]",
    }
    # None of it holds for another query.
    ids = [f"{side}-{name}" for name in RULED]
    found = explained(changes, ids, Asked(k=400), "tent 10 lamp")
    assert {id: found[id]["dropped"] for id in ids} == dict.fromkeys(ids)
    assert {found[id]["source"] for id in ids} == {"exact"}


@pytest.mark.parametrize("side", ["b", "l"])
def test_what_the_request_ruled(changes: Changes, side: str) -> None:
    german, plain = f"{side}-german", f"{side}-plain"

    def dropped(**asked: Any) -> list[str | None]:
        found = explained(changes, [german, plain], Asked(k=400, **asked))
        return [found[id]["dropped"] for id in (german, plain)]

    assert dropped() == [None, None]
    assert dropped(filter={"market": "us"}) == ["filter: market: the phrase has de", None]
    assert dropped(filter={"bid": {"lt": 1}}) == [None, "filter: bid: the phrase has 2"]
    assert dropped(filter={"language": "en"}) == ["filter: language: the phrase has none"] * 2
    assert dropped(allow=(german,)) == [None, "allow: not in the list"]
    assert dropped(deny=(german,)) == ["deny: in the list", None]
    scores = [explained(changes, [id])[id]["score"] for id in (german, plain)]
    least = max(scores) + 0.1
    assert dropped(min_score=least) == [f"min_score: {one:.4f} is less than {least:.4f}" for one in scores]


def test_the_best_are_enough(changes: Changes) -> None:
    beaten = "not among the best k"
    found = explained(changes, ["l-german", "l-plain"], Asked(k=1))
    assert found["l-plain"]["dropped"] == beaten
    ranks = {one["rank"]: one for one in found.values() if one["rank"]}
    assert list(ranks) == [1]
    found = explained(changes, ["l-german", "l-plain"], Asked(k=400, distinct=True))
    dropped = [found["l-german"]["dropped"], found["l-plain"]["dropped"]]
    assert "distinct: one of the same text is better" in dropped
    assert beaten not in dropped


def test_what_operations_did(changes: Changes) -> None:
    changes.set_state(["b-plain", "l-plain"], "paused")
    changes.set_state(["b-german", "l-german"], "removed")
    changes.put([Ad("b-all", "tent 10 lamp stand")])
    # Also of those that were not asked about.
    beside = explained(changes, [], Asked(k=400))
    assert {id: beside[id]["dropped"] for id in ("b-plain", "b-german")} == {
        "b-plain": "paused",
        "b-german": "removed",
    }
    ids = ["b-plain", "l-plain", "b-german", "l-german", "b-all", "nobody's"]
    found = explained(changes, ids, Asked(k=400))
    both = explain(changes.engine, QUERY, Asked(k=400).options(changes.engine), ["b-all"])["candidates"]
    assert {one["dropped"] for one in both if one["id"] == "b-all"} == {None, CHANGED}
    assert {id: found[id]["dropped"] for id in ids[:5]} == {
        "b-plain": "paused",
        "l-plain": "paused",
        "b-german": "removed",
        "l-german": "removed",
        "b-all": None,
    }
    assert found["b-all"]["phrase"] == "tent 10 lamp stand"
    assert "nobody's" not in found
    twin = explained(changes, ["l-exact"])["l-exact"]
    for id in ("l-plain", "l-german"):
        assert found[id]["parts"] == pytest.approx(twin["parts"], abs=1e-5)


def test_ranks_are_the_matches(changes: Changes) -> None:
    """The candidates with a rank are the matches in their order; all others say why they are none."""
    engine = changes.engine
    for at, query in enumerate(make_queries(ruled("x") * 3, 40, 5)):
        asked = Asked(
            k=1 + at % 9,
            distinct=at % 2 == 0,
            filter={"market": "us"} if at % 3 == 0 else None,
            min_score=0.3 if at % 4 == 0 else None,
        )
        found = engine.find(engine.encode([query]), asked.options(engine))
        ids, _, _ = engine.named(found.live).take(found.rows)
        candidates = explained(changes, ["b-all", "l-run", "b-exact"], asked, query)
        ranked = sorted((one["rank"], id) for id, one in candidates.items() if one["rank"])
        assert [id for _, id in ranked] == ids
        assert [rank for rank, _ in ranked] == list(range(1, len(ids) + 1))


def test_without_match_types(engine: Engine, tmp_path: Path) -> None:
    free = Engine(engine.bundle, EngineSettings(honour_match_types=False))
    changes = Changes(free)
    changes.put(ruled("l"))
    ids = [f"{side}-{name}" for side in "bl" for name in RULED]
    found = explained(changes, ids, Asked(k=400))
    assert {found[id]["dropped"] for id in ids} == {None}
