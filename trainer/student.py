"""A small encoder that learns to give a trained model's query vectors, so that labels and index stay.

Loss: the mean over the parts of a query's vectors (Φ_D and N(Φ_C), of each pair of heads) of
1 - cos(student, teacher), on the training queries and the label texts. Nothing of the click log is used: the
teacher's vectors say more of a text than its few clicks do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from tokenizers import Tokenizer
from torch import nn

from bidmatch.base.console import progress
from bidmatch.base.errors import BidmatchError, ConfigError
from trainer.checkpoint import TrainedRun
from trainer.config import (
    BagEncoderConfig,
    CombinedEncoderConfig,
    EncoderConfig,
    TrainConfig,
    TransformerEncoderConfig,
)
from trainer.corpus import TextSource
from trainer.devices import Device
from trainer.embed import evaluating, length_blocks
from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import Encoder
from trainer.encoders.build import Architecture, empty_encoder, uses_special_tokens
from trainer.encoders.combined import CombinedEncoder
from trainer.encoders.inception import InceptionEncoder
from trainer.encoders.transformer import TransformerEncoder
from trainer.model import DualHeadModel
from trainer.optimise import learning_rate_factor, make_optimisers, set_rates
from trainer.plan import EPOCH_STREAM, INIT_STREAM, STEP_STREAM, stream

# Rates of encoder and heads by kind: word vectors take large steps, pretrained layers small ones.
RATES = {"bag": (5e-3, 2e-3), "transformer": (2e-4, 1e-3)}


class StudentOptions(BaseModel):
    """What student is trained, and how.

    Attributes:
        encoder: `bag`, or `transformer:N`, the teacher's N lower layers.
        epochs: passes over training queries and label texts.
        queries: texts a step.
        encoder_lr: learning rate of the encoder; None for that of its kind.
        heads_lr: likewise of the heads.
        seed: of everything random.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads; 0 for all cores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    encoder: str = "bag"
    epochs: int = Field(10, ge=1)
    queries: int = Field(256, ge=1)
    encoder_lr: float | None = Field(None, gt=0)
    heads_lr: float | None = Field(None, gt=0)
    seed: int = Field(0, ge=0, lt=2**63)
    device: str = Field("auto", pattern="^(auto|cpu|cuda)$")
    threads: int = Field(0, ge=0)

    @field_validator("encoder")
    @classmethod
    def _known(cls, encoder: str) -> str:
        if not re.fullmatch("bag|transformer:[1-9][0-9]*", encoder):
            raise ConfigError(
                f"encoder {encoder}: there is no such student",
                hint="Give bag, or transformer:N for the N lower layers of the teacher's transformer.",
            )
        return encoder


@dataclass(frozen=True)
class Student:
    """An encoder with heads, to be trained or trained.

    Attributes:
        model: Φ and heads of the teacher's widths.
        config: of its encoder.
        architecture: what `empty_encoder` rebuilds it from.
        tokenizer: the teacher's, with or without special tokens as this encoder takes them.
    """

    model: DualHeadModel
    config: EncoderConfig
    architecture: Architecture
    tokenizer: Tokenizer


def new_student(teacher: TrainedRun, teacher_architecture: Architecture, options: StudentOptions) -> Student:
    """A student that starts from what fits of the teacher: word vectors or lower layers, and heads.

    Raises:
        ConfigError: the teacher has no such layers.
    """
    torch.manual_seed(int(stream(options.seed, INIT_STREAM).integers(2**63)))
    own = teacher.config.encoder
    config: EncoderConfig
    if options.encoder == "bag":
        words = _word_vectors(teacher.model.encoder)
        config = BagEncoderConfig(pretrained=own.pretrained)
        architecture: Architecture = {"vocabulary": words.shape[0], "width": words.shape[1]}
        encoder = empty_encoder(config, architecture)
        assert isinstance(encoder, BagEncoder)
        encoder.words.weight.data.copy_(words)
    else:
        layers = int(options.encoder.partition(":")[2])
        if not isinstance(own, TransformerEncoderConfig | CombinedEncoderConfig):
            raise ConfigError(
                f"the teacher's encoder is {own.kind}, which has no layers to take", hint="--encoder bag"
            )
        config = TransformerEncoderConfig(pretrained=own.pretrained, pooling=own.pooling)
        encoder, architecture = _lower_layers(
            teacher.model.encoder,
            config,
            teacher_architecture.get("transformer", teacher_architecture),
            layers,
        )
    model = DualHeadModel(encoder, teacher.model.widths, 0.0)
    if encoder.width == teacher.model.encoder.width:
        model.heads.load_state_dict(teacher.model.heads.state_dict())
    return Student(model, config, architecture, _tokenizer(teacher.tokenizer, config))


