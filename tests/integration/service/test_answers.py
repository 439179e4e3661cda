from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from service.answers import Answer, answer, total
from service.engine import Engine, Timings


@pytest.fixture(scope="module")
def engine(small_bundle: Path) -> Engine:
    return Engine.load(small_bundle)


def test_user_columns_come_along_and_ours_do_not(engine: Engine) -> None:
    assert "train_clicks" in engine.bundle.phrases.column_names
    (one,) = answer(engine, ["Red Garden Hose"], 54, None)
    matches = orjson.loads(one.matches)
    assert len(matches) == one.count == 54
    assert matches[0]["phrase"] == "red garden hose"
    assert {name for match in matches for name in match["columns"]} == {"match_type"}


def test_parts_are_cosines(engine: Engine) -> None:
    queries = engine.bundle.phrases.column("text").to_pylist()
    for one in answer(engine, queries, 54, None):
        for match in orjson.loads(one.matches):
            assert -1 <= match["parts"]["encoder"] <= 1
            assert -1 <= match["parts"]["classifier"] <= 1
            assert match["score"] == pytest.approx(sum(match["parts"].values()), abs=1e-6)


def test_the_relevance_is_there_and_rises_with_the_score(engine: Engine) -> None:
    (one,) = answer(engine, ["cheap fan"], 54, None)
    matches = orjson.loads(one.matches)
    relevance = [match["relevance"] for match in matches if match["source"] == "index"]
    assert relevance == sorted(relevance, reverse=True)
    assert 0 <= relevance[-1] < relevance[0] <= 1


def test_an_answer_does_not_depend_on_the_queries_beside_it(engine: Engine) -> None:
    queries = [f"{word} {text}" for word in ("buy", "the best and") for text in ("steel office chair", "fan")]
    together = answer(engine, [*queries, "花园软管 " * 20], 10, None)
    for query, beside in zip(queries, together, strict=False):
        alone = orjson.loads(answer(engine, [query], 10, None)[0].matches)
        matches = orjson.loads(beside.matches)
        np.testing.assert_allclose(
            [match["score"] for match in matches], [match["score"] for match in alone], atol=1e-5
        )


def test_the_time_of_a_batch_is_counted_once() -> None:
    first, second = Timings(1.0, 2.0, 3.0, 4.0), Timings(10.0, 20.0, 30.0, 40.0)
    answers = [Answer(b"[]", 0, first), Answer(b"[]", 0, first), Answer(b"[]", 0, second)]
    assert total(answers) == Timings(11.0, 22.0, 33.0, 44.0)
    assert total([]) == Timings()
