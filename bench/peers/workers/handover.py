"""What every worker reads and writes. Runs in a peer's environment: numpy and scipy, nothing of ours.

A worker is started as `run_NAME.py PROBLEM THREADS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp


class Problem(NamedTuple):
    """A data set as written by `bench.peers.problem`.

    Attributes:
        folder: of the files; a worker may put its own beside them.
        threads: to train and rank with.
        depth: labels to rank for each query.
        train_x: CSR float32 (N, features).
        train_y: CSR float32 (N, L), 1 where a query has a label.
        test_x: CSR float32 (n, features).
        facts: problem.json.
    """

    folder: Path
    threads: int
    depth: int
    train_x: sp.csr_matrix
    train_y: sp.csr_matrix
    test_x: sp.csr_matrix
    facts: dict[str, Any]


def read_problem() -> Problem:
    """The problem that the command line names."""
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    matrices = [
        sp.csr_matrix(sp.load_npz(folder / f"{name}.npz")) for name in ("train_x", "train_y", "test_x")
    ]
    facts = json.loads((folder / "problem.json").read_text())
    return Problem(folder, threads, facts["depth"], *matrices, facts)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and its seconds."""
    started = perf_counter()
    result = work()
    return result, perf_counter() - started


def ranked(scores: sp.csr_matrix, depth: int) -> np.ndarray:
    """The best columns of each row, int64 (n, depth), best first, -1 padded."""
    scores = sp.csr_matrix(scores)
    rows = np.repeat(np.arange(scores.shape[0]), np.diff(scores.indptr))
    order = np.lexsort((scores.indices, -scores.data, rows))
    place = np.arange(len(rows)) - scores.indptr[rows]
    topk = np.full((scores.shape[0], depth), -1, dtype=np.int64)
    kept = place < depth
    topk[rows[kept], place[kept]] = scores.indices[order][kept]
    return topk


def padded(lists: list[list[int]], depth: int) -> np.ndarray:
    """Ragged rankings as int64 (n, depth), -1 padded."""
    topk = np.full((len(lists), depth), -1, dtype=np.int64)
    for row, labels in enumerate(lists):
        topk[row, : len(labels)] = labels[:depth]
    return topk


def write_ranking(
    problem: Problem,
    name: str,
    package: str,
    settings: str,
    topk: np.ndarray,
    train_seconds: float,
    rank_seconds: float,
) -> None:
    """Write `rankings/NAME.npz`, whole or not at all; see `bench.peers` for what is in it."""
    facts = problem.facts
    seconds = facts["vectorise_seconds"] + train_seconds
    each = facts["vectorise_ms_per_query"] + 1e3 * rank_seconds / max(len(topk), 1)
    folder = problem.folder / "rankings"
    partial = folder / f"{name}.partial"
    with partial.open("wb") as out:
        np.savez_compressed(
            out,
            topk=topk,
            seconds=seconds,
            ms_per_query=each,
            vectorise_seconds=facts["vectorise_seconds"],
            vectorise_ms_per_query=facts["vectorise_ms_per_query"],
            system=package,
            version=version(package),
            settings=settings,
            threads=problem.threads,
            fingerprint=facts["fingerprint"],
        )
    partial.rename(folder / f"{name}.npz")
