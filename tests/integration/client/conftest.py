"""Both clients behind one face, the real service, a server that does as a test says, and one that speaks the
contract of phrases and administration.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from bidmatch.client import AsyncClient, Client

_place = Path(__file__).parents[1] / "service" / "conftest.py"
_spec = importlib.util.spec_from_file_location("service_fixtures", _place)
assert _spec is not None
assert _spec.loader is not None
_service_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_service_fixtures)
# pytest finds fixtures as names of a conftest; these are the service tests' own.
tiny_bundle, start, server = _service_fixtures.tiny_bundle, _service_fixtures.start, _service_fixtures.server


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


ADMIN_TOKEN = "admin-token"
MATCH_KEY = "match-key"


def _problem(status: int, kind: str, detail: str, **more: Any) -> Response:
    document = {"type": f"urn:bidmatch:{kind}", "title": kind, "status": status, "detail": detail, **more}
    return JSONResponse(document, status, media_type="application/problem+json")


def contract_app() -> FastAPI:
    """The paths of phrases and administration as the API's contract has them, over a dictionary."""
    app = FastAPI()
    phrases: dict[str, dict[str, Any]] = {}

    @app.middleware("http")
    async def keys(request: Request, go_on: Callable[..., Any]) -> Response:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.url.path != "/match" and key != ADMIN_TOKEN:
            if key == MATCH_KEY:
                return _problem(403, "forbidden", "not with this key")
            return _problem(401, "unauthorized", "no key")
        answer: Response = await go_on(request)
        return answer

    @app.post("/match")
    async def match(request: Request) -> Response:
        asked = await request.json()
        unknown = set(asked) - {
            "query",
            "k",
            "min_score",
            "min_relevance",
            "filter",
            "allow",
            "deny",
            "distinct",
        }
        if unknown:
            wrong = [{"where": f"body.{name}", "reason": "is unknown"} for name in sorted(unknown)]
            return _problem(422, "invalid-request", "unknown fields", errors=wrong)
        return JSONResponse({"matches": [], "bundle": "b1"})

    def now() -> str:
        return datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def change(id: str, state: str | None) -> Response:
        if id not in phrases:
            return _problem(404, "not-found", f"there is no phrase {id!r}")
        if state is not None:
            phrases[id] |= {"state": state, "changed": now()}
        return JSONResponse(phrases[id])

    @app.post("/phrases")
    async def put(request: Request) -> Response:
        sent = (await request.json())["phrases"]
        for i, one in enumerate(sent):
            if not one["text"].strip():
                wrong = [{"where": f"body.phrases.{i}.text", "reason": "is empty"}]
                return _problem(422, "invalid-request", "a text is empty", errors=wrong)
        for one in sent:
            phrases[one["id"]] = {
                "id": one["id"],
                "text": one["text"],
                "columns": one.get("columns", {}),
                "state": "active",
                "source": "live",
                "changed": now(),
            }
        return JSONResponse({"phrases": [phrases[one["id"]] for one in sent]})

    @app.post("/phrases/{id:path}/pause")
    async def pause(id: str) -> Response:
        return change(id, "paused")

    @app.post("/phrases/{id:path}/resume")
    async def resume(id: str) -> Response:
        return change(id, "active")

    @app.get("/phrases/{id:path}")
    async def get(id: str) -> Response:
        return change(id, None)

    @app.delete("/phrases/{id:path}")
    async def remove(id: str) -> Response:
        return change(id, "removed")

    @app.post("/admin/reload")
    async def reload(request: Request) -> Response:
        bundle = (await request.json()).get("bundle")
        if bundle == "/damaged":
            return _problem(422, "bundle-refused", "encoder.onnx: another sha256 than the manifest says")
        if bundle == "/running":
            return _problem(409, "reload-running", "another reload is running")
        return JSONResponse(
            {"bundle": "b2", "previous": "b1", "phrases": 400, "live_phrases": len(phrases), "seconds": 0.25}
        )

    @app.post("/admin/explain")
    async def explain(request: Request) -> Response:
        asked = await request.json()
        candidates = [
            {"id": id, "phrase": "red tents", "score": 1.0, "dropped": "deny"} for id in asked["ids"]
        ]
        return JSONResponse(
            {"query": asked["query"], "tokens": asked["query"].split(), "ef": 100, "candidates": candidates}
        )

    return app


@dataclass(frozen=True)
class Contract:
    """Where it is, and its keys."""

    url: str
    admin_token: str = ADMIN_TOKEN
    match_key: str = MATCH_KEY


@pytest.fixture(scope="module")
def contract() -> Iterator[Contract]:
    """A server of `contract_app`."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(contract_app(), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    yield Contract(f"http://127.0.0.1:{listener.getsockname()[1]}")
    running.should_exit = True
    thread.join(30)
