from __future__ import annotations

import numpy as np

from export.bundle.encoder import pad


def test_rows_are_filled_from_the_left():
    ids, mask = pad([[5, 6, 7], [], [8]])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert ids.dtype == mask.dtype == np.int64


def test_empty_texts_alone_still_have_one_column():
    ids, mask = pad([[], []])
    assert ids.tolist() == mask.tolist() == [[0], [0]]


def test_nothing():
    ids, mask = pad([])
    assert ids.shape == mask.shape == (0, 1)
