"""The cache of answers against a search by hand: what is kept is what a search would find now."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from export.bundle.rescore import to_8_bits
from service import cache as module
from service.cache import AnswerCache, Guard, Kept, id_filter
from service.options import MatchOptions
from service.rules.filters import Condition, Filter

DIM, SPLIT = 24, 10
ANY = MatchOptions(k=3)
NOTHING = np.zeros((0, DIM), np.float32)


def units(rng: np.random.Generator, n: int, dim: int = DIM, split: int = SPLIT) -> np.ndarray:
    """Vectors as encoders give them: both parts of length 1."""
    vectors = rng.normal(size=(n, dim)).astype(np.float32)
    for part in (slice(0, split), slice(split, None)):
        vectors[:, part] /= np.linalg.norm(vectors[:, part], axis=1, keepdims=True)
    return vectors


def guard(
    vector: np.ndarray, last: float, ids: Sequence[str] = (), version: int = 0, split: int = SPLIT
) -> Guard:
    rows, scales = to_8_bits(vector[None], split)
    return Guard(rows[0], scales[0], last, id_filter(list(ids)), version)


def cached(*queries: str, last: float = 1.0, max_bytes: int = 10**6) -> AnswerCache:
    """A cache of an answer to each of some queries, whose vectors are drawn."""
    cache = AnswerCache(max_bytes, DIM, SPLIT)
    for query, vector in zip(queries, units(np.random.default_rng(0), len(queries)), strict=True):
        cache.put(query, ANY, Kept(query.encode(), 3, 0.5), guard(vector, last, [f"id of {query}"]))
    return cache


def there(cache: AnswerCache, queries: Sequence[str]) -> list[str]:
    return [query for query in queries if cache.get(query, ANY) is not None]


# What is kept


def test_an_answer_is_kept_by_query_and_options() -> None:
    cache = AnswerCache(10**6, DIM, SPLIT)
    vector = units(np.random.default_rng(0), 1)[0]
    some = [
        MatchOptions(3),
        MatchOptions(4),
        MatchOptions(3, 0.5),
        MatchOptions(3, deny=("a",)),
        MatchOptions(3, allow=("a",)),
        MatchOptions(3, allow=()),
        MatchOptions(3, distinct=True),
        MatchOptions(3, filter=Filter((Condition("market", among=("de",)),))),
    ]
    assert len(set(some)) == len(some)
    for at, options in enumerate(some):
        assert cache.get("red shoes", options) is None
        cache.put("red shoes", options, Kept(b"%d" % at, at, 0.5), guard(vector, 0.0))
    assert [cache.get("red shoes", options) for options in some] == [
        Kept(b"%d" % i, i, 0.5) for i in range(8)
    ]
    assert cache.get("red shoe", some[0]) is None
    assert len(cache) == 8


def test_a_later_answer_takes_the_place_of_an_earlier_one() -> None:
    cache = cached("a")
    size = cache.nbytes
    vector = units(np.random.default_rng(5), 1)[0]
    cache.put("a", ANY, Kept(b"b", 3, 0.5), guard(vector, -np.inf))
    assert cache.get("a", ANY) == Kept(b"b", 3, 0.5)
    assert (len(cache), cache.nbytes) == (1, size)
    # And so does its guard.
    assert cache.changed(1, [], -vector[None], []) == 1
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_cache_without_room_keeps_nothing() -> None:
    cache = cached("a", max_bytes=0)
    assert not cache.on
    assert cached("a").on
    assert (len(cache), cache.nbytes) == (0, 0)


def test_an_answer_larger_than_the_cache_leaves_the_others_alone() -> None:
    cache = cached("a", "b", max_bytes=5000)
    cache.put("c", ANY, Kept(b"x" * 5000, 3, 0.5), guard(units(np.random.default_rng(1), 1)[0], 0.0))
    assert there(cache, "abc") == ["a", "b"]


# How much of it


@pytest.mark.parametrize("max_bytes", [1000, 20_000, 300_000])
def test_it_is_bounded_in_bytes_and_the_least_recently_used_make_room(max_bytes: int) -> None:
    rng = np.random.default_rng(2)
    cache = AnswerCache(max_bytes, DIM, SPLIT)
    used: dict[str, int] = {}
    for turn in range(3000):
        query = f"q{rng.zipf(1.3) % 2000}"
        found = cache.get(query, ANY)
        if found is None:
            answer = Kept(bytes(int(rng.integers(0, 900))), 1, 0.5)
            cache.put(query, ANY, answer, guard(units(rng, 1)[0], 0.0))
        used[query] = turn
        assert cache.nbytes <= max_bytes
    present = [query for query in used if cache._entries.get((query, ANY)) is not None]
    assert len(present) == len(cache) > 0
    # They are those used last, but for answers that had no room as they came.
    absent = [used[query] for query in used if query not in present]
    assert not absent or min(used[query] for query in present) > sorted(absent)[-1] - 1
    assert cache.nbytes >= sum(len(cache._entries[query, ANY][0].matches) for query in present)


def test_what_a_request_asks_counts_too() -> None:
    """Its lists of ids are kept with the answer, and may be far larger than it."""
    cache = AnswerCache(1_000_000, DIM, SPLIT)
    vector = units(np.random.default_rng(0), 1)[0]
    kept = 0
    for number in range(100):
        ids = tuple(f"{number}-{i}-{'x' * 150}" for i in range(500))
        values = tuple(f"{number}-{i}-{'x' * 50}" for i in range(500))
        for options in (
            MatchOptions(3, deny=ids),
            MatchOptions(3, allow=ids),
            MatchOptions(3, filter=Filter((Condition("market", among=values),))),
        ):
            before = cache.nbytes
            cache.put("q", options, Kept(b"[]", 0, 0.5), guard(vector, 0.0))
            kept += cache.nbytes - before > 25_000
            assert cache.nbytes <= 1_000_000
    assert kept > 3
    assert len(cache) < 30
    held = sum(
        len(one)
        for _, options in cache._entries
        for one in (*options.deny, *(options.allow or ()), *(() if not options.filter else values))
    )
    assert held < 1_000_000
    cache.changed(1, ["q"], NOTHING, [])
    assert (len(cache), cache.nbytes) == (0, 0)


def test_slots_are_used_again() -> None:
    rng = np.random.default_rng(3)
    cache = AnswerCache(20 * 500, DIM, SPLIT)
    for turn in range(2000):
        cache.put(f"q{turn}", ANY, Kept(b"[]", 0, 0.5), guard(units(rng, 1)[0], 0.0))
        if turn % 500 == 499:
            cache.changed(turn, [], NOTHING, [f"q{turn}"])
    assert len(cache._key_of) <= 2 * 20 + 1


# When it is dropped


def test_a_phrase_that_equals_a_query_drops_its_answers_alone() -> None:
    cache = cached("a", "b", "c", last=5.0)
    cache.put("a", MatchOptions(7), Kept(b"", 0, 0.5), guard(units(np.random.default_rng(9), 1)[0], 5.0))
    assert cache.changed(1, ["a", "z"], NOTHING, []) == 2
    assert there(cache, "abc") == ["b", "c"]
    assert cache.get("a", MatchOptions(7)) is None


def test_an_answer_goes_when_a_phrase_that_is_in_it_leaves() -> None:
    queries = [f"q{i}" for i in range(50)]
    cache = cached(*queries, last=5.0)
    assert cache.changed(1, [], NOTHING, ["id of q7", "id of q9"]) >= 2
    left = there(cache, queries)
    assert "q7" not in left
    assert "q9" not in left
    # A filter of ids may take one for another, but hardly ever.
    assert len(left) >= 46


def test_an_answer_with_room_for_more_goes_when_any_phrase_comes() -> None:
    cache = cached("a", last=-np.inf)
    vectors = -units(np.random.default_rng(0), 1)
    assert cache.changed(1, [], NOTHING, ["some id"]) == 0
    assert cache.changed(2, [], vectors, []) == 1


def test_phrases_that_leave_and_come_at_once() -> None:
    rng = np.random.default_rng(0)
    vectors = units(rng, 3)
    cache = AnswerCache(10**6, DIM, SPLIT)
    for query, vector, ids in zip("abc", vectors, (["1"], ["2"], ["3"]), strict=True):
        cache.put(query, ANY, Kept(b"", 1, 0.5), guard(vector, 1.9, ids))
    assert cache.changed(1, ["a"], vectors[1:2], ["3"]) == 3


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.2, 1.8)])
@pytest.mark.parametrize(("dim", "split"), [(24, 10), (64, 32), (512, 256), (40, 0), (40, 40)])
def test_no_wrong_answer_is_ever_kept(dim: int, split: int, weights: tuple[float, float]) -> None:
    """Queries and phrases at random; answers as exact search gives them, kept over many changes."""
    rng = np.random.default_rng(dim)
    factors = np.repeat(np.array(weights, np.float32), [split, dim - split])
    queries = units(rng, 60, dim, split)
    # Of some, one number is by far the largest, so that 8 bits tell little of the others.
    for at in range(0, 60, 4):
        spiked = queries[at]
        spiked[:] = rng.normal(1, 0.02, dim)
        spiked[0], spiked[-1] = 40, -40
        for part in (slice(0, split), slice(split, None)):
            if len(spiked[part]):
                spiked[part] /= np.linalg.norm(spiked[part])
    cache = AnswerCache(10**7, dim, split)
    phrases = {f"p{i}": vector for i, vector in enumerate(units(rng, 200, dim, split) * factors)}
    k, kept_right, dropped_right = 10, 0, 0

    def search(query: np.ndarray) -> tuple[list[str], float]:
        """Ids and last score, as re-scoring in 8 bits has them."""
        ids = list(phrases)
        rows, scales = to_8_bits(np.stack(list(phrases.values())), split)
        whole = rows * np.repeat(scales, [split, dim - split], axis=1)
        scores = whole.astype(np.float64) @ query
        order = np.argsort(-scores, kind="stable")[:k]
        return [ids[i] for i in order], float(np.float32(scores[order[-1]]))

    for version in range(40):
        for at, query in enumerate(queries):
            if cache.get(f"q{at}", ANY) is None:
                ids, last = search(query)
                answer = Kept("\n".join(ids).encode(), k, 0.5)
                cache.put(f"q{at}", ANY, answer, guard(query, last, ids, version, split))
        before = {at: search(query)[0] for at, query in enumerate(queries)}
        new = units(rng, 3, dim, split) * factors
        # One that comes close to the last of some answer, from above or below.
        target = int(rng.integers(60))
        _, last = search(queries[target])
        close = queries[target] * factors
        reach = float(close @ queries[target])
        new[0] = close * (last / reach + rng.choice([-1e-3, 1e-5, 1e-3]))
        came = {f"n{version}-{i}": vector for i, vector in enumerate(new)}
        gone = [str(one) for one in rng.choice(list(phrases), 2, replace=False)] if version % 2 else []
        phrases.update(came)
        for one in gone:
            del phrases[one]
        cache.changed(version + 1, [], new, [*gone, *came])
        for at, query in enumerate(queries):
            kept = cache.get(f"q{at}", ANY)
            now = search(query)[0]
            if kept is not None:
                assert kept.matches.decode().split("\n") == now, (version, at)
                kept_right += 1
            else:
                dropped_right += now != before[at]
    # Neither is everything dropped, nor was there nothing to drop.
    assert kept_right > 200
    assert dropped_right > 20


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.2, 1.8)])
@pytest.mark.parametrize(("dim", "split"), [(64, 32), (512, 256), (40, 0), (40, 40)])
def test_8_bits_hide_no_phrase(dim: int, split: int, weights: tuple[float, float]) -> None:
    """Vectors that lose as much as can be in 8 bits: one large number, others just below a step's half."""
    cache = AnswerCache(10**7, dim, split)
    query, phrase = np.zeros(dim), np.ones(dim)
    for part, weight in zip((slice(0, split), slice(split, None)), weights, strict=True):
        if len(query[part]):
            query[part] = 3.49
            query[part][0] = 127
            query[part] /= np.linalg.norm(query[part])
            phrase[part][0] = 0
            phrase[part] *= weight / np.linalg.norm(phrase[part])
    query, phrase = query.astype(np.float32), phrase.astype(np.float32)
    cache.put("q", ANY, Kept(b"", 3, 0.5), guard(query, float(query @ phrase) - 1e-5, split=split))
    assert cache.changed(1, [], phrase[None], []) == 1


