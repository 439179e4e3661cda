"""The parent of the workers, with workers that do what sound ones do not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.supervisor import Watch
from tests.integration.service.swapping import alive, children, eventually, variant

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import service.supervisor as supervisor
import service.worker
from bidmatch.base.errors import ConfigError
from bidmatch.cli import main

bundle, folder, workers = sys.argv[1:]
starts = Path(folder)

def begun(number):
    # How many workers of this number were started before.
    with (starts / str(number)).open("a") as file:
        file.write("x")
    return (starts / str(number)).stat().st_size - 1

def until_told(channel, *ops):
    while True:
        messages, there = channel.receive()
        for message in messages:
            if message["op"] in ops:
                return message
        if not there:
            return None
        time.sleep(0.005)

def work(number, settings, bundle, listener, channel, guard):
{body}

service.worker.work = work
supervisor._TIDY_S = 0.3
supervisor._LONGEST_PAUSE_S = 1.0
settings = ["--bundle", bundle, "--port", "0", "--workers", workers, "--shutdown-ms", "200"]
sys.argv = ["bidmatch", "serve", *settings]
main()
"""


class Parent:
    """The service with workers that run a piece of Python."""

    def __init__(self, bundle: Path, folder: Path, body: str, workers: int = 1):
        self.starts = folder
        script = SCRIPT.replace("{body}", "\n".join(f"    {line}" for line in body.splitlines()))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(bundle), str(folder), str(workers)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said += (line.rstrip("\n") for line in iter(self.process.stderr.readline, ""))

    def begun(self, number: int = 0) -> int:
        """How many workers of a number were started."""
        file = self.starts / str(number)
        return file.stat().st_size if file.exists() else 0

    def heard(self, text: str) -> bool:
        return any(text in line for line in self.said)

    def until_ready(self) -> None:
        eventually(lambda: self.heard("ready: ") or self.process.poll() is not None)
        assert self.process.poll() is None, self.said

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.code()

    def code(self) -> int:
        code = self.process.wait(20)
        self._reader.join()
        return code


@pytest.fixture
def parent(tiny_bundle: Path, tmp_path: Path) -> Iterator[Callable[..., Parent]]:
    made: list[Parent] = []

    def make(body: str, workers: int = 1) -> Parent:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Parent(tiny_bundle, folder, body, workers))
        return made[-1]

    yield make
    for one in made:
        workers = children(one.process.pid) if one.process.poll() is None else []
        one.process.kill()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        one.code()


SOUND = 'begun(number); channel.send(op="ready"); until_told(channel)'


def test_a_sound_one(parent: Callable[..., Parent]) -> None:
    one = parent(SOUND, workers=3)
    one.until_ready()
    assert one.stop() == 0
    assert [one.begun(number) for number in range(3)] == [1, 1, 1]


def test_odd_messages_end_nothing(parent: Callable[..., Parent]) -> None:
    odd = [
        b"no json",
        b"[]",
        b'{"op": "dance"}',
        b'{"op": "failed"}',
        b'{"op": "reload"}',
        b'{"op": "reload", "bundle": 3, "request": 1}',
        b'{"op": "reload", "bundle": "/none", "request": "x"}',
        b'{"op": "reload", "bundle": null, "request": null}',
        b'{"op": "prepared"}',
        b'{"op": "prepared", "token": {}}',
        b'{"op": "unprepared", "token": []}',
        b'{"op": "switched", "token": 0, "report": 3}',
        b'{"op": "switched", "token": 0}',
        b'{"op": "verified", "path": "/", "stamps": {}}',
        b"\xff\xfe\x00",
        b"[" * 50_000,
    ]
    one = parent(
        f"""
begun(number)
channel._end.setblocking(True)
channel._end.sendall({b"".join(line + bytes([10]) for line in odd)!r})
channel._end.setblocking(False)
channel.send(op="ready")
until_told(channel)
"""
    )
    one.until_ready()
    eventually(lambda: sum("can't be read" in line for line in one.said) >= len(odd) - 3)
    assert one.process.poll() is None
    assert one.stop() == 0
    assert one.begun() == 1
    assert "Traceback" not in "\n".join(one.said)


def test_a_worker_whose_messages_have_no_end_is_let_go(parent: Callable[..., Parent]) -> None:
    one = parent(
        """
again = begun(number)
channel.send(op="ready")
if not again:
    channel._end.setblocking(True)
    try:
        while True:
            channel._end.sendall(b"x" * 65536)
    except OSError:
        sys.exit(0)
until_told(channel)
"""
    )
    one.until_ready()
    eventually(lambda: one.begun() == 2)
    assert one.stop() == 0


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ('raise ConfigError("no room", hint="Make some.")', 2, "error: no room"),
        ('raise ValueError("a bug")', 1, "error: ValueError: a bug"),
        ("os.kill(os.getpid(), 9)", 1, "ended with signal 9 at its start"),
        ("os._exit(7)", 1, "ended with code 7 at its start"),
        ("return", 1, "ended with code 0 at its start"),
    ],
)
def test_what_keeps_all_from_starting_ends_the_service(
    parent: Callable[..., Parent], body: str, code: int, reason: str
) -> None:
    one = parent(f"begun(number)\n{body}", workers=3)
    assert one.code() == code
    assert sum(reason in line for line in one.said) == 1, one.said
    assert max(one.begun(number) for number in range(3)) == 1


