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


def hash64(texts: pa.Array) -> np.ndarray:
    """BLAKE2b of each string's UTF-8 bytes, cut to 64 bits: uint64, equal on every machine."""
    digests = b"".join(blake2b(value.encode(), digest_size=8).digest() for value in texts.to_pylist())
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def mix64(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 on uint64 values: a bijection that spreads every input bit."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
