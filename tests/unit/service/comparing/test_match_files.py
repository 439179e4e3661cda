"""Files of matches: every format, and what is wrong with bad ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bidmatch.base.errors import InputError
from service.comparing.match_files import MatchFile, recognise_matches
from service.comparing.match_rows import read_matches
from service.scoring.queries import BadLines
from service.scoring.source import open_log

ROWS = [
    {"query": "red hose", "phrase": "garden hose", "id": "p1", "rank": 2},
    {"query": 'hose 3/4"', "phrase": "a, b", "id": "p2", "rank": 1},
]


def recognised(path: Path) -> MatchFile:
    source = open_log(path)
    assert source is not None
    return recognise_matches(source)


def read(path: Path, skip: bool = False) -> tuple[list[dict[str, object]], BadLines]:
    bad = BadLines(skip)
    moved: list[int] = []
    rows = [row for table in read_matches(recognised(path), bad, moved.append) for row in table.to_pylist()]
    assert sum(moved) == pytest.approx(path.stat().st_size, abs=1)
    return rows, bad


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", 'query\tphrase\tid\trank\nred hose\tgarden hose\tp1\t2\nhose 3/4"\ta, b\tp2\t1\n'),
        (
            "quoted.tsv",
            '"query"\t"phrase"\t"id"\t"rank"\n"red hose"\tgarden hose\tp1\t2\n"hose 3/4"""\ta, b\tp2\t1\n',
        ),
        (
            "a.csv",
            'rank,score,ID,Keyword,search term\r\n2,1,p1,garden hose,red hose\r\n1,,p2,"a, b",hose 3/4"\r\n',
        ),
        ("semicolons.csv", 'query;phrase;id;rank\n\nred hose;garden hose;p1;2\nhose 3/4";a, b;p2;1\n'),
        (
            "a.jsonl",
            '{"query": "red hose", "phrase": "garden hose", "id": "p1", "rank": 2, "source": "x"}\n\n'
            '{"id": "p2", "query": "hose 3/4\\"", "phrase": "a, b", "rank": 1}\n',
        ),
    ],
)
@pytest.mark.parametrize("written", ["utf-8", "utf-8-sig", "utf-16", "gzip"])
def test_text(tmp_path: Path, name: str, content: str, written: str) -> None:
    path = tmp_path / name
    raw = content.encode("utf-8" if written == "gzip" else written)
    path.write_bytes(gzip.compress(raw) if written == "gzip" else raw)
    assert read(path)[0] == ROWS


def test_parquet_with_numbers_as_ids(tmp_path: Path) -> None:
    table = pa.table(
        {
            "query": pa.array(["red hose", None, "x", "y"]).dictionary_encode(),
            "id": pa.array([17, 18, None, 19], pa.int32()),
            "rank": pa.array([1, 1, None, 3], pa.uint8()),
        }
    )
    pq.write_table(table, tmp_path / "m.parquet")
    assert read(tmp_path / "m.parquet")[0] == [
        {"query": "red hose", "phrase": None, "id": "17", "rank": 1},
        {"query": "", "phrase": None, "id": "18", "rank": 1},
        {"query": "y", "phrase": None, "id": "19", "rank": 3},
    ]


def test_a_query_without_a_match_may_have_a_row(tmp_path: Path) -> None:
    (tmp_path / "m.tsv").write_text("query\tphrase\nnone\t\nred hose\tgarden hose\n")
    rows, _ = read(tmp_path / "m.tsv")
    assert rows == [{"query": "red hose", "phrase": "garden hose", "id": None, "rank": 0}]


def test_ids_may_be_numbers_of_json(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"query": "red hose", "id": 17}\n{"query": "x", "id": null}\n')
    assert read(tmp_path / "m.jsonl")[0] == [{"query": "red hose", "phrase": None, "id": "17", "rank": 0}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "m.tsv",
            b"query\tclicks\nx\t1\n",
            "m.tsv: has no column 'phrase' or 'id' (there are: query, clicks)",
        ),
        ("m.tsv", b"red hose\tgarden hose\n", "m.tsv: has no column 'query'"),
        ("m.csv", b"query,id,ID\nx,1,2\n", "m.csv: two columns are named 'id'"),
        (
            "m.jsonl",
            b'["a", "b"]\n',
            "m.jsonl, line 1: starts like JSON, but its first line is no JSON object",
        ),
        ("m.tsv", b"query\tphrase\nx\n", "m.tsv, line 2: has 1 cells where the header line has 2"),
        (
            "m.tsv",
            b"query\tphrase\trank\nx\ty\tfirst\n",
            "m.tsv, line 2: column 'rank' holds 'first' and not a",
        ),
        ("m.tsv", b"query\tphrase\trank\n\nx\ty\t\n", "m.tsv, line 3: column 'rank' holds nothing and not a"),
        ("m.tsv", b"query\tphrase\tid\nx\ty\t\n", "m.tsv, line 2: column 'id' is empty"),
        ("m.csv", b"query,phrase\nx,k\xfchl\n", "m.csv, line 2: column 'phrase' is no UTF-8 text"),
        ("m.csv", b'query,phrase\nx,"y\n', "m.csv, line 2: a quotation mark"),
        ("m.jsonl", b'{"query": "x", "id": "1"}\n{"query": "x"\n', "m.jsonl, line 2: is not valid JSON"),
        (
            "m.jsonl",
            b'{"query": "x", "id": "1"}\n{"id": "1"}\n',
            "line 2: is no JSON object with the field 'query'",
        ),
        (
            "m.jsonl",
            b'{"query": "x", "id": "1"}\n{"query": "x", "id": [1]}\n',
            "line 2: column 'id' holds no text",
        ),
    ],
)
def test_bad_files_and_lines(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path)
    assert message in str(caught.value)


def test_bad_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "m.tsv").write_text("query\tphrase\trank\nx\ty\t1\nx\tz\nx\tz\tlast\nx\tw\t2\n")
    rows, bad = read(tmp_path / "m.tsv", skip=True)
    assert [row["phrase"] for row in rows] == ["y", "w"]
    assert bad.count == 2
    assert "line 3" in bad.first


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"query": ["x"], "id": [0.5]}, "column 'id' holds double, not text"),
        ({"query": [1], "id": ["a"]}, "column 'query' holds int64, not text"),
        ({"query": ["x"], "id": ["a"], "rank": ["1"]}, "column 'rank' holds string, not whole numbers"),
        ({"query": ["x", "x"], "id": ["a", "b"], "phrase": ["a", " "]}, "line 2: column 'phrase' is empty"),
        ({"query": ["x", "x"], "id": ["a", "b"], "rank": [1, None]}, "line 2: column 'rank' is empty"),
    ],
)
def test_bad_parquet(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "m.parquet")
    with pytest.raises(InputError) as caught:
        read(tmp_path / "m.parquet")
    assert message in str(caught.value)
