"""What a client can hold of a real uvicorn server: raw sockets against a small application.

`Service` is uvicorn in a thread; its application records what it was asked and does what the path says.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from service.protocol import CLIENT, LINGER_S, RELIED_ON, Client, Limits, protocol_class

PROBLEM = b"content-type: application/problem+json"
PATIENCE_S = 20
# More than the kernel buffers of a connection hold.
LARGE = 32 << 20


class Service:
    """A uvicorn server in a thread."""

    def __init__(self, limits: Limits, loop: str, keep_alive: int):
        self.asked: list[str] = []
        self.lost: list[str] = []
        self.refused: list[str] = []
        self.gate = threading.Event()
        self.clients: list[Any] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        config = uvicorn.Config(
            self.application,
            http=protocol_class(limits, self.refused.append),
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            loop=loop,  # type: ignore[arg-type]
            lifespan="off",
            log_config=None,
            timeout_keep_alive=keep_alive,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()
        until(lambda: self.server.started)

    async def application(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"]
        client = scope["extensions"][CLIENT]
        self.clients.append(client)
        client.on_lost = lambda: self.lost.append(path)
        self.asked.append(path)
        body = path.encode()
        if path.startswith("/wait"):
            while not self.gate.is_set() and not client.lost:
                await asyncio.sleep(0.005)
        elif path.startswith("/large"):
            body = b"x" * LARGE
        elif path.startswith("/read"):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                if not message["more_body"]:
                    break
        elif path.startswith("/gone"):
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        elif path.startswith("/stream"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not client.lost:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0.005)
            return
        headers = [(b"content-length", b"%d" % len(body))]
        headers += [(b"headers", b"%d" % len(scope["headers"]))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    @property
    def connections(self) -> list[Any]:
        return list(self.server.server_state.connections)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        client = socket.socket()
        client.settimeout(PATIENCE_S)
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(self.address)
        return client

    def stop(self) -> None:
        self.gate.set()
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def until(condition: Callable[[], object]) -> None:
    """Wait for something that will come."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def rest(client: socket.socket) -> bytes:
    """All that the server sends until it closes or resets the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answer(client: socket.socket) -> bytes:
    """One whole answer with a Content-Length; the connection may go on."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += (part := client.recv(1))
        assert part, received
    length = next(
        int(line.split(b":")[1]) for line in received.split(b"\r\n") if line.startswith(b"content-length:")
    )
    while length:
        received += (part := client.recv(length))
        assert part, received
        length -= len(part)
    return received


def is_problem(received: bytes, status: int, kind: str) -> None:
    """One answer, a problem document, on a connection that ends with it."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), received[:500]
    assert PROBLEM in head
    assert b"connection: close" in head
    document = json.loads(body)
    assert document["type"] == f"urn:bidmatch:{kind}"
    assert document["status"] == status


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: a", *headers, "", "")).encode()


@pytest.fixture(params=["uvloop", "asyncio"])
def service(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`with service(head_timeout=1) as running:`, with either of asyncio's loops."""

    @contextmanager
    def starting(keep_alive: int = 60, **limits: Any) -> Iterator[Service]:
        running = Service(Limits(**limits), request.param, keep_alive)
        try:
            yield running
        finally:
            running.stop()

    return starting


# Heads


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: a\r\nX", b"\r\n\r\n"])
def test_a_head_that_stops(service: Callable, sent: bytes) -> None:
    with service(head_timeout=0.3) as running:
        with running.connect() as client:
            client.sendall(sent)
            is_problem(rest(client), 408, "request-timeout")
        until(lambda: not running.connections)
    assert running.asked == []
    assert running.refused == ["request-timeout"]


def test_a_head_that_comes_byte_by_byte(service: Callable) -> None:
    with service(head_timeout=0.5) as running, running.connect() as client:
        client.settimeout(0.02)
        received = b""
        for byte in get("/", "X: " + "x" * 10_000):
            client.sendall(bytes([byte]))
            try:
                received = client.recv(1)
            except TimeoutError:
                continue
            break
        client.settimeout(PATIENCE_S)
        is_problem(received + rest(client), 408, "request-timeout")
    assert running.asked == []


