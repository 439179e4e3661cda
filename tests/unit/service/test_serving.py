"""What answers in one process, and how another bundle takes its place."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.bundle.read import open_bundle
from service.engine import Engine, EngineSettings
from service.live.store import LiveStore, PhraseRecord, PhraseRow
from service.options import MatchOptions
from service.serving import Probes, RefusedError, Serving, newest_bundle
from tests.integration.service.ads import LATER as LATER_MS
from tests.integration.service.ads import Ad, ads_of, make_ads, write_bundle
from tests.integration.service.swapping import damage, id_of, variant

LONG_AGO = "2000-01-01T00:00:00+00:00"
LATER = (datetime.now(UTC) + timedelta(days=365)).isoformat()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    with LiveStore.open(tmp_path / "live") as store:
        yield store


@pytest.fixture
def make(tiny_bundle: Path) -> Iterator[Callable[..., Serving]]:
    """Serving of the tiny bundle, stopped in the end."""
    made: list[Serving] = []

    def serving(store: LiveStore | None = None, *, bundle: Path = tiny_bundle, **settings: object) -> Serving:
        named = {"cache_bytes": 1_000_000, "probes": 16, **settings}
        one = Serving(open_bundle(bundle), EngineSettings(), store=store, **named)  # type: ignore[arg-type]
        one.start()
        made.append(one)
        return one

    yield serving
    for one in made:
        one.stop()


@pytest.fixture(scope="module")
def other(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant(tiny_bundle, tmp_path_factory.mktemp("serving") / "other", mark="B-")


def best(serving: Serving, query: str, k: int = 5) -> list[str]:
    """Ids of a query's matches."""
    engine = serving.current.engine
    found = engine.find(engine.encode([query]), MatchOptions(k))
    return list(engine.named(found.live).take(found.rows)[0])


def add(serving: Serving, store: LiveStore, *phrases: tuple[str, str]) -> None:
    """Live phrases, visible when this returns."""
    rows = store.put([PhraseRecord(id, text) for id, text in phrases])
    assert serving.sync is not None
    assert serving.sync.wait_for(max(row.sequence for row in rows), 10)


def set_state(serving: Serving, store: LiveStore, id: str, state: str) -> None:
    row = store.set_state(id, state, bool(serving.current.engine.ids.find([id])))  # type: ignore[arg-type]
    assert row is not None
    assert serving.sync is not None
    assert serving.sync.wait_for(row.sequence, 10)


def swap(serving: Serving, bundle: Path) -> None:
    serving.switch(serving.prepare(bundle))


def test_another_bundle_takes_over(make: Callable[..., Serving], tiny_bundle: Path, other: Path) -> None:
    serving = make()
    told: list[str] = []
    serving.on_switch = lambda engine: told.append(engine.bundle_id)
    before = serving.current
    assert serving.previous is None
    loaded = serving.prepare(other)
    assert serving.current is before
    assert told == []
    serving.switch(loaded)
    assert serving.current is loaded
    assert serving.current.cache is not before.cache
    assert (serving.previous, told) == (id_of(tiny_bundle), [id_of(other)])
    assert "B-p0" in best(serving, "red running shoes", 2)
    # A request that began before keeps what it began with.
    found = before.engine.find(before.engine.encode(["red running shoes"]), MatchOptions(2))
    assert set(before.engine.named(found.live).take(found.rows)[0]) == {"p0", "p1"}
    assert serving.report(1.23456) == {
        "bundle": id_of(other),
        "previous": id_of(tiny_bundle),
        "phrases": 400,
        "live_phrases": 0,
        "agreement": None,
        "seconds": 1.235,
    }


