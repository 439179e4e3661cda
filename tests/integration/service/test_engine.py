from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.bundle.encoder import QueryVectors
from service.engine import Engine

PHRASE_4 = "<img src=x onerror=alert(1)> & <b>tent</b>"


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Engine:
    return Engine.load(tiny_bundle)


def one(engine: Engine, query: str, k: int = 10, min_score: float | None = None) -> tuple[list, list, list]:
    found = engine.match([query], k, min_score)
    return found.rows.tolist(), found.scores.tolist(), found.exact.tolist()


def test_scores_are_the_sum_of_two_cosines_of_the_bundle_vectors(engine: Engine) -> None:
    queries = ["cheap red tent", "waterproof socks for men", "kids boots"]
    found = engine.match(queries, 20)
    vectors = engine.encoder.encode(queries).narrow
    half = vectors.shape[1] // 2
    for i in range(3):
        part = slice(found.offsets[i], found.offsets[i + 1])
        phrase = np.asarray(engine.bundle.vectors)[found.rows[part]]
        np.testing.assert_allclose(found.encoder[part], phrase[:, :half] @ vectors[i, :half], atol=1e-6)
        np.testing.assert_allclose(found.classifier[part], phrase[:, half:] @ vectors[i, half:], atol=1e-6)
        np.testing.assert_array_equal(found.scores[part], found.encoder[part] + found.classifier[part])
        assert (np.diff(found.scores[part]) <= 0).all()


def test_a_list_gives_what_each_query_alone_gives(engine: Engine) -> None:
    queries = ["red running shoes", "", "cheap tent", " ​ ", "unheard of words", "STRASSE"]
    together = engine.match(queries, 7)
    assert together.offsets.dtype == np.int64
    assert len(together) == 6
    for i, query in enumerate(queries):
        part = slice(together.offsets[i], together.offsets[i + 1])
        alone = engine.match([query], 7)
        np.testing.assert_array_equal(together.rows[part], alone.rows)
        np.testing.assert_allclose(together.scores[part], alone.scores, atol=1e-6)
        np.testing.assert_array_equal(together.exact[part], alone.exact)


def test_phrases_equal_to_the_query_come_first_best_first_and_once(engine: Engine) -> None:
    rows, scores, exact = one(engine, "  RED running\tshoes ")
    assert set(rows[:2]) == {0, 1}
    assert exact == [True, True] + [False] * 8
    assert scores[0] >= scores[1]
    assert len(set(rows)) == 10
    # Without the exact ones in front, the order is that of the score.
    by_score = np.argsort(
        -(np.asarray(engine.bundle.vectors) @ engine.encoder.encode(["red running shoes"]).narrow[0])
    )
    rest = [row for row in by_score.tolist() if row not in (0, 1)]
    assert rows[2:] == rest[:8]


def test_an_exact_phrase_that_search_ranks_low_is_still_first(engine: Engine) -> None:
    scores = np.asarray(engine.bundle.vectors) @ engine.encoder.encode([PHRASE_4]).narrow[0]
    assert (scores > scores[4]).sum() > 50
    rows, _, exact = one(engine, PHRASE_4.upper(), k=3)
    assert rows[0] == 4
    assert exact == [True, False, False]


def test_case_folding_beyond_ascii(engine: Engine) -> None:
    assert one(engine, "straße", k=1)[0] == [6]
    assert one(engine, "ЗЕЛЁНАЯ ТРАВА", k=1)[0] == [5]


def test_more_exact_phrases_than_k(engine: Engine) -> None:
    rows, scores, exact = one(engine, "red running shoes", k=1)
    assert exact == [True]
    assert scores == one(engine, "red running shoes", k=2)[1][:1]
    assert rows[0] in (0, 1)


def test_k_above_the_number_of_phrases_gives_each_phrase_once(engine: Engine) -> None:
    rows, _, _ = one(engine, "red running shoes", k=100_000)
    # p2 was bought for queries that contain "red shoes", p3 and p6 for queries that equal them.
    assert sorted(rows) == [row for row in range(len(engine)) if row not in (2, 3, 6)]
    assert sorted(one(engine, "cheap red shoes", k=100_000)[0])[:3] == [0, 2, 4]


def test_min_score_leaves_out_what_search_found_but_not_exact_phrases(engine: Engine) -> None:
    rows, scores, exact = one(engine, "red running shoes", k=400)
    threshold = float(np.float32(scores[20]))
    kept = one(engine, "red running shoes", k=400, min_score=threshold)
    wanted = [
        row for row, score, first in zip(rows, scores, exact, strict=True) if first or score >= threshold
    ]
    assert kept[0] == wanted
    assert one(engine, "red running shoes", k=400, min_score=2.0)[2] == [True, True]


def test_nothing_to_match(engine: Engine) -> None:
    assert len(engine.match([], 5)) == 0
    found = engine.match(["", "\x00", "   "], 5)
    assert found.offsets.tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="k is 0"):
        engine.match(["red"], 0)


def test_phrases_carry_user_columns(engine: Engine) -> None:
    table = engine.phrases(np.array([3, 0, 3]))
    assert table.column("id").to_pylist() == ["p3", "p0", "p3"]
    assert table.column("match_type").to_pylist() == ["exact", "broad", "exact"]


def test_short_queries_are_not_padded_to_long_ones(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(tiny_bundle)
    engine.measure()
    assert engine.cost is not None
    assert engine.cost.best_batch >= 1
    # Each token costs, a call next to nothing.
    monkeypatch.setattr(engine.cost, "seconds", lambda texts, width: 1e-6 + texts * width)
    widths = []
    run = engine.encoder.run

    def watched(ids: np.ndarray, mask: np.ndarray) -> QueryVectors:
        widths.append(ids.shape)
        return run(ids, mask)

    monkeypatch.setattr(engine.encoder, "run", watched)
    queries = ["red tent", "red running shoes for men kids women cheap sale", "blue boots"]
    together = engine.match(queries, 5)
    assert widths == [(2, 2), (1, 9)]
    alone = [engine.match([query], 5) for query in queries]
    assert together.rows.tolist() == [row for one in alone for row in one.rows.tolist()]


def test_encoder_calls_take_the_calling_thread_alone(engine: Engine) -> None:
    options = engine.encoder._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_each_step_is_timed(engine: Engine) -> None:
    timings = engine.match(["red running shoes"], 5).timings
    assert min(timings.tokenise, timings.encode, timings.search) > 0
    assert timings.rescore == 0
