"""The OpenAPI document: the schemas of bodies that routes read and write themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service import problems, schemas

_PROBLEMS = {
    400: "The body is not JSON",
    401: "A key is missing or unknown",
    403: "The key is not one for this",
    404: "There is no such phrase, or live phrases are off",
    408: "The body came too slowly",
    409: "Not from the state that things are in",
    413: "The body is too large",
    415: "The body is of another type than JSON",
    422: "A value is not allowed, or the bundle was refused",
    429: "Too much is waiting",
    431: "The request line and headers are too large, or too many",
    503: "The service is stopping, has too many connections, or cannot read or write its store of phrases",
    504: "Not answered within the deadline",
}
_TAGS = [
    {"name": "match", "description": "Queries to phrases."},
    {"name": "phrases", "description": "Phrases that are added, paused and removed while the service runs."},
    {"name": "operations", "description": "For those who run the service."},
]
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_DEADLINE = {
    "name": "X-Request-Timeout-Ms",
    "in": "header",
    "required": False,
    "description": "milliseconds after which the request is given up and answered 504, queued or not",
}


def ref(model: str) -> dict[str, Any]:
    """A reference to one of the document's schemas."""
    return {"$ref": f"#/components/schemas/{model}"}


def ok(schema: dict[str, Any], description: str) -> dict[int | str, dict[str, Any]]:
    """The answer 200, in JSON."""
    return {200: {"description": description, "content": {"application/json": {"schema": schema}}}}


def problem_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers that are problem documents."""
    answers: dict[int | str, dict[str, Any]] = {
        status: {
            "description": _PROBLEMS[status],
            "content": {problems.MEDIA_TYPE: {"schema": ref("Problem")}},
        }
        for status in statuses
    }
    if 429 in answers:
        answers[429]["headers"] = {
            "Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}}
        }
    return answers


def describe(api: FastAPI, requests: schemas.MatchRequests, *, keys: bool) -> None:
    """Put schemas and security into the OpenAPI document of `api`.

    Args:
        api: whose.
        requests: has the schemas.
        keys: whether keys are needed.
    """

    def openapi() -> dict[str, Any]:
        if not api.openapi_schema:
            document = get_openapi(
                title=api.title,
                version=api.version,
                description=api.description,
                routes=api.routes,
                tags=_TAGS,
            )
            components = document.setdefault("components", {})
            components["schemas"] = requests.components()
            components["securitySchemes"] = _SECURITY
            most = requests.max_deadline_ms
            deadline = _DEADLINE | {"schema": {"type": "integer", "minimum": 1, "maximum": most}}
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    # Before any route is found.
                    for status, answer in problem_answers(431, 503).items():
                        operation["responses"].setdefault(str(status), answer)
                    if path == "/match":
                        operation.setdefault("parameters", []).append(deadline)
                    if path == "/match" or path.startswith(("/phrases", "/admin")):
                        operation["security"] = [{"bearer": []}, {"apiKey": []}] if keys else []
            api.openapi_schema = document
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]
