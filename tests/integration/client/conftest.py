"""Both clients behind one face, the real service, and a server that does as a test says."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bidmatch.client import AsyncClient, Client
from tests.integration.service.ads import Ad, make_ads, write_bundle
from tests.integration.service.conftest import server, start, tiny_bundle

# pytest finds fixtures as names of a conftest; these are the service tests' own.
__all__ = ["server", "start", "tiny_bundle"]


class Awaited:
    """An `AsyncClient` whose every call is awaited here, in an event loop of its own."""

    def __init__(self, *arguments: Any, **options: Any):
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*arguments, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *arguments, **options: self._runner.run(method(*arguments, **options))

    def end(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(params=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`connect(url, retries=0)` is a client of either kind whose methods return answers."""
    made: list[Any] = []

    def connecting(*arguments: Any, **options: Any) -> Any:
        made.append((Client if request.param == "Client" else Awaited)(*arguments, **options))
        return made[-1]

    yield connecting
    for client in made:
        client.close() if isinstance(client, Client) else client.end()


@dataclass
class Seen:
    """A request that arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    at: float = field(default_factory=time.monotonic)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Handler(socketserver.StreamRequestHandler):
    """One connection: requests are read as HTTP/1.1 says, answered as the script says."""

    server: Scripted
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with self.server.lock:
            self.server.connections += 1
            number = self.server.connections
        while self._read(number):
            with self.server.lock:
                steps = self.server.script
                step = steps.pop(0) if len(steps) > 1 else steps[0]
            if not step(self):
                return

    def _read(self, connection: int) -> bool:
        try:
            line = self.rfile.readline().decode()
        except OSError:
            return False
        if not line.strip():
            return False
        method, path, _ = line.split()
        headers: dict[str, str] = {}
        while (line := self.rfile.readline().decode().strip()) != "":
            name, value = line.split(": ", 1)
            headers[name.lower()] = value
        body = self.rfile.read(int(headers.get("content-length", 0)))
        with self.server.lock:
            self.server.seen.append(Seen(method, path, headers, body, connection))
        return True

    def until_left(self) -> None:
        """Wait until the client closes the connection, and note it."""
        self.request.settimeout(60)
        try:
            gone = self.request.recv(1) == b""
        except ConnectionError:
            gone = True
        if gone:
            self.server.left.set()


Step = Callable[[Handler], bool]


class Scripted(socketserver.ThreadingTCPServer):
    """A server that does one step of `script` a request, and the last one for ever.

    Attributes:
        seen: the requests, in order.
        connections: how many were opened.
        left: set when a client closed a connection that a step was holding.
    """

    daemon_threads = True
    request_queue_size = 100

    def __init__(self, *script: Step):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = list(script)
        self.seen: list[Seen] = []
        self.connections = 0
        self.left = threading.Event()
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Steps:
    """What a scripted server can do with a request. Each gives whether the connection stays open."""

    ANSWER = b'{"matches":[],"bundle":"b1"}'

    @staticmethod
    def raw(sent: bytes, keep: bool = False) -> Step:
        def step(handler: Handler) -> bool:
            handler.wfile.write(sent)
            return keep

        return step

    @classmethod
    def reply(cls, status: int = 200, body: bytes = ANSWER, **headers: str) -> Step:
        """A whole response; `retry_after="1"` is a header."""
        named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} Said\r\ncontent-length: {len(body)}\r\n{named}\r\n"
        return cls.raw(head.encode() + body, keep=True)

    @classmethod
    def problem(cls, status: int, kind: str, **headers: str) -> Step:
        document = {
            "type": f"urn:bidmatch:{kind}",
            "title": "Title",
            "status": status,
            "detail": f"because of {kind}",
        }
        return cls.reply(
            status, json.dumps(document).encode(), content_type="application/problem+json", **headers
        )

    @staticmethod
    def drop(handler: Handler) -> bool:
        """Close the connection without a word."""
        return False

    @staticmethod
    def stall(handler: Handler) -> bool:
        """Say nothing until the client leaves."""
        handler.until_left()
        return False

    @staticmethod
    def stall_within(handler: Handler) -> bool:
        """Begin an answer, then say nothing until the client leaves."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        handler.until_left()
        return False

    @staticmethod
    def drip(handler: Handler) -> bool:
        """A sound answer, a byte at a time, that takes a minute."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 600\r\n\r\n")
        try:
            for _ in range(600):
                handler.wfile.write(b" ")
                time.sleep(0.1)
        except OSError:
            handler.server.left.set()
        return False

    @staticmethod
    def slow(seconds: float, then: Step) -> Step:
        def step(handler: Handler) -> bool:
            time.sleep(seconds)
            return then(handler)

        return step


@pytest.fixture
def steps() -> type[Steps]:
    return Steps


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """`scripted(steps.drop, steps.reply())` drops the first request and answers all others."""
    running: list[Scripted] = []

    def starting(*script: Step) -> Scripted:
        running.append(Scripted(*script))
        return running[-1]

    yield starting
    for one in running:
        one.shutdown()
        one.server_close()


ADMIN_KEY, MATCH_KEY = "admin-" + "a" * 32, "match-" + "m" * 32
ADS = [
    Ad("p0", "red running shoes", {"market": "de", "language": "de", "advertiser": "a1", "bid": 0.5}),
    Ad("p1", "Red Running Shoes", {"market": "us", "language": "en", "advertiser": "a7", "bid": 1.5}),
    Ad("p2", "red shoes", {"market": "de", "advertiser": "a7", "bid": 2.5, "match_type": "phrase"}),
    Ad("p17", "tent", {"market": "de", "language": "de", "advertiser": "a9", "bid": 0.25}),
    Ad("p18", "cheap tent", {"market": "us", "language": "en", "bid": 0.75, "negative_keywords": ["used"]}),
    *make_ads(300, seed=1, broad=0.8),
]


@dataclass(frozen=True)
class Service:
    """The real service with live phrases over a bundle of `ADS`.

    Attributes:
        url: where it is.
        bundle: what it was started with.
        other: another bundle, of the same phrases but for the last hundred.
        live: folder of its live phrases.
        admin_key: opens everything, where keys are on.
        match_key: opens `/match` alone, where keys are on.
    """

    url: str
    bundle: Path
    other: Path
    live: Path
    admin_key: str = ADMIN_KEY
    match_key: str = MATCH_KEY


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return write_bundle(folder / "monday", ADS), write_bundle(folder / "tuesday", ADS[:-100])


@pytest.fixture(scope="module")
def without_keys(
    start: Callable[..., Any], bundles: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service, which asks for no keys."""
    live = tmp_path_factory.mktemp("live")
    with start("--bundle", str(bundles[0]), "--live", str(live)) as server:
        yield Service(server.url, *bundles, live)


@pytest.fixture(scope="module")
def with_keys(
    start: Callable[..., Any], bundles: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service, which asks for keys. Tests leave it with the bundle that it was started with."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "admin").write_text(f"{ADMIN_KEY}\n")
    (folder / "match").write_text(f"{MATCH_KEY}\n")
    keys = (f"--admin-keys-file={folder / 'admin'}", f"--api-keys-file={folder / 'match'}")
    live = folder / "live"
    with start("--bundle", str(bundles[0]), "--live", str(live), *keys) as server:
        yield Service(server.url, *bundles, live)
