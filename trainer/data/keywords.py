"""Keywords as ads platforms write them: match-type notation, and targets that are no keyword."""

from __future__ import annotations

import re
from functools import lru_cache

from bidmatch.base.reports import is_asin, is_empty
from bidmatch.base.text import key

KEYWORD_TYPES = ("exact", "phrase", "broad")

_EXACT = re.compile(r"\[(.*)\]", re.DOTALL)
_PHRASE = re.compile(r'["“”](.*)["“”]', re.DOTALL)
_PLUS = re.compile(r"(?<!\S)\+(?=\S)")
_IN_BRACKETS = re.compile(r"\(.*?\)")

_MATCH = (" match", "_match", "-match")

_KEYWORDLESS = (
    ("performance max", "Performance Max"),
    ("dynamic", "dynamic search ads"),
    ("ai max", "AI Max"),
)
_AUTOMATIC = frozenset({"*", "closematch", "loosematch", "substitutes", "complements"})
_PRODUCT = re.compile(r"\s*(asin|asin-expanded|product|similar-product)\s*=", re.IGNORECASE)
_CATEGORY = re.compile(
    r"\s*(category|brand|price|review|age-range|genre|prime-shipping)\s*[=<>]", re.IGNORECASE
)
_THEME = re.compile(r"\s*(keyword-group\s*=|keywords-related-to-|landing-page-related)", re.IGNORECASE)
_WEB_PAGE = re.compile(
    r"\s*(url|page[ _]title|page[ _]content|category|custom[ _]label)\s*(==|contains|equals)", re.I
)


@lru_cache(maxsize=1 << 16)
def split_notation(keyword: str) -> tuple[str, str]:
    """(text, match type) of `[exact]`, `"phrase"`, `+broad +modified`; the match type of a bare one is "".

    Modified broad is `broad`, as the platforms' own match-type columns have it.
    """
    for notation, match_type in ((_EXACT, "exact"), (_PHRASE, "phrase")):
        inside = notation.fullmatch(keyword)
        if inside is not None:
            return inside[1].strip(), match_type
    bare = _PLUS.sub("", keyword)
    return bare, "" if bare == keyword else "broad"


@lru_cache(maxsize=1 << 12)
def match_type_name(cell: str) -> str:
    """A match-type cell in one spelling: `Phrase match (close variant)` is `phrase`; empty cells are ""."""
    if is_empty(cell):
        return ""
    name = key(_IN_BRACKETS.sub(" ", key(cell)))
    while name.endswith(_MATCH):
        name = name.removesuffix("match").strip(" _-")
    return "" if is_empty(name) else name


@lru_cache(maxsize=1 << 16)
def no_keyword_reason(target: str, match_type: str) -> str | None:
    """Why a report row's target is no bid phrase, or None where it is one.

    Args:
        target: the keyword or targeting cell.
        match_type: its match type in one spelling.
    """
    if is_empty(target):
        for sign, name in _KEYWORDLESS:
            if sign in match_type:
                return f"target is no keyword: {name}"
        return "target is no keyword: empty (dynamic search ads, Performance Max or shopping)"
    is_keyword = match_type in KEYWORD_TYPES
    squeezed = re.sub(r"[\s_-]+", "", target).casefold()
    if squeezed in _AUTOMATIC or match_type == "targeting_expression_predefined":
        return "target is no keyword: automatic targeting"
    if _PRODUCT.match(target) or (is_asin(target.strip()) and not is_keyword):
        return "target is no keyword: product (ASIN)"
    if _WEB_PAGE.match(target):
        return "target is no keyword: web page (dynamic search ads)"
    if _CATEGORY.match(target):
        return "target is no keyword: product category"
    if _THEME.match(target) or match_type == "theme":
        return "target is no keyword: theme"
    if match_type == "targeting_expression":
        return "target is no keyword: product target"
    return None