def test_answers_that_a_phrase_stays_far_from_are_kept() -> None:
    rng = np.random.default_rng(4)
    queries, phrase = units(rng, 500), units(rng, 1)
    scores = queries @ phrase[0]
    cache = AnswerCache(10**7, DIM, SPLIT)
    for at, query in enumerate(queries):
        cache.put(
            f"q{at}", ANY, Kept(b"", 3, 0.5), guard(query, float(scores[at]) + (0.1 if at % 2 else -1e-6))
        )
    assert cache.changed(1, [], phrase, []) == 250
    assert there(cache, [f"q{at}" for at in range(500)]) == [f"q{at}" for at in range(1, 500, 2)]


def test_an_answer_of_before_a_change_is_not_kept_after_it() -> None:
    cache = AnswerCache(10**6, DIM, SPLIT)
    vector = units(np.random.default_rng(0), 1)[0]
    assert cache.changed(5, ["x"], NOTHING, []) == 0
    cache.put("a", ANY, Kept(b"", 1, 0.5), guard(vector, 2.0, version=4))
    assert len(cache) == 0
    cache.put("a", ANY, Kept(b"", 1, 0.5), guard(vector, 2.0, version=5))
    assert len(cache) == 1
    # An older change that is told of late does not let older answers in.
    cache.changed(3, ["x"], NOTHING, [])
    cache.put("b", ANY, Kept(b"", 1, 0.5), guard(vector, 2.0, version=4))
    assert there(cache, "ab") == ["a"]


