"""What ads platforms' search terms reports look like: their headers, and their rows that are no data."""

from __future__ import annotations

import re

from bidmatch.base import text

HEADER_WITHIN = 40
"""Records of a file among which a report's header line is looked for."""

SEARCH_TERMS = ("customersearchterm", "searchterm", "searchquery", "searchterms")
"""How reports name the column of what people typed."""

GOOGLE = frozenset({"addedexcluded", "impr", "searchkeyword", "searchkeywordmatchtype", "currencycode"})
MICROSOFT = frozenset(
    {"deliveredmatchtype", "bidmatchtype", "accountname", "accountnumber", "qualityimpact", "searchquery"}
)
AMAZON = frozenset(
    {"customersearchterm", "targeting", "portfolioname", "matchedtarget", "clickthrurate", "adproduct"}
)
ANY_PLATFORM = frozenset(
    {"campaign", "campaignname", "adgroup", "adgroupname", "cost", "spend", "ctr", "avgcpc", "matchtype"}
)

# A date line above a header, which falls apart at its commas where it has no quotes.
YEAR = re.compile(r"\b(19|20)\d\d\b")
TOTAL = re.compile(r"(grand )?total(s)?\s*(:|$|\b[-–—])", re.IGNORECASE)
COPYRIGHT = re.compile(r"(©|\(c\)|copyright\b)", re.IGNORECASE)

EMPTY = frozenset({"", "-", "--", "—", "–", " --", "n/a", "na", "null", "none"})

_NOT_A_WORD = re.compile(r"[\W_]+")
_WRAPPED = re.compile(r'="(.*)"', re.DOTALL)
_ASIN = re.compile(r"b0[0-9a-z]{8}", re.IGNORECASE)


def canonical(header: str) -> str:
    """A header reduced to its letters and digits, case folded: `Search term`, `SearchTerm`, `search_term`."""
    return _NOT_A_WORD.sub("", text.key(header))


FOREIGN_SEARCH_TERMS = frozenset(
    canonical(words)
    for words in """
        Suchbegriff|Suchanfrage|Kundensuchbegriff|Suchbegriff eines Kunden|Terme de recherche
        Termes de recherche|Requête de recherche|Término de búsqueda|Términos de búsqueda
        Término de búsqueda de cliente|Termine di ricerca|Termini di ricerca|Termo de pesquisa
        Termos de pesquisa|Zoekterm|Zoektermen|検索語句|検索クエリ|カスタマーの検索キーワード|搜索字词|搜索词
        客户搜索词|Поисковый запрос|Поисковые запросы|Wyszukiwane hasło|Sökterm|Søketerm|Søgeterm|Arama terimi
    """.replace("\n", "|").split("|")
    if words.strip()
)
"""The same column in other languages than English."""


def unwrap(cell: str) -> str:
    """A cell without the `="..."` that keeps a spreadsheet from reading it as a number or formula."""
    cell = cell.strip()
    wrapped = _WRAPPED.fullmatch(cell)
    if wrapped is not None:
        return wrapped[1].replace('""', '"')
    return cell[1:] if len(cell) > 1 and cell[0] == "'" and cell[1] in "+=@-" else cell


def is_empty(cell: str) -> bool:
    """Whether a cell stands for nothing, such as `--`."""
    return cell.strip().casefold() in EMPTY


def is_asin(query: str) -> bool:
    """Whether it is a product's number at Amazon."""
    return _ASIN.fullmatch(query) is not None


def hidden_query_reason(query: str) -> str | None:
    """Why a report row's search term is nothing a person typed, or None."""
    if is_asin(query):
        return "search term is a product (ASIN), not typed text"
    folded = query.casefold().strip(" ()*")
    if folded in ("other search terms", "other", "not set", "") and (
        query[:1] in "(*" or folded == "other search terms"
    ):
        return "search term is hidden by the platform"
    return None
