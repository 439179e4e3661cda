"""Numbers as people and spreadsheets write them."""

from __future__ import annotations

import re

_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_GROUPED = re.compile(r"([+-]?\d{1,3})(?:([,.'’ ])\d{3})(?:\2\d{3})*([.,]\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_SPACES = re.compile(r"[\s\u00a0\u202f\u2009]+")


def parse_number(text: str, *, whole: bool) -> float | None:
    """The number a cell holds, or None where it holds none.

    Thousands may be set off by comma, dot, apostrophe or (thin, no-break) space in groups of three; the
    decimal mark is then the other of comma and dot. `1.234` and `1,234` alone are ambiguous: with `whole`
    (a count, as in an ads report) both are 1234; otherwise the first is a fraction and the second 1234.

    Args:
        text: the cell.
        whole: whether the column holds counts.
    """
    text = _SPACES.sub(" ", text).strip()
    grouped = _GROUPED.fullmatch(text)
    if grouped is not None:
        mark, fraction = grouped[2], grouped[3] or ""
        single_dot = mark == "." and text.count(".") == 1 and not fraction
        if not (fraction and fraction[0] == mark) and not (single_dot and not whole):
            digits = text[: len(text) - len(fraction)].replace(mark, "")
            return float(digits + fraction.replace(",", "."))
    if _PLAIN.fullmatch(text):
        return float(text)
    if _DECIMAL_COMMA.fullmatch(text):
        return float(text.replace(",", "."))
    return None
