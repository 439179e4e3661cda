from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest

from service.answers import Answer, answer_each, total
from service.cache import id_filter
from service.engine import Engine, EngineSettings
from service.live.store import PhraseRow
from service.live.sync import encode_phrases
from service.matches import Timings
from service.options import MatchOptions


@pytest.fixture(scope="module")
def engine(small_bundle: Path) -> Engine:
    return Engine.load(small_bundle, EngineSettings(honour_match_types=False))


@pytest.fixture(scope="module")
def wide_engine(small_wide_bundle: Path) -> Engine:
    return Engine.load(small_wide_bundle, EngineSettings(honour_match_types=False))


def answers(engine: Engine, queries: list[str], k: int = 54, *, guarded: bool = False) -> list[Answer]:
    return answer_each(engine, queries, [MatchOptions(k)] * len(queries), guarded=guarded)


def test_user_columns_come_along_and_ours_do_not(engine: Engine) -> None:
    assert "train_clicks" in engine.bundle.phrases.column_names
    (one,) = answers(engine, ["Red Garden Hose"])
    matches = orjson.loads(one.matches)
    assert len(matches) == one.count == 54
    assert matches[0]["phrase"] == "red garden hose"
    assert {name for match in matches for name in match["columns"]} == {"match_type"}


def test_the_json_is_what_was_found(engine: Engine) -> None:
    """Its constant parts are kept from answer to answer, so it is written twice."""
    queries = ["red garden hose", "", '花园软管 "quoted" \\ \n', "steel fan", "unheard of", "Ø 10 mm rohr"]
    found = engine.match(queries, 7)
    table = engine.bundle.phrases.to_pylist()
    for _ in range(2):
        for one, (start, end) in zip(answers(engine, queries, 7), pairwise(found.offsets), strict=True):
            matches = orjson.loads(one.matches)
            assert one.count == end - start == len(matches)
            for match, at in zip(matches, range(start, end), strict=True):
                row = table[found.rows[at]]
                assert list(match) == ["id", "phrase", "score", "parts", "source", "relevance", "columns"]
                assert (match["id"], match["phrase"]) == (row["id"], row["text"])
                assert match["columns"] == {"match_type": row["match_type"]}
                assert match["source"] == ("exact" if found.exact[at] else "index")
                assert found.relevance is not None
                assert np.float32(match["score"]) == pytest.approx(found.scores[at], abs=1e-6)
                assert np.float32(match["parts"]["encoder"]) == pytest.approx(found.encoder[at], abs=1e-6)
                assert np.float32(match["relevance"]) == pytest.approx(found.relevance[at], abs=1e-6)
            search = [match["score"] for match in matches if match["source"] == "index"]
            assert one.best == pytest.approx(search[0]) if search else math.isnan(one.best)


def test_numbers_are_written_with_the_fewest_digits(engine: Engine) -> None:
    (one,) = answers(engine, ["cheap fan"])
    for match in orjson.loads(one.matches):
        for number in (match["score"], *match["parts"].values(), match["relevance"]):
            assert repr(number) == str(np.float32(number)), number


def test_parts_are_cosines(engine: Engine) -> None:
    queries = engine.bundle.phrases.column("text").to_pylist()
    for one in answers(engine, queries):
        for match in orjson.loads(one.matches):
            assert -1 <= match["parts"]["encoder"] <= 1
            assert -1 <= match["parts"]["classifier"] <= 1
            assert match["score"] == pytest.approx(sum(match["parts"].values()), abs=1e-6)


def test_the_relevance_is_there_and_rises_with_the_score(engine: Engine) -> None:
    (one,) = answers(engine, ["cheap fan"])
    matches = orjson.loads(one.matches)
    relevance = [match["relevance"] for match in matches if match["source"] == "index"]
    assert relevance == sorted(relevance, reverse=True)
    assert 0 <= relevance[-1] < relevance[0] <= 1


