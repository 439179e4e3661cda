from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp

from bidmatch.base.errors import InputError
from trainer.data.dataset import Interactions
from trainer.data.read import ReadOptions, read_dataset, read_log, report_lines
from trainer.data.split import split_by_query


def write_folder(path, labels, train, test):
    path.mkdir(exist_ok=True)
    (path / "labels.txt").write_text(labels)
    for name, rows in (("trn.jsonl", train), ("tst.jsonl", test)):
        lines = (json.dumps({"query": query, "labels": found}) + "\n" for query, found in rows)
        (path / name).write_text("".join(lines))
    return path


def as_dict(interactions):
    return {
        query: dict(zip(row.indices.tolist(), row.data.tolist(), strict=True))
        for query, row in zip(interactions.queries.to_pylist(), interactions.clicks, strict=True)
    }


class TestDatasetFolder:
    LABELS = "hat\nred shoes\nRed  Shoes\n\nscarf\nnever clicked"

    @pytest.fixture
    def folder(self, tmp_path):
        train = [("A hat", [0]), ("Shoes, red", [1, 2, 4]), ("nothing", []), ("Shared", [4]), ("a  HAT", [4])]
        return write_folder(tmp_path / "set", self.LABELS, train, [("shared", [0, 4]), ("wool scarf", [4])])

    def test_split_labels_and_ids(self, folder):
        dataset = read_dataset([folder])
        assert dataset.phrases.to_pylist() == [
            {"id": "0", "text": "hat"},
            {"id": "1", "text": "red shoes"},
            {"id": "4", "text": "scarf"},
            {"id": "5", "text": "never clicked"},
        ]
        assert as_dict(dataset.train) == {"a hat": {0: 1, 2: 1}, "shoes, red": {1: 2, 2: 1}}
        assert as_dict(dataset.test) == {"shared": {0: 1, 2: 1}, "wool scarf": {2: 1}}
        assert dataset.split.model_dump() == {
            "kind": "given",
            "share": 0.0,
            "seed": 0,
            "train_queries": 2,
            "test_queries": 2,
        }

    def test_says_what_it_merged_and_dropped(self, folder):
        report = read_dataset([folder]).report
        notes = "\n".join(report.notes)
        assert "1 training queries are also test queries and were dropped" in notes
        assert "1 lines of labels.txt repeat an earlier label" in notes
        assert "1 lines of labels.txt are empty" in notes
        assert report.skipped == {"the query has no labels": 1}
        assert report.duplicates_merged == 1

    def test_test_queries_never_train(self, folder):
        dataset = read_dataset([folder])
        assert not set(dataset.train.queries.to_pylist()) & set(dataset.test.queries.to_pylist())

    def test_label_out_of_range(self, folder):
        for bad in (6, -1, 3):
            (folder / "trn.jsonl").write_text(
                f'{{"query": "a", "labels": [0]}}\n{{"query": "b", "labels": [{bad}]}}\n'
            )
            with pytest.raises(InputError, match=f"label {bad} is") as caught:
                read_dataset([folder])
            assert caught.value.line == 2
            assert read_dataset([folder], ReadOptions(bad_lines="skip")).report.skipped

    def test_labels_file_is_missing(self, folder):
        (folder / "labels.txt").unlink()
        with pytest.raises(InputError, match=r"labels\.txt: cannot be read"):
            read_dataset([folder])

    def test_labels_as_texts_need_no_list(self, tmp_path):
        (tmp_path / "log").write_text(
            '{"query": "a", "labels": ["Hat", "scarf"]}\n{"query": "b", "labels": ["hat"]}\n'
        )
        log = read_log([tmp_path / "log"])
        assert log.phrases["text"].to_pylist() == ["Hat", "scarf"]
        assert as_dict(log.interactions) == {"a": {0: 1, 1: 1}, "b": {0: 1}}

    def test_training_file_alone_is_split_by_hash(self, folder):
        dataset = read_dataset([folder / "trn.jsonl"])
        assert dataset.split.kind == "by_query_hash"
        assert dataset.phrases["id"].to_pylist() == ["0", "1", "4", "5"]


def test_folder_of_tsv_with_its_own_test_part(tmp_path):
    (tmp_path / "train.tsv").write_text("a\tx\t2\nb\ty\t1\n")
    (tmp_path / "test.tsv").write_text("b\tz\t1\n")
    (tmp_path / "notes.md").write_text("hello")
    dataset = read_dataset([tmp_path])
    assert as_dict(dataset.train) == {"a": {0: 2}}
    assert as_dict(dataset.test) == {"b": {2: 1}}
    assert any("notes.md" in note for note in dataset.report.notes)


def log_of(count):
    clicks = sp.csr_matrix(np.ones((count, 1), dtype=np.float32))
    return Interactions(pa.array([f"query {at}" for at in range(count)], pa.large_string()), clicks)


class TestSplit:
    def test_share_and_disjointness(self):
        kept, held = split_by_query(log_of(20_000), 0.1, 0)
        assert 1800 < len(held) < 2200
        assert len(kept) + len(held) == 20_000
        assert not set(kept.queries.to_pylist()) & set(held.queries.to_pylist())
        assert held.clicks.shape == (len(held), 1)

    def test_a_query_keeps_its_side_in_any_log(self):
        _, held = split_by_query(log_of(2000), 0.2, 5)
        _, held_of_fewer = split_by_query(log_of(1000).take(np.arange(1000)[::-1]), 0.2, 5)
        assert set(held_of_fewer.queries.to_pylist()) == set(held.queries.to_pylist()) & {
            f"query {n}" for n in range(1000)
        }

    def test_a_greater_share_contains_a_smaller_one(self):
        small, large = (split_by_query(log_of(2000), share, 1)[1].queries.to_pylist() for share in (0.1, 0.3))
        assert set(small) < set(large)

    def test_seed_and_salt_change_the_draw(self):
        draws = [
            split_by_query(log_of(2000), 0.2, seed, salt=salt)[1]
            for seed, salt in ((0, "a"), (1, "a"), (0, "b"))
        ]
        sets = [set(draw.queries.to_pylist()) for draw in draws]
        for one in range(3):
            for other in range(one):
                assert 40 < len(sets[one] & sets[other]) < 130

    def test_validation_after_test_takes_its_full_share(self, tmp_path):
        (tmp_path / "log").write_text("".join(f"query {n}\tphrase\n" for n in range(5000)))
        dataset = read_dataset([tmp_path / "log"], ReadOptions(test_share=0.3, split_seed=3))
        assert 0.27 < len(dataset.test) / 5000 < 0.33
        _, validation = split_by_query(dataset.train, 0.3, 3)
        assert 0.26 < len(validation) / len(dataset.train) < 0.34

    def test_share_zero_holds_nothing_out_and_one_query_always_trains(self):
        assert len(split_by_query(log_of(100), 0, 0)[1]) == 0
        for seed in range(20):
            kept, held = split_by_query(log_of(1), 0.99, seed)
            assert (len(kept), len(held)) == (1, 0)


def test_report_lines_say_the_split_and_the_counts(tmp_path):
    (tmp_path / "log").write_text("a\tx\t1000\nA\tx\t234\nb\ty\t0\n")
    dataset = read_dataset([tmp_path / "log"])
    said = "\n".join(report_lines(dataset.report, dataset.split))
    assert "1 queries, 1 phrases, 1 pairs, total weight 1,234" in said
    assert "3 seen, 1 duplicates merged" in said
    assert "left out: 1 row: weight is 0" in said
    assert "by hash of the query, share 0.1, seed 0" in said
