from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import pytest

from bidmatch.base.errors import ConfigError
from service.channel import Channel, channel_pair
from service.children import SIGNALS, Child, fork


def end_of(child: Child) -> tuple[list[dict], int]:
    """What it said, and its exit code (the negative signal where one ended it)."""
    _, status = os.waitpid(child.pid, 0)
    messages, there = child.channel.receive()
    assert not there
    child.channel.close()
    return messages, os.waitstatus_to_exitcode(status)


def until_told(channel: Channel, op: str) -> None:
    """Wait for a message."""
    limit = time.monotonic() + 10
    while not any(message["op"] == op for message in channel.receive()[0]):
        assert time.monotonic() < limit
        time.sleep(0.002)


def sleep(_channel: Channel) -> None:
    time.sleep(30)


def test_it_runs_and_ends() -> None:
    child = fork(lambda channel: channel.send(op="hello", pid=os.getpid()) and None, [])
    assert end_of(child) == ([{"op": "hello", "pid": child.pid}], 0)


def test_an_error_is_told_and_its_code_is_the_processs() -> None:
    def run(_channel: Channel) -> None:
        raise ConfigError("there is no CUDA", hint="Take another.")

    said, code = end_of(fork(run, []))
    assert said == [{"op": "failed", "reason": "there is no CUDA", "hint": "Take another.", "code": 2}]
    assert code == 2


def ill(_channel: Channel) -> None:
    raise ValueError("a bug")


def leave(_channel: Channel) -> None:
    sys.exit(3)


@pytest.mark.parametrize(("run", "reason"), [(ill, "ValueError: a bug"), (leave, "SystemExit: 3")])
def test_a_bug_is_told_too(run: Callable[[Channel], None], reason: str, capfd: pytest.CaptureFixture) -> None:
    said, code = end_of(fork(run, []))
    assert said == [{"op": "failed", "reason": reason, "hint": None, "code": 1}]
    assert code == 1
    assert "Traceback" in capfd.readouterr().err


def test_a_signal_right_after_the_fork_is_not_lost() -> None:
    """The parent's handlers must not take it in the child's first moments."""
    taken: list[int] = []
    before = {number: signal.signal(number, lambda number, _: taken.append(number)) for number in SIGNALS}
    try:
        for _ in range(30):
            child = fork(sleep, [])
            os.kill(child.pid, signal.SIGTERM)
            assert end_of(child) == ([], -signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert set(taken) <= {signal.SIGCHLD}
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_keys_of_the_terminal_are_for_the_parent() -> None:
    def run(channel: Channel) -> None:
        channel.send(op="here")
        time.sleep(0.2)
        channel.send(op="still here")

    child = fork(run, [])
    until_told(child.channel, "here")
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGHUP)
    assert end_of(child) == ([{"op": "still here"}], 0)


def test_the_wakeup_of_the_parent_is_not_the_childs() -> None:
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    before = signal.set_wakeup_fd(waker.fileno())
    try:
        child = fork(sleep, [])
        os.kill(child.pid, signal.SIGHUP)
        os.kill(child.pid, signal.SIGTERM)
        end_of(child)
        woken.setblocking(False)
        numbers = set()
        with pytest.raises(BlockingIOError):
            while True:
                numbers |= set(woken.recv(100))
        assert numbers <= {signal.SIGCHLD}
    finally:
        signal.set_wakeup_fd(before)
        woken.close()
        waker.close()


def test_a_child_hears_that_the_parent_is_gone_although_a_later_sibling_lives() -> None:
    """The parent's ends of other children's channels are not kept by a child."""
    ready, told = channel_pair()
    grandparent = os.getpid()
    pid = os.fork()
    if not pid:
        ready.close()

        def watch(channel: Channel) -> None:
            told.send(op="begun")
            while channel.receive()[1]:
                time.sleep(0.01)
            told.send(op="heard", orphan=os.getppid() != grandparent)

        first = fork(watch, [])
        fork(lambda _: time.sleep(3), [first.channel, told])
        os.kill(os.getpid(), 9)
    told.close()
    os.waitpid(pid, 0)
    until_told(ready, "heard")
    ready.close()
