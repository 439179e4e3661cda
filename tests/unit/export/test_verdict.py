from __future__ import annotations

import pytest

from export.bundle.format import Candidate
from export.quantise import verdict


def candidate(precision, loss, size=100, ms=1.0):
    return Candidate(
        precision=precision,
        quantised_ops=[],
        bytes=size,
        quality={"P@1": 50.0, "P@5": 20.0, "recall@10": 80.0},
        loss=dict(zip(("P@1", "P@5", "recall@10"), loss, strict=True)),
        ms_per_query=ms,
        ms_per_query_batched=ms,
        chosen=False,
        reason="",
    )


FP32 = candidate("fp32", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("loss", "bound", "taken"),
    [
        ((0.5, 0.5, 0.5), 0.5, True),
        ((0.51, 0.0, 0.0), 0.5, False),
        ((0.0, 0.51, 0.0), 0.5, False),
        ((0.0, 0.0, 0.51), 0.5, False),
        ((0.0, 0.0, 0.01), 0.0, False),
        ((-0.2, 0.0, -1.0), 0.0, True),
        ((60.0, 60.0, 60.0), 100.0, True),
    ],
)
def test_each_of_the_three_losses_counts(loss, bound, taken):
    assert verdict(FP32, candidate("int8", loss, size=30), bound)[0] is taken


def test_it_must_be_smaller_or_faster():
    lossless = (0.0, 0.0, 0.0)
    assert not verdict(FP32, candidate("int8", lossless, size=100, ms=1.0), 0.5)[0]
    assert verdict(FP32, candidate("int8", lossless, size=99, ms=2.0), 0.5)[0]
    assert verdict(FP32, candidate("int8", lossless, size=101, ms=0.9), 0.5)[0]


def test_the_reason_names_the_worst_metric():
    assert "0.90 points of recall@10" in verdict(FP32, candidate("int8", (0.6, 0.0, 0.9)), 0.5)[1]
