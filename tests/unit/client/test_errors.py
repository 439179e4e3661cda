from __future__ import annotations

import json
import pickle

import pytest

from bidmatch import client as api
from bidmatch.client.errors import from_response


def problem(**fields: object) -> bytes:
    return json.dumps(
        {"type": "urn:bidmatch:invalid-request", "title": "No", "status": 422, "detail": "k is 0"} | fields
    ).encode()


def test_the_fields_of_a_problem() -> None:
    raw = problem(errors=[{"where": "body.k", "reason": "is 0", "more": 1}, "odd", {}])
    error = from_response(422, raw, 1.5, "POST /match")
    assert type(error) is api.InvalidRequest
    assert (error.status, error.kind, error.detail, error.retry_after) == (
        422,
        "invalid-request",
        "k is 0",
        1.5,
    )
    assert error.errors == (api.FieldError("body.k", "is 0"), api.FieldError("", ""))
    assert str(error) == "422 invalid-request: k is 0"


def test_one_tree() -> None:
    classes = [getattr(api, name) for name in api.__all__]
    errors = {one for one in classes if isinstance(one, type) and issubclass(one, Exception)}
    assert len(errors) == 10
    assert all(issubclass(one, api.ServiceError) for one in errors)


@pytest.mark.parametrize(
    ("status", "body", "kind", "detail"),
    [
        (502, b"<html>", "bad-gateway", "POST /match was answered without a problem document"),
        (404, b"", "not-found", "POST /match was answered without a problem document"),
        (500, b"[1]", "internal-server-error", "POST /match was answered without a problem document"),
        (599, b"{}", "unknown-status", "POST /match was answered without a problem document"),
        (422, problem(type="about:blank"), "unprocessable-", "k is 0"),
        (422, problem(type=None), "unprocessable-", "k is 0"),
        (422, problem(detail=None), "invalid-request", "No"),
        (422, problem(errors={"a": 1}), "invalid-request", "k is 0"),
        (418, problem(type="https://example.com/teapot"), "https://example.com/teapot", "k is 0"),
    ],
)
def test_what_is_hardly_a_problem_document(status: int, body: bytes, kind: str, detail: str) -> None:
    error = from_response(status, body, None, "POST /match")
    assert error.kind.startswith(kind)
    assert error.detail == detail


def test_without_a_response_there_is_no_status() -> None:
    assert str(api.ConnectionFailed(None, "connection-failed", "refused")) == "connection-failed: refused"


def test_errors_travel_between_processes() -> None:
    error = api.QueueFull(429, "queue-full", "later", [api.FieldError("a", "b")], 2.0)
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is api.QueueFull
    assert vars(copied) == vars(error)
    assert str(copied) == str(error)