def _word_vectors(encoder: Encoder) -> torch.Tensor:
    """The encoder's word-piece vectors, float32 (V, h)."""
    if isinstance(encoder, BagEncoder | InceptionEncoder):
        return encoder.words.weight.detach()
    if isinstance(encoder, CombinedEncoder):
        return encoder.bag.words.weight.detach()
    assert isinstance(encoder, TransformerEncoder)
    words: torch.Tensor = encoder.model.get_input_embeddings().weight.detach()
    return words


def _lower_layers(
    encoder: Encoder, config: TransformerEncoderConfig, shape: Architecture, layers: int
) -> tuple[Encoder, Architecture]:
    from transformers import AutoConfig

    whole = encoder.transformer if isinstance(encoder, CombinedEncoder) else encoder
    assert isinstance(whole, TransformerEncoder)
    fields = {name: value for name, value in shape.items() if name != "model_type"}
    small = AutoConfig.for_model(shape["model_type"], **fields)
    if layers > small.num_hidden_layers:
        raise ConfigError(
            f"transformer:{layers} asks for {layers} layers; the teacher has {small.num_hidden_layers}"
        )
    small.num_hidden_layers = layers
    architecture = dict(small.to_dict())
    student = empty_encoder(config, architecture)
    kept = whole.state_dict()
    try:
        student.load_state_dict({name: kept[name] for name in student.state_dict()})
    except (KeyError, RuntimeError) as wrong:
        raise ConfigError(
            "this encoder's lower layers cannot be taken out of it", hint="--encoder bag"
        ) from wrong
    return student, architecture


def _tokenizer(teacher: Tokenizer, config: EncoderConfig) -> Tokenizer:
    tokenizer = Tokenizer.from_str(teacher.to_str())
    if not uses_special_tokens(config):
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return tokenizer


def unit_vectors(model: DualHeadModel, source: TextSource, rows: np.ndarray, device: Device) -> torch.Tensor:
    """The parts of all pairs of heads side by side, each at unit length: float32 (n, Σ widths)."""
    with device.autocast():
        pairs = model.encode(source.batch(rows, device.device))
    return torch.cat([pair.served().float() for pair in pairs], dim=1)


def parts_of(model: DualHeadModel) -> dict[str, int]:
    """Names of the parts with their widths, in the order of `unit_vectors`."""
    names = [(prefix + name) for prefix in ("", "wide ") for name in ("Φ_D", "N(Φ_C)")]
    widths = [width for pair in model.widths for width in pair]
    return {name: width for name, width in zip(names, widths, strict=False) if width}


def teacher_vectors(
    model: DualHeadModel, source: TextSource, device: Device, label: str, file: Path | None = None
) -> np.ndarray:
    """The teacher's `unit_vectors` of all texts, float16 (N, Σ widths); in a file where one is given."""
    lengths = source.tokens.lengths
    shape = (len(lengths), sum(map(sum, model.widths)))
    found: np.ndarray = (
        np.zeros(shape, np.float16)
        if file is None or not len(lengths)
        else np.memmap(file, dtype=np.float16, mode="w+", shape=shape)
    )
    with evaluating(model), progress(label, len(lengths), "texts") as step:
        for rows in length_blocks(lengths):
            found[rows] = unit_vectors(model, source, rows, device).cpu().numpy()
            step.advance(len(rows))
    return found


