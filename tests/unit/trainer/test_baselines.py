"""The lexical baselines against a plain reading of their definition."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from trainer.baselines import NEIGHBOURS, fit_lexical, top_k

PHRASES = ["red running shoes", "blue running shoes", "garden hose", "couch", "sofa table"]
TRAIN = ["cheap red running shoes", "settee", "sofa bed", "hose for the garden", "blue shoe"]
CLICKS = sp.csr_matrix(
    np.array(
        [[3, 1, 0, 0, 0], [0, 0, 0, 5, 0], [0, 0, 0, 1, 1], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0]], np.float32
    )
)
QUERIES = ["red shoes", "settee bed", "garden hoses", "running", "zzzz"]


@pytest.fixture(scope="module")
def matcher():
    return fit_lexical(TRAIN, PHRASES, CLICKS)


def test_rankings_are_those_of_the_definition(matcher):
    query = matcher.features.transform(QUERIES).toarray()
    by_text = query @ matcher.features.transform(PHRASES).toarray().T
    similar = query @ matcher.features.transform(TRAIN).toarray().T
    near = np.zeros_like(by_text)
    for i in range(len(QUERIES)):
        for j in np.argsort(-similar[i])[:NEIGHBOURS]:
            near[i] += similar[i, j] * (CLICKS.toarray()[j] > 0)
    both = by_text / np.maximum(by_text.max(1, keepdims=True), 1e-9)
    both += near / np.maximum(near.max(1, keepdims=True), 1e-9)
    found = matcher.rank(QUERIES, 5)
    for name, scores in (("tfidf", by_text), ("nearest", near), ("hybrid", both)):
        for i in range(len(QUERIES)):
            expected = [j for j in np.argsort(-scores[i], kind="stable") if scores[i, j] > 0]
            assert found[name][i].tolist() == expected + [-1] * (5 - len(expected)), (name, QUERIES[i])


def test_clicks_teach_what_words_do_not(matcher):
    found = matcher.rank(["settee"], 5)
    assert found["tfidf"][0, 0] == -1
    assert found["nearest"][0].tolist() == [3, -1, -1, -1, -1]
    assert found["hybrid"][0, 0] == 3


def test_vectors_have_length_one_or_none(matcher):
    vectors = matcher.features.transform(["red shoes", "zzzz", ""])
    lengths = np.sqrt(vectors.multiply(vectors).sum(axis=1)).A1
    assert lengths == pytest.approx([1, 0, 0], abs=1e-6)


def test_no_queries_and_more_places_than_phrases(matcher):
    assert matcher.rank([], 3)["hybrid"].shape == (0, 3)
    found = matcher.rank(["sofa"], 50)["hybrid"]
    assert found.shape == (1, 50)
    assert (found[0, 5:] == -1).all()


def test_top_k_breaks_ties_by_column_and_leaves_out_what_is_not_positive():
    scores = np.array([[0.5, 2.0, 0.5, 0.0, -1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert top_k(scores, 4)[0].tolist() == [1, 0, 2, -1]
    assert top_k(scores, 7).tolist() == [[1, 0, 2, -1, -1, -1, -1], [0, 1, 2, 3, 4, -1, -1]]
    assert top_k(np.zeros((2, 0)), 2).tolist() == [[-1, -1], [-1, -1]]
