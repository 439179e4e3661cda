"""The HTTP API: matches, live phrases, bundles, health, metrics, documentation, and the page for people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from bidmatch import __version__
from service import page, problems, schemas
from service.admin import Phrases, Reloads
from service.canary import Canary
from service.explain import explain
from service.logs import AccessLog, current_request, request_id
from service.match import CLIENT_LEFT, Matcher, reply_kept
from service.openapi import describe, ok, problem_answers, ref
from service.options import MatchOptions
from service.problems import ProblemError
from service.requests import ClientLeftError, read_json_body
from service.security import Guard
from service.serving import RefusedError, Serving
from service.settings import Settings
from service.telemetry import Telemetry
from service.traces import Traces

# What routes leave in the scope for the access line.
_CALLER, _ASKED = "bidmatch.caller", "bidmatch.asked"
_DESCRIPTION = """\
Matches search queries to advertisers' bid phrases.

Every error is a problem document (RFC 9457). A full queue answers 429 at once, with `Retry-After`.
"""


class LocalReloads:
    """Swaps the bundle of this process alone.

    Args:
        serving: what answers.
        phrases: its threads do the work.
        path: what the service was started with.
    """

    def __init__(self, serving: Serving, phrases: Phrases, path: Path):
        self._serving, self._phrases, self._path = serving, phrases, path
        self._running = False

    async def reload(self, path: Path | None) -> dict[str, Any]:
        """See `service.admin.Reloads`."""
        if self._running:
            raise ProblemError(409, "reload-running", "Another bundle is about to take over.")
        self._running = True
        started = time.perf_counter()
        try:
            loaded = await self._phrases.off_loop(partial(self._serving.prepare, path or self._path))
            await self._phrases.off_loop(partial(self._serving.switch, loaded))
        except RefusedError as error:
            raise refused(error) from None
        finally:
            self._running = False
        return self._serving.report(time.perf_counter() - started)


def refused(error: RefusedError) -> ProblemError:
    """The problem of a bundle that was not taken."""
    return ProblemError(422, "bundle-refused", f"{error.reason}. {error.hint or ''}".strip())


class App:
    """The ASGI application and what it is made of.

    Args:
        serving: the bundle that answers.
        settings: the limits in force.
        guard: who may do what.
        phrases: live phrases.
        reloads: lets other bundles take over; None for those of this process alone.
        telemetry: the metrics.
        traces: spans of requests.

    Attributes:
        api: the FastAPI application with all routes.
        matcher: what answers `/match`.
    """

    def __init__(
        self,
        serving: Serving,
        settings: Settings,
        *,
        guard: Guard,
        phrases: Phrases,
        reloads: Reloads | None = None,
        telemetry: Telemetry | None = None,
        traces: Traces | None = None,
    ):
        self.serving, self.settings, self.telemetry = serving, settings, telemetry or Telemetry()
        self.telemetry.serves(serving.current.engine)
        serving.on_switch = self.telemetry.serves
        self.phrases = phrases
        self.reloads = reloads or LocalReloads(serving, phrases, settings.bundle)
        self._guard, self._traces = guard, traces or Traces()
        self._access = AccessLog(on=settings.access_log, queries=settings.log_queries)
        self.canary = Canary(settings.canary, self.telemetry)
        self.matcher = Matcher(
            serving, settings, self.telemetry, guard, self._access, self.canary, self._traces
        )
        self.api = FastAPI(
            title="bidmatch",
            version=__version__,
            description=_DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            lifespan=self._lifespan,
        )
        problems.install(self.api)
        page.install(self.api)
        _match_routes(self.api, self)
        _phrase_routes(self.api, self)
        _admin_routes(self.api, self)
        _operations(self.api, self)
        describe(self.api, self.matcher.requests, keys=guard.required)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await self.matcher.batcher.close()
        self.canary.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: `POST /match` at once, the rest by the routes."""
        if scope["type"] != "http":
            await self.api(scope, receive, send)
        elif scope["path"] == "/match" and scope["method"] == "POST":
            await self.matcher(scope, receive, send)
        else:
            await self._routed(scope, receive, send)

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        span = self._traces.start(scope)
        status = 500
        current = request_id(scope)
        current_request.set(current)

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", current.encode())]
            await send(message)

        try:
            await self.api(scope, receive, watch)
        finally:
            # Paths are the client's to invent, so what isn't known counts as one.
            route = getattr(scope.get("route"), "path_format", "other")
            seconds = time.perf_counter() - started
            self.telemetry.answered(route, scope["method"], status, seconds)
            if self._access.on:
                asked: schemas.Asked | None = scope.get(_ASKED)
                queries, k = (None, None) if asked is None else (asked.queries, asked.k)
                self._access.write(scope, route, status, seconds, queries, k, scope.get(_CALLER))
            self._traces.end(span, route, status)

    async def body(self, request: Request) -> bytes:
        """The JSON body of a request.

        Raises:
            ProblemError: see `read_json_body`.
            ClientLeftError: the client left.
        """
        return await read_json_body(
            request.scope, request.receive, self.settings.max_body_bytes, self.settings.body_timeout_ms / 1000
        )

    async def admin(self, request: Request) -> None:
        """Let only those pass who hold an admin key.

        Raises:
            ProblemError: 401, 403.
        """
        request.scope[_CALLER] = self._guard.admin(request.scope)

    async def may_match(self, request: Request) -> None:
        """Let only those pass who hold a key.

        Raises:
            ProblemError: 401.
        """
        request.scope[_CALLER] = self._guard.match(request.scope)

    def refresh_gauges(self) -> None:
        """Bring up to date what is counted nowhere else."""
        telemetry, loaded = self.telemetry, self.serving.current
        telemetry.refresh(loaded.engine)
        telemetry.queue_depth.set(self.matcher.batcher.depth)
        telemetry.cache_bytes.set(loaded.cache.nbytes)
        live, sync = loaded.engine.live, self.serving.sync
        telemetry.live_phrases.set(0 if live is None else live.active)
        telemetry.live_unlinked.set(0 if live is None else live.unlinked)
        telemetry.live_sequence.set(0 if sync is None else sync.applied)
        telemetry.degraded.set(0 if self.degraded() is None else 1)

    def degraded(self) -> str | None:
        """Why this worker does not run as was wanted; None where it does."""
        sync = self.serving.sync
        return self.serving.current.engine.encoder.fallback or (None if sync is None else sync.failure)


