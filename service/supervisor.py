"""The parent of the workers: starts them, starts those anew that die, and leads swaps of the bundle.

A swap has two steps, so that it happens everywhere or nowhere: every worker prepares the new bundle beside the
old one, and only when all have, all switch. The parent verifies the files once; workers open them unread.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bidmatch.base.errors import BidmatchError, DamagedError
from export.bundle.read import Bundle, open_bundle
from service.channel import Channel, channel_pair
from service.logs import announcer
from service.security import Guard, guard_for
from service.server import refused
from service.serving import newest_bundle
from service.settings import Settings

BACKLOG = 2048
_WATCH_S = 1.0
# A worker that dies sooner than this after it was started is started anew only after a pause.
_SOON_S = 10.0
_LONGEST_PAUSE_S = 30.0


@dataclass
class _Worker:
    number: int
    pid: int = 0
    channel: Channel | None = None
    started: float = 0.0
    ready: bool = False
    failures: int = 0
    start_at: float = 0.0
    token: int = 0  # of the swap that it takes part in


@dataclass
class _Swap:
    """One bundle on its way to take over."""

    token: int
    path: Path
    bundle: Bundle
    asked_by: tuple[int, int] | None
    started: float
    waiting: set[int] = field(default_factory=set)
    switching: bool = False
    report: dict[str, Any] = field(default_factory=dict)
    # The first worker encodes live phrases for all; the others begin when it is done.
    queue: list[int] = field(default_factory=list)


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
        self._workers = [_Worker(number) for number in range(settings.workers)]
        self._selector = selectors.DefaultSelector()
        self._signals: set[int] = set()
        self._swap: _Swap | None = None
        self._tokens = 0
        self._stopping = False
        self._announced = False
        self._watched: tuple[Any, ...] | None = None
        self._look_at = 0.0

    def run(self) -> None:
        """Serve until a signal ends it."""
        for line in self._settings.lines():
            self._say(f"setting {line}")
        self._guard: Guard = guard_for(
            self._settings.host,
            self._settings.auth,
            self._settings.api_keys_file,
            self._settings.admin_keys_file,
            say=self._say,
        )
        wakeup, woken = socket.socketpair()
        for end in (wakeup, woken):
            end.setblocking(False)
        self._wakeup = (wakeup, woken)
        self._selector.register(wakeup, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        path = newest_bundle(self._settings.bundle)
        self._say(f"loading {path}")
        self._bundle = open_bundle(path)
        self._watched = _stamp(self._settings.bundle)
        (self._folder / "parent.pid").write_text(str(os.getpid()))
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            # Two servers may bind the same port; the second to listen is refused.
            raise refused(error, self._settings.host, self._settings.port) from None
        for worker in self._workers:
            self._start(worker)
        while not (self._stopping and not any(worker.pid for worker in self._workers)):
            self._turn()
        if signal.SIGINT in self._signals:
            raise KeyboardInterrupt
        sys.exit(self._exit_code)

    _exit_code = 0

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals.add(number)

    def _turn(self) -> None:
        for key, _ in self._selector.select(timeout=0.2):
            if key.fileobj is self._wakeup[0]:
                self._wakeup[0].recv(4096)
            else:
                self._hear(key.data)
        for number in (signal.SIGTERM, signal.SIGINT):
            if number in self._signals and not self._stopping:
                self._stop()
        if signal.SIGHUP in self._signals:
            self._signals.discard(signal.SIGHUP)
            self._begin(None, None)
        self._reap()
        now = time.monotonic()
        for worker in self._workers:
            if not worker.pid and not self._stopping and now >= worker.start_at:
                self._start(worker)
        if self._settings.watch and now >= self._look_at and not self._stopping:
            self._look_at = now + _WATCH_S
            seen = _stamp(self._settings.bundle)
            if seen is not None and seen != self._watched and self._swap is None:
                self._watched = seen
                self._begin(None, None)

    # Workers

    def _start(self, worker: _Worker) -> None:
        ours, theirs = channel_pair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                for end in self._wakeup:
                    end.close()
                ours.close()
                for other in self._workers:
                    if other.channel is not None:
                        other.channel.close()
                self._selector.close()
                from service.worker import work

                work(worker.number, self._settings, self._bundle, self._listener, theirs, self._guard)
                code = 0
            except BidmatchError as error:
                theirs.send(op="failed", reason=error.reason, hint=error.hint, code=error.exit_code)
                code = error.exit_code
            except SystemExit as ending:
                code = ending.code if isinstance(ending.code, int) else 1
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        theirs.close()
        worker.pid, worker.channel, worker.started, worker.ready = pid, ours, time.monotonic(), False
        worker.token = 0
        (self._folder / f"worker-{worker.number}.pid").write_text(str(pid))
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _hear(self, worker: _Worker) -> None:
        if worker.channel is None:
            return
        messages, there = worker.channel.receive()
        for message in messages:
            self._take(worker, message)
        if not there and worker.channel is not None:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "ready":
            worker.ready = True
            if not self._announced and all(one.ready for one in self._workers):
                self._announce()
            if self._swap is not None or message["bundle"] != self._bundle.manifest.bundle_id:
                # Begun before a swap ended: it is brought to where the others are.
                self._join(worker)
        elif op == "failed":
            worker.failures += 1
            if not self._announced:
                # What keeps a worker from starting at all is told once, and ends the service.
                self._exit_code = int(message["code"])
                self._failure = BidmatchError(message["reason"], hint=message["hint"])
                hint = f" {message['hint']}" if message["hint"] else ""
                self._say(f"bidmatch: {message['reason']}.{hint}")
                self._stop()
        elif op == "reload":
            path = None if message["bundle"] is None else Path(message["bundle"])
            self._begin(path, (worker.number, message["request"]))
        elif op in ("prepared", "refused", "switched"):
            self._progress(worker, message)

    def _announce(self) -> None:
        self._announced = True
        host, port = self._listener.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        manifest = self._bundle.manifest
        again = manifest.rescore is not None and self._settings.rescore is not False
        self._say(
            f"serving bundle {manifest.bundle_id}, {manifest.counts.phrases:,} phrases"
            + (", re-scoring candidates" if again else "")
        )
        self._say(f"ready: http://{name}:{port}")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            worker = next((one for one in self._workers if one.pid == pid), None)
            if worker is None:
                continue
            self._hear(worker)
            if worker.channel is not None:
                self._selector.unregister(worker.channel)
                worker.channel.close()
                worker.channel = None
            worker.pid, worker.ready = 0, False
            if self._stopping:
                continue
            alive = time.monotonic() - worker.started
            worker.failures = worker.failures + 1 if alive < _SOON_S else 0
            pause = 0.0 if worker.failures < 2 else min(_LONGEST_PAUSE_S, 0.5 * 2**worker.failures)
            worker.start_at = time.monotonic() + pause
            how = (
                f"signal {-os.waitstatus_to_exitcode(status)}"
                if os.WIFSIGNALED(status)
                else f"code {os.waitstatus_to_exitcode(status)}"
            )
            self._say(
                f"worker {worker.number} ended with {how}; starting it anew"
                + (f" in {pause:.0f} s" if pause else "")
            )
            if self._swap is not None:
                self._swap.waiting.discard(worker.number)
                self._advance()

    def _stop(self) -> None:
        self._stopping = True
        self._say("stopping: no new connections, answering what is in flight")
        for worker in self._workers:
            if worker.pid:
                os.kill(worker.pid, signal.SIGTERM)

    # Swaps

    def _begin(self, path: Path | None, asked_by: tuple[int, int] | None) -> None:
        if self._swap is not None:
            self._answer(
                asked_by, op="refused", kind="running", reason="Another bundle is about to take over."
            )
            return
        started = time.monotonic()
        chosen = newest_bundle(path or self._settings.bundle)
        try:
            bundle = open_bundle(chosen)
        except DamagedError as error:
            self._refuse(asked_by, error.reason, error.hint)
            return
        self._tokens += 1
        swap = _Swap(self._tokens, chosen.resolve(), bundle, asked_by, started)
        swap.queue = [worker.number for worker in self._workers if worker.ready]
        self._swap = swap
        if not swap.queue:
            self._swap = None
            self._replace(bundle)
            return
        self._prepare(swap.queue.pop(0))

    def _prepare(self, number: int) -> None:
        assert self._swap is not None
        swap, worker = self._swap, self._workers[number]
        if worker.channel is None:
            return
        stamps = {name: list(stamp) for name, stamp in swap.bundle.stamps.items()}
        swap.waiting.add(number)
        worker.token = swap.token
        worker.channel.send(op="prepare", path=str(swap.path), stamps=stamps, token=swap.token)

    def _join(self, worker: _Worker) -> None:
        """A worker that has just begun takes part in the swap, or catches up with one that is over."""
        if self._swap is not None and not self._swap.switching:
            self._prepare(worker.number)
        elif worker.pid and worker.channel is not None and self._swap is None:
            os.kill(worker.pid, signal.SIGTERM)  # it is forked anew from the present bundle

    def _progress(self, worker: _Worker, message: dict[str, Any]) -> None:
        swap = self._swap
        if swap is None or message["token"] != swap.token:
            return
        if message["op"] == "refused":
            for other in self._workers:
                if other.channel is not None and other.token == swap.token:
                    other.channel.send(op="discard", token=swap.token)
            self._swap = None
            swap.bundle.close()
            self._refuse(swap.asked_by, message["reason"], message["hint"])
            return
        swap.waiting.discard(worker.number)
        if message["op"] == "switched":
            swap.report = message["report"]
        self._advance()

    def _advance(self) -> None:
        swap = self._swap
        if swap is None or swap.waiting:
            return
        if not swap.switching and swap.queue:
            for number in swap.queue:
                self._prepare(number)
            swap.queue = []
            if swap.waiting:
                return
        if not swap.switching:
            swap.switching = True
            self._replace(swap.bundle)
            for worker in self._workers:
                if worker.channel is not None and worker.token == swap.token:
                    swap.waiting.add(worker.number)
                    worker.channel.send(op="switch", token=swap.token)
            if swap.waiting:
                return
        self._swap = None
        seconds = round(time.monotonic() - swap.started, 3)
        report = {**swap.report, "seconds": seconds}
        self._say(f"bundle {self._bundle.manifest.bundle_id} has taken over ({seconds:.1f} s)")
        self._answer(swap.asked_by, op="reloaded", report=report)
        for worker in self._workers:
            if worker.ready and worker.token != swap.token:
                self._join(worker)

    def _replace(self, bundle: Bundle) -> None:
        old, self._bundle = self._bundle, bundle
        old.close()

    def _refuse(self, asked_by: tuple[int, int] | None, reason: str, hint: str | None) -> None:
        self._say(f"bundle refused, the one before still answers: {reason}")
        self._answer(asked_by, op="refused", kind="bundle", reason=reason, hint=hint)

    def _answer(self, asked_by: tuple[int, int] | None, **message: Any) -> None:
        if asked_by is None:
            return
        number, request = asked_by
        channel = self._workers[number].channel
        if channel is not None:
            channel.send(request=request, **message)


def _stamp(path: Path) -> tuple[Any, ...] | None:
    """What changes when the path leads to another bundle; None where it leads to none just now."""
    try:
        chosen = newest_bundle(path).resolve(strict=True)
        state = (chosen / "manifest.json").stat()
    except (OSError, BidmatchError):
        return None
    return str(chosen), state.st_ino, state.st_size, state.st_mtime_ns
