from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bidmatch.base.errors import InputError
from service.live.store import (
    LiveStore,
    PhraseRecord,
    PhraseRow,
    PhraseVectors,
    State,
    StateError,
)

TENT = PhraseRecord("p1", "Red tent", {"market": "de", "negative_keywords": ["toy"]})
BOOTS = PhraseRecord("p2", "boots")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    with LiveStore.open(tmp_path / "live") as opened:
        yield opened


def vectors_of(model: str, texts: list[str], wide: int = 3) -> PhraseVectors:
    """Vectors that tell by which model and of which text they are."""
    seeds = [[len(model), *model.encode(), *text.encode()] for text in texts]
    rows = np.array([np.random.default_rng(seed).normal(size=2 + wide) for seed in seeds], np.float32)
    rows = rows.reshape(len(texts), 2 + wide)
    return PhraseVectors(model, rows[:, :2], rows[:, 2:])


def encoded(model: str, phrases: list[PhraseRecord]) -> PhraseVectors:
    return vectors_of(model, [phrase.text for phrase in phrases])


def held(store: LiveStore, model: str, rows: list[PhraseRow]) -> list[str]:
    """The ids of the rows that the store has right vectors of; wrong ones fail the test."""
    found = store.vectors(model, rows, 2, 3)
    hits = [rows[position] for position in found.positions]
    expected = vectors_of(model, [str(row.text) for row in hits])
    np.testing.assert_array_equal(found.narrow, expected.narrow)
    np.testing.assert_array_equal(found.wide, expected.wide)
    return [row.id for row in hits]


def test_what_was_put_is_there_after_opening_again(tmp_path: Path) -> None:
    before = time.time_ns() // 1_000_000
    with LiveStore.open(tmp_path) as store:
        rows = store.put([TENT, BOOTS])
    assert rows[0] == PhraseRow(
        "p1",
        "Red tent",
        {"market": "de", "negative_keywords": ["toy"]},
        "active",
        "live",
        rows[0].changed,
        1,
        rows[0].changed,
    )
    assert before <= rows[0].changed <= time.time_ns() // 1_000_000
    assert [row.sequence for row in rows] == [1, 2]
    with LiveStore.open(tmp_path) as store:
        assert store.get("p1") == rows[0]
        assert store.changes(0, 10) == rows
        assert store.last_sequence() == 2
        assert store.get("p3") is None


def test_an_empty_store(store: LiveStore) -> None:
    assert store.changes(0, 10) == []
    assert store.last_sequence() == 0
    assert store.count() == {}
    assert store.put([]) == []
    assert store.vectors("a", [], 4).narrow.shape == (0, 4)


def test_a_record_that_is_stored_just_so_is_no_change(store: LiveStore) -> None:
    first = store.put([PhraseRecord("p1", "tent", {"a": 1, "b": {"c": 2, "d": 3}})])
    assert store.put([PhraseRecord("p1", "tent", {"b": {"d": 3, "c": 2}, "a": 1})]) == first
    assert store.last_sequence() == 1
    (other,) = store.put([PhraseRecord("p1", "tent", {"a": 2})])
    assert (other.sequence, other.columns) == (2, {"a": 2})


def test_of_records_with_the_same_id_the_last_counts(store: LiveStore) -> None:
    rows = store.put([PhraseRecord("p1", "a"), BOOTS, PhraseRecord("p1", "b")])
    assert [row.text for row in rows] == ["b", "boots", "b"]
    assert rows[0] == rows[2] == store.get("p1")
    assert store.changes(0, 10) == [rows[1], rows[2]]


def test_all_or_nothing(store: LiveStore) -> None:
    with pytest.raises(InputError, match="'p2'"):
        store.put([TENT, PhraseRecord("p2", "\ud800")])
    with pytest.raises(InputError, match="'p2'"):
        store.put([TENT, PhraseRecord("p2", "boots", {"a": {1, 2}})])
    with pytest.raises(ValueError, match="2 phrases"):
        store.put([TENT, BOOTS], encoded("a", [TENT]))
    assert store.changes(0, 10) == []
    assert store.put([TENT])[0].sequence == 1


@pytest.mark.parametrize("text", ["", "a\0b", "Ø 10 mm — 花园软管 مروحة", "quote ' \" ; --", "😀" * 1000])
def test_any_text_comes_back_as_it_was(store: LiveStore, text: str) -> None:
    (row,) = store.put([PhraseRecord(f"id {text}", text, {text: text})])
    assert store.get(f"id {text}") == row
    assert (row.text, row.columns) == (text, {text: text})


