"""Label texts posing as queries, and the targets they get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.special import expit

from bidmatch.base.console import progress
from trainer.config import GandalfConfig
from trainer.gandalf.graph import ClickGraph, click_graph, conditional_rows, glas_rows, kept
from trainer.gandalf.walk import random_walk_rows


@dataclass(frozen=True)
class GandalfPairs:
    """Label texts as training queries.

    Attributes:
        labels: int64 (M,), whose texts, ascending.
        targets: CSR (M, L) float32 in (0, 1], how much each label belongs to each of these texts.
    """

    labels: np.ndarray
    targets: sp.csr_matrix


def choose_labels(frequency: np.ndarray, config: GandalfConfig, rng: np.random.Generator) -> np.ndarray:
    """Labels whose texts are used: `share` of all, rounded, at least one.

    Args:
        frequency: n_l, int64 (L,), training queries of each label.
        config: `share` and `sampling`: at random, or the rarest first and at random among equally rare ones.
        rng: source of the sample; left alone where all labels are used.

    Returns:
        int64 (M,), ascending.
    """
    wanted = min(len(frequency), max(1, round(config.share * len(frequency))))
    if wanted == len(frequency):
        return np.arange(wanted)
    order = rng.permutation(len(frequency))
    if config.sampling == "tail":
        order = order[np.argsort(frequency[order], kind="stable")]
    return np.sort(order[:wanted])


def gandalf_pairs(clicks: sp.csr_matrix, config: GandalfConfig, rng: np.random.Generator) -> GandalfPairs:
    """Label texts and their soft targets (section 1.3).

    Memory: 12 bytes a target while they are joined, 8 afterwards, and one block (`graph.BLOCK_PAIRS`);
    targets are the pairs above δ, at most `config.most` a label text.

    Args:
        clicks: CSR (N, L), the training pairs and no others; weights do not count.
        config: which labels, which graph, δ.
        rng: source of the sampled labels and of the walks.
    """
    graph = click_graph(clicks)
    frequency = graph.frequency
    labels = choose_labels(frequency, config, rng)
    own = expit(1.0) if config.graph == "glas" else 1.0
    order = np.argsort(frequency, kind="stable")
    rank = np.empty(len(order), dtype=np.uint64)
    rank[order] = np.arange(len(order), dtype=np.uint64)
    parts: list[sp.csr_matrix] = []
    with progress("label graph", len(labels), "labels") as step:
        for block, rows in _rows(graph, labels, config, rng):
            rows = with_self(rows, block, own)
            if config.most:
                rows = largest(rows, block, config.most, rank)
            rows.sort_indices()
            parts.append(rows.astype(np.float32))
            step.advance(len(block))
    return GandalfPairs(labels, _stacked(parts, len(frequency)))


def _rows(
    graph: ClickGraph, labels: np.ndarray, config: GandalfConfig, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, sp.csr_matrix]]:
    match config.graph:
        case "conditional":
            return conditional_rows(graph, labels, config.delta)
        case "glas":
            return glas_rows(graph, labels, config.delta)
        case "random_walk":
            return random_walk_rows(graph, labels, config.delta, config.walk_length, config.restart, rng)
        case "self":
            return iter([(labels, sp.csr_matrix((len(labels), graph.by_query.shape[1])))])


def with_self(rows: sp.csr_matrix, labels: np.ndarray, value: float) -> sp.csr_matrix:
    """The targets (CSR (b, L)) of the texts of `labels`, with `value` for its own label where a row lacks it.

    A label without training queries has no other target.
    """
    row = np.repeat(np.arange(len(labels)), np.diff(rows.indptr))
    lacking = np.ones(len(labels), dtype=bool)
    lacking[row[rows.indices == labels[row]]] = False
    missing = np.flatnonzero(lacking)
    if not len(missing):
        return rows
    starts = rows.indptr[missing]
    indptr = rows.indptr + np.concatenate([[0], np.cumsum(lacking)])
    data, indices = np.insert(rows.data, starts, value), np.insert(rows.indices, starts, labels[missing])
    return sp.csr_matrix((data, indices, indptr), shape=rows.shape)


def largest(rows: sp.csr_matrix, labels: np.ndarray, most: int, rank: np.ndarray) -> sp.csr_matrix:
    """At most `most` targets of each row: its own label, then the largest; of equal ones the rarer label's.

    Args:
        rows: CSR (b, L), values in (0, 1].
        labels: int64 (b,), the rows' own labels.
        most: targets to keep.
        rank: uint64 (L,), place of each label when the rarest comes first; no two alike.
    """
    lengths = np.diff(rows.indptr)
    crowded = np.flatnonzero(lengths > most)
    if not len(crowded):
        return rows
    # Bits of positive floats sort as the floats do; inverted, the largest comes first.
    descending = ~rows.data.astype(np.float32).view(np.uint32)
    keep = np.ones(rows.nnz, dtype=bool)
    for place in crowded:
        of_row = slice(rows.indptr[place], rows.indptr[place + 1])
        columns = rows.indices[of_row]
        keys = (descending[of_row].astype(np.uint64) << np.uint64(32)) | rank[columns]
        keys[columns == labels[place]] = 0
        keep[of_row] = keys <= np.partition(keys, most - 1)[most - 1]
    return kept(rows, rows.data, keep)


def _stacked(parts: list[sp.csr_matrix], width: int) -> sp.csr_matrix:
    """The blocks under one another; emptied on the way, so that not both copies are held whole."""
    if not parts:
        return sp.csr_matrix((0, width), dtype=np.float32)
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    indptr = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=indptr[1:])
    data = [part.data for part in parts]
    indices = [part.indices for part in parts]
    parts.clear()
    joined = np.concatenate(data)
    data.clear()
    return sp.csr_matrix((joined, np.concatenate(indices), indptr), shape=(len(lengths), width))
