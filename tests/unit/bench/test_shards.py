"""Fan-out from measured latencies, against what is known of the distribution."""

from __future__ import annotations

import numpy as np
import pytest

from bench.serving.shards import fan_out, hedged
from bench.serving.sizes import at_recall

UNIFORM = np.linspace(0, 1, 1_000_001)


@pytest.mark.parametrize("shards", [1, 2, 8, 64])
def test_the_slowest_of_many(shards):
    # The largest of n uniform numbers has the distribution x^n.
    assert fan_out(UNIFORM, shards, 0.99) == pytest.approx(0.99 ** (1 / shards), abs=1e-5)
    drawn = np.random.default_rng(0).choice(UNIFORM, (100_000, shards)).max(axis=1)
    assert fan_out(UNIFORM, shards, 0.5) == pytest.approx(np.quantile(drawn, 0.5), abs=0.005)


def test_a_twin_cuts_the_tail():
    # One answer in fifty takes a hundred times as long: both twins are that slow once in 2,500.
    rng = np.random.default_rng(0)
    latencies = np.where(rng.random(100_000) < 0.02, 100.0, 1.0)
    assert fan_out(latencies, 8, 0.99) == 100
    assert hedged(latencies, 8, 0.99, rng) == 2
    assert hedged(latencies, 64, 0.99, rng) == 100


def test_the_time_at_a_recall_lies_between_measured_ones():
    # Halving what is missed costs as much each time.
    recalls, times = [0.9, 0.95, 0.975, 0.9875], [10.0, 20.0, 30.0, 40.0]
    assert at_recall(recalls, times, 0.95) == pytest.approx(20)
    assert at_recall(recalls, times, 1 - 0.05 / 2**0.5) == pytest.approx(25)
    assert np.isnan(at_recall(recalls, times, 0.999))
