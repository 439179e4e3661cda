"""Search-terms reports of Google Ads, Microsoft Advertising and Amazon Ads: which, and which columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bidmatch.base.errors import InputError
from bidmatch.base.reports import (
    AMAZON,
    ANY_PLATFORM,
    FOREIGN_SEARCH_TERMS,
    GOOGLE,
    HEADER_WITHIN,
    MICROSOFT,
    SEARCH_TERMS,
    YEAR,
    canonical,
)
from trainer.data.columns import Layout, find, find_extras
from trainer.data.options import ReadOptions

_PHRASE = (
    "searchkeyword",
    "keyword",
    "keywordtext",
    "keywordplacement",
    "targeting",
    "targetvalue",
    "matchedtarget",
)
_CLICKS = ("clicks", "interactions")
_IMPRESSIONS = ("impr", "impressions")
_KEYWORD_MATCH = ("searchkeywordmatchtype", "keywordmatchtype", "bidmatchtype", "targetmatchtype")
_TERM_MATCH = ("matchtype", "searchtermmatchtype", "deliveredmatchtype")


@dataclass(frozen=True)
class Report:
    """A recognised search-terms report.

    Attributes:
        platform: name for people.
        layout: columns; `layout.match_type` is the keyword's own match type, where there is such a column.
        term_match: index of the search term's match type (how closely it matched), or None.
        headers: cells of the header line.
        header_line: its line or row number.
        titles: what stands above it.
    """

    platform: str
    layout: Layout
    term_match: int | None
    headers: list[str]
    header_line: int
    titles: list[str] = field(default_factory=list)


def find_report(records: Sequence[tuple[int, list[str]]], options: ReadOptions, file: Path) -> Report | None:
    """Look for a report's header line among the first records of a file; None where it is no report.

    Raises:
        InputError: it is a report, but lacks a column.
    """
    titles: list[str] = []
    widest_above = 1
    for line, cells in records[:HEADER_WITHIN]:
        keys = [canonical(cell) for cell in cells]
        filled = [cell.strip() for cell in cells if cell.strip()]
        if len(filled) > widest_above and _names_query(keys, cells, options):
            platform = _platform(keys, titles)
            return None if platform is None else _report(platform, cells, line, titles, options, file)
        titles.append(" ".join(filled))
        # A date line without quotes falls apart at its commas; a data row is as wide as its header.
        if not YEAR.search(titles[-1]):
            widest_above = max(widest_above, len(filled))
    return None


def _names_query(keys: Sequence[str], cells: Sequence[str], options: ReadOptions) -> bool:
    if options.query_column is not None:
        wanted = canonical(options.query_column)
        return wanted in keys if wanted else options.query_column in cells
    return any(name in keys for name in SEARCH_TERMS)


def _platform(keys: Sequence[str], titles: Sequence[str]) -> str | None:
    """The platform whose marks the header and the lines above it bear most; None: no ads report."""
    present = set(keys)
    above = " ".join(titles).casefold()
    marks = {
        "Google Ads": len(present & GOOGLE)
        + 2 * ("search terms report" in above and "report name" not in above),
        "Microsoft Advertising": len(present & MICROSOFT)
        + 3 * ("report name:" in above or "microsoft" in above),
        "Amazon Ads": len(present & AMAZON),
    }
    best = max(marks, key=lambda name: marks[name])
    if marks[best] > 0:
        return best
    if present & ANY_PLATFORM or any(titles):
        return "Google Ads" if "campaign" in present else "ads platform"
    return None


def _report(
    platform: str, headers: list[str], line: int, titles: list[str], options: ReadOptions, file: Path
) -> Report:
    query = find(headers, options.query_column, SEARCH_TERMS, file)
    phrase = find(headers, options.phrase_column, _PHRASE, file)
    names = _IMPRESSIONS if options.weight == "impressions" else _CLICKS
    weight = find(headers, options.weight_column, names, file)
    if query is None or phrase is None:
        raise _no_keyword_column(platform, headers, line, file)
    if weight is None:
        raise _no_weight_column(platform, headers, line, options, file)
    keyword_match = find(headers, None, _KEYWORD_MATCH, file)
    term_match = find(headers, None, _TERM_MATCH, file)
    if keyword_match is None and platform == "Amazon Ads":
        keyword_match, term_match = term_match, None
    said = {"query": query, "phrase": phrase, "weight": weight, "match_type": keyword_match}
    columns = {role: headers[at].strip() for role, at in said.items() if at is not None}
    extras = find_extras(headers, options, file)
    layout = Layout(len(headers), query, phrase, weight, keyword_match, extras, columns)
    return Report(platform, layout, term_match, headers, line, [title for title in titles if title])


def _no_keyword_column(platform: str, headers: Sequence[str], line: int, file: Path) -> InputError:
    keys = {canonical(header) for header in headers}
    if keys & {"dynamicadtarget", "dynamicadtargetid"}:
        return InputError(
            "this is a dynamic search ads report: its targets are web pages, not keywords",
            file=file,
            line=line,
            hint="Export the search terms report of keyword campaigns instead.",
        )
    steps = {
        "Google Ads": "In Google Ads: Insights and reports > Search terms > Columns > Attributes, tick "
        "Keyword, then download again.",
        "Microsoft Advertising": "In Microsoft Advertising: Reports > Search term report > Columns, add "
        "Keyword and Bid match type, then run it again.",
        "Amazon Ads": "In Amazon Ads: Sponsored ads reports > Create report > Search term, with Targeting.",
    }
    return InputError(
        f"this {platform} search terms report has no Keyword column, so nothing tells which keyword each "
        "search term belongs to",
        file=file,
        line=line,
        hint=steps.get(
            platform, "Export it again with the keyword, or name the column with --phrase-column."
        ),
    )


def _no_weight_column(
    platform: str, headers: Sequence[str], line: int, options: ReadOptions, file: Path
) -> InputError:
    keys = {canonical(header) for header in headers}
    wanted = options.weight.capitalize()
    hint = f"Add the {wanted} column and export the report again."
    if options.weight == "clicks" and keys & set(_IMPRESSIONS):
        hint += " Or weigh pairs by impressions: --weight impressions."
    if options.weight == "impressions" and keys & set(_CLICKS):
        hint += " Or leave --weight impressions out: clicks are there."
    return InputError(
        f"this {platform} search terms report has no {wanted} column", file=file, line=line, hint=hint
    )


def explain(records: Sequence[tuple[int, list[str]]], file: Path) -> InputError | None:
    """The error for what looks like an ads report of another kind or language; None for anything else."""
    for line, cells in records[:HEADER_WITHIN]:
        keys = [canonical(cell) for cell in cells]
        foreign = [cell.strip() for cell, key in zip(cells, keys, strict=True) if key in FOREIGN_SEARCH_TERMS]
        if foreign and len(cells) > 2:
            return InputError(
                f"this looks like a search terms report whose column names are not English ({foreign[0]})",
                file=file,
                line=line,
                hint="Switch the platform's language to English and export again, or name the columns: "
                f'--query-column "{foreign[0]}" --phrase-column ... --weight-column ...',
            )
        if (
            len(cells) > 2
            and not any(name in keys for name in SEARCH_TERMS)
            and any(name in keys for name in _PHRASE)
        ):
            known = set(keys) & (ANY_PLATFORM | GOOGLE | MICROSOFT | AMAZON | {"clicks", "impressions"})
            if len(known) >= 2:
                return InputError(
                    "this is a report on keywords without the search terms that people typed",
                    file=file,
                    line=line,
                    hint="Export the search terms report instead of the keyword or targeting report.",
                )
    return None
