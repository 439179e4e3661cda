"""Processes forked from this one, each with a channel to it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from bidmatch.base.errors import BidmatchError
from service.channel import Channel, channel_pair

# What the parent handles; a child hears SIGTERM alone.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Closable(Protocol):
    """What a child does not keep."""

    def close(self) -> None:
        """Let go of it."""


@dataclass(frozen=True, eq=False)
class Child:
    """A process and the parent's end of the channel to it."""

    pid: int
    channel: Channel


def fork(run: Callable[[Channel], None], inherited: Iterable[Closable]) -> Child:
    """Start a process that does `run` with its end of the channel, and ends.

    Its exit code is 0, or that of the error, which it tells the parent before: `op` is "failed", with
    `reason`, `hint` and `code`. To be called from a process without other threads.

    Args:
        run: what it does.
        inherited: what it closes first. Ends of the channels to its siblings above all: a worker knows that
            the parent is gone when no process holds the other end of its channel.

    Raises:
        OSError: the system has no room for another process.
    """
    ours, theirs = channel_pair()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal between the fork and the child's own handlers would be taken by the parent's, and be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = os.fork()
        if not pid:
            _be_child(run, theirs, [ours, *inherited])
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Child(pid, ours)


def _be_child(run: Callable[[Channel], None], channel: Channel, inherited: list[Closable]) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # Ctrl-C reaches all processes of a terminal; the parent passes it on in good order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for one in inherited:
            one.close()
        run(channel)
        code = 0
    except BidmatchError as error:
        code = error.exit_code
        channel.send(op="failed", reason=error.reason, hint=error.hint, code=code)
    except BaseException as bug:
        traceback.print_exc()
        channel.send(op="failed", reason=f"{type(bug).__name__}: {bug}", hint=None, code=code)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
