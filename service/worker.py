"""One worker process: the application under uvicorn, and the parent's word on which bundle it serves."""

from __future__ import annotations

import asyncio
import logging
import logging.config
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client.values
import uvicorn

from export.bundle.read import Bundle
from service.admin import Phrases
from service.app import App, refused
from service.channel import Channel
from service.live.store import LiveStore
from service.logs import announcer, log_config
from service.problems import ProblemError
from service.protocol import Limits, allow_connections, protocol_class
from service.security import Guard
from service.serving import Loaded, RefusedError, Serving
from service.settings import Settings
from service.telemetry import Telemetry
from service.traces import open_traces

_log = logging.getLogger("bidmatch.service")


class ParentReloads:
    """Asks the parent for swaps, and takes part in those that it leads.

    Args:
        channel: to the parent.
        serving: what answers here.
        phrases: its threads do the work.
    """

    def __init__(self, channel: Channel, serving: Serving, phrases: Phrases):
        self._channel, self._serving, self._phrases = channel, serving, phrases
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._prepared: tuple[int, Loaded] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.parent_gone = asyncio.Event()

    def listen(self) -> None:
        """Begin to hear the parent; in the event loop."""
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._hear)
        self._channel.send(op="ready", bundle=self._serving.current.engine.bundle_id)

    async def reload(self, path: Path | None) -> dict[str, Any]:
        """See `service.admin.Reloads`."""
        request = len(self._asked) + 1
        while request in self._asked:
            request += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[request] = answer
        try:
            self._channel.send(
                op="reload", bundle=None if path is None else str(path.absolute()), request=request
            )
            message = await answer
        finally:
            del self._asked[request]
        if message["op"] == "reloaded":
            return dict(message["report"])
        if message["kind"] == "running":
            raise ProblemError(409, "reload-running", message["reason"])
        raise refused(RefusedError(message["reason"], hint=message.get("hint")))

    def _hear(self) -> None:
        messages, there = self._channel.receive()
        for message in messages:
            if message["op"] in ("reloaded", "refused") and "request" in message:
                answer = self._asked.get(message["request"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
            else:
                task = asyncio.get_running_loop().create_task(self._do(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if not there:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self.parent_gone.set()
            # Without its parent nobody would start it anew or stop it, so it ends in good order.
            signal.raise_signal(signal.SIGTERM)

    async def _do(self, message: dict[str, Any]) -> None:
        token = message["token"]
        if message["op"] == "prepare":
            stamps = {name: tuple(stamp) for name, stamp in message["stamps"].items()}
            try:
                work = partial(self._serving.prepare, Path(message["path"]), stamps=stamps)
                self._prepared = token, await self._phrases.off_loop(work)
            except RefusedError as error:
                self._channel.send(op="refused", token=token, reason=error.reason, hint=error.hint)
                return
            except Exception as failure:
                _log.error("preparing %s failed", message["path"], exc_info=failure)
                self._channel.send(
                    op="refused", token=token, reason=f"it cannot be loaded: {failure}", hint=None
                )
                return
            self._channel.send(op="prepared", token=token)
        elif message["op"] == "discard":
            self._prepared = None
        elif message["op"] == "switch" and self._prepared is not None and self._prepared[0] == token:
            loaded = self._prepared[1]
            self._prepared = None
            await self._phrases.off_loop(partial(self._serving.switch, loaded))
            self._channel.send(op="switched", token=token, report=self._serving.report(0.0))


def work(
    number: int,
    settings: Settings,
    bundle: Bundle,
    listener: socket.socket,
    channel: Channel,
    guard: Guard,
) -> None:
    """Serve in this process, forked for it, until SIGTERM or SIGINT.

    Args:
        number: of the worker; its metrics go on where those of its predecessor of that number ended.
        settings: of the service.
        bundle: verified.
        listener: listening.
        channel: to the parent.
        guard: who may do what.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # The parent hears Ctrl-C, too, and passes it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(lambda: number)
    prometheus_client.metrics.values.ValueClass = prometheus_client.values.ValueClass
    logging.config.dictConfig(log_config(settings.log_format, settings.log_level))
    allow_connections(settings.max_connections)
    store = None if settings.live is None else LiveStore.open(settings.live)
    telemetry = Telemetry()
    serving = Serving(
        bundle,
        settings.engine(),
        cache_bytes=settings.cache_mb * 1_000_000,
        store=store,
        probes=settings.probes,
        on_change=lambda dropped: telemetry.cache_dropped.inc(dropped),
    )
    fallback = serving.current.engine.encoder.fallback
    if fallback is not None:
        announcer(settings.log_format)(f"encoding on the CPU, for CUDA does not work here: {fallback}")
    serving.start()
    phrases = Phrases(serving, store)
    reloads = ParentReloads(channel, serving, phrases)
    app = App(
        serving,
        settings,
        guard=guard,
        phrases=phrases,
        reloads=reloads,
        telemetry=telemetry,
        traces=open_traces(on=settings.traces),
    )
    limits = Limits(
        head_timeout=settings.head_timeout_ms / 1000,
        write_timeout=settings.write_timeout_ms / 1000,
        max_connections=settings.max_connections,
    )
    config = uvicorn.Config(
        app,
        http=protocol_class(limits, telemetry.refused_client),
        ws="none",
        lifespan="on",
        loop="uvloop",
        log_config=None,
        log_level=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=max(1, settings.keep_alive_ms // 1000),
        timeout_graceful_shutdown=-(-settings.shutdown_ms // 1000),
    )
    try:
        _Server(config, app, reloads).run(sockets=[listener])
    finally:
        serving.stop()
        phrases.close()
        if store is not None:
            store.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: App, reloads: ParentReloads):
        super().__init__(config)
        self._app, self._reloads = app, reloads

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._reloads.listen()
        self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        while True:
            self._app.refresh_gauges()
            await asyncio.sleep(1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._refreshing.cancel()
        await super().shutdown(sockets)
