"""What can go wrong with a call: one tree of exceptions, made from problem documents (RFC 9457)."""
# ruff: noqa: N818 - named for what happened, as callers catch them

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

_PREFIX = "urn:bidmatch:"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing that is wrong with a request.

    Attributes:
        where: the field, such as `body.k`.
        reason: what is wrong with it.
    """

    where: str
    reason: str


class ServiceError(Exception):
    """A call that got no sound answer; its subclasses say which way.

    Args:
        status: the HTTP status, or None where there was no response.
        kind: what kind of problem, such as `queue-full`: the problem's type without `urn:bidmatch:`.
        detail: what went wrong this time.
        errors: each field of the request that is wrong, if fields are.
        retry_after: seconds after which the service may be asked again, or None where it didn't say.

    Example:
        >>> try:
        ...     matches = client.match("red running shoes").matches
        ... except ServiceError as error:
        ...     log.warning("no matches: %s", error)
        ...     matches = ()
    """

    def __init__(
        self,
        status: int | None,
        kind: str,
        detail: str,
        errors: Sequence[FieldError] = (),
        retry_after: float | None = None,
    ):
        # All of them in `args`, so that it can be pickled.
        super().__init__(status, kind, detail, tuple(errors), retry_after)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.errors = tuple(errors)
        self.retry_after = retry_after

    def __str__(self) -> str:
        status = "" if self.status is None else f"{self.status} "
        return f"{status}{self.kind}: {self.detail}"


class InvalidRequest(ServiceError):
    """400, 413, 415, 422 and other refusals: the same request would be refused again."""


class Unauthorized(ServiceError):
    """401, 403: no key, a wrong one, or one that doesn't open this path."""


class NotFound(ServiceError):
    """404: no such phrase, or nothing at this path."""


class Conflict(ServiceError):
    """409: another reload is running, or the phrase is removed and would first have to be put again."""


class QueueFull(ServiceError):
    """429: more queries are waiting than the service takes, and the retries that fit didn't help."""


class DeadlineExceeded(ServiceError):
    """504, or no answer within the time the caller gave (then `status` is None)."""


class Unavailable(ServiceError):
    """503: the service is starting or stopping, takes no more connections, or could not store a change."""


class ConnectionFailed(ServiceError):
    """No connection, or it broke before the answer was whole; the request may have been carried out."""


class ProtocolError(ServiceError):
    """The answer is not one of this API: not JSON, or something in it is missing or of another type."""


_CLASSES: dict[int, type[ServiceError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    429: QueueFull,
    503: Unavailable,
    504: DeadlineExceeded,
}


def from_response(status: int, body: bytes, retry_after: float | None, says: str) -> ServiceError:
    """The exception for a response that isn't a 200.

    Args:
        status: its HTTP status.
        body: its body: a problem document, or anything else where a proxy answered.
        retry_after: seconds of its Retry-After, if any.
        says: what was called, such as `POST /match`.
    """
    raised = _CLASSES.get(status, InvalidRequest if 400 <= status < 500 else ServiceError)
    problem = _problem(body)
    if problem is None:
        return raised(
            status, _phrase(status), f"{says} was answered without a problem document", (), retry_after
        )
    kind = problem.get("type")
    detail = problem.get("detail") or problem.get("title") or ""
    return raised(
        status,
        kind.removeprefix(_PREFIX) if isinstance(kind, str) and kind != "about:blank" else _phrase(status),
        str(detail),
        _field_errors(problem.get("errors")),
        retry_after,
    )


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase.lower().replace(" ", "-")
    except ValueError:
        return "unknown-status"


def _problem(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "type" in document else None


def _field_errors(raw: Any) -> tuple[FieldError, ...]:
    return tuple(
        FieldError(str(error.get("where", "")), str(error.get("reason", "")))
        for error in (raw if isinstance(raw, list) else ())
        if isinstance(error, dict)
    )
