"""One worker process: the application under uvicorn, and the parent's word on which bundle it serves."""

from __future__ import annotations

import asyncio
import gc
import logging
import logging.config
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
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
from service.match import query_seconds
from service.problems import ProblemError
from service.protocol import Limits, allow_connections, protocol_class
from service.security import Guard
from service.serving import Loaded, RefusedError, Serving
from service.settings import Settings
from service.telemetry import Telemetry
from service.traces import open_traces

Message = dict[str, Any]

_SWITCH_S = 1e-4

_log = logging.getLogger("bidmatch.service")


class ParentReloads:
    """Asks the parent for swaps, and takes part in those that it leads.

    Args:
        channel: to the parent.
        serving: what answers here.
        telemetry: counts what became of bundles.
    """

    def __init__(self, channel: Channel, serving: Serving, telemetry: Telemetry):
        self._channel, self._serving, self._telemetry = channel, serving, telemetry
        # At the priority of requests: it holds the interpreter's lock for tens of milliseconds, and where it
        # had to wait for a processor meanwhile, all requests would.
        self._thread = ThreadPoolExecutor(1, "swap")
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._requests = count()
        self._to_do: asyncio.Queue[Message] = asyncio.Queue()
        self._prepared: tuple[int, Loaded] | None = None

    def listen(self) -> None:
        """Begin to hear the parent; in the event loop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._hear)
        self._doing = loop.create_task(self._do_all())
        self._channel.send(op="ready")

    async def reload(self, path: Path | None) -> dict[str, Any]:
        """See `service.admin.Reloads`."""
        request = next(self._requests)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[request] = answer
        bundle = None if path is None else str(path.absolute())
        try:
            self._channel.send(op="reload", bundle=bundle, request=request)
            message = await answer
        finally:
            del self._asked[request]
        if message["op"] == "reloaded":
            return dict(message["report"])
        if message["kind"] == "running":
            raise ProblemError(409, "reload-running", message["reason"])
        if message["kind"] == "stopping":
            raise ProblemError(503, "stopping", message["reason"])
        raise refused(RefusedError(message["reason"], hint=message["hint"]))

    def _hear(self) -> None:
        messages, there = self._channel.receive()
        for message in messages:
            if message["op"] in ("reloaded", "refused"):
                self._answer(message["request"], message)
            else:
                self._to_do.put_nowait(message)
        if not there:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            for request in self._asked:
                self._answer(
                    request, {"op": "refused", "kind": "stopping", "reason": "The service is stopping."}
                )
            # Without its parent nobody would start it anew or stop it.
            signal.raise_signal(signal.SIGTERM)

    def _answer(self, request: int, message: Message) -> None:
        answer = self._asked.get(request)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _do_all(self) -> None:
        """Do what the parent says, one after the other."""
        while True:
            message = await self._to_do.get()
            if message["op"] == "count":
                self._telemetry.reloads.labels(message["outcome"]).inc()
            elif message["op"] == "prepare":
                await self._prepare(message)
            elif message["op"] == "switch":
                await self._switch(message["token"])
            elif message["op"] == "discard":
                self._prepared = None

    async def _prepare(self, message: Message) -> None:
        token, path = message["token"], Path(message["path"])
        stamps = {name: tuple(stamp) for name, stamp in message["stamps"].items()}
        self._prepared = None
        try:
            work = partial(self._serving.prepare, path, stamps=stamps)
            loaded = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RefusedError as error:
            self._channel.send(op="unprepared", token=token, reason=error.reason, hint=error.hint)
        except Exception as failure:
            _log.error("preparing %s failed", path, exc_info=failure)
            reason = f"{path} cannot be loaded: {failure}"
            self._channel.send(op="unprepared", token=token, reason=reason, hint=None)
        else:
            self._prepared = token, loaded
            self._channel.send(op="prepared", token=token)

    async def _switch(self, token: int) -> None:
        prepared, self._prepared = self._prepared, None
        try:
            if prepared is None or prepared[0] != token:
                raise RuntimeError(f"bundle {token} is not prepared")
            work = partial(self._serving.switch, prepared[1])
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Exception as failure:
            # The others have it by now, so this one ends; the next one begins with it.
            _log.error("switching failed", exc_info=failure)
            signal.raise_signal(signal.SIGTERM)
            return
        self._channel.send(op="switched", token=token, report=self._serving.report(0.0))


def work(
    number: int,
    settings: Settings,
    bundle: Bundle,
    listener: socket.socket,
    channel: Channel,
    guard: Guard,
) -> None:
    """Serve in this process, forked for it, until SIGTERM or until the parent is gone.

    Args:
        number: of the worker; its metrics go on where those of its predecessor of that number ended.
        settings: of the service.
        bundle: verified.
        listener: listening.
        channel: to the parent.
        guard: who may do what.
    """
    # The number names the files of metrics, where the process's own would begin new ones.
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(lambda: number)
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
    del bundle  # to be let go of when another one has taken over
    fallback = serving.current.engine.encoder.fallback
    if fallback is not None:
        announcer(settings.log_format)(f"encoding on the CPU, for CUDA does not work here: {fallback}")
    serving.start()
    phrases = Phrases(serving, store)
    traces = open_traces(on=settings.traces)
    reloads = ParentReloads(channel, serving, telemetry)
    app = App(
        serving,
        settings,
        guard=guard,
        phrases=phrases,
        reloads=reloads,
        telemetry=telemetry,
        traces=traces,
    )
    limits = Limits(
        head_bytes=settings.max_head_bytes,
        header_lines=settings.max_headers,
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
    if settings.is_cheap(query_seconds(serving.current.engine)):
        # The event loop lets go of the GIL with each socket's turn and takes it back before the thread that
        # waits is awake, which also starts that thread's time anew: at the usual 5 ms its batches wait until
        # the loop is idle. Where encoding takes long, the loop's own time is worth more.
        sys.setswitchinterval(_SWITCH_S)
    # What is there now stays: no collection need look at it again, and those of what requests leave are rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        _Server(config, app, reloads).run(sockets=[listener])
    finally:
        serving.stop()
        phrases.close()
        traces.close()
        if store is not None:
            store.close()


class _Server(uvicorn.Server):
    """Ends in good order on SIGTERM.

    uvicorn's own would raise the signal once more when it is done, which ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, app: App, reloads: ParentReloads):
        super().__init__(config)
        self._app, self._reloads = app, reloads

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        signal.signal(signal.SIGTERM, self.handle_exit)
        yield

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