def test_a_second_head_that_stops(service: Callable) -> None:
    with service(head_timeout=0.3) as running, running.connect() as client:
        client.sendall(get("/first"))
        assert answer(client).endswith(b"/first")
        client.sendall(b"GET /second")
        is_problem(rest(client), 408, "request-timeout")


def test_a_head_behind_a_request_in_flight_waits_for_its_answer(service: Callable) -> None:
    with service(head_timeout=0.3) as running, running.connect() as client:
        client.sendall(get("/wait") + b"GET /second")
        until(lambda: running.asked)
        time.sleep(0.6)
        running.gate.set()
        assert answer(client).endswith(b"/wait")
        is_problem(rest(client), 408, "request-timeout")


def test_an_idle_connection_is_closed_without_a_word(service: Callable) -> None:
    with service(keep_alive=1, head_timeout=60) as running, running.connect() as client:
        client.sendall(get("/first"))
        assert answer(client).endswith(b"/first")
        assert rest(client) == b""
    assert running.refused == []


def test_empty_lines_do_not_hold_an_idle_connection(service: Callable) -> None:
    with service(head_timeout=0.3) as running, running.connect() as client:
        client.sendall(get("/first"))
        assert answer(client).endswith(b"/first")
        client.sendall(b"\r\n")
        assert rest(client) == b""


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_the_rest_of_a_body_that_was_answered_early(service: Callable, sent: bytes) -> None:
    head = b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
    with service(head_timeout=0.3) as running, running.connect() as client:
        client.sendall(head)
        assert answer(client).endswith(b"/early")
        client.sendall(sent)
        assert rest(client) == b""
        until(lambda: not running.connections)


