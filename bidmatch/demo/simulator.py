"""A simulated ads click log, streamed: any number of phrases and queries in the memory of one block.

No click log of sponsored search is public (queries are private and bids are trade secrets), so this one is
made up. It has what makes the real task hard: queries that share no word with the phrase they mean (synonyms
nobody bids on, model names that stand for a brand's product), misspellings, clicks that are wrong, broad
phrases that collect the clicks of narrower queries, a Zipf tail of phrases with one or two clicks. It is no
evidence about real traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bidmatch.base.errors import ConfigError
from bidmatch.demo.inventory import (
    BACK,
    BRAND,
    BRAND_WORD,
    FRONT,
    N_PARTS,
    ORDERS,
    PRODUCT,
    PRODUCT_WORD,
    PURPOSE,
    VALUES,
    Inventory,
    inventory,
)
from bidmatch.demo.vocabulary import TYPOS

ZIPF = 0.9
_QUERIES_PER_BLOCK = 1 << 15
_INTENTS_PER_CHUNK = 1 << 16


@dataclass(frozen=True)
class Habits:
    """How the people of the simulated log search and click: probabilities.

    Attributes:
        leave_out_brand: of a query that leaves out the brand it means.
        leave_out_value: of each attribute value that a query leaves out.
        model_name: of a query that names the brand's model instead of the product.
        keep_brand: of a query with a model name that names the brand too.
        front: of words such as "cheap" in front of a query.
        back: of words such as "near me" behind it.
        misspelling: of a query with a misspelt word.
        second_click: of a query that leads to one more phrase of its intent.
        broad_click: of a query that leads to a phrase of the same intent less one part.
        wrong_click: of a query that leads to a phrase that has nothing to do with it.
    """

    leave_out_brand: float = 0.1
    leave_out_value: float = 0.12
    model_name: float = 0.3
    keep_brand: float = 0.5
    front: float = 0.15
    back: float = 0.12
    misspelling: float = 0.12
    second_click: float = 0.5
    broad_click: float = 0.3
    wrong_click: float = 0.05


@dataclass(frozen=True)
class LogBlock:
    """Some rows of the log: one search term and one phrase that was clicked for it, with the clicks.

    Attributes:
        queries: Arrow string array, (n,); the same query can be in several rows and blocks.
        texts: Arrow string array, (n,): text of the phrase.
        phrases: int64 (n,): number of the phrase.
        clicks: int64 (n,), at least 1.
        searches: queries drawn for this block.
    """

    queries: pa.Array
    texts: pa.Array
    phrases: np.ndarray
    clicks: np.ndarray
    searches: int


def simulate(n_phrases: int, n_queries: int, seed: int, habits: Habits | None = None) -> Iterator[LogBlock]:
    """The log, block by block; the same arguments give the same log.

    Args:
        n_phrases: distinct phrases; every one of them is clicked at least once.
        n_queries: queries drawn. Popular intents are searched for often and two draws can give the same
            text, so a log has somewhat fewer distinct queries. At least one for each intent: a quarter of
            the phrases.
        seed: of everything random.
        habits: how people search and click.

    Raises:
        ConfigError: too many phrases for the word lists, or too few queries for the phrases.
    """
    stock = inventory(n_phrases, seed)
    if n_queries < stock.n_intents:
        raise ConfigError(
            f"{n_queries:,} queries cannot reach all of {n_phrases:,} phrases",
            hint=f"Ask for at least {stock.n_intents:,} queries, or fewer phrases.",
        )
    return _blocks(stock, n_queries, habits or Habits())


def _blocks(stock: Inventory, n_queries: int, habits: Habits) -> Iterator[LogBlock]:
    for number, (intents, counts, firsts) in enumerate(_searches(stock, n_queries)):
        yield _block(stock, intents, counts, firsts, habits, np.random.default_rng([stock.seed, 1, number]))


def _searches(stock: Inventory, n_queries: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks of (intents, queries of each, whether these are the intent's first); n_queries queries in all.

    Every intent has one query, and its share of the rest: Zipf within its shape, and each part that an intent
    has beside the product makes it half as popular.
    """
    extra = n_queries - stock.n_intents
    drawn, cumulative = 0, 0.0
    sizes = np.diff(stock.start)
    masses = sizes * 0.5 ** stock.has.sum(axis=1)
    masses *= extra / masses.sum()
    for shape in np.flatnonzero(sizes):
        total = sum(
            _zipf(lo, min(lo + _INTENTS_PER_CHUNK, sizes[shape])).sum() for lo in _chunks(sizes[shape])
        )
        for lo in _chunks(sizes[shape]):
            hi = min(lo + _INTENTS_PER_CHUNK, sizes[shape])
            edges = cumulative + np.cumsum(_zipf(lo, hi)) * (masses[shape] / total)
            cumulative = float(edges[-1])
            # Rounding the running total, not each count, keeps the sum exact.
            upto = np.minimum(np.rint(edges).astype(np.int64), extra)
            if stock.start[shape] + hi == stock.n_intents:
                upto[-1] = extra
            counts = 1 + np.diff(upto, prepend=drawn)
            drawn = int(upto[-1])
            yield from _pack(stock.start[shape] + np.arange(lo, hi), counts)


