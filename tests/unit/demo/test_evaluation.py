"""From served matches to rankings of a data set's phrases."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp

from bidmatch.evaluation import (
    Popularity,
    dense_ranking,
    measure,
    quality_table,
    query_counts,
    rank_all,
    rows_in,
)
from trainer.data.dataset import Interactions


def phrases(texts: list[str], match_types: list[str] | None = None) -> pa.Table:
    columns = {"id": [str(i) for i in range(len(texts))], "text": texts}
    return pa.table(columns | ({"match_type": match_types} if match_types else {}))


def test_phrases_are_the_same_by_key():
    served = phrases(["Red Shoes", "ＢＬＵＥ shoes", "hats"])
    assert rows_in(served, phrases(["blue  shoes", "red shoes", "gloves"])).tolist() == [1, 0, -1]


def test_match_types_tell_phrases_apart_where_both_have_them():
    served = phrases(["hat", "hat"], ["exact", "broad"])
    assert rows_in(served, phrases(["hat", "hat"], ["broad", "exact"])).tolist() == [1, 0]
    assert rows_in(served, phrases(["hat"])).tolist() == [0, 0]


def test_dense_ranking_keeps_places_and_drops_what_came_before():
    offsets, rows = np.array([0, 3, 3, 5]), np.array([4, 1, 0, 2, 3])
    label_of = np.array([7, -1, 5, 6, 7])
    assert dense_ranking(offsets, rows, label_of, 4).tolist() == [
        [7, -1, -1, -1],
        [-1, -1, -1, -1],
        [5, 6, -1, -1],
    ]
    assert dense_ranking(offsets, rows, label_of, 1).tolist() == [[7], [-1], [5]]


@pytest.mark.parametrize("threads", [1, 3])
def test_rank_all_keeps_the_order_of_the_queries(threads):
    queries = [str(i) for i in range(300)]

    def match(block: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        assert k == 2
        return np.arange(len(block) + 1), np.array([int(query) for query in block])

    ranked = rank_all(queries, match, np.arange(300)[::-1], 2, threads)
    assert ranked[:, 0].tolist() == list(range(299, -1, -1))
    assert (ranked[:, 1] == -1).all()
    assert rank_all([], match, np.arange(3), 2, threads).shape == (0, 2)


def test_rank_all_fills_the_places_of_filtered_pairs():
    """Served are phrases 0, 1, 2, ... in that order; query 70 has 0 to 4 filtered, query 3 has 1."""
    filtered = sp.lil_matrix((100, 20), dtype=bool)
    filtered[70, :5] = True
    filtered[3, 1] = True
    asked = []

    def match(block: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(k)
        return np.arange(len(block) + 1) * k, np.tile(np.arange(k), len(block))

    queries = [str(i) for i in range(100)]
    ranked = rank_all(queries, match, np.arange(20), 3, 1, filtered.tocsr())
    assert asked == [4, 8]
    assert ranked[70].tolist() == [5, 6, 7]
    assert ranked[3].tolist() == [0, 2, 3]
    assert (np.delete(ranked, [3, 70], axis=0) == [0, 1, 2]).all()


def test_measure_gives_all_tables_and_an_empty_bin_is_a_dash():
    train = Interactions(pa.array(["a", "b"]), sp.csr_matrix(np.array([[1, 1, 0], [1, 0, 0]], np.float32)))
    assert query_counts(train).tolist() == [2, 1, 0]
    truth = sp.csr_matrix(np.array([[1, 0, 0]], np.float32))
    quality = measure(np.array([[0, 1]]), truth, Popularity(query_counts(train), 2))
    assert quality.metrics["P@1"] == 100
    assert quality.by_frequency["tail"]["recall@10"] == 100
    assert math.isnan(quality.by_frequency["head"]["P@1"])
    assert sum(part["P@1"] for part in quality.by_volume) == 100
    table = quality_table("t", quality)
    assert [list(column.cells)[1] for column in table.columns][:3] == ["head", "-", "-"]