def test_a_request_after_the_rest_of_a_body_that_was_answered_early(service: Callable) -> None:
    head = b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n{"
    with service(head_timeout=60) as running, running.connect() as client:
        client.sendall(head)
        assert answer(client).endswith(b"/early")
        client.sendall(b"ab" + get("/next"))
        assert answer(client).endswith(b"/next")


def test_a_head_after_such_a_rest_has_its_own_time(service: Callable) -> None:
    head = b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n{"
    with service(head_timeout=2) as running, running.connect() as client:
        client.sendall(head)
        assert answer(client).endswith(b"/early")
        time.sleep(1.5)
        client.sendall(b"ab" + get("/next")[:10])
        time.sleep(1)
        client.sendall(get("/next")[10:])
        assert answer(client).endswith(b"/next")


def headers(count: int) -> list[str]:
    return [f"X-{number}: {number}" for number in range(count)]


def test_too_many_headers(service: Callable) -> None:
    with service(header_lines=10) as running, running.connect() as client:
        client.sendall(get("/ten", *headers(9)))  # and Host
        assert answer(client).endswith(b"/ten")
        client.sendall(get("/eleven", *headers(10)))
        is_problem(rest(client), 431, "request-header-fields-too-large")
    assert running.asked == ["/ten"]


@pytest.mark.parametrize("size", [20_000, 120_000])
def test_a_huge_head_in_one_piece(service: Callable, size: int) -> None:
    with service(head_bytes=10_000) as running, running.connect() as client:
        client.sendall(get("/fits", "X: " + "x" * 9_000))
        assert answer(client).endswith(b"/fits")
        client.sendall(get("/huge", "X: " + "x" * size))
        is_problem(rest(client), 431, "request-header-fields-too-large")
    assert running.asked == ["/fits"]


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX"])
def test_a_huge_head_in_pieces(service: Callable, start: bytes) -> None:
    with service(head_bytes=10_000) as running, running.connect() as client:
        client.sendall(start)
        for _ in range(30):
            client.sendall(b"x" * 400)
            time.sleep(0.002)
        is_problem(rest(client), 431, "request-header-fields-too-large")
    assert running.asked == []


def test_huge_trailers(service: Callable) -> None:
    head = b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with service(head_bytes=10_000) as running, running.connect() as client:
        client.sendall(head + b"1\r\na\r\n0\r\nX-Trailer: ")
        for _ in range(30):
            client.sendall(b"x" * 400)
            time.sleep(0.002)
        is_problem(rest(client), 431, "request-header-fields-too-large")


def test_trailers_are_no_headers(service: Callable) -> None:
    head = b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with service() as running, running.connect() as client:
        client.sendall(head + b"1\r\na\r\n0\r\nX-Api-Key: smuggled\r\n\r\n")
        assert b"\r\nheaders: 2\r\n" in answer(client)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(random.Random(0).randbytes(2000), id="noise"),
        pytest.param(bytes.fromhex("1603010200010001fc0303") + bytes(100), id="TLS"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="HTTP/9.9"),
        pytest.param(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", id="header"),
        pytest.param(b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n", id="NUL"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", id="length"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", id="lengths"),
        pytest.param(
            b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
            id="smuggling",
        ),
    ],
)
def test_what_is_not_http(service: Callable, sent: bytes) -> None:
    with service() as running:
        with running.connect() as client:
            client.sendall(sent)
            is_problem(rest(client), 400, "bad-request")
        until(lambda: not running.connections)


def test_a_broken_body_ends_its_request(service: Callable) -> None:
    head = b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with service() as running, running.connect() as client:
        client.sendall(head + b"1\r\na\r\n")
        until(lambda: running.asked)
        client.sendall(b"zzz\r\n")
        is_problem(rest(client), 400, "bad-request")
        until(lambda: running.lost == ["/read"])
        until(lambda: not running.server.server_state.tasks)


def test_what_is_not_http_behind_an_answer_under_way(service: Callable) -> None:
    """A problem in the midst of another answer would be taken for part of it."""
    with service() as running, running.connect() as client:
        client.sendall(get("/stream"))
        until(lambda: client.recv(1) == b"x")
        client.sendall(b"\x00\x01\x02\r\n\r\n")
        assert b"HTTP/1.1 400" not in rest(client)
        until(lambda: running.lost == ["/stream"])


# Answers


def test_a_client_that_never_reads(service: Callable) -> None:
    with service(write_timeout=0.3) as running, running.connect(receive_buffer=4096) as client:
        client.sendall(get("/large"))
        until(lambda: running.asked)
        until(lambda: not running.connections)
        assert len(rest(client)) < LARGE
        assert running.refused == ["unread-answer"]


@pytest.mark.parametrize("ending", ["Connection: close", "Connection: keep-alive"])
def test_the_last_bytes_that_a_client_never_reads(service: Callable, ending: str) -> None:
    """Less than what pauses writing is left; a transport that closes would wait for its client."""
    with service(write_timeout=0.3, keep_alive=1) as running, running.connect(receive_buffer=4096) as client:
        until(lambda: running.connections)
        running.connections[0].transport.set_write_buffer_limits(high=2 * LARGE)
        client.sendall(get("/large", ending))
        until(lambda: running.asked)
        until(lambda: not running.connections)
        assert len(rest(client)) < LARGE


def test_a_client_that_reads_slowly_gets_the_whole_answer(service: Callable) -> None:
    with service(write_timeout=30) as running, running.connect(receive_buffer=4096) as client:
        client.sendall(get("/large", "Connection: close"))
        until(lambda: running.asked)
        time.sleep(0.2)
        assert rest(client).endswith(b"x" * 1000)


def test_a_client_that_read_everything_in_time_keeps_its_connection(service: Callable) -> None:
    with service(write_timeout=1) as running, running.connect() as client:
        client.sendall(get("/large"))
        assert answer(client).endswith(b"x" * 1000)
        time.sleep(1.2)
        client.sendall(get("/next"))
        assert answer(client).endswith(b"/next")


def test_http_1_0(service: Callable) -> None:
    with service() as running, running.connect() as client:
        client.sendall(b"GET /old HTTP/1.0\r\n\r\n")
        received = rest(client)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in received
        assert received.endswith(b"/old")


def test_an_upgrade_is_declined_and_what_follows_it_answered(service: Callable) -> None:
    with service() as running, running.connect() as client:
        client.sendall(get("/offer", "Connection: Upgrade", "Upgrade: h2c") + get("/next"))
        assert answer(client).endswith(b"/offer")
        assert answer(client).endswith(b"/next")


# Many requests, many connections


def test_pipelined_requests_are_answered_in_order(service: Callable) -> None:
    with service() as running, running.connect() as client:
        client.sendall(b"".join(get(f"/{number}") for number in range(5)))
        assert [answer(client)[-2:] for _ in range(5)] == [b"/0", b"/1", b"/2", b"/3", b"/4"]


def test_only_some_pipelined_requests_are_kept(service: Callable) -> None:
    with service(max_pipelined=3) as running, running.connect() as client:
        client.sendall(get("/wait") + b"".join(get(f"/{number}") for number in range(2000)))
        until(lambda: running.asked)
        running.gate.set()
        received = rest(client)
        assert running.asked == ["/wait", "/0", "/1", "/2"]
        assert received.count(b"HTTP/1.1 200") == 4
        assert received.count(b"connection: close") == 1
        assert received.endswith(b"/2")
        until(lambda: not running.connections)


def test_200_idle_connections_hold_up_nobody(service: Callable) -> None:
    with service(keep_alive=2) as running, running.connect() as busy:
        idle = [running.connect() for _ in range(200)]
        for client in idle[:100]:
            client.sendall(get("/once"))
            answer(client)
        until(lambda: len(running.connections) == 201)
        for number in range(50):
            busy.sendall(get(f"/{number}"))
            assert answer(busy).endswith(b"/%d" % number)
        for client in idle[:100]:
            assert rest(client) == b""
        for client in idle:
            client.close()
        until(lambda: len(running.connections) <= 1)


def test_one_connection_too_many(service: Callable) -> None:
    with service(max_connections=3) as running:
        clients = [running.connect() for _ in range(3)]
        until(lambda: len(running.connections) == 3)
        for _ in range(5):
            with running.connect() as refused:
                refused.sendall(get("/refused"))
                received = rest(refused)
                is_problem(received, 503, "too-many-connections")
                assert b"retry-after: 1\r\n" in received
        for client in clients:
            client.sendall(get("/allowed"))
            assert answer(client).endswith(b"/allowed")
        clients.pop().close()
        until(lambda: len(running.connections) == 2)
        clients.append(running.connect())
        clients[-1].sendall(get("/next"))
        assert answer(clients[-1]).endswith(b"/next")
        for client in clients:
            client.close()
    assert "/refused" not in running.asked
    assert running.refused == ["too-many-connections"] * 5


def test_a_refused_client_that_stays_is_dropped(service: Callable) -> None:
    with service(max_connections=1) as running, running.connect() as allowed:
        until(lambda: running.connections)
        with running.connect() as refused:
            is_problem(rest(refused), 503, "too-many-connections")
            try:
                for _ in range(int(PATIENCE_S / LINGER_S) * 100):
                    refused.sendall(b"still here")
                    time.sleep(LINGER_S / 50)
            except (ConnectionResetError, BrokenPipeError):
                pass
            else:
                pytest.fail("it was not")
        allowed.sendall(get("/allowed"))
        assert answer(allowed).endswith(b"/allowed")


def test_a_refused_client_that_stays_takes_nobodys_place(service: Callable) -> None:
    with service(max_connections=2) as running, running.connect() as first:
        second = running.connect()
        until(lambda: len(running.connections) == 2)
        with running.connect() as refused:
            is_problem(rest(refused), 503, "too-many-connections")
            second.close()
            until(lambda: len(running.connections) == 2)
            with running.connect() as third:
                for client in (first, third):
                    client.sendall(get("/allowed"))
                    assert answer(client).endswith(b"/allowed")


def test_open_files_are_allowed_for() -> None:
    script = (
        "import resource; from service.protocol import allow_connections;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 3000)); allow_connections(1000);"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]); allow_connections(3000)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert int(ended.stdout) >= 1000
    assert "ConfigError: 3000 connections need" in ended.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] != 3000


