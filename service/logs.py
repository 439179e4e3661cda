"""What the service logs on stderr, as text or as JSON, and the id that a request is known by.

No client can begin a line of the log: whoever reads it takes a line's start for the service's own word.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from bidmatch.base.console import say

LogFormat = Literal["text", "json"]

MAX_ID_CHARS = 128
REQUEST_ID_HEADER = b"x-request-id"
TRACEPARENT_HEADER = b"traceparent"

# The id of the request that is worked on; lines that are logged meanwhile carry it.
current_request: ContextVar[str | None] = ContextVar("bidmatch_request", default=None)

_VISIBLE = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_ID_CHARS)
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
# Control characters, which a terminal obeys; Unicode's line ends; halves of surrogate pairs, no text.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_PLAIN = re.compile(r"[\w./:{}\[\]-]+", re.ASCII)

_random = random.Random()
# Workers forked from one parent would draw the same ids.
os.register_at_fork(after_in_child=_random.seed)

_access = logging.getLogger("bidmatch.access")


def request_id(scope: Mapping[str, Any]) -> str:
    """The id a request is known by: what its client calls it, else its trace's id, else a new one.

    Args:
        scope: the request's ASGI scope; its headers' names are in lower case.
    """
    traces = []
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _VISIBLE.fullmatch(value):
            return str(value, "ascii")
        if name == TRACEPARENT_HEADER:
            traces.append(value)
    trace = trace_id(traces[0]) if len(traces) == 1 else None
    return trace or f"{_random.getrandbits(128):032x}"


def trace_id(traceparent: bytes) -> str | None:
    """The trace's id in a `traceparent` header (W3C), 32 hexadecimal digits; None where it is not valid."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (found[1] == b"00" and found[3] is not None):
        return None
    return str(found[2], "ascii")


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Writes a line for each request, at level info of the logger `bidmatch.access`.

    Args:
        on: whether it does; who calls `write` looks first.
        queries: whether queries' texts are written; what people search for is theirs.
    """

    on: bool
    queries: bool

    def write(
        self,
        scope: Mapping[str, Any],
        route: str,
        status: int,
        seconds: float,
        queries: Sequence[str] | None,
        k: int | None,
        caller: str | None = None,
    ) -> None:
        """Write the line of a request that was answered.

        Args:
            scope: its ASGI scope.
            route: the route's template, such as `/phrases/{id}`: a path may hold what a person typed.
            status: the answer's status.
            seconds: how long it took.
            queries: texts that it asked for; None where it asked for none, or nothing that could be read.
            k: how many phrases it asked for.
            caller: name of its key.
        """
        client = scope.get("client")
        fields: dict[str, Any] = {
            "method": scope["method"],
            "route": route,
            "status": status,
            "milliseconds": round(seconds * 1e3, 3),
            "client": f"{client[0]}:{client[1]}" if client else None,
            "caller": caller,
            "queries": None if queries is None else len(queries),
            "k": k,
            "texts": list(queries) if queries and self.queries else None,
            "request_id": request_id(scope) if current_request.get() is None else None,
        }
        present = {name: value for name, value in fields.items() if value is not None}
        _access.info("request", extra={"fields": present})


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII.

    Time (RFC 3339, UTC), level, logger and message; request_id where there is one; the record's own `fields`;
    exception where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _fields(record).items():
            entry.setdefault(name, value)
        if exception := _exception(self, record):
            entry["exception"] = exception
        # The one control character that JSON leaves as it is.
        return json.dumps(entry, default=str, separators=(",", ":")).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """A line for people; those of an exception are indented, so that none begins as a log line does."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and those of its exception."""
        parts = [f"{_time(record)} {record.levelname} {record.name}: {_safe(_message(record))}"]
        for name, value in _fields(record).items():
            # Quoted where one field could be taken for two.
            plain = isinstance(value, str) and _PLAIN.fullmatch(value)
            parts.append(f"{name}={value if plain else _safe(_json(value))}")
        lines = [" ".join(parts)]
        if exception := _exception(self, record):
            lines += [f"    {_safe(line)}" for line in exception.split("\n")]
        return "\n".join(lines)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        # Arguments that don't fit their line must not cost it.
        return f"{record.msg} {record.args}"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    if (request := current_request.get()) is not None:
        fields["request_id"] = request
    return fields


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _safe(text: str) -> str:
    """Text that stays on its line."""
    return _UNSAFE.sub(lambda found: str(found[0].encode("unicode_escape"), "ascii"), text)


def log_config(log_format: LogFormat, level: str) -> dict[str, Any]:
    """For `logging.config.dictConfig`, and so for `uvicorn.Config(log_config=..., access_log=False)`.

    Args:
        log_format: text for people, JSON for programs.
        level: least severe level that is logged; access lines are logged at any.
    """
    formatter = {"text": TextFormatter, "json": JsonFormatter}[log_format]
    own = {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}
        },
        "loggers": {
            "bidmatch": own,
            "bidmatch.access": {**own, "level": "INFO"},
            "uvicorn": own,
            # It writes paths, and with them what people typed; `bidmatch.access` is there instead.
            "uvicorn.access": {"handlers": [], "level": "CRITICAL", "propagate": False},
        },
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }


def announcer(log_format: LogFormat) -> Callable[[str], None]:
    """What says a line to the person who runs the service: plain, or in JSON as the log's lines are."""
    if log_format == "text":
        return lambda message: say(_safe(message))
    formatter = JsonFormatter()

    def announce(message: str) -> None:
        record = logging.LogRecord("bidmatch", logging.INFO, __file__, 0, message, None, None)
        say(formatter.format(record))

    return announce
