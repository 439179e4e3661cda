"""The ONNX graph computes what torch does, and the quantised one is judged by what it loses."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import onnx
import pytest
import torch

from export.build import ExportOptions, build_bundle
from export.bundle.encoder import TextEncoder, io_problem, make_session
from export.bundle.read import open_bundle
from export.onnx_graph import OPSET, export_onnx
from export.quantise import quantise
from export.vectors import part_cosines, torch_vectors
from trainer.config import TrainConfig
from trainer.encoders.pretrained import load_tokenizer
from trainer.model import new_model

WORDS = [
    "red",
    "steel",
    "10",
    "ft",
    "garden",
    "hose",
    "fan",
    "led",
    "a19",
    "kids'",
    "running-shoes",
    "3/4in.",
    "naïve",
]


def texts_of_all_kinds() -> list[str]:
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=length)) for length in range(1, 13) for _ in range(20)]
    texts += [
        "",
        " ",
        "花园软管 红色",
        "مروحة سقف رخيصة",
        "красные кроссовки",
        "👟🔥",
        "ก็ เสื้อ",
        "x" * 300,
        "a " * 200,
    ]
    return texts


@pytest.fixture(scope="module", params=["bag", pytest.param("transformer", marks=pytest.mark.slow)])
def exported(request, tmp_path_factory):
    torch.manual_seed(0)
    kind = request.param
    config = TrainConfig.model_validate({"encoder": {"kind": kind}, "wide_dim": 96})
    model, _ = new_model(config)
    if kind == "bag":  # it starts as the identity, which would hide a wrong residual block
        torch.nn.init.normal_(model.encoder.residual.weight, std=0.05)
    file = tmp_path_factory.mktemp(kind) / "encoder.onnx"
    export_onnx(model.eval(), file, pairs=2)
    tokenizer = load_tokenizer("minilm-l6", 32, special_tokens=kind == "transformer")
    return model, file, TextEncoder(make_session(file.read_bytes(), threads=1), tokenizer, 64, 96)


def test_cosine_with_torch_for_all_lengths_and_scripts(exported):
    model, _, encoder = exported
    texts = texts_of_all_kinds()
    expected = torch_vectors(model, encoder, texts)
    for batch in (1, 7, 64):
        for torch_s, onnx_s in zip(expected, encoder.encode(texts, batch=batch), strict=True):
            assert onnx_s.dtype == np.float32
            assert np.isfinite(onnx_s).all()
            assert part_cosines(torch_s, onnx_s, onnx_s.shape[1] // 2).min() >= 0.9999


def test_both_halves_have_unit_length(exported):
    _, _, encoder = exported
    narrow, wide = encoder.encode(texts_of_all_kinds())
    for half in (*np.split(narrow, 2, axis=1), *np.split(wide, 2, axis=1)):
        assert np.allclose(np.linalg.norm(half, axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (5, 32), (33, 3)])
def test_any_number_of_rows_and_tokens_and_rows_without_tokens(exported, shape):
    _, _, encoder = exported
    ids = np.random.default_rng(0).integers(1, 30000, shape)
    mask = np.ones(shape, dtype=np.int64)
    mask[-1] = 0
    vectors = encoder.run(ids, mask)
    assert vectors.narrow.shape == (shape[0], 64)
    assert vectors.wide.shape == (shape[0], 96)
    assert np.isfinite(np.concatenate(vectors, axis=1)).all()


def test_padding_changes_nothing(exported):
    _, _, encoder = exported
    ids, mask = encoder.tokenise(["garden hose"])
    wide_ids, wide_mask = (np.pad(array, ((0, 0), (0, 9))) for array in (ids, mask))
    wide_ids[0, -3:] = 2000
    for one, other in zip(encoder.run(ids, mask), encoder.run(wide_ids, wide_mask), strict=True):
        assert part_cosines(one, other, one.shape[1] // 2)[0] > 0.99999


def test_the_graph_is_valid_named_and_free_of_traces(exported):
    _, file, _ = exported
    graph = onnx.load(str(file))
    onnx.checker.check_model(graph, full_check=True)
    assert io_problem(make_session(file.read_bytes(), threads=1), 64, 96) is None
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", OPSET)]
    for weights in graph.graph.initializer:
        weights.raw_data = b""
    text = graph.SerializeToString()
    assert b"site-packages" not in text
    assert b".py" not in text
    assert b"torch.export" not in text


def test_the_same_model_gives_the_same_bytes(small_source, tmp_path):
    for name in ("one.onnx", "two.onnx"):
        export_onnx(small_source.model, tmp_path / name)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


def test_eight_bits_stay_near_and_take_a_quarter_of_the_room(exported, tmp_path):
    model, file, encoder = exported
    products = "TransformerEncoder" in type(model.encoder).__name__
    operators = quantise(file, tmp_path / "int8.onnx", products=products)
    assert operators == (["Gather", "MatMul"] if products else ["Gather"])
    assert (tmp_path / "int8.onnx").stat().st_size < file.stat().st_size / 3.5
    small = TextEncoder(
        make_session((tmp_path / "int8.onnx").read_bytes(), threads=1), encoder._tokenizer, 64, 96
    )
    texts = texts_of_all_kinds()
    for fp32, int8 in zip(encoder.encode(texts), small.encode(texts), strict=True):
        assert np.isfinite(int8).all()
        assert part_cosines(fp32, int8, fp32.shape[1] // 2).mean() > (0.97 if products else 0.9999)


def _export(source, out, **options):
    manifest = build_bundle(source, out, ExportOptions(threads=1, **options))
    with open_bundle(out) as bundle:
        assert bundle.manifest == manifest
    return manifest


def with_an_outlier(source):
    """A model that reads its words from small differences beside a huge constant, which 8 bits don't keep.

    The heads do not look at the constant's dimension, so that fp32 answers as before.
    """
    import copy

    model = copy.deepcopy(source.model)
    with torch.no_grad():
        model.encoder.words.weight[:, 0] = 1e3
        for pair in model.heads:
            for head in (pair.g1[0], pair.g2[0]):
                head.weight[:, 0] = 0
    return dataclasses.replace(source, model=model)


def test_a_quantised_encoder_that_loses_too_much_is_refused_aloud(small_source, tmp_path, capsys):
    manifest = _export(with_an_outlier(small_source), tmp_path / "b", quality_bound=0.5)
    assert manifest.encoder.precision == "fp32"
    assert not (tmp_path / "b" / "encoder.int8.onnx").exists()
    fp32, int8 = manifest.encoder.candidates
    assert (fp32.chosen, int8.chosen) == (True, False)
    assert max(int8.loss.values()) > 0.5
    assert int8.quality["P@1"] == pytest.approx(fp32.quality["P@1"] - int8.loss["P@1"], abs=1e-3)
    said = capsys.readouterr().err
    assert "int8 encoder NOT chosen" in said
    assert "more than the bound of 0.5" in said


def test_the_same_loss_is_taken_under_a_bound_that_allows_it(small_source, tmp_path, capsys):
    manifest = _export(with_an_outlier(small_source), tmp_path / "b", quality_bound=100)
    assert manifest.encoder.precision == "int8"
    assert manifest.encoder.file == "encoder.int8.onnx"
    assert max(manifest.encoder.candidates[1].loss.values()) > 0.5
    assert "int8 encoder chosen" in capsys.readouterr().err


def test_without_validation_queries_fp32_serves_and_phrases_measure_the_index(small_source, tmp_path, capsys):
    none = small_source.validation.take(np.zeros(0, dtype=np.int64))
    manifest = _export(dataclasses.replace(small_source, validation=none), tmp_path / "b")
    assert manifest.encoder.precision == "fp32"
    assert manifest.index.query_source == "phrases"
    assert manifest.quality.queries == 0
    assert "cannot be judged" in capsys.readouterr().err


def test_label_vectors_are_phi_d_and_the_normalised_table(small_source, small_bundle):
    with open_bundle(small_bundle) as bundle:
        vectors = np.array(bundle.vectors)
        texts = bundle.phrases["text"].to_pylist()
        encoder = TextEncoder(
            make_session(bundle.read_bytes("encoder.onnx"), threads=1), small_source.tokenizer, 32
        )
    assert np.allclose(
        vectors[:, :16], torch_vectors(small_source.model, encoder, texts).narrow[:, :16], atol=1e-5
    )
    table = small_source.table / np.linalg.norm(small_source.table, axis=1, keepdims=True)
    assert np.allclose(vectors[:, 16:], table, atol=1e-6)
