"""From collected rows to the phrase table and the click matrices, ordered by content alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp

from bidmatch.base.errors import InputError
from bidmatch.base.strings import hash64, key_array
from trainer.data.collect import Collector, NumberedFilter, NumberedPairs
from trainer.data.dataset import Interactions
from trainer.data.fingerprint import MATCH_TYPE
from trainer.data.labels import Catalogue, Labels

_EXACT_IN_FLOAT64 = 2.0**53
_UNIT_SEPARATOR = pa.scalar("\x1f", pa.large_string())


@dataclass(frozen=True)
class Assembled:
    """What the rows amount to.

    Attributes:
        phrases: the phrase table of `Dataset`.
        parts: interactions of part 0 and of part 1, over the same phrases.
    """

    phrases: pa.Table
    parts: tuple[Interactions, Interactions]


def _unify(chunks: list[pa.DictionaryArray]) -> tuple[np.ndarray, pa.Array]:
    """Codes (n,) int64 into the sorted distinct values that occur. Empties `chunks`, to free their memory."""
    chunked = pa.chunked_array(chunks).unify_dictionaries()
    chunks.clear()
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunked.chunks])
    dictionary = chunked.chunk(0).dictionary
    used = np.zeros(len(dictionary), dtype=bool)
    used[codes] = True
    kept = np.flatnonzero(used)
    order = pc.sort_indices(dictionary.take(pa.array(kept))).to_numpy()
    position = np.zeros(len(dictionary), dtype=np.int64)
    position[kept[order]] = np.arange(len(kept))
    return position[codes], dictionary.take(pa.array(kept[order]))


def sum_pairs(
    rows: np.ndarray, columns: np.ndarray, weights: np.ndarray, shape: tuple[int, int]
) -> sp.csr_matrix:
    """CSR float32 of summed weights; the sum of each pair does not depend on the order of its rows."""
    if np.all(weights == np.rint(weights)) and weights.sum() < _EXACT_IN_FLOAT64:
        matrix = sp.coo_matrix((weights, (rows, columns)), shape=shape).tocsr()
    else:
        order = np.lexsort((weights, columns, rows))
        rows, columns, weights = rows[order], columns[order], weights[order]
        new = np.r_[True, (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])]
        starts = np.flatnonzero(new)
        sums = np.add.reduceat(weights, starts)
        matrix = sp.coo_matrix((sums, (rows[starts], columns[starts])), shape=shape).tocsr()
    matrix = sp.csr_matrix(matrix, dtype=np.float32)
    matrix.sort_indices()
    return matrix


def phrase_ids(keys: pa.Array, match_types: pa.Array | None) -> pa.Array:
    """An id for each (key, match type) that stays the same from log to log: 16 hex digits of a hash."""
    if match_types is not None:
        match_types = match_types.cast(pa.large_string())
        typed = pc.binary_join_element_wise(keys, match_types, _UNIT_SEPARATOR)
        keys = pc.if_else(pc.equal(match_types, ""), keys, typed)
    digests = hash64(keys)
    ordered = np.sort(digests)
    if np.any(ordered[1:] == ordered[:-1]):
        wide = hash64(pc.binary_join_element_wise(keys, keys, _UNIT_SEPARATOR))
        return pa.array([f"{a:016x}{b:016x}" for a, b in zip(digests.tolist(), wide.tolist(), strict=True)])
    # Vectorised f"{digest:016x}".
    digits = digests.astype(">u8").tobytes().hex().encode()
    ends = pa.py_buffer(np.arange(len(digests) + 1, dtype=np.int64) * 16)
    return pa.LargeStringArray.from_buffers(len(digests), ends, pa.py_buffer(digits)).cast(pa.string())


def _own_ids(chunks: list[pa.DictionaryArray], phrase_of_row: np.ndarray, count: int) -> pa.Array | None:
    """The data's own phrase ids, the smallest of each phrase; None unless all have one and they differ."""
    codes, values = _unify(chunks)
    if values[0].as_py() == "":
        return None
    first = np.full(count, len(values))
    np.minimum.at(first, phrase_of_row, codes)
    return values.take(pa.array(first)).cast(pa.string()) if len(np.unique(first)) == count else None


