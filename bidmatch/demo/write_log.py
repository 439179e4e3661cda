"""Writing a simulated log: as a plain click log, or as the search terms report that Google Ads exports."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from bidmatch.base.console import progress
from bidmatch.base.files import atomic_file
from bidmatch.demo.inventory import PRODUCT, Inventory, inventory, mixed
from bidmatch.demo.simulator import LogBlock, simulate

_COLUMNS = (
    "Search term",
    "Match type",
    "Added/Excluded",
    "Campaign",
    "Ad group",
    "Search keyword",
    "Currency code",
    "Clicks",
    "Impr.",
    "CTR",
    "Avg. CPC",
    "Cost",
    "Conversions",
)


class LogSummary(BaseModel):
    """What was written.

    Attributes:
        file: where.
        format: `tsv` or `google-ads`.
        bytes: its size.
        phrases: distinct phrases, each in the file at least once.
        intents: things that people want; a phrase is one way to say one.
        searches: queries drawn; equal ones are counted each time.
        rows: (query, phrase) rows; a pair can be in more than one.
        clicks: sum of the weights.
    """

    file: str
    format: str
    bytes: int = 0
    phrases: int = 0
    intents: int = 0
    searches: int = 0
    rows: int = 0
    clicks: int = 0


def write_click_log(path: Path, n_phrases: int, n_queries: int, seed: int) -> LogSummary:
    """Simulate into `query<TAB>phrase<TAB>clicks` with a header line, UTF-8.

    Raises:
        ConfigError: as `simulate`.
    """
    blocks = simulate(n_phrases, n_queries, seed)
    summary = _summary(path, "tsv", n_phrases, seed)
    with atomic_file(path) as partial, partial.open("wb") as out:
        out.write(b"query\tphrase\tclicks\n")
        for block in _counted(blocks, summary, n_queries):
            _write_strings(out, _lines(block))
    summary.bytes = path.stat().st_size
    return summary


def write_google_ads(path: Path, n_phrases: int, n_queries: int, seed: int) -> LogSummary:
    """Simulate into a search terms report: title and date lines, header, rows, a total line.

    A name that ends in `.csv` gives comma-separated UTF-8 with a byte-order mark, any other UTF-16 with tabs;
    Google Ads exports both. Keywords are in match-type notation; each has one match type.

    Raises:
        ConfigError: as `simulate`.
    """
    blocks = simulate(n_phrases, n_queries, seed)
    stock = inventory(n_phrases, seed)
    summary = _summary(path, "google-ads", n_phrases, seed)
    comma = path.suffix.lower() == ".csv"
    # The codec's own byte-order mark would name this machine's byte order.
    encoding, mark = ("utf-8", b"\xef\xbb\xbf") if comma else ("utf-16-le", b"\xff\xfe")
    totals = np.zeros(3)
    with atomic_file(path) as partial:
        with partial.open("wb") as raw:
            raw.write(mark)
        with partial.open("a", encoding=encoding, newline="") as out:
            table = csv.writer(out, delimiter="," if comma else "\t", lineterminator="\n")
            table.writerow(["Search terms report"])
            table.writerow(["January 1, 2025 - January 31, 2025"])
            table.writerow(_COLUMNS)
            for block in _counted(blocks, summary, n_queries):
                figures = _figures(stock, block)
                totals += figures.sum(axis=0)
                table.writerows(_report_rows(stock, block, figures))
            table.writerow(["Total: Search terms", *[" --"] * 5, "USD", *_money(*totals), " --"])
    summary.bytes = path.stat().st_size
    return summary


def _summary(path: Path, name: str, n_phrases: int, seed: int) -> LogSummary:
    stock = inventory(n_phrases, seed)
    return LogSummary(file=str(path), format=name, phrases=n_phrases, intents=stock.n_intents)


def _counted(blocks: Iterable[LogBlock], summary: LogSummary, n_queries: int) -> Iterator[LogBlock]:
    with progress(f"writing {summary.file}", n_queries, "queries") as step:
        for block in blocks:
            yield block
            summary.searches += block.searches
            summary.rows += len(block.clicks)
            summary.clicks += int(block.clicks.sum())
            step.advance(block.searches)


def _lines(block: LogBlock) -> pa.Array:
    clicks = pa.array(block.clicks).cast(pa.string())
    lines = pc.binary_join_element_wise(block.queries, block.texts, clicks, "\t")
    return pc.binary_join_element_wise(lines, "\n", "")


def _write_strings(out: IO[bytes], strings: pa.Array) -> None:
    """The strings one after another: an Arrow string array's values lie in one buffer."""
    offsets = np.frombuffer(strings.buffers()[1], dtype=np.int32)[strings.offset :]
    out.write(memoryview(strings.buffers()[2])[offsets[0] : offsets[len(strings)]])


def _figures(stock: Inventory, block: LogBlock) -> np.ndarray:
    """Clicks, impressions and cost of each row, float64 (n, 3)."""
    odds = 1 + mixed(stock.seed, block.phrases, 20) % np.uint64(40)
    price = 0.05 + (mixed(stock.seed, block.phrases, 21) % np.uint64(400)).astype(np.float64) / 100
    return np.stack([block.clicks, block.clicks * odds.astype(np.int64), block.clicks * price], axis=1)


def _money(clicks: float, impressions: float, cost: float) -> list[str]:
    return [
        f"{clicks:,.0f}",
        f"{impressions:,.0f}",
        f"{clicks / impressions:.2%}",
        f"{cost / clicks:,.2f}",
        f"{cost:,.2f}",
    ]


def _report_rows(stock: Inventory, block: LogBlock, figures: np.ndarray) -> Iterator[list[str]]:
    notations = (("[%s]", "Exact match (close variant)"), ('"%s"', "Phrase match"), ("%s", "Broad match"))
    kind = np.searchsorted([5, 8], mixed(stock.seed, block.phrases, 22) % np.uint64(10), side="right")
    products = stock.parts(stock.intent_of(block.phrases)[0])[:, PRODUCT]
    words = stock.words
    groups = words.pool.take(pa.array(words.first[words.products[products]])).to_pylist()
    campaigns = [words.category_names[category] for category in words.category[products]]
    for query, text, which, group, campaign, row in zip(
        block.queries.to_pylist(), block.texts.to_pylist(), kind, groups, campaigns, figures, strict=True
    ):
        notation, match = notations[which]
        yield [
            query,
            match,
            "None",
            f"Search | {campaign}",
            group,
            notation % text,
            "USD",
            *_money(*row),
            "--",
        ]


def summary_lines(summary: LogSummary) -> list[str]:
    """The summary, line by line, for a person."""
    return [
        f"wrote {summary.file} ({summary.format}, {summary.bytes:,} bytes)",
        f"{summary.phrases:,} phrases for {summary.intents:,} intents",
        f"{summary.searches:,} queries drawn, {summary.rows:,} rows, {summary.clicks:,} clicks",
    ]
