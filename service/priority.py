"""Work that gives way to requests."""

from __future__ import annotations

import os
import sys
import threading

_NICE = 10


def give_way() -> None:
    """Run this thread, and those that it starts later, at low priority, where threads can have their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
