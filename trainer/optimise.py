"""Three learning rates under one schedule; dense parameters by AdamW, tables by RowAdam."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trainer.config import OptimiserConfig
from trainer.model import DualHeadModel
from trainer.row_adam import RowAdam


def learning_rate_factor(step: int, total: int, warmup: float) -> float:
    """Linear warm-up over the first `warmup` share of `total` steps, then a cosine to 0; `step` is from 0."""
    rising = max(1, round(warmup * total))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def sparse_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's tables with sparse gradients (word vectors, Ψ), by name."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding) and m.sparse}
    return {name: value for name, value in module.named_parameters() if id(value) in tables}


def make_optimisers(
    model: DualHeadModel, classifiers: nn.Module, config: OptimiserConfig
) -> tuple[torch.optim.Optimizer, ...]:
    """AdamW over what is dense and RowAdam over Ψ and word vectors, where there are such.

    Each group keeps its own `base_lr`.
    """
    # Ψ does not decay, whether its rows are sparse or, in Multi-Head Encoding, few and dense.
    rates = (
        (model.encoder, config.encoder_lr, config.weight_decay),
        (model.heads, config.heads_lr, config.weight_decay),
        (classifiers, config.table_lr, 0.0),
    )
    dense: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    for module, rate, decay in rates:
        sparse = sparse_parameters(module)
        named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        others = [value for name, value in named if name not in sparse]
        matrices = [value for value in others if value.dim() > 1]
        vectors = [value for value in others if value.dim() <= 1]
        common = {"lr": rate, "base_lr": rate}
        dense.append({"params": matrices, "weight_decay": decay, **common})
        dense.append({"params": vectors, "weight_decay": 0.0, **common})
        tables.append({"params": [value for name, value in named if name in sparse], **common})
    made: list[torch.optim.Optimizer] = []
    if dense := [group for group in dense if group["params"]]:
        made.append(torch.optim.AdamW(dense, fused=True))
    if tables := [group for group in tables if group["params"]]:
        made.append(RowAdam(tables, lr=config.table_lr))
    return tuple(made)


def set_rates(optimisers: tuple[torch.optim.Optimizer, ...], factor: float) -> None:
    """Set every group's learning rate to `factor` times its base rate."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = factor * group["base_lr"]
