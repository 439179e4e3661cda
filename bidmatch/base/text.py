"""The one normalisation of query and phrase text, used alike in training, export and serving."""

from __future__ import annotations

import re
import unicodedata

_SPACES = re.compile(r"\s+")
# C0/C1 controls, zero-width marks and the byte-order mark split or hide words in real logs.
_INVISIBLE = re.compile("[\u0000-\u0008\u000e-\u001f\u007f-\u009f\u200b\u200e\u200f\u2060\ufeff]+")
_SURROGATES = re.compile("[\ud800-\udfff]")


def normalise(text: str) -> str:
    """Text for display: NFKC, invisible characters removed, white space collapsed, ends stripped.

    Lone surrogates, which UTF-8 cannot carry, become U+FFFD. Idempotent.
    """
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _SURROGATES.sub("\ufffd", text))
    if not text.isprintable():
        text = _INVISIBLE.sub(" ", text)
    return _SPACES.sub(" ", text).strip()


def key(text: str) -> str:
    """The identity of a query or phrase: `normalise`, then case folded. Idempotent.

    Two texts with the same key are the same query (or phrase) everywhere in the product; the encoder
    reads the key, answers carry the original phrase text.
    """
    text = normalise(text)
    if text.isascii():
        return text.lower()
    # Folding can leave the composed form ("ẞ", "ΐ"), so compose again.
    return unicodedata.normalize("NFKC", text.casefold())
