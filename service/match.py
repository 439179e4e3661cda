"""`POST /match` as plain ASGI: the hot path, with nothing between the server and the batcher."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
from starlette.types import Receive, Scope, Send

from bidmatch.base import text
from export.bundle.index import IndexUnavailableError
from service import problems, schemas
from service.answers import Answer, answer_each, total
from service.batcher import Batcher, ClosedError, DeadlineError, Job, QueueFullError
from service.cache import Kept
from service.canary import Canary
from service.engine import NO_CALIBRATION, Engine
from service.logs import AccessLog, current_request, request_id
from service.matches import Timings
from service.options import MatchOptions
from service.priority import follow_the_loop
from service.problems import ProblemError
from service.protocol import CLIENT, Client
from service.requests import ClientLeftError, read_json_body
from service.rules.filters import FilterError, parse_filter
from service.security import Guard
from service.serving import Loaded, Serving
from service.settings import Settings
from service.telemetry import Telemetry
from service.traces import Traces

CLIENT_LEFT = 499
TIMEOUT_HEADER = b"x-request-timeout-ms"
_ROUTE = "/match"
_USUAL_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent back."""

    status: int
    body: bytes
    headers: Sequence[tuple[bytes, bytes]]


class Pinned(NamedTuple):
    """What a request asks, of the bundle that it began with."""

    loaded: Loaded
    options: MatchOptions


