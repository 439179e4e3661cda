"""The load generator against servers whose answers are known."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from bench.serving.load import Job, load

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\n\r\n"
Answer = Callable[[int], bytes | None]


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[int, list[bytes]]]:
    """A server of one thread: the n-th request of all gets answer(n), or a closed connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    got: list[bytes] = []
    lock, over = threading.Lock(), threading.Event()

    def talk(connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            while data := connection.recv(65536):
                with lock:
                    got.append(data)
                    content = answer(len(got) - 1)
                if content is None:
                    return
                connection.sendall(content)

    def accept() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1], got
    finally:
        over.set()
        thread.join()
        listener.close()


@pytest.fixture
def bodies(tmp_path: Path) -> Path:
    file = tmp_path / "bodies.jsonl"
    file.write_bytes(b'{"query":"a"}\n{"query":"b"}\n{"query":"c"}')
    return file


def test_a_closed_loop_asks_every_body_in_turn_and_counts_the_answers(bodies: Path) -> None:
    with serving(lambda _: OK) as (port, got):
        met = load(Job("127.0.0.1", port, bodies, 0.5, 1, warm_up=0))
    assert met.failed == 0
    assert met.statuses == {"200": met.due}
    # The last may be answered, or only sent, after the end.
    assert 0 <= len(got) - met.due <= 2
    assert [data.rpartition(b"\r\n\r\n")[2] for data in got[:4]] == [
        b'{"query":"a"}',
        b'{"query":"b"}',
        b'{"query":"c"}',
        b'{"query":"a"}',
    ]
    assert met.due - 3 <= met.asked_again <= met.due - 1
    assert met.answer_bytes == 2


def test_an_open_loop_counts_latency_from_when_requests_were_due(bodies: Path, tmp_path: Path) -> None:
    """During a stall of half a second 100 requests are due, on two connections: their wait must show."""

    def stall_once(number: int) -> bytes:
        if number == 40:
            time.sleep(0.5)
        return OK

    samples = tmp_path / "samples.npy"
    with serving(stall_once) as (port, _):
        met = load(Job("127.0.0.1", port, bodies, 2, 2, rate=200, warm_up=0, samples=samples))
    due, latency, status = np.load(samples).T
    assert met.failed == 0
    assert met.due == len(due) > 300
    assert set(status) == {200}
    assert (latency > 0.25).sum() > 20
    assert met.waited > 50
    assert (np.diff(np.sort(due)) > 0).all()


def test_statuses_are_told_apart_and_only_200_has_latency(bodies: Path) -> None:
    with serving(lambda number: BUSY if number % 4 == 0 else OK) as (port, _):
        met = load(Job("127.0.0.1", port, bodies, 1, 8, rate=200, warm_up=0))
    assert met.statuses.keys() == {"200", "429"}
    assert met.statuses["200"] + met.statuses["429"] == met.due
    assert met.failed == met.statuses["429"]


def test_a_request_on_a_connection_that_is_closed_is_broken(bodies: Path) -> None:
    with serving(lambda number: None if number == 10 else OK) as (port, _):
        met = load(Job("127.0.0.1", port, bodies, 1, 4, rate=100, warm_up=0))
    assert met.broken == 1
    assert met.statuses == {"200": met.due - 1}
    assert met.unanswered == 0


def test_what_is_never_answered_is_counted(bodies: Path) -> None:
    over = threading.Event()

    def silent_after(number: int) -> bytes:
        if number >= 20:
            over.wait(30)
        return OK

    with serving(silent_after) as (port, _):
        met = load(Job("127.0.0.1", port, bodies, 0.5, 4, rate=200, warm_up=0, drain=0.3))
        over.set()
    assert met.statuses == {"200": 20}
    assert met.unanswered == met.due - 20 > 20
