"""A small log that can be learnt, and tiny encoders of real architectures with their own word pieces."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PRODUCTS = ["garden hose", "running shoes", "light bulb", "ceiling fan", "cordless drill"]
PRODUCTS += ["office chair", "coffee maker", "paint brush", "door lock", "water filter"]
ATTRIBUTES = ["red", "blue", "cheap", "outdoor", "steel", "long", "kids", "wireless"]
PATTERNS = ["{a} {p}", "buy {p} {a}", "{p} {a} online", "best {a} {p} near me"]


def log_pairs() -> list[tuple[str, str, int]]:
    """320 queries of 80 phrases: four ways to ask for each, and every third asks for a second one too."""
    pairs = []
    for at, (product, attribute) in enumerate((p, a) for p in PRODUCTS for a in ATTRIBUTES):
        for way, pattern in enumerate(PATTERNS):
            query = pattern.format(a=attribute, p=product)
            pairs.append((query, f"{attribute} {product}", 1 + way))
            if way == at % 3:
                other = ATTRIBUTES[(at + 1) % len(ATTRIBUTES)]
                pairs.append((query, f"{other} {product}", 1))
    return pairs


@pytest.fixture(scope="session")
def click_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log as a TSV file."""
    file = tmp_path_factory.mktemp("log") / "clicks.tsv"
    lines = ["query\tphrase\tclicks", *("\t".join(map(str, pair)) for pair in log_pairs())]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@dataclass(frozen=True)
class TinyEncoders:
    """Folders of encoders with random weights, two layers of width 16, as a hub download leaves them."""

    bert: Path
    distilbert: Path


@pytest.fixture(scope="session")
def tiny_encoders(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoders:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import BertProcessing
    from transformers import (
        BertConfig,
        BertModel,
        DistilBertConfig,
        DistilBertModel,
        PreTrainedTokenizerFast,
    )

    words = sorted({word for query, phrase, _ in log_pairs() for word in f"{query} {phrase}".split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: row for row, word in enumerate([*special, *words, "##s", "##x"])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    root = tmp_path_factory.mktemp("encoders")
    size = len(vocabulary)
    torch.manual_seed(1)
    models = {
        "bert": BertModel(
            BertConfig(
                vocab_size=size,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=64,
            )
        ),
        "distilbert": DistilBertModel(
            DistilBertConfig(vocab_size=size, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
        ),
    }
    torch.manual_seed(0)
    for name, model in models.items():
        # Words far apart and all else near zero: the encoder begins as a bag of words, which learns fast.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.3)
        model.save_pretrained(root / name)
        fast.save_pretrained(root / name)
    return TinyEncoders(root / "bert", root / "distilbert")


@pytest.fixture(scope="session")
def small_settings(tiny_encoders: TinyEncoders) -> dict[str, object]:
    """A quick run of the bag encoder on the tiny vocabulary."""
    return {
        "encoder.pretrained": tiny_encoders.bert,
        "dim": 16,
        "epochs": 4,
        "batch.queries": 32,
        "batch.refresh": 2,
        "optimiser.encoder_lr": 0.02,
        "optimiser.heads_lr": 0.02,
        "optimiser.table_lr": 0.02,
        "validation_share": 0.1,
        "threads": 1,
        "device": "cpu",
    }


@dataclass(frozen=True)
class TrainCommand:
    """`bidmatch train` with certain options, to be run as often as need be."""

    server: Any
    arguments: list[str]

    def start(self) -> Any:
        """Begin it in a process of its own, all imports done."""
        return self.server.start(self.arguments)

    def run(self) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        return self.start().finish()

    def run_afresh(self) -> subprocess.CompletedProcess[str]:
        """As a person runs it: a new interpreter."""
        command = [sys.executable, "-m", "bidmatch", *self.arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("warm_start", Path(__file__).with_name("warm_start.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["warm_start"] = module
    spec.loader.exec_module(module)
    with module.Server(tmp_path_factory.mktemp("output")) as server:
        yield server


@pytest.fixture(scope="session")
def train_command(_server: Any, click_log: Path) -> Callable[..., TrainCommand]:
    """Makes the command for an output folder, settings, and further options, on the preset `bag`."""

    def make(out: Path, settings: dict[str, object], *options: str, data: Path = click_log) -> TrainCommand:
        assignments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        fixed = ["train", "--data", str(data), "--out", str(out), "--preset", "bag"]
        return TrainCommand(_server, [*fixed, *assignments, *options])

    return make
