from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from bidmatch.base.text import key
from trainer.data.dataset import Interactions
from trainer.data.read import Log, ReadOptions, read_log

Pairs = dict[tuple[str, str, str], float]


def _pairs(phrases: pa.Table, interactions: Interactions) -> Pairs:
    """{(query key, phrase text, match type): weight}."""
    queries = interactions.queries.to_pylist()
    texts = phrases["text"].to_pylist()
    kinds = phrases["match_type"].to_pylist() if "match_type" in phrases.column_names else [""] * len(texts)
    cells = interactions.clicks.tocoo()
    return {
        (queries[row], texts[column], kinds[column]): float(weight)
        for row, column, weight in zip(cells.row, cells.col, cells.data, strict=True)
    }


@pytest.fixture
def samples() -> Path:
    return Path(__file__).parent / "samples"


@pytest.fixture
def pairs_of() -> Callable[..., Pairs]:
    return _pairs


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., tuple[Pairs, Log]]:
    """Writes bytes or text to a file (the name says nothing) and reads it."""

    def read_content(content: bytes | str, name: str = "input", **options: object) -> tuple[Pairs, Log]:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        log = read_log([path], ReadOptions(**options))
        check_invariants(log)
        return _pairs(log.phrases, log.interactions), log

    return read_content


def check_invariants(log: Log) -> None:
    clicks, queries = log.interactions.clicks, log.interactions.queries.to_pylist()
    assert clicks.shape == (len(queries), len(log.phrases))
    assert clicks.dtype == "float32"
    assert clicks.has_sorted_indices
    assert (clicks.data > 0).all()
    assert len(set(queries)) == len(queries)
    assert all(query and query == key(query) for query in queries)
    assert len(set(log.phrases["id"].to_pylist())) == len(log.phrases)
    assert log.report.pairs == clicks.nnz
    assert log.report.rows == clicks.nnz + log.report.duplicates_merged + sum(log.report.skipped.values())
