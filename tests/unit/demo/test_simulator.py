"""The simulated log: its words, that it is complete, reproducible, bounded, neither trivial nor hopeless."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest

from bidmatch.base.errors import ConfigError
from bidmatch.base.text import key
from bidmatch.demo.inventory import PHRASES_OF_INTENT, inventory
from bidmatch.demo.simulator import LogBlock, simulate
from bidmatch.demo.vocabulary import misspell, split_names, vocabulary, word_lists

SOME_SIZES = [1, 2, 3, 31, 32, 33, 1000, 6000]


def all_blocks(n_phrases: int, n_queries: int, seed: int = 0) -> list[LogBlock]:
    return list(simulate(n_phrases, n_queries, seed))


def test_no_name_stands_for_two_concepts_and_none_is_made_of_others():
    lists = word_lists()
    around = [*lists.purposes, *lists.front, *lists.back]
    for category in lists.categories.values():
        values = [value for group in category.groups for value in lists.groups[group]]
        entries = [*category.products, *category.brands, *values, *around]
        names = [name for entry in entries for part in split_names(entry) for name in part]
        assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1]
        assert all(name == key(name) for name in names)
        joined = {f"{a} {b}" for a, b in itertools.permutations(names, 2)}
        assert not joined & set(names)
    everywhere = [
        n for c in lists.categories.values() for p in c.products for part in split_names(p) for n in part
    ]
    assert len(set(everywhere)) == len(everywhere)


def test_every_product_has_two_names_for_its_eight_phrases():
    assert all(len(split_names(p)[0]) >= 2 for c in word_lists().categories.values() for p in c.products)
    words = vocabulary()
    assert PHRASES_OF_INTENT.max() <= 6 * words.bid_names[words.products].min()


@pytest.mark.parametrize("n", [*SOME_SIZES, 200_000])
def test_phrases_are_distinct_as_the_product_sees_them(n):
    texts = inventory(n, seed=3).phrase_texts(np.arange(n)).to_pylist()
    assert len({key(text) for text in texts}) == n
    assert all(texts)


def test_a_phrase_is_derived_from_its_number_alone():
    stock = inventory(50_000, seed=1)
    whole = stock.phrase_texts(np.arange(50_000))
    some = np.array([49_999, 0, 777, 777])
    assert stock.phrase_texts(some).to_pylist() == whole.take(pa.array(some)).to_pylist()


@pytest.mark.parametrize("n", SOME_SIZES)
def test_intents_and_phrases_count_one_another(n):
    stock = inventory(n, seed=0)
    intents = np.arange(stock.n_intents)
    first, count = stock.phrases_of(intents)
    assert count.min() >= 1
    assert count.sum() == n
    owner, which = stock.intent_of(np.arange(n))
    assert owner.tolist() == np.repeat(intents, count).tolist()
    assert (first[owner] + which).tolist() == list(range(n))


def test_intents_are_found_by_their_parts_and_all_differ():
    stock = inventory(200_000, seed=5)
    parts = stock.parts(np.arange(stock.n_intents))
    assert len(np.unique(parts, axis=0)) == stock.n_intents
    assert (stock.find(parts) == np.arange(stock.n_intents)).all()
    beyond = parts[:1].copy()
    beyond[:, 1:] = stock.radix[1:] - 1
    assert stock.find(beyond)[0] in (-1, *np.flatnonzero((parts == beyond).all(axis=1)))


def test_tens_of_millions_of_phrases_can_be_made_and_no_more_than_there_are():
    stock = inventory(50_000_000, seed=0)
    last = stock.phrase_texts(np.arange(50_000_000 - 1000, 50_000_000)).to_pylist()
    assert len(set(last)) == 1000
    with pytest.raises(ConfigError, match="no more than"):
        inventory(10**12, seed=0)


@pytest.mark.parametrize(
    ("n_phrases", "n_queries"), [(1, 1), (1, 100), (33, 9), (1000, 5000), (500, 120_000)]
)
def test_every_phrase_is_clicked_and_every_query_drawn(n_phrases, n_queries):
    blocks = all_blocks(n_phrases, n_queries)
    assert sum(block.searches for block in blocks) == n_queries
    assert np.unique(np.concatenate([block.phrases for block in blocks])).tolist() == list(range(n_phrases))
    for block in blocks:
        assert block.clicks.min() >= 1
        assert len(block.queries) == len(block.texts) == len(block.phrases) == len(block.clicks)
        assert block.searches <= 1 << 15
        assert pa.compute.min(pa.compute.utf8_length(block.queries)).as_py() > 0


def test_texts_belong_to_the_phrases():
    block = all_blocks(2000, 4000)[0]
    assert block.texts.to_pylist() == inventory(2000, 0).phrase_texts(block.phrases).to_pylist()


def test_a_log_of_millions_is_streamed():
    blocks = simulate(3_000_000, 9_000_000, seed=0)
    for block in itertools.islice(blocks, 3):
        assert block.searches <= 1 << 15
        assert len(block.phrases) < 8 * (1 << 15)


def test_the_seed_decides_everything():
    def rows(seed: int) -> list:
        return [
            row
            for block in all_blocks(800, 3000, seed)
            for row in zip(
                block.queries.to_pylist(), block.phrases.tolist(), block.clicks.tolist(), strict=True
            )
        ]

    assert rows(4) == rows(4)
    assert rows(4) != rows(5)
    assert set(inventory(800, 4).phrase_texts(np.arange(800)).to_pylist()) != set(
        inventory(800, 5).phrase_texts(np.arange(800)).to_pylist()
    )


def test_too_few_queries_say_how_many_it_takes():
    with pytest.raises(ConfigError, match="at least 250 queries"):
        simulate(1000, 249, seed=0)
    assert sum(block.searches for block in simulate(1000, 250, seed=0)) == 250


def test_popularity_is_uneven_and_the_tail_is_long():
    phrases = np.concatenate([block.phrases for block in all_blocks(5000, 20_000)])
    counts = np.sort(np.bincount(phrases, minlength=5000))[::-1]
    assert counts[:50].sum() > 0.1 * counts.sum()
    assert (counts < 5).mean() > 0.5


def texts_of_all_rows(n_phrases: int, n_queries: int) -> list[tuple[str, str]]:
    return [
        pair
        for block in all_blocks(n_phrases, n_queries)
        for pair in zip(block.queries.to_pylist(), block.texts.to_pylist(), strict=True)
    ]


def test_words_alone_decide_neither_nothing_nor_all():
    rows = texts_of_all_rows(3000, 12_000)
    assert 0.1 < np.mean([not set(query.split()) & set(text.split()) for query, text in rows]) < 0.5
    assert 0 < np.mean([query == text for query, text in rows]) < 0.1


def test_model_names_are_typed_and_never_bid_on():
    words = vocabulary()
    models = set(words.pool.take(pa.array(words.first[words.models].reshape(-1))).to_pylist())
    rows = texts_of_all_rows(6000, 15_000)
    assert len(models) == words.models.size
    assert len(models & {word for query, _ in rows for word in query.split()}) > 20
    assert not models & {word for _, text in rows for word in text.split()}


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_misspelling_changes_one_word_by_a_letter(variant):
    wrong = misspell("running shoes", variant)
    assert wrong.endswith(" shoes")
    assert sorted(set(wrong)) == sorted(set("running shoes")) or variant == 1
    assert len(wrong) - len("running shoes") == {0: 0, 1: -1, 2: 1}[variant]
    assert misspell("tv", variant) == "tv"
    assert misspell("12v", variant) == "12v"