def test_more_phrases_than_fit_into_one_query(store: LiveStore) -> None:
    records = [PhraseRecord(f"p{i}", f"text {i}") for i in range(2500)]
    first = store.put(records, encoded("a", records))
    assert [row.sequence for row in first] == list(range(1, 2501))
    assert held(store, "a", first) == [row.id for row in first]
    again = store.put([*records[:1200], PhraseRecord("p1200", "new"), *records[1201:]])
    assert [row for row in again if row not in first] == [again[1200]]
    assert store.drop_models({"b"}) == 2499
    assert held(store, "a", again) == []
    ids = [row.id for row in store.changes(0, 10_000)]
    assert len(ids) > 1000
    assert sorted(row.id for row in store.get_many([*ids, "nobody's"])) == sorted(ids)
    assert store.get_many([]) == []


def test_pause_resume_remove_and_add_again(store: LiveStore) -> None:
    store.put([TENT, BOOTS])
    paused = store.set_state("p1", "paused", in_bundle=False)
    assert paused is not None
    assert (paused.state, paused.text, paused.sequence) == ("paused", "Red tent", 3)
    assert store.set_state("p1", "paused", in_bundle=False) == paused
    (changed,) = store.put([PhraseRecord("p1", "blue tent")])
    assert (changed.state, changed.text, changed.sequence) == ("paused", "blue tent", 4)
    resumed = store.set_state("p1", "active", in_bundle=False)
    assert resumed is not None
    assert (resumed.state, resumed.sequence) == ("active", 5)
    removed = store.set_state("p1", "removed", in_bundle=False)
    assert removed is not None
    assert (removed.state, removed.text, removed.sequence) == ("removed", "blue tent", 6)
    assert store.set_state("p1", "removed", in_bundle=False) == removed
    for state in ("active", "paused"):
        with pytest.raises(StateError, match=f"'p1' is removed, so it can't become {state}"):
            store.set_state("p1", state, in_bundle=True)  # type: ignore[arg-type]
    assert store.get("p1") == removed
    assert store.count() == {("active", "live"): 1, ("removed", "live"): 1}
    (back,) = store.put([PhraseRecord("p1", "blue tent")])
    assert (back.state, back.sequence) == ("active", 7)


def test_states_of_phrases_that_only_the_bundle_holds(store: LiveStore) -> None:
    assert store.set_state("b1", "paused", in_bundle=False) is None
    assert store.last_sequence() == 0
    paused = store.set_state("b1", "paused", in_bundle=True)
    assert paused is not None
    assert paused == PhraseRow("b1", None, {}, "paused", "bundle", paused.changed, 1, 0)
    resumed = store.set_state("b1", "active", in_bundle=True)
    assert resumed is not None
    assert (resumed.state, resumed.source, resumed.sequence) == ("active", "bundle", 2)
    assert store.changes(1, 10) == [resumed]
    assert store.set_state("b1", "removed", in_bundle=True) == store.get("b1")
    # The next bundle has no such phrase, so there is nothing that could be removed.
    assert store.set_state("b1", "removed", in_bundle=False) is None
    assert store.count() == {("removed", "bundle"): 1}


def test_a_phrase_of_the_bundle_that_is_then_added(store: LiveStore) -> None:
    store.set_state("p1", "paused", in_bundle=True)
    (row,) = store.put([TENT])
    assert (row.state, row.source, row.text) == ("paused", "live", "Red tent")
    store.set_state("p2", "removed", in_bundle=True)
    (row,) = store.put([BOOTS])
    assert (row.state, row.source) == ("active", "live")


def test_changes_page_by_page(store: LiveStore) -> None:
    store.put([PhraseRecord(f"p{i}", "a") for i in range(7)])
    store.set_state("p2", "paused", in_bundle=False)
    pages = []
    after = 0
    while page := store.changes(after, 3):
        pages.append([row.id for row in page])
        after = page[-1].sequence
    assert pages == [["p0", "p1", "p3"], ["p4", "p5", "p6"], ["p2"]]
    assert after == store.last_sequence() == 8


