"""Normalisation and hashing of whole Arrow columns: `bidmatch.base.text`, and one 64-bit hash a string."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base import text

_PRINTABLE_ASCII = r"^[\x20-\x7e]*$"


def _printable_ascii_spaces(texts: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring(texts, pattern="  ")).as_py():
        texts = pc.replace_substring_regex(texts, pattern=" +", replacement=" ")
    return pc.ascii_trim(texts, characters=" ")


def _map(texts: pa.Array, fast: Callable[[pa.Array], pa.Array], exact: Callable[[str], str]) -> pa.Array:
    texts = texts.cast(pa.large_string())
    plain = pc.match_substring_regex(texts, pattern=_PRINTABLE_ASCII)
    if pc.all(plain).as_py() is not False:
        return fast(texts)
    other = pc.invert(plain)
    rest = pa.array([exact(value) for value in texts.filter(other).to_pylist()], pa.large_string())
    return pc.replace_with_mask(fast(texts), other, rest)


def normalise_array(texts: pa.Array) -> pa.Array:
    """`text.normalise` of each string (no nulls), as `large_string`; printable ASCII never enters Python."""
    return _map(texts, _printable_ascii_spaces, text.normalise)


def key_array(texts: pa.Array) -> pa.Array:
    """`text.key` of each string (no nulls), as `large_string`."""
    return _map(texts, lambda plain: pc.ascii_lower(_printable_ascii_spaces(plain)), text.key)


def mix64(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 on uint64 values: a bijection that spreads every input bit."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_TABLE_BYTES = 256
_SLICE = 1 << 18
# One random 64-bit value for each (position, byte) of a string of up to 256 bytes.
_TABLE = mix64(mix64(np.arange(_TABLE_BYTES * 256, dtype=np.uint64)) ^ np.uint64(0xB1D3A7C4))


def hash64(texts: pa.Array) -> np.ndarray:
    """A 64-bit hash of each string's UTF-8 bytes (no nulls): uint64 (n,), equal on every machine.

    Zobrist hashing: the sum of one random value for each (position, byte), and the length, mixed; strings
    over 256 bytes take BLAKE2b. Not for defence against chosen texts.
    """
    texts = texts.cast(pa.large_string())
    hashes = np.empty(len(texts), dtype=np.uint64)
    for start in range(0, len(texts), _SLICE):
        part = texts.slice(start, _SLICE)
        hashes[start : start + len(part)] = _hash_slice(part)
    return hashes


def _hash_slice(texts: pa.Array) -> np.ndarray:
    _, offset_buffer, data = texts.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    lengths = np.diff(offsets)
    size = int(offsets[-1] - offsets[0])
    octets = (
        np.frombuffer(data, dtype=np.uint8, count=size, offset=int(offsets[0]))
        if size
        else np.empty(0, np.uint8)
    )
    position = np.arange(size) - np.repeat(offsets[:-1] - offsets[0], lengths)
    values = _TABLE[np.minimum(position, _TABLE_BYTES - 1) * 256 + octets]
    sums = np.r_[np.uint64(0), np.cumsum(values, dtype=np.uint64)]
    ends = offsets - offsets[0]
    with np.errstate(over="ignore"):
        hashes = mix64(sums[ends[1:]] - sums[ends[:-1]] + lengths.astype(np.uint64))
    for row in np.flatnonzero(lengths > _TABLE_BYTES):
        digest = blake2b(texts[int(row)].as_py().encode(), digest_size=8).digest()
        hashes[row] = np.frombuffer(digest, dtype="<u8")[0]
    return hashes
