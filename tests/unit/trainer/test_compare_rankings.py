from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp

from bidmatch.base.errors import InputError
from trainer.compare.rankings import measure_ranking, read_ranking
from trainer.data.dataset import Dataset, Interactions, SplitRecord

QUERIES, LABELS = 4, 6


def saved(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_a_ranking_is_read_whatever_its_integers(tmp_path):
    topk = np.array([[0, 5], [1, -1], [-1, -1], [3, 2]], dtype=np.int32)
    found = read_ranking(saved(tmp_path / "a.npz", topk=topk, seconds=2.5), QUERIES, LABELS)
    assert found.topk.dtype == np.int64
    assert np.array_equal(found.topk, topk)
    assert found.seconds == 2.5
    assert read_ranking(saved(tmp_path / "b.npz", topk=topk), QUERIES, LABELS).seconds is None


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"best": np.zeros((QUERIES, 1), int)}, "no array `topk`"),
        ({"topk": np.zeros((QUERIES + 1, 1), int)}, "4 held-out queries"),
        ({"topk": np.zeros(QUERIES, int)}, "whole numbers"),
        ({"topk": np.zeros((QUERIES, 1))}, "whole numbers"),
        ({"topk": np.full((QUERIES, 1), LABELS)}, "0 to 5"),
        ({"topk": np.full((QUERIES, 1), -2)}, "0 to 5"),
        ({"topk": np.full((QUERIES, 1), 2**64 - 1, np.uint64)}, "from 18446744073709551615"),
        ({"topk": np.array([[0], [1], [2], [2**63]], np.uint64)}, "0 to 5"),
        ({"topk": np.array([[0, 1], [2, 2], [0, 1], [0, 1]])}, "query 1 hold a phrase twice"),
        ({"topk": np.array([["a"]] * QUERIES, dtype=object)}, "can't be read"),
        ({"topk": np.zeros((QUERIES, 1), int), "seconds": np.array(-1.0)}, "seconds"),
        ({"topk": np.zeros((QUERIES, 1), int), "seconds": np.array(["soon"])}, "`seconds` is <U4"),
    ],
)
def test_what_is_no_ranking_says_why(tmp_path, arrays, reason):
    file = saved(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(InputError, match=reason) as caught:
        read_ranking(file, QUERIES, LABELS)
    assert "wrong.npz" in str(caught.value)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "plain.npy", np.zeros((QUERIES, 1), int))
    with zipfile.ZipFile(tmp_path / "cut.npz", "w") as archive:
        whole = io.BytesIO()
        np.save(whole, np.zeros((QUERIES, 4), int))
        archive.writestr("topk.npy", whole.getvalue()[:90])
    for name in ("text.npz", "plain.npy", "cut.npz", "missing.npz"):
        with pytest.raises(InputError, match=name):
            read_ranking(tmp_path / name, QUERIES, LABELS)


def test_damage_anywhere_in_an_archive_names_the_file(tmp_path):
    topk = np.tile(np.random.default_rng(0).permutation(LABELS), (QUERIES, 1))
    np.savez_compressed(tmp_path / "whole.npz", topk=topk, seconds=1.0)
    whole = (tmp_path / "whole.npz").read_bytes()
    file = tmp_path / "damaged.npz"
    refused = []
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        # Some bytes say nothing of the content, such as times.
        with contextlib.suppress(InputError):
            read_ranking(file, QUERIES, LABELS)
            continue
        refused.append(at)
    assert len(refused) > len(whole) / 2
    member = whole.index(b"topk.npy") + len("topk.npy") + 20
    file.write_bytes(whole[:member] + b"\xff\xff\xff" + whole[member + 3 :])
    with pytest.raises(InputError, match=r"damaged\.npz: can't be read"):
        read_ranking(file, QUERIES, LABELS)


def test_an_array_larger_than_memory_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 60, 4)}
    )
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("topk.npy", header.getvalue())
    with pytest.raises(InputError, match=r"huge\.npz"):
        read_ranking(tmp_path / "huge.npz", QUERIES, LABELS)


def test_a_folder_is_no_ranking(tmp_path):
    with pytest.raises(InputError, match="Is a directory"):
        read_ranking(tmp_path, QUERIES, LABELS)


def test_a_ranking_is_measured_by_the_whole_training_part():
    def part(rows: list[list[int]]) -> Interactions:
        matrix = sp.csr_matrix((len(rows), LABELS), dtype=np.float32).tolil()
        for at, labels in enumerate(rows):
            matrix[at, labels] = 1.0
        texts = pa.array([f"q{at}" for at in range(len(rows))], pa.large_string())
        return Interactions(texts, matrix.tocsr())

    train = part([[0]] * 12 + [[1]])
    test = part([[0], [1], [1, 2], [5]])
    phrases = pa.table({"id": [str(at) for at in range(LABELS)], "text": [f"p{at}" for at in range(LABELS)]})
    dataset = Dataset(phrases, train, test, SplitRecord(kind="given"))
    found = measure_ranking(np.array([[0, 1], [1, 0], [2, 1], [0, 4]]), dataset, 0.55, 1.5)
    assert found["all"]["P@1"] == 75.0
    assert found["all"]["recall@10"] == 75.0
    assert found["torso"]["P@1"] == 100.0
    assert found["torso"]["queries"] == 1
    assert found["tail"]["queries"] == 3
    assert found["head"]["queries"] == 0