def json_response(body: bytes) -> Response:
    """A JSON body, sent as it is."""
    return Response(body, media_type="application/json")


def _match_routes(api: FastAPI, app: App) -> None:
    settings = app.settings

    @api.post(
        "/match",
        operation_id="match",
        summary="Match one query or several",
        tags=["match"],
        response_class=Response,
        responses={
            **ok({"oneOf": [ref("OneAnswer"), ref("ManyAnswers")]}, "The phrases, best first"),
            **problem_answers(400, 401, 408, 413, 415, 422, 429, 503, 504),
        },
        openapi_extra={"requestBody": app.matcher.requests.match_body()},
    )
    async def match() -> Response:
        """The phrases that belong to a query (`query`) or to each of several (`queries`)."""
        raise AssertionError("POST /match is answered before the routes")

    @api.get(
        "/match",
        operation_id="match_one",
        summary="Match one query",
        tags=["match"],
        dependencies=[Depends(app.may_match)],
        response_class=Response,
        responses={
            **ok(ref("OneAnswer"), "The phrases, best first"),
            **problem_answers(401, 422, 429, 503, 504),
        },
    )
    async def match_one(
        request: Request,
        q: str = Query(
            max_length=settings.max_query_chars,
            json_schema_extra={"pattern": schemas.SOMETHING_VISIBLE},
            description="the query as typed",
            examples=["red running shoes"],
        ),
        k: int = Query(10, ge=1, le=settings.max_k, description="most phrases"),
        min_score: float | None = Query(
            None,
            ge=schemas.MIN_SCORE,
            le=schemas.MAX_SCORE,
            allow_inf_nan=False,
            description="leave out phrases that search found with a lesser score",
        ),
        min_relevance: float | None = Query(
            None, ge=0, le=1, allow_inf_nan=False, description=schemas.MIN_RELEVANCE
        ),
    ) -> Response:
        """The phrases that belong to a query."""
        started = time.perf_counter()
        try:
            schemas.something(q)
        except ValueError as empty:
            raise problems.invalid([problems.FieldError(where="query.q", reason=str(empty))]) from None
        asked = schemas.Asked(queries=[q], k=k, min_score=min_score, min_relevance=min_relevance)
        request.scope[_ASKED] = asked
        try:
            return Response(**reply_kept(await app.matcher.reply(request.scope, asked, started)))
        except ClientLeftError:
            app.telemetry.dropped.labels("client_left").inc()
            return Response(status_code=CLIENT_LEFT)