def part_cosines(student: torch.Tensor, teacher: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Cosine of each part of n texts, float (n, parts), of vectors whose parts have unit length."""
    products = torch.split(student * teacher, widths, dim=1)
    return torch.stack([part.sum(1) for part in products], dim=1)


def mean_cosines(
    model: DualHeadModel, source: TextSource, teacher: np.ndarray, device: Device
) -> dict[str, float]:
    """Mean cosine with the teacher by part, over at least one text."""
    parts = parts_of(model)
    total = np.zeros(len(parts))
    with evaluating(model):
        for rows in length_blocks(source.tokens.lengths):
            expected = torch.from_numpy(teacher[rows].astype(np.float32)).to(device.device)
            found = unit_vectors(model, source, rows, device)
            total += part_cosines(found, expected, list(parts.values())).sum(0).double().cpu().numpy()
    # The teacher's are kept in half precision, so a copy of it comes out a little above 1.
    means = np.clip(total / len(teacher), -1, 1)
    return {name: round(float(mean), 6) for name, mean in zip(parts, means, strict=True)}


def train_student(
    student: Student,
    source: TextSource,
    teacher: np.ndarray,
    config: TrainConfig,
    device: Device,
    after_epoch: Callable[[int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Train the student on all texts; a record an epoch: its number, its loss, what `after_epoch` says.

    Args:
        student: its model is on the device, and changes.
        source: the texts, as the student's tokenizer has them.
        teacher: `teacher_vectors` of the same texts.
        config: TrainConfig: epochs, batch.queries, optimiser and seed count.
        device: where it computes.
        after_epoch: called with the number of the epoch, from 1.

    Raises:
        BidmatchError: the loss is no finite number any more.
    """
    model, widths = student.model, list(parts_of(student.model).values())
    optimisers = make_optimisers(model, nn.ModuleList(), config.optimiser)
    dense = [value for value in model.parameters() if value.requires_grad]
    size = config.batch.queries
    steps = -(-len(teacher) // size)
    history = []
    for epoch in range(config.epochs):
        model.train()
        order = stream(config.seed, EPOCH_STREAM, epoch).permutation(len(teacher))
        total = 0.0
        with progress(f"epoch {epoch + 1}/{config.epochs}", len(teacher), "texts") as bar:
            for step in range(steps):
                rows = np.sort(order[step * size : (step + 1) * size])
                torch.manual_seed(int(stream(config.seed, STEP_STREAM, epoch, step).integers(2**62)))
                expected = torch.from_numpy(teacher[rows].astype(np.float32)).to(device.device)
                found = unit_vectors(model, source, rows, device)
                loss = 1.0 - part_cosines(found, expected, widths).mean()
                for optimiser in optimisers:
                    optimiser.zero_grad(set_to_none=True)
                loss.backward()
                if config.optimiser.max_grad_norm:
                    grads = [value for value in dense if value.grad is not None and not value.grad.is_sparse]
                    nn.utils.clip_grad_norm_(grads, config.optimiser.max_grad_norm)
                factor = learning_rate_factor(
                    epoch * steps + step, config.epochs * steps, config.optimiser.warmup
                )
                set_rates(optimisers, factor)
                for optimiser in optimisers:
                    optimiser.step()
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise BidmatchError(
                        f"the student does not converge: the loss is {value} in epoch {epoch + 1}, "
                        f"step {step + 1}",
                        hint="Lower --encoder-lr and --heads-lr.",
                    )
                total += value * len(rows)
                bar.advance(len(rows), note=f"loss {value:.4f}")
        record: dict[str, Any] = {"epoch": epoch + 1, "loss": {"total": total / len(teacher)}}
        history.append(record | after_epoch(epoch + 1))
    return history
