"""uvicorn's HTTP protocol with limits on what one client may hold: time, memory, connections.

uvicorn takes a class and gives it no settings, so `protocol_class` makes one that has them. What a client
sends is bounded here up to the end of a request's head; its body is bounded by who reads it
(`service.requests`), and once the request is answered, here again.
"""

from __future__ import annotations

import resource
from asyncio import Transport
from asyncio.events import TimerHandle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from bidmatch.base.errors import ConfigError
from service.problems import MEDIA_TYPE, ProblemError

CLIENT = "bidmatch.client"
LINGER_S = 2.0
RETRY_AFTER_S = 1

# What is used of uvicorn that it does not document; a test compares this with the installed one.
RELIED_ON: dict[str, tuple[str, ...]] = {
    "HttpToolsProtocol": (
        "parser",
        "transport",
        "flow",
        "loop",
        "connections",
        "server_state",
        "pipeline",
        "cycle",
        "scope",
        "headers",
        "url",
        "_unset_keepalive_if_required",
        "_start_asgi_task",
        "on_message_begin",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "timeout_keep_alive_handler",
    ),
    "RequestResponseCycle": (
        "scope",
        "keep_alive",
        "disconnected",
        "message_event",
        "response_started",
        "response_complete",
        "waiting_for_100_continue",
        "default_headers",
        "body",
        "more_body",
        "on_response",
    ),
    "FlowControl": ("resume_reading", "write_paused"),
    "ServerState": ("default_headers",),
}

_MAX_LINGERING = 256
# Files that the process opens beside its connections.
_OTHER_FILES = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, and all together, may hold of one process.

    Args:
        head_bytes: most bytes of a request line and its headers, or of trailers; beyond is 431.
        header_lines: most headers of a request; beyond is 431.
        head_timeout: seconds from a head's first byte, or from connecting, to its end; later is 408. A client
            has as long for the rest of a body that was answered before its end.
        write_timeout: seconds that a client has to take an answer that does not fit the buffers; later its
            connection is dropped.
        max_connections: most open connections; one more is answered 503.
        max_pipelined: most requests that wait on a connection for the answer before theirs; what follows
            them is not read, and the connection ends after their answers.
    """

    head_bytes: int = 65_536
    header_lines: int = 100
    head_timeout: float = 10.0
    write_timeout: float = 30.0
    max_connections: int = 2048
    max_pipelined: int = 16


class Client:
    """The client of one request, at `scope["extensions"][CLIENT]`.

    Attributes:
        lost: it can no longer be answered.
        on_lost: called once, in the event loop, when the client is lost before its answer is complete. Who
            sets it looks at `lost` first: the client may have left before the request was begun.
    """

    __slots__ = ("_cycle", "_protocol", "lost", "on_lost")

    def __init__(self) -> None:
        self.lost = False
        self.on_lost: Callable[[], None] | None = None
        self._protocol: _Protocol | None = None
        self._cycle: RequestResponseCycle | None = None

    def forget(self) -> None:
        """Let go of the request, whose scope holds this: the ring would wait for the garbage collector."""
        self._protocol = self._cycle = None

    def whole_body(self) -> bytes | None:
        """The request's body, if all of it is here and nobody has read of it; else None."""
        cycle = self._cycle
        if cycle is None or cycle.more_body or cycle.waiting_for_100_continue:
            return None
        return bytes(cycle.body)

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a whole answer in one piece, as nothing but ASGI's messages would.

        Args:
            status: of the answer.
            headers: names in lower case, `content-length` among them; nothing in them is a client's own.
            body: all of it.

        Returns:
            Whether it was sent; if not, it is to be sent as ASGI has it.
        """
        protocol, cycle = self._protocol, self._cycle
        if protocol is None or cycle is None:
            return False
        return protocol.answer_whole(cycle, status, headers, body)


def protocol_class(limits: Limits, on_refused: Callable[[str], None]) -> type[HttpToolsProtocol]:
    """The protocol for `uvicorn.Config(http=..., ws="none")`.

    Args:
        limits: what a client may hold.
        on_refused: told why a client was refused or dropped here, not by the application: the last part of
            the problem's type, or `unread-answer`. Called in the event loop.
    """
    return type("LimitedProtocol", (_Protocol,), {"limits": limits, "shared": _Shared(on_refused, set())})


def allow_connections(count: int) -> None:
    """Let this process, and those it forks, hold `count` connections open.

    Raises:
        ConfigError: the system does not let it open as many files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{count} connections need {needed} open files, and a process here may have {hard}",
            hint=f"Raise the limit (ulimit -Hn {needed}), or allow fewer connections.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _RefusedError(Exception):
    """Ends the parser's work from within one of its callbacks."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the connections of a process have in common."""

    on_refused: Callable[[str], None]
    lingering: set[_Protocol]  # refused, their clients still reading the refusal


