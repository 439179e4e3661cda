from __future__ import annotations

import codecs
import gzip
import io
import json
import zipfile

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bidmatch.base.errors import ConfigError, InputError
from trainer.data.read import ReadOptions, read_log

ROWS = [
    ("red shoes", "Running Shoes", 3),
    ("Blue  Hat", "hat", 2),
    ("RED SHOES", "running shoes", 1),
    ("ｆｏｏ", "bar", 4),
]
PAIRS = {("red shoes", "Running Shoes", ""): 4, ("blue hat", "hat", ""): 2, ("foo", "bar", ""): 4}


def delimited(delimiter, header=("query", "phrase", "weight"), rows=ROWS, end="\n"):
    lines = ([delimiter.join(header)] if header else []) + [delimiter.join(map(str, row)) for row in rows]
    return end.join(lines) + end


def jsonl(rows=ROWS):
    return "".join(json.dumps({"query": q, "phrase": p, "weight": w}) + "\n" for q, p, w in rows)


def parquet(rows=ROWS, dictionary=False):
    queries, phrases, weights = zip(*rows, strict=True)
    query = pa.array(queries).dictionary_encode() if dictionary else pa.array(queries)
    sink = io.BytesIO()
    pq.write_table(pa.table({"weight": weights, "phrase": phrases, "query": query}), sink)
    return sink.getvalue()


def xlsx(rows=ROWS):
    book = openpyxl.Workbook()
    for row in [("query", "phrase", "weight"), *rows]:
        book.active.append(row)
    sink = io.BytesIO()
    book.save(sink)
    return sink.getvalue()


def zipped(content, folder=""):
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        if folder:
            archive.mkdir(folder)
        archive.writestr(f"{folder}log.txt", content)
    return sink.getvalue()


