from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest

from service.cost import EncodeCost


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


WIDTH = 12


def calibrated(per_call: dict[int, float] | None = None, call: float = 0.0, token: float = 1e-5, **options):
    """`best_batch` for calls that take `call + token · texts · width` (or as given), and the sizes tried."""
    tried: list[int] = []

    def run(texts: int) -> tuple[int, float]:
        tried.append(texts)
        if per_call is not None:
            return WIDTH, per_call[texts]
        return WIDTH, call + token * texts * WIDTH

    cost = EncodeCost()
    assert cost.best_batch == 1
    cost.calibrate(run, **options)
    return cost, sorted(set(tried))


@pytest.mark.parametrize("call", [0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_a_batch_is_as_large_as_saves_time(call: float) -> None:
    token = 1e-5
    cost, tried = calibrated(call=call, token=token)
    each = {size: call / size + token * WIDTH for size in (1, 2, 4, 8, 16, 32, 64, 128)}
    saves = [1 - each[2 * size] / each[size] for size in list(each)[:-1]]
    # Two doublings in a row that save next to nothing end it.
    last = next((at for at in range(1, len(saves)) if max(saves[at - 1 : at + 1]) < 0.05), len(saves) - 1)
    assert tried == list(each)[: last + 2]
    each = {size: each[size] for size in tried}
    # The smallest that comes within a twentieth of the best.
    assert cost.best_batch == min(size for size in tried if each[size] <= 1.05 * min(each.values()))


def test_without_a_cost_of_the_call_itself_a_batch_is_one_query() -> None:
    assert calibrated(call=0.0)[0].best_batch == 1


def test_the_largest_batch_is_a_bound() -> None:
    cost, tried = calibrated(call=1.0, largest=8)
    assert tried == [1, 2, 4, 8]
    assert cost.best_batch == 8


def test_larger_batches_are_not_tried_where_they_have_become_worse() -> None:
    per_text = {1: 10.0, 2: 6.0, 4: 4.0, 8: 3.9, 16: 5.0, 32: 1.0}
    cost, tried = calibrated({size: size * each for size, each in per_text.items()})
    assert tried == [1, 2, 4, 8, 16]
    assert cost.best_batch == 4


def test_one_slow_call_of_three_does_not_decide() -> None:
    calls = 0

    def run(texts: int) -> tuple[int, float]:
        nonlocal calls
        calls += 1
        return WIDTH, (10.0 if calls % 3 == 0 else 1e-3) + 1e-5 * texts * WIDTH

    cost = EncodeCost()
    cost.calibrate(run)
    assert cost.best_batch == 128
    assert cost.seconds(10, WIDTH) == pytest.approx(1e-3 + 1e-4 * WIDTH, rel=1e-3)
