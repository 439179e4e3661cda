"""Damaged bundles are refused with a reason, and none reaches a parser that it could crash."""

from __future__ import annotations

import os
import random
import shutil

import numpy as np
import pyarrow as pa
import pytest

from bidmatch.base.errors import DamagedError
from export.bundle.encoder import QueryEncoder
from export.bundle.index import PhraseIndex
from export.bundle.lookup import lookup_tables
from export.bundle.read import open_bundle

FILES = (
    "manifest.json",
    "encoder.onnx",
    "encoder.int8.onnx",
    "tokenizer.json",
    "links.npy",
    "upper.npy",
    "codes.npy",
    "steps.npy",
    "vectors.npy",
    "phrases.arrow",
    "ids.npy",
    "keys.npy",
    "runs.npy",
)


def load(path):
    """All that a service loads."""
    bundle = open_bundle(path)
    return QueryEncoder(bundle), PhraseIndex(bundle)


def refused(path) -> str:
    """The reason for which a bundle is refused."""
    with pytest.raises(DamagedError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_a_resealed_but_unchanged_copy_is_sound(bundle_copy):
    bundle_copy.reseal()
    with open_bundle(bundle_copy.path) as bundle:
        assert QueryEncoder(bundle).encode(["red garden hose"]).narrow.shape == (1, 32)
        assert PhraseIndex(bundle).count == 54


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte(bundle_copy, name, seed):
    file = bundle_copy.path / name
    raw = bytearray(file.read_bytes())
    chance = random.Random(f"{name} {seed}")
    # The first bytes are headers, which parsers trust most.
    at = seed if seed < 4 else chance.randrange(len(raw))
    raw[at] ^= chance.randrange(1, 256)
    file.write_bytes(raw)
    assert name in refused(bundle_copy.path)


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file(bundle_copy, name, seed):
    size = (bundle_copy.path / name).stat().st_size
    keep = {0: 0, 1: 1, 2: size - 1}.get(seed, random.Random(f"{name} {seed}").randrange(size))
    os.truncate(bundle_copy.path / name, keep)
    assert name in refused(bundle_copy.path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(bundle_copy, name):
    (bundle_copy.path / name).unlink()
    assert name in refused(bundle_copy.path)


@pytest.mark.parametrize("name", FILES)
def test_a_longer_file(bundle_copy, name):
    with (bundle_copy.path / name).open("ab") as stream:
        stream.write(b"\0")
    assert name in refused(bundle_copy.path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("links.npy", "vectors.npy"),
        ("encoder.onnx", "encoder.int8.onnx"),
        ("tokenizer.json", "manifest.json"),
        ("phrases.arrow", "links.npy"),
        ("encoder.onnx", "codes.npy"),
    ],
)
def test_swapped_files(bundle_copy, one, other):
    a, b = bundle_copy.path / one, bundle_copy.path / other
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    refused(bundle_copy.path)


@pytest.mark.parametrize(
    "name",
    [name for name in FILES if name not in ("manifest.json", "encoder.int8.onnx", "runs.npy")],
)
def test_another_files_bytes_with_a_manifest_made_to_fit(bundle_copy, name):
    """No digest gives it away, so each file must be checked for what it is."""
    other = {"links.npy": "vectors.npy", "encoder.onnx": "tokenizer.json", "tokenizer.json": "encoder.onnx"}
    shutil.copy(bundle_copy.path / other.get(name, "links.npy"), bundle_copy.path / name)

    def serve_fp32(manifest):
        manifest["encoder"].update(file="encoder.onnx", precision="fp32")

    (bundle_copy.path / "encoder.int8.onnx").unlink()
    bundle_copy.reseal(serve_fp32)
    assert name in refused(bundle_copy.path)


def _set(path, value):
    def change(manifest):
        *parents, last = path.split(".")
        target = manifest
        for parent in parents:
            target = target[parent]
        target[last] = value

    return change


def _delete(path):
    def change(manifest):
        *parents, last = path.split(".")
        target = manifest
        for parent in parents:
            target = target[parent]
        del target[last]

    return change


WRONG_VALUES = [
    ("dim", 64),
    ("dim", 16),
    ("dim", 33),
    ("dim", 0),
    ("dim", -32),
    ("dim", "32"),
    ("dim", 2**62),
    ("counts.phrases", 53),
    ("counts.phrases", 55),
    ("counts.phrases", 2**40),
    ("index.M", 8),
    ("index.M", 0),
    ("index.ef", 0),
    ("index.k", 55),
    ("metric", "l2"),
    ("bundle_id", "not hex"),
    ("encoder.file", "../encoder.onnx"),
    ("encoder.precision", "fp32"),
    ("encoder.precision", "int4"),
    ("files", {}),
    ("files", []),
    ("unknown", 1),
    ("encoder.unknown", 1),
    ("quality.exact.P@1", "high"),
]


@pytest.mark.parametrize(("path", "value"), WRONG_VALUES)
def test_a_wrong_value_under_a_checksum_made_to_fit(bundle_copy, path, value):
    bundle_copy.reseal(_set(path, value))
    refused(bundle_copy.path)


@pytest.mark.parametrize(
    "path",
    [
        "format_version",
        "bundle_id",
        "dim",
        "files",
        "checksum",
        "counts.phrases",
        "encoder.parity",
        "index.curve",
    ],
)
def test_a_missing_field_under_a_checksum_made_to_fit(bundle_copy, path):
    bundle_copy.reseal(_delete(path))
    assert path.rpartition(".")[2] in refused(bundle_copy.path)


@pytest.mark.parametrize(
    "path", ["created", "quality.exact.P@1", "index.ef", "counts.test_queries", "encoder.opset"]
)
def test_a_changed_value_without_its_checksum(bundle_copy, path):
    file = bundle_copy.path / "manifest.json"
    text = file.read_text()
    key = path.rpartition(".")[2]
    at = text.index(f'"{key}": ') + len(f'"{key}": ')
    digit = next(i for i in range(at, len(text)) if text[i].isdigit())
    file.write_text(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    assert "manifest.json was altered" in refused(bundle_copy.path)


@pytest.mark.parametrize("version", [0, 1, 99])
def test_another_format_version_is_named_as_such(bundle_copy, version):
    bundle_copy.reseal(_set("format_version", version))
    message = refused(bundle_copy.path)
    assert f"format {version}" in message
    assert "Install the bidmatch that wrote it" in message


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "sub/file", "..", "", "encoder2.onnx", "manifest.json"]
)
def test_a_file_name_that_no_bundle_has(bundle_copy, name):
    bundle_copy.reseal(lambda manifest: manifest["files"].update({name: {"sha256": "0" * 64, "bytes": 3}}))
    assert "there should be" in refused(bundle_copy.path)


