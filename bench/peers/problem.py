"""A data set as the peers take it: sparse features and labels on disk, and what making them cost."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import orjson
import scipy.sparse as sp

from trainer.baselines import TextFeatures
from trainer.data.dataset import Dataset
from trainer.metrics import most_filtered, without_filtered

DEPTH = 100


def write_problem(dataset: Dataset, folder: Path) -> None:
    """Write `train_x.npz`, `train_y.npz`, `test_x.npz` (CSR float32, sorted) and `problem.json`.

    Features are sublinear TF-IDF of words, word pairs and character 3- and 4-grams, as the lexical
    baselines have, fitted on the training queries. Rows stand as in `dataset.train` and `dataset.test`,
    columns of the labels as in `dataset.phrases`; a label counts as 1 whatever its clicks. Workers
    write into `rankings/`.
    """
    (folder / "rankings").mkdir(parents=True)
    queries = dataset.train.queries.to_pylist()
    started = time.perf_counter()
    features = TextFeatures().fit(queries)
    train = features.transform(queries)
    fitted = time.perf_counter() - started
    started = time.perf_counter()
    test = features.transform(dataset.test.queries.to_pylist())
    each = (time.perf_counter() - started) / max(len(dataset.test), 1)
    for name, matrix in (("train_x", train), ("test_x", test), ("train_y", dataset.train.clicks.sign())):
        rows = sp.csr_matrix(matrix, dtype=np.float32)
        rows.sort_indices()
        sp.save_npz(folder / f"{name}.npz", rows, compressed=False)
    facts = {
        "fingerprint": dataset.report.fingerprint,
        "features": train.shape[1],
        # So that a filtered pair leaves no place empty.
        "depth": min(DEPTH + most_filtered(dataset.filtered), len(dataset.phrases)),
        "vectorise_seconds": fitted,
        "vectorise_ms_per_query": 1e3 * each,
    }
    (folder / "problem.json").write_bytes(orjson.dumps(facts))


def finish_ranking(file: Path, dataset: Dataset) -> str:
    """Take the data's filtered pairs out of a worker's ranking and cut it; a line that describes it."""
    with np.load(file) as stored:
        arrays = dict(stored)
    topk = without_filtered(arrays["topk"], dataset.filtered, DEPTH)
    arrays["topk"] = np.pad(topk, ((0, 0), (0, DEPTH - topk.shape[1])), constant_values=-1)
    np.savez_compressed(file, **arrays)
    return (
        f"{file}: trained in {arrays['seconds']:.1f} s, {arrays['ms_per_query']:.2f} ms a query, "
        f"{arrays['threads']} threads, {arrays['system']} {arrays['version']}, {arrays['settings']}"
    )
