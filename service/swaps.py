"""Leads bundles to take over, one at a time: in all workers, or in none.

A bundle is verified in a process for it. Then workers make it ready beside the one that answers: one at
first, which encodes the live phrases for all and shows that it can be done at all, then the others. When all
that there are have, all switch. Until then nothing has changed, and what goes wrong ends the swap; from then
on there is no way back: a worker that does not switch is ended, and started anew with the new bundle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

from bidmatch.base.errors import BidmatchError
from export.bundle.read import Bundle, open_bundle
from service.children import Child

# One worker that ends while it loads a bundle may have been killed by anybody; another one, by the bundle.
_MOST_ENDED = 1


class Part(Enum):
    """A worker's part in a swap."""

    NONE = auto()
    PREPARING = auto()
    PREPARED = auto()
    SWITCHING = auto()


class Stage(Enum):
    """How far a swap has come, and the seconds after which who still is at it counts as stuck."""

    VERIFYING = 1800.0
    PREPARING = 3600.0
    SWITCHING = 60.0


@dataclass(eq=False)
class Worker:
    """A worker process, or the place for one.

    Attributes:
        number: its metrics go on where those of its predecessor of that number ended.
        child: the process; None while there is none.
        ready: it answers requests.
        leaving: it was told to end.
        generation: of the bundle that it answers with.
        part: in the swap that is under way.
        failures: processes that ended one after the other before they were ready.
        start_at: when the next one is started.
    """

    number: int
    child: Child | None = None
    ready: bool = False
    leaving: bool = False
    generation: int = 0
    part: Part = Part.NONE
    failures: int = 0
    start_at: float = 0.0

    @property
    def stays(self) -> bool:
        """It answers requests, and will go on to."""
        return self.ready and not self.leaving


@dataclass(frozen=True)
class Asker:
    """The request that a swap was asked for with: its number, and the process that it came to."""

    pid: int
    request: int


class Crew(Protocol):
    """What carries out what swaps need."""

    def verify(self, path: Path | None) -> None:
        """Begin to verify a bundle, by default the one that the settings lead to.

        What comes of it is told with `Swaps.verified` or `Swaps.unverified`.
        """

    def end(self, worker: Worker, *, at_once: bool) -> None:
        """End a worker, after what it has in hand or at once; another one is started when it has ended."""

    def end_verifying(self) -> None:
        """End what verifies."""


@dataclass
class _Swap:
    generation: int
    asker: Asker | None
    started: float
    stage: Stage
    since: float
    bundle: Bundle | None = None
    proven: bool = False
    ended: int = 0
    report: dict[str, Any] | None = None


