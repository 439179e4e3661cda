"""Pairs of a query and numbered labels: checked and gathered in blocks, four bytes a pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base.errors import InputError
from bidmatch.base.strings import key_array
from trainer.data.collect import ALL_BAD_HINT, MAX_WEIGHT, SKIP_HINT, Collector, NumberedFilter, NumberedPairs
from trainer.data.filters import FilterPairs
from trainer.data.labels import Labels

EMPTY_QUERY = "the query is empty"


@dataclass(frozen=True)
class Block:
    """Some rows of a file: each a query and its labels.

    Attributes:
        lines: int64 (n,), line of each row in its file, from 1.
        queries: string array (n,), unnormalised, no nulls.
        counts: int64 (n,), labels of each row.
        numbers: int64 (pairs,), labels of all rows one after another.
        weights: float64 (pairs,), NaN where a weight is no number; None where each counts one.
    """

    lines: np.ndarray
    queries: pa.Array
    counts: np.ndarray
    numbers: np.ndarray
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class Place:
    """Where a row's numbers stand, if in another file than its query.

    Attributes:
        path: the file.
        ahead: how much greater a row's number is there than the line of its query.
        unit: what it counts, where that is not lines.
    """

    path: Path
    ahead: int = 0
    unit: str = ""


class NumberedReader:
    """Takes blocks of one file's rows, leaves bad ones out (or stops), and hands the rest to the collector.

    Args:
        collector: takes the pairs.
        path: file to name for a bad line.
        labels: what the numbers refer to.
        part: 0 training (or undivided), 1 test.
        filter_pairs: of the same file, by row (line - 1); None for none.
        labels_at: where the numbers stand, if in another file.
    """

    def __init__(
        self,
        collector: Collector,
        path: Path,
        labels: Labels,
        part: int,
        filter_pairs: FilterPairs | None = None,
        labels_at: Place | None = None,
    ):
        self._labels_at = labels_at or Place(path)
        self._collector, self._path, self._labels, self._part = collector, path, labels, part
        self._filter = filter_pairs

    def add(self, block: Block) -> None:
        """Take a block.

        Raises:
            InputError: a row is bad and bad lines stop; names the first such row.
        """
        keys = key_array(block.queries)
        keep = self._without_faults(block, keys)
        none = keep & (block.counts == 0)
        if none.any():
            self._collector.leave_out("the query has no labels", int(none.sum()))
        owner = np.repeat(np.arange(len(keep)), block.counts)
        pairs = keep[owner]
        self._collector.rows += int(pairs.sum())
        if block.weights is not None:
            with np.errstate(over="ignore", under="ignore"):
                zero = pairs & (block.weights.astype(np.float32) == 0)
            if zero.any():
                self._collector.skipped["weight is 0"] += int(zero.sum())
                pairs &= ~zero
        counts = np.bincount(owner[pairs], minlength=len(keep))
        some = counts > 0
        if some.any():
            weights = None if block.weights is None else block.weights[pairs]
            self._collector.numbered.append(
                NumberedPairs(
                    self._labels,
                    self._part,
                    keys.filter(pa.array(some)),
                    counts[some].astype(np.int32),
                    block.numbers[pairs].astype(np.int32),
                    weights,
                )
            )
        if self._filter is not None:
            self._take_filter(block.lines - 1, keys)

    def _without_faults(self, block: Block, keys: pa.Array) -> np.ndarray:
        """Which rows are good: bool (n,)."""
        n = len(block.lines)
        owner = np.repeat(np.arange(n), block.counts)
        outside = (block.numbers < 0) | (block.numbers >= len(self._labels.rows))
        nowhere = outside.copy()
        nowhere[~outside] = self._labels.rows[block.numbers[~outside]] < 0
        faults = {
            EMPTY_QUERY: pc.equal(keys, "").to_numpy(zero_copy_only=False),
            f"a label is no line of {self._labels.path.name}": _any(owner, outside, n),
            f"a label is an empty line of {self._labels.path.name}": _any(owner, nowhere & ~outside, n),
        }
        if block.weights is not None:
            faults |= {
                "a weight is not a number": _any(owner, np.isnan(block.weights), n),
                "a weight is negative": _any(owner, block.weights < 0, n),
                f"a weight is above {MAX_WEIGHT:.0e}": _any(owner, block.weights > MAX_WEIGHT, n),
            }
        keep = np.ones(n, dtype=bool)
        for fault in faults.values():
            keep &= ~fault
        if keep.all():
            return keep
        if self._collector.options.bad_lines == "stop":
            row = int(np.argmin(keep))
            reason = next(reason for reason, fault in faults.items() if fault[row])
            if reason.startswith("a label"):
                reason = self._labels.fault(int(block.numbers[np.flatnonzero(nowhere & (owner == row))[0]]))
            place = Place(self._path) if reason == EMPTY_QUERY else self._labels_at
            number = int(block.lines[row]) + place.ahead
            if place.unit:
                raise InputError(f"{place.unit} {number:,}: {reason}", file=place.path, hint=SKIP_HINT)
            self._collector.bad(reason, place.path, number)
        good = np.ones(n, dtype=bool)
        for reason, fault in faults.items():
            count = int((fault & good).sum())
            if count:
                self._collector.leave_out(f"bad line: {reason}", count)
            good &= ~fault
        return good

    def finish(self, rows: int) -> None:
        """Look for filter pairs of rows that the file does not have.

        Args:
            rows: how many the file has.

        Raises:
            InputError: there is one and bad lines stop, or there is no other.
        """
        if self._filter is None:
            return
        beyond = int(np.searchsorted(self._filter.rows, rows))
        if beyond == len(self._filter.rows):
            return
        path, lines = self._filter.path, self._filter.lines[beyond:].tolist()
        fault = f"row {self._filter.rows[beyond]} is none of {self._path.name} (0 to {rows - 1:,})"
        self._collector.bad_rows(f"the row is none of {self._path.name}", path, lines, fault)
        if beyond == 0:
            raise InputError(fault, file=path, line=lines[0], hint=ALL_BAD_HINT)

    def _take_filter(self, rows: np.ndarray, keys: pa.Array) -> None:
        assert self._filter is not None
        if not len(rows):
            return
        lo, hi = np.searchsorted(self._filter.rows, [rows[0], rows[-1] + 1])
        wanted = self._filter.rows[lo:hi]
        place = np.searchsorted(rows, wanted)
        found = rows[place] == wanted
        counts = np.bincount(place[found], minlength=len(rows))
        chosen = np.flatnonzero(counts)
        if len(chosen):
            self._collector.filters.append(
                NumberedFilter(
                    self._labels,
                    self._part,
                    keys.take(pa.array(chosen)),
                    counts[chosen].astype(np.int32),
                    self._filter.labels[lo:hi][found],
                )
            )


def _any(owner: np.ndarray, fault: np.ndarray, n: int) -> np.ndarray:
    """Rows of which any pair has the fault: bool (n,)."""
    return np.bincount(owner[fault], minlength=n).astype(bool)