def test_an_answer_does_not_depend_on_the_queries_beside_it(engine: Engine) -> None:
    queries = [f"{word} {text}" for word in ("buy", "the best and") for text in ("steel office chair", "fan")]
    together = answers(engine, [*queries, "花园软管 " * 20], 10)
    for query, beside in zip(queries, together, strict=False):
        alone = orjson.loads(answers(engine, [query], 10)[0].matches)
        matches = orjson.loads(beside.matches)
        np.testing.assert_allclose(
            [match["score"] for match in matches], [match["score"] for match in alone], atol=1e-5
        )


def test_each_query_has_its_own_options_in_one_batch(engine: Engine) -> None:
    some = [MatchOptions(3), MatchOptions(5), MatchOptions(3, deny=("p0",)), MatchOptions(9, 0.5)]
    queries = [f"{word} garden hose" for word in ("red", "buy", "cheap", "steel")] * 8
    options = [some[(at + at // 4) % 4] for at in range(len(queries))]
    # Groups of the texts, too, are put back into the order of the queries.
    engine.measure()
    for query, one, answer in zip(
        queries, options, answer_each(engine, queries, options, guarded=False), strict=True
    ):
        (alone,) = answer_each(engine, [query], [one], guarded=False)
        ids = [match["id"] for match in orjson.loads(answer.matches)]
        assert ids == [match["id"] for match in orjson.loads(alone.matches)]
        assert len(ids) <= one.k
        assert not set(ids) & set(one.deny)


@pytest.mark.parametrize("which", ["engine", "wide_engine"])
def test_guards_say_when_an_answer_is_no_longer_right(which: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(which)
    queries = ["red garden hose", " ", "buy a fan", "花园软管"]
    for k in (3, 54, 60):
        for query, one in zip(queries, answers(engine, queries, k, guarded=True), strict=True):
            if query == " ":
                assert one.guard is None
                continue
            guard = one.guard
            assert guard is not None
            matches = orjson.loads(one.matches)
            scores = [match["score"] for match in matches]
            assert guard.last == (pytest.approx(min(scores)) if k <= 54 else -math.inf)
            assert (guard.ids == id_filter([match["id"] for match in matches])).all()
            assert guard.version == 0
            vectors = engine.encoder.encode([query])
            vector = vectors.wide[0] if engine.rescores else vectors.narrow[0]
            halves = [engine.score_split, engine.score_dim - engine.score_split]
            np.testing.assert_allclose(guard.vector * np.repeat(guard.scales, halves), vector, atol=0.01)
    assert all(one.guard is None for one in answers(engine, queries))


def test_live_phrases_are_named_as_such(small_bundle: Path) -> None:
    engine = Engine.load(small_bundle)
    live = engine.new_live()
    columns = {"match_type": "broad", "negative_keywords": ["free"]}
    rows = [
        PhraseRow(f"n{at}", text, columns, "active", "live", 10**13, at + 1, 10**13)
        for at, text in enumerate(["steel garden hose reel", "cheap garden hose"])
    ]
    live.apply(rows, encode_phrases(engine, [str(row.text) for row in rows]))
    engine.live = live
    (one,) = answers(engine, ["Cheap garden hose"], 60, guarded=True)
    matches = {match["id"]: match for match in orjson.loads(one.matches)}
    assert (matches["n0"]["source"], matches["n1"]["source"]) == ("live", "exact")
    assert matches["n0"]["phrase"] == "steel garden hose reel"
    assert matches["n0"]["columns"] == columns
    assert one.guard is not None
    assert one.guard.version == live.version == 1
    (free,) = answers(engine, ["free cheap garden hose"], 60)
    assert not {"n0", "n1"} & {match["id"] for match in orjson.loads(free.matches)}


def test_nothing_is_an_answer_too(engine: Engine) -> None:
    assert answer_each(engine, [], [], guarded=True) == []
    (one,) = answer_each(engine, ["fan"], [MatchOptions(3, allow=())], guarded=True)
    assert (one.matches, one.count) == (b"[]", 0)
    assert math.isnan(one.best)


def test_the_time_of_a_batch_is_counted_once() -> None:
    first, second = Timings(1.0, 2.0, 3.0, 4.0), Timings(10.0, 20.0, 30.0, 40.0)
    made = [Answer(b"[]", 0, math.nan, timings) for timings in (first, first, second)]
    assert total(made) == Timings(11.0, 22.0, 33.0, 44.0)
    assert total([]) == Timings()
