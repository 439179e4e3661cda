"""What parent and workers say to each other: JSON objects, a line each, over a pair of sockets."""

from __future__ import annotations

import json
import socket
from typing import Any

_MOST_BYTES = 1 << 20


class Channel:
    """One end.

    Args:
        end: a connected stream socket, this object's own from now on.
    """

    def __init__(self, end: socket.socket):
        self._end = end
        self._received = b""
        end.setblocking(False)

    def fileno(self) -> int:
        """For selectors and event loops."""
        return self._end.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; whether the other end is there."""
        try:
            self._end.setblocking(True)
            self._end.sendall(json.dumps(message).encode() + b"\n")
            self._end.setblocking(False)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have come, and whether the other end is still there."""
        there = True
        while True:
            try:
                part = self._end.recv(65_536)
            except BlockingIOError:
                break
            except OSError:
                there = False
                break
            if not part:
                there = False
                break
            self._received += part
            if len(self._received) > _MOST_BYTES:
                there = False
                break
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines if line], there

    def close(self) -> None:
        """Let go of the socket."""
        self._end.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Both ends of a new channel."""
    one, other = socket.socketpair()
    return Channel(one), Channel(other)
