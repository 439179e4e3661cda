"""The JSON of matches, against Python's own reading of it."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest

from service._native import Renderer, id_filter

IDS = ["p0", 'quo"te', "back\\slash", "ünï", "", "a" * 300]
TEXTS = ["red shoes", "tab\tline\nreturn\r", "\x00\x01\x1f\x7f\b\f", "花园软管 🚗", "", "/</script>"]


def column(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    held = [text.encode() for text in texts]
    return np.cumsum([0, *map(len, held)]).astype(np.int64), np.frombuffer(b"".join(held), np.uint8)


@pytest.fixture
def renderer() -> Renderer:
    return Renderer(*column(IDS), *column(TEXTS))


def columns(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=count).astype(np.float32) for name in ("scores", "encoder", "classifier")}


def test_every_text_and_number_comes_back(renderer: Renderer) -> None:
    rows = np.array([3, 1, 2, 0, 5, 4, 7, 6])
    offsets = np.array([0, 3, 3, 8])
    exact = np.array([True, False, False, True, False, False, False, False])
    parts = columns(8)
    parts["scores"][:4] = [1.0, -0.0, 1e-30, 123456790.0]
    others = [("live 1", "l\u00f6we", b',"columns":{"at":6}'), ("live 2", '"', b"")]
    tails = [b',"columns":{"at":%d}' % at if at % 2 else b"" for at in range(8)]
    listed, best, filters = renderer.render(
        offsets, rows, **parts, relevance=parts["scores"], exact=exact, others=others, tails=tails
    )
    assert [len(orjson.loads(one)) for one in listed] == [3, 0, 5]
    matches = [match for one in listed for match in orjson.loads(one)]
    live = iter(others)
    for at, (row, match) in enumerate(zip(rows.tolist(), matches, strict=True)):
        id, text, tail = next(live) if row >= len(IDS) else (IDS[row], TEXTS[row], tails[at])
        assert list(match)[:6] == ["id", "phrase", "score", "parts", "source", "relevance"]
        assert (match["id"], match["phrase"]) == (id, text)
        assert np.float32(match["score"]) == parts["scores"][at]
        assert np.float32(match["relevance"]) == parts["scores"][at]
        assert np.float32(match["parts"]["encoder"]) == parts["encoder"][at]
        assert np.float32(match["parts"]["classifier"]) == parts["classifier"][at]
        assert match["source"] == ("exact" if exact[at] else "live" if row >= len(IDS) else "index")
        assert match.get("columns") == (orjson.loads(tail[len(',"columns":') :]) if tail else None)
    assert best[0] == parts["scores"][1]
    assert math.isnan(best[1])
    assert best[2] == parts["scores"][4]
    assert (filters[0] == id_filter([IDS[row] for row in rows[:3]])).all()
    assert not filters[1].any()
    assert (filters[2] == id_filter([IDS[0], IDS[5], IDS[4], "live 1", "live 2"])).all()


def test_numbers_have_the_fewest_digits_and_are_never_whole(renderer: Renderer) -> None:
    rng = np.random.default_rng(1)
    scores = np.concatenate(
        [rng.normal(size=20_000), [0.0, 1.0, -2.0, 1e10, 1e-10]], dtype=np.float32, casting="same_kind"
    )
    n = len(scores)
    (listed,), _, _ = renderer.render(
        np.array([0, n]),
        np.zeros(n, np.int64),
        scores,
        scores,
        scores,
        relevance=None,
        exact=np.zeros(n, bool),
        others=[],
        tails=None,
    )
    matches = orjson.loads(listed)
    assert "relevance" not in matches[0]
    for match, score in zip(matches, scores, strict=True):
        assert isinstance(match["score"], float)
        assert np.float32(match["score"]) == score
        if 1e-3 < abs(score) < 1e6:
            assert repr(match["score"]) == str(score)


def test_what_is_no_number_is_null(renderer: Renderer) -> None:
    scores = np.array([np.nan, np.inf], np.float32)
    (listed,), _, _ = renderer.render(
        np.array([0, 2]),
        np.array([0, 1]),
        scores,
        scores,
        scores,
        relevance=None,
        exact=np.zeros(2, bool),
        others=[],
        tails=None,
    )
    assert [match["score"] for match in orjson.loads(listed)] == [None, None]


def test_no_phrases_at_all() -> None:
    empty = Renderer(*column([]), *column([]))
    nothing = np.empty(0, np.float32)
    given = {"relevance": None, "exact": np.empty(0, bool), "others": [], "tails": None}
    listed, best, filters = empty.render(
        np.zeros(3, np.int64), np.empty(0, np.int64), nothing, nothing, nothing, **given
    )
    assert listed == [b"[]", b"[]"]
    assert np.isnan(best).all()
    assert filters.shape == (2, 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offsets": np.array([0, 3])}, "span"),
        ({"offsets": np.array([1, 2])}, "span"),
        ({"offsets": np.array([0, 2, 1, 2])}, "rise"),
        ({"offsets": np.empty(0, np.int64)}, "one more"),
        ({"rows": np.array([0, -1])}, "no such row"),
        ({"rows": np.array([0, 6])}, "beyond the texts"),
        ({"others": [("a", "b", b"")]}, "beyond the texts"),
        ({"scores": np.zeros(1, np.float32)}, "one length"),
        ({"tails": [b""]}, "one length"),
        ({"relevance": np.zeros(3, np.float32)}, "one length"),
    ],
)
def test_arguments_that_do_not_fit(renderer: Renderer, change: dict[str, object], reason: str) -> None:
    given = {
        "offsets": np.array([0, 2]),
        "rows": np.array([0, 1]),
        **columns(2),
        "relevance": None,
        "exact": np.zeros(2, bool),
        "others": [],
        "tails": None,
    }
    renderer.render(**given)  # type: ignore[arg-type]
    with pytest.raises((ValueError, IndexError), match=reason):
        renderer.render(**(given | change))  # type: ignore[arg-type]


def test_texts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="as many ids as texts"):
        Renderer(*column(IDS), *column(TEXTS[:-1]))
    with pytest.raises(ValueError, match="beyond the data"):
        Renderer(np.array([0, 5]), np.zeros(4, np.uint8), *column(["x"]))


def test_a_filter_holds_its_ids_and_hardly_any_other() -> None:
    ids = [f"phrase {at}" for at in range(10)]
    mine = id_filter(ids)
    assert all((id_filter([one]) & mine == id_filter([one])).all() for one in ids)
    others = [id_filter([f"other {at}"]) for at in range(5000)]
    assert np.mean([(one & mine == one).all() for one in others]) < 0.02
