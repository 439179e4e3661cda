"""Which device and precision a run uses, and its thread count."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from bidmatch.base.errors import ConfigError
from trainer.config import BagEncoderConfig, CombinedEncoderConfig, TrainConfig
from trainer.distributed import Workers


@dataclass(frozen=True)
class Device:
    """Where a run computes.

    Attributes:
        device: of all tensors.
        bf16: whether the encoder runs under bf16 autocast.
        threads: CPU threads.
    """

    device: torch.device
    bf16: bool
    threads: int

    def autocast(self) -> AbstractContextManager[None]:
        """bf16 autocast where it is on; nothing elsewhere."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)


def has_gpu() -> bool:
    """Whether a CUDA device can be used."""
    return torch.cuda.is_available()


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def choose_device(config: TrainConfig, workers: Workers | None = None) -> Device:
    """Device, precision and threads of a run; sets torch's thread count and deterministic algorithms.

    Of several processes each takes a GPU of its machine, and a part of its cores.

    Raises:
        ConfigError: `cuda` was asked for where there is none.
    """
    if config.device == "cuda" and not has_gpu():
        raise ConfigError(
            "device=cuda, but no CUDA device can be used", hint="Set device=cpu or device=auto."
        )
    name = "cuda" if config.device == "cuda" or (config.device == "auto" and has_gpu()) else "cpu"
    workers = workers or Workers()
    threads = config.threads or max(1, (os.cpu_count() or 1) // workers.local_count)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=name == "cuda")
    # It would fill every new tensor, a twentieth of a step's time; none is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if config.precision == "auto":
        # The bag is one gather and small matrices, the frozen transformer beside it is cached: casting would
        # cost more than it saves.
        light = isinstance(config.encoder, BagEncoderConfig) or (
            isinstance(config.encoder, CombinedEncoderConfig) and config.encoder.frozen_layers < 0
        )
        bf16 = not light and (torch.cuda.is_bf16_supported() if name == "cuda" else _cpu_has_bf16())
    else:
        bf16 = config.precision == "bf16"
    number = workers.local_rank if name == "cuda" and workers.count > 1 else None
    return Device(torch.device(name) if number is None else torch.device(name, number), bf16, threads)
