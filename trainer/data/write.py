"""The normalised log: what any input amounts to, as plain TSV."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from bidmatch.base.files import atomic_file
from trainer.data.dataset import Interactions
from trainer.data.fingerprint import MATCH_TYPE

_BLOCK_PAIRS = 1 << 16


def pair_blocks(
    phrases: pa.Table, interactions: Interactions
) -> Iterable[tuple[list[str], list[str], np.ndarray, list[str]]]:
    """(queries, phrase texts, float32 weights, match types) of all pairs, in blocks, in query order."""
    pairs = interactions.clicks.tocoo()
    texts = phrases["text"].combine_chunks()
    match_types = phrases[MATCH_TYPE].combine_chunks() if MATCH_TYPE in phrases.column_names else None
    for start in range(0, pairs.nnz, _BLOCK_PAIRS):
        block = slice(start, start + _BLOCK_PAIRS)
        columns = pa.array(pairs.col[block])
        yield (
            interactions.queries.take(pa.array(pairs.row[block])).to_pylist(),
            texts.take(columns).to_pylist(),
            np.asarray(pairs.data[block], dtype=np.float32),
            [] if match_types is None else match_types.take(columns).to_pylist(),
        )


def weight_text(weight: np.float32) -> str:
    """The shortest decimal that reads back as the same float32; whole numbers without a point."""
    return str(int(weight)) if float(weight).is_integer() else str(weight)


def write_pairs(path: Path, phrases: pa.Table, parts: Iterable[Interactions]) -> int:
    """Write `query<TAB>phrase<TAB>weight[<TAB>match_type]` with a header line; whole or not at all.

    Fields are never quoted: normalised text holds no tab and no line break. Reading the file back gives the
    same queries, phrases, weights and fingerprint.

    Returns:
        the number of pairs.
    """
    has_match_types = MATCH_TYPE in phrases.column_names
    header = ["query", "phrase", "weight"] + [MATCH_TYPE] * has_match_types
    count = 0
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as out:
        out.write("\t".join(header) + "\n")
        for part in parts:
            for queries, texts, weights, match_types in pair_blocks(phrases, part):
                columns = [queries, texts, [weight_text(weight) for weight in weights]]
                if has_match_types:
                    columns.append(match_types)
                out.writelines("\t".join(row) + "\n" for row in zip(*columns, strict=True))
                count += len(weights)
    return count