class Matcher:
    """Answers requests for matches: cache, queue, threads.

    Args:
        serving: the bundle that answers.
        settings: the limits in force.
        telemetry: where it is counted.
        guard: who may ask.
        access: writes access lines.
        canary: checks the recall of some answers.
        traces: spans of requests.

    Attributes:
        batcher: the queue and its threads.
    """

    def __init__(
        self,
        serving: Serving,
        settings: Settings,
        telemetry: Telemetry,
        guard: Guard,
        access: AccessLog,
        canary: Canary,
        traces: Traces,
    ):
        self._serving, self._settings, self._telemetry = serving, settings, telemetry
        self._guard, self._access, self._canary, self._traces = guard, access, canary, traces
        self._requests = schemas.MatchRequests(settings)
        self._deadline = settings.deadline_ms / 1000
        seconds = query_seconds(serving.current.engine)
        self.batcher: Batcher[Pinned, Answer] = Batcher(
            self._run,
            threads=settings.batches_at_once(seconds),
            batch=self._batch,
            queue=settings.queue,
            queue_bytes=settings.queue_kb * 1000,
            size_of=lambda queries, pinned: sum(map(len, queries)) + pinned.options.size(),
            # Where Python is the cost a thread behind the loop would keep it waiting, with the GIL in hand.
            begin=(lambda: None) if settings.is_cheap(seconds) else follow_the_loop,
            on_batch=self._counted,
        )

    @property
    def requests(self) -> schemas.MatchRequests:
        """What bodies are checked against."""
        return self._requests

    def _batch(self) -> int:
        cost = self._serving.current.engine.cost
        return self._settings.max_batch or (cost.best_batch if cost is not None else 1)

    def _run(self, queries: list[str], pinned: list[Pinned]) -> Sequence[Answer]:
        """The answers to a batch, on a thread of the pool."""
        first = pinned[0].loaded
        if all(one.loaded is first for one in pinned):
            return self._of_one(first, queries, [one.options for one in pinned])
        # A swap is under way: each bundle answers those that began with it.
        answers: list[Answer | None] = [None] * len(queries)
        for loaded in {id(one.loaded): one.loaded for one in pinned}.values():
            places = [at for at, one in enumerate(pinned) if one.loaded is loaded]
            found = self._of_one(
                loaded, [queries[at] for at in places], [pinned[at].options for at in places]
            )
            for at, one in zip(places, found, strict=True):
                answers[at] = one
        return answers  # type: ignore[return-value]

    def _of_one(self, loaded: Loaded, queries: list[str], options: list[MatchOptions]) -> Sequence[Answer]:
        return answer_each(loaded.engine, queries, options, guarded=loaded.cache.on)

    def _counted(self, waits: list[float], pinned: list[Pinned], answers: Sequence[Answer] | None) -> None:
        """Count a batch."""
        self._telemetry.batch_started(len(pinned), waits)
        if answers is None:
            return
        for loaded in {id(one.loaded): one.loaded for one in pinned}.values():
            mine = [answer for one, answer in zip(pinned, answers, strict=True) if one.loaded is loaded]
            self._telemetry.batch_done(loaded.engine, mine)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `POST /match`."""
        started = time.perf_counter()
        span = self._traces.start(scope)
        asked: schemas.Asked | None = None
        caller: str | None = None
        request = request_id(scope)
        current_request.set(request)
        client: Client | None = scope.get("extensions", {}).get(CLIENT)
        reply: Reply | None
        try:
            caller = self._guard.match(scope)
            body = await read_json_body(
                scope,
                receive,
                self._settings.max_body_bytes,
                self._settings.body_timeout_ms / 1000,
                None if client is None else client.whole_body(),
            )
            asked = self._requests.parse(body)
            reply = await self.reply(scope, asked, started)
        except ProblemError as problem:
            reply = Reply(problem.status, problem.body(), problem.raw_headers())
        except ClientLeftError:
            self._telemetry.dropped.labels("client_left").inc()
            reply = None
        except Exception as failure:
            bug = problems.bug("POST /match", failure)
            reply = Reply(bug.status, bug.body(), bug.raw_headers())
        seconds = time.perf_counter() - started
        status = CLIENT_LEFT if reply is None else reply.status
        if reply is not None:
            headers = [*reply.headers, (b"x-request-id", request.encode())]
            if client is None or not client.answer(status, headers, reply.body):
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": reply.body})
        self._telemetry.answered(_ROUTE, "POST", status, seconds)
        if self._access.on:
            queries, k = (None, None) if asked is None else (asked.queries, asked.k)
            self._access.write(scope, _ROUTE, status, seconds, queries, k, caller)
        self._traces.end(span, _ROUTE, status)

    async def reply(self, scope: Scope, asked: schemas.Asked, started: float) -> Reply:
        """The answer to a checked request.

        Raises:
            ProblemError: 422 of what only the bundle can tell, 429, 503, 504.
            ClientLeftError: the client left.
        """
        loaded = self._serving.current
        options = self.options(loaded, asked, scope)
        timeout = self._timeout(scope)
        if not asked.many and loaded.cache.on:
            kept = loaded.cache.get(text.key(asked.queries[0]), options)
            if kept is not None:
                self._telemetry.from_cache(loaded.engine, [kept])
                return self._one(loaded, kept.matches, Timings(), started, hit=True)
        answers = await self._answers(scope, loaded, asked.queries, options, timeout)
        if not asked.many:
            (answer,) = answers
            steps = answer.timings if isinstance(answer, Answer) else Timings()
            return self._one(loaded, answer.matches, steps, started, hit=False)
        results = [
            {"query": query, "matches": orjson.Fragment(one.matches)}
            for query, one in zip(asked.queries, answers, strict=True)
        ]
        body = orjson.dumps({"results": results, "bundle": loaded.engine.bundle_id})
        made = [one for one in answers if isinstance(one, Answer)]
        return Reply(200, body, _headers(body, total(made), started, hit=not made))

    def _one(self, loaded: Loaded, matches: bytes, timings: Timings, started: float, *, hit: bool) -> Reply:
        body = b'{"matches":%b,"bundle":"%b"}' % (matches, loaded.engine.bundle_id.encode())
        return Reply(200, body, _headers(body, timings, started, hit=hit))

    def options(self, loaded: Loaded, asked: schemas.Asked, scope: Scope) -> MatchOptions:
        """What a request asks for, checked against the bundle that answers it.

        Raises:
            ProblemError: 422.
        """
        if asked.plain:
            return MatchOptions(asked.k, asked.min_score)
        engine = loaded.engine
        where = "body" if scope["method"] == "POST" else "query"
        if asked.min_relevance is not None and engine.calibration is None:
            raise problems.invalid(
                [problems.FieldError(where=f"{where}.min_relevance", reason=NO_CALIBRATION)]
            )
        try:
            chosen = None if asked.filter is None else parse_filter(asked.filter, engine.phrase_columns)
        except FilterError as wrong:
            raise problems.invalid(
                [problems.FieldError(where=f"{where}.{at}", reason=reason) for at, reason in wrong.errors]
            ) from None
        return MatchOptions(
            asked.k,
            engine.least_score(asked.min_score, asked.min_relevance),
            chosen or None,
            None if asked.allow is None else tuple(sorted(set(asked.allow))),
            tuple(sorted(set(asked.deny))),
            asked.distinct,
        )

    def _timeout(self, scope: Scope) -> float:
        for name, value in scope["headers"]:
            if name == TIMEOUT_HEADER:
                most = self._settings.longest_deadline_ms
                if not (value.isdigit() and len(value) < 10 and 1 <= int(value) <= most):
                    reason = f"must be a whole number of milliseconds, 1 to {most}"
                    raise problems.invalid(
                        [problems.FieldError(where="header.X-Request-Timeout-Ms", reason=reason)]
                    )
                return int(value) / 1000
        return self._deadline

    async def _answers(
        self, scope: Scope, loaded: Loaded, queries: list[str], options: MatchOptions, timeout: float
    ) -> list[Answer | Kept]:
        """One answer a query: from the cache, the others from the batcher."""
        cache = loaded.cache
        answers: list[Answer | Kept | None] = [None] * len(queries)
        keys: list[str] = []
        if cache.on:
            keys = [text.key(query) for query in queries]
            if len(queries) > 1:
                answers = [cache.get(key, options) for key in keys]
        missing = [at for at, one in enumerate(answers) if one is None]
        if len(queries) > len(missing):
            self._telemetry.from_cache(loaded.engine, [one for one in answers if isinstance(one, Kept)])
        if missing:
            if cache.on:
                self._telemetry.cache_misses.inc(len(missing))
            asked = queries if len(missing) == len(queries) else [queries[at] for at in missing]
            found = await self._work(scope, asked, Pinned(loaded, options), timeout)
            for at, one in zip(missing, found, strict=True):
                answers[at] = one
                if cache.on and one.guard is not None:
                    cache.put(keys[at], options, Kept(one.matches, one.count, one.best), one.guard)
            for query in asked:
                self._serving.probes.record(query)
            self._canary.offer(loaded.engine, asked, options)
        return answers  # type: ignore[return-value]

    async def _work(self, scope: Scope, queries: list[str], pinned: Pinned, timeout: float) -> list[Answer]:
        client = scope.get("extensions", {}).get(CLIENT)
        if client is not None and client.lost:
            raise ClientLeftError
        try:
            job: Job[Pinned, Answer] = self.batcher.submit(queries, pinned, timeout)
        except QueueFullError as full:
            self._telemetry.dropped.labels("queue_full").inc()
            raise ProblemError(
                429,
                "queue-full",
                "More queries are waiting than the service takes; try again soon.",
                headers={"Retry-After": str(full.retry_after)},
            ) from None
        except ClosedError:
            raise ProblemError(503, "stopping", "The service is stopping.") from None
        if client is not None:
            client.on_lost = job.answer.cancel
        try:
            return await job.answer
        except DeadlineError:
            self._telemetry.dropped.labels("deadline").inc()
            raise ProblemError(
                504, "deadline", f"Not answered within {timeout * 1e3:g} ms, so it was given up."
            ) from None
        except IndexUnavailableError as gone:
            self._telemetry.dropped.labels("index").inc()
            raise problems.index_unavailable(gone.reason) from None
        except asyncio.CancelledError:
            if client is not None and client.lost:
                raise ClientLeftError from None
            job.answer.cancel()
            raise
        finally:
            if client is not None:
                client.on_lost = None
            # An error's traceback holds this frame, and the job the error: a ring around its bundle.
            del job


def query_seconds(engine: Engine) -> float:
    """Seconds that encoding a query of usual length takes in a batch; infinite where not measured."""
    cost = engine.cost
    if cost is None:
        return math.inf
    return cost.seconds(cost.best_batch, _USUAL_TOKENS) / cost.best_batch


def _headers(body: bytes, steps: Timings, started: float, *, hit: bool) -> list[tuple[bytes, bytes]]:
    """Length, type, and milliseconds of each step, for a browser's network view and our page."""
    whole = (time.perf_counter() - started) * 1e3
    if hit:
        timing = b"cache;desc=hit, total;dur=%.3f" % whole
    else:
        rescore = b", rescore;dur=%.3f" % (steps.rescore * 1e3) if steps.rescore else b""
        timing = b"tokenise;dur=%.3f, encode;dur=%.3f, search;dur=%.3f%b, total;dur=%.3f" % (
            steps.tokenise * 1e3,
            steps.encode * 1e3,
            steps.search * 1e3,
            rescore,
            whole,
        )
    return [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/json"),
        (b"server-timing", timing),
    ]


def reply_kept(reply: Reply) -> dict[str, Any]:
    """A reply as what Starlette's Response takes."""
    return {
        "content": reply.body,
        "status_code": reply.status,
        "headers": {
            name.decode(): value.decode() for name, value in reply.headers if name != b"content-length"
        },
    }