def test_vectors_belong_to_the_text(store: LiveStore) -> None:
    rows = store.put([TENT, BOOTS], encoded("a", [TENT, BOOTS]))
    assert held(store, "a", rows) == ["p1", "p2"]
    assert held(store, "b", rows) == []
    store.set_state("p1", "paused", in_bundle=False)
    store.put([PhraseRecord("p2", "boots", {"market": "de"})])
    assert held(store, "a", store.changes(0, 10)) == ["p1", "p2"]

    (changed,) = store.put([PhraseRecord("p2", "shoes")])
    assert held(store, "a", [rows[0], changed]) == ["p1"]
    assert store.put_vectors([BOOTS], encoded("a", [BOOTS])) == 0
    assert held(store, "a", [rows[0], changed]) == ["p1"]
    assert store.put_vectors([changed], vectors_of("a", ["shoes"])) == 1
    assert held(store, "a", [rows[0], changed]) == ["p1", "p2"]
    # Who has not heard of the change yet must not take the new text's vectors for the old one's.
    assert held(store, "a", [rows[0], rows[1]]) == ["p1"]


def test_vectors_of_removed_phrases_and_of_none(store: LiveStore) -> None:
    rows = store.put([TENT], encoded("a", [TENT]))
    store.set_state("p1", "removed", in_bundle=False)
    assert held(store, "a", rows) == []
    assert store.put_vectors(rows, encoded("a", [TENT])) == 0
    override = store.set_state("b1", "paused", in_bundle=True)
    assert override is not None
    assert store.put_vectors([override, BOOTS], vectors_of("a", ["", "boots"])) == 0
    store.put([TENT])
    assert held(store, "a", rows) == []


def test_the_vectors_of_the_next_model_are_made_beside_the_current_ones(store: LiveStore) -> None:
    rows = store.put([TENT, BOOTS], encoded("a", [TENT, BOOTS]))
    assert store.put_vectors(rows, encoded("next", [TENT, BOOTS])) == 2
    assert held(store, "a", rows) == held(store, "next", rows) == ["p1", "p2"]
    assert store.drop_models({"next", "other"}) == 2
    assert store.drop_models({"next", "other"}) == 0
    assert held(store, "a", rows) == []
    assert held(store, "next", rows) == ["p1", "p2"]
    assert store.drop_models(set()) == 2
    assert store.last_sequence() == 2


def test_vectors_of_other_widths_are_not_found_but_replaced(store: LiveStore) -> None:
    rows = store.put([TENT], vectors_of("a", [TENT.text], wide=0))
    assert held(store, "a", rows) == []
    found = store.vectors("a", rows, 2)
    assert (found.narrow.shape, found.wide.shape, found.positions.tolist()) == ((1, 2), (1, 0), [0])
    assert store.put_vectors(rows, encoded("a", [TENT])) == 1
    assert held(store, "a", rows) == ["p1"]
    assert store.vectors("a", rows, 2).positions.tolist() == []


def test_rows_that_come_twice_get_their_vectors_twice(store: LiveStore) -> None:
    rows = store.put([TENT, BOOTS], encoded("a", [TENT, BOOTS]))
    assert held(store, "a", [rows[1], rows[0], rows[1]]) == ["p2", "p1", "p2"]


@pytest.mark.parametrize("shapes", [((1, 2), (2, 3)), ((2, 2), (1, 3)), ((2,), (2, 3))])
def test_vectors_that_do_not_fit_the_phrases(store: LiveStore, shapes: Any) -> None:
    rows = store.put([TENT, BOOTS])
    narrow, wide = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match="for 2 phrases"):
        store.put_vectors(rows, PhraseVectors("a", narrow, wide))


