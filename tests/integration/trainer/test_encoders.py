"""Encoders as a configuration makes them: rebuilt, joined, frozen and cached, trained, exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch

from export.onnx_graph import export_onnx
from trainer.checkpoint import load_run
from trainer.config import EncoderConfig
from trainer.corpus import TextSource, cached_source, token_source
from trainer.data.options import ReadOptions
from trainer.data.read import read_dataset
from trainer.encoders.base import Encoder, Frozen, TextBatch
from trainer.encoders.build import empty_encoder, new_encoder, uses_special_tokens
from trainer.encoders.pretrained import load_tokenizer
from trainer.gandalf.source import JoinedSource
from trainer.model import DualHeadModel
from trainer.run import run_training
from trainer.settings import make_config
from trainer.tokenise import tokenise_all

CPU = torch.device("cpu")
TEXTS = ["red garden hose", "blue shoes near me", "", "cordless drill", "buy cheap ceiling fan online"]
KINDS = ("bag", "inception", "transformer", "combined")


def config_of(path: Path, kind: str, **settings: object) -> EncoderConfig:
    changes = [f"encoder.{name}={value}" for name, value in settings.items()]
    return make_config("bag", [f"encoder.kind={kind}", f"encoder.pretrained={path}", *changes]).encoder


def batch_of(config: EncoderConfig, texts: list[str] = TEXTS) -> TextBatch:
    tokenizer = load_tokenizer(config.pretrained, 16, special_tokens=uses_special_tokens(config))
    tokens = tokenise_all(tokenizer, pa.array(texts, pa.large_string()), "texts")
    return TextBatch(*(torch.from_numpy(part) for part in tokens.pad(np.arange(len(texts)))))


def made(config: EncoderConfig) -> Encoder:
    torch.manual_seed(0)
    encoder, _ = new_encoder(config)
    for name, parameter in encoder.named_parameters():
        if "residual" in name or "projection" in name:  # zero at first, and then nothing of it would show
            torch.nn.init.normal_(parameter, std=0.3)
    return encoder.eval()


@pytest.mark.parametrize("model", ["bert", "distilbert"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_encoder_takes_a_trained_one_s_weights(tiny_encoders, kind, model):
    config = config_of(getattr(tiny_encoders, model), kind)
    torch.manual_seed(0)
    encoder, architecture = new_encoder(config)
    again = empty_encoder(config, architecture)
    again.load_state_dict(encoder.state_dict())
    texts = batch_of(config)
    with torch.no_grad():
        phi = encoder.eval()(texts.ids, texts.mask)
        assert phi.shape == (len(TEXTS), encoder.width) == (len(TEXTS), again.width)
        assert torch.equal(again.eval()(texts.ids, texts.mask), phi)
    assert again.frozen is encoder.frozen


@pytest.mark.parametrize("frozen", [-1, 0, 1])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_combined_is_the_bag_beside_the_transformer(tiny_encoders, frozen, pooling):
    path = tiny_encoders.bert
    config = config_of(path, "combined", frozen_layers=frozen, pooling=pooling)
    encoder, texts = made(config), batch_of(config)
    bag_config = config_of(path, "bag")
    bag, words = made(bag_config), batch_of(bag_config)
    bag.load_state_dict(encoder.bag.state_dict())
    transformer = made(config_of(path, "transformer", pooling=pooling))
    with torch.no_grad():
        alone = torch.cat(
            [
                bag(words.ids, words.mask),
                torch.nn.functional.normalize(transformer(texts.ids, texts.mask), dim=1),
            ],
            dim=1,
        )
        assert torch.allclose(encoder(texts.ids, texts.mask), alone, atol=1e-5)
        assert torch.allclose(encoder.encode(texts), alone, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_company_change_nothing(tiny_encoders, kind):
    config = config_of(tiny_encoders.bert, kind)
    encoder, texts = made(config), batch_of(config)
    ids, mask = (torch.nn.functional.pad(part, (0, 5)) for part in (texts.ids, texts.mask))
    with torch.no_grad():
        phi = encoder(texts.ids, texts.mask)
        assert torch.allclose(encoder(ids, mask), phi, atol=1e-5)
        for row, text in enumerate(TEXTS):
            one = batch_of(config, [text])
            assert torch.allclose(encoder(one.ids, one.mask)[0], phi[row], atol=1e-5)


CACHED = [
    ("bag", {}, Frozen.NOTHING),
    ("inception", {}, Frozen.NOTHING),
    ("transformer", {"frozen_layers": 0}, Frozen.NOTHING),
    ("transformer", {"frozen_layers": 1}, Frozen.LAYERS),
    ("transformer", {"frozen_layers": 2}, Frozen.WHOLE),
    ("combined", {"frozen_layers": 0}, Frozen.NOTHING),
    ("combined", {"frozen_layers": 1}, Frozen.LAYERS),
    ("combined", {"frozen_layers": 2}, Frozen.WHOLE),
    ("combined", {"frozen_layers": -1}, Frozen.WHOLE),
    ("combined", {"frozen_layers": -1, "pooling": "cls"}, Frozen.WHOLE),
]


@pytest.mark.parametrize(("kind", "settings", "frozen"), CACHED)
@pytest.mark.parametrize("model", ["bert", "distilbert"])
def test_what_is_cached_equals_what_is_not(tiny_encoders, tmp_path, model, kind, settings, frozen):
    config = config_of(getattr(tiny_encoders, model), kind, **settings)
    encoder = made(config)
    assert encoder.frozen is frozen
    tokenizer = load_tokenizer(config.pretrained, 16, special_tokens=uses_special_tokens(config))
    plain = token_source(tokenizer, pa.array(TEXTS, type=pa.large_string()), "texts")
    cached = cached_source(encoder, plain, tmp_path / "cache" / "texts.f16", CPU, "texts")
    assert (cached is plain) is (frozen is Frozen.NOTHING)
    joined = JoinedSource(cached, cached, np.array([4, 0, 2]))
    rows = np.array([3, 0, 4, 2, 0])
    sources: list[tuple[TextSource, np.ndarray]] = [(cached, rows), (joined, np.array([3, 6, 5, 7, 0]))]
    with torch.no_grad():
        expected = encoder.encode(plain.batch(rows, CPU))
        for source, taken in sources:
            batch = source.batch(taken, CPU)
            assert (batch.hidden is not None) is (frozen is Frozen.LAYERS)
            assert (batch.pooled is not None) is (frozen is Frozen.WHOLE)
            assert torch.allclose(encoder.encode(batch), expected, atol=5e-3)


def test_the_cache_of_a_frozen_whole_is_what_counts(tiny_encoders, tmp_path):
    config = config_of(tiny_encoders.bert, "combined")
    encoder = made(config)
    tokenizer = load_tokenizer(config.pretrained, 16, special_tokens=True)
    plain = token_source(tokenizer, pa.array(TEXTS, type=pa.large_string()), "texts")
    file = tmp_path / "texts.f16"
    cached = cached_source(encoder, plain, file, CPU, "texts")
    assert file.stat().st_size == len(TEXTS) * encoder.transformer.width * 2
    with torch.no_grad():
        before = encoder.encode(cached.batch(np.arange(len(TEXTS)), CPU))
        for parameter in encoder.transformer.parameters():
            parameter.zero_()
        assert torch.equal(encoder.encode(cached.batch(np.arange(len(TEXTS)), CPU)), before)


def test_nothing_is_cached_of_no_texts(tiny_encoders, tmp_path):
    config = config_of(tiny_encoders.bert, "combined")
    encoder = made(config)
    tokenizer = load_tokenizer(config.pretrained, 16, special_tokens=True)
    none = token_source(tokenizer, pa.array([], type=pa.large_string()), "texts")
    assert cached_source(encoder, none, tmp_path / "texts.f16", CPU, "texts") is none


@pytest.mark.parametrize(
    ("kind", "settings", "frozen"),
    [case for case in CACHED if (case[0], case[2]) != ("transformer", Frozen.WHOLE)],
)
def test_gradients_reach_all_that_trains_and_nothing_else(tiny_encoders, kind, settings, frozen):
    config = config_of(tiny_encoders.bert, kind, **settings)
    encoder, texts = made(config).train(), batch_of(config)
    goal = torch.randn(len(TEXTS), encoder.width, generator=torch.Generator().manual_seed(2))
    (encoder.encode(texts) - goal).square().sum().backward()
    reached = {
        name
        for name, parameter in encoder.named_parameters()
        if parameter.grad is not None and parameter.grad.to_dense().abs().max() > 1e-9
    }
    # A bias of all keys moves no attention weight, and positions that no text has are not looked up.
    trains = {
        name for name, value in encoder.named_parameters() if value.requires_grad and "key.bias" not in name
    }
    assert trains <= reached
    assert all(value.grad is None for value in encoder.parameters() if not value.requires_grad)
    if kind == "combined":
        assert any(name.startswith("bag.words") for name in trains)
        assert any(name.startswith("transformer.") for name in trains) is (frozen is not Frozen.WHOLE)


@pytest.mark.parametrize("frozen", [-1, 2])
def test_what_is_frozen_runs_without_dropout_in_training(tiny_encoders, frozen):
    config = config_of(tiny_encoders.bert, "combined", frozen_layers=frozen)
    encoder, texts = made(config), batch_of(config)
    before = encoder.encode(texts)
    assert torch.equal(encoder.train().encode(texts), before)
    whole = made(config_of(tiny_encoders.bert, "combined", frozen_layers=0))
    assert not torch.equal(whole.encode(texts), whole.train().encode(texts))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("inception", {"encoder.filters": 32}),
        ("inception", {"encoder.widths": "[2, 5]", "encoder.word_dropout": 0.1}),
        ("combined", {}),
        ("combined", {"encoder.frozen_layers": 1}),
        ("combined", {"encoder.frozen_layers": 0, "gandalf.enabled": "true"}),
        ("combined", {"gandalf.enabled": "true"}),
    ],
)
def test_each_learns_and_a_run_is_read_again(click_log, small_settings, tmp_path, kind, settings):
    changes = {**small_settings, "encoder.kind": kind, "precision": "fp32", **settings}
    config = make_config("bag", [f"{name}={value}" for name, value in changes.items()])
    dataset = read_dataset([click_log], ReadOptions(test_share=0.2))
    report = run_training(dataset, config, tmp_path / "run")
    losses = [record["loss"]["total"] for record in report["history"]]
    assert losses[-1] < 0.9 * losses[0]
    assert not (tmp_path / "run" / "cache").exists()
    loaded = load_run(tmp_path / "run")
    texts = batch_of(config.encoder)
    for vectors in loaded.model.query_vectors(texts.ids, texts.mask):
        assert torch.isfinite(vectors).all()


EXPORTED = [
    ("inception", {}),
    ("inception", {"widths": "[4]", "filters": 5}),
    ("combined", {"frozen_layers": 0}),
    ("combined", {"pooling": "cls"}),
]


@pytest.mark.parametrize(("kind", "settings"), EXPORTED)
def test_the_exported_graph_gives_the_same_vectors_for_any_number_and_length_of_texts(
    tiny_encoders, tmp_path, kind, settings
):
    config = config_of(tiny_encoders.bert, kind, **settings)
    model = DualHeadModel(made(config), [(8, 8)], 0.0).eval()
    export_onnx(model, tmp_path / "encoder.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx", providers=["CPUExecutionProvider"])
    (opset,) = [entry.version for entry in _opsets(tmp_path / "encoder.onnx") if not entry.domain]
    assert opset == 20
    for texts in (TEXTS, TEXTS[:1], [""], ["hose"], TEXTS * 7, ["garden hose " * 6, "fan"]):
        batch = batch_of(config, texts)
        inputs = {"input_ids": batch.ids.numpy(), "attention_mask": batch.mask.numpy()}
        (vectors,) = session.run(None, inputs)
        with torch.no_grad():
            (expected,) = model.query_vectors(batch.ids, batch.mask)
        np.testing.assert_allclose(vectors, expected.numpy(), atol=1e-5)


def _opsets(file: Path) -> list:
    import onnx

    return list(onnx.load(str(file)).opset_import)
