from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bidmatch.base.errors import BidmatchError, ConfigError, InputError
from bidmatch.base.input_files import HEAD_BYTES
from service.scoring.layout import Layout, recognise
from service.scoring.queries import CHUNK_ROWS, LINE_CHARS, BadLines, read_queries
from service.scoring.source import find_files, find_inputs, open_log

THREE = ["red shoes", "blue, wide boots", 'hose 3/4"']


def read(
    path: Path, column: str | None = None, encoding: str | None = None, skip: bool = False
) -> tuple[list[str], Layout, BadLines]:
    source = open_log(path)
    assert source is not None
    layout = recognise(source, column, encoding)
    bad = BadLines(skip)
    moved: list[int] = []
    chunks = list(read_queries(source, layout, bad, moved.append))
    assert sum(moved) == pytest.approx(path.stat().st_size, abs=1)
    return [query for chunk in chunks for query in chunk.to_pylist()], layout, bad


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.tsv", 'query\tclicks\nred shoes\t1\nblue, wide boots\t2\nhose 3/4"\t3\n', "table"),
        (
            "click log without a header.tsv",
            'red shoes\tp\t1\nblue, wide boots\tp\t2\nhose 3/4"\tp\t3\n',
            "table",
        ),
        ("a.csv", 'n,Search term\r\n1,red shoes\r\n2,"blue, wide boots"\r\n3,"hose 3/4"""\r\n', "table"),
        ("semicolons.csv", 'q;n\nred shoes;1\nblue, wide boots;2\n"hose 3/4""";3\n', "table"),
        ("one column.csv", 'query\nred shoes\n"blue, wide boots"\n"hose 3/4"""\n', "table"),
        ("no name at all", 'red shoes\nblue, wide boots\nhose 3/4"\n', "lines"),
        ("header.txt", 'Query\nred shoes\nblue, wide boots\nhose 3/4"', "lines"),
        (
            "a.jsonl",
            '{"n": 1, "query": "red shoes"}\n\n{"query": "blue, wide boots"}\n{"query": "hose 3/4\\""}\n',
            "objects",
        ),
        ("strings.jsonl", '"red shoes"\n"blue, wide boots"\n"hose 3/4\\""\n', "strings"),
    ],
)
@pytest.mark.parametrize("written", ["utf-8", "utf-8-sig", "utf-16", "gzip"])
def test_each_format_is_told_by_content(
    tmp_path: Path, name: str, content: str, kind: str, written: str
) -> None:
    path = tmp_path / name
    raw = content.encode("utf-8" if written == "gzip" else written)
    path.write_bytes(gzip.compress(raw) if written == "gzip" else raw)
    queries, layout, bad = read(path)
    assert queries == THREE
    assert layout.kind == kind
    assert ("gzip" in layout.name) == (written == "gzip")
    assert bad.count == 0


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"n": [1, 2, 3, 4], "Query": pa.array([*THREE, None]).cast(kind)})
    pq.write_table(table, tmp_path / "whatever")
    assert read(tmp_path / "whatever")[0] == [*THREE, ""]


def test_parquet_with_one_column_of_any_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": THREE}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == THREE


