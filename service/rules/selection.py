"""Which rows a filter allows, as rows or as a mask, and a cache of such answers."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from service.rules.filters import Filter

# What the objects of one entry take beside the filter and the arrays.
_ENTRY_BYTES = 1000


def few(size: int) -> int:
    """Most rows of `size` that are held as rows; a mask takes less time and room for more."""
    return max(size // 16, 1024)


class Selection:
    """The allowed rows of L, held as rows where they are few, else as a mask; neither can be written to.

    Args:
        size: L.
        rows: int32, ascending, none twice; or None.
        mask: bool (L,); or None. Exactly one of both is given.

    Attributes:
        size: L.
        count: how many are allowed.
    """

    def __init__(self, size: int, *, rows: np.ndarray | None = None, mask: np.ndarray | None = None):
        self.size = size
        if rows is not None:
            self.count = len(rows)
        else:
            assert mask is not None
            self.count = int(np.count_nonzero(mask))
        self._rows, self._mask = _fixed(rows), _fixed(mask)
        self._making = threading.Lock()
        self.on_growth: Callable[[Selection], None] | None = None
        self._derived = 0

    @classmethod
    def of_mask(cls, mask: np.ndarray) -> Selection:
        """The rows that a mask allows, held as what suits their number."""
        if np.count_nonzero(mask) <= few(len(mask)):
            return cls(len(mask), rows=np.flatnonzero(mask).astype(np.int32))
        return cls(len(mask), mask=mask)

    @property
    def held_as_rows(self) -> bool:
        """Whether `rows` costs nothing."""
        return self._rows is not None

    def rows(self) -> np.ndarray:
        """The allowed rows: int32 (count,), ascending. Made once."""
        if self._rows is None:
            with self._making:
                if self._rows is None:
                    assert self._mask is not None
                    self._rows = _fixed(np.flatnonzero(self._mask).astype(np.int32))
            self._grown()
        assert self._rows is not None
        return self._rows

    def mask(self) -> np.ndarray:
        """Whether each row is allowed: bool (L,), one byte a row. Made once."""
        if self._mask is None:
            with self._making:
                if self._mask is None:
                    mask = np.zeros(self.size, bool)
                    mask[self._rows] = True
                    self._mask = _fixed(mask)
            self._grown()
        assert self._mask is not None
        return self._mask

    @property
    def nbytes(self) -> int:
        """Bytes of what is held now."""
        held = (self._rows, self._mask)
        return self._derived + sum(one.nbytes for one in held if one is not None)

    def count_in(self, nbytes: int) -> None:
        """Count what somebody keeps as long as this selection."""
        self._derived += nbytes
        self._grown()

    def _grown(self) -> None:
        if self.on_growth is not None:
            self.on_growth(self)


def _fixed(held: np.ndarray | None) -> np.ndarray | None:
    if held is not None:
        held.flags.writeable = False
    return held


class SelectionCache:
    """Selections by filter, the latest used of them, for several threads.

    Args:
        limit: most bytes of all together; a selection that takes more than that alone is not kept.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.nbytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Filter, tuple[Selection, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, filter_: Filter) -> Selection | None:
        """The selection of an equal filter, if it is still here."""
        with self._lock:
            entry = self._entries.get(filter_)
            if entry is None:
                return None
            self._entries.move_to_end(filter_)
            return entry[0]

    def put(self, filter_: Filter, selection: Selection) -> None:
        """Keep a selection; the least recently used ones make room."""
        cache = weakref.ref(self)

        def grown(selection: Selection) -> None:
            # No ring of cache and selection, which only the collector would free.
            here = cache()
            if here is not None:
                here._weigh(filter_, selection)

        selection.on_growth = grown
        with self._lock:
            self._drop(filter_)
            self._add(filter_, selection)

    def _weigh(self, filter_: Filter, selection: Selection) -> None:
        """Count again what has grown."""
        with self._lock:
            if self._entries.get(filter_, (None, 0))[0] is selection:
                self._drop(filter_)
                self._add(filter_, selection)

    def _drop(self, filter_: Filter) -> None:
        self.nbytes -= self._entries.pop(filter_, (None, 0))[1]

    def _add(self, filter_: Filter, selection: Selection) -> None:
        size = _ENTRY_BYTES + filter_.size() + selection.nbytes
        if size > self.limit:
            return
        self._entries[filter_] = (selection, size)
        self.nbytes += size
        while self.nbytes > self.limit:
            _, (_, freed) = self._entries.popitem(last=False)
            self.nbytes -= freed
