"""Live phrases in memory: what a search sees is what a dictionary says, whatever changes meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from service.engine import Engine
from tests.integration.service.ads import (
    Ad,
    Asked,
    Changes,
    Match,
    Plain,
    ads_of,
    found_by,
    make_ads,
    meanwhile,
    write_bundle,
)

EVERY = 10_000
QUERIES = ["red shoes for women", "tent", "зелёная трава 10"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    """A bundle, one that was made later with some of the live phrases, and a third without them."""
    folder = tmp_path_factory.mktemp("swaps")
    first = make_ads(60, seed=1, broad=0.6)
    trained = make_ads(8, seed=2, broad=0.6, prefix="n")
    paths = [
        write_bundle(folder / "first", first),
        write_bundle(folder / "second", [*first[20:], *trained], created="2026-01-01T00:00:00+00:00", seed=8),
        write_bundle(folder / "third", first[10:], created="2024-02-01T00:00:00+00:00"),
    ]
    return [Engine.load(path) for path in paths]


# Changes of these come before the second bundle was made, later ones after it.
AFTER_THE_SECOND = 1_800_000_000_000
IDS = [f"n{at}" for at in range(12)] + [f"a{at}" for at in range(30)]
SOME_IDS = st.lists(st.sampled_from(IDS), min_size=1, max_size=6, unique=True)


def stateful(engines: list[Engine]) -> type[RuleBasedStateMachine]:
    contents = make_ads(40, seed=3, broad=0.5)

    class LiveMachine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.changes = Changes(engines[0])

        @rule(ids=SOME_IDS, content=st.integers(0, 39))
        def put(self, ids: list[str], content: int) -> None:
            self.changes.put(
                Ad(id, contents[(content + at) % 40].text, contents[(content + at) % 40].columns)
                for at, id in enumerate(ids)
            )

        @rule(ids=SOME_IDS)
        def put_what_the_bundle_says(self, ids: list[str]) -> None:
            self.changes.put(ad for ad in ads_of(self.changes.engine) if ad.id in ids)

        @rule(ids=SOME_IDS, state=st.sampled_from(["paused", "active", "active", "removed"]))
        def set_state(self, ids: list[str], state: str) -> None:
            self.changes.set_state(ids, state)

        @rule(most=st.integers(1, 20))
        def link(self, most: int) -> None:
            self.changes.live.link(most)

        @rule()
        def time_goes_by(self) -> None:
            self.changes.clock = max(self.changes.clock, AFTER_THE_SECOND)

        @rule(to=st.integers(0, 2), batch=st.sampled_from([1, 3, 1000]))
        def swap(self, to: int, batch: int) -> None:
            self.changes.use(engines[to], batch=batch)

        @invariant()
        def search_sees_what_is_active(self) -> None:
            engine, plain = self.changes.engine, self.changes.plain()
            assert self.changes.live.active == plain.live
            vectors = engine.encoder.encode(QUERIES).narrow
            for asked in (Asked(k=EVERY), Asked(k=7)):
                found = found_by(engine, QUERIES, asked.options(engine))
                for query, vector, some in zip(QUERIES, vectors, found, strict=True):
                    wrong = plain.difference(some, plain.matches(query, vector, asked))
                    assert wrong is None, (query, wrong)

    return LiveMachine


def test_search_sees_what_a_dictionary_says(engines: list[Engine]) -> None:
    run_state_machine_as_test(
        stateful(engines),
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=True,
            database=None,
        ),
    )


def test_a_phrase_that_a_later_bundle_has_leaves_the_live_ones(engines: list[Engine]) -> None:
    first, second, _ = engines
    changes = Changes(first)
    changes.put([Ad("n1", "red tent"), Ad("n20", "blue tent"), Ad("a25", "green tent")])
    assert changes.live.active == 3
    changes.use(second)
    assert changes.live.active == 1
    (found,) = found_by(second, ["red tent"], Asked(k=EVERY).options(second))
    sources = {match.id: match.source for match in found}
    assert sources["n20"] == "live"
    assert sources.get("n1", "index") == sources.get("a25", "index") == "index"
    changes.clock = AFTER_THE_SECOND
    changes.put([Ad("n1", "red tent")])
    (found,) = found_by(second, ["red tent"], Asked(k=3).options(second))
    assert (found[0].id, found[0].source) == ("n1", "exact")
    assert changes.live.active == 2


STEADY = [f"n{at}" for at in range(40)] + [f"a{at}" for at in range(20)]
VOLATILE = [f"n{at}" for at in range(40, 60)] + [f"a{at}" for at in range(20, 40)]


def check(found: list[Match], *, without: tuple[str, ...] = ()) -> None:
    ids = [match.id for match in found]
    assert len(set(ids)) == len(ids), "a phrase twice"
    missing = set(STEADY) - set(ids) - set(without)
    assert not missing, f"{missing} were there before and after"
    assert not set(without) & set(ids), "a denied phrase"


def test_searches_while_phrases_change(tmp_path: Path) -> None:
    """A phrase that is active before and after a change is found during it, once, by every kind of search."""
    engine = Engine.load(write_bundle(tmp_path / "bundle", make_ads(200, seed=5, broad=1.0)))
    rng = np.random.default_rng(0)
    contents = [Ad("", ad.text) for ad in make_ads(100, seed=6, broad=1.0)]
    originals = {ad.id: ad for ad in ads_of(engine)}
    changes = Changes(engine)

    def anything(id: str) -> Ad:
        text = contents[rng.integers(len(contents))].text
        return Ad(id, text, {"market": "us", "bid": float(rng.random()), "negative_keywords": []})

    def put(ids: list[str]) -> None:
        changes.put(originals[id] if id in originals and rng.random() < 0.3 else anything(id) for id in ids)

    put(STEADY)
    searches = [0, 0, 0]

    def by_search() -> None:
        for found in found_by(engine, ["red shoes", "трава tent"], Asked(k=EVERY).options(engine)):
            check(found)
        searches[0] += 1

    def by_lists() -> None:
        denied = ("n3", "a4", "n5")
        asked = Asked(k=EVERY, allow=(*STEADY, *VOLATILE), deny=denied)
        (found,) = found_by(engine, ["red shoes"], asked.options(engine))
        check(found, without=denied)
        searches[1] += 1

    def by_filter() -> None:
        (found,) = found_by(
            engine, ["blue boots"], Asked(k=EVERY, filter={"rank": {"not": -1}}).options(engine)
        )
        check(found)
        searches[2] += 1

    with meanwhile(by_search, by_lists, by_filter):
        for _ in range(250):
            put(rng.choice(STEADY, rng.integers(1, 8), replace=False).tolist())
            put(rng.choice(VOLATILE, 2, replace=False).tolist())
            changes.set_state(rng.choice(VOLATILE, 3).tolist(), "paused")
            changes.set_state(rng.choice(VOLATILE, 3).tolist(), "active")
            changes.set_state(rng.choice(VOLATILE, 1).tolist(), "removed")
            changes.live.link(8)
    assert min(searches) > 20
    plain = changes.plain()
    (found,) = found_by(engine, ["red shoes"], Asked(k=EVERY).options(engine))
    vector = engine.encoder.encode(["red shoes"]).narrow[0]
    assert plain.difference(found, plain.matches("red shoes", vector, Asked(k=EVERY))) is None


def test_a_phrase_equal_to_the_query_is_found_while_it_changes(tmp_path: Path) -> None:
    engine = Engine.load(write_bundle(tmp_path / "bundle", make_ads(200, seed=5, broad=1.0)))
    changes = Changes(engine)
    kinds = ["exact", "phrase", "broad"]
    changes.put([Ad("n", "red tent", {"match_type": "exact"}), Ad("m", "red tent", {"match_type": "phrase"})])

    def search() -> None:
        for query, ids in (("red tent", {"n", "m"}), ("a red tent", {"m"})):
            (found,) = found_by(engine, [query], Asked(k=3).options(engine))
            got = [match.id for match in found]
            assert ids <= set(got)
            assert len(set(got)) == len(got)

    with meanwhile(search, search):
        for at in range(400):
            changes.put([Ad("n", "red tent", {"match_type": kinds[at % 3], "rank": at})])
            changes.put([Ad("m", "red tent", {"match_type": kinds[1 + at % 2], "rank": at})])
            changes.live.link(1)


def test_rows_are_linked_while_they_are_searched(tmp_path: Path) -> None:
    """A search that meets a half-built graph finds the best all the same."""
    engine = Engine.load(write_bundle(tmp_path / "bundle", make_ads(100, seed=5, broad=1.0)))
    ads = make_ads(4000, seed=7, broad=1.0, prefix="n")
    changes = Changes(engine)
    changes.put(Ad(ad.id, ad.text) for ad in ads[:2000])
    queries = [ad.text for ad in ads[::200]]
    vectors = engine.encoder.encode(queries).narrow
    plain: list[Plain] = [changes.plain()]
    hits = [0, 0]

    def search() -> None:
        for query, vector, found in zip(
            queries, vectors, found_by(engine, queries, Asked(k=20).options(engine)), strict=True
        ):
            wanted = plain[0].matches(query, vector, Asked(k=20))
            assert len(found) == 20
            # Ties have no order, so scores tell whether what was found is as good as the best.
            hits[0] += sum(match.score >= wanted[-1].score - 1e-5 for match in found)
            hits[1] += 20

    with meanwhile(search):
        while changes.live.link(5):
            pass
    assert hits[1]
    assert hits[0] >= 0.98 * hits[1]
    assert changes.live.unlinked == 0
    changes.put(Ad(ad.id, ad.text) for ad in ads[2000:])
    plain[0] = changes.plain()
    hits[:] = [0, 0]
    with meanwhile(search):
        while changes.live.link(5):
            pass
    assert hits[0] >= 0.98 * hits[1]
