"""The client of the service: `Client`, the same with `await` as `AsyncClient`, their answers and errors."""

try:
    import httpx as _httpx  # noqa: F401
except ModuleNotFoundError as _missing:
    if _missing.name != "httpx":
        raise
    raise ImportError(
        "bidmatch.client needs httpx, which is not installed; install it: pip install httpx",
        name="httpx",
    ) from None

from bidmatch.client.answers import (
    Answer,
    Answers,
    Candidate,
    Explanation,
    Match,
    Phrase,
    Reload,
    Result,
)
from bidmatch.client.async_client import AsyncClient
from bidmatch.client.calls import Condition, Filter, NewPhrase, Scalar
from bidmatch.client.client import Client
from bidmatch.client.errors import (
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    FieldError,
    InvalidRequest,
    NotFound,
    ProtocolError,
    QueueFull,
    ServiceError,
    Unauthorized,
    Unavailable,
)

__all__ = [
    "Answer",
    "Answers",
    "AsyncClient",
    "Candidate",
    "Client",
    "Condition",
    "Conflict",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Explanation",
    "FieldError",
    "Filter",
    "InvalidRequest",
    "Match",
    "NewPhrase",
    "NotFound",
    "Phrase",
    "ProtocolError",
    "QueueFull",
    "Reload",
    "Result",
    "Scalar",
    "ServiceError",
    "Unauthorized",
    "Unavailable",
]
