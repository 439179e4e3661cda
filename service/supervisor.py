"""The parent of the workers: starts them, starts those anew that end, hears signals, watches for bundles.

It answers no request, has no threads, and whatever may take long or fail is done by processes that it starts:
so it can fork at any time, and hears at once what happens.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from bidmatch.base.errors import BidmatchError
from export.bundle.read import Bundle, open_bundle
from service.channel import Channel
from service.children import SIGNALS, Child, Closable, fork
from service.logs import announcer
from service.security import guard_for
from service.server import refused
from service.serving import newest_bundle
from service.settings import Settings
from service.swaps import Asker, Swaps, Worker, verify_for
from service.worker import work

BACKLOG = 2048
_TICK_S = 0.5
_WATCH_S = 1.0
_LONGEST_PAUSE_S = 30.0
# Beyond the time that requests in flight have, for a worker to put its things away.
_TIDY_S = 10.0

Stamp = tuple[Any, ...]


class Supervisor:
    """See the module.

    Args:
        settings: of the service.
        listener: bound, not listening.
        folder: for what workers share: metrics, process numbers.
    """

    def __init__(self, settings: Settings, listener: socket.socket, folder: Path):
        self._settings, self._listener, self._folder = settings, listener, folder
        self._say = announcer(settings.log_format)
        self._workers = [Worker(number) for number in range(settings.workers)]
        self._verifier: Child | None = None
        self._swaps: Swaps | None = None
        self._selector = selectors.DefaultSelector()
        self._signals: set[int] = set()
        self._failure: BidmatchError | None = None
        self._kill_at: float | None = None
        self._announced = False
        self._watch = Watch(settings.bundle)

    def run(self) -> None:
        """Serve until a signal or a failure ends it, and all that it started has ended.

        Raises:
            KeyboardInterrupt: on SIGINT.
            BidmatchError: the bundle is not sound, a worker can't start, or the address can't be had.
        """
        for line in self._settings.lines():
            self._say(f"setting {line}")
        self._guard = guard_for(
            self._settings.host,
            self._settings.auth,
            self._settings.api_keys_file,
            self._settings.admin_keys_file,
            say=self._say,
        )
        woken, self._waker = socket.socketpair()
        for end in (woken, self._waker):
            end.setblocking(False)
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ, self._wake)
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        (self._folder / "parent.pid").write_text(str(os.getpid()))
        self.verify(None)
        while not (self._stopping and self._verifier is None and not self._alive()):
            self._turn()
        if self._failure is not None:
            raise self._failure
        if signal.SIGINT in self._signals:
            raise KeyboardInterrupt

    @property
    def _stopping(self) -> bool:
        return self._kill_at is not None

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.child is not None]

    def _turn(self) -> None:
        """Wait until something happens, and see to it."""
        for key, _ in self._selector.select(_TICK_S):
            # One that came before may have taken this one off the list.
            if key.fd in self._selector.get_map():
                key.data()
        now = time.monotonic()
        if self._signals & {signal.SIGTERM, signal.SIGINT} and not self._stopping:
            self._stop()
        self._reap()
        if self._kill_at is not None:
            if now > self._kill_at:
                self._kill_all()
        elif self._swaps is not None:
            self._swaps.tick(now)
            self._start_workers(now)
            self._look_for_bundles(now)

    # Signals

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals.add(number)

    def _wake(self) -> None:
        self._woken.recv(4096)

    def _stop(self, failure: BidmatchError | None = None) -> None:
        if self._stopping:
            return
        self._failure = failure
        self._kill_at = time.monotonic() + self._settings.shutdown_ms / 1000 + _TIDY_S
        if self._announced:
            self._say("stopping: no new connections, answering what is in flight")
        if self._swaps is not None:
            self._swaps.stop()
        self.end_verifying()
        for worker in self._alive():
            self.end(worker, at_once=False)

    def _kill_all(self) -> None:
        for worker in self._alive():
            self._say(f"worker {worker.number} does not end; it is killed")
            self.end(worker, at_once=True)
        self._kill_at = time.monotonic() + _TIDY_S

    # Children

    def _fork(self, run: Callable[[Channel], None], *closed: Closable) -> Child:
        channels = [worker.child.channel for worker in self._alive() if worker.child is not None]
        return fork(run, [self._selector, self._woken, self._waker, *channels, *closed])

    def _hears(self, child: Child, take: Callable[[dict[str, Any]], None]) -> None:
        """What a child says is taken from now on."""

        def hear() -> None:
            messages, there = child.channel.receive()
            for message in messages:
                take(message)
            if not there:
                self._selector.unregister(child.channel)

        self._selector.register(child.channel, selectors.EVENT_READ, hear)

    def _forget(self, child: Child) -> None:
        """A child has ended: take its last words."""
        if child.channel.fileno() in self._selector.get_map():
            key = self._selector.get_key(child.channel)
            key.data()
        if child.channel.fileno() in self._selector.get_map():
            self._selector.unregister(child.channel)
        child.channel.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code}" if code < 0 else f"code {code}"
            verifier = self._verifier
            if verifier is not None and verifier.pid == pid:
                self._forget(verifier)
                self._verifier = None
                self._unverified(f"the process that verified it ended with {how}", None, 1)
            for worker in self._alive():
                if worker.child is not None and worker.child.pid == pid:
                    self._ended(worker, worker.child, how)

    # Workers

    def _start_workers(self, now: float) -> None:
        for worker in self._workers:
            if worker.child is None and now >= worker.start_at:
                self._start(worker)

    def _start(self, worker: Worker) -> None:
        assert self._swaps is not None
        self._selector.register  # noqa: B018
        worker.generation = self._swaps.generation
        try:
            child = self._fork(partial(self._work, worker.number))
        except OSError as error:
            self._not_started(worker, f"no process can be started: {error.strerror}", None, 1)
            return
        worker.child = child
        (self._folder / f"worker-{worker.number}.pid").write_text(str(child.pid))
        self._hears(child, partial(self._take, worker))
