from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from service import channel
from service.channel import Channel, channel_pair


@pytest.fixture
def raw_and_channel():
    """A plain socket, and the channel at its other end."""
    raw, end = socket.socketpair()
    ours = Channel(end)
    yield raw, ours
    raw.close()
    ours.close()


def test_messages_go_both_ways_in_order() -> None:
    one, other = channel_pair()
    assert other.receive() == ([], True)
    for number in range(3):
        assert one.send(
            op="count", number=number, text="größe\n\u2028 трава", none=None, nested={"a": [1, 2.5]}
        )
    assert other.send(op="answer")
    messages, there = other.receive()
    assert there
    assert messages == [
        {
            "op": "count",
            "number": number,
            "text": "größe\n\u2028 трава",
            "none": None,
            "nested": {"a": [1, 2.5]},
        }
        for number in range(3)
    ]
    assert one.receive() == ([{"op": "answer"}], True)
    one.close()
    other.close()


def test_a_message_that_comes_in_pieces(raw_and_channel) -> None:
    raw, ours = raw_and_channel
    raw.sendall(b'{"op": "rea')
    assert ours.receive() == ([], True)
    raw.sendall(b'dy"}\n{"op": "next"')
    assert ours.receive() == ([{"op": "ready"}], True)
    raw.sendall(b"}\n")
    assert ours.receive() == ([{"op": "next"}], True)


def test_messages_larger_than_the_buffers() -> None:
    one, other = channel_pair()
    text = "x" * 700_000
    sending = threading.Thread(target=one.send, kwargs={"op": "large", "text": text})
    sending.start()
    messages: list[dict] = []
    while not messages:
        more, there = other.receive()
        assert there
        messages += more
    sending.join()
    assert messages == [{"op": "large", "text": text}]


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"\xff\xfe",
        b"[]",
        b"12",
        b"null",
        b"{}",
        b'{"op": 3}',
        b'{"op": null}',
        b"[" * 100_000,
        b'{"op": "cut off',
    ],
)
def test_what_is_no_message_is_said_and_the_next_one_is_read(raw_and_channel, line: bytes) -> None:
    raw, ours = raw_and_channel
    sending = threading.Thread(target=raw.sendall, args=(line + b'\n{"op": "next"}\n',))
    sending.start()
    messages: list[dict] = []
    while len(messages) < 2:
        more, there = ours.receive()
        assert there
        messages += more
    sending.join()
    odd, after = messages
    assert odd["op"] == "unreadable"
    assert len(odd["line"]) < 2000
    assert after == {"op": "next"}


def test_empty_lines_are_nothing(raw_and_channel) -> None:
    raw, ours = raw_and_channel
    raw.sendall(b'\n\n{"op": "ready"}\n\n')
    assert ours.receive() == ([{"op": "ready"}], True)


def test_who_sends_a_line_without_an_end_counts_as_gone(raw_and_channel) -> None:
    raw, ours = raw_and_channel
    raw.settimeout(5)

    def flood() -> None:
        try:
            while True:
                raw.sendall(b"x" * 65_536)
        except OSError:
            pass

    sending = threading.Thread(target=flood)
    sending.start()
    there = True
    while there:
        messages, there = ours.receive()
        assert messages == []
    ours.close()
    sending.join()


def test_last_words_of_one_who_left() -> None:
    one, other = channel_pair()
    one.send(op="failed", reason="no port")
    one.close()
    assert other.receive() == ([{"op": "failed", "reason": "no port"}], False)
    assert other.receive() == ([], False)


def test_sending_to_one_who_left() -> None:
    one, other = channel_pair()
    other.close()
    assert not one.send(op="count")
    assert not one.send(op="count")


def test_who_reads_nothing_hears_nothing_more(monkeypatch) -> None:
    """A message that was sent by half would make what follows unreadable."""
    monkeypatch.setattr(channel, "_PATIENCE_S", 0.05)
    one, other = channel_pair()
    sent = 0
    while one.send(op="count", text="x" * 10_000):
        sent += 1
        assert sent < 10_000
    assert not one.send(op="late")
    messages, there = other.receive()
    assert [message["op"] for message in messages] == ["count"] * sent
    assert not there
    assert other.send(op="still there")
    assert one.receive() == ([{"op": "still there"}], True)


def test_the_end_of_a_process_that_is_killed() -> None:
    one, other = channel_pair()
    pid = os.fork()
    if not pid:
        one.close()
        other.send(op="ready", pid=os.getpid())
        os.kill(os.getpid(), 9)
    other.close()
    os.waitpid(pid, 0)
    assert one.receive() == ([{"op": "ready", "pid": pid}], False)


def test_messages_are_lines_of_json(raw_and_channel) -> None:
    raw, ours = raw_and_channel
    ours.send(op="reload", bundle="/a\nb", request=1)
    assert json.loads(raw.recv(1000)) == {"op": "reload", "bundle": "/a\nb", "request": 1}
