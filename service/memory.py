"""Memory that was freed and that the allocator still holds."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref

from service.priority import give_way

_AFTER_S = 1.0


def give_back_after(held: object) -> None:
    """When `held` is gone, give the memory that it leaves back to the system, on a thread of low priority.

    What a bundle's engine, its live phrases and its answers took lies between what stays, so glibc keeps most
    of it, and the next bundle's does not quite fit the gaps: without this a process grows from swap to swap.
    """
    weakref.finalize(held, _give_back_apart).atexit = False


def _give_back_apart() -> None:
    # Whoever lets go last is not to wait: that may be the event loop.
    threading.Thread(target=_give_back, name="give-back", daemon=True).start()


def _give_back() -> None:
    give_way()
    # This is told when what goes is about to: what it holds goes right after.
    time.sleep(_AFTER_S)
    give_back()


def give_back() -> bool:
    """Give freed memory back now; whether some was. Without glibc nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
