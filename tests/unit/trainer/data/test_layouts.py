"""Data sets of several files, in the layouts that research uses."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from bidmatch.base.errors import InputError
from trainer.data.read import ReadOptions, read_dataset, read_log, report_lines

# Test folders are no packages, so a helper beside a test is imported by its path.
_SPEC = importlib.util.spec_from_file_location("layouts", Path(__file__).parent / "layouts.py")
assert _SPEC is not None
assert _SPEC.loader is not None
layouts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(layouts)


def write(name, folder):
    folder.mkdir(exist_ok=True)
    layouts.LAYOUTS[name](folder)
    return folder


def content(interactions):
    cells = interactions.clicks.tocoo()
    queries = interactions.queries.to_pylist()
    return {
        (queries[row], int(column), float(weight))
        for row, column, weight in zip(cells.row, cells.col, cells.data, strict=True)
    }


def filtered(interactions):
    cells = interactions.filtered.tocoo()
    queries = interactions.queries.to_pylist()
    return {(queries[row], int(column)) for row, column in zip(cells.row, cells.col, strict=True)}


@pytest.fixture
def reference(tmp_path):
    return read_dataset([write("labelled", tmp_path / "reference")])


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_every_layout_is_the_same_data_set(tmp_path, reference, name):
    dataset = read_dataset([write(name, tmp_path / "set")])
    assert dataset.report.fingerprint == reference.report.fingerprint
    assert dataset.split == reference.split
    assert dataset.split.kind == "given"
    assert dataset.phrases["text"].to_pylist() == layouts.LABELS
    assert content(dataset.train) == content(reference.train)
    assert content(dataset.test) == content(reference.test)
    assert dataset.filtered is None
    assert not any("left out of the folder" in note for note in dataset.report.notes)


def test_a_wrong_pair_is_another_fingerprint(tmp_path, reference):
    folder = write("xmc texts", tmp_path / "set")
    matrix = folder / "trn_X_Y.txt"
    matrix.write_text(matrix.read_text().replace("3:1", "2:1"))
    assert read_dataset([folder]).report.fingerprint != reference.report.fingerprint


def test_says_what_it_recognised(tmp_path):
    said = {
        name: read_dataset([write(name, tmp_path / name.replace(" ", "-"))]).report.format
        for name in ("xmc json, packed", "xmc raw_data", "text2text", "beir")
    }
    assert "raw texts (JSONL with lbl.json.gz, gzip)" in said["xmc json, packed"]
    assert "train.raw.txt.gz, trn_X_Y.txt, label.raw.txt.gz" in said["xmc raw_data"]
    assert "PECOS text2text (with output-labels.txt)" in said["text2text"]
    assert "BEIR (qrels with queries.jsonl and corpus.jsonl)" in said["beir"]
    report = read_dataset([tmp_path / "xmc-raw_data"]).report
    assert any("before -> in train.raw.txt.gz was taken for an id" in note for note in report.notes)


def test_own_ids_of_labels_are_kept(tmp_path):
    for name, first in (("xmc json", "B00"), ("beir", "d0"), ("text2text", "0")):
        assert read_dataset([write(name, tmp_path / name)]).phrases["id"][0].as_py() == first


WANTED_TRAIN = {("a hat", 2)}
WANTED_TEST = {("crimson shoe", 1), ("scarf & hat", 3)}


class TestFilters:
    @pytest.mark.parametrize("name", ["labelled", "xmc json, packed", "xmc texts", "xmc raw_data", "xmc npz"])
    def test_both_parts(self, tmp_path, reference, name):
        folder = write(name, tmp_path / "set")
        layouts.write_filters(folder)
        dataset = read_dataset([folder])
        assert filtered(dataset.train) == WANTED_TRAIN
        assert filtered(dataset.test) == WANTED_TEST
        assert dataset.filtered is dataset.test.filtered
        assert dataset.report.filter_pairs == {"train": 1, "test": 2}
        assert dataset.report.fingerprint == reference.report.fingerprint
        said = "\n".join(report_lines(dataset.report, dataset.split))
        assert "filter files: pairs taken out of rankings: 1 of train queries, 2 of test queries" in said
        assert "left out of the folder" not in said

    def test_the_other_spelling(self, tmp_path):
        folder = write("xmc texts", tmp_path / "set")
        layouts.write_filters(folder, "{}_filter_labels.txt", ("trn", "tst"))
        assert filtered(read_dataset([folder]).test) == WANTED_TEST

    def test_packed_with_commas_and_windows_line_ends(self, tmp_path):
        folder = write("xmc texts", tmp_path / "set")
        (folder / "filter_labels_test.txt.gz").write_bytes(gzip.compress(b"0,1\r\n1, 3\r\n\r\n"))
        dataset = read_dataset([folder])
        assert filtered(dataset.test) == WANTED_TEST
        assert dataset.train.filtered is None

    def test_an_empty_file_names_no_pair(self, tmp_path):
        folder = write("xmc json", tmp_path / "set")
        (folder / "filter_labels_test.txt").write_text("")
        assert read_dataset([folder]).filtered is None

    def test_follows_a_query_through_splits_and_joins(self, tmp_path):
        folder = write("xmc texts", tmp_path / "set")
        layouts.write_filters(folder)
        dataset = read_dataset([folder])
        backwards = dataset.test.take(np.arange(len(dataset.test))[::-1])
        assert filtered(backwards) == WANTED_TEST
        assert filtered(read_log([folder]).interactions) == WANTED_TRAIN | WANTED_TEST

    def test_what_is_filtered_is_no_click(self, tmp_path):
        folder = write("xmc texts", tmp_path / "set")
        (folder / "filter_labels_test.txt").write_text("0 0\n1 2\n1 2\n")
        dataset = read_dataset([folder])
        assert content(dataset.test) == {("scarf & hat", 1, 1.0)}
        assert filtered(dataset.test) == {("scarf & hat", 2)}
        assert dataset.report.skipped == {"the pair is in the filter file": 2}
        assert dataset.report.duplicates_merged == 0

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("2 1", r"row 2 is none of tst_X\.txt \(0 to 1\)"),
            ("0 5", r"label 5 is not a line of Y\.txt"),
            ("0", "not a row and a label"),
            ("0 -1", "not a row and a label"),
            ("0 1 1", "not a row and a label"),
        ],
    )
    def test_bad_line(self, tmp_path, line, reason):
        folder = write("xmc texts", tmp_path / "set")
        (folder / "filter_labels_test.txt").write_text(f"0 1\n\n{line}\n")
        with pytest.raises(InputError, match=rf"filter_labels_test\.txt, line 3: .*{reason}"):
            read_dataset([folder])
        dataset = read_dataset([folder], ReadOptions(bad_lines="skip"))
        assert filtered(dataset.test) == {("crimson shoe", 1)}
        assert sum(dataset.report.skipped.values()) == 1


class TestBadLines:
    def check(self, folder, file, old, new, line, reason, lost=1, raw=False):
        path = folder / file
        data = path.read_bytes()
        assert old.encode() in data
        path.write_bytes(data.replace(old.encode(), new if raw else new.encode(), 1))
        with pytest.raises(InputError, match=reason) as caught:
            read_dataset([folder])
        assert caught.value.file == str(path)
        assert caught.value.line == line
        dataset = read_dataset([folder], ReadOptions(bad_lines="skip"))
        assert sum(dataset.report.skipped.values()) >= 1
        assert len(dataset.train) + len(dataset.test) == 6 - lost

    @pytest.mark.parametrize(
        ("file", "old", "new", "line", "reason"),
        [
            ("trn_X_Y.txt", "3:1.00000", "9:1.00000", 5, "label 9 is not a line of Y.txt"),
            ("trn_X_Y.txt", "3:1.00000", "3:-1", 5, "a weight is negative"),
            ("trn_X_Y.txt", "3:1.00000", "3", 5, "not made of pairs label:value"),
            ("trn_X_Y.txt", "3:1.00000", "3:1:1", 5, "not made of pairs label:value"),
            ("trn_X_Y.txt", "3:1.00000", "three:1", 5, "not made of pairs label:value"),
            ("tst_X.txt", "crimson shoe", "  ", 1, "the query is empty"),
        ],
    )
    def test_texts(self, tmp_path, file, old, new, line, reason):
        self.check(write("xmc texts", tmp_path / "set"), file, old, new, line, reason)

    @pytest.mark.parametrize(
        ("column", "value", "reason"),
        [
            (3, np.nan, "a weight is not a number"),
            (3, -1.0, "a weight is negative"),
            (-2, 1.0, r"label -2 is not a line of Y\.txt"),
            (9, 1.0, r"label 9 is not a line of Y\.txt"),
        ],
    )
    def test_npz(self, tmp_path, column, value, reason):
        folder = write("xmc npz", tmp_path / "set")
        path = folder / "Y.trn.npz"
        put_npz(path, data=[1, 1, 1, 1, value], indices=[0, 1, 1, 2, column])
        with pytest.raises(InputError, match=rf"Y\.trn\.npz: row \(from 0\) 3: {reason}"):
            read_dataset([folder])
        dataset = read_dataset([folder], ReadOptions(bad_lines="skip"))
        assert len(dataset.train) == 3
        # The text of a query is a fault of its own file.
        put_npz(path, data=[1] * 5, indices=[0, 1, 1, 2, 3])
        texts = folder / "raw" / "trn_X.txt"
        texts.write_text(texts.read_text().replace("sleeve", " "))
        with pytest.raises(InputError, match=r"trn_X\.txt, line 4: the query is empty"):
            read_dataset([folder])

    def test_npz_in_blocks(self, tmp_path):
        """No fault is lost where the matrix is read in several blocks."""
        n = 70_000
        (tmp_path / "Y.txt").write_text("one\ntwo\n")
        (tmp_path / "trn_X.txt").write_text("".join(f"{at} query\n" for at in range(n)))
        indices = np.zeros(n, dtype=np.int32)
        indices[[40_000, 69_999]] = -1, 1
        put_npz(tmp_path / "trn_X_Y.npz", np.ones(n), indices, np.arange(n + 1), (n, 2))
        with pytest.raises(InputError, match=r"row \(from 0\) 40,000: label -1 is not a line"):
            read_log([tmp_path])
        log = read_log([tmp_path], ReadOptions(bad_lines="skip"))
        assert sum(log.report.skipped.values()) == 1
        assert log.interactions.clicks.getnnz(axis=0).tolist() == [n - 2, 1]

    def test_bytes_that_are_no_utf8(self, tmp_path):
        folder = write("xmc texts", tmp_path / "set")
        self.check(folder, "trn_X.txt", "sleeve", b"sl\xffeve", 4, "is not UTF-8 text", raw=True)
        latin = write("xmc texts", tmp_path / "latin")
        for name in ("Y.txt", "trn_X.txt", "tst_X.txt"):
            path = latin / name
            path.write_text(path.read_text().replace("\u2028", " "), encoding="latin-1")
        dataset = read_dataset([latin], ReadOptions(encoding="latin-1"))
        assert dataset.phrases["text"].to_pylist() == layouts.LABELS

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ('"title": "a hat"', '"name": "a hat"', 'field "title" is missing'),
            ('"target_ind": [1]', '"target_ind": 1', 'field "target_ind" is missing or is no list'),
            ('"target_ind": [1]', '"target_ind": [1.5]', "neither all whole numbers"),
            ('"target_ind": [1]', '"target_ind": [77777777777777777777]', "neither all whole numbers"),
            ('"target_ind": [1]', '"target_ind": [9223372036854775808]', "is not a line of lbl.json"),
            ('"target_rel": [1.0]}', '"target_rel": [1.0, 2.0]}', "no list of numbers as long"),
            ('"target_rel": [1.0]}', '"target_rel": [-1]}', "a weight is negative"),
            ('"target_rel": [1.0]}', '"target_rel": [1.0]', "not valid JSON"),
        ],
    )
    def test_json(self, tmp_path, old, new, reason):
        folder = write("xmc json", tmp_path / "set")
        path = folder / "trn.json"
        rows = path.read_bytes().split(b"\r\n")
        rows[1] = rows[1].replace(old.encode(), new.encode())
        path.write_bytes(b"\n".join(rows))
        with pytest.raises(InputError, match=reason) as caught:
            read_dataset([folder])
        assert caught.value.line == 2
        dataset = read_dataset([folder], ReadOptions(bad_lines="skip"))
        assert sum(dataset.report.skipped.values()) == 1
        assert len(dataset.train) == 3

    def test_a_skipped_line_moves_no_number(self, tmp_path):
        """Neither labels nor filter pairs change their meaning when a line before theirs cannot be used."""
        folder = write("xmc json", tmp_path / "set")
        layouts.write_filters(folder)
        for name in ("trn.json", "lbl.json"):
            rows = (folder / name).read_bytes().split(b"\r\n")
            rows[0 if name == "lbl.json" else 1] = b"{broken"
            (folder / name).write_bytes(b"\n".join(rows))
        with pytest.raises(InputError, match=r"lbl\.json, line 1: the line is not valid JSON"):
            read_dataset([folder])
        (folder / "filter_labels_train.txt").write_text("2 3\n1 3\n")
        dataset = read_dataset([folder], ReadOptions(bad_lines="skip"))
        assert dataset.phrases["text"].to_pylist() == layouts.LABELS[1:]
        assert content(dataset.train) == {
            ("warm things: 1,2", 0, 1.0),
            ("warm things: 1,2", 1, 1.0),
            ("sleeve", 2, 1.0),
        }
        assert filtered(dataset.train) == {("warm things: 1,2", 2)}

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("1\ta hat", "1;a hat", "no tab between labels and text"),
            ("1\ta hat", "one\ta hat", "not a list of label numbers"),
            ("1\ta hat", "1,\ta hat", "not a list of label numbers"),
            ("1\ta hat", "8\ta hat", "label 8 is not a line of output-labels.txt"),
            ("1\ta hat", "1\t ", "the query is empty"),
            ("1\ta hat", "1,x\ta hat", "not a list of label numbers"),
            ("1\ta hat", "-1,2\ta hat", "not a list of label numbers"),
            ("1\ta hat", "1::0.5,2::x\ta hat", "not a list of label numbers"),
            ("1\ta hat", "a hat\t1", "not a list of label numbers"),
            ("1\ta hat", "query\tphrase", "not a list of label numbers"),
        ],
    )
    def test_text2text(self, tmp_path, old, new, reason):
        folder = write("text2text", tmp_path / "set")
        path = folder / "training-data.txt"
        path.write_text("0\tanother\n" * 300 + path.read_text())
        self.check(folder, "training-data.txt", old, new, 302, reason, lost=0)

    @pytest.mark.parametrize("line", range(1, 5))
    @pytest.mark.parametrize(
        "bad", ["1,x\tq", "-1,2\tq", "1::x\tq", "1,\tq", "a hat\t1", "q", "query\tphrase"]
    )
    @pytest.mark.parametrize("names", [("training-data", "output-labels"), ("trn", "output-items")])
    def test_text2text_wherever_the_bad_line_stands(self, tmp_path, line, bad, names):
        """No line makes the file one of another kind, whose queries would be the label numbers."""
        folder = write("text2text", tmp_path / "set")
        (folder / "training-data.txt").rename(folder / f"{names[0]}.txt")
        (folder / "output-labels.txt").rename(folder / f"{names[1]}.txt")
        path = folder / f"{names[0]}.txt"
        rows = path.read_text().split("\n")
        rows[line - 1] = bad
        path.write_text("\n".join(rows))
        for named in (folder, path):
            with pytest.raises(
                InputError, match="no tab" if bad == "q" else "not a list of label numbers"
            ) as caught:
                read_dataset([named])
            assert (caught.value.file, caught.value.line) == (str(path), line)
        dataset = read_dataset([folder], ReadOptions(bad_lines="skip"))
        assert "PECOS text2text" in dataset.report.format
        assert (len(dataset.train), len(dataset.test)) == (3, 2)
        assert sum(dataset.report.skipped.values()) == 1

    def test_text2text_with_swapped_columns(self, tmp_path):
        folder = write("text2text", tmp_path / "set")
        rows = (folder / "training-data.txt").read_text().strip().split("\n")
        swapped = ["\t".join(reversed(row.split("\t"))) for row in rows]
        (folder / "training-data.txt").write_text("\n".join(swapped))
        with pytest.raises(InputError, match=r"training-data\.txt, line 1: what stands before the tab"):
            read_dataset([folder])

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("q1\td1", "q9\td1", "the id 'q9' is not in queries.jsonl"),
            ("q1\td1", "q1\td9", "the id 'd9' is not in corpus.jsonl"),
            ("q1\td1\t1", "q1\td1", "not query id, document id and score"),
            ("q1\td1\t1", "q1\td1\thigh", "the score is not a number"),
        ],
    )
    def test_beir(self, tmp_path, old, new, reason):
        self.check(write("beir", tmp_path / "set"), "qrels/train.tsv", old, new, 3, reason)


class TestEncodings:
    def test_labels_in_another_encoding_than_the_json_beside_them(self, tmp_path, reference):
        folder = write("labelled", tmp_path / "set")
        path = folder / "labels.txt"
        text = path.read_text()
        path.write_text(text, encoding="cp1252")
        with pytest.raises(InputError, match=r"labels\.txt, line 4: is not UTF-8 .*\n.*--encoding cp1252"):
            read_dataset([folder])
        for encoding in ("cp1252", "utf-16"):
            path.write_text(text, encoding=encoding)
            dataset = read_dataset([folder], ReadOptions(encoding=encoding))
            assert dataset.report.fingerprint == reference.report.fingerprint

    @pytest.mark.parametrize("line", [1, 2])
    @pytest.mark.parametrize("encoding", [None, "cp1252"])
    def test_json_that_is_no_utf8_is_not_advised_an_encoding(self, tmp_path, line, encoding):
        rows = [b'{"query": "hat", "phrase": "x"}'] * 2
        rows[line - 1] = '{"query": "hüte", "phrase": "x"}'.encode("cp1252")
        (tmp_path / "log").write_bytes(b"\n".join(rows))
        with pytest.raises(InputError, match=r"log, line \d: the line is not UTF-8 text, and JSON") as caught:
            read_log([tmp_path / "log"], ReadOptions(encoding=encoding))
        assert caught.value.line == line
        assert "cp1252" not in str(caught.value)

    @pytest.mark.parametrize(
        ("codec", "given"),
        [
            ("utf-8-sig", None),
            ("utf-16", None),
            ("utf-16-le", None),
            ("utf-16", "utf-16"),
            ("cp1252", "cp1252"),
        ],
    )
    @pytest.mark.parametrize("header", [True, False])
    def test_judgements(self, tmp_path, codec, given, header):
        folder = write("beir", tmp_path / "set")
        for name in ("corpus.jsonl", "queries.jsonl"):
            text = (folder / name).read_text()
            (folder / name).write_text(text.replace('"q0"', '"frage ü"').replace('"q4"', '"frage ö"'))
        wanted = read_dataset([write("beir", tmp_path / "plain")]).report.fingerprint
        for path in (folder / "qrels").iterdir():
            rows = path.read_text().replace("q0\t", "frage ü\t").replace("q4\t", "frage ö\t").split("\n")
            path.write_text("\n".join(rows if header else rows[1:]), encoding=codec)
        assert read_dataset([folder], ReadOptions(encoding=given)).report.fingerprint == wanted

    def test_judgements_that_are_no_utf8_are_advised_what_works(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        path = folder / "qrels" / "train.tsv"
        path.write_text(path.read_text() + "frage ü\td1\t1\n", encoding="cp1252")
        with pytest.raises(InputError, match=r"train\.tsv, line 9: is not UTF-8 .*\n.*--encoding cp1252"):
            read_dataset([folder])
        with pytest.raises(InputError, match="the id 'frage ü' is not in"):
            read_dataset([folder], ReadOptions(encoding="cp1252"))

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
    def test_filter_files(self, tmp_path, encoding):
        folder = write("xmc texts", tmp_path / "set")
        (folder / "filter_labels_test.txt").write_text("0 1\n1 3\n", encoding=encoding)
        assert filtered(read_dataset([folder]).test) == WANTED_TEST


class TestAllLinesBad:
    """Skipping bad lines must not leave out a whole file, such as the training part, without a word."""

    def refused(self, folder, reason):
        with pytest.raises(InputError, match=reason) as caught:
            read_dataset([folder], ReadOptions(bad_lines="skip"))
        assert "All lines of the file are bad" in str(caught.value)

    def test_judgements(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        path = folder / "qrels" / "train.tsv"
        path.write_text(path.read_text().replace("1\n", "one\n").replace("0\n", "none\n"))
        self.refused(folder, r"train\.tsv, line 2: the score is not a number")

    def test_part_of_a_folder(self, tmp_path):
        folder = write("text2text", tmp_path / "set")
        (folder / "test-data.txt").write_text("\na\nb\n")
        self.refused(folder, r"test-data\.txt, line 2: the line has no tab")
        folder = write("labelled", tmp_path / "other")
        (folder / "tst.jsonl").write_text('{"query": "a", "labels": [99]}\n{"query": "b", "labels": [98]}\n')
        self.refused(folder, r"tst\.jsonl, line 1: label 99 is not a line of labels\.txt")

    def test_one_of_several_logs(self, tmp_path):
        (tmp_path / "one.tsv").write_text("query\tphrase\tclicks\na\tx\t1\n")
        (tmp_path / "other.tsv").write_text("query\tphrase\tclicks\na\tx\tmany\n\tx\t1\n")
        self.refused(tmp_path, r"other\.tsv, line 2: the weight 'many' is not a number")

    def test_filter_file(self, tmp_path):
        folder = write("xmc texts", tmp_path / "set")
        for text, reason in (
            ("query label\n0 99\n", "line 1: the line is not a row and a label"),
            ("0 99\n1 98\n", r"line 1: label 99 is not a line of Y\.txt"),
            ("88 0\n77 1\n", r"line 2: row 77 is none of tst_X\.txt"),
        ):
            (folder / "filter_labels_test.txt").write_text(text)
            self.refused(folder, rf"filter_labels_test\.txt, {reason}")

    def test_label_list(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        path = folder / "corpus.jsonl"
        path.write_text(path.read_text().replace("{", "["))
        with pytest.raises(
            InputError, match=r"corpus\.jsonl, line 1: the line is not valid JSON.* no line holds"
        ):
            read_dataset([folder], ReadOptions(bad_lines="skip"))


def put_npz(path, data, indices, indptr=(0, 1, 2, 4, 5), shape=(4, 5), form=b"csr", **more):
    """The arrays that SciPy writes for a matrix in rows, whether they fit together or not."""
    arrays = {"data": data, "indices": indices, "indptr": indptr, "shape": shape, "format": form} | more
    np.savez_compressed(path, **{name: np.asarray(array) for name, array in arrays.items()})


def _renamed_npy(path):
    with path.open("wb") as out:
        np.save(out, np.ones((4, 5)))


_ONES, _COLUMNS = np.ones(5), np.array([0, 1, 1, 2, 3])
BAD_NPZ = {
    "a renamed .npy": _renamed_npy,
    "one dimension": lambda path: sp.save_npz(path, sp.coo_array(np.ones(4))),
    "texts": lambda path: put_npz(path, np.array(["a"] * 5), _COLUMNS),
    "complex": lambda path: put_npz(path, _ONES * 1j, _COLUMNS),
    "indptr decreases": lambda path: put_npz(path, _ONES, _COLUMNS, (0, 4, 2, 4, 5)),
    "indptr is too short": lambda path: put_npz(path, _ONES, _COLUMNS, (0, 5)),
    "indptr is beyond": lambda path: put_npz(path, _ONES, _COLUMNS, (0, 1, 2, 4, 500)),
    "columns are fractions": lambda path: put_npz(path, _ONES, _COLUMNS + 0.5),
    "columns are complex": lambda path: put_npz(path, _ONES, _COLUMNS * 1j),
    "format is a number": lambda path: put_npz(path, _ONES, _COLUMNS, form=7),
    "format is unknown": lambda path: put_npz(path, _ONES, _COLUMNS, form=b"abc"),
    "shape of three": lambda path: put_npz(path, _ONES, _COLUMNS, shape=(4, 5, 6)),
    "shape is negative": lambda path: put_npz(path, _ONES, _COLUMNS, shape=(4, -5)),
    "rows are none, in columns": lambda path: put_npz(
        path, _ONES, _COLUMNS * -1_000_000, (0, 1, 2, 4, 5), (5, 4), b"csc"
    ),
    "no arrays": lambda path: np.savez(path),
}


class TestFilesThatDoNotFit:
    @pytest.fixture
    def folder(self, tmp_path):
        return write("xmc texts", tmp_path / "set")

    def refused(self, folder, reason):
        for bad_lines in ("stop", "skip"):
            with pytest.raises(InputError, match=reason):
                read_dataset([folder], ReadOptions(bad_lines=bad_lines))

    def test_more_texts_than_rows(self, folder):
        with (folder / "trn_X.txt").open("a") as out:
            out.write("one more\n")
        self.refused(folder, r"trn_X\.txt, line 5: has more lines than trn_X_Y\.txt has rows \(4\)")

    def test_fewer_texts_than_rows(self, folder):
        (folder / "trn_X.txt").write_text("one\ntwo\n")
        self.refused(folder, r"trn_X\.txt: has 2 lines, and trn_X_Y\.txt has 4 rows")

    def test_fewer_rows_than_the_header_says(self, folder):
        (folder / "trn_X_Y.txt").write_text("4 5\n0:1\n1:1\n")
        self.refused(folder, r"trn_X_Y\.txt: has 2 rows, and its first line says 4")

    def test_more_rows_than_the_header_says(self, folder):
        (folder / "trn_X_Y.txt").write_text("2 5\n0:1\n1:1\n1:1\n")
        self.refused(folder, r"trn_X_Y\.txt: has more rows than the 2")

    def test_fewer_labels_in_the_matrix_than_in_the_list(self, folder):
        (folder / "trn_X_Y.txt").write_text("4 3\n0:1\n1:1\n1:1\n1:1\n")
        self.refused(folder, r"Y\.txt: has 5 labels, and trn_X_Y\.txt says that there are 3")

    def test_no_header(self, folder):
        (folder / "trn_X_Y.txt").write_text("0:1\n1:1\n1:1\n1:1\n")
        self.refused(folder, r"trn_X_Y\.txt, line 1: does not begin with the numbers of rows and labels")

    def test_no_texts(self, folder):
        (folder / "trn_X.txt").unlink()
        self.refused(folder, r"holds trn_X_Y\.txt and no texts of the queries")

    def test_no_label_list(self, tmp_path):
        folder = write("xmc json", tmp_path / "json")
        (folder / "lbl.json").unlink()
        self.refused(folder / "trn.json", r"no lbl\.json\.gz beside it")

    @pytest.mark.parametrize("name", ["training-data", "X.trn", "train"])
    def test_no_label_list_of_text2text(self, tmp_path, name):
        folder = write("text2text", tmp_path / "set")
        (folder / "output-labels.txt").unlink()
        (folder / "training-data.txt").rename(folder / f"{name}.txt")
        path = folder / f"{name}.txt"
        for text in (path.read_text(), "no tab\n" + path.read_text()):
            path.write_text(text)
            self.refused(path, rf"{name}\.txt: refers to labels by number, and there is no output-labels")
            self.refused(folder, r"refers to labels by number, and there is no output-labels\.txt beside it")

    def test_a_damaged_npz(self, tmp_path):
        folder = write("xmc npz", tmp_path / "npz")
        data = (folder / "Y.trn.npz").read_bytes()
        for damaged in (data[:60], b"PK\x03\x04", b"junk", data[:-40]):
            (folder / "Y.trn.npz").write_bytes(damaged)
            self.refused(folder, r"Y\.trn\.npz: is no sparse matrix")

    @pytest.mark.parametrize("name", BAD_NPZ)
    def test_an_npz_of_something_else(self, tmp_path, name):
        folder = write("xmc npz", tmp_path / "npz")
        BAD_NPZ[name](folder / "Y.trn.npz")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            warnings.simplefilter("error", UserWarning)
            self.refused(folder, r"Y\.trn\.npz: is no sparse matrix")

    def test_flipped_bytes_in_a_packed_npz(self, tmp_path):
        folder = write("xmc npz", tmp_path / "npz")
        path = folder / "Y.trn.npz"
        data = path.read_bytes()
        for at in range(0, len(data), 3):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
            # Some bytes say nothing that matters, such as a date.
            with contextlib.suppress(InputError):
                read_dataset([folder])

    @pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr", "dia"])
    def test_forms_of_an_npz(self, tmp_path, reference, form):
        folder = write("xmc npz", tmp_path / "npz")
        path = folder / "Y.trn.npz"
        matrix = sp.csr_array(sp.load_npz(path))
        sp.save_npz(path, matrix.astype(bool).asformat(form))
        assert read_dataset([folder]).report.fingerprint == reference.report.fingerprint

    def test_a_pickle_in_an_npz_is_not_run(self, tmp_path):
        folder = write("xmc npz", tmp_path / "npz")
        np.savez(folder / "Y.trn.npz", indices=np.array([{}], dtype=object), format=np.array(b"csr"))
        self.refused(folder, r"Y\.trn\.npz: is no sparse matrix")

    def test_features_without_text(self, tmp_path):
        (tmp_path / "train.txt").write_text("2 3 4\n0,1 0:0.5 2:1.0\n2 1:1.0\n")
        self.refused(tmp_path / "train.txt", "bag-of-words file .* which holds no text")

    def test_a_matrix_alone(self, folder):
        self.refused(folder / "trn_X_Y.txt", "sparse label matrix, which belongs to files of texts")

    def test_a_corpus_without_judgements(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        for path in (folder / "qrels").iterdir():
            path.unlink()
        self.refused(folder, "no qrels")

    def test_an_id_twice(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        with (folder / "corpus.jsonl").open("a") as out:
            out.write('{"_id": "d0", "title": "again", "text": ""}\n')
        self.refused(folder, r"corpus\.jsonl, line 6: the id d0 is there twice")


class TestTextFields:
    def test_title_and_content(self, tmp_path):
        folder = write("xmc json", tmp_path / "set")
        dataset = read_dataset([folder], ReadOptions(text_fields=("title", "content")))
        assert dataset.phrases["text"][1].as_py() == "hat about hat"
        assert "a hat about a hat" in dataset.train.queries.to_pylist()
        assert dataset.report.columns["query"] == "title + content"

    def test_a_label_without_content_keeps_its_title(self, tmp_path):
        folder = write("xmc json", tmp_path / "set")
        lines = [json.dumps({"uid": str(at), "title": text}) for at, text in enumerate(layouts.LABELS)]
        (folder / "lbl.json").write_text("\n".join(lines))
        dataset = read_dataset([folder], ReadOptions(text_fields=("title", "content")))
        assert dataset.phrases["text"].to_pylist() == layouts.LABELS

    def test_title_of_a_document_alone(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        path = folder / "corpus.jsonl"
        path.write_text(path.read_text().replace('"text": ""', '"text": "long"'))
        assert read_dataset([folder]).phrases["text"][1].as_py() == "hat long"
        titles = read_dataset([folder], ReadOptions(text_fields=("title",)))
        assert titles.phrases["text"][1].as_py() == "hat"


class TestSplits:
    def test_dev_is_held_out_where_there_is_no_test(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        (folder / "qrels" / "test.tsv").rename(folder / "qrels" / "dev.tsv")
        dataset = read_dataset([folder])
        assert dataset.split.kind == "given"
        assert len(dataset.test) == 2

    def test_dev_trains_where_there_is_a_test(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq3\td0\t2\n")
        dataset = read_dataset([folder])
        assert ("sleeve", 0, 2.0) in content(dataset.train)
        assert any("dev.tsv is training data, too" in note for note in dataset.report.notes)

    @pytest.mark.parametrize("score", ["1", "1.0", "1e0", "+1"])
    def test_a_first_judgement_is_no_header(self, tmp_path, reference, score):
        folder = write("beir", tmp_path / "set")
        for path in (folder / "queries.jsonl", *(folder / "qrels").iterdir()):
            text = path.read_text().partition("\n")[2] if path.suffix == ".tsv" else path.read_text()
            path.write_text(re.sub(r"\bq(\d)", r"query\1", text).replace("\t1\n", f"\t{score}\n"))
        assert read_dataset([folder]).report.fingerprint == reference.report.fingerprint
        train = folder / "qrels" / "train.tsv"
        train.write_text(train.read_text().replace(f"\t{score}\n", "\thigh\n", 1))
        with pytest.raises(InputError, match=r"train\.tsv, line 1: the score is not a number"):
            read_dataset([folder])

    def test_test_alone_is_no_split(self, tmp_path):
        folder = write("beir", tmp_path / "set")
        (folder / "qrels" / "train.tsv").unlink()
        dataset = read_dataset([folder])
        assert dataset.split.kind == "by_query_hash"
        assert any("gives no split" in note for note in dataset.report.notes)

    def test_a_training_part_alone(self, tmp_path):
        folder = write("xmc texts", tmp_path / "set")
        (folder / "tst_X.txt").unlink()
        assert read_dataset([folder]).split.kind == "by_query_hash"

    def test_text2text_with_labels_txt(self, tmp_path, reference):
        folder = write("text2text", tmp_path / "set")
        (folder / "output-labels.txt").rename(folder / "labels.txt")
        dataset = read_dataset([folder])
        assert dataset.split.kind == "given"
        assert dataset.report.fingerprint == reference.report.fingerprint

    def test_a_click_log_beside_a_label_list_stays_one(self, tmp_path):
        write("text2text", tmp_path / "set")
        for name, text in (
            ("train.tsv", "query\tphrase\nred shoe\tshoes\n"),
            ("log.txt", "red shoe\tshoes\n12\tdozen\n"),
            ("numbers.tsv", "query\tphrase\n12\tdozen\n13\tmore\n"),
        ):
            (tmp_path / "set" / name).write_text(text)
            assert "click log" in read_log([tmp_path / "set" / name]).report.format
        # Queries that are numbers are a click log where nothing says that they are labels.
        (tmp_path / "train.tsv").write_text("4711\tpart\n0815\tpin\n")
        assert "click log" in read_log([tmp_path / "train.tsv"]).report.format

    def test_single_files_of_a_data_set_can_be_named(self, tmp_path):
        folder = write("xmc json, packed", tmp_path / "set")
        layouts.write_filters(folder)
        log = read_log([folder / "tst.json.gz"])
        assert filtered(log.interactions) == WANTED_TEST
        other = write("text2text", tmp_path / "other")
        assert read_log([other / "test-data.txt"]).report.fingerprint == log.report.fingerprint


def test_several_data_sets_are_merged(tmp_path):
    """Pairs by number of two label lists become pairs of texts; the filter pairs follow."""
    one, other = write("xmc texts", tmp_path / "one"), write("xmc json", tmp_path / "other")
    layouts.write_filters(one)
    (tmp_path / "log.tsv").write_text("a hat\tHAT\t3\nnew\tcap\t1\n")
    dataset = read_dataset([one, other, tmp_path / "log.tsv"])
    texts = dataset.phrases["text"].to_pylist()
    assert set(texts) == {"Ärmel lang", "cap", "hat", "Red Shoes", "wool scarf"}
    hat, scarf = texts.index("hat"), texts.index("wool scarf")
    assert ("a hat", hat, 5.0) in content(dataset.train)
    assert ("warm things: 1,2", hat, 2.0) in content(dataset.train)
    assert filtered(dataset.train) == {("a hat", scarf)}
    assert len(filtered(dataset.test)) == 2


def test_a_large_file_is_read_in_blocks(tmp_path):
    """Row numbers go on from block to block: 70,000 rows, each with the label of its own number."""
    n = 70_000
    (tmp_path / "Y.txt").write_text("".join(f"label {at}\n" for at in range(n)))
    (tmp_path / "trn_X.txt").write_text("".join(f"{at:06} query\n" for at in range(n)))
    (tmp_path / "trn_X_Y.txt").write_text(f"{n} {n}\n" + "".join(f"{at}:1\n" for at in range(n)))
    rows = np.arange(0, n, 7)
    text = "".join(f"{row} {(row + 1) % n}\n" for row in rows)
    (tmp_path / "filter_labels_train.txt").write_text(text)
    log = read_log([tmp_path])
    assert (log.interactions.clicks.indices == np.arange(n)).all()
    pairs = log.interactions.filtered.tocoo()
    assert pairs.row.tolist() == rows.tolist()
    assert pairs.col.tolist() == ((rows + 1) % n).tolist()
