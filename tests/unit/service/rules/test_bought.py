"""Match types and negative keywords against a plain re-implementation that looks at one pair at a time."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bidmatch.base.errors import ConfigError
from bidmatch.base.text import key
from export.bundle.lookup import EXACT, PHRASE, hash_texts, lookup_tables, make_table, match_type_codes
from service.rules.bought import MAX_WORDS, GrowingRuns, PhraseRuns
from service.rules.negatives import GrowingNegatives, Kind, Negatives, kind_of
from service.rules.words import Vocabulary, joined_array, split, words


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", key(text))


def contains(run: list[str], query: list[str]) -> bool:
    return any(query[start : start + len(run)] == run for start in range(len(query)))


def negative_hits(query: str, keyword: str) -> bool:
    asked, negative, written = words_of(query), words_of(keyword), key(keyword)
    if not negative:
        return False
    if written.startswith('"') and written.endswith('"'):
        return contains(negative, asked)
    if written.startswith("[") and written.endswith("]"):
        return negative == asked
    return all(word in asked for word in negative)


def allowed(query: str, phrase: str, match_type: str | None, negatives: Any) -> bool:
    """Whether a query may get a phrase: the contract, word for word."""
    if isinstance(negatives, str):
        negatives = negatives.split(",")
    if any(negative_hits(query, keyword) for keyword in negatives or [] if keyword is not None):
        return False
    match_type = key(match_type or "")
    if match_type == "exact":
        return key(query) == key(phrase)
    if match_type == "phrase":
        run = words_of(phrase)
        return key(query) == key(phrase) or (bool(run) and contains(run, words_of(query)))
    return True


def test_the_plain_rules() -> None:
    assert allowed("buy red shoes", "Red  Shoes", "phrase", None)
    assert not allowed("shoes red", "red shoes", "phrase", None)
    assert not allowed("redshoes", "shoes", "phrase", None)
    assert allowed("RED shoes", "red shoes", "exact", None)
    assert not allowed("red shoes!", "red shoes", "exact", None)
    assert allowed("tent", "red shoes", "close", None)
    assert not allowed("cheap red shoes", "tent", None, "red cheap")
    assert allowed("cheap red shoes", "tent", None, ['"red cheap"', "[red shoes]", "", "free", None])
    assert not allowed("red shoes", "tent", "broad", '[red shoes],"boots"')


# Few words, so that they meet; some whose case folds to more letters or to others, signs that words end at.
VOCABULARY = ["red", "Red", "shoes", "a", "é", "E\u0301", "ß", "SS", "ſ", "İ", "日本", "ने", "x_1", "10", "²"]
GLUE = [" ", "  ", "-", ".", ",", "\u200b", "\u3000", "\n", "'", '"', "\x00", "\x7f", "&"]
text = st.lists(st.sampled_from(VOCABULARY) | st.sampled_from(GLUE), max_size=6).map("".join) | st.lists(
    st.sampled_from(VOCABULARY), max_size=5
).map(" ".join)
ascii_text = st.lists(st.sampled_from(["red", "Red", "shoes", "a", " ", " ", "-", '"', "["]), max_size=9).map(
    "".join
)
phrase_text = text | ascii_text | st.text(max_size=6)
keyword = st.one_of(
    phrase_text,
    phrase_text.map(lambda one: f'"{one}"'),
    phrase_text.map(lambda one: f"[{one}]"),
    phrase_text.map(lambda one: f' \x00"{one}" \n'),
    st.sampled_from(["", '"', '""', "[]", "[", "]", '"red"', "[red", 'red"', "＂red shoes＂", "red red"]),
)
negative_lists = st.none() | st.lists(st.none() | keyword, max_size=3)
negative_texts = st.none() | st.lists(keyword, max_size=3).map(",".join)
match_type = st.sampled_from([None, "", "exact", "phrase", "phrase", "broad", "Exact", "close"])
# No bundle is without phrases.
phrases = st.lists(st.tuples(phrase_text, match_type), min_size=1, max_size=10)


def positions_and_rows(found: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, int]]:
    assert found[0].dtype == found[1].dtype == np.int64
    return list(zip(found[0].tolist(), found[1].tolist(), strict=True))


def run_table(table: pa.Table) -> np.ndarray:
    """The bundle's table of runs."""
    ids = pa.array([str(row) for row in range(len(table))], pa.string())
    return lookup_tables(table.select(["text", "match_type"]).append_column("id", ids))[2]