def test_one_that_can_no_longer_start_is_tried_less_and_less_often(parent: Callable[..., Parent]) -> None:
    """The others go on; the service does not end for it, nor keep a processor busy."""
    one = parent(
        """
again = begun(number)
if number and again:
    raise ConfigError("the disk is full")
channel.send(op="ready")
if number:
    time.sleep(0.2)
    os.kill(os.getpid(), 9)
until_told(channel)
""",
        workers=2,
    )
    one.until_ready()
    eventually(lambda: one.begun(1) >= 3)
    begun, started = one.begun(1), time.monotonic()
    time.sleep(2)
    assert one.begun(1) - begun <= 2 + (time.monotonic() - started) / 1.0
    assert one.begun(0) == 1
    assert one.heard("worker 1 can't start: the disk is full")
    assert one.process.poll() is None
    assert one.stop() == 0


def test_one_that_dies_when_it_was_ready_is_started_at_once(parent: Callable[..., Parent]) -> None:
    one = parent(
        """
if begun(number) < 8:
    channel.send(op="ready")
    os.kill(os.getpid(), 9)
channel.send(op="ready")
until_told(channel)
"""
    )
    started = time.monotonic()
    eventually(lambda: one.begun() == 9)
    assert time.monotonic() - started < 15
    assert one.stop() == 0


def test_one_that_does_not_end_is_killed(parent: Callable[..., Parent]) -> None:
    one = parent(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
begun(number)
channel.send(op="ready")
time.sleep(60)
"""
    )
    one.until_ready()
    workers = children(one.process.pid)
    assert one.stop() == 0
    assert one.heard("worker 0 does not end, so it is killed")
    assert not any(map(alive, workers))


def test_who_asks_twice_does_not_wait(parent: Callable[..., Parent]) -> None:
    one = parent(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
begun(number)
channel.send(op="ready")
time.sleep(60)
"""
    )
    one.until_ready()
    one.process.send_signal(signal.SIGINT)
    eventually(lambda: one.heard("stopping"))
    assert one.stop(signal.SIGINT) == 130


def test_a_worker_asks_for_a_bundle_and_the_others_have_their_say(
    parent: Callable[..., Parent], tiny_bundle: Path, tmp_path: Path
) -> None:
    """A swap that never gets further, because one is stuck, does not keep the service from ending."""
    one = parent(
        f"""
begun(number)
channel.send(op="ready")
if number == 0:
    time.sleep(0.5)
    channel.send(op="reload", bundle={str(tiny_bundle)!r}, request=1)
    channel.send(op="reload", bundle={str(tiny_bundle)!r}, request=2)
    running = until_told(channel, "refused")
    assert (running["kind"], running["request"]) == ("running", 2), running
    message = until_told(channel, "prepare")
    channel.send(op="prepared", token=message["token"])
    stopping = until_told(channel, "refused")
    assert (stopping["kind"], stopping["request"]) == ("stopping", 1), stopping
    print("was told", file=sys.stderr, flush=True)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until_told(channel, "prepare")
    print("is stuck", file=sys.stderr, flush=True)
    time.sleep(60)
""".replace("begun(number)\n", "begun(number)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n", 1),
        workers=2,
    )
    one.until_ready()
    eventually(lambda: one.heard("is stuck"))
    assert one.stop() == 0
    assert one.heard("was told")
    assert "Traceback" not in "\n".join(one.said)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[Watch], bool]:
    """Look twice, as it takes two looks that agree."""
    monkeypatch.setattr("service.supervisor._LOOK_S", 0.0)

    def looking(watch: Watch) -> bool:
        watch.changed(time.monotonic())
        return watch.changed(time.monotonic())

    return looking


def test_what_a_watch_notices(look: Callable[[Watch], bool], tiny_bundle: Path, tmp_path: Path) -> None:
    first = variant(tiny_bundle, tmp_path / "1", created="2024-01-01T00:00:00+00:00")
    second = variant(tiny_bundle, tmp_path / "2", created="2024-01-02T00:00:00+00:00")
    link = tmp_path / "current"
    link.symlink_to(first)
    watch = Watch(link)
    watch.mark()
    assert not look(watch)
    link.unlink()
    assert not look(watch)
    link.symlink_to(first)
    assert not look(watch)
    link.unlink()
    link.symlink_to(second)
    # Once is not enough: it may still be written.
    assert not watch.changed(time.monotonic())
    assert watch.changed(time.monotonic())
    watch.mark()
    assert not look(watch)
    # The same name, another bundle.
    shutil.rmtree(second)
    variant(tiny_bundle, second, mark="C-", created="2024-01-02T00:00:00+00:00")
    assert look(watch)
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    assert not look(watch)


def test_a_bundle_that_is_being_written_is_not_taken(
    look: Callable[[Watch], bool], tiny_bundle: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundles"
    variant(tiny_bundle, folder / "1", created="2024-01-01T00:00:00+00:00")
    watch = Watch(folder)
    watch.mark()
    second = variant(tiny_bundle, tmp_path / "aside", created="2024-01-02T00:00:00+00:00")
    (folder / "2").mkdir()
    for file in sorted(second.iterdir(), key=lambda file: file.name != "manifest.json"):
        shutil.copy(file, folder / "2")
        assert not watch.changed(time.monotonic())
    assert watch.changed(time.monotonic())