def test_others_get_and_put_while_a_change_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cached("a", "b", last=-np.inf)
    vector = units(np.random.default_rng(0), 1)
    begun, go = threading.Event(), threading.Event()
    reached = module._Guards.reached

    def held_up(guards: module._Guards, phrases: np.ndarray) -> np.ndarray:
        begun.set()
        assert go.wait(10)
        return reached(guards, phrases)

    monkeypatch.setattr(module._Guards, "reached", held_up)
    changing = threading.Thread(target=cache.changed, args=(1, [], vector, []))
    changing.start()
    assert begun.wait(10)
    assert there(cache, "ab") == ["a", "b"]
    cache.put("old", ANY, Kept(b"", 1, 0.5), guard(vector[0], -np.inf, version=0))
    cache.put("new", ANY, Kept(b"", 1, 0.5), guard(vector[0], -np.inf, version=1))
    go.set()
    changing.join()
    assert there(cache, ["a", "b", "old", "new"]) == ["new"]


def test_more_pairs_than_are_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = [f"q{i}" for i in range(20)]
    vectors = units(np.random.default_rng(0), 20)
    for at_once in (1, 50, 10**6):
        monkeypatch.setattr(module, "_PAIRS_AT_ONCE", at_once)
        cache = cached(*queries, last=1.9)
        assert cache.changed(1, [], vectors[3:10], []) == 7
        assert there(cache, queries) == queries[:3] + queries[10:]


