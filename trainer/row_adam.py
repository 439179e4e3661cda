"""Adam for tables of which a step touches few rows: its cost depends on those rows, never on the table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class RowAdam(torch.optim.Optimizer):
    """Adam on the rows that have a gradient; moments and bias correction are kept by row.

    Each row's bias is corrected by the number of its own updates, so that a label seen for the first time
    late in training takes a step of the size that Adam's first step has.

    Args:
        params: 2-d tables, or parameter groups of them; their gradients are sparse COO with one sparse
            dimension (`nn.Embedding(sparse=True)`).
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for table in group["params"]:
                self.state[table] = {
                    "first": torch.zeros_like(table, memory_format=torch.contiguous_format),
                    "second": torch.zeros_like(table, memory_format=torch.contiguous_format),
                    "updates": torch.zeros(table.shape[0], dtype=torch.int32, device=table.device),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the rows that have a gradient.

        Raises:
            ValueError: a gradient is dense.
        """
        if closure is not None:
            raise ValueError("RowAdam takes no closure")
        for group in self.param_groups:
            (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
            for table in group["params"]:
                if table.grad is None:
                    continue
                if not table.grad.is_sparse:
                    raise ValueError("RowAdam needs sparse gradients; use nn.Embedding(sparse=True)")
                gradient = table.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                state = self.state[table]
                updates = state["updates"].index_select(0, rows) + 1
                first = state["first"].index_select(0, rows).lerp_(values, 1 - beta1)
                second = (
                    state["second"]
                    .index_select(0, rows)
                    .mul_(beta2)
                    .addcmul_(values, values, value=1 - beta2)
                )
                state["updates"].index_copy_(0, rows, updates)
                state["first"].index_copy_(0, rows, first)
                state["second"].index_copy_(0, rows, second)
                count = updates.to(values.dtype).unsqueeze(1)
                first.div_(1 - beta1**count)
                second.div_(1 - beta2**count).sqrt_().add_(eps)
                table.index_copy_(0, rows, table.index_select(0, rows).addcdiv_(first, second, value=-lr))