def test_many_threads_at_once(store: LiveStore) -> None:
    failed = []

    def work(number: int) -> None:
        try:
            for i in range(10):
                record = PhraseRecord(f"{number} {i}", f"text {i}")
                (row,) = store.put([record, PhraseRecord("shared", record.id)])[:1]
                assert store.get(row.id) == row
                assert row in store.changes(row.sequence - 1, 1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(store.changes(0, 1000)) == 81
    assert store.last_sequence() == 160


ids = st.sampled_from(["p0", "p1", "p2", "p3"])
texts = st.sampled_from(["tent", "boots"])
records = st.lists(
    st.builds(PhraseRecord, ids, texts, st.sampled_from([{}, {"market": "de"}])), min_size=1, max_size=3
)
states = st.sampled_from(["active", "paused", "removed"])
models = st.sampled_from(["a", "b"])


class AgainstADictionary(RuleBasedStateMachine):
    """Whatever is done to a store, through either of two that have it open, a plain dictionary agrees."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.stores = [LiveStore.open(Path(self.folder.name)) for _ in range(2)]
        # id: [text, columns, state, source, sequence]
        self.rows: dict[str, list[Any]] = {}
        self.vectors: set[tuple[str, str]] = set()
        self.sequence = 0

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.folder.cleanup()

    def swap(self) -> LiveStore:
        """The stores take turns."""
        self.stores.reverse()
        return self.stores[0]

    def drop_vectors(self, id: str) -> None:
        self.vectors -= {(id, model) for model in ("a", "b")}

    @rule(records=records, model=st.none() | models)
    def put(self, records: list[PhraseRecord], model: str | None) -> None:
        rows = self.swap().put(records, None if model is None else encoded(model, records))
        for record in records:
            old = self.rows.get(record.id, [None, None, None, None, 0])
            new = [record.text, dict(record.columns), "paused" if old[2] == "paused" else "active", "live"]
            if old[:4] == new:
                continue
            if old[0] != record.text:
                self.drop_vectors(record.id)
            self.sequence += 1
            self.rows[record.id] = [*new, self.sequence]
        if model is not None:
            self.vectors |= {
                (record.id, model) for record in records if self.rows[record.id][0] == record.text
            }
        assert [row.id for row in rows] == [record.id for record in records]
        assert all(self.plain(row) == self.rows[row.id] for row in rows)

    @rule(id=ids, state=states, in_bundle=st.booleans())
    def set_state(self, id: str, state: State, in_bundle: bool) -> None:
        old = self.rows.get(id, [None, {}, None, "bundle", 0])
        if old[2] == "removed" and state != "removed" and (in_bundle or old[3] == "live"):
            with pytest.raises(StateError):
                self.swap().set_state(id, state, in_bundle)
            return
        row = self.swap().set_state(id, state, in_bundle)
        if old[3] == "bundle" and not in_bundle:
            assert row is None
            return
        if old[2] != state:
            self.sequence += 1
            self.rows[id] = [old[0], old[1], state, old[3], self.sequence]
            if state == "removed":
                self.drop_vectors(id)
        assert row is not None
        assert self.plain(row) == self.rows[id]

    @rule(records=records, model=models)
    def put_vectors(self, records: list[PhraseRecord], model: str) -> None:
        taken = [
            record.id
            for record in records
            if record.id in self.rows
            and self.rows[record.id][0] == record.text
            and self.rows[record.id][2] != "removed"
        ]
        assert self.swap().put_vectors(records, encoded(model, records)) == len(taken)
        self.vectors |= {(id, model) for id in taken}

    @rule(keep=st.sets(models))
    def drop_models(self, keep: set[str]) -> None:
        gone = {(id, model) for id, model in self.vectors if model not in keep}
        assert self.swap().drop_models(keep) == len(gone)
        self.vectors -= gone

    @rule()
    def open_again(self) -> None:
        self.stores[0].close()
        self.stores[0] = LiveStore.open(Path(self.folder.name))

    @rule(after=st.integers(0, 20), limit=st.integers(1, 3))
    def changes(self, after: int, limit: int) -> None:
        found = self.swap().changes(after, limit)
        wanted = sorted((row[4], id) for id, row in self.rows.items() if row[4] > after)
        assert [(row.sequence, row.id) for row in found] == wanted[:limit]

    @invariant()
    def agrees(self) -> None:
        store = self.stores[0]
        rows = store.changes(0, 100)
        assert {row.id: self.plain(row) for row in rows} == self.rows
        assert store.last_sequence() == self.sequence
        assert {id: store.get(id) for id in self.rows} == {row.id: row for row in rows}
        assert sum(store.count().values()) == len(rows)
        for (state, source), count in store.count().items():
            assert count == sum(row[2:4] == [state, source] for row in self.rows.values())
        for model in ("a", "b"):
            assert {(id, model) for id in held(store, model, rows)} == {
                pair for pair in self.vectors if pair[1] == model
            }

    @staticmethod
    def plain(row: PhraseRow) -> list[Any]:
        return [row.text, row.columns, row.state, row.source, row.sequence]


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_states_leave_when_a_phrase_was_given(store: LiveStore) -> None:
    (row,) = store.put([TENT])
    time.sleep(0.002)
    paused = store.set_state("p1", "paused", in_bundle=False)
    assert paused is not None
    assert paused.changed > row.changed
    assert paused.edited == row.edited == row.changed


def test_what_was_given_before_a_bundle_and_is_given_again_is_a_change(store: LiveStore) -> None:
    (row,) = store.put([TENT])
    assert store.put([TENT], since=row.edited - 1) == [row]
    time.sleep(0.002)
    (again,) = store.put([TENT], since=row.edited)
    assert again.sequence == row.sequence + 1
    assert again.edited > row.edited
    assert store.put([TENT], since=row.edited) == [again]
