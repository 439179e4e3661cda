"""Which of a bundle's phrases a search may return: the filter, allow lists, and how phrases were bought."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa

from export.bundle.index import Admitted
from export.bundle.lookup import BROAD, match_type_codes
from service.options import MatchOptions
from service.phrase_keys import PhraseIds
from service.rules.columns import Columns
from service.rules.filters import Filter
from service.rules.selection import Selection


@dataclass(frozen=True)
class Scope:
    """What one set of options admits.

    Attributes:
        searched: the rows that search may return; None for all.
        selection: the rows that the filter allows, however they are found; None for all.
        allowed: rows of the allow list, int64, sorted; None without one.
        denied: rows of the deny list, int32, sorted.
    """

    searched: Admitted | None
    selection: Selection | None
    allowed: np.ndarray | None
    denied: np.ndarray

    def admits(self, rows: np.ndarray) -> np.ndarray:
        """Whether each row, int64 (m,), passes filter and lists: bool (m,)."""
        keep = np.ones(len(rows), bool)
        if self.selection is not None:
            if self.selection.held_as_rows:
                keep &= np.isin(rows, self.selection.rows())
            else:
                keep &= self.selection.mask()[rows]
        if self.allowed is not None:
            keep &= np.isin(rows, self.allowed)
        if len(self.denied):
            keep &= ~np.isin(rows, self.denied)
        return keep


class Scopes:
    """The scopes of a bundle's phrases. Safe to ask from several threads at once.

    Args:
        phrases: the phrases' user columns.
        ids: finds phrases by id.
        honour_match_types: whether match types are honoured: search then returns broad phrases alone.

    Attributes:
        types: match type of each row, uint8 (L,): `BROAD`, `PHRASE` or `EXACT`.
        columns: the columns that can be filtered by.
    """

    def __init__(self, phrases: pa.Table, ids: PhraseIds, *, honour_match_types: bool):
        self.columns = Columns(phrases)
        self._ids = ids
        self.types = match_type_codes(phrases)
        broad = self.types == BROAD
        self._broad = broad if honour_match_types and not broad.all() else None
        self._searched = None if self._broad is None else Admitted.of_mask(self._broad)
        # As long as the selections are kept, by the cache that weighs them.
        self._by_selection: WeakKeyDictionary[Selection, Admitted] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, options: MatchOptions) -> Scope:
        """What these options admit; ids that the bundle does not hold count for nothing."""
        denied = np.array(sorted(self._ids.find(list(options.deny)).values()), np.int32)
        selection, searched = None, self._searched
        if options.filter:
            selection, searched = self._filtered(options.filter)
        if options.allow is None:
            return Scope(searched, selection, None, denied)
        allowed = np.array(sorted(self._ids.find(list(options.allow)).values()), np.int64)
        rows = allowed
        if selection is not None:
            rows = rows[Scope(None, selection, None, denied[:0]).admits(rows)]
        if self._broad is not None:
            rows = rows[self._broad[rows]]
        return Scope(Admitted.of_rows(rows.astype(np.int32), len(self.types)), selection, allowed, denied)

    def _filtered(self, filter_: Filter) -> tuple[Selection, Admitted]:
        selection = self.columns.select(filter_)
        with self._lock:
            known = self._by_selection.get(selection)
        if known is not None:
            return selection, known
        if selection.held_as_rows:
            rows = selection.rows()
            rows = rows if self._broad is None else rows[self._broad[rows]]
            searched = Admitted.of_rows(rows, len(self.types))
        else:
            mask = selection.mask()
            searched = Admitted.of_mask(mask if self._broad is None else mask & self._broad)
        with self._lock:
            if selection in self._by_selection:
                return selection, self._by_selection[selection]
            self._by_selection[selection] = searched
        own = (
            0 if self._broad is None else searched.count * 4 if searched.rows is not None else len(self.types)
        )
        selection.count_in(own + len(self.types) // 8)
        return selection, searched
