"""Several processes that train one model: each encodes its share of a batch, and all sum their gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Workers:
    """The processes of a run; one alone by default.

    Attributes:
        rank: this process's number, from 0.
        count: how many there are.
        local_rank: this process's number on its machine: which GPU it takes.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    def share(self, n: int) -> slice:
        """This process's part of n items: contiguous, sizes that differ by one at most."""
        return slice(n * self.rank // self.count, n * (self.rank + 1) // self.count)

    def gather(self, own: torch.Tensor, n: int) -> torch.Tensor:
        """All processes' shares of an (n, w) matrix, in order; `own` is this one's, without gradient."""
        if self.count == 1:
            return own
        sizes = [n * (rank + 1) // self.count - n * rank // self.count for rank in range(self.count)]
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient, dense or sparse, by its sum over the processes."""
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                parameter.grad = self._sum_sparse(parameter.grad)
            else:
                dist.all_reduce(parameter.grad)

    def _sum_sparse(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.coalesce()
        indices, values = gradient.indices()[0], gradient.values()
        counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self.count)]
        dist.all_gather(counts, torch.tensor([len(indices)], device=values.device))
        sizes = [int(count) for count in counts]
        rows = indices.new_zeros(max(sizes))
        rows[: len(indices)] = indices
        block = values.new_zeros(max(sizes), values.shape[1])
        block[: len(values)] = values
        all_rows = [torch.empty_like(rows) for _ in sizes]
        blocks = [torch.empty_like(block) for _ in sizes]
        dist.all_gather(all_rows, rows)
        dist.all_gather(blocks, block)
        where = torch.cat([part[:size] for part, size in zip(all_rows, sizes, strict=True)])
        what = torch.cat([part[:size] for part, size in zip(blocks, sizes, strict=True)])
        return torch.sparse_coo_tensor(where.unsqueeze(0), what, gradient.shape).coalesce()


def join_workers() -> Workers:
    """The processes that `torchrun` started, connected; one alone where it did not start this one."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Workers()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return Workers(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
