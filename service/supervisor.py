"""The parent of the workers: starts them, starts those anew that end, hears signals, looks for new bundles.

It answers no request, starts no threads, and what may take long or fail is done by processes that it starts:
so it can fork at any time, and hears at once what happens.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from bidmatch.base.errors import BidmatchError, DamagedError
from export.bundle.read import open_bundle
from service.channel import Channel
from service.children import SIGNALS, Child, Closable, fork
from service.logs import announcer
from service.priority import give_way
from service.security import guard_for
from service.server import refused
from service.serving import newest_bundle
from service.settings import Settings
from service.swaps import Asker, Swaps, Worker

BACKLOG = 2048
_TICK_S = 0.5
_LOOK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# Beyond the time that requests in flight have, for a worker to put its things away.
_TIDY_S = 10.0

Message = dict[str, Any]


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
        self._swaps: Swaps | None = None  # until the first bundle is verified
        self._children: dict[int, Child] = {}
        self._verifier: Child | None = None
        self._signals: set[int] = set()
        self._announced = False
        self._failure: BidmatchError | None = None
        self._kill_at: float | None = None  # set when the service is stopping
        self._watch = Watch(settings.bundle)
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))

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
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        (self._folder / "parent.pid").write_text(str(os.getpid()))
        self._say(f"loading {self._settings.bundle}")
        self.verify(None)
        # Meanwhile this process reads what the workers will run.
        from service.worker import work

        self._work = work
        while self._kill_at is None or self._children:
            self._turn()
        if self._failure is not None:
            raise self._failure
        if signal.SIGINT in self._signals:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and number in self._signals and self._kill_at is not None:
            self._kill_at = 0.0  # who asks again does not want to wait
        self._signals.add(number)

    def _turn(self) -> None:
        """Wait until something happens, and see to it."""
        for key, _ in self._selector.select(_TICK_S):
            key.data()
        self._reap()
        now = time.monotonic()
        if self._signals & {signal.SIGTERM, signal.SIGINT}:
            self._stop(None)
        if self._kill_at is not None:
            self._kill_late(now)
        elif self._swaps is not None:
            self._swaps.tick(now)
            for worker in self._workers:
                if worker.child is None and now >= worker.start_at:
                    self._start(worker)
            self._look(now)

    # Children

    def _fork(
        self, run: Callable[[Channel], None], take: Callable[[Message], None], *closed: Closable
    ) -> Child:
        """Start a child; what it says is taken until it has ended."""
        others = [child.channel for child in self._children.values()]
        child = fork(run, [self._selector, self._woken, self._waker, *others, *closed])
        self._children[child.pid] = child

        def hear() -> None:
            messages, there = child.channel.receive()
            for message in messages:
                try:
                    take(message)
                except (KeyError, TypeError, ValueError):
                    self._say(f"process {child.pid} sent what can't be read: {message}")
            if not there:
                self._selector.unregister(child.channel)
                if child.pid in self._children:
                    # It is about to end, or can't be talked to any more.
                    os.kill(child.pid, signal.SIGKILL)

        self._selector.register(child.channel, selectors.EVENT_READ, hear)
        return child

    def _reap(self) -> None:
        """See to the children that have ended."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            child = self._children.pop(pid, None)
            if child is None:
                # As the first process of a container this one inherits orphans of others.
                continue
            if child.channel in self._selector.get_map():
                self._selector.get_key(child.channel).data()  # its last words
            if child.channel in self._selector.get_map():
                self._selector.unregister(child.channel)
            child.channel.close()
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code}" if code < 0 else f"code {code}"
            if child is self._verifier:
                self._unverified(f"the process that verified it ended with {how}", None, 1)
            for worker in self._workers:
                if worker.child is child:
                    self._ended(worker, how)

    # Workers

    def _start(self, worker: Worker) -> None:
        assert self._swaps is not None
        worker.generation, worker.ready, worker.leaving = self._swaps.generation, False, False
        try:
            child = self._fork(partial(self._be, worker.number), partial(self._hear, worker))
        except OSError as error:
            self._not_started(worker, f"no process can be started: {error.strerror}", None, 1)
            worker.failures += 1
            self._pause(worker)
            return
        worker.child = child
        (self._folder / f"worker-{worker.number}.pid").write_text(str(child.pid))

    def _be(self, number: int, channel: Channel) -> None:
        """What a worker's process does."""
        assert self._swaps is not None
        parent, held = os.getppid(), [self._swaps.bundle]
        # What this process held of bundles would keep them in memory when others have taken over.
        self._swaps = None
        try:
            self._work(number, self._settings, held.pop(), self._listener, channel, self._guard)
        finally:
            if os.getppid() != parent:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _hear(self, worker: Worker, message: Message) -> None:
        assert self._swaps is not None
        op = message["op"]
        if op == "ready":
            self._swaps.ready(worker)
            if not self._announced and all(one.ready for one in self._workers):
                self._announce()
        elif op == "failed":
            self._not_started(worker, str(message["reason"]), message["hint"], int(message["code"]))
        elif op == "reload" and worker.child is not None:
            path = None if message["bundle"] is None else Path(message["bundle"])
            self._swaps.begin(path, Asker(worker.child.pid, int(message["request"])))
        elif op == "prepared":
            self._swaps.prepared(worker, message["token"])
        elif op == "unprepared":
            self._swaps.unprepared(worker, message["token"], str(message["reason"]), message["hint"])
        elif op == "switched":
            self._swaps.switched(worker, message["token"], dict(message["report"]))
        else:
            raise ValueError(op)

    def _not_started(self, worker: Worker, reason: str, hint: str | None, code: int) -> None:
        if self._announced:
            self._say(f"worker {worker.number} can't start: {reason}")
            return
        # What keeps a worker from starting at all is said once, and ends the service.
        failure = BidmatchError(reason, hint=hint)
        failure.exit_code = code
        self._stop(failure)

    def _ended(self, worker: Worker, how: str) -> None:
        assert self._swaps is not None
        was_ready = worker.ready
        worker.child = None
        mark_process_dead(worker.number, str(self._folder))
        self._swaps.ended(worker)
        if self._kill_at is not None:
            return
        if not self._announced and not was_ready:
            self._not_started(worker, f"worker {worker.number} ended with {how} at its start", None, 1)
            return
        worker.failures = 0 if was_ready else worker.failures + 1
        self._pause(worker)
        self._say(f"worker {worker.number} ended with {how}; another one is started")

    def _pause(self, worker: Worker) -> None:
        """Wait longer and longer where one after the other does not even get ready."""
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**worker.failures) if worker.failures else 0.0
        worker.start_at = time.monotonic() + pause

    def _announce(self) -> None:
        assert self._swaps is not None
        self._announced = True
        host, port = self._listener.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        manifest = self._swaps.bundle.manifest
        again = manifest.rescore is not None and self._settings.rescore is not False
        self._say(
            f"serving bundle {manifest.bundle_id}, {manifest.counts.phrases:,} phrases"
            + (", re-scoring candidates" if again else "")
        )
        self._say(f"ready: http://{name}:{port}")

    def end(self, worker: Worker, *, at_once: bool) -> None:
        """See `Crew`."""
        if worker.child is not None:
            worker.leaving = True
            with suppress(ProcessLookupError):  # it has ended, and is about to be reaped
                os.kill(worker.child.pid, signal.SIGKILL if at_once else signal.SIGTERM)

    def _stop(self, failure: BidmatchError | None) -> None:
        if self._kill_at is not None:
            return
        self._failure = failure
        self._kill_at = time.monotonic() + self._settings.shutdown_ms / 1000 + _TIDY_S
        if self._announced:
            self._say("stopping: no new connections, answering what is in flight")
        if self._swaps is not None:
            self._swaps.stop()
        self.end_verifying()
        for worker in self._workers:
            self.end(worker, at_once=False)

    def _kill_late(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + _TIDY_S
            for worker in self._workers:
                if worker.child is not None:
                    self._say(f"worker {worker.number} does not end, so it is killed")
                    self.end(worker, at_once=True)

    # Bundles

    def verify(self, path: Path | None) -> None:
        """See `Crew`."""
        if path is None:
            self._watch.mark()
        first = self._swaps is None
        try:
            run = partial(_verify, path or self._settings.bundle, first)
            self._verifier = self._fork(
                run, lambda message: self._hear_verifier(child, message), self._listener
            )
            child = self._verifier
        except OSError as error:
            self._unverified(f"no process can be started: {error.strerror}", None, 1)

    def end_verifying(self) -> None:
        """See `Crew`."""
        if self._verifier is not None:
            os.kill(self._verifier.pid, signal.SIGKILL)
            self._verifier = None

    def _hear_verifier(self, verifier: Child, message: Message) -> None:
        if verifier is not self._verifier:
            return
        if message["op"] == "failed":
            self._unverified(message["reason"], message["hint"], int(message["code"]))
            return
        path = Path(message["path"])
        stamps = {name: tuple(stamp) for name, stamp in message["stamps"].items()}
        self._verifier = None
        if self._swaps is not None:
            self._swaps.verified(path, stamps)
        else:
            self._open(path, stamps)

    def _unverified(self, reason: str, hint: str | None, code: int) -> None:
        self._verifier = None
        if self._swaps is not None:
            self._swaps.unverified(reason, hint)
            return
        failure = BidmatchError(reason, hint=hint)
        failure.exit_code = code
        self._stop(failure)

    def _open(self, path: Path, stamps: dict[str, tuple[int, ...]]) -> None:
        """The first bundle is sound: workers can start."""
        try:
            self._swaps = Swaps(open_bundle(path, stamps=stamps), self._workers, self, self._say)
        except BidmatchError as error:
            self._stop(error)
            return
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            # Two servers may bind the same port; the second to listen is refused.
            self._stop(refused(error, self._settings.host, self._settings.port))

    def _look(self, now: float) -> None:
        """Let a bundle take over that a signal or the path's own change announces, when none is under way."""
        assert self._swaps is not None
        if self._swaps.running:
            return
        if signal.SIGHUP in self._signals:
            self._signals.discard(signal.SIGHUP)
            self._swaps.begin(None, None)
        elif self._settings.watch and self._watch.changed(now):
            self._swaps.begin(None, None)


class Watch:
    """Notices when a path leads to another bundle: a link, or a folder of bundles that gets a new one.

    Args:
        path: as in the settings.
    """

    def __init__(self, path: Path):
        self._path = path
        self._marked: tuple[Any, ...] | None = None
        self._seen: tuple[Any, ...] | None = None
        self._look_at = 0.0

    def mark(self) -> None:
        """The bundle that the path leads to now is known."""
        self._marked = self._seen = self._stamp()

    def changed(self, now: float) -> bool:
        """Whether it leads to another one, and has for two looks, so that nobody is still writing it."""
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        before, self._seen = self._seen, self._stamp()
        return self._seen is not None and self._seen == before and self._seen != self._marked

    def _stamp(self) -> tuple[Any, ...] | None:
        """What tells the bundle from another one; None where the path leads to none just now."""
        try:
            chosen = os.path.realpath(newest_bundle(self._path), strict=True)
            with os.scandir(chosen) as entries:
                files = [(entry.name, entry.inode(), entry.stat(follow_symlinks=False)) for entry in entries]
        except (OSError, ValueError, BidmatchError):
            return None
        return chosen, *sorted((name, inode, of.st_size, of.st_mtime_ns) for name, inode, of in files)


def _verify(path: Path, first: bool, channel: Channel) -> None:
    """Verify the bundle that a path leads to, in a process for it; tell where it is, and its stamps."""
    if not first:
        give_way()
    try:
        # Where links lead in a loop `Path.resolve` raises what is no OSError.
        chosen = Path(os.path.realpath(newest_bundle(path)))
        with open_bundle(chosen) as bundle:
            stamps = {name: list(stamp) for name, stamp in bundle.stamps.items()}
    except (OSError, ValueError) as error:
        raise DamagedError(f"{str(path)!r} cannot be opened: {error}") from error
    channel.send(op="verified", path=str(chosen), stamps=stamps)
