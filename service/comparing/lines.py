"""A comparison as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from service.comparing.figures import BANDS

if TYPE_CHECKING:
    from service.comparing.examples import Example
    from service.comparing.figures import Figures
    from service.comparing.phrases import PhraseChange
    from service.comparing.records import Comparison

_SHOWN_PHRASES = 3
_BAND_NAMES = ("none", "over 0 to 25 %", "over 25 to 50 %", "over 50 to 75 %", "over 75 %, not all", "all")
_LEAST_WIDTH = 11  # two columns hold the words above them
_Row = tuple[str, Sequence[str]]  # what, and its cells


def lines_of(found: Comparison) -> Iterator[str]:
    """What a person reads of a comparison."""
    names = [
        f"{path} ({'matches' if bundle is None else f'bundle {bundle}'})"
        for path, bundle in ((found.a, found.bundle_a), (found.b, found.bundle_b))
    ]
    yield f"A: {names[0]}"
    yield f"B: {names[1]}"
    least = "" if found.min_score is None else f", of score {found.min_score:g} or more"
    empty = f", {found.empty:,} of them empty" if found.empty else ""
    yield (
        f"{found.rows:,} rows{empty}, {found.queries.queries:,} distinct queries; the {found.k} best matches "
        f"of each{least}; phrases are told by {found.by}"
    )
    if found.skipped:
        yield f"{found.skipped:,} bad lines skipped"
    yield from (f"note: {note}" for note in found.notes)
    yield ""
    yield from _aligned(list(_figures(found)))
    yield from _queries("Most searched queries that B has no match for and A has", found.examples.lost)
    yield from _queries("Most searched queries that A has no match for and B has", found.examples.gained)
    yield from _queries("Queries matched by both whose phrases changed most", found.examples.changed)
    yield from _phrases("Phrases that B answers to more rows than A", found.phrases.gained)
    yield from _phrases("Phrases that A answers to more rows than B", found.phrases.lost)
    if found.output is not None:
        yield ""
        yield f"a row for each query: {found.output}"


def _figures(found: Comparison) -> Iterator[_Row]:
    once, traffic = found.queries, found.traffic
    yield "", ["each query once", "", "each row of the log", ""]
    yield "", ["A", "B", "A", "B"]

    def sides(name: str, shown: Callable[[float | None], str]) -> list[str]:
        return [shown(getattr(part, f"{name}_{side}")) for part in (once, traffic) for side in "ab"]

    def both(shown: Callable[[Figures], str]) -> list[str]:
        return ["", shown(once), "", shown(traffic)]

    yield "with a match", sides("coverage", _percent)
    yield "matches a query", sides("matches", lambda value: f"{value:.2f}")
    if once.relevance_a is not None or once.relevance_b is not None:
        yield "mean relevance of a match", sides("relevance", lambda value: _number(value, "{:.3f}"))
    yield "", []
    yield "queries", both(lambda part: f"{part.queries:,}")
    yield "  matches in A, none in B", both(lambda part: f"{part.lost:,}")
    yield "  matches in B, none in A", both(lambda part: f"{part.gained:,}")
    yield "same first match, where both have one", both(lambda part: _percent(part.same_first))
    yield "A's matches that are also B's, mean", both(lambda part: _percent(part.overlap))
    for band, name in zip(BANDS, _BAND_NAMES, strict=True):
        yield f"  {name}", [cell for part in (once, traffic) for cell in _band(part, band)]
    if once.score_shift is None and once.relevance_shift is None:
        return
    yield "", []
    yield "common pairs, B less A", []
    if once.score_shift is not None:
        yield "  score, mean", both(lambda part: _number(part.score_shift, "{:+.3f}"))
        for name in once.score_shift_quantiles or ():
            shown = _quantile(once, name), _quantile(traffic, name)
            yield f"  {name.removeprefix('p')} % of them at most", ["", shown[0], "", shown[1]]
    if once.relevance_shift is not None:
        yield "  relevance, mean", both(lambda part: _number(part.relevance_shift, "{:+.3f}"))


def _quantile(part: Figures, name: str) -> str:
    return "-" if part.score_shift_quantiles is None else f"{part.score_shift_quantiles[name]:+.3f}"


def _band(part: Figures, band: str) -> list[str]:
    total = sum(part.overlap_bands.values())
    many = part.overlap_bands[band]
    return [f"{many:,}", _percent(100 * many / total if total else None)]


def _aligned(rows: list[_Row]) -> Iterator[str]:
    """Rows with their names to the left and their cells in columns; those of the first row span two."""
    left = max(len(name) for name, _ in rows)
    width = max(_LEAST_WIDTH, 2 + max(len(cell) for _, cells in rows[1:] for cell in cells))
    (_, (once, _, traffic, _)), *others = rows
    yield f"{'':{left}}{once:>{2 * width}}  {traffic:>{2 * width}}"
    for name, cells in others:
        ends = "".join(f"{'  ' if at == 2 else ''}{cell:>{width}}" for at, cell in enumerate(cells))
        yield f"{name:{left}}{ends}".rstrip()


def _queries(title: str, examples: list[Example]) -> Iterator[str]:
    if not examples:
        return
    yield ""
    yield f"{title} (rows, query)"
    width = max(len(f"{one.count:,}") for one in examples)
    for one in examples:
        yield f"{one.count:>{width + 2},}  {one.query}"
        for sign, phrases in (("-", one.lost), ("+", one.gained)):
            if phrases:
                more = len(phrases) - _SHOWN_PHRASES
                shown = " | ".join(phrases[:_SHOWN_PHRASES]) + (f" and {more:,} more" if more > 0 else "")
                yield f"{'':{width + 4}}{sign} {shown}"


def _phrases(title: str, changes: list[PhraseChange]) -> Iterator[str]:
    if not changes:
        return
    yield ""
    yield f"{title} (rows gained, lost, phrase)"
    cells = [(f"{one.gained:+,}" if one.gained else "0", f"{-one.lost:,}", one.phrase) for one in changes]
    gained, lost = (max(len(cell[at]) for cell in cells) for at in range(2))
    for cell in cells:
        yield f"  {cell[0]:>{gained}}  {cell[1]:>{lost}}  {cell[2]}"


def _percent(value: float | None) -> str:
    return _number(value, "{:.1f} %")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
