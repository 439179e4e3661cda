"""Peak memory of one run among several in a process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

# Writing 5 here sets the process's high-water mark of resident memory back to what is resident (Linux).
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Peaks:
    """Bytes since `reset_peaks`; None where the system does not tell.

    Attributes:
        host: largest resident memory of the process, what was loaded before included.
        gpu: largest memory that tensors held on the current GPU.
    """

    host: int | None
    gpu: int | None


def reset_peaks() -> bool:
    """Begin to measure. Whether the host's mark could be set back."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def peaks(host_was_reset: bool) -> Peaks:
    """What was reached since."""
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    host = None
    if host_was_reset:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = _STATUS.read_text().splitlines()
            mark = next(line for line in lines if line.startswith("VmHWM:"))
            host = int(mark.split()[1]) * 1024
    return Peaks(host, gpu or None)
