"""The two lexical baselines every learned matcher must beat, and their sum.

Both see a text as sublinear TF-IDF of its words, word pairs and character 3- and 4-grams. "tfidf" ranks
phrases by the cosine of query and phrase text; "nearest" adds up the phrases of the 20 training queries
nearest to the query, each weighted with its cosine; "hybrid" adds the two, each divided by its maximum for
the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from sklearn.feature_extraction.text import TfidfVectorizer

from bidmatch.base.console import progress

NEIGHBOURS = 20
_CELLS_PER_BLOCK = 1 << 25


class TextFeatures:
    """Texts (keys) to unit vectors: words of two letters or more, word pairs, character 3- and 4-grams.

    The two kinds have the same length before they are joined, so neither drowns the other.
    """

    def __init__(self) -> None:
        self._parts = [
            TfidfVectorizer(analyzer="word", ngram_range=(1, 2), sublinear_tf=True, dtype=np.float32),
            TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 4), sublinear_tf=True, dtype=np.float32),
        ]

    def fit(self, texts: Sequence[str]) -> TextFeatures:
        """Learn the features and their document frequencies."""
        for part in self._parts:
            part.fit(texts)
        return self

    def transform(self, texts: Sequence[str]) -> sp.csr_matrix:
        """CSR float32 (texts, features); rows of length 1, or 0 where no feature is known."""
        both = [part.transform(texts) for part in self._parts]
        scale = np.sqrt(sum(np.asarray(part.multiply(part).sum(axis=1)) for part in both)).reshape(-1)
        stacked = sp.hstack(both, format="csr")
        return sp.csr_matrix(sp.diags_array(1.0 / np.maximum(scale, 1e-12)).astype(np.float32) @ stacked)


@dataclass(frozen=True)
class LexicalMatcher:
    """Fitted baselines.

    Attributes:
        features: fitted on training queries and phrases.
        phrases: CSR float32 (features, L): phrase texts, transposed.
        queries: CSR float32 (features, N): training queries, transposed.
        labels: CSR float32 (N, L): 1 where a training query has a phrase.
    """

    features: TextFeatures
    phrases: sp.csr_matrix
    queries: sp.csr_matrix
    labels: sp.csr_matrix

    def rank(self, queries: Sequence[str], k: int) -> dict[str, np.ndarray]:
        """The k best phrases of each query by each baseline.

        Args:
            queries: keys, n of them.
            k: ranking's depth.

        Returns:
            "tfidf" | "nearest" | "hybrid" -> int64 (n, k), best first, -1 where no phrase scores above 0.
        """
        if not queries:
            return {name: np.empty((0, k), dtype=np.int64) for name in ("tfidf", "nearest", "hybrid")}
        vectors = self.features.transform(queries)
        widest = max(self.phrases.shape[1], self.queries.shape[1], 1)
        rows = max(_CELLS_PER_BLOCK // widest, 1)
        out: dict[str, list[np.ndarray]] = {"tfidf": [], "nearest": [], "hybrid": []}
        with progress("lexical baselines", len(queries), "queries") as step:
            for lo in range(0, len(queries), rows):
                block = vectors[lo : lo + rows]
                by_text = (block @ self.phrases).toarray()
                by_neighbours = self._by_neighbours(block)
                both = by_text / _maximum(by_text) + by_neighbours / _maximum(by_neighbours)
                for name, scores in (("tfidf", by_text), ("nearest", by_neighbours), ("hybrid", both)):
                    out[name].append(top_k(scores, k))
                step.advance(block.shape[0])
        return {name: np.concatenate(blocks) for name, blocks in out.items()}

    def _by_neighbours(self, vectors: sp.csr_matrix) -> np.ndarray:
        similar = (vectors @ self.queries).toarray()
        nearest = top_k(similar, NEIGHBOURS)
        rows, places = np.nonzero(nearest >= 0)
        columns = nearest[rows, places]
        weights = sp.csr_matrix((similar[rows, columns], (rows, columns)), shape=similar.shape)
        return (weights @ self.labels).toarray()


def fit_lexical(
    train_queries: Sequence[str], phrase_keys: Sequence[str], clicks: sp.csr_matrix
) -> LexicalMatcher:
    """Fit the baselines on a training set.

    Args:
        train_queries: keys, N of them.
        phrase_keys: `text.key` of each phrase, L of them.
        clicks: (N, L), non-zero where a query has a phrase.
    """
    features = TextFeatures().fit([*train_queries, *phrase_keys])
    return LexicalMatcher(
        features=features,
        phrases=features.transform(phrase_keys).T.tocsr(),
        queries=features.transform(train_queries).T.tocsr(),
        labels=sp.csr_matrix(clicks.sign(), dtype=np.float32),
    )


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Columns of the k largest positive scores of each row, best first, equal ones by column.

    Where more columns equal the k-th score than there are places, which of them get one is not said.

    Args:
        scores: (n, m).
        k: columns wanted.

    Returns:
        int64 (n, k), -1 where fewer than k scores are positive.
    """
    n, m = scores.shape
    out = np.full((n, k), -1, dtype=np.int64)
    width = min(k, m)
    if width == 0:
        return out
    best = (
        np.argpartition(-scores, width - 1, axis=1)[:, :width] if width < m else np.tile(np.arange(m), (n, 1))
    )
    best.sort(axis=1)
    found = np.take_along_axis(scores, best, axis=1)
    order = np.argsort(-found, axis=1, kind="stable")
    found = np.take_along_axis(found, order, axis=1)
    out[:, :width] = np.where(found > 0, np.take_along_axis(best, order, axis=1), -1)
    return out


def _maximum(scores: np.ndarray) -> np.ndarray:
    """Largest score of each row (n, 1), 1 where none is positive."""
    most = scores.max(axis=1, keepdims=True, initial=0.0)
    return np.where(most > 0, most, 1.0)