FORMS = {
    "tsv": delimited("\t").encode(),
    "tsv, no header": delimited("\t", None).encode(),
    "tsv, CRLF": delimited("\t", end="\r\n").encode(),
    "tsv, old Mac line ends": delimited("\t", end="\r").encode(),
    "tsv, BOM": codecs.BOM_UTF8 + delimited("\t").encode(),
    "tsv, UTF-16": delimited("\t").encode("utf-16"),
    "tsv, UTF-16 without BOM": delimited("\t").encode("utf-16-be"),
    "tsv, no last line end": delimited("\t").rstrip("\n").encode(),
    "tsv, blank lines": ("\n" + delimited("\t").replace("\n", "\n\n")).encode(),
    "tsv, gzip": gzip.compress(delimited("\t").encode()),
    "tsv, zip": zipped(delimited("\t")),
    "tsv, zip with a folder": zipped(delimited("\t"), "logs/"),
    "tsv, other names and order": delimited(
        "\t", ("Clicks", "id", "Keyword", "Search Query"), [(w, 7, p, q) for q, p, w in ROWS]
    ).encode(),
    "csv": delimited(",").encode(),
    "csv, all quoted": delimited(
        ",", ('"query"', '"phrase"', '"weight"'), [tuple(f'"{cell}"' for cell in row) for row in ROWS]
    ).encode(),
    "csv, semicolons": delimited(";").encode(),
    "csv, UTF-16": delimited(",").encode("utf-16"),
    "jsonl": jsonl().encode(),
    "jsonl, blank lines and BOM": codecs.BOM_UTF8 + jsonl().replace("\n", "\r\n\r\n").encode(),
    "jsonl, gzip": gzip.compress(jsonl().encode()),
    "parquet": parquet(),
    "parquet, dictionary": parquet(dictionary=True),
    "xlsx": xlsx(),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_same_data_in_every_form_reads_alike(read, form):
    pairs, log = read(FORMS[form])
    _, plain = read(FORMS["tsv"], name="plain")
    assert pairs == PAIRS
    assert log.phrases.equals(plain.phrases)
    assert log.report.fingerprint == plain.report.fingerprint
    assert (log.report.rows, log.report.duplicates_merged, log.report.total_weight) == (4, 1, 10)


@pytest.mark.parametrize(
    "content", ["red shoes\tshoes\n", "red shoes\tshoes\t1\n", "query\tphrase\nred shoes\tshoes"]
)
def test_one_line_file(read, content):
    assert read(content)[0] == {("red shoes", "shoes", ""): 1}


def test_result_does_not_depend_on_row_order(read):
    rng = np.random.default_rng(0)
    rows = [
        (f"q{rng.integers(9)}", ("P", "p")[rng.integers(2)] + str(rng.integers(9)), rng.random())
        for _ in range(300)
    ]
    _, log = read(delimited("\t", rows=rows), name="a")
    for seed in range(3):
        shuffled = [rows[at] for at in np.random.default_rng(seed).permutation(len(rows))]
        _, again = read(delimited("\t", rows=shuffled), name="b")
        assert again.phrases.equals(log.phrases)
        assert again.interactions.queries.equals(log.interactions.queries)
        assert np.array_equal(again.interactions.clicks.data, log.interactions.clicks.data)
        assert again.report.fingerprint == log.report.fingerprint


@pytest.mark.parametrize(
    "row", [("red shoes", "hat", 3), ("red shoes", "Running Shoes", 4), ("red shoe", "Running Shoes", 3)]
)
def test_fingerprint_tells_other_data_apart(read, row):
    _, log = read(delimited("\t"), name="a")
    _, other = read(delimited("\t", rows=[row, *ROWS[1:]]), name="b")
    assert other.report.fingerprint != log.report.fingerprint


def test_match_type_is_part_of_a_phrase_and_of_the_fingerprint(read):
    rows = [("a", "x", 1, "Exact"), ("a", "x", 2, "Phrase match"), ("b", "x", 1, "exact")]
    header = ("query", "phrase", "weight", "match_type")
    pairs, log = read(delimited("\t", header, rows))
    assert pairs == {("a", "x", "exact"): 1, ("a", "x", "phrase"): 2, ("b", "x", "exact"): 1}
    other = read(delimited("\t", header, [("a", "x", 1, "broad"), *rows[1:]]), name="b")[1]
    assert other.report.fingerprint != log.report.fingerprint


def test_most_frequent_spelling_is_kept_whatever_the_order(read):
    rows = [("a", "iPhone", 1), ("b", "IPHONE", 9), ("c", "iPhone", 1)]
    for order in (rows, rows[::-1]):
        assert read(delimited("\t", rows=order))[1].phrases["text"].to_pylist() == ["iPhone"]


def test_phrase_ids_stay_the_same_in_another_log(read):
    _, one = read("a\tx\nb\ty\n", name="a")
    _, other = read("c\ty\nc\tz\n", name="b")
    ids = [{row["text"]: row["id"] for row in log.phrases.to_pylist()} for log in (one, other)]
    assert ids[0]["y"] == ids[1]["y"]


def test_tsv_keeps_quotation_marks_unless_told(read):
    assert read('27" monitor\t"lcd" screen\n')[0] == {('27" monitor', '"lcd" screen', ""): 1}
    quoted = 'query\tphrase\n"27"" monitor"\tlcd\n'
    assert read(quoted)[0] == {('"27"" monitor"', "lcd", ""): 1}
    assert read(quoted, quoted=True)[0] == {('27" monitor', "lcd", ""): 1}


def test_csv_with_line_breaks_inside_quotes(read):
    content = 'query,phrase,weight\n"red\nshoes","a, b",2\nblue,c,1\n'
    assert read(content)[0] == {("red shoes", "a, b", ""): 2, ("blue", "c", ""): 1}
    with pytest.raises(InputError) as caught:
        read(content + "green,d,x\n")
    assert caught.value.line == 5


def test_columns_by_name_and_by_position(read):
    content = "what\tbid\tn1\tn2\nred shoes\tshoes\t5\t7\n"
    options = {"query_column": "what", "phrase_column": "Bid", "weight_column": "n2"}
    assert read(content, **options)[0] == {("red shoes", "shoes", ""): 7}
    options = {"query_column": "2", "phrase_column": "1", "weight_column": "3"}
    assert read("shoes,red shoes,5\nhat,blue hat,6\n", **options)[0] == {
        ("red shoes", "shoes", ""): 5,
        ("blue hat", "hat", ""): 6,
    }


def test_impressions_column_of_a_log(read):
    content = "query\tphrase\tclicks\timpressions\na\tx\t1\t50\n"
    assert read(content, weight="impressions")[0] == {("a", "x", ""): 50}
    with pytest.raises(InputError, match="no impressions column"):
        read("query\tphrase\tclicks\na\tx\t1\n", weight="impressions")


def test_rows_without_weight_are_counted_and_left_out(read):
    pairs, log = read("query\tphrase\tclicks\na\tx\t0\nb\tx\t0.0\nc\ty\t2.5\n")
    assert pairs == {("c", "y", ""): 2.5}
    assert log.report.skipped == {"weight is 0 (no clicks)": 2}
    assert (len(log.phrases), log.report.queries) == (1, 1)


def test_phrase_columns_are_carried(read):
    content = "query\tphrase\tmarket\tlanguage\na\tx\tUS\ten\nb\tx\tUS\t\nb\ty\tDE\tde\n"
    _, log = read(content, phrase_columns=("market", "language"))
    assert log.phrases.drop_columns("id").to_pylist() == [
        {"text": "x", "market": "US", "language": "en"},
        {"text": "y", "market": "DE", "language": "de"},
    ]


def test_columns_of_numbers(read):
    content = "query\tphrase\tbid\trank\na\tx\t1.50\t 1,000 \nb\tx\t1,5\t1000\nb\ty\t--\t-2e3\nc\tz\t\t0\n"
    _, log = read(content, phrase_columns=("bid", "rank"), number_columns=("bid", "rank"))
    assert log.phrases.select(["text", "bid", "rank"]).to_pylist() == [
        {"text": "x", "bid": 1.5, "rank": 1000.0},
        {"text": "y", "bid": None, "rank": -2000.0},
        {"text": "z", "bid": None, "rank": 0.0},
    ]
    assert log.phrases.schema.field("bid").type == pa.float64()


@pytest.mark.parametrize("cell", ["cheap", "nan", "inf", "1e999", "1.2.3"])
def test_what_is_no_number_is_a_bad_line(read, cell):
    content = f"query\tphrase\tbid\na\tx\t1\nb\ty\t{cell}\n"
    options = {"phrase_columns": ("bid",), "number_columns": ("bid",)}
    with pytest.raises(InputError, match="bid is not a number") as refused:
        read(content, **options)
    assert refused.value.line == 3
    _, log = read(content, bad_lines="skip", **options)
    assert log.phrases["text"].to_pylist() == ["x"]
    assert log.report.skipped == {"bad line: bid is not a number": 1}


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_numbers_of_typed_files(tmp_path, form):
    rows = {"query": ["a", "b"], "phrase": ["x", "y"], "bid": [0.1, None], "shop": [12, 7]}
    if form == "parquet":
        pq.write_table(pa.table(rows), tmp_path / "log")
    else:
        lines = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ReadOptions(phrase_columns=("bid", "shop"), number_columns=("bid",))
    log = read_log([tmp_path / "log"], options)
    assert log.phrases.select(["bid", "shop"]).to_pylist() == [
        {"bid": 0.1, "shop": "12"},
        {"bid": None, "shop": "7"},
    ]


def test_several_formats_at_once(tmp_path, pairs_of):
    for name, content in (("one", FORMS["csv"]), ("two", FORMS["parquet"]), ("three", FORMS["jsonl"])):
        (tmp_path / name).write_bytes(content)
    log = read_log([tmp_path / "one", tmp_path / "two", tmp_path / "three"])
    assert pairs_of(log.phrases, log.interactions) == {pair: 3 * weight for pair, weight in PAIRS.items()}
    assert [name in log.report.format for name in ("CSV", "Parquet", "JSONL")] == [True] * 3
    assert log.report.duplicates_merged == 9
    assert read_log([tmp_path]).report.fingerprint == log.report.fingerprint


BROKEN = {
    "too few columns": ("query\tphrase\tweight\na\tx\t1\nb\ty\n", 3, "2 columns where there should be 3"),
    "too many columns": ("query,phrase,weight\na,x,1\nb,y,1,2\n", 3, "4 columns where there should be 3"),
    "negative weight": ("a\tx\t1\nb\ty\t-2\n", 2, "the weight is negative"),
    "weight is no number": (
        "query\tphrase\tclicks\na\tx\t1\na\tx\tmany\n",
        3, "the weight 'many' is not a number",
    ),
    "weight is NaN": ("a\tx\t1\na\tx\tnan\n", 2, "the weight 'nan' is not a number"),
    "weight is infinite": ("a\tx\t1\na\tx\tinf\n", 2, "not a number"),
    "weight is too large": ("a\tx\t1\na\tx\t1e300\n", 2, "above 1e+15"),
    "weight is empty": ("a\tx\t1\na\tx\t\n", 2, "the weight is missing"),
    "empty query": ("a\tx\t1\n \tx\t1\n", 2, "the query is empty"),
    "empty phrase": ("a\tx\t1\na\t\u200b\t1\n", 2, "the phrase is empty"),
    "NUL byte": ("a\tx\t1\na\0b\tx\t1\n", 2, "NUL byte"),
    "quote never closed": ('query,phrase\na,x\n"b,y\nc,z\n', 3, "never closed"),
    "text after a quote": ('query,phrase\na,x\n"b"c,y\n', None, None),
    "bad JSON": ('{"query": "a", "phrase": "x"}\n{"query": "b", \n', 2, "not valid JSON"),
    "JSON array line": ('{"query": "a", "phrase": "x"}\n[1]\n', 2, "not a JSON object"),
    "JSON field missing": ('{"query": "a", "phrase": "x"}\n{"query": "b"}\n', 2, '"phrase" is missing'),
    "JSON number as text": (
        '{"query": "a", "phrase": "x"}\n{"query": 5, "phrase": "x"}\n',
        2, '"query" is missing or is no text',
    ),
    "JSON weight": (
        '{"query": "a", "phrase": "x", "weight": 1}\n{"query": "a", "phrase": "x", "weight": true}\n',
        2, "not a number",
    ),
    "JSON lone surrogate": (
        '{"query": "a", "phrase": "x"}\n{"query": "\\ud800", "phrase": "x"}\n',
        2, "not valid JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [name for name, (_, line, _) in BROKEN.items() if line])
def test_a_bad_line_stops_with_its_number_or_is_counted(read, case):
    content, line, reason = BROKEN[case]
    with pytest.raises(InputError) as caught:
        read(content)
    assert caught.value.line == line
    assert reason in caught.value.reason
    assert "--bad-lines skip" in caught.value.hint
    pairs, log = read(content, bad_lines="skip")
    assert ("a", "x", "") in pairs
    assert sum(log.report.skipped.values()) == 1
    assert next(iter(log.report.skipped)).startswith("bad line: ")


def test_a_quote_that_is_never_closed_takes_no_other_line_with_it(read):
    content = 'query,phrase\na,x\n"b,y\n' + "".join(f"c{number},z\n" for number in range(2000))
    pairs, log = read(content, bad_lines="skip")
    assert len(pairs) == 2001
    assert sum(log.report.skipped.values()) == 1


def test_first_of_several_bad_lines_is_named(read):
    with pytest.raises(InputError) as caught:
        read("a\tx\t1\n\tx\t1\nb\n")
    assert caught.value.line == 2


def test_wrong_encoding_names_line_and_offset(read):
    content = "query\tphrase\nred\tx\ncafé\ty\n".encode("cp1252")
    with pytest.raises(InputError) as caught:
        read(content)
    assert caught.value.line == 3
    assert f"byte offset {content.index(0xE9)}" in caught.value.reason
    assert "--encoding cp1252" in caught.value.hint
    assert read(content, encoding="cp1252")[0] == {("red", "x", ""): 1, ("café", "y", ""): 1}
    pairs, log = read(content, bad_lines="skip")
    assert pairs == {("red", "x", ""): 1}
    assert log.report.skipped == {"bad line: the text is not UTF-8": 1}


def test_offset_of_a_bad_byte_far_into_a_file(read):
    content = ("é\tx\n" * 300_000).encode() + b"\xff\ty\n"
    with pytest.raises(InputError) as caught:
        read(content)
    assert caught.value.line == 300_001
    assert f"byte offset {content.index(0xFF):,}" in caught.value.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"query\tphrase\n", "no (query, phrase) pair"),
        (b"query,phrase,weight\n", "no (query, phrase) pair"),
        (bytes(range(256)) * 64, "binary"),
        (b"just some words\nand more\n", "no column is named"),
        (b"a,b,c\n1,2,3\n", "no column is named"),
        (b"a\tb\tc\nx\ty\tz\n", "no column is named"),
        (b"query\tquery\tphrase\na\tb\tc\n", "two columns are named 'query'"),
        (b"%PDF-1.7 ...", "PDF"),
        (b"words.txt".ljust(257, b"\0") + b"ustar\x0000", "tar archive"),
        (b"PAR1" + b"x" * 40, "damaged"),
        (parquet()[:-20], "damaged"),
        (gzip.compress(delimited("\t").encode() * 500)[:-40], "damaged"),
        (b"PK\x03\x04garbage", "damaged"),
        (b'[{"query": "a", "phrase": "b"}]', "JSON array"),
        (b'{"a": 1}\n', "no field named"),
        (b'{"query": "a", \n', "not valid JSON"),
        ("\ufeff".encode("utf-16-le"), "empty"),
        (b"\xff\xfe\x00", ""),
    ],
)
@pytest.mark.parametrize("bad_lines", ["stop", "skip"])
def test_unusable_files_say_why(read, content, reason, bad_lines):
    with pytest.raises(InputError) as caught:
        read(content, name="the log", bad_lines=bad_lines)
    assert reason in caught.value.reason


