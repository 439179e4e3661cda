from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bidmatch import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bidmatch", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
        raise SystemExit(0)
    return int(ended.value.code or 0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "log.tsv"
    file.write_text("query\tphrase\tclicks\nred shoes\tshoes\t2\nblue hat\that\t1\n")
    return file


@pytest.mark.parametrize("command", ["data", "simulate"])
def test_an_output_that_is_there_is_not_replaced_unasked(monkeypatch, capsys, log, command):
    before = log.read_bytes()
    arguments = {
        "data": ["data", log, "--write", log],
        "simulate": ["simulate", "--phrases", 50, "--queries", 100, "--out", log],
    }[command]
    assert run(monkeypatch, *arguments) == 1
    assert "already exists" in capsys.readouterr().err
    assert log.read_bytes() == before
    assert run(monkeypatch, *arguments, "--overwrite") == 0
    assert log.read_bytes() != before


def test_a_device_is_not_replaced(monkeypatch, capsys, log):
    assert run(monkeypatch, "data", log, "--write", "/dev/null", "--overwrite") == 1
    assert "/dev/null" in capsys.readouterr().err
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("place", ["/proc/pairs.tsv", "{log}/pairs.tsv", "{folder}/" + "n" * 300])
def test_the_file_system_says_no(monkeypatch, capsys, log, place):
    target = place.format(log=log, folder=log.parent)
    assert run(monkeypatch, "data", log, "--write", target) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in said


def test_own_columns_are_no_further_columns(monkeypatch, capsys, tmp_path):
    file = tmp_path / "typed.tsv"
    file.write_text("query\tphrase\tweight\tmatch_type\nred shoes\tshoes\t2\texact\nhat\that\t1\tbroad\n")
    assert run(monkeypatch, "data", file, "--phrase-columns", "match_type") == 0
    assert "2 phrases are 2 texts" in capsys.readouterr().out
    assert run(monkeypatch, "data", file, "--phrase-columns", "match_type:number") == 2
    assert "match types are texts" in capsys.readouterr().err
    assert run(monkeypatch, "data", file, "--phrase-columns", "id") == 2
    assert "--phrase-columns id" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hex", "rot13", "idna", "punycode", "undefined", "klingon", "a\x00b"])
def test_what_is_no_character_set(monkeypatch, capsys, log, name):
    assert run(monkeypatch, "data", log, "--encoding", name) == 2
    assert "no text encoding named" in capsys.readouterr().err


def test_utf16_without_a_mark(monkeypatch, capsys, tmp_path):
    file = tmp_path / "windows.tsv"
    file.write_bytes("query\tphrase\nred shoes\tshoes\n".encode("utf-16-le"))
    assert run(monkeypatch, "data", file, "--encoding", "utf-16") == 0
    assert "1 phrases" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--test-share", "nan"], ["--query-column", "²"]])
def test_odd_numbers(monkeypatch, capsys, log, arguments):
    assert run(monkeypatch, "data", log, *arguments) in (2, 3)
    assert capsys.readouterr().err.startswith("error: ")


def test_a_pipe_is_refused(monkeypatch, capsys, tmp_path):
    import os

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run(monkeypatch, "data", pipe) == 3
    assert "pipe" in capsys.readouterr().err