def cut(column: pa.Array, at: int) -> pa.ChunkedArray:
    at = min(at, len(column))
    return pa.chunked_array([column[:at], column[at:]], column.type)


@settings(max_examples=500, deadline=None)
@given(phrases, st.data(), st.lists(phrase_text, min_size=1, max_size=4), st.integers(0, 10), st.booleans())
def test_all_rules_together_agree_with_the_plain_ones(
    bought: list[tuple[str, str | None]], data: st.DataObject, queries: list[str], at: int, as_lists: bool
) -> None:
    lists = negative_lists if as_lists else negative_texts
    held = data.draw(st.lists(lists, min_size=len(bought), max_size=len(bought)))
    texts = pa.array([phrase for phrase, _ in bought], pa.string())
    negatives_type = pa.list_(pa.string()) if as_lists else pa.string()
    table = pa.table(
        {
            "text": cut(texts, at),
            "match_type": cut(pa.array([kind for _, kind in bought], pa.string()), at),
            "negative_keywords": cut(pa.array(held, negatives_type), at),
        }
    )
    codes = match_type_codes(table)
    of_phrase_type = np.flatnonzero(codes == PHRASE)
    asked = [words(query) for query in queries]
    runs = PhraseRuns(run_table(table), table["text"])
    growing = GrowingRuns()
    growing.extend([bought[row][0] for row in of_phrase_type], of_phrase_type.tolist())
    contained = positions_and_rows(runs.find(asked))
    assert contained == positions_and_rows(growing.find(asked))
    equal = [
        (position, row)
        for position, query in enumerate(queries)
        for row, (phrase, _) in enumerate(bought)
        if key(query) == key(phrase)
    ]
    one_by_one = GrowingNegatives()
    for value in held:
        one_by_one.extend([value])
    negatives = Negatives(table["negative_keywords"])
    for position, query in enumerate(queries):
        blocked = negatives.blocked(asked[position])
        assert blocked.dtype == np.int32
        assert one_by_one.blocked(asked[position]).tolist() == blocked.tolist()
        found = {row for row in range(len(bought)) if codes[row] not in (PHRASE, EXACT)}
        found |= {row for place, row in contained if place == position}
        found |= {row for place, row in equal if place == position}
        # No query that is nothing is ever asked, and no phrase equals it.
        if key(query):
            assert sorted(found - set(blocked.tolist())) == [
                row for row, (phrase, kind) in enumerate(bought) if allowed(query, phrase, kind, held[row])
            ]
        for row, value in enumerate(held):
            keywords = (
                value.split(",")
                if isinstance(value, str)
                else [one for one in value or [] if one is not None]
            )
            hitting = [one.strip() for one in keywords if negative_hits(query, one)]
            for side in (negatives, one_by_one):
                hit = side.hit(row, asked[position])
                assert hit in hitting if hitting else hit is None


@settings(max_examples=300, deadline=None)
@given(st.lists(phrase_text, max_size=8))
@example(["", "red", " "])
def test_words_of_whole_columns(texts: list[str]) -> None:
    column = pa.array(["x", *texts], pa.large_string())[1:]
    assert [one.split() for one in joined_array(column).to_pylist()] == [words_of(one) for one in texts]
    parts = split(column)
    distinct = parts.distinct.to_pylist()
    spoken = [distinct[code] for code in parts.codes]
    assert [spoken[start:end] for start, end in zip(parts.offsets[:-1], parts.offsets[1:], strict=True)] == [
        words_of(one) for one in texts
    ]
    assert [words(one) for one in texts] == [words_of(one) for one in texts]


def runs_of(*texts: str) -> PhraseRuns:
    column = pa.array(texts, pa.string())
    return PhraseRuns(run_table(pa.table({"text": column, "match_type": ["phrase"] * len(texts)})), column)