# Clients that leave


def test_a_client_that_leaves(service: Callable) -> None:
    with service() as running:
        with running.connect() as client:
            client.sendall(get("/wait"))
            until(lambda: running.asked)
            assert not running.clients[0].lost
        until(lambda: running.lost)
        until(lambda: not running.server.server_state.tasks)
        assert running.lost == ["/wait"]
        assert running.clients[0].lost


def test_a_client_that_leaves_between_requests_is_none_of_theirs(service: Callable) -> None:
    with service() as running:
        with running.connect() as client:
            for number in range(3):
                client.sendall(get(f"/{number}"))
                answer(client)
        until(lambda: not running.connections)
        assert running.lost == []
        assert not any(client.lost for client in running.clients)


def test_a_client_that_leaves_during_its_third_request(service: Callable) -> None:
    with service() as running:
        with running.connect() as client:
            for number in range(2):
                client.sendall(get(f"/{number}"))
                answer(client)
            client.sendall(get("/wait"))
            until(lambda: "/wait" in running.asked)
        until(lambda: not running.connections)
        assert running.lost == ["/wait"]


def test_a_client_that_leaves_while_sending_its_body(service: Callable) -> None:
    with service() as running:
        with running.connect() as client:
            client.sendall(b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: running.asked)
        until(lambda: running.lost == ["/read"])
        until(lambda: not running.server.server_state.tasks)


