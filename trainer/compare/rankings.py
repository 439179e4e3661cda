"""Rankings that other systems made, measured as the models are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bidmatch.base.errors import InputError
from trainer.compare.records import Figures
from trainer.data.dataset import Dataset
from trainer.metrics import by_frequency, evaluate_ranking, propensities, without_filtered

KS = (1, 3, 5)
RECALL_KS = (10, 100)
_FORM = (
    "A ranking is an .npz file with `topk`, int64 (held-out queries, K): rows of the data's phrases, in the "
    "data's own order, best first, -1 for none; and, if known, `seconds` of training."
)


@dataclass(frozen=True)
class Ranking:
    """A system's answers to the held-out queries.

    Attributes:
        topk: int64 (n, K), label rows, best first, -1 where there is nothing.
        seconds: that its training took, or None.
    """

    topk: np.ndarray
    seconds: float | None


def read_ranking(file: Path, queries: int, labels: int) -> Ranking:
    """A ranking of `queries` held-out queries by `labels` phrases.

    Raises:
        InputError: the file is no such ranking; says in what.
    """

    def wrong(reason: str) -> InputError:
        return InputError(reason, file=file, hint=_FORM)

    try:
        stored = np.load(file, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise wrong("is a single array (.npy), not an .npz file")
        with stored:
            if "topk" not in stored:
                raise wrong("holds no array `topk`")
            topk = stored["topk"]
            given = stored.get("seconds")
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError("no such file", file=file) from None
    except OSError as unreadable:
        reason = unreadable.strerror or str(unreadable)
        raise wrong(f"can't be read as .npz: {reason}") from unreadable
    except Exception as unreadable:
        # A damaged archive fails in whichever layer meets the damage first: zip, its decompressors, the
        # array's header, or the memory for a shape that the header only claims. Each has errors of its own.
        raise wrong(f"can't be read as .npz: {unreadable or type(unreadable).__name__}") from unreadable
    if given is not None and (given.ndim or given.dtype.kind not in "iuf"):
        raise wrong(f"`seconds` is {given.dtype} {given.shape}, not one number")
    seconds = None if given is None else float(given)
    if topk.ndim != 2 or topk.shape[0] != queries or topk.dtype.kind not in "iu":
        raise wrong(
            f"`topk` is {topk.dtype} {topk.shape}, not whole numbers ({queries}, K): "
            f"the data has {queries:,} held-out queries"
        )
    # Before they become int64, where the largest uint64 would be -1.
    if topk.size and (topk.min() < -1 or topk.max() >= labels):
        raise wrong(
            f"`topk` reaches from {topk.min()} to {topk.max()}; the data's rows are 0 to {labels - 1}"
        )
    topk = topk.astype(np.int64)
    ordered = np.sort(topk, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        raise wrong(f"the answers to query {int(np.argmax(twice))} hold a phrase twice")
    if seconds is not None and not (np.isfinite(seconds) and seconds >= 0):
        raise wrong(f"`seconds` is {seconds}")
    return Ranking(topk, seconds)


def measure_ranking(topk: np.ndarray, dataset: Dataset, a: float, b: float) -> Figures:
    """Figures of a ranking of the held-out queries, as `run_training` has them of a model.

    Frequencies are those of the whole training part.

    Args:
        topk: int64 (n, K).
        dataset: whose held-out part was ranked.
        a: A of the propensity model.
        b: B of the propensity model.
    """
    train, truth = dataset.train.clicks, dataset.test.clicks
    topk = without_filtered(topk, dataset.filtered, topk.shape[1])
    counts = np.bincount(train.indices, minlength=train.shape[1])
    propensity = propensities(counts, train.shape[0], a, b)
    whole = evaluate_ranking(topk, truth, KS, RECALL_KS, propensity)
    return {"all": whole} | by_frequency(topk, truth, counts, KS, RECALL_KS, propensity)