class _Protocol(HttpToolsProtocol):
    limits: ClassVar[Limits]
    shared: ClassVar[_Shared]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # The request that the application works on, the oldest unanswered; self.cycle is the newest one.
        self._running: RequestResponseCycle | None = None
        self._client: Client | None = None
        self._between = True  # messages: nothing of the next one was received
        self._in_head = True
        self._received = 0  # bytes in the call that is worked on
        self._progress = False  # a head ended, or a body went on, in that call
        self._quiet_bytes = 0  # received since there was progress
        self._deaf = False  # what is received is thrown away
        self._problem: ProblemError | None = None
        self._message_timer: TimerHandle | None = None
        self._abort_timer: TimerHandle | None = None

    # What the transport calls

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) - len(self.shared.lingering) <= self.limits.max_connections:
            self._expect()
            return
        self._refuse(
            ProblemError(
                503,
                "too-many-connections",
                f"{self.limits.max_connections} connections are open, as many as are allowed.",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        )

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._progress = False
        self._received = len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self._deaf:
                self._refuse(self._problem or ProblemError(400, "bad-request", "This is not HTTP."))
            return
        if self._progress:
            self._quiet_bytes = 0
        else:
            self._quiet_bytes += self._received
            if self._quiet_bytes > self.limits.head_bytes:
                self._refuse(self._head_too_large())
                return
        # The keep-alive timer ended at the first byte, even that of an empty line; this one goes on.
        if self._running is None and self._message_timer is None and not self.transport.is_closing():
            self._expect()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offered:
                # Declined: the connection goes on as it was, with what follows the offer (RFC 9110, 7.8).
                data = data[offered.args[0] :]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._drop_in(self.limits.write_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing() and self not in self.shared.lingering:
            self._keep()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._forget_message()
        self._keep()
        self.shared.lingering.discard(self)
        super().connection_lost(exc)
        self._give_up()

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._between, self._in_head = False, True
        self.scope["extensions"] = {CLIENT: Client()}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._progress, self._in_head = True, False
        limits = self.limits
        if len(self.headers) > limits.header_lines:
            self._problem = _too_large(f"The request has more than {limits.header_lines} headers.")
            raise _RefusedError
        # A head that came in several calls was measured by `data_received`.
        if self._received > limits.head_bytes:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > limits.head_bytes:
                self._problem = self._head_too_large()
                raise _RefusedError
        if self._running is not None and len(self.pipeline) >= limits.max_pipelined:
            # uvicorn would keep all requests of one read, thousands, and read more after each answer.
            self.cycle.keep_alive = False
            self._deaf = True
            self.flow.resume_reading()
            raise _RefusedError
        self._forget_message()
        super().on_headers_complete()
        # The application has the list; trailers go to another.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._progress = self._between = True
        if self._running is None:
            self._forget_message()

    # What uvicorn calls

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        client: Client = cycle.scope["extensions"][CLIENT]  # type: ignore[assignment]
        client._protocol, client._cycle = self, cycle
        self._running, self._client = cycle, client
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._client is not None:
            self._client.forget()
        self._running = self._client = None
        super().on_response_complete()
        if self._running is not None:
            return
        if self.transport.is_closing():
            self._flush()
        elif not self._between:
            self._forget_message()
            self._expect()

    def answer_whole(
        self, cycle: RequestResponseCycle, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        """See `Client.answer`. uvicorn writes head and body one after the other, a system call each."""
        if cycle.disconnected or cycle.response_started or self.flow.write_paused:
            return False
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            if name == b"connection":
                cycle.keep_alive = False
                continue
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n", body)
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        self.transport.write(b"".join(parts))
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._flush()

    # Time

    def _expect(self) -> None:
        """The client is to end its message in time."""
        self._message_timer = self.loop.call_later(self.limits.head_timeout, self._message_late)

    def _forget_message(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _message_late(self) -> None:
        self._message_timer = None
        if self.transport.is_closing():
            return
        answered = self.cycle is not None and (self._between or not self._in_head)
        if answered:
            self.transport.close()
            self._flush()
        else:
            self._refuse(
                ProblemError(
                    408,
                    "request-timeout",
                    f"Request line and headers were not sent within {self.limits.head_timeout:g} seconds.",
                )
            )

    def _drop_in(self, seconds: float) -> None:
        if self._abort_timer is None:
            self._abort_timer = self.loop.call_later(seconds, self._drop)

    def _drop(self) -> None:
        self.shared.on_refused("unread-answer")
        self.transport.abort()

    def _keep(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None

    def _flush(self) -> None:
        """A closing connection waits for its client to read, but not longer than `write_timeout`."""
        if self.transport.get_write_buffer_size():
            self._drop_in(self.limits.write_timeout)

    # Ends

    def _give_up(self) -> None:
        """The requests of this connection will not be answered."""
        running, client = self._running, self._client
        self._running = self._client = None
        self.pipeline.clear()
        if running is None or client is None:
            return
        # uvicorn tells the newest request only, which another may be ahead of.
        running.disconnected = True
        running.message_event.set()
        client.lost = True
        client.forget()
        if client.on_lost is not None:
            client.on_lost()

    def _refuse(self, problem: ProblemError) -> None:
        """Answer with the problem and close."""
        self.shared.on_refused(problem.kind)
        self._deaf = True
        self._forget_message()
        begun = self._running is not None and self._running.response_started
        self._give_up()
        if begun:
            self.transport.abort()
            return
        body = problem.body()
        headers = [
            *self.server_state.default_headers,
            *((name.lower().encode(), value.encode()) for name, value in problem.headers.items()),
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[problem.status] + lines + b"\r\n" + body)
        if len(self.shared.lingering) >= _MAX_LINGERING or not self.transport.can_write_eof():
            self.transport.close()
            self._flush()
            return
        # Closed at once, the connection would be reset under a client that still sends, and the answer lost.
        self.shared.lingering.add(self)
        self.transport.write_eof()
        self._keep()
        self._abort_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _head_too_large(self) -> ProblemError:
        return _too_large(f"Request line and headers have more than {self.limits.head_bytes} bytes.")


def _too_large(detail: str) -> ProblemError:
    return ProblemError(431, "request-header-fields-too-large", detail)
