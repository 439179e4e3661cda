"""Errors as problem details (RFC 9457), those of the framework included."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from export.bundle.index import IndexUnavailableError

MEDIA_TYPE = "application/problem+json"
# Of a name that a client made up.
SHOWN_CHARS = 100

_log = logging.getLogger("bidmatch.service")


class FieldError(BaseModel):
    """One thing that is wrong with a request."""

    where: str = Field(description="the field, such as `body.k`", examples=["body.k"])
    reason: str = Field(description="what is wrong with it")


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(
        description="stable identifier of the kind of problem", examples=["urn:bidmatch:queue-full"]
    )
    title: str = Field(description="the kind of problem, for people")
    status: int = Field(description="the HTTP status", ge=400, le=599)
    detail: str = Field(description="what went wrong this time")
    errors: list[FieldError] = Field(default=[], description="each field that is wrong, if fields are")


class ProblemError(Exception):
    """Ends a request with a problem.

    Args:
        status: HTTP status, 4xx or 5xx.
        kind: last part of the problem's type, such as `queue-full`.
        detail: what went wrong this time, for people.
        errors: the fields that are wrong.
        headers: more response headers.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(detail)
        self.status, self.kind, self.detail = status, kind, detail
        self.errors, self.headers = list(errors), dict(headers or {})

    def body(self) -> bytes:
        """The JSON document."""
        document: dict[str, Any] = {
            "type": f"urn:bidmatch:{self.kind}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": _encodable(self.detail),
        }
        if self.errors:
            document["errors"] = [
                {"where": _encodable(error.where), "reason": _encodable(error.reason)}
                for error in self.errors
            ]
        return orjson.dumps(document)

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, as ASGI has them."""
        return [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", b"%d" % len(self.body())),
            *((name.lower().encode(), value.encode()) for name, value in self.headers.items()),
        ]

    def response(self) -> Response:
        """The HTTP response."""
        return Response(self.body(), self.status, self.headers, MEDIA_TYPE)


def _encodable(text: str) -> str:
    """Text that UTF-8 can carry: what a client sent may hold lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")


def invalid(errors: Sequence[FieldError]) -> ProblemError:
    """422: the request is well formed, its values are not allowed."""
    detail = "; ".join(f"{error.where}: {error.reason}" for error in errors[:3])
    more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
    return ProblemError(422, "invalid-request", detail + more, errors=errors[:20])


def field_errors(raw: Sequence[Any], start: tuple[str, ...] = ()) -> list[FieldError]:
    """Pydantic's errors as field errors; what the client sent is not repeated."""
    return [
        FieldError(
            where=".".join(str(part)[:SHOWN_CHARS] for part in (*start, *error["loc"])) or "body",
            reason=str(error["msg"]).removeprefix("Value error, "),
        )
        for error in raw
    ]


async def _on_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return error.response()


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail, headers = error.detail, dict(error.headers or {})
    if error.status_code == 404:
        detail = "There is nothing at this path; /docs says what there is."
    elif error.status_code == 405:
        # Starlette names the methods of the first route of this path only.
        headers["Allow"] = ", ".join(_methods(request))
        detail = f"This path takes {headers['Allow']}."
    return ProblemError(error.status_code, kind, detail, headers=headers).response()


def _methods(request: Request) -> list[str]:
    """Every method that some route takes at the request's path."""
    taken: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            taken |= route.methods or set()
    return sorted(taken)


async def _on_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid(field_errors(error.errors())).response()


async def _on_unavailable(_: Request, error: Exception) -> Response:
    assert isinstance(error, IndexUnavailableError)
    return index_unavailable(error.reason).response()


async def _on_bug(request: Request, error: Exception) -> Response:
    return bug(f"{request.method} {request.url.path}", error).response()


def bug(what: str, error: Exception) -> ProblemError:
    """Write what failed into the log, and the problem to answer with."""
    _log.error("%s failed", what, exc_info=error)
    return ProblemError(500, "internal-error", "The service failed; its log says why.")


def index_unavailable(reason: str) -> ProblemError:
    """503: the index is elsewhere and can't be searched now."""
    detail = f"{reason.rstrip('.')}. It is looked for again and again."
    return ProblemError(503, "index-unavailable", detail, headers={"Retry-After": "1"})


def install(app: FastAPI) -> None:
    """Answer every error of `app` with problem details."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(IndexUnavailableError, _on_unavailable)
    app.add_exception_handler(Exception, _on_bug)
