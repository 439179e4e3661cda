"""The thread that follows the store, while others search: nothing is lost, late, or answered from before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import orjson
import pytest

from bench.serving.crowd import crowd
from bidmatch.base.text import key
from export.bundle.read import open_bundle
from service.answers import answer_each
from service.cache import Kept
from service.engine import EngineSettings
from service.live.store import LiveStore, PhraseRecord
from service.options import MatchOptions
from service.serving import Serving
from tests.integration.service.ads import Ad, make_ads, make_queries, meanwhile, write_bundle

EVERY = 100_000


@contextmanager
def serving_of(bundle: Path, store: LiveStore) -> Iterator[Serving]:
    """What answers in a worker, without a worker."""
    serving = Serving(open_bundle(bundle), EngineSettings(), cache_bytes=4_000_000, store=store, probes=0)
    serving.start()
    try:
        yield serving
    finally:
        serving.stop()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("load") / "bundle", make_ads(150, seed=1, broad=1.0))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    with LiveStore.open(tmp_path / "live") as store:
        yield store


def answered(serving: Serving, query: str, options: MatchOptions) -> list[dict[str, object]]:
    """An answer as a worker gives it: from the cache, or made and kept."""
    loaded = serving.current
    kept = loaded.cache.get(key(query), options)
    if kept is None:
        (answer,) = answer_each(loaded.engine, [query], [options], guarded=True)
        assert answer.guard is not None
        kept = Kept(answer.matches, answer.count, answer.best)
        loaded.cache.put(key(query), options, kept, answer.guard)
    matches: list[dict[str, object]] = orjson.loads(kept.matches)
    return matches


def test_phrases_that_change_again_and_again(bundle: Path, store: LiveStore) -> None:
    """What changes leave behind is cleared away, and no search, answer or change is the worse for it."""
    phrases = 2200
    colours = ["red", "blue", "green", "black"]
    wanted = {f"n{at}" for at in range(phrases)}
    turn = 0

    def record(at: int) -> PhraseRecord:
        # What a phrase says names the phrase, so that an answer that mixes two up shows.
        text = f"{colours[(at + turn) % 4]} tent n{at}"
        return PhraseRecord(f"n{at}", text, {"rank": turn, "advertiser": f"n{at}"})

    with serving_of(bundle, store) as serving:
        sync, engine = serving.sync, serving.current.engine
        assert sync is not None
        store.put([record(at) for at in range(phrases)])
        assert sync.wait_for(phrases, 20)
        first = engine.live
        rng, searching = np.random.default_rng(0), np.random.default_rng(1)
        options = MatchOptions(5)
        queries = [f"{colour} tent n{at}" for colour in colours for at in range(20)]

        def search() -> None:
            asked = [f"{colour} tent" for colour in colours]
            for answer in answer_each(engine, asked, [MatchOptions(EVERY)] * 4, guarded=True):
                mine = [match for match in orjson.loads(answer.matches) if match["id"].startswith("n")]
                assert len(mine) == phrases
                assert {match["id"] for match in mine} == wanted
                assert all(match["phrase"].endswith(f" {match['id']}") for match in mine)
                assert all(match["columns"]["advertiser"] == match["id"] for match in mine)
            time.sleep(0.05)

        def change() -> None:
            nonlocal turn
            turn += 1
            rows = store.put([record(at) for at in rng.choice(phrases, 300).tolist()])
            # While all is built anew changes do not wait.
            assert sync.wait_for(rows[-1].sequence, 20)
            # What was acknowledged shows, whatever the cache holds.
            latest = {row.id: row.columns["rank"] for row in rows}
            for match in answered(serving, str(rows[0].text), options):
                assert latest.get(str(match["id"]), -1) in (-1, match["columns"]["rank"])

        def ask() -> None:
            answered(serving, str(searching.choice(queries)), options)
            time.sleep(0.002)

        seen = {id(first): first}
        with meanwhile(search, change, ask) as going:
            until = time.monotonic() + 60
            while len(seen) < 2 and time.monotonic() < until and going():
                seen[id(engine.live)] = engine.live
                time.sleep(0.02)
        assert len(seen) == 2, "nothing was cleared away"
        assert sync.failure is None
        for query in queries:
            (answer,) = answer_each(engine, [query], [options], guarded=True)
            kept, fresh = answered(serving, query, options), orjson.loads(answer.matches)
            # Which of many equal scores come, and in which order, is open.
            assert [match["score"] for match in kept] == [match["score"] for match in fresh]
            said = {row.id: (row.text, dict(row.columns)) for row in store.get_many([m["id"] for m in kept])}
            live = [match for match in kept if match["source"] == "live"]
            assert all(said[match["id"]] == (match["phrase"], match["columns"]) for match in live)


def test_an_answer_made_while_the_rows_are_numbered_anew(bundle: Path, store: LiveStore) -> None:
    """What was found before is named by the phrases that were searched."""
    with serving_of(bundle, store) as serving:
        sync, engine = serving.sync, serving.current.engine
        assert sync is not None

        def put(turn: int) -> None:
            rows = store.put([PhraseRecord(f"n{at}", f"tent n{at}", {"rank": turn}) for at in range(180)])
            assert sync.wait_for(rows[-1].sequence, 20)

        put(0)
        first = engine.live
        assert first is not None
        while first.wasted + 180 < 4096:
            put(1 + first.wasted)
        found = engine.find(engine.encode(["tent"]), MatchOptions(EVERY))
        put(10_000)
        until = time.monotonic() + 20
        while engine.live is first and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.live is not first, "nothing was cleared away"
        ids, texts, _ = engine.named(found.live).take(found.rows)
        assert {f"n{at}" for at in range(180)} <= set(ids)
        assert all(
            phrase == f"tent {id}" for id, phrase in zip(ids, texts, strict=True) if id.startswith("n")
        )
        (listed,), _, _ = engine.rendered(found)
        assert [match["id"] for match in orjson.loads(listed)] == ids


def test_clients_that_change_search_and_filter_at_once(tmp_path: Path) -> None:
    """Each finds of its own phrases all that are active and nothing else; recall is that of exact search."""
    ads = []
    for at, ad in enumerate(make_ads(600, seed=9, broad=1.0)):
        kind = ("broad", "exact", "phrase")[at % 3]
        columns = {"market": ad.columns["market"], "bid": ad.columns["bid"] or 1.0, "match_type": kind}
        ads.append(Ad(ad.id, ad.text, columns | {"negative_keywords": ad.negatives}))
    queries = make_queries(ads, 400, 10)
    visible = [query for query in queries if key(query)]
    bundle = write_bundle(tmp_path / "bundle", ads)
    met = crowd(bundle, visible[:200], visible, tmp_path, clients=6, seconds=5, workers=2, looks=2)
    faults = ("errors", "lost_phrases", "ghost_phrases", "phrases_twice", "wrong_answers", "wrong_states")
    assert {name: met[name] for name in faults} == dict.fromkeys(faults, 0)
    assert met["broken_clients"] == 0
    assert met["recall_least"] >= 0.98
    assert met["recall_100"] >= 0.98
    assert min(met["done"].values()) > 0
    assert met["done"]["searches of their own"] > 100