def test_a_connection_that_is_lost_with_a_second_request_waiting(service: Callable) -> None:
    with service() as running, running.connect() as client:
        client.sendall(get("/gone") + get("/read"))
        until(lambda: running.asked)
        connection = running.connections[0]
        connection.loop.call_soon_threadsafe(connection.transport.abort)
        until(lambda: running.lost == ["/gone"])
        until(lambda: not running.server.server_state.tasks)
    assert running.asked == ["/gone"]


# uvicorn


def test_requests_leave_nothing_for_the_garbage_collector(service: Callable) -> None:
    """A ring of objects a request means a collection now and then, which holds up all requests for long."""
    gc.collect()
    gc.disable()
    try:
        with service() as running:
            with running.connect() as client:
                for _ in range(20):
                    client.sendall(get("/a"))
                    answer(client)
            with running.connect() as leaving:
                leaving.sendall(get("/wait"))
                until(lambda: len(running.asked) == 21)
            until(lambda: running.lost)
            until(lambda: not running.server.server_state.tasks)
            running.clients.clear()
            until(lambda: not running.connections)
            held = [one for one in gc.get_objects() if type(one) is Client]
            # The last request of a connection is held by it, and that may be about to go.
            assert len(held) <= 2
    finally:
        gc.enable()


def test_uvicorn_has_what_is_relied_on(service: Callable) -> None:
    with service() as running, running.connect() as client:
        client.sendall(get("/wait"))
        until(lambda: running.asked)
        connection = running.connections[0]
        holders = {
            "HttpToolsProtocol": connection,
            "RequestResponseCycle": connection.cycle,
            "FlowControl": connection.flow,
            "ServerState": connection.server_state,
        }
        missing = [
            f"{holder}.{name}"
            for holder, names in RELIED_ON.items()
            for name in names
            if not hasattr(holders[holder], name)
        ]
        assert not missing, (
            f"uvicorn {uvicorn.__version__} has no {', '.join(missing)}: see service/protocol.py"
        )
        assert set(RELIED_ON) == set(holders)
