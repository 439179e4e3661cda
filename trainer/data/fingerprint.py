"""A digest of the normalised pairs that no reordering and no change of file format alters."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from bidmatch.base.strings import hash64, key_array, mix64
from trainer.data.dataset import Interactions

MATCH_TYPE = "match_type"
_PAIRS_AT_ONCE = 1 << 21


def fingerprint(phrases: pa.Table, parts: Sequence[Interactions]) -> str:
    """Hex digest of the multiset of (query key, phrase key, match type, float32 weight) over all parts.

    Each pair is hashed to 128 bits and the hashes are added up, so the order of rows and columns, and
    which part holds a pair, do not matter. It tells data sets apart; it is no defence against forgery.
    """
    phrase_hash = mix64(hash64(key_array(phrases["text"].combine_chunks())))
    if MATCH_TYPE in phrases.column_names:
        match_types = phrases[MATCH_TYPE].combine_chunks().dictionary_encode()
        names = hash64(match_types.dictionary.cast(pa.large_string()))
        names[np.array([name == "" for name in match_types.dictionary.to_pylist()], dtype=bool)] = 0
        phrase_hash ^= names[match_types.indices.to_numpy()]
    count, sums = 0, [0, 0]
    for part in parts:
        pairs, query_hash = part.clicks.tocoo(), hash64(part.queries)
        count += pairs.nnz
        for start in range(0, pairs.nnz, _PAIRS_AT_ONCE):
            block = slice(start, start + _PAIRS_AT_ONCE)
            weights = np.ascontiguousarray(pairs.data[block], dtype=np.float32)
            weights = weights.view(np.uint32).astype(np.uint64)
            queries = query_hash[pairs.row[block]]
            first = mix64(queries ^ mix64(mix64(phrase_hash[pairs.col[block]]) ^ weights))
            second = mix64(first ^ mix64(queries))
            with np.errstate(over="ignore"):
                sums[0] = (sums[0] + int(first.sum(dtype=np.uint64))) & (2**64 - 1)
                sums[1] = (sums[1] + int(second.sum(dtype=np.uint64))) & (2**64 - 1)
    return blake2b(struct.pack("<QQQ", count, *sums), digest_size=16).hexdigest()
