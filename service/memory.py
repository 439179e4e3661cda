"""Memory that was freed, and what the allocators do with it."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref

from service.priority import give_way

_AFTER_S = 1.0
# Of malloc.h: what `mallopt` sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Of pieces above the first size each is given back by itself; of smaller ones what lies free at the end.
_LARGE_BYTES, _FREE_BYTES, _ARENAS = 1 << 17, 1 << 24, 2


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


def keep_little() -> None:
    """From now on, freed memory goes back to the system soon, for runs whose memory must not grow with a log.

    Arrow's own allocator and glibc's arenas each keep the most that any moment took, for every thread. Where
    large pieces are the rule, giving them back costs nothing that is seen beside encoding. Without glibc only
    Arrow changes.

    Call it before anything imports Arrow: its readers and writers allocate by what its import finds in the
    environment. Later only what Python makes is allocated otherwise.
    """
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in (
            (_MMAP_THRESHOLD, _LARGE_BYTES),
            (_TRIM_THRESHOLD, _FREE_BYTES),
            (_ARENA_MAX, _ARENAS),
        ):
            mallopt(parameter, value)
