"""The HTTP API: `POST /match`, `GET /match`, health, metrics, documentation, and the page for people."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Query, Request
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from bidmatch import __version__
from service import page, problems, schemas
from service.answers import Answer, answer, total
from service.batcher import Batcher, ClosedError, DeadlineError, QueueFullError
from service.engine import NO_CALIBRATION, Engine
from service.problems import ProblemError
from service.requests import ClientLeftError, read_json_body, while_client_waits
from service.settings import Settings
from service.telemetry import CLIENT_LEFT, CountRequests, Telemetry

_DESCRIPTION = """\
Matches search queries to advertisers' bid phrases.

Every error is a problem document (RFC 9457). A full queue answers 429 at once, with `Retry-After`.
"""


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """The ASGI application that serves `engine` within the limits of `settings`."""
    requests = schemas.MatchRequests(settings)
    telemetry = Telemetry(engine)

    def run(queries: list[str], k: int, min_score: float | None) -> list[Answer]:
        answers = answer(engine, queries, k, min_score)
        telemetry.batch_done(answers)
        return answers

    batcher: Batcher[Answer] = Batcher(
        run,
        threads=settings.threads,
        max_batch=settings.max_batch,
        queue=settings.queue,
        deadline=settings.deadline_ms / 1000,
        on_batch=telemetry.batch_started,
    )
    telemetry.queue_depth.set_function(lambda: batcher.depth)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await batcher.close()

    app = FastAPI(
        title="bidmatch",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    problems.install(app)
    app.add_middleware(CountRequests, telemetry=telemetry)
    page.install(app)

    async def matched(request: Request, asked: schemas.Asked, started: float) -> Response:
        if asked.min_relevance is not None and engine.calibration is None:
            where = "body.min_relevance" if request.method == "POST" else "query.min_relevance"
            raise problems.invalid([problems.FieldError(where=where, reason=NO_CALIBRATION)])
        least = engine.least_score(asked.min_score, asked.min_relevance)
        work = batcher.submit(asked.queries, asked.k, least)
        try:
            answers = await while_client_waits(request, work)
        except QueueFullError as full:
            telemetry.dropped.labels("queue_full").inc()
            raise ProblemError(
                429,
                "queue-full",
                "More queries are waiting than the service takes; try again soon.",
                headers={"Retry-After": str(full.retry_after)},
            ) from None
        except DeadlineError:
            telemetry.dropped.labels("deadline").inc()
            raise ProblemError(
                504, "deadline", f"Not answered within {settings.deadline_ms} ms, so it was given up."
            ) from None
        except ClosedError:
            raise ProblemError(503, "stopping", "The service is stopping.") from None
        content: dict[str, Any]
        if asked.many:
            results = [
                {"query": query, "matches": orjson.Fragment(one.matches)}
                for query, one in zip(asked.queries, answers, strict=True)
            ]
            content = {"results": results, "bundle": engine.bundle_id}
        else:
            content = {"matches": orjson.Fragment(answers[0].matches), "bundle": engine.bundle_id}
        return _json(
            orjson.dumps(content), {"Server-Timing": _server_timing(answers, time.perf_counter() - started)}
        )

    def left() -> Response:
        telemetry.dropped.labels("client_left").inc()
        return Response(status_code=CLIENT_LEFT)

    @app.post(
        "/match",
        operation_id="match",
        summary="Match one query or several",
        tags=["match"],
        response_class=Response,
        responses={
            **_ok({"oneOf": [_ref("OneAnswer"), _ref("ManyAnswers")]}, "The phrases, best first"),
            **_problems(400, 408, 413, 415, 422, 429, 503, 504),
        },
        openapi_extra={"requestBody": requests.body_schema()},
    )
    async def match(request: Request) -> Response:
        """The phrases that belong to a query (`query`) or to each of several (`queries`)."""
        started = time.perf_counter()
        try:
            body = await read_json_body(request, settings.max_body_bytes, settings.body_timeout_ms / 1000)
            return await matched(request, requests.parse(body), started)
        except ClientLeftError:
            return left()

    @app.get(
        "/match",
        operation_id="match_one",
        summary="Match one query",
        tags=["match"],
        response_class=Response,
        responses={**_ok(_ref("OneAnswer"), "The phrases, best first"), **_problems(422, 429, 503, 504)},
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
        asked = schemas.Asked(queries=[q], k=k, min_score=min_score, min_relevance=min_relevance, many=False)
        try:
            return await matched(request, asked, started)
        except ClientLeftError:
            return left()

    @app.get(
        "/healthz",
        summary="Is the process alive?",
        tags=["operations"],
        response_class=Response,
        responses=_ok(_ref("Health"), "It is"),
    )
    async def healthz() -> Response:
        """Answers as long as the process does."""
        return _json(b'{"status":"ok"}')

    @app.get(
        "/readyz",
        summary="Are requests taken?",
        tags=["operations"],
        response_class=Response,
        responses={**_ok(_ref("Readiness"), "They are"), **_problems(503)},
    )
    async def readyz() -> Response:
        """Answers 200 from when the bundle is loaded until the service stops."""
        if batcher.closed:
            raise ProblemError(503, "stopping", "The service is stopping.")
        return _json(orjson.dumps({"status": "ready", "bundle": engine.bundle_id}))

    @app.get(
        "/metrics",
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
        return Response(generate_latest(telemetry.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    _describe(app, requests)
    return app


def _json(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")


def _server_timing(answers: list[Answer], whole: float) -> str:
    """Milliseconds of each step, for a browser's network view and our page."""
    steps = total(answers)
    times = {"tokenise": steps.tokenise, "encode": steps.encode, "search": steps.search}
    if steps.rescore:
        times["rescore"] = steps.rescore
    times["total"] = whole
    return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in times.items())


def _ref(model: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model}"}


def _ok(schema: dict[str, Any], description: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": {"application/json": {"schema": schema}}}}


_PROBLEMS = {
    400: "The body is not JSON",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "The body is of another type than JSON",
    422: "A value is not allowed",
    429: "The queue is full",
    503: "The service is stopping",
    504: "Not answered within the deadline",
}


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    answers: dict[int | str, dict[str, Any]] = {
        status: {
            "description": _PROBLEMS[status],
            "content": {problems.MEDIA_TYPE: {"schema": _ref("Problem")}},
        }
        for status in statuses
    }
    if 429 in answers:
        answers[429]["headers"] = {
            "Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}}
        }
    return answers


def _describe(app: FastAPI, requests: schemas.MatchRequests) -> None:
    """Put the schemas of bodies, which the routes read and write themselves, into the OpenAPI document."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=[
                    {"name": "match", "description": "Queries to phrases."},
                    {"name": "operations", "description": "For those who run the service."},
                ],
            )
            document.setdefault("components", {})["schemas"] = requests.components()
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