class Swaps:
    """See the module. Everything is told what happened, and never waits.

    Args:
        bundle: what answers at first, verified.
        workers: all of them.
        crew: carries out what is decided here.
        say: says a line to the person who runs the service.

    Attributes:
        bundle: what a worker that is started now answers with.
        generation: number of the swap that it came with; 0 for the first.
    """

    def __init__(self, bundle: Bundle, workers: Sequence[Worker], crew: Crew, say: Callable[[str], None]):
        self.bundle, self.generation = bundle, 0
        self._workers, self._crew, self._say = workers, crew, say
        self._swap: _Swap | None = None
        self._begun = 0
        self._stopped = False

    @property
    def running(self) -> bool:
        """Whether a bundle is on its way."""
        return self._swap is not None

    def begin(self, path: Path | None, asker: Asker | None) -> None:
        """Let the bundle at `path` take over, by default the one that the settings lead to."""
        if self._stopped:
            self._answer(asker, op="refused", kind="stopping", reason="The service is stopping.")
            return
        if self._swap is not None:
            self._answer(asker, op="refused", kind="running", reason="Another bundle is about to take over.")
            return
        self._begun += 1
        now = time.monotonic()
        self._swap = _Swap(self._begun, asker, now, Stage.VERIFYING, now)
        self._crew.verify(path)

    def verified(self, path: Path, stamps: dict[str, tuple[int, ...]]) -> None:
        """The bundle is sound."""
        swap = self._swap
        if swap is None or swap.stage is not Stage.VERIFYING:
            return
        try:
            swap.bundle = open_bundle(path, stamps=stamps)
        except BidmatchError as error:
            self._refuse(error.reason, error.hint)
            return
        except Exception as error:  # of a bundle, which must not end the service
            self._refuse(f"{path} cannot be opened: {error}", None)
            return
        self._enter(swap, Stage.PREPARING)
        self._advance()

    def unverified(self, reason: str, hint: str | None) -> None:
        """It is not."""
        if self._swap is not None and self._swap.stage is Stage.VERIFYING:
            self._refuse(reason, hint)

    def ready(self, worker: Worker) -> None:
        """A worker answers requests from now on."""
        worker.ready, worker.failures = True, 0
        self._advance()
        self._end_old()

    def prepared(self, worker: Worker, generation: int) -> None:
        """A worker has the bundle ready."""
        if self._swap is not None and generation == self._swap.generation and worker.part is Part.PREPARING:
            worker.part = Part.PREPARED
            self._swap.proven = True
            self._advance()

    def unprepared(self, worker: Worker, generation: int, reason: str, hint: str | None) -> None:
        """A worker can't take the bundle."""
        if self._swap is not None and generation == self._swap.generation and worker.part is Part.PREPARING:
            worker.part = Part.NONE
            self._refuse(reason, hint)

    def switched(self, worker: Worker, generation: int, report: dict[str, Any]) -> None:
        """A worker answers with the bundle."""
        if self._swap is not None and generation == self._swap.generation and worker.part is Part.SWITCHING:
            worker.part, worker.generation = Part.NONE, generation
            self._swap.report = report
            self._advance()

    def ended(self, worker: Worker) -> None:
        """A worker's process has ended."""
        preparing = worker.part is Part.PREPARING
        worker.ready, worker.part = False, Part.NONE
        swap = self._swap
        if swap is None:
            return
        swap.ended += preparing
        if swap.ended > _MOST_ENDED:
            self._refuse("workers ended while they were loading it", None)
        else:
            self._advance()

    def stop(self) -> None:
        """The service is stopping; no bundle takes over any more."""
        self._stopped = True
        swap = self._close(discard=False)
        if swap is not None:
            self._answer(swap.asker, op="refused", kind="stopping", reason="The service is stopping.")

    def tick(self, now: float) -> None:
        """Time has passed: what is stuck is ended, and the rest follows from that."""
        swap = self._swap
        if swap is None or now - swap.since < swap.stage.value:
            return
        if swap.stage is Stage.VERIFYING:
            self._refuse(f"it was not verified within {swap.stage.value:.0f} seconds", None)
        for worker in self._workers:
            if worker.part in (Part.PREPARING, Part.SWITCHING):
                self._crew.end(worker, at_once=True)

    def _enter(self, swap: _Swap, stage: Stage) -> None:
        swap.stage, swap.since = stage, time.monotonic()

    def _advance(self) -> None:
        """Go on as far as the workers have come."""
        swap = self._swap
        if swap is None or swap.stage is Stage.VERIFYING:
            return
        parts = {worker.part for worker in self._workers}
        if swap.stage is Stage.PREPARING and Part.PREPARING not in parts:
            left = [worker for worker in self._workers if worker.stays and worker.part is Part.NONE]
            for worker in left if swap.proven else left[:1]:
                self._prepare(swap, worker)
            if swap.proven and not left:
                self._switch(swap)
        elif swap.stage is Stage.SWITCHING and Part.SWITCHING not in parts:
            self._finish(swap)

    def _prepare(self, swap: _Swap, worker: Worker) -> None:
        assert swap.bundle is not None
        worker.part = Part.PREPARING
        self._tell(
            worker,
            op="prepare",
            path=str(swap.bundle.path),
            stamps={name: list(stamp) for name, stamp in swap.bundle.stamps.items()},
            token=swap.generation,
        )

    def _switch(self, swap: _Swap) -> None:
        assert swap.bundle is not None
        self._enter(swap, Stage.SWITCHING)
        self.bundle.close()
        self.bundle, self.generation, swap.bundle = swap.bundle, swap.generation, None
        for worker in self._workers:
            if worker.part is Part.PREPARED:
                worker.part = Part.SWITCHING
                self._tell(worker, op="switch", token=swap.generation)
        self._advance()

    def _finish(self, swap: _Swap) -> None:
        self._swap = None
        seconds = round(time.monotonic() - swap.started, 3)
        self._say(f"bundle {self.bundle.manifest.bundle_id} has taken over ({seconds:.1f} s)")
        self._answer(swap.asker, op="reloaded", report={**(swap.report or {}), "seconds": seconds})
        if swap.asker is None:
            self._count("taken")
        self._end_old()

    def _refuse(self, reason: str, hint: str | None) -> None:
        swap = self._close(discard=True)
        if swap is None:
            return
        self._say(f"bundle refused, the one before still answers: {reason}")
        self._answer(swap.asker, op="refused", kind="bundle", reason=reason, hint=hint)
        if swap.asker is None:
            self._count("refused")
        self._end_old()

    def _close(self, *, discard: bool) -> _Swap | None:
        """End a swap that has not taken over."""
        swap, self._swap = self._swap, None
        if swap is None:
            return None
        self._crew.end_verifying()
        if swap.bundle is not None:
            swap.bundle.close()
        for worker in self._workers:
            if discard and worker.part is not Part.NONE:
                self._tell(worker, op="discard", token=swap.generation)
            worker.part = Part.NONE
        return swap

    def _end_old(self) -> None:
        """End those that were started with a bundle before the present one, and were ready too late."""
        for worker in self._workers:
            if self._swap is None and worker.stays and worker.generation != self.generation:
                self._crew.end(worker, at_once=False)

    def _tell(self, worker: Worker, **message: Any) -> None:
        if worker.child is None or not worker.child.channel.send(**message):
            self._crew.end(worker, at_once=True)

    def _answer(self, asker: Asker | None, **message: Any) -> None:
        for worker in self._workers:
            if asker is not None and worker.child is not None and worker.child.pid == asker.pid:
                worker.child.channel.send(request=asker.request, **message)

    def _count(self, outcome: str) -> None:
        """What nobody asked for over HTTP is counted by one of the workers, as what was asked for is."""
        for worker in self._workers:
            if worker.stays and worker.child is not None:
                worker.child.channel.send(op="count", outcome=outcome)
                return
