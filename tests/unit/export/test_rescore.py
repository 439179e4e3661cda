from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from export.bundle.read import WideVectors
from export.bundle.rescore import Rescorer, to_8_bits

COUNT, DIM, SPLIT = 300, 40, 24


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def halves(count, seed, split=SPLIT):
    """Two unit parts a row."""
    rng = np.random.default_rng(seed)
    parts = [unit(rng.standard_normal((count, width))) for width in (split, DIM - split) if width]
    return np.concatenate(parts, axis=1)


VECTORS = halves(COUNT, 0)
QUERIES = halves(9, 1)
ROWS = np.random.default_rng(2).integers(0, COUNT, (9, 50))


def wide(vectors, split=SPLIT):
    return WideVectors(*to_8_bits(vectors, split), split)


def test_each_value_is_off_by_half_a_step_of_its_own_rows_part():
    vectors = VECTORS.copy()
    vectors[3] *= 1e6
    vectors[4, :SPLIT] *= 1e-6
    rows, scales = to_8_bits(vectors, SPLIT)
    assert (rows.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, (COUNT, 2))
    step = np.repeat(scales, (SPLIT, DIM - SPLIT), axis=1)
    assert (np.abs(rows * step - vectors) <= step * 0.5001).all()
    assert (np.abs(rows).reshape(COUNT, -1).max(axis=1) == 127).all()


def test_parts_of_zeros_or_without_values_have_scale_0():
    vectors = VECTORS[:3].copy()
    vectors[1, SPLIT:] = 0
    assert (to_8_bits(vectors, SPLIT)[1] > 0).tolist() == [[True, True], [True, False], [True, True]]
    assert (to_8_bits(vectors, 0)[1][:, 0] == 0).all()
    assert (to_8_bits(vectors, DIM)[1][:, 1] == 0).all()
    assert to_8_bits(vectors[:0], SPLIT)[0].shape == (0, DIM)


@pytest.mark.parametrize("least", [1e-45, 1e-40, 1e-38])
def test_magnitudes_near_the_least_there_are_do_not_overflow(least):
    rows, scales = to_8_bits(np.array([[least, -least, least / 2]], np.float32), 1)
    assert np.abs(rows.astype(int)).max() <= 127
    assert np.isfinite(scales).all()


def test_scores_are_both_cosines_within_the_error_of_8_bits():
    encoder, classifier = Rescorer(wide(VECTORS)).score(QUERIES, ROWS)
    assert (encoder.dtype, encoder.shape) == (np.float32, ROWS.shape)
    scales = to_8_bits(VECTORS, SPLIT)[1][ROWS]
    for part, (found, columns) in enumerate(((encoder, slice(0, SPLIT)), (classifier, slice(SPLIT, None)))):
        exact = np.einsum("nci,ni->nc", VECTORS[ROWS][:, :, columns], QUERIES[:, columns])
        bound = scales[:, :, part] / 2 * np.abs(QUERIES[:, columns]).sum(axis=1, keepdims=True)
        assert (np.abs(found - exact) <= bound + 1e-6).all()
        assert bound.max() < 0.02  # which is little beside what scores differ by
        assert np.abs(found - exact).max() > 1e-5  # 8 bits they are


@pytest.mark.parametrize("split", [0, DIM])
def test_the_part_of_a_head_that_is_switched_off_is_0(split):
    vectors, queries = halves(COUNT, 0, split), halves(9, 1, split)
    parts = Rescorer(wide(vectors, split)).score(queries, ROWS)
    off, on = (0, 1) if split == 0 else (1, 0)
    assert not parts[off].any()
    exact = np.einsum("nci,ni->nc", vectors[ROWS], queries)
    assert np.allclose(parts[on], exact, atol=0.02)


def test_a_phrase_beside_itself_scores_no_more_than_1_a_part():
    encoder, classifier = Rescorer(wide(VECTORS)).score(VECTORS, np.arange(COUNT)[:, None])
    for part in (encoder, classifier):
        assert part.max() <= 1
        assert part.min() > 0.99


def test_a_place_without_a_phrase_scores_0():
    some = ROWS.copy()
    some[:, 3] = -1
    for found, whole in zip(
        Rescorer(wide(VECTORS)).score(QUERIES, some),
        Rescorer(wide(VECTORS)).score(QUERIES, ROWS),
        strict=True,
    ):
        assert not found[:, 3].any()
        assert (np.delete(found, 3, axis=1) == np.delete(whole, 3, axis=1)).all()


@pytest.mark.parametrize("shape", [(0, 50), (9, 0)])
def test_nothing_to_score(shape):
    encoder, classifier = Rescorer(wide(VECTORS)).score(QUERIES[: shape[0]], np.zeros(shape, np.int64))
    assert encoder.shape == classifier.shape == shape


def test_what_does_not_fit_is_refused():
    rescorer = Rescorer(wide(VECTORS))
    with pytest.raises(ValueError, match="width 40"):
        rescorer.score(QUERIES[:, :-1], ROWS)
    with pytest.raises(ValueError, match="do not fit"):
        rescorer.score(QUERIES[:-1], ROWS)
    with pytest.raises(IndexError):
        rescorer.score(QUERIES, np.full_like(ROWS, COUNT))


def test_threads_share_one():
    rescorer = Rescorer(wide(VECTORS))
    alone = [rescorer.score(QUERIES[[i]], ROWS[[i]])[0].tolist() for i in range(9)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            found = pool.map(lambda i: rescorer.score(QUERIES[[i]], ROWS[[i]])[0].tolist(), range(9))
            assert list(found) == alone


def test_only_the_rows_asked_for_are_read_into_memory(tmp_path):
    count = 50_000
    mapped = np.lib.format.open_memmap(tmp_path / "wide.npy", mode="w+", dtype=np.int8, shape=(count, DIM))
    rows = np.random.default_rng(0).integers(0, count, (1, 100))
    mapped[rows[0]] = to_8_bits(VECTORS[:100], SPLIT)[0]
    scales = np.full((count, 2), 1 / 127, np.float32)
    tracemalloc.start()
    try:
        Rescorer(WideVectors(np.asarray(mapped), scales, SPLIT)).score(QUERIES[:1], rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mapped.nbytes / 20