def test_missing_file_folder_without_logs_and_unknown_encoding(tmp_path, read):
    with pytest.raises(InputError, match="no such file"):
        read_log([tmp_path / "absent.tsv"])
    with pytest.raises(InputError, match="holds no log file"):
        read_log([tmp_path])
    with pytest.raises(ConfigError, match="no text encoding named klingon"):
        read("a\tb\n", encoding="klingon")


def test_parquet_bad_rows_and_types(read, tmp_path):
    path = tmp_path / "p"
    pq.write_table(pa.table({"query": ["a", None, "c"], "phrase": ["x", "y", "z"]}), path)
    with pytest.raises(InputError, match="the query is empty") as caught:
        read_log([path])
    assert caught.value.line == 2
    assert read_log([path], ReadOptions(bad_lines="skip")).report.pairs == 2
    pq.write_table(pa.table({"query": [1, 2], "phrase": ["x", "y"]}), path)
    with pytest.raises(InputError, match="holds int64, not text"):
        read_log([path])
    pq.write_table(pa.table({"query": ["a"], "phrase": ["x"], "weight": ["1,5"]}), path)
    assert read_log([path]).report.total_weight == 1.5


def test_clean_and_careful_paths_agree(read):
    rng = np.random.default_rng(3)
    words = ["Red", "ÉTÉ", "a  b", "x" * 300, 'say "hi"', "ß", "日本"]
    rows = [
        (rng.choice(words) + str(rng.integers(50)), rng.choice(words), rng.integers(1, 5))
        for _ in range(2000)
    ]
    clean = delimited("\t", rows=rows)
    pairs, log = read(clean)
    careful_pairs, careful = read(clean + "one column only\n", name="b", bad_lines="skip")
    assert careful_pairs == pairs
    assert careful.report.fingerprint == log.report.fingerprint
    assert careful.phrases.equals(log.phrases)


@pytest.mark.parametrize("row", ["searchterm\t|\t1", "search term,keyword\tcampaign,clicks\t1"])
def test_a_row_that_reads_like_a_report_header(read, row):
    query, phrase, _ = row.split("\t")
    pairs, log = read(f"query\tphrase\tweight\n{row}\na\tx\t2\n")
    assert "click log" in log.report.format
    assert pairs == {(query, phrase, ""): 1, ("a", "x", ""): 2}
