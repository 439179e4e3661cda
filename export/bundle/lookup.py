"""From texts to phrases: tables of sorted 64-bit hashes that lie in the bundle, mapped by all who serve it.

Three of them: by the phrase's id, by its key (a query that equals it), and by its words for phrases that were
bought for queries which contain them. A hash that agrees is always checked against the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from bidmatch.base import text

MATCH_TYPE = "match_type"
BROAD, PHRASE, EXACT = 0, 1, 2
_MATCH_TYPES = {"phrase": PHRASE, "exact": EXACT}

_CHUNK = 65_536
_WORDS = re.compile(r"\w+")


def words(key: str) -> list[str]:
    """The words of a key (see `bidmatch.base.text.key`): its runs of letters, digits and underscores."""
    return _WORDS.findall(key)


def hash_texts(texts: Iterable[str]) -> np.ndarray:
    """A 64-bit hash of each text, int64, equal on every machine."""
    digests = b"".join(blake2b(one.encode("utf-8", "surrogatepass"), digest_size=8).digest() for one in texts)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


def match_type_code(name: object) -> int:
    """`BROAD`, `PHRASE` or `EXACT`; whatever is not named `phrase` or `exact` is broad."""
    return _MATCH_TYPES.get(text.key(name), BROAD) if isinstance(name, str) else BROAD


def match_type_codes(phrases: pa.Table) -> np.ndarray:
    """How each phrase was bought, uint8 (L,): `BROAD`, `PHRASE` or `EXACT`.

    By the column `match_type`; what is empty or of another name is broad.
    """
    if MATCH_TYPE not in phrases.column_names or not pa.types.is_string(
        _value_type(phrases.schema.field(MATCH_TYPE).type)
    ):
        return np.full(phrases.num_rows, BROAD, np.uint8)
    column = phrases[MATCH_TYPE].cast(pa.string()).combine_chunks()
    encoded = (
        column.dictionary_encode() if isinstance(column, pa.Array) else column.chunk(0).dictionary_encode()
    )
    codes = np.array([match_type_code(name) for name in encoded.dictionary.to_pylist()] + [BROAD], np.uint8)
    return codes[np.asarray(encoded.indices.fill_null(len(encoded.dictionary)))]


def _value_type(kind: pa.DataType) -> pa.DataType:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.string() if pa.types.is_large_string(kind) else kind


def make_table(hashes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64 (2, n): hashes, sorted, and the row of each; of equal hashes the lesser row first."""
    order = np.lexsort((rows, hashes))
    return np.stack([hashes[order], rows[order].astype(np.int64)])


def lookup_tables(phrases: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tables by id, by key, and by the words of phrases of match type `phrase`, int64 (2, n) each."""
    count = phrases.num_rows
    codes = match_type_codes(phrases)
    ids, keys = np.empty(count, np.int64), np.empty(count, np.int64)
    run_hashes, run_rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start in range(0, count, _CHUNK):
        chunk = phrases.slice(start, _CHUNK)
        part = slice(start, start + chunk.num_rows)
        ids[part] = hash_texts(chunk["id"].to_pylist())
        chunk_keys = [text.key(one) for one in chunk["text"].to_pylist()]
        keys[part] = hash_texts(chunk_keys)
        bought = np.flatnonzero(codes[part] == PHRASE)
        runs = [" ".join(words(chunk_keys[at])) for at in bought.tolist()]
        some = np.fromiter(map(bool, runs), bool, len(runs))
        run_hashes.append(hash_texts(run for run in runs if run))
        run_rows.append(start + bought[some])
    rows = np.arange(count)
    return (
        make_table(ids, rows),
        make_table(keys, rows),
        make_table(np.concatenate(run_hashes), np.concatenate(run_rows)),
    )


def candidates(table: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose hash is one of those asked for, which says nothing yet about the texts.

    Args:
        table: see `make_table`.
        hashes: int64 (n,).

    Returns:
        Two int64 arrays of equal length, ordered by the first: the place in `hashes`, the row.
    """
    first = np.searchsorted(table[0], hashes, side="left")
    counts = np.searchsorted(table[0], hashes, side="right") - first
    places = np.repeat(np.arange(len(hashes)), counts)
    if not len(places):
        return places, np.empty(0, np.int64)
    within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places, table[1][np.repeat(first, counts) + within]