def test_a_query_that_repeats_itself_finds_each_phrase_once() -> None:
    found = runs_of("a", "a a", "b", "a a a a", "A!").find([["a", "a", "a"], [], ["b"], ["c"]])
    assert positions_and_rows(found) == [(0, 0), (0, 1), (0, 4), (2, 2)]


def test_only_the_rows_of_phrase_type_are_found() -> None:
    texts = pa.chunked_array([["red", "red"], ["red"]])
    table = run_table(pa.table({"text": texts, "match_type": ["phrase", None, "phrase"]}))
    runs = PhraseRuns(table, texts)
    assert runs.find([["red"]])[1].tolist() == [0, 2]
    assert len(runs) == 2


def test_runs_do_not_reach_from_one_query_into_the_next() -> None:
    assert positions_and_rows(runs_of("a b", "b").find([["a"], ["b"]])) == [(1, 1)]


def test_no_phrases_no_queries_no_words() -> None:
    empty = PhraseRuns(np.empty((2, 0), np.int64), pa.chunked_array([], pa.string()))
    for runs in (empty, runs_of("", "!"), GrowingRuns()):
        assert positions_and_rows(runs.find([["a"], []])) == []
    assert positions_and_rows(runs_of("a").find([])) == []
    assert positions_and_rows(runs_of("a").find([[], []])) == []


@pytest.mark.parametrize("length", [MAX_WORDS, MAX_WORDS + 1])
def test_huge_queries_and_phrases_are_looked_at_as_far_as_the_bound(length: int) -> None:
    query = [f"w{at}" for at in range(1000)]
    beyond = f"w{MAX_WORDS - 1} w{MAX_WORDS}"
    texts = [" ".join(query[:length]), " ".join(query[length - 1 : length]), f"w{MAX_WORDS - 1}", beyond]
    growing = GrowingRuns()
    growing.extend(texts, range(4))
    for runs in (runs_of(*texts), growing):
        assert runs.find([query])[1].tolist() == ([0, 1, 2] if length == MAX_WORDS else [2])


def test_phrases_whose_hashes_collide_are_told_apart_by_their_text() -> None:
    texts = pa.array(["red shoes", "red boots", "Red Shoes"])
    runs = PhraseRuns(make_table(np.repeat(hash_texts(["red shoes"]), 3), np.arange(3)), texts)
    assert runs.find([["buy", "red", "shoes"]])[1].tolist() == [0, 2]


def test_words_whose_hashes_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.bundle.lookup.hash_texts", lambda texts: np.full(len(texts), 7))
    vocabulary = Vocabulary(pa.array(["a", "b"], pa.large_string()))
    assert vocabulary.numbers(["b", "c", "a", "b"]) == [1, -1, 0, 1]


@settings(max_examples=500, deadline=None)
@given(keyword)
def test_notation_is_read_the_same_way_one_by_one_and_in_columns(one: str) -> None:
    written = key(one)
    wanted = Kind.ALL
    if len(written) > 1 and written[0] == written[-1] == '"':
        wanted = Kind.RUN
    elif written[:1] == "[" and written[-1:] == "]":
        wanted = Kind.WHOLE
    assert kind_of(written) == wanted
    if words_of(one):
        assert Negatives(pa.array([[one]]))._kinds.tolist() == [wanted]


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.string(), ["free, used", None, '"red shoes"', ",", "FREE"]),
        (pa.large_string(), ["free, used", None, '"red shoes"', ",", "FREE"]),
        (pa.dictionary(pa.int8(), pa.string()), ["free, used", None, '"red shoes"', ",", "FREE"]),
        (pa.list_(pa.string()), [["free", " used"], None, ['"red shoes"'], ["", None], ["FREE", "free"]]),
        (pa.large_list(pa.large_string()), [["free", " used"], None, ['"red shoes"'], [], ["FREE", "free"]]),
        (
            pa.list_(pa.dictionary(pa.int8(), pa.string())),
            [["free", "used"], None, ['"red shoes"'], [], ["free"]],
        ),
        (
            pa.list_(pa.string(), 2),
            [["free", "used"], None, ['"red shoes"', None], [None, ""], ["free", "free"]],
        ),
    ],
)
def test_columns_of_negative_keywords(type_: pa.DataType, values: list) -> None:
    for at in (0, 2, 5):
        negatives = Negatives(cut(pa.array(values, type_), at))
        assert len(negatives) == 5
        assert negatives.blocked(["free", "red", "shoes"]).tolist() == [0, 2, 4]
        assert negatives.blocked(["used"]).tolist() == [0]
        assert negatives.hit(0, ["used", "free"]) in ("used", "free")
        assert negatives.hit(1, ["used", "free"]) is None
    assert Negatives(pa.array(values, type_)[2:]).blocked(["free", "red", "shoes"]).tolist() == [0, 2]


