"""Writing what was read and reading it back changes nothing, whatever the texts are."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bidmatch.base.strings import hash64, key_array, normalise_array
from bidmatch.base.text import key, normalise
from trainer.data.read import read_log
from trainer.data.write import write_pairs

TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            '"',
            '"a',
            '"a""b"',
            "[a]",
            "{",
            "a\tb",
            "a\nb",
            "a\r",
            "ẞ",
            "ß",
            "ΐ",
            "﻿a",
            "search term",
            "total: x",
        ]
    ),
)
ROWS = st.lists(
    st.tuples(
        TEXTS,
        TEXTS,
        st.one_of(st.integers(1, 10**6), st.floats(1e-6, 1e9)),
        st.sampled_from(["", "exact", "phrase", "broad", "Broad match"]),
    ),
    min_size=1,
    max_size=12,
)
RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write_jsonl(path: Path, rows):
    names = ("query", "phrase", "weight", "match_type")
    path.write_text(
        "".join(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)
    )


def usable(rows):
    return [row for row in rows if key(row[0]) and key(row[1])]


@RELAXED
@given(rows=ROWS)
def test_write_then_read(tmp_path, pairs_of, rows):
    rows = usable(rows)
    assume(rows)
    write_jsonl(tmp_path / "in.jsonl", rows)
    first = read_log([tmp_path / "in.jsonl"])
    assert write_pairs(tmp_path / "pairs.tsv", first.phrases, [first.interactions]) == first.report.pairs
    second = read_log([tmp_path / "pairs.tsv"])
    assert second.report.fingerprint == first.report.fingerprint
    assert pairs_of(second.phrases, second.interactions) == pairs_of(first.phrases, first.interactions)
    assert second.phrases.equals(first.phrases)
    assert second.report.skipped == {}


@RELAXED
@given(rows=ROWS)
def test_jsonl_and_parquet_agree(tmp_path, rows):
    rows = usable(rows)
    assume(rows)
    write_jsonl(tmp_path / "in.jsonl", rows)
    queries, phrases, weights, kinds = zip(*rows, strict=True)
    table = {
        "query": queries,
        "phrase": phrases,
        "weight": pa.array(map(float, weights)),
        "match_type": kinds,
    }
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    one, other = (read_log([tmp_path / name]) for name in ("in.jsonl", "in.parquet"))
    assert one.report.fingerprint == other.report.fingerprint
    assert one.phrases.equals(other.phrases)


@given(texts=st.lists(st.one_of(TEXTS, st.text(max_size=400)), max_size=20))
def test_whole_columns_normalise_like_single_texts(texts):
    column = pa.array(texts, pa.large_string())
    assert key_array(column).to_pylist() == [key(text) for text in texts]
    assert normalise_array(column).to_pylist() == [normalise(text) for text in texts]


@given(texts=st.lists(st.text(max_size=300), min_size=1, max_size=20))
def test_hash_is_of_the_text_alone(texts):
    hashes = hash64(pa.array(texts, pa.large_string()))
    assert len(set(hashes.tolist())) == len(set(texts))
    for at, text in enumerate(texts):
        assert hash64(pa.array([text]))[0] == hashes[at]
    assert hash64(pa.array(["x", *texts], pa.large_string()).slice(1)).tolist() == hashes.tolist()


def test_hash_is_the_same_on_every_machine():
    # Recorded splits, phrase ids and fingerprints depend on these values.
    assert hash64(pa.array(["", "red shoes", "日本", "x" * 257])).tolist() == [
        16294208416658607535,
        7408222438496348279,
        3531571763211653434,
        8557773044231383636,
    ]


def test_a_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "in.tsv").write_text("a\tx\t1\n")
    log = read_log([tmp_path / "in.tsv"])

    def parts():
        yield log.interactions
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        write_pairs(tmp_path / "pairs.tsv", log.phrases, parts())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.tsv"]
