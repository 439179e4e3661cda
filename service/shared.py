"""The folder that the processes of one service share while it runs: metrics, process numbers.

In memory where the system has a file system for that: `/dev/shm`, which a container has whose own files can't
be written. What a killed service left behind the next one clears away: who runs holds a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bidmatch.base.errors import ConfigError

_PREFIX = "bidmatch-"
_MEMORY = Path("/dev/shm")


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yields the folder, which is removed in the end.

    Raises:
        ConfigError: there is no place for it.
    """
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    try:
        _clear(place)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written: {error.strerror}",
            hint="The service counts in a small folder there; in a container, give it one: --tmpfs /tmp.",
        ) from error
    owner = os.getpid()
    try:
        yield folder
    finally:
        # Workers, forked in between, come by here, too.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _clear(place: Path) -> None:
    """Remove what services left that no longer run."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
