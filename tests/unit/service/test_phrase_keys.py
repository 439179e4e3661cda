from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidmatch.base.text import key
from export.bundle.lookup import lookup_tables
from service.phrase_keys import PhraseIds, PhraseKeys


def tables(texts: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return lookup_tables(pa.table({"id": texts, "text": texts}))


def keys_of(*texts: str) -> PhraseKeys:
    column = pa.chunked_array([pa.array(texts, pa.string())])
    return PhraseKeys(tables(column)[1], column)


def test_all_phrases_of_a_key_in_row_order_for_each_query() -> None:
    phrases = keys_of("Red Shoes", "tent", "red shoes", "RED  SHOES", "boots")
    positions, rows = phrases.find(["nothing", "red shoes", "boots", "red shoes"])
    assert positions.tolist() == [1, 1, 1, 2, 3, 3, 3]
    assert rows.tolist() == [0, 2, 3, 4, 0, 2, 3]
    assert positions.dtype == rows.dtype == np.int64


def test_a_phrase_without_any_text_equals_no_query() -> None:
    positions, rows = keys_of("", "  ", "tent").find(["", "tent"])
    assert (positions.tolist(), rows.tolist()) == ([1], [2])


def test_no_queries_no_phrases() -> None:
    assert [len(part) for part in keys_of("tent").find([])] == [0, 0]
    assert [len(part) for part in keys_of().find(["tent"])] == [0, 0]


def test_phrases_whose_hashes_collide_are_told_apart_by_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("service.phrase_keys", "export.bundle.lookup"):
        monkeypatch.setattr(f"{module}.hash_texts", lambda texts: np.full(len(list(texts)), 7))
    positions, rows = keys_of("tent", "boots", "Tent").find(["boots", "socks", "tent"])
    assert positions.tolist() == [0, 2, 2]
    assert rows.tolist() == [1, 0, 2]


def test_phrases_in_several_chunks() -> None:
    texts = pa.chunked_array([pa.array(["a", "b"]), pa.array([], pa.string()), pa.array(["B", "c"])])
    assert PhraseKeys(tables(texts)[1], texts).find(["b"])[1].tolist() == [1, 2]


def test_ids_are_told_apart_as_they_are_written() -> None:
    ids = pa.chunked_array([pa.array(["a", "A", "", "\u00e9", "e\u0301"])])
    found = PhraseIds(tables(ids)[0], ids).find(["e\u0301", "A", "", "none", "A"])
    assert found == {"e\u0301": 4, "A": 1, "": 2}
    assert PhraseIds(tables(ids)[0], ids).find([]) == {}


words = st.text(alphabet="aAäÄß ſK\u200b", max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(words, max_size=12), st.lists(words, max_size=5))
def test_agrees_with_comparing_every_pair(phrases: list[str], queries: list[str]) -> None:
    asked = [key(query) for query in queries]
    positions, rows = keys_of(*phrases).find(asked)
    wanted = [
        (i, row)
        for i, query in enumerate(asked)
        for row, phrase in enumerate(phrases)
        if query and key(phrase) == query
    ]
    assert list(zip(positions.tolist(), rows.tolist(), strict=True)) == wanted