def test_too_many_products_drop_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = [f"q{i}" for i in range(20)]
    far = -units(np.random.default_rng(0), 20)[:2]
    monkeypatch.setattr(module, "_MOST_PRODUCTS", 2 * 20 * DIM)
    cache = cached(*queries, last=5.0)
    assert cache.changed(1, [], far, []) == 0
    assert cache.changed(2, [], np.concatenate([far, far[:1]]), []) == 20
    assert (len(cache), cache.nbytes) == (0, 0)
    assert there(cache, queries) == []
    # It goes on as an empty one does.
    vector = units(np.random.default_rng(0), 1)[0]
    for query in [*queries, "more"]:
        cache.put(query, ANY, Kept(b"", 3, 0.5), guard(vector, 5.0, version=2))
    assert len(there(cache, [*queries, "more"])) == 21
    assert cache.changed(3, ["more"], NOTHING, []) == 1


def test_many_threads() -> None:
    """Answers say which version they are of: none of before a change is got after it."""
    cache = AnswerCache(200_000, DIM, SPLIT)
    vector = units(np.random.default_rng(0), 1)[0]
    version = 0
    failures: list[BaseException] = []
    stop = threading.Event()

    def use(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                query = f"q{rng.integers(400)}"
                least = version
                kept = cache.get(query, ANY)
                if kept is not None:
                    assert int(kept.matches) >= least
                    continue
                seen = version
                cache.put(query, ANY, Kept(b"%d" % seen, 1, 0.5), guard(vector, -np.inf, version=seen))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for number in range(1, 300):
        # As answers with room for more, all go with any change.
        cache.changed(number, [], vector[None], [])
        version = number
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    cache.changed(1000, [], vector[None], [])
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_filter_of_ids_holds_them_all() -> None:
    ids = [f"kw-{i}" for i in range(40)] + ["", "ü", "\0"]
    whole = id_filter(ids)
    for one in ids:
        alone = id_filter([one])
        assert (whole & alone == alone).all()
    assert not id_filter([]).any()
