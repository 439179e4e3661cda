"""Runs the application under uvicorn: binds the port, says the address, stops without dropping requests."""

from __future__ import annotations

import copy
import errno
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError, ConfigError
from service.app import create_app
from service.engine import Engine
from service.problems import MEDIA_TYPE, ProblemError
from service.settings import Settings

MAX_HEAD_BYTES = 65_536
LINGER_S = 2.0


def serve(settings: Settings) -> None:
    """Load the bundle and answer requests until SIGTERM (returns by SystemExit(0)) or SIGINT.

    Raises:
        DamagedError: the bundle is no sound bundle.
        ConfigError: the host is none.
        BidmatchError: the port can't be had.
    """
    signal.signal(signal.SIGTERM, _terminated)
    for line in settings.lines():
        say(f"setting {line}")
    with bind(settings.host, settings.port) as listener:
        say(f"loading {settings.bundle}")
        engine = Engine.load(settings.bundle, settings.engine())
        # The first calls of ONNX Runtime allocate; no client should wait for that.
        engine.match(["warm up"], 10)
        config = _config(create_app(engine, settings), settings)
        try:
            listener.listen(config.backlog)
        except OSError as error:
            # Two servers may bind the same port; the second to listen is refused.
            raise _refused(error, settings.host, settings.port) from None
        _Server(config, engine).run(sockets=[listener])


def _terminated(_signal: int, _frame: Any) -> None:
    # uvicorn raises the signal again when it has stopped; that is the orderly end.
    sys.exit(0)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; port 0 takes a free one.

    Raises:
        ConfigError: the host is none, or none of this machine's.
        BidmatchError: the port is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"there is no host {host!r} to listen on", hint="See --host.") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refused(error, host, port) from None
    return listener


def _refused(error: OSError, host: str, port: int) -> BidmatchError:
    if error.errno == errno.EADDRINUSE:
        return BidmatchError(
            f"port {port} on {host} is in use", hint="Choose another with --port; --port 0 takes a free one."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{host} is no address of this machine", hint="See --host.")
    return BidmatchError(f"cannot listen on {host}, port {port}: {error.strerror}")


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    log_config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    log_config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    log_config["loggers"]["bidmatch"] = {"handlers": ["default"], "level": settings.log_level.upper()}
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=log_config,
        log_level=settings.log_level if not settings.access_log else "info",
        access_log=settings.access_log,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=-(-settings.shutdown_ms // 1000),
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine):
        super().__init__(config)
        self._engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        (listener,) = sockets or []
        host, port = listener.getsockname()[:2]
        await super().startup(sockets)
        name = f"[{host}]" if ":" in host else host
        again = self._engine.candidates
        say(
            f"serving bundle {self._engine.bundle_id}, {len(self._engine):,} phrases"
            + (f", re-scoring {again} candidates" if again else "")
        )
        say(f"ready: http://{name}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        say("stopping: no new connections, answering what is in flight")
        await super().shutdown(sockets)


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with problem details for what isn't HTTP, and a limit on a request's head."""

    _in_head = True
    _only_head = True  # of the bytes just received
    _head_bytes = 0
    _refused = False

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._only_head = self._in_head
        super().data_received(data)
        if self._only_head and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    ProblemError(
                        431,
                        "request-header-fields-too-large",
                        f"Request line and headers have more than {MAX_HEAD_BYTES} bytes.",
                    )
                )

    def on_headers_complete(self) -> None:
        self._in_head = self._only_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(ProblemError(400, "bad-request", msg))

    def _refuse(self, problem: ProblemError) -> None:
        body = problem.body()
        head: Sequence[bytes] = (
            STATUS_LINE[problem.status],
            *(b"%b: %b\r\n" % header for header in self.server_state.default_headers),
            b"content-type: %b\r\n" % MEDIA_TYPE.encode(),
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body),
        )
        self.transport.write(b"".join((*head, body)))
        # Closed at once, the connection would be reset under a client that still sends, and the answer lost.
        self._refused = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