@pytest.mark.parametrize(
    "raw", [b"", b"null", b"[]", b"{}", b'"x"', b"\xff\xfe", b"{" * 100_000, b"[" * 100_000]
)
def test_a_manifest_that_is_none(bundle_copy, raw):
    (bundle_copy.path / "manifest.json").write_bytes(raw)
    assert "manifest.json" in refused(bundle_copy.path)


def test_a_file_too_many(bundle_copy):
    (bundle_copy.path / "notes.txt").write_text("hello")
    assert "notes.txt does not belong" in refused(bundle_copy.path)


@pytest.mark.parametrize("name", FILES)
def test_a_link_instead_of_a_file(bundle_copy, tmp_path, name):
    file = bundle_copy.path / name
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert f"{name} is a link" in refused(bundle_copy.path)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_instead_of_a_file(bundle_copy, name):
    (bundle_copy.path / name).unlink()
    (bundle_copy.path / name).mkdir()
    assert f"{name} is no regular file" in refused(bundle_copy.path)


def test_a_pipe_instead_of_a_file(bundle_copy):
    (bundle_copy.path / "vectors.npy").unlink()
    os.mkfifo(bundle_copy.path / "vectors.npy")
    assert "vectors.npy is no regular file" in refused(bundle_copy.path)


def test_no_folder_an_empty_one_a_file_and_a_leftover(bundle_copy, tmp_path):
    assert "no such folder" in refused(tmp_path / "absent")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(DamagedError, match="the folder of a training run") as raised:
        open_bundle(tmp_path / "run")
    assert f"bidmatch export --checkpoint {tmp_path / 'run'}" in str(raised.value.hint)
    (tmp_path / "empty").mkdir()
    assert "manifest.json" in refused(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    assert "it is no folder" in refused(tmp_path / "file")
    left = bundle_copy.path.rename(tmp_path / ".bundle.1234abcd.partial")
    assert "never finished" in refused(left)


def test_a_link_to_a_whole_bundle_is_fine(bundle_copy, tmp_path):
    (tmp_path / "current").symlink_to(bundle_copy.path)
    with open_bundle(tmp_path / "current") as bundle:
        assert bundle.phrases.num_rows == 54


def _vectors(bundle_copy):
    return np.load(bundle_copy.path / "vectors.npy")


def test_vectors_of_another_shape_type_or_order(bundle_copy):
    good = _vectors(bundle_copy)
    bad = good.copy()
    bad[7, 3] = np.nan
    for vectors, reason in (
        (good[:, :16], "holds float32 (54, 16)"),
        (good[:53], "holds float32 (53, 32)"),
        (good.astype(np.float64), "holds float64"),
        (np.asfortranarray(good), "vectors.npy holds"),
        (bad, "no numbers"),
        (np.array([["a"]], dtype=object), "holds object"),
    ):
        np.save(bundle_copy.path / "vectors.npy", vectors, allow_pickle=True)
        bundle_copy.reseal()
        assert reason in refused(bundle_copy.path)


def test_vectors_of_another_model(bundle_copy):
    np.save(bundle_copy.path / "vectors.npy", _vectors(bundle_copy)[::-1].copy())
    bundle_copy.reseal()
    assert "is not of the vectors" in refused(bundle_copy.path)


def _phrases(bundle_copy, table):
    with (
        pa.OSFile(str(bundle_copy.path / "phrases.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as out,
    ):
        out.write_table(table)
    bundle_copy.reseal()


def test_phrases_of_another_schema(bundle_copy):
    good = pa.ipc.open_file((bundle_copy.path / "phrases.arrow").read_bytes()).read_all()
    ids = good["id"].to_pylist()
    texts = pa.array(good["text"].to_pylist())
    for table, reason in (
        (good.set_column(1, "text", texts), "no string column 'text'"),
        (pa.concat_tables([good.slice(0, 20), good.slice(20)]), "not in one piece"),
        (good.drop_columns(["id"]), "no string column 'id'"),
        (good.set_column(1, "text", pa.array(range(54))), "no string column 'text'"),
        (good.slice(1), "has 53 rows"),
        (
            good.set_column(0, "id", pa.array(["p0", *ids[:-1]], pa.large_string())),
            "ids.npy is not of the phrases",
        ),
        (good.set_column(0, "id", pa.array([None, *ids[1:]], pa.large_string())), "empty values in 'id'"),
        (good.append_column("text", good["text"]), "two columns of one name"),
    ):
        _phrases(bundle_copy, table)
        assert reason in refused(bundle_copy.path)


def test_two_phrases_of_one_id_with_tables_made_to_fit(bundle_copy):
    good = pa.ipc.open_file((bundle_copy.path / "phrases.arrow").read_bytes()).read_all()
    ids = good["id"].to_pylist()
    twice = good.set_column(0, "id", pa.array([ids[1], *ids[1:]], pa.large_string()))
    for name, table in zip(("ids", "keys", "runs"), lookup_tables(twice), strict=True):
        np.save(bundle_copy.path / f"{name}.npy", table)
    _phrases(bundle_copy, twice)
    assert "two phrases with one id" in refused(bundle_copy.path)


def _short(array):
    return array[:-1]


def _with(place, value):
    def change(array):
        changed = array.copy()
        changed[place] = value
        return changed

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("links.npy", _short),
        ("links.npy", lambda array: array[:, :-1]),
        ("links.npy", lambda array: array.astype(np.int64)),
        ("links.npy", _with((0, 0), 2**32 - 1)),
        ("upper.npy", lambda array: array[:, :-1]),
        ("upper.npy", _with((0, 0), 2**31)),
        ("upper.npy", _with((-1, 0), 10**6)),
        ("codes.npy", _short),
        ("codes.npy", lambda array: array[::-1]),
        ("codes.npy", _with((0, 0), 127)),
        ("steps.npy", lambda array: array[:, :-1]),
        ("steps.npy", _with((0, 3), np.nan)),
        ("steps.npy", _with((0, 3), -1)),
        ("steps.npy", lambda array: 2 * array),
        ("vectors.npy", lambda array: -array),
    ],
)
def test_an_index_with_a_manifest_made_to_fit(bundle_copy, name, change):
    file = bundle_copy.path / name
    np.save(file, np.ascontiguousarray(change(np.load(file))))
    bundle_copy.reseal()
    found = refused(bundle_copy.path)
    assert any(word in found for word in ("links.npy", "upper.npy", "codes.npy", "steps.npy"))


@pytest.mark.parametrize("seed", range(5))
def test_links_to_anywhere_with_a_manifest_made_to_fit(bundle_copy, seed):
    """What is not refused must be searched safely: by any numbers, and in a graph that goes round."""
    rng = np.random.default_rng(seed)
    for name in ("links.npy", "upper.npy"):
        file = bundle_copy.path / name
        array = np.load(file)
        first = 1 if name == "upper.npy" else 0
        some = rng.random(array.shape) < 0.3
        some[:, :first] = False
        array[some] = rng.integers(0, 2**32, some.sum(), dtype=np.uint32)
        np.save(file, array)
    bundle_copy.reseal()
    try:
        bundle = open_bundle(bundle_copy.path)
    except DamagedError:
        return
    with bundle:
        index = PhraseIndex(bundle)
        queries = np.asarray(bundle.vectors[:50])
        found = index.search(queries, 10)
        assert (found.rows >= 0).all()
        assert (found.rows < index.count).all()


def test_an_encoder_of_another_width_or_with_other_inputs(bundle_copy):
    import onnx
    from onnx import TensorProto, helper

    def make(width, names=("input_ids", "attention_mask"), output="embedding"):
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"]) for name in names]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", width])]
        value = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.5])
        nodes = [
            helper.make_node("Shape", [names[0]], ["rows"], start=0, end=1),
            helper.make_node("Concat", ["rows", "width"], ["shape"], axis=0),
            helper.make_node("ConstantOfShape", ["shape"], [output], value=value),
        ]
        start = [helper.make_tensor("width", TensorProto.INT64, [1], [width])]
        graph = helper.make_graph(nodes, "g", inputs, outputs, start)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)

    for model, reason in (
        (make(16), "not embedding of width 32"),
        (make(32, ("ids", "mask")), "its inputs are"),
        (make(32, output="vector"), "its output is"),
    ):
        onnx.save(model, str(bundle_copy.path / "encoder.int8.onnx"))
        bundle_copy.reseal()
        assert reason in refused(bundle_copy.path)
    onnx.save(make(32), str(bundle_copy.path / "encoder.int8.onnx"))
    bundle_copy.reseal()
    with open_bundle(bundle_copy.path) as bundle:
        assert QueryEncoder(bundle).encode(["x"]).narrow.shape == (1, 32)


def test_a_file_changed_between_verification_and_loading(bundle_copy):
    with open_bundle(bundle_copy.path) as bundle:
        for name in ("encoder.int8.onnx", "links.npy"):
            file = bundle_copy.path / name
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 1
            with file.open("r+b") as stream:
                stream.write(raw)
            os.utime(file, ns=(1, 1))
        with pytest.raises(DamagedError, match="changed after"):
            QueryEncoder(bundle)
        with pytest.raises(DamagedError, match="changed after"):
            PhraseIndex(bundle)


def test_a_bundle_replaced_between_verification_and_loading_is_loaded_as_verified(bundle_copy):
    with open_bundle(bundle_copy.path) as bundle:
        shutil.rmtree(bundle_copy.path)
        vectors = QueryEncoder(bundle).encode(["red garden hose"]).narrow
        rows = PhraseIndex(bundle).search(vectors, 1).rows
        assert bundle.phrases["text"][int(rows[0, 0])].as_py() == "red garden hose"
