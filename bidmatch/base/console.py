"""Output for people (stderr) and for programs (stdout, JSON), kept apart."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_PLAIN_INTERVAL_S = 5.0
_QUIET_BELOW_S = 1.0
_silent = False


def be_silent() -> None:
    """Say nothing and show no progress from here on: another process speaks for this one, too."""
    global _silent
    _silent = True


def say(message: str) -> None:
    """One line for the person who runs the command, on stderr, so that stdout stays parseable."""
    if not _silent:
        complain(message)


def complain(message: str) -> None:
    """Say why this process ends; said even where it is otherwise silent."""
    # At once: between two writes another thread may say something.
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def emit_json(value: Any) -> None:
    """Write one JSON document (indented, NaN as null) and a newline to stdout."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    sys.stdout.write(orjson.dumps(value, option=options).decode() + "\n")
    sys.stdout.flush()


def _clock(seconds: float) -> str:
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


class Step:
    """Progress of one long step. `advance` may be called from the thread that made it."""

    def __init__(self, label: str, total: int | None, unit: str):
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.note = ""
        self._started = time.monotonic()
        self._printed = self._started
        self._said: int | None = None
        self._bar: Progress | None = None
        self._task: Any = None

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count `n` more units as done; `note` (such as a loss) is shown behind the figures."""
        self.done += n
        self.note = note or self.note
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rate=self._rate(), note=self.note)
        elif time.monotonic() - self._printed >= _PLAIN_INTERVAL_S:
            self._printed = time.monotonic()
            self._said = self.done
            say(self._line())

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started

    def _rate(self) -> str:
        return f"{self.done / max(self.elapsed, 1e-9):,.0f} {self.unit}/s"

    def _line(self) -> str:
        elapsed = self.elapsed
        parts = [f"{self.done:,}" + ("" if self.total is None else f"/{self.total:,}"), self._rate()]
        if self.total and 0 < self.done < self.total:
            parts.append(f"{_clock(elapsed / self.done * (self.total - self.done))} left")
        else:
            parts.append(f"in {_clock(elapsed)}")
        if self.note:
            parts.append(self.note)
        return f"{self.label}: " + ", ".join(parts)


@contextmanager
def progress(label: str, total: int | None, unit: str = "items") -> Iterator[Step]:
    """A bar with rate and time left on a terminal; elsewhere a plain line every five seconds and at the
    end, none for a step of under a second.

    Args:
        label: what is being done, as a person would say it.
        total: units in all, or None where unknown.
        unit: plural name of what is counted.
    """
    step = Step(label, total, unit)
    console = Console(stderr=True)
    if _silent or not console.is_terminal:
        yield step
        if step.elapsed >= _QUIET_BELOW_S and step._said != step.done:
            say(step._line())
        return
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    with Progress(*columns, console=console) as bar:
        step._bar = bar
        step._task = bar.add_task(label, total=total, rate="", note="")
        yield step
