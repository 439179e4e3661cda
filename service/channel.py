"""What parent and workers say to each other: JSON objects, a line each, over a pair of sockets."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

_MOST_BYTES = 1 << 20
# Messages are short and the buffers hold thousands: who reads nothing for so long is stuck.
_PATIENCE_S = 5.0


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
        """Send a message; whether the other end took it. One that did not may hear nothing more."""
        line = json.dumps(message).encode() + b"\n"
        self._end.settimeout(_PATIENCE_S)
        try:
            self._end.sendall(line)
        except OSError:
            # Half of it may be on its way, so that what followed could not be read.
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_WR)
            return False
        finally:
            self._end.setblocking(False)
        return True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have come, and whether the other end is still there.

        A line that is no message comes as `{"op": "unreadable", "line": ...}`; who sends one without an end
        counts as gone.
        """
        there = True
        while there:
            try:
                part = self._end.recv(65_536)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self._received += part
            there = bool(part) and len(self._received) <= _MOST_BYTES
        *lines, self._received = self._received.split(b"\n")
        return [_message(line) for line in lines if line], there

    def close(self) -> None:
        """Let go of the socket."""
        self._end.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Both ends of a new channel."""
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict) and isinstance(message.get("op"), str):
        return message
    return {"op": "unreadable", "line": repr(line[:200])}
