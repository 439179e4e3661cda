"""Which column plays which role, by the user's option or by the names that logs use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bidmatch.base.errors import InputError
from bidmatch.base.reports import canonical
from trainer.data.options import ReadOptions

QUERY = ("query", "searchquery", "searchterm", "userquery", "customersearchterm", "q", "querytext", "search")
PHRASE = ("phrase", "bidphrase", "keyword", "bidkeyword", "keywordtext", "bidterm", "phrasetext", "label")
CLICKS = ("weight", "clicks", "click", "clickcount", "count", "n", "freq", "frequency")
IMPRESSIONS = ("impressions", "impression", "impr", "impressioncount", "views")
MATCH_TYPES = ("matchtype", "keywordmatchtype", "bidmatchtype")


def is_log_header(cells: Sequence[str]) -> bool:
    """Whether a line's cells name a query and a phrase as click logs do."""
    keys = [canonical(cell) for cell in cells]
    return any(name in QUERY for name in keys) and any(name in PHRASE for name in keys)


@dataclass(frozen=True)
class Layout:
    """Where in a row things are.

    Attributes:
        width: cells a row must have.
        query: index of the query cell.
        phrase: index of the phrase cell.
        weight: index of the weight cell, or None where each row counts one.
        match_type: index of the match-type cell, or None.
        extras: name -> index of the phrase columns to keep.
        names: role -> header, for the report.
    """

    width: int
    query: int
    phrase: int
    weight: int | None = None
    match_type: int | None = None
    extras: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def find(headers: Sequence[str], wanted: str | None, names: Sequence[str], file: Path) -> int | None:
    """Index of a column: the one the user named (by header or 1-based position), else the first known name.

    Raises:
        InputError: the named column is missing, or two columns bear the name.
    """
    keys = [canonical(header) for header in headers]
    if wanted is None:
        for name in names:
            if keys.count(name) > 1:
                raise InputError(
                    f"two columns are named {headers[keys.index(name)]!r}",
                    file=file,
                    hint="Rename one of them, or say which to use by position, such as --query-column 2.",
                )
            if name in keys:
                return keys.index(name)
        return None
    exact = [at for at, header in enumerate(headers) if header.strip() == wanted.strip()]
    exact = exact or [at for at, key in enumerate(keys) if key == canonical(wanted) and key]
    if len(exact) > 1:
        raise InputError(
            f"two columns are named {wanted!r}", file=file, hint="Name the column by position, such as 2."
        )
    if exact:
        return exact[0]
    if wanted.isdecimal() and 1 <= int(wanted) <= len(headers):
        return int(wanted) - 1
    raise InputError(
        f"there is no column {wanted!r}",
        file=file,
        hint="The columns are: " + ", ".join(header.strip() or "(no name)" for header in headers) + ".",
    )


def weight_names(options: ReadOptions) -> tuple[str, ...]:
    """Known headers of the weight, best first."""
    return IMPRESSIONS if options.weight == "impressions" else CLICKS


def find_extras(headers: Sequence[str], options: ReadOptions, file: Path) -> dict[str, int]:
    """Indices of the phrase columns asked for.

    Raises:
        InputError: one is missing.
    """
    found = {name: find(headers, name, (), file) for name in options.phrase_columns}
    return {name: at for name, at in found.items() if at is not None}


def log_layout(headers: Sequence[str], options: ReadOptions, file: Path) -> Layout | None:
    """The layout of a click log with these headers; None where they name no query or no phrase.

    Raises:
        InputError: a column the user named is missing, or a name is ambiguous.
    """
    query = find(headers, options.query_column, QUERY, file)
    phrase = find(headers, options.phrase_column, PHRASE, file)
    if query is None or phrase is None:
        return None
    if query == phrase:
        raise InputError(f"column {headers[query]!r} is used for both query and phrase", file=file)
    weight = find(headers, options.weight_column, weight_names(options), file)
    if weight is None and options.weight == "impressions":
        raise InputError(
            "there is no impressions column",
            file=file,
            hint="Name it with --weight-column, or leave --weight impressions out.",
        )
    match_type = find(headers, None, MATCH_TYPES, file)
    roles = {"query": query, "phrase": phrase, "weight": weight, "match_type": match_type}
    names = {role: headers[at].strip() for role, at in roles.items() if at is not None}
    extras = find_extras(headers, options, file)
    return Layout(len(headers), query, phrase, weight, match_type, extras, names)


def positional_layout(width: int, options: ReadOptions, file: Path) -> Layout:
    """The layout of a log without a header line: query, phrase and, in a third column, the weight."""
    headers = [str(position + 1) for position in range(width)]
    query = find(headers, options.query_column, (), file) if options.query_column else 0
    phrase = find(headers, options.phrase_column, (), file) if options.phrase_column else 1
    weight = find(headers, options.weight_column, (), file) if options.weight_column else None
    if weight is None and width == 3 and not options.weight_column:
        weight = 2
    assert query is not None and phrase is not None  # noqa: PT018
    names = {"query": f"column {query + 1}", "phrase": f"column {phrase + 1}"}
    if weight is not None:
        names["weight"] = f"column {weight + 1}"
    return Layout(width, query, phrase, weight, None, {}, names)