@pytest.mark.parametrize(
    "column",
    [None, pa.nulls(3), pa.array([None] * 3, pa.list_(pa.null())), pa.chunked_array([], pa.string())],
)
def test_no_negative_keywords_block_nothing(column: Any) -> None:
    for negatives in (Negatives(column), GrowingNegatives()):
        for query in ([], ["free"]):
            assert negatives.blocked(query).tolist() == []
            assert negatives.blocked(query).dtype == np.int32
            assert negatives.hit(0, query) is None


@pytest.mark.parametrize("type_", [pa.int64(), pa.list_(pa.int8()), pa.list_(pa.list_(pa.string()))])
def test_a_column_of_something_else_is_refused(type_: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="'negative_keywords' holds"):
        Negatives(pa.nulls(2, type_))


def test_a_text_with_commas_is_split_and_an_element_with_commas_is_not() -> None:
    assert Negatives(pa.array(["free, used shoes"])).blocked(["free"]).tolist() == [0]
    assert Negatives(pa.array([["free, used shoes"]])).blocked(["free"]).tolist() == []
    assert Negatives(pa.array([["free, used shoes"]])).blocked(["shoes", "used", "free"]).tolist() == [0]


def test_an_exact_negative_keyword_hits_its_own_words_in_their_order_alone() -> None:
    values = [["[red shoes]"], ["[red red]"]]
    growing = GrowingNegatives()
    growing.extend(values)
    for negatives in (Negatives(pa.array(values)), growing):
        assert negatives.blocked(["red", "shoes"]).tolist() == [0]
        assert negatives.blocked(["red", "red"]).tolist() == [1]
        for query in (["shoes", "red"], ["red", "shoes", "red"], ["red"], ["red", "shoes", "now"]):
            assert negatives.blocked(query).tolist() == []


def test_the_keyword_that_hit_is_told_as_it_is_written() -> None:
    values = [["[Red Shoes]", ' "red  SHOES" ']]
    growing = GrowingNegatives()
    growing.extend(values)
    for negatives in (Negatives(pa.array(values)), growing):
        assert negatives.hit(0, ["buy", "red", "shoes"]) == '"red  SHOES"'


def test_keywords_of_many_rows_block_them_all() -> None:
    values = [["free"] if at % 2 else ["used", "free used"] for at in range(40_000)]
    negatives = Negatives(pa.array(values))
    assert negatives.blocked(["free"]).tolist() == list(range(1, 40_000, 2))
    assert np.array_equal(negatives.blocked(["used", "free"]), np.arange(40_000))
    with pytest.raises(ValueError, match="read-only"):
        negatives.blocked(["free"])[0] = 0


def test_live_rows_grow_while_others_look() -> None:
    negatives, runs = GrowingNegatives(), GrowingRuns()

    def grow() -> None:
        for row in range(3000):
            negatives.extend([["free", f"word{row}"]])
            runs.extend([f"free w{row % 40}" + " x" * (row % 9)], [row])

    with ThreadPoolExecutor(4) as pool:
        growing = pool.submit(grow)
        seen = 0
        while not growing.done():
            blocked = negatives.blocked(["free"])
            assert np.array_equal(blocked, np.arange(len(blocked)))
            assert len(blocked) >= seen
            seen = len(blocked)
            runs.find([["free", "w1", "x", "x"]])
        growing.result()
    assert len(negatives.blocked(["free"])) == len(negatives) == 3000
    assert runs.find([["free", "w1"]])[1].tolist() == [
        row for row in range(3000) if row % 40 == 1 and row % 9 == 0
    ]