class _AnyText(PathConvertor):
    """The rest of a path, line breaks included, which Starlette's own leaves out at the end."""

    regex = "(?s:.*)"


register_url_convertor("path", _AnyText())


def _phrase_routes(api: FastAPI, app: App) -> None:
    requests, phrases, admin = app.matcher.requests, app.phrases, [Depends(app.admin)]
    answers = problem_answers(401, 403, 404, 422, 429, 503)
    one = {**ok(ref("PhraseState"), "The phrase as it is now"), **answers}
    changed = {**one, **problem_answers(409)}

    @api.post(
        "/phrases",
        operation_id="put_phrases",
        summary="Add or change phrases",
        tags=["phrases"],
        dependencies=admin,
        response_class=Response,
        responses={
            **ok(ref("PhraseStates"), "They are stored, and matched from now on"),
            **problem_answers(400, 401, 403, 404, 408, 413, 415, 422, 429, 503),
        },
        openapi_extra={"requestBody": requests.body_of(requests.phrases)},
    )
    async def put_phrases(request: Request) -> Response:
        """All of them or none. They are on disk when this answers, and in every worker within a second."""
        try:
            given = requests.put_phrases(await app.body(request))
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        return json_response(orjson.dumps({"phrases": await phrases.put(given)}, default=str))

    @api.post(
        "/phrases/{id:path}/pause",
        operation_id="pause_phrase",
        summary="Pause a phrase",
        tags=["phrases"],
        dependencies=admin,
        response_class=Response,
        responses=changed,
    )
    async def pause(id: schemas.PathId) -> Response:
        """It is matched no more until it is resumed; phrases of the bundle, too."""
        return json_response(orjson.dumps(await phrases.set_state(id, "paused"), default=str))

    @api.post(
        "/phrases/{id:path}/resume",
        operation_id="resume_phrase",
        summary="Resume a phrase",
        tags=["phrases"],
        dependencies=admin,
        response_class=Response,
        responses=changed,
    )
    async def resume(id: schemas.PathId) -> Response:
        """A paused phrase is matched again."""
        return json_response(orjson.dumps(await phrases.set_state(id, "active"), default=str))

    @api.get(
        "/phrases/{id:path}",
        operation_id="get_phrase",
        summary="A phrase",
        tags=["phrases"],
        dependencies=admin,
        response_class=Response,
        responses=one,
    )
    async def get_phrase(id: schemas.PathId) -> Response:
        """A phrase of the bundle or a live one, as it is now."""
        return json_response(orjson.dumps(await phrases.get(id), default=str))

    @api.delete(
        "/phrases/{id:path}",
        operation_id="remove_phrase",
        summary="Remove a phrase",
        tags=["phrases"],
        dependencies=admin,
        response_class=Response,
        responses=changed,
    )
    async def remove(id: schemas.PathId) -> Response:
        """It is matched no more, in later bundles either, until it is added again."""
        return json_response(orjson.dumps(await phrases.set_state(id, "removed"), default=str))


