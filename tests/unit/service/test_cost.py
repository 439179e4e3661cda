from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest

from service.cost import EncodeCost, large_enough


def known(call: float, token: float) -> EncodeCost:
    """What calls of `call + token · texts · width` seconds teach."""
    cost = EncodeCost()
    for texts, width in [(1, 3), (8, 5), (4, 20), (16, 12), (2, 7)] * 20:
        cost.observe(texts, width, call + token * texts * width)
    return cost


def partitions(texts: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put texts into groups."""
    if not texts:
        yield []
        return
    first, *rest = texts
    for groups in partitions(rest):
        yield [[first], *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], [first, *group], *groups[at + 1 :]]


def seconds(groups: Sequence[Sequence[int] | np.ndarray], lengths: np.ndarray, call: float, token: float):
    # The encoder reads one token at least.
    return sum(call + token * len(one) * max(1, lengths[list(one)].max()) for one in groups)


@pytest.mark.parametrize(("call", "token"), [(1e-3, 2e-5), (0.0, 1e-4), (0.5, 1e-6), (2e-4, 2e-5)])
def test_what_was_measured_is_known(call: float, token: float) -> None:
    cost = known(call, token)
    for texts, width in [(1, 1), (3, 9), (200, 64)]:
        assert cost.seconds(texts, width) == pytest.approx(call + token * texts * width, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("call", "token"), [(1e-4, 1e-5), (1e-3, 1e-5), (3e-5, 1e-5), (0.0, 1e-5), (1.0, 1e-6)]
)
def test_groups_take_the_least_time_of_all_ways_to_group(call: float, token: float) -> None:
    rng = np.random.default_rng(0)
    cost = known(call, token)
    sizes = set()
    for _ in range(40):
        lengths = rng.integers(0, rng.choice([4, 15, 40]), rng.integers(1, 8))
        groups = cost.groups(lengths)
        sizes.add(len(groups))
        least = min(seconds(one, lengths, call, token) for one in partitions(range(len(lengths))))
        assert seconds(groups, lengths, call, token) == pytest.approx(least, rel=1e-6)
    if call == 1.0:
        assert sizes == {1}
    elif call < 1e-3:
        assert max(sizes) > 2


def test_groups_hold_every_text_once_and_neighbours_in_length() -> None:
    rng = np.random.default_rng(1)
    cost = known(1e-3, 1e-5)
    for n in [0, 1, 2, 3, 10, 100, 1000]:
        lengths = rng.integers(0, 60, n)
        groups = cost.groups(lengths)
        assert sorted(np.concatenate(groups).tolist()) == list(range(n))
        ordered = [lengths[group] for group in groups]
        for shorter, longer in pairwise(ordered):
            assert shorter.max() < longer.min()
        assert all(len(group) for group in groups) or n == 0


def test_texts_of_one_length_are_one_group() -> None:
    for cost in (EncodeCost(), known(0.0, 1.0)):
        (group,) = cost.groups(np.full(50, 7))
        assert sorted(group.tolist()) == list(range(50))


@pytest.mark.parametrize("seed", range(5))
def test_noise_never_gives_a_negative_cost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = EncodeCost()
    for _ in range(500):
        texts, width = int(rng.integers(1, 100)), int(rng.integers(1, 50))
        # Noise far above what it hides: small calls that took long, large ones that took no time.
        cost.observe(texts, width, float(rng.exponential(1e-3) + rng.choice([0.0, 1e-6 * texts * width])))
        grid = [cost.seconds(n, t) for n in (0, 1, 10, 1000) for t in (1, 10, 500)]
        assert min(grid) >= 0
        assert np.isfinite(grid).all()
        more = [cost.seconds(n, 5) for n in (1, 2, 50, 1000)]
        assert more == sorted(more)


def test_calls_that_took_no_measurable_time_cost_nothing() -> None:
    cost = EncodeCost()
    for texts in (1, 2, 3, 50):
        cost.observe(texts, 4, 0.0)
    assert cost.seconds(100, 100) == 0
    assert sorted(np.concatenate(cost.groups(np.array([3, 1, 2]))).tolist()) == [0, 1, 2]


def test_it_follows_a_machine_that_becomes_slower() -> None:
    cost = known(1e-3, 1e-5)
    for texts, width in [(1, 3), (8, 5), (4, 20), (16, 12)] * 400:
        cost.observe(texts, width, 5e-3 + 7e-5 * texts * width)
    assert cost.seconds(8, 10) == pytest.approx(5e-3 + 7e-5 * 80, rel=1e-2)


def test_many_threads_may_tell_and_ask() -> None:
    cost = EncodeCost()
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                texts, width = int(rng.integers(1, 50)), int(rng.integers(1, 30))
                cost.observe(texts, width, 1e-3 + 1e-5 * texts * width)
                lengths = rng.integers(1, 30, 20)
                assert sorted(np.concatenate(cost.groups(lengths)).tolist()) == list(range(20))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cost.seconds(10, 10) == pytest.approx(2e-3, rel=1e-3)


def test_a_batch_is_large_enough_where_its_fixed_cost_no_longer_matters() -> None:
    for fixed, each in [(1e-3, 2e-3), (5e-4, 2.5e-3), (1e-4, 1e-2)]:
        size = large_enough(16 * (fixed + each), fixed + 16 * each, 16)
        assert fixed <= 0.005 * each * (size + 1)
        assert size == 1 or fixed >= 0.005 * each * (size - 1)


@pytest.mark.parametrize(
    ("alone", "together", "size"), [(1.6, 1.6, 1), (1.6, 1.7, 1), (1.6, 0.2, 128), (1.6, 0.1, 128)]
)
def test_the_bounds_of_a_batch(alone: float, together: float, size: int) -> None:
    """A batch that is dearer than its queries alone is of one; one that costs nothing more is of the most."""
    assert large_enough(alone, together, 16) == size


def test_calibration_finds_out_what_calls_cost() -> None:
    """One slow call does not decide, and texts of other lengths are told apart."""
    texts = [" ".join(["word"] * length) for length in (3, 5, 9)]
    calls = 0

    def encode(some: Sequence[str]) -> tuple[int, float]:
        width = max(len(text.split()) for text in some)
        return width, 1e-3 + 1e-4 * len(some) * width

    def match(some: Sequence[str]) -> float:
        nonlocal calls
        calls += 1
        return 1e-3 + 2e-3 * len(some) + (10.0 if calls in (3, 34) else 0.0)

    cost = EncodeCost()
    assert cost.best_batch == 1
    cost.calibrate(texts, encode, match)
    assert cost.seconds(10, 7) == pytest.approx(1e-3 + 7e-3, rel=1e-2)
    assert cost.best_batch == 100
