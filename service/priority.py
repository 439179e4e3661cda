"""Which threads get the processor first: the event loop, then those that answer, then all else."""

from __future__ import annotations

import os
import sys
import threading

_ANSWERING, _BACKGROUND = 5, 15


def follow_the_loop() -> None:
    """Run this thread behind the event loop, which takes little time and which all requests wait for.

    With more load than processors carry it has to refuse what is too much, and to answer probes, at once.
    """
    _be_nice(_ANSWERING)


def give_way() -> None:
    """Run this thread, and those that it starts later, behind requests."""
    _be_nice(_BACKGROUND)


def _be_nice(nice: int) -> None:
    # Elsewhere threads have no priorities of their own.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