def _admin_routes(api: FastAPI, app: App) -> None:
    requests, admin = app.matcher.requests, [Depends(app.admin)]

    @api.post(
        "/admin/reload",
        operation_id="reload",
        summary="Let another bundle take over",
        tags=["operations"],
        dependencies=admin,
        response_class=Response,
        responses={
            **ok(ref("Reloaded"), "It has taken over"),
            **problem_answers(400, 401, 403, 408, 409, 413, 415, 422, 503),
        },
        openapi_extra={"requestBody": requests.body_of(schemas.ReloadRequest, required=False)},
    )
    async def reload(request: Request) -> Response:
        """Verified, warmed and tried on recent queries first; a bad one is refused and nothing changes."""
        try:
            path = requests.reload(await app.body(request))
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        try:
            report = await app.reloads.reload(None if path is None else Path(path))
        except ProblemError as problem:
            if problem.kind == "bundle-refused":
                app.telemetry.reloads.labels("refused").inc()
            raise
        app.telemetry.reloads.labels("taken").inc()
        return json_response(orjson.dumps(report))

    @api.post(
        "/admin/explain",
        operation_id="explain",
        summary="Why matches are what they are",
        tags=["operations"],
        dependencies=admin,
        response_class=Response,
        responses={
            **ok(ref("Explanation"), "How they came about"),
            **problem_answers(400, 401, 403, 408, 413, 415, 422, 429, 503),
        },
        openapi_extra={"requestBody": requests.body_of(requests.explained)},
    )
    async def explained(request: Request) -> Response:
        """Tokens, width of the search, both parts of the scores, and the rule that left each phrase out."""
        try:
            asked = requests.explain(await app.body(request))
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        loaded = app.serving.current
        options: MatchOptions = app.matcher.options(loaded, asked, request.scope)
        ids = list(asked.ids)

        def work() -> dict[str, Any]:
            return explain(loaded.engine, asked.queries[0], options, ids, app.phrases.stored)

        return json_response(orjson.dumps(await app.phrases.off_loop(work), default=str))


def _operations(api: FastAPI, app: App) -> None:
    @api.get(
        "/healthz",
        operation_id="healthz",
        summary="Is the process alive?",
        tags=["operations"],
        response_class=Response,
        responses=ok(ref("Health"), "It is"),
    )
    async def healthz() -> Response:
        """Answers as long as the process does."""
        return json_response(b'{"status":"ok"}')

    @api.get(
        "/readyz",
        operation_id="readyz",
        summary="Are requests taken?",
        tags=["operations"],
        response_class=Response,
        responses={**ok(ref("Readiness"), "They are"), **problem_answers(503)},
    )
    async def readyz() -> Response:
        """Answers 200 while the bundle is loaded and its index can be searched, until the service stops."""
        if app.matcher.batcher.closed:
            raise ProblemError(503, "stopping", "The service is stopping.")
        engine = app.serving.current.engine
        if engine.index.failure is not None:
            raise problems.index_unavailable(engine.index.failure)
        state = {
            "status": "ready",
            "bundle": engine.bundle_id,
            "provider": engine.encoder.providers[0].removesuffix("ExecutionProvider").lower(),
            "degraded": app.degraded(),
        }
        return json_response(orjson.dumps(state))

    @api.get(
        "/metrics",
        operation_id="metrics",
        summary="Metrics for Prometheus",
        tags=["operations"],
        response_class=Response,
        responses={
            200: {
                "description": "Prometheus text format",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    )
    async def metrics() -> Response:
        """What the service counts and times."""
        app.refresh_gauges()
        # Many workers' files are added up, which is no work for the event loop.
        text = await asyncio.to_thread(app.telemetry.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
