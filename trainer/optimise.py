"""Three learning rates under one schedule; dense parameters by AdamW, tables by RowAdam."""

from __future__ import annotations

import math

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


def sparse_parameters(model: DualHeadModel) -> dict[str, nn.Parameter]:
    """The model's tables with sparse gradients (the bag's word vectors), by name."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.sparse}
    return {name: value for name, value in model.named_parameters() if id(value) in tables}


def make_optimisers(
    model: DualHeadModel, table: nn.Embedding, config: OptimiserConfig
) -> tuple[torch.optim.AdamW, RowAdam]:
    """AdamW over what is dense and RowAdam over Ψ and word vectors; each group keeps its own `base_lr`."""
    sparse = sparse_parameters(model)
    groups = []
    for prefix, rate in (("encoder.", config.encoder_lr), ("g1.", config.heads_lr), ("g2.", config.heads_lr)):
        named = [
            (name, value)
            for name, value in model.named_parameters()
            if name.startswith(prefix) and name not in sparse and value.requires_grad
        ]
        matrices = [value for _, value in named if value.dim() > 1]
        vectors = [value for _, value in named if value.dim() <= 1]
        groups.append({"params": matrices, "lr": rate, "base_lr": rate, "weight_decay": config.weight_decay})
        groups.append({"params": vectors, "lr": rate, "base_lr": rate, "weight_decay": 0.0})
    dense = torch.optim.AdamW([group for group in groups if group["params"]])
    tables = [{"params": [table.weight], "lr": config.table_lr, "base_lr": config.table_lr}]
    if sparse:
        rate = config.encoder_lr
        tables.append({"params": list(sparse.values()), "lr": rate, "base_lr": rate})
    rows = RowAdam(tables, lr=config.table_lr)
    return dense, rows


def set_rates(optimisers: tuple[torch.optim.Optimizer, ...], factor: float) -> None:
    """Set every group's learning rate to `factor` times its base rate."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = factor * group["base_lr"]
