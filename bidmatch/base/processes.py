"""How many processes of one command there are, and how one ends."""

from __future__ import annotations

import os
import signal
import sys


def process_count() -> int:
    """Processes that `torchrun` started together with this one; 1 where it did not start this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def unwind_on_sigterm() -> None:
    """From now on SIGTERM ends the process by SystemExit, so that what it holds is given up in good order.

    The default would leave temporary files and child processes, and as the first process of a container it
    would do nothing at all. The exit code is a shell's for it, 143. Call it on the main thread.
    """
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: object) -> None:
    sys.exit(128 + number)