def test_a_bundle_is_warm_and_its_live_phrases_linked_when_it_takes_over(
    make: Callable[..., Serving], store: LiveStore, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = make(store)
    add(serving, store, *((f"live {at}", f"red tent {at}") for at in range(200)))
    warmed: list[Engine] = []
    match = Engine.match
    monkeypatch.setattr(
        Engine, "match", lambda engine, *asked: (warmed.append(engine), match(engine, *asked))[1]
    )
    loaded = serving.prepare(other)
    # What encoding costs is known, so it is not measured; there were no queries to try the bundle with.
    assert warmed == [loaded.engine]
    assert loaded.live is not None
    assert (len(loaded.live[0].ids), loaded.live[0].unlinked) == (200, 0)


def test_the_bundle_before_goes_at_once(make: Callable[..., Serving], store: LiveStore, other: Path) -> None:
    """Its memory and its files do not wait for a collection, which may be rare."""
    serving = make(store)
    add(serving, store, ("live", "red tent"))
    serving.probes.record("red tent")
    gone = [weakref.ref(serving.current), weakref.ref(serving.current.engine)]
    gone += [weakref.ref(serving.current.engine.bundle), weakref.ref(serving.current.engine.live)]
    gc.collect()
    gc.disable()
    try:
        swap(serving, other)
        # The thread that follows the store may hold the old one for a moment.
        add(serving, store, ("later", "blue tent"))
        assert [one() for one in gone] == [None] * 4
    finally:
        gc.enable()


def test_a_bundle_that_is_prepared_and_not_taken_goes_too(
    make: Callable[..., Serving], store: LiveStore, other: Path
) -> None:
    serving = make(store)
    loaded = serving.prepare(other)
    gone = weakref.ref(loaded.engine)
    del loaded
    assert gone() is None


@pytest.mark.parametrize(
    "name", ["encoder.onnx", "tokenizer.json", "phrases.arrow", "links.npy", "manifest.json"]
)
def test_a_damaged_bundle_is_refused(
    make: Callable[..., Serving], other: Path, tmp_path: Path, name: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(other, bundle)
    damage(bundle, name)
    serving = make()
    before = serving.current
    with pytest.raises(RefusedError) as refused:
        serving.prepare(bundle)
    assert name in refused.value.reason
    assert serving.current is before


def test_what_another_process_verified_is_not_read_again(
    make: Callable[..., Serving], other: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(other, bundle)
    with open_bundle(bundle) as opened:
        stamps = dict(opened.stamps)
    serving = make()
    assert serving.prepare(bundle, stamps=stamps).engine.bundle_id == id_of(other)
    damage(bundle, "tokenizer.json")
    with pytest.raises(RefusedError):
        serving.prepare(bundle, stamps=stamps)


def test_a_bundle_without_matches_for_the_probes_is_refused(
    make: Callable[..., Serving],
    tiny_bundle: Path,
    tmp_path: Path,
) -> None:
    silent = variant(tiny_bundle, tmp_path / "silent", match_type="exact")
    serving = make()
    swap_untried = serving.prepare(silent)
    assert swap_untried.probed is None
    for query in ("cheap red tent", "blue boots", "green socks for kids"):
        serving.probes.record(query)
    with pytest.raises(RefusedError) as refused:
        serving.prepare(silent)
    assert "no match for 3 of 3 queries of late" in refused.value.reason
    assert refused.value.hint is not None


def test_queries_that_never_had_matches_do_not_count(
    make: Callable[..., Serving],
    tiny_bundle: Path,
    tmp_path: Path,
) -> None:
    silent = variant(tiny_bundle, tmp_path / "silent", match_type="exact")
    serving = make(bundle=silent)
    serving.probes.record("cheap red tent")
    assert serving.prepare(variant(silent, tmp_path / "again", mark="C-")).probed is None
    assert serving.prepare(tiny_bundle).probed is None


def test_what_bundles_agree_on(make: Callable[..., Serving], tiny_bundle: Path, tmp_path: Path) -> None:
    serving = make()
    for query in ("cheap red tent", "blue boots"):
        serving.probes.record(query)
    assert serving.prepare(tiny_bundle).probed == 1.0
    assert serving.prepare(variant(tiny_bundle, tmp_path / "other", mark="B-")).probed == 0.0
    serving.switch(serving.prepare(tiny_bundle))
    assert serving.report(0)["agreement"] == 1.0


def test_probes_are_the_latest_distinct_queries() -> None:
    probes = Probes(3)
    for query in ("a", "b", "a", "c", "b"):
        probes.record(query)
    assert probes.queries() == ["a", "b", "c"]
    probes.record("d")
    assert probes.queries() == ["b", "c", "d"]
    probes.record("a")
    assert probes.queries() == ["c", "d", "a"]


def test_no_probes_are_kept_where_none_are_wanted(make: Callable[..., Serving], other: Path) -> None:
    probes = Probes(0)
    probes.record("a")
    assert probes.queries() == []
    serving = make(probes=0)
    serving.probes.record("a")
    assert serving.prepare(other).probed is None


def test_probes_from_many_threads() -> None:
    probes = Probes(50)

    def record(number: int) -> None:
        for i in range(2000):
            probes.record(f"q{(i * 7 + number) % 120}")

    threads = [threading.Thread(target=record, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(probes.queries()) == len(set(probes.queries())) == 50
    for i in range(120):
        probes.record(f"new{i}")
    assert probes.queries() == [f"new{i}" for i in range(70, 120)]


def test_live_phrases_are_carried_over(make: Callable[..., Serving], store: LiveStore, other: Path) -> None:
    serving = make(store)
    add(serving, store, ("mine", "waterproof tent for kids"), ("paused", "waterproof boots"))
    set_state(serving, store, "paused", "paused")
    set_state(serving, store, "p0", "removed")
    swap(serving, other)
    assert best(serving, "waterproof tent for kids")[0] == "mine"
    assert "paused" not in best(serving, "waterproof boots", 400)
    # The state was that of another phrase: here its id is `B-p0`.
    assert "B-p0" in best(serving, "red running shoes", 2)
    set_state(serving, store, "paused", "active")
    assert best(serving, "waterproof boots")[0] == "paused"
    add(serving, store, ("after", "cheap waterproof socks"))
    assert best(serving, "cheap waterproof socks")[0] == "after"


def test_paused_and_removed_phrases_of_the_bundle_stay_so(
    make: Callable[..., Serving],
    store: LiveStore,
    tiny_bundle: Path,
    tmp_path: Path,
) -> None:
    serving = make(store)
    set_state(serving, store, "p0", "paused")
    set_state(serving, store, "p3", "removed")
    swap(serving, variant(tiny_bundle, tmp_path / "later", created=LATER))
    everything = best(serving, "red running shoes", 400)
    assert not {"p0", "p3"} & set(everything)
    set_state(serving, store, "p0", "active")
    assert "p0" in best(serving, "red running shoes", 2)


def test_a_phrase_that_the_new_bundle_trains_leaves_the_live_set(
    make: Callable[..., Serving],
    store: LiveStore,
    tiny_bundle: Path,
    tmp_path: Path,
) -> None:
    """Once, with the bundle's text and vector; and back where an older bundle takes over again."""
    serving = make(store)
    add(serving, store, ("mine", "waterproof tent"), ("kept", "waterproof boots"))
    trained = variant(
        tiny_bundle, tmp_path / "trained", renamed={100: ("mine", "trained tent")}, created=LATER
    )
    swap(serving, trained)
    engine = serving.current.engine
    assert engine.live is not None
    assert (engine.live.active, engine.live.holds("mine"), engine.live.holds("kept")) == (1, False, True)
    assert best(serving, "x", 401).count("mine") == 1
    assert best(serving, "trained tent")[0] == "mine"
    swap(serving, tiny_bundle)
    assert serving.current.engine.live is not None
    assert serving.current.engine.live.holds("mine")
    assert best(serving, "waterproof tent")[0] == "mine"


def test_what_changed_after_the_bundle_was_made_stays_live(
    make: Callable[..., Serving],
    store: LiveStore,
    tiny_bundle: Path,
    tmp_path: Path,
) -> None:
    serving = make(store)
    add(serving, store, ("mine", "waterproof tent"))
    store.put([PhraseRecord("same", "Waterproof Boots", {"match_type": "broad"})])
    trained = variant(
        tiny_bundle,
        tmp_path / "trained",
        renamed={100: ("mine", "trained tent"), 101: ("same", "Waterproof  Boots")},
        created=LONG_AGO,
    )
    swap(serving, trained)
    engine = serving.current.engine
    assert engine.live is not None
    assert engine.live.holds("mine")
    assert best(serving, "waterproof tent")[0] == "mine"
    assert best(serving, "x", 402).count("mine") == 1
    # It says what the live phrase says, so there is nothing to stand for.
    assert not engine.live.holds("same")
    assert best(serving, "x", 402).count("same") == 1


def test_a_state_does_not_bring_back_a_text_from_before_the_bundle(
    make: Callable[..., Serving],
    store: LiveStore,
    tiny_bundle: Path,
    tmp_path: Path,
) -> None:
    serving = make(store)
    add(serving, store, ("mine", "waterproof tent"))
    now = (datetime.now(UTC) + timedelta(milliseconds=2)).isoformat()
    time.sleep(0.01)
    swap(
        serving, variant(tiny_bundle, tmp_path / "new", renamed={100: ("mine", "trained tent")}, created=now)
    )
    for state in ("paused", "active"):
        set_state(serving, store, "mine", state)
    engine = serving.current.engine
    assert engine.live is not None
    assert not engine.live.holds("mine")
    assert best(serving, "trained tent")[0] == "mine"


@pytest.mark.parametrize(
    ("change", "stands"),
    [
        ({}, True),
        ({"negative_keywords": None}, False),
        ({"bid": 0.2}, False),
        ({"market": "at"}, False),
    ],
)
def test_a_phrase_of_the_bundle_stands_for_one_of_the_very_same_columns(
    change: dict[str, Any], stands: bool, tmp_path: Path
) -> None:
    """One that was taken away is not there; a float32 of the bundle is the number that was given."""
    columns = {"market": "de", "bid": 0.1, "negative_keywords": ["toy"]}
    ads = [Ad("mine", "waterproof tent", columns), *make_ads(50, seed=3, broad=1.0)]
    engine = Engine.load(write_bundle(tmp_path / "bundle", ads))
    held = next(ad for ad in ads_of(engine) if ad.id == "mine").columns
    given = {name: value for name, value in {**held, **columns, **change}.items() if value is not None}
    row = PhraseRow("mine", "waterproof tent", given, "active", "live", LATER_MS, 1, LATER_MS)
    assert engine.serves(engine.ids.find(["mine"])["mine"], row) is stands


def test_changes_while_a_bundle_is_prepared_are_there_when_it_takes_over(
    make: Callable[..., Serving], store: LiveStore, other: Path
) -> None:
    serving = make(store)
    add(serving, store, ("early", "waterproof tent"))
    loaded = serving.prepare(other)
    add(serving, store, ("meanwhile", "waterproof boots"))
    set_state(serving, store, "early", "removed")
    serving.switch(loaded)
    assert best(serving, "waterproof boots")[0] == "meanwhile"
    assert "early" not in best(serving, "waterproof tent", 400)
    assert serving.sync is not None
    assert serving.sync.applied == store.last_sequence()


def test_a_change_that_is_visible_stays_so_while_bundles_swap(
    make: Callable[..., Serving],
    store: LiveStore,
    tiny_bundle: Path,
    other: Path,
) -> None:
    """Whoever waited for a change finds it in whatever answers next."""
    serving = make(store)
    over = threading.Event()
    missing: list[str] = []

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            id, text = f"live-{number}", f"tent number {number}"
            add(serving, store, (id, text))
            if best(serving, text)[0] != id:
                missing.append(id)

    threads = [threading.Thread(target=change)]
    for thread in threads:
        thread.start()
    for turn in range(12):
        swap(serving, (other, tiny_bundle)[turn % 2])
    over.set()
    for thread in threads:
        thread.join()
    assert missing == []


def test_nobody_hears_of_a_change_between_two_bundles(
    make: Callable[..., Serving], store: LiveStore, other: Path
) -> None:
    """Who hears that a change is visible asks at once, and must not meet the bundle before."""
    serving = make(store)
    loaded = serving.prepare(other)
    add(serving, store, ("mine", "waterproof tent"))
    sync = serving.sync
    assert sync is not None
    answered_by: list[str] = []

    def wait() -> None:
        assert sync.wait_for(store.last_sequence(), 10)
        answered_by.append(serving.current.engine.bundle_id)

    waiting = threading.Thread(target=wait)
    switch = sync.switch

    def switch_slowly(*arguments: object) -> None:
        *others, take_over = arguments

        def slowly() -> None:
            waiting.start()
            waiting.join(0.2)
            take_over()  # type: ignore[operator]

        switch(*others, slowly)  # type: ignore[arg-type]

    sync.switch = switch_slowly  # type: ignore[method-assign, assignment]
    serving.switch(loaded)
    waiting.join()
    assert answered_by == [id_of(other)]


def test_a_store_that_fails_at_the_switch_is_followed_later(
    make: Callable[..., Serving], store: LiveStore, other: Path, tmp_path: Path
) -> None:
    serving = make(store)
    loaded = serving.prepare(other)
    add(serving, store, ("mine", "waterproof tent"))
    away = tmp_path / "away"
    with store._database._read_lock:
        # Both connections would be open by now, and an open file is read whatever its name.
        store._database._disconnect()
        store.path.rename(away)
    serving.switch(loaded)
    assert serving.current is loaded
    away.rename(store.path)
    add(serving, store, ("later", "waterproof boots"))
    assert best(serving, "waterproof tent")[0] == "mine"
    assert best(serving, "waterproof boots")[0] == "later"


def test_changes_are_told_to_the_cache_of_the_present_bundle(
    make: Callable[..., Serving],
    store: LiveStore,
    tiny_bundle: Path,
    other: Path,
) -> None:
    dropped: list[int] = []
    serving = make(store, on_change=dropped.append)
    told: list[str] = []
    before, after = serving.current, serving.prepare(other)
    for loaded in (before, after):
        real = loaded.cache.changed

        def changed(*change: object, real: Callable = real, name: str = loaded.engine.bundle_id) -> int:
            told.append(name)
            return real(*change)

        loaded.cache.changed = changed  # type: ignore[method-assign, assignment]
    add(serving, store, ("one", "waterproof tent"))
    assert told == [id_of(tiny_bundle)]
    serving.switch(after)
    add(serving, store, ("two", "waterproof boots"))
    assert told[1:] == [id_of(other)] * 2
    assert len(dropped) == 3


def test_the_bundle_that_a_path_means(tiny_bundle: Path, tmp_path: Path) -> None:
    assert newest_bundle(tiny_bundle) == tiny_bundle
    none = tmp_path / "none"
    assert newest_bundle(none) == none
    folder = tmp_path / "bundles"
    folder.mkdir()
    assert newest_bundle(folder) == folder
    old = variant(tiny_bundle, folder / "z-old", created="2020-01-01T00:00:00+00:00")
    assert newest_bundle(folder) == old
    new = variant(tiny_bundle, folder / "a-new", created="2021-01-01T00:00:00+00:00")
    assert newest_bundle(folder) == new
    # One that is still being written, one that is damaged, a file, a link to the oldest.
    shutil.copytree(new, folder / ".later.1234abcd.partial")
    shutil.copytree(new, folder / "damaged")
    damage(folder / "damaged", "manifest.json")
    (folder / "notes.txt").write_text("none")
    (folder / "current").symlink_to("z-old")
    variant(tiny_bundle, folder / ".newest", created="2022-01-01T00:00:00+00:00")
    assert newest_bundle(folder) == new
    assert newest_bundle(folder / "current") == folder / "current"


def test_scores_of_a_taken_bundle_are_those_of_its_file(
    make: Callable[..., Serving],
    tiny_bundle: Path,
    other: Path,
) -> None:
    fresh, swapped = make(bundle=other), make()
    swap(swapped, other)
    queries = ["red running shoes", "cheap tent for kids", "x"]
    one, two = (serving.current.engine.match(queries, 20) for serving in (fresh, swapped))
    np.testing.assert_array_equal(one.rows, two.rows)
    np.testing.assert_array_equal(one.scores, two.scores)