def test_the_column_by_name_or_position(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("day,what they typed\n1,red shoes\n")
    assert read(path, "What they typed")[0] == ["red shoes"]
    assert read(path, "2")[0] == ["what they typed", "red shoes"]
    path.write_text("day,phrase\n1,red shoes\n")
    assert read(path, "2")[0] == ["red shoes"]
    path.write_text("1,red shoes\n2,\n")
    assert read(path, "2")[0] == ["red shoes", ""]
    path.write_text('{"text": "red shoes"}\n')
    assert read(path, "text")[0] == ["red shoes"]
    pq.write_table(pa.table({"a": THREE, "b": [1, 2, 3]}), path)
    assert read(path, "a")[0] == THREE


def test_a_table_keeps_line_ends_in_quotes_and_passes_over_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\nquery,n\n"red\nshoes",1\n\nboots,2\n')
    assert read(path)[0] == ["red\nshoes", "boots"]


def test_quotation_marks_of_a_query_are_no_quotes_of_a_tsv(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('"red shoes" kids\tp\t1\nboots\tp\t1\n')
    assert read(path)[0] == ['"red shoes" kids', "boots"]
    path.write_text('"red ""shoes"" kids"\tp\t1\nboots\tp\t1\n')
    assert read(path)[0] == ['red "shoes" kids', "boots"]


def test_a_first_row_that_is_no_header_line(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("dates\tdate\t3\nboots\tp\t1\n")
    assert read(path)[0] == ["dates", "boots"]


def test_blank_lines_of_plain_text_are_empty_queries(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("red\n\n  \nboots\n")
    assert read(path)[0] == ["red", "", "  ", "boots"]


def test_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes("query\tn\ncafé\t1\n".encode("cp1252"))
    assert read(path, encoding="cp1252")[0] == ["café"]
    path.write_bytes("query\tn\nкафе\t1\n".encode("utf-16-le"))
    assert read(path, encoding="utf-16-le")[0] == ["кафе"]
    with pytest.raises(ConfigError, match="no text encoding named klingon"):
        read(path, encoding="klingon")


@pytest.mark.parametrize(
    ("content", "line", "reason", "sound"),
    [
        (b"query\tn\nred\t1\nblue\n", 3, "has 1 cells where there are 2", 1),
        (b"query\tn\nred\t1\nblue\t1\t2\ngreen\t1\n", 3, "has 3 cells", 2),
        (b"query\tn\nred\t1\ncaf\xe9\t1\n", 3, "is no UTF-8 text", 1),
        (b"red\nblue\ncaf\xe9\ngreen\n", 3, "is no UTF-8 text", 3),
        (b'query,n\nred,1\n"blu"e,1\ngreen,2\n', 3, "stands in the middle", 2),
        (b'query,n\nred,1\n"blue,1\ngreen,2\n', 3, "opened and never closed", 2),
        (b'{"query": "red"}\n\n{"query": "blue"\n', 3, "is not valid JSON", 1),
        (b'{"query": "red"}\n{"query": 5}\n{"query": null}\n', 2, "the query is no text but 5", 2),
        (b'{"query": "red"}\n{"q": "blue"}\n', 2, "no JSON object with the field 'query'", 1),
        (b'{"query": "red"}\n[1]\n', 2, "no JSON object with the field 'query'", 1),
        (b'{"query": "red"}\n{"query": "\\ud800"}\n', 2, "is not valid JSON", 1),
        (b'"red"\n' * HEAD_BYTES + b"5\n", HEAD_BYTES + 1, "the query is no text but 5", HEAD_BYTES),
    ],
)
def test_a_bad_line_stops_or_is_skipped(
    tmp_path: Path, content: bytes, line: int, reason: str, sound: int
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as stopped:
        read(path)
    assert f"{path}, line {line}: " in str(stopped.value)
    queries, _, bad = read(path, skip=True)
    assert bad.count == 1
    assert bad.first.startswith(f"{path}, line {line}: ")
    assert queries[0] == "red"
    assert len(queries) == sound


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", b"day,what\n1,red shoes\n", "no column is named as the query"),
        ("a.tsv", b"keyword\tcount\nred shoes\t1\n", "no column is named as the query"),
        ("a.jsonl", b'{"a": 1}\n', "no column is named as the query"),
        ("a.jsonl", b'{"a": }\n', "not valid JSON"),
        ("a.jsonl", b'{"query": "red"\n', "not valid JSON"),
        ("a.txt", b"\xff\xfe" + "red\nblue".encode("utf-16-le") + b"\x00", "is no UTF-16 text"),
        ("a.jsonl", b'[{"query": "red"},\n{"query": "blue"}]', "one JSON array"),
        ("a.csv", b"query,Query,n\na,b,1\n", "two columns are named 'query'"),
        ("log.tsv", b"red\nblue\tp\ngreen\tp\n", "a table's row"),
        ("a.xlsx", b"PK\x03\x04abc", "an Excel workbook"),
        ("a.zst", b"(\xb5/\xfdabc", "zstd archive is damaged or cut short"),
        ("a.bin", bytes(range(32)) * 8, "is a binary file"),
        ("a.parquet", b"PAR1 is how it starts", "damaged or cut short"),
        ("a.gz", gzip.compress(b"PAR1abc", mtime=0), "Parquet file inside a gzip"),
        ("long.txt", b"x" * (2 << 20), "longer than"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BidmatchError, match=reason):
        read(path)


def test_a_named_column_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("query,n\nred,1\n")
    with pytest.raises(InputError, match=r"no column 'text'\n  The columns are: query, n"):
        read(path, "text")


def test_parquet_column_that_is_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": [1, 2]}), tmp_path / "a")
    with pytest.raises(InputError, match="holds int64, not text"):
        read(tmp_path / "a")


def test_a_cut_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv.gz"
    lines = "".join(f"query number {n * n}\t1\n" for n in range(100_000))
    path.write_bytes(gzip.compress(lines.encode())[:-1000])
    with pytest.raises(InputError, match="gzip archive is damaged"):
        read(path)


def test_chunks_are_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x\n" * (CHUNK_ROWS + 10) + ("x" * 1_000_000 + "\n") * 40)
    source = open_log(path)
    assert source is not None
    sizes = [
        (len(chunk), sum(map(len, chunk.to_pylist())))
        for chunk in read_queries(source, recognise(source, None, None), BadLines(False), lambda _: None)
    ]
    assert sizes[0][0] == CHUNK_ROWS
    assert sum(rows for rows, _ in sizes) == CHUNK_ROWS + 50
    assert max(chars for _, chars in sizes) < 18_000_000


def test_empty_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(" \n")
    (tmp_path / "a.txt").write_text("red")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".a.crc").touch()
    assert find_files(tmp_path) == [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert open_log(tmp_path / "b.txt") is None
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="holds no files"):
        find_files(tmp_path / "none")
    with pytest.raises(InputError, match="no such file"):
        open_log(tmp_path / "absent")


def zstd(content: bytes) -> bytes:
    """One frame."""
    return pa.compress(content, codec="zstd", asbytes=True)


def test_all_frames_and_members_are_read(tmp_path: Path) -> None:
    parts = [f"query {n}\n".encode() * 20_000 for n in range(3)]
    wanted = [f"query {n}" for n in range(3) for _ in range(20_000)]
    path = tmp_path / "log"
    passed_over = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    for content in (
        b"".join(map(zstd, parts)),
        passed_over + zstd(parts[0]) + passed_over + zstd(parts[1] + parts[2]),
        b"".join(map(gzip.compress, parts)),
    ):
        path.write_bytes(content)
        queries, layout, _ = read(path)
        assert queries == wanted
        assert "zstd" in layout.name or "gzip" in layout.name


@pytest.mark.parametrize("cut", [5, 1000])
@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_a_cut_archive_is_named(tmp_path: Path, packing: str, cut: int) -> None:
    path = tmp_path / "a.tsv"
    lines = "".join(f"query number {n * n}\t1\n" for n in range(100_000)).encode()
    packed = gzip.compress(lines) if packing == "gzip" else zstd(lines)
    for left in (packed[:-cut], packed[: len(packed) // 2], packed[:cut]):
        path.write_bytes(left)
        with pytest.raises(
            InputError, match=f"{path}: the {packing} archive is damaged or cut short"
        ) as told:
            read(path, skip=True)
        assert "copy the file again; if it is still being written" in str(told.value)


@pytest.mark.parametrize("name", ["a.txt", "a.tsv", "a.csv", "a.jsonl"])
def test_a_line_beyond_the_limit_stops_or_is_skipped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    row = {"a.txt": "{}\n", "a.tsv": "{}\t1\n", "a.csv": '"{}",1\n', "a.jsonl": '{{"query": "{}"}}\n'}[name]
    header = {"a.txt": "query\n", "a.tsv": "query\tn\n", "a.csv": "query,n\n", "a.jsonl": ""}[name]
    short = [row.format(f"query {n}") for n in range(5)]
    long = row.format("x" * (9 * LINE_CHARS))
    path.write_text(header + "".join([*short[:2], long, *short[2:], "\n" if name == "a.txt" else ""]))
    line = 3 + bool(header)
    with pytest.raises(InputError, match=f"line {line}: the line is longer than 1,048,576 characters"):
        read(path)
    queries, _, bad = read(path, skip=True)
    assert queries == [f"query {n}" for n in range(5)] + [""] * (name == "a.txt")
    assert (bad.count, bad.first.partition(": ")[0]) == (1, f"{path}, line {line}")


def test_a_query_beyond_the_limit_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"query": ["red", "x" * (LINE_CHARS + 1), "blue"]}), path)
    with pytest.raises(InputError, match="line 2: the query is longer than 1,048,576 bytes"):
        read(path)
    queries, _, bad = read(path, skip=True)
    assert (queries, bad.count) == (["red", "blue"], 1)


def test_bad_lines_far_into_a_file_have_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    lines = [f"query {n}\t{n}" for n in range(300_000)]
    lines[150_000] = "no tab"
    lines[299_999] = "two\ttabs\there"
    lines[200_000] = "na\u00efve\t1"
    path.write_text("query\tn\n" + "\n".join(lines), encoding="utf-8")
    with pytest.raises(InputError, match="line 150002: has 1 cells"):
        read(path)
    queries, _, bad = read(path, skip=True)
    assert bad.count == 2
    assert queries == [line.split("\t")[0] for line in lines if line.count("\t") == 1]
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(path, skip=True)[0] == queries


def test_quoted_cells_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    texts = [f"plain {n}" for n in range(100_000)]
    texts[60_000] = 'in "quotes", with\nanother line'
    texts[99_999] = "last, of all"
    cells = ['"' + text.replace('"', '""') + '"' if "," in text else text for text in texts]
    path.write_text("query,n\n" + "".join(f"{cell},1\n" for cell in cells))
    assert read(path)[0] == texts


def test_folders_in_folders_and_patterns(tmp_path: Path) -> None:
    names = [
        "date=2026-01-01/part-0.tsv",
        "date=2026-01-01/part-1.tsv",
        "date=2026-01-02/hour=00/part-0.tsv",
        "date=2026-01-02/_SUCCESS",
        "date=2026-01-02/.part-0.tsv.crc",
        "_temporary/0/part-9.tsv",
        ".hidden/part-9.tsv",
        "other.txt",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(path: str) -> list[str]:
        return [str(one.relative_to(tmp_path)) for one in find_files(tmp_path / path)]

    assert found(".") == [*names[:3], "other.txt"]
    assert found("*/*.tsv") == names[:2]
    assert found("**/*.tsv") == names[:3]
    assert found("date=*-0[12]") == names[:3]
    assert found("**") == [*names[:3], "other.txt"]
    assert found("date=2026-01-0?/_*") == ["date=2026-01-02/_SUCCESS"]
    with pytest.raises(InputError, match="no file matches this pattern"):
        found("*.gz")
    (tmp_path / "a[1].tsv").touch()
    assert found("a[1].tsv") == ["a[1].tsv"]
    both = [tmp_path / "date=2026-01-02", tmp_path / "*/part-1.tsv"]
    assert len(find_inputs(both)) == 2
    with pytest.raises(InputError, match=r"part-1\.tsv: is among the inputs twice"):
        find_inputs([*both, tmp_path / "date=2026-01-01"])


def test_a_folder_that_links_to_itself(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log.tsv").touch()
    (tmp_path / "a" / "b").symlink_to(tmp_path)
    with pytest.raises(InputError, match="is a link to a folder that it is in"):
        find_files(tmp_path)
