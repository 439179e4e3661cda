"""Match types, negative keywords and all that a request rules out, against a plain look at every phrase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.engine import Engine, EngineSettings
from tests.integration.service.ads import (
    Ad,
    Asked,
    Changes,
    Match,
    Plain,
    ads_of,
    found_by,
    make_ads,
    make_queries,
    write_bundle,
)

QUERIES = 10_000
TOGETHER = 100


@pytest.fixture(scope="module")
def bought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many phrases of each match type as advertisers have: 10% broad, 45% phrase, 45% exact."""
    folder = tmp_path_factory.mktemp("ads")
    return write_bundle(folder / "bought", make_ads(3000, seed=1, broad=0.1))


@pytest.fixture(scope="module")
def broad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mostly broad phrases: search goes through the graph, with the rules inside of it."""
    folder = tmp_path_factory.mktemp("ads")
    return write_bundle(folder / "broad", make_ads(6000, seed=2, broad=0.8))


def drawn(rng: np.random.Generator, ids: list[str]) -> Asked:
    """What a request may ask, at random."""
    filters = [
        {"market": "de"},
        {"market": ["us", "jp"], "active": True},
        {"language": {"not": "en"}, "bid": {"gte": 1.0}},
        {"bid": {"gt": 0.5, "lte": 2.5}, "market": {"not": ["us", "at"]}},
        {"advertiser": [f"advertiser {at}" for at in range(3)]},
        {"negative_keywords": {"not": "red"}},
        {"rank": {"lt": 40}},
    ]
    return Asked(
        k=int(rng.choice([1, 10, 100])),
        min_score=float(rng.uniform(-0.5, 1.8)) if rng.random() < 0.3 else None,
        filter=filters[rng.integers(len(filters))] if rng.random() < 0.4 else None,
        allow=tuple(rng.choice(ids, rng.integers(0, 800)).tolist()) if rng.random() < 0.2 else None,
        deny=tuple(rng.choice([*ids, "no phrase's"], rng.integers(1, 200)).tolist())
        if rng.random() < 0.3
        else (),
        distinct=bool(rng.random() < 0.3),
    )


def compare(engine: Engine, plain: Plain, count: int, seed: int) -> list[tuple[list[Match], list[Match]]]:
    """What was found and what should have been, for so many random queries; all of it must be the same."""
    rng = np.random.default_rng(seed)
    queries = make_queries(plain.ads, count, seed)
    ids = [ad.id for ad in plain.ads]
    pairs = []
    for start in range(0, count, TOGETHER):
        some = queries[start : start + TOGETHER]
        asked = drawn(rng, ids)
        scope = plain.scope(asked)
        vectors = engine.encoder.encode(some).narrow
        for query, vector, found in zip(
            some, vectors, found_by(engine, some, asked.options(engine)), strict=True
        ):
            wanted = plain.matches(query, vector, asked, scope)
            wrong = plain.difference(found, wanted)
            assert wrong is None, (wrong, query, asked, found[:5], wanted[:5])
            pairs.append((found, wanted))
    return pairs


def bundle_alone(engine: Engine) -> Plain:
    return Plain(ads_of(engine), engine.bundle.vectors)


def with_live(engine: Engine) -> Changes:
    """Some thousand live phrases: new ones, ones in place of others, many switched off."""
    rng = np.random.default_rng(3)
    changes = Changes(engine)
    mine = [ad.id for ad in ads_of(engine)]
    new = make_ads(2000, seed=4, broad=0.3, prefix="n")
    changes.put(new)
    ids = [ad.id for ad in new]
    for known, more in ((mine, make_ads(600, seed=5, broad=0.5)), (ids, make_ads(400, seed=6, broad=0.3))):
        again = rng.choice(known, len(more)).tolist()
        changes.put(replace(ad, id=id) for id, ad in zip(again, more, strict=True))
    changes.set_state([*rng.choice(ids, 200), *rng.choice(mine, 500)], "paused")
    changes.set_state([*rng.choice(ids, 100), *rng.choice(mine, 300)], "removed")
    changes.set_state([*rng.choice(ids, 400), *rng.choice(mine, 900)], "active")
    changes.live.link(changes.live.unlinked // 2)
    return changes


def test_the_plain_rules() -> None:
    ads = [
        Ad("b", "red shoes"),
        Ad("p", "Red  Shoes", {"match_type": "phrase"}),
        Ad("e", "RED shoes", {"match_type": "exact"}),
        Ad("n", "red shoes", {"negative_keywords": '"buy red",[blue],cheap used'}),
    ]
    plain = Plain(ads, np.eye(4, 16))

    def got(query: str) -> set[str]:
        return {match.id for match in plain.matches(query, np.zeros(16), Asked(k=10))}

    assert got("red shoes") == {"b", "p", "e", "n"}
    assert got("my red shoes") == {"b", "p", "n"}
    assert got("buy red shoes") == {"b", "p"}
    assert got("buy my red-shoes") == {"b", "p", "n"}
    assert got("shoes red") == {"b", "n"}
    assert got("used redshoes cheap") == {"b"}
    assert got("blue") == {"b"}


@pytest.mark.parametrize("live", [False, True])
def test_of_what_was_bought_all_is_found_and_nothing_else(bought: Path, live: bool) -> None:
    """The answers are those of a look at every phrase: which, in which order, and how they were found."""
    engine = Engine.load(bought, EngineSettings(ef=1_000_000))
    plain = with_live(engine).plain() if live else bundle_alone(engine)
    kinds = [ad.columns["match_type"] for ad in ads_of(engine)]
    assert sum(kind in ("exact", "phrase") for kind in kinds) > 0.85 * len(kinds)
    pairs = compare(engine, plain, QUERIES // 2, seed=10 + live)
    sources = [match.source for _, wanted in pairs for match in wanted]
    assert sources.count("exact") > 500
    assert sources.count("index") > 5000
    assert live == (sources.count("live") > 5000)


@pytest.mark.parametrize("live", [False, True])
def test_the_widest_search_through_the_graph_is_a_look_at_every_phrase(broad: Path, live: bool) -> None:
    engine = Engine.load(broad, EngineSettings(ef=1_000_000))
    plain = with_live(engine).plain() if live else bundle_alone(engine)
    compare(engine, plain, 500, seed=20 + live)


@pytest.mark.parametrize("live", [False, True])
def test_recall_under_all_rules(bought: Path, broad: Path, live: bool) -> None:
    """As wide as the bundle has it: nearly all of the best, and never fewer than there are."""
    for path in (bought, broad):
        engine = Engine.load(path)
        plain = with_live(engine).plain() if live else bundle_alone(engine)
        rng = np.random.default_rng(30)
        queries = make_queries(plain.ads, 400, 30)
        hit = total = 0
        for start in range(0, len(queries), 20):
            some = queries[start : start + 20]
            asked = drawn(rng, [ad.id for ad in plain.ads])
            scope = plain.scope(asked)
            vectors = engine.encoder.encode(some).narrow
            for query, vector, found in zip(
                some, vectors, found_by(engine, some, asked.options(engine)), strict=True
            ):
                wanted = plain.matches(query, vector, asked, scope)
                assert all(plain.score_of(match.id) is not None for match in found)
                if asked.min_score is None and not asked.distinct:
                    assert len(found) == len(wanted)
                hit += len({match.id for match in found} & {match.id for match in wanted})
                total += len(wanted)
        assert hit >= 0.98 * total
        assert total > 4000


def test_bought_in_no_way_when_match_types_count_for_nothing(bought: Path) -> None:
    engine = Engine.load(bought, EngineSettings(ef=1_000_000, honour_match_types=False))
    changes = with_live(engine)
    plain = changes.plain()
    queries = make_queries(plain.ads, 200, 40)
    asked = Asked(k=20)
    vectors = engine.encoder.encode(queries).narrow
    answers = found_by(engine, queries, asked.options(engine))
    for query, vector, found in zip(queries, vectors, answers, strict=True):
        wanted = plain.matches(query, vector, asked, honour=False)
        assert plain.difference(found, wanted) is None


def test_more_are_asked_for_than_the_bundle_holds(tmp_path: Path) -> None:
    """Few phrases in the bundle do not limit how many live ones are found."""
    engine = Engine.load(write_bundle(tmp_path / "bundle", make_ads(5, seed=50, broad=1.0)))
    changes = Changes(engine)
    changes.put(Ad(f"n{at}", ad.text) for at, ad in enumerate(make_ads(300, seed=51, broad=1.0)))
    plain = changes.plain()
    for k in (1, 10, 100, 1000):
        asked = Asked(k=k)
        (found,) = found_by(engine, ["red shoes"], asked.options(engine))
        vector = engine.encoder.encode(["red shoes"]).narrow[0]
        assert plain.difference(found, plain.matches("red shoes", vector, asked)) is None
