"""The words of the simulated log: concepts, their names and misspellings, as numbers into one pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import yaml
from pydantic import BaseModel, Field, model_validator

TYPOS = 3


class Category(BaseModel):
    """A line of trade: which attribute groups fit its products, who makes them.

    Attributes:
        groups: names of its attribute groups.
        brands: invented names.
        products: names of each product, see `Names`.
    """

    groups: list[str]
    brands: list[str]
    products: list[str]


class WordLists(BaseModel):
    """`vocabulary.yaml`, checked. Of the names "a | b ; c" of a concept, advertisers use a and b, people all.

    Attributes:
        purposes: what is wanted with a product, where not just the product; changes the intent.
        front: words in front that do not change the intent.
        back: words behind that do not.
        syllables: what model names are made of.
        groups: attribute group -> its values.
        categories: name -> category; all have as many brands, products and groups as one another.
    """

    purposes: list[str]
    front: list[str]
    back: list[str]
    syllables: list[str]
    groups: dict[str, list[str]]
    categories: Annotated[dict[str, Category], Field(min_length=1)]

    @model_validator(mode="after")
    def _even(self) -> WordLists:
        kinds = {(len(c.groups), len(c.brands), len(c.products)) for c in self.categories.values()}
        if len(kinds) != 1 or len({len(values) for values in self.groups.values()}) != 1:
            raise ValueError("categories, and attribute groups, must be of one size each")
        return self


@dataclass(frozen=True)
class Vocabulary:
    """Concepts as numbers. Concept c has the pool strings first[c] .. first[c] + names[c] - 1.

    Attributes:
        pool: Arrow string array: every name, then every misspelled name.
        typos: int32 (names in all, TYPOS): pool index of the misspellings of each name.
        first: int32 (concepts,).
        names: int32 (concepts,): number of names people use.
        bid_names: int32 (concepts,): how many of these, from the first, advertisers use.
        products: concept of each product, int32; neighbours are of different categories.
        category: category of each product, int32.
        category_names: name of each category.
        brands: concepts, int32 (categories, brands).
        values: concepts, int32 (categories, groups, values).
        purposes: concepts, int32.
        front: concepts, int32.
        back: concepts, int32.
        models: concepts, int32 (products, brands): the name under which a brand sells a product.
    """

    pool: pa.Array
    typos: np.ndarray
    first: np.ndarray
    names: np.ndarray
    bid_names: np.ndarray
    products: np.ndarray
    category: np.ndarray
    category_names: list[str]
    brands: np.ndarray
    values: np.ndarray
    purposes: np.ndarray
    front: np.ndarray
    back: np.ndarray
    models: np.ndarray


def word_lists() -> WordLists:
    """The word lists that come with the package."""
    text = Path(__file__).with_name("vocabulary.yaml").read_text(encoding="utf-8")
    return WordLists.model_validate(yaml.safe_load(text))


def split_names(entry: str) -> tuple[list[str], list[str]]:
    """Names of a concept: those of advertisers and people, and those of people alone."""
    shared, _, spoken = entry.partition(";")
    return _names(shared), _names(spoken)


def _names(part: str) -> list[str]:
    return [name.strip().lower() for name in part.split("|") if name.strip()]


class _Pool:
    """Collects names concept by concept."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self.first: list[int] = []
        self.names: list[int] = []
        self.bid_names: list[int] = []

    def add(self, entries: list[str]) -> np.ndarray:
        """Concept numbers of the entries, int32."""
        for entry in entries:
            shared, spoken = split_names(entry)
            self.first.append(len(self.strings))
            self.names.append(len(shared) + len(spoken))
            self.bid_names.append(len(shared))
            self.strings += shared + spoken
        return np.arange(len(self.first) - len(entries), len(self.first), dtype=np.int32)


def misspell(name: str, variant: int) -> str:
    """The name with a letter of its longest word swapped, dropped or doubled; as it is if too short for that.

    Args:
        name: one or more words.
        variant: 0 swaps two neighbours, 1 drops a letter, 2 doubles one.
    """
    words = name.split(" ")
    longest = max(range(len(words)), key=lambda i: len(words[i]))
    word = words[longest]
    if len(word) < 4 or not word.isalpha():
        return name
    at = 1 + (len(word) * 7 + ord(word[1]) + variant * 3) % (len(word) - 2)
    edits = (
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
    )
    words[longest] = edits[variant]
    return " ".join(words)


def _model_names(syllables: list[str], n: int, taken: set[str]) -> list[str]:
    """Coined names of three syllables, n different ones, none of them in `taken`."""
    base = len(syllables)
    step = next(s for s in range(int(0.618 * base**3), base**3) if np.gcd(s, base) == 1)
    out: list[str] = []
    seen = set(taken)
    for i in range(base**3):
        code = i * step % base**3
        name = syllables[code % base] + syllables[code // base % base] + syllables[code // base**2]
        if name not in seen:
            seen.add(name)
            out.append(name)
        if len(out) == n:
            break
    return out


@cache
def vocabulary() -> Vocabulary:
    """The packaged word lists as a `Vocabulary`."""
    lists = word_lists()
    pool = _Pool()
    categories = list(lists.categories.values())
    n_items, n_brands = len(categories[0].products), len(categories[0].brands)
    # Item by item over all categories, so that a small log with the first few products has every trade in it.
    products = pool.add([c.products[item] for item in range(n_items) for c in categories])
    category = np.tile(np.arange(len(categories), dtype=np.int32), n_items)
    brands = pool.add([brand for c in categories for brand in c.brands]).reshape(len(categories), n_brands)
    group_names = list(lists.groups)
    values = pool.add([value for values in lists.groups.values() for value in values])
    values = values.reshape(len(group_names), -1)
    of_category = np.array([[group_names.index(g) for g in c.groups] for c in categories])
    purposes, front, back = pool.add(lists.purposes), pool.add(lists.front), pool.add(lists.back)
    coined = _model_names(lists.syllables, len(products) * n_brands, set(pool.strings))
    models = pool.add(coined).reshape(len(products), n_brands)

    strings = pool.strings
    wrong = [[misspell(name, variant) for variant in range(TYPOS)] for name in strings]
    typos = len(strings) + np.arange(len(strings) * TYPOS, dtype=np.int32).reshape(-1, TYPOS)
    return Vocabulary(
        pool=pa.array(strings + [name for names in wrong for name in names], pa.string()),
        typos=typos,
        first=np.array(pool.first, dtype=np.int32),
        names=np.array(pool.names, dtype=np.int32),
        bid_names=np.array(pool.bid_names, dtype=np.int32),
        products=products,
        category=category,
        category_names=list(lists.categories),
        brands=brands,
        values=values[of_category],
        purposes=purposes,
        front=front,
        back=back,
        models=models,
    )