def _extra_column(
    name: str, chunks: list[pa.DictionaryArray], phrase_of_row: np.ndarray, texts: pa.Array, kind: pa.DataType
) -> pa.Array:
    codes, values = _unify(chunks)
    pairs = np.unique(np.stack([phrase_of_row, codes], axis=1), axis=0)
    pairs = pairs[~pc.equal(values, "").to_numpy(zero_copy_only=False)[pairs[:, 1]]]
    clash = np.flatnonzero(pairs[1:, 0] == pairs[:-1, 0])
    if len(clash):
        at = int(clash[0])
        one, other = values[int(pairs[at, 1])], values[int(pairs[at + 1, 1])]
        raise InputError(
            f"column {name} differs within one phrase: {texts[int(pairs[at, 0])]} has {one} and {other}",
            hint="--phrase-columns keeps only columns that say something about the phrase itself.",
        )
    indices = np.full(len(texts), -1)
    indices[pairs[:, 0]] = pairs[:, 1]
    return values.take(pa.array(indices, mask=indices < 0)).cast(kind)


def assemble(collector: Collector, catalogue: Catalogue | None = None) -> Assembled:
    """Merge duplicates and build the phrase table and the matrices.

    Queries are sorted by key, phrases by key and match type (or in the catalogue's order), and a phrase's
    text is its most frequent spelling (ties: the smallest), so the result does not depend on row order.

    Args:
        collector: holds at least one row; its chunks are used up.
        catalogue: the phrase list of the data, if it has one; not used where it lacks a collected phrase.

    Raises:
        InputError: an extra phrase column contradicts itself.
    """
    query_of_row, queries = _unify(collector.queries)
    text_of_row, texts = _unify(collector.texts)
    match_of_row, match_types = _unify(collector.match_types)
    key_codes, keys = _unify([key_array(texts).dictionary_encode()])
    kinds = len(match_types)
    combos, combo_of_row, counts = np.unique(
        text_of_row * kinds + match_of_row, return_inverse=True, return_counts=True
    )
    combo_text, combo_match = combos // kinds, combos % kinds
    identities, phrase_of_combo = np.unique(key_codes[combo_text] * kinds + combo_match, return_inverse=True)
    order = np.lexsort((combo_text, -counts, phrase_of_combo))
    _, first = np.unique(phrase_of_combo[order], return_index=True)
    spelling = texts.take(pa.array(combo_text[order][first])).cast(pa.string())
    phrase_of_row = phrase_of_combo[combo_of_row]
    has_match_types = match_types.to_pylist() != [""]
    phrase_keys = keys.take(pa.array(identities // kinds))
    listed = None if catalogue is None else pc.index_in(phrase_keys, value_set=key_array(catalogue.texts))
    if catalogue is None or listed is None or listed.null_count:
        matches = (
            match_types.take(pa.array(identities % kinds)).cast(pa.string()) if has_match_types else None
        )
        ids = _own_ids(collector.ids, phrase_of_row, len(identities))
        ids = phrase_ids(phrase_keys, matches) if ids is None else ids
        table = pa.table({"id": ids, "text": spelling})
        if matches is not None:
            table = table.append_column(MATCH_TYPE, matches)
        for name, chunks in collector.extras.items():
            kind = pa.float64() if name in collector.options.number_columns else pa.string()
            table = table.append_column(name, _extra_column(name, chunks, phrase_of_row, spelling, kind))
    else:
        table = pa.table({"id": catalogue.ids, "text": catalogue.texts.cast(pa.string())})
        phrase_of_row = listed.to_numpy()[phrase_of_row]
    weights, part = np.concatenate(collector.weights), np.concatenate(collector.parts)
    return Assembled(
        table,
        (
            _interactions(queries, query_of_row, phrase_of_row, weights, part == 0, len(table)),
            _interactions(queries, query_of_row, phrase_of_row, weights, part == 1, len(table)),
        ),
    )


def assemble_numbered(collector: Collector, labels: Labels) -> Assembled:
    """As `assemble` with a catalogue, for pairs that all refer to one label list; no pair becomes a string.

    Args:
        collector: holds numbered pairs and no others; they are used up.
        labels: the list that all of them refer to.
    """
    table = pa.table({"id": labels.catalogue.ids, "text": labels.catalogue.texts})
    chunks, collector.numbered = collector.numbered, []
    one, other = (_numbered([c for c in chunks if c.part == part], labels) for part in (0, 1))
    return Assembled(table, (one, other))


def _numbered(chunks: list[NumberedPairs], labels: Labels) -> Interactions:
    shape = len(labels.catalogue.ids)
    if not chunks:
        return Interactions(pa.array([], pa.large_string()), sp.csr_matrix((0, shape), dtype=np.float32))
    encoded = pa.concat_arrays([chunk.queries for chunk in chunks]).dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    counts = np.concatenate([chunk.counts for chunk in chunks])
    rows = np.repeat(place[encoded.indices.to_numpy()], counts)
    columns = labels.rows[np.concatenate([chunk.numbers for chunk in chunks])]
    ones = all(chunk.weights is None for chunk in chunks)
    weights = (
        np.ones(len(columns), dtype=np.float32)
        if ones
        else np.concatenate(
            [np.ones(len(chunk.numbers)) if chunk.weights is None else chunk.weights for chunk in chunks]
        )
    )
    clicks = sum_pairs(rows, columns, weights, (len(order), shape))
    return Interactions(encoded.dictionary.take(pa.array(order)), clicks)


def take_out_filtered(
    assembled: Assembled, filters: list[NumberedFilter], skipped: Counter[str]
) -> Assembled:
    """Attach the pairs of the filter files to their parts.

    What a filter file names is neither right nor wrong, so it is left out of the clicks, too; a query that
    has no other pair is left out with it.

    Args:
        assembled: rows of all files.
        filters: pairs to take out; of each part that has any, `filtered` is set.
        skipped: reason -> rows; left-out pairs are added.
    """
    chosen = {part: [one for one in filters if one.part == part] for part in (0, 1)}
    one, other = (
        _with_filter(interactions, chosen[part], assembled.phrases, skipped) if chosen[part] else interactions
        for part, interactions in enumerate(assembled.parts)
    )
    return Assembled(assembled.phrases, (one, other))


def _with_filter(
    interactions: Interactions, chunks: list[NumberedFilter], phrases: pa.Table, skipped: Counter[str]
) -> Interactions:
    rows = pc.index_in(pa.concat_arrays([c.queries for c in chunks]), value_set=interactions.queries)
    rows = pc.fill_null(rows, -1).to_numpy().repeat(np.concatenate([chunk.counts for chunk in chunks]))
    keys = key_array(phrases["text"].combine_chunks())
    lists = {id(chunk.labels): chunk.labels for chunk in chunks}
    columns_of = {name: _columns_of(labels, keys) for name, labels in lists.items()}
    columns = np.concatenate([columns_of[id(chunk.labels)][chunk.numbers] for chunk in chunks])
    known = (rows >= 0) & (columns >= 0)
    filtered = sp.csr_matrix(
        (np.ones(int(known.sum()), dtype=bool), (rows[known], columns[known])),
        shape=interactions.clicks.shape,
    )
    filtered.sum_duplicates()
    clicks = interactions.clicks
    both = clicks.multiply(filtered).tocsr()
    if both.nnz:
        skipped["the pair is in the filter file"] += both.nnz
        clicks = sp.csr_matrix(clicks - both, dtype=np.float32)
        clicks.eliminate_zeros()
        clicks.sort_indices()
    left = Interactions(interactions.queries, clicks, filtered)
    some = np.diff(clicks.indptr) > 0
    return left if some.all() else left.take(np.flatnonzero(some))


def _columns_of(labels: Labels, keys: pa.Array) -> np.ndarray:
    """Column of each line's label among phrases with these keys, int64 (lines,), -1 for none."""
    found = pc.index_in(key_array(labels.texts), value_set=keys)
    return pc.fill_null(found, -1).to_numpy().astype(np.int64)


def _interactions(
    queries: pa.Array,
    query: np.ndarray,
    phrase: np.ndarray,
    weights: np.ndarray,
    chosen: np.ndarray,
    width: int,
) -> Interactions:
    query, phrase, weights = query[chosen], phrase[chosen], weights[chosen]
    present, rows = np.unique(query, return_inverse=True)
    clicks = sum_pairs(rows, phrase, weights, (len(present), width))
    return Interactions(queries.take(pa.array(present)), clicks)
