"""Selections are kept within their bytes, and what is not kept is gone at once."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pyarrow as pa

from service.options import MatchOptions
from service.phrase_keys import PhraseIds
from service.rules.filters import parse_filter
from service.rules.selection import Selection, SelectionCache
from service.scope import Scopes

SCHEMA = pa.schema([("rank", pa.int64())])


def test_what_makes_room_is_gone_without_the_collector() -> None:
    cache = SelectionCache(50_000)
    gc.disable()
    try:
        alive = []
        for at in range(20):
            selection = Selection(10_000, mask=np.ones(10_000, bool))
            cache.put(parse_filter({"rank": at}, SCHEMA), selection)
            alive.append(weakref.ref(selection))
            del selection
        held = [one for one in alive if one() is not None]
        assert len(held) == len(cache) == 4
        del cache
        assert [one for one in alive if one() is not None] == []
    finally:
        gc.enable()


def test_what_is_derived_counts_and_goes_along() -> None:
    count = 100_000
    phrases = pa.table(
        {
            "rank": np.arange(count),
            "match_type": pa.array(["broad", "exact"]).take(pa.array(np.arange(count) % 2)),
        }
    )
    ids = PhraseIds(np.zeros((2, 0), np.int64), pa.chunked_array([pa.array([], pa.large_string())]))
    scopes = Scopes(phrases, ids, honour_match_types=True)
    cache = scopes.columns._cache
    cache.limit = 2_000_000
    for at in range(40):
        filter_ = parse_filter({"rank": {"gte": at}}, scopes.columns.schema)
        scope = scopes.of(MatchOptions(5, filter=filter_))
        assert scope.searched is not None
        assert scope.searched.count == (count - at) // 2
        # Mask of what is allowed, mask of what search may return, and its bits.
        assert cache.nbytes <= cache.limit
        assert len(scopes._by_selection) <= 1 + cache.limit // (2 * count)
    assert len(cache) >= 5