def _chunks(n: int) -> range:
    return range(0, int(n), _INTENTS_PER_CHUNK)


def _zipf(lo: int, hi: int) -> np.ndarray:
    return np.arange(lo + 1, hi + 1, dtype=np.float64) ** -ZIPF


def _pack(intents: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Cut into blocks of at most _QUERIES_PER_BLOCK queries, an intent with more than that into several."""
    pieces = -(-counts // _QUERIES_PER_BLOCK)
    owner = np.repeat(np.arange(len(intents)), pieces)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    size = np.minimum(counts[owner] - nth * _QUERIES_PER_BLOCK, _QUERIES_PER_BLOCK)
    ends = np.cumsum(size)
    lo = 0
    while lo < len(owner):
        before = ends[lo - 1] if lo else 0
        hi = max(int(np.searchsorted(ends, before + _QUERIES_PER_BLOCK, side="right")), lo + 1)
        yield intents[owner[lo:hi]], size[lo:hi], nth[lo:hi] == 0
        lo = hi


def _block(
    stock: Inventory,
    intents: np.ndarray,
    counts: np.ndarray,
    firsts: np.ndarray,
    habits: Habits,
    rng: np.random.Generator,
) -> LogBlock:
    n = int(counts.sum())
    intent = np.repeat(intents, counts)
    parts = stock.parts(intent)
    query, phrase, weight = (
        np.concatenate(column)
        for column in zip(
            _first_clicks(stock, intents[firsts], (np.cumsum(counts) - counts)[firsts], counts[firsts], rng),
            _right_clicks(stock, intent, habits.second_click, rng),
            _broad_clicks(stock, parts, habits.broad_click, rng),
            _wrong_clicks(stock, n, habits.wrong_click, rng),
            strict=True,
        )
    )
    pairs, place = np.unique(query * stock.n_phrases + phrase, return_inverse=True)
    clicks = np.bincount(place, weight).astype(np.int64)
    shuffled = rng.permutation(len(pairs))
    query, phrase = np.divmod(pairs[shuffled], stock.n_phrases)
    distinct, which = np.unique(phrase, return_inverse=True)
    return LogBlock(
        queries=_query_texts(stock, parts, habits, rng).take(pa.array(query)),
        texts=stock.phrase_texts(distinct).take(pa.array(which)),
        phrases=phrase,
        clicks=clicks[shuffled],
        searches=n,
    )


Clicks = tuple[np.ndarray, np.ndarray, np.ndarray]


def _first_clicks(
    stock: Inventory, intents: np.ndarray, query: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> Clicks:
    """Each phrase of each intent once, over the intent's queries in turn: no phrase is without a click."""
    first, n = stock.phrases_of(intents)
    owner = np.repeat(np.arange(len(intents)), n)
    which = np.arange(len(owner)) - np.repeat(np.cumsum(n) - n, n)
    return query[owner] + which % counts[owner], first[owner] + which, rng.geometric(0.5, len(owner))


def _right_clicks(stock: Inventory, intent: np.ndarray, second: float, rng: np.random.Generator) -> Clicks:
    """One or two phrases of each query's intent, its first phrases more often than its last."""
    first, n = stock.phrases_of(intent)
    query = np.concatenate([np.arange(len(intent)), np.flatnonzero(rng.random(len(intent)) < second)])
    which = (n[query] * rng.random(len(query)) ** 2.5).astype(np.int64)
    return query, first[query] + which, rng.geometric(0.4, len(query))


def _broad_clicks(stock: Inventory, parts: np.ndarray, share: float, rng: np.random.Generator) -> Clicks:
    """Phrases of the intent that lacks one of the query's parts."""
    optional = parts >= 0
    optional[:, PRODUCT] = False
    query = np.flatnonzero(optional.any(axis=1) & (rng.random(len(parts)) < share))
    drop = _one_of(optional[query], rng)
    broader = parts[query]
    broader[np.arange(len(query)), drop] = -1
    intent = stock.find(broader)
    query, intent = query[intent >= 0], intent[intent >= 0]
    first, n = stock.phrases_of(intent)
    return query, first + (n * rng.random(len(query)) ** 2.5).astype(np.int64), rng.geometric(0.6, len(query))


def _wrong_clicks(stock: Inventory, n: int, share: float, rng: np.random.Generator) -> Clicks:
    query = np.flatnonzero(rng.random(n) < share)
    return query, rng.integers(0, stock.n_phrases, len(query)), np.ones(len(query), dtype=np.int64)


def _one_of(allowed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random true column of each row of a bool matrix."""
    return np.argmax(allowed * (1.0 - rng.random(allowed.shape)), axis=1)


def _query_texts(stock: Inventory, parts: np.ndarray, habits: Habits, rng: np.random.Generator) -> pa.Array:
    """What a person types who means each row of parts."""
    words, n = stock.words, len(parts)
    said = parts.copy()
    has_brand = parts[:, BRAND] >= 0
    said[rng.random(n) < habits.leave_out_brand, BRAND] = -1
    said[:, VALUES][rng.random((n, VALUES.stop - VALUES.start)) < habits.leave_out_value] = -1
    # A purpose changes what is wanted, so it is always said.
    said[:, PURPOSE] = parts[:, PURPOSE]
    choice = rng.integers(0, 1 << 30, (n, N_PARTS)).astype(np.uint64)
    ids = stock.words_of(said, choice, words.names)

    by_model = has_brand & (rng.random(n) < habits.model_name)
    model = words.first[words.models[parts[:, PRODUCT], parts[:, BRAND]]]
    ids[:, PRODUCT_WORD] = np.where(by_model, model, ids[:, PRODUCT_WORD])
    ids[by_model & (rng.random(n) >= habits.keep_brand), BRAND_WORD] = -1

    for column, concepts, share in ((FRONT, words.front, habits.front), (BACK, words.back, habits.back)):
        rows = np.flatnonzero(rng.random(n) < share)
        concept = rng.choice(concepts, len(rows))
        ids[rows, column] = words.first[concept] + (words.names[concept] * rng.random(len(rows))).astype(
            np.int32
        )

    rows = np.flatnonzero(rng.random(n) < habits.misspelling)
    wrong = _one_of(ids[rows] >= 0, rng)
    ids[rows, wrong] = words.typos[ids[rows, wrong], rng.integers(0, TYPOS, len(rows))]
    order = rng.choice(len(ORDERS), n, p=[0.55, 0.15, 0.2, 0.1])
    return stock.texts(ids, order)
