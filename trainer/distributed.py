"""Several processes that train one model: each encodes its share of a batch, and all sum their gradients.

Whatever decides the shape of what comes next (which queries share a batch, which labels are hard, which
checkpoint to take up) is decided by one process and told to the others, so that they never part ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bidmatch.base.console import be_silent
from bidmatch.base.errors import BidmatchError, ConfigError
from bidmatch.base.processes import process_count

JOIN_TIMEOUT = timedelta(minutes=5)
STEP_TIMEOUT = timedelta(minutes=30)
# What the first process does alone, such as reading a large log, while the others wait.
ALONE_TIMEOUT = timedelta(hours=12)

_VALUES_AT_ONCE = 16_000_000

T = TypeVar("T")


@contextmanager
def _together() -> Iterator[None]:
    """What the processes do together within; that one of them is gone becomes an error that says so."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as lost:
        reason = str(lost).strip().partition("\n")[0].partition(". ")[0]
        raise BidmatchError(
            f"the connection to another process of this run is lost ({reason})",
            hint="If that process ended, its own message says why. The same command goes on from the last "
            "checkpoint.",
        ) from lost


@dataclass(frozen=True)
class Workers:
    """The processes of a run; one alone by default.

    Attributes:
        rank: this process's number, from 0.
        count: how many there are.
        local_rank: this process's number on its machine: which GPU it takes.
        local_count: how many there are on this machine.
        waiting: the same processes, with more patience for what the first one does alone.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    waiting: Any = field(default=None, repr=False, compare=False)

    @property
    def first_of_all(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def shares(self, n: int) -> list[slice]:
        """Each process's part of n items: contiguous, sizes that differ by one at most."""
        bounds = [n * rank // self.count for rank in range(self.count + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    def share(self, n: int) -> slice:
        """This process's part of n items."""
        return self.shares(n)[self.rank]

    def first(self, action: Callable[[], T]) -> T:
        """What `action` returns in the first process, in all; the others wait for it and do nothing.

        Where it fails, all end: the first process with its error, the others without a word of their own
        and with the same exit code.

        Args:
            action: its result must be picklable; it goes from process to process and nowhere else.
        """
        if self.count == 1:
            return action()
        outcome: list[Any] = [None]
        if self.rank == 0:
            try:
                value = action()
            except BaseException as failure:
                outcome[0] = ("failed", getattr(failure, "exit_code", 1))
                with suppress(BidmatchError):
                    self._tell(outcome)
                raise
            outcome[0] = ("done", value)
            self._tell(outcome)
            return value
        self._tell(outcome)
        kind, result = outcome[0]
        if kind == "failed":
            raise SystemExit(result)
        told: T = result
        return told

    def ahead(self, action: Callable[[], T]) -> T:
        """What `action` returns in each process; the first one goes ahead, and if it fails all end.

        It may fill a cache for the others, or find what would fail in each of them.
        """
        made: list[T] = []
        self.first(lambda: made.append(action()))
        return made[0] if made else action()

    def check_sees(self, file: Path) -> None:
        """Hold that this process sees a file that the first one has written.

        Raises:
            BidmatchError: it does not.
        """
        if not file.is_file():
            raise BidmatchError(
                f"process {self.rank} of {self.count} does not see {file}",
                hint="All processes need the same run folder: on several machines, on a shared file system.",
            )

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            with _together():
                dist.barrier(group=self.waiting)

    def _tell(self, outcome: list[Any]) -> None:
        with _together():
            dist.broadcast_object_list(outcome, src=0, group=self.waiting, device=torch.device("cpu"))

    def gather(self, own: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All processes' parts of a matrix, in order, without gradient.

        Args:
            own: (sizes[rank], ...), this process's part.
            sizes: rows of each process's part.

        Returns:
            (sum of sizes, ...).
        """
        if self.count == 1 or not sum(sizes):
            return own
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        with _together():
            dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def merge(self, partial: torch.Tensor) -> None:
        """Fill, in place, a tensor of which each process has made some entries and left the others 0."""
        if self.count > 1 and partial.numel():
            with _together():
                dist.all_reduce(partial)

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take over, in place, the first process's values."""
        if self.count == 1:
            return
        with _together():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def copy_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take over the first process's gradients where each process has made the whole of them.

        Equal but for the order of sums, they would still let the processes' copies drift apart.
        """
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                self.copy([parameter.grad.values()])
            else:
                self.copy([parameter.grad])

    def sum_gradients(
        self, dense: Sequence[torch.nn.Parameter], sparse: Sequence[torch.nn.Parameter]
    ) -> None:
        """Replace each gradient by its sum over the processes; one that none of them has stays None.

        Args:
            dense: parameters with dense gradients.
            sparse: tables with sparse gradients (one sparse dimension).
        """
        if self.count == 1:
            return
        present = self._present([*dense, *sparse])
        gradients = []
        for parameter, there in zip(dense, present, strict=False):
            if there:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            self._sum_dense(bucket)
        for parameter, there in zip(sparse, present[len(dense) :], strict=True):
            if there:
                parameter.grad = self._sum_sparse(parameter)

    def _present(self, parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
        """Which parameters have a gradient in any process; one with an empty share has none."""
        if not parameters:
            return []
        own = [float(parameter.grad is not None) for parameter in parameters]
        found = torch.tensor(own, device=parameters[0].device)
        with _together():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [bool(there) for there in found.tolist()]

    def _sum_dense(self, gradients: list[torch.Tensor]) -> None:
        joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with _together():
            dist.all_reduce(joined)
        parts = joined.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _sum_sparse(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:
            rows = torch.zeros(0, dtype=torch.int64, device=parameter.device)
            values = parameter.new_zeros(0, *parameter.shape[1:])
        else:
            own = parameter.grad.coalesce()
            rows, values = own.indices()[0], own.values()
        one = torch.tensor([len(rows)], device=parameter.device)
        sizes = self.gather(one, [1] * self.count).tolist()
        all_rows, all_values = self.gather(rows, sizes), self.gather(values.detach(), sizes)
        summed = torch.sparse_coo_tensor(
            all_rows.unsqueeze(0), all_values, parameter.shape, check_invariants=False
        )
        return summed.coalesce()


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The gradients in groups that are large enough to send at once and small enough to hold twice."""
    bucket: list[torch.Tensor] = []
    held = 0
    for gradient in gradients:
        bucket.append(gradient)
        held += gradient.numel()
        if held >= _VALUES_AT_ONCE:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def join_workers(timeout: timedelta = JOIN_TIMEOUT) -> Workers:
    """The processes that `torchrun` started, connected; one alone where it did not start this one.

    Tensors in host memory go over gloo, those on a GPU over nccl. All but the first process are silent from
    here on.

    Args:
        timeout: how long to wait for all processes to be there.

    Raises:
        ConfigError: a machine has fewer GPUs than processes.
        BidmatchError: not all processes came.
    """
    count = process_count()
    if count == 1:
        return Workers()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    local_count = int(os.environ.get("LOCAL_WORLD_SIZE", str(count)))
    if rank:
        be_silent()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and local_count > gpus:
        if rank:
            raise SystemExit(ConfigError.exit_code)
        raise ConfigError(
            f"{local_count} processes were started on a machine with {gpus} GPUs; each needs one of its own",
            hint=f"torchrun --nproc-per-node {gpus}, or hide the GPUs: CUDA_VISIBLE_DEVICES=",
        )
    try:
        store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=count, timeout=timeout))
        # torchrun may keep its store for processes that it starts again: they must not find what the dead
        # ones left there.
        store = dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(f"joined/{rank}", "1")
        store.wait([f"joined/{other}" for other in range(count)], timeout)
        store.set_timeout(STEP_TIMEOUT)
        if gpus:
            torch.cuda.set_device(local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=store,
            rank=rank,
            world_size=count,
            timeout=STEP_TIMEOUT,
        )
        waiting = dist.new_group(backend="gloo", timeout=ALONE_TIMEOUT)
    except (RuntimeError, ValueError) as failure:
        raise BidmatchError(
            f"process {rank} of {count} could not join the others within {timeout.total_seconds():.0f} s "
            f"({str(failure).strip().partition(chr(10))[0]})",
            hint="Start all with torchrun and the same --nnodes, --nproc-per-node and --rdzv options.",
        ) from failure
    return Workers(rank, count, local_rank, local_count, waiting)


def leave_workers(workers: Workers) -> None:
    """Close the connections of a run that came to its end; after an error the process just ends."""
    if workers.count > 1:
        dist.destroy_process_group()
