"""However an input file is damaged, it is read or refused with an explanation; nothing else is raised."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import shutil
from pathlib import Path

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bidmatch.base.errors import InputError
from trainer.data.read import ReadOptions, read_log

SAMPLES = Path(__file__).parent / "samples"
OBJECT = b'{"object": {"object_id": 1, "name": "x"}}'
EVENT = b'{"action_name": "click", "user_query": "a", "event_attributes": %s}\n' % OBJECT


def _workbook() -> bytes:
    book, sink = openpyxl.Workbook(), io.BytesIO()
    for row in (["Search term", "Keyword", "Campaign", "Clicks"], ["red shoe", "[red shoes]", "C", 5]):
        book.active.append(row)
    book.save(sink)
    return sink.getvalue()


def _parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"query": ["a", "b"], "phrase": ["x", "y"], "weight": [1.0, 2.0]}), sink)
    return sink.getvalue()


def _files() -> dict[str, bytes]:
    reports = {path.stem: path.read_bytes() for path in SAMPLES.glob("*.csv")}
    return {
        **reports,
        "utf16": reports["google_ads"].decode().encode("utf-16"),
        "gzip": gzip.compress(reports["amazon_ads"]),
        "tsv": b"query\tphrase\tweight\na\tx\t1\nb\ty\t2\n" * 3,
        "csv": b'query,phrase\n"a, b",x\n"c ""d""",y\n',
        "jsonl": b'{"query": "a", "phrase": "x", "weight": 2}\n' * 4,
        "labels": b'{"query": "a", "labels": ["x", "y"]}\n{"query": "b", "labels": []}\n',
        "ubi": EVENT * 3,
        "xlsx": _workbook(),
        "parquet": _parquet(),
    }


FILES = _files()
JUNK = [
    b'"',
    b"\t",
    b"\n",
    b"\r",
    b",",
    b"\0",
    b"{",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\n\n",
    b"-",
    b"1e999",
    b"[",
    b'""',
]


def refuse_or_read(path: Path, content: bytes, bad_lines: str) -> None:
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        assert read_log([path], ReadOptions(bad_lines=bad_lines)).report.pairs > 0


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.floats(0, 1),
    to=st.floats(0, 1),
    junk=st.one_of(st.binary(max_size=6), st.sampled_from(JUNK)),
    bad_lines=st.sampled_from(["stop", "skip"]),
)
def test_cut_and_spliced(tmp_path, name, at, to, junk, bad_lines):
    content = FILES[name]
    start, end = sorted(round(share * len(content)) for share in (at, to))
    refuse_or_read(tmp_path / "f", content[:start] + junk + content[end:], bad_lines)
    refuse_or_read(tmp_path / "f", content[:start] + junk + content[start + len(junk) :], bad_lines)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=200), st.text(alphabet='aé"\t\n\r,;{}[]:0\0', max_size=60).map(str.encode)
    )
)
def test_anything(tmp_path, content):
    for bad_lines in ("stop", "skip"):
        refuse_or_read(tmp_path / "f", content, bad_lines)


def _layouts():
    spec = importlib.util.spec_from_file_location("layouts", Path(__file__).parent / "layouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LAYOUTS = _layouts()


@pytest.mark.parametrize("name", LAYOUTS.LAYOUTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_of_a_data_set(tmp_path, name, data):
    folder = tmp_path / "set"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    LAYOUTS.LAYOUTS[name](folder)
    LAYOUTS.write_filters(folder)
    path = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    content = path.read_bytes()
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(content)), st.integers(0, len(content)))))
    junk = data.draw(
        st.one_of(st.binary(max_size=6), st.sampled_from([*JUNK, b"1:", b" 7", b"::", b"99999"]))
    )
    path.write_bytes(content[:start] + junk + content[end:])
    with contextlib.suppress(InputError):
        assert read_log(
            [folder], ReadOptions(bad_lines=data.draw(st.sampled_from(["stop", "skip"])))
        ).report.pairs
