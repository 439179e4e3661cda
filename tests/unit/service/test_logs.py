from __future__ import annotations

import contextvars
import io
import json
import logging
import logging.config
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from service import logs
from service.logs import AccessLog, JsonFormatter, TextFormatter, announcer, log_config, request_id

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
NASTY = 'end\r\n{"level":"error"}\x1b[2J\x7f\x85\u2028\u2029\ud800 "quoted" трава'


def scope(*headers: tuple[str, str], method: str = "POST") -> dict[str, Any]:
    return {
        "method": method,
        "client": ("192.0.2.1", 4321),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
    }


# Request ids


def test_the_clients_own_id() -> None:
    assert request_id(scope(("Host", "a"), ("X-Request-Id", "abc-123"))) == "abc-123"
    assert request_id(scope(("X-Request-Id", "x" * 128))) == "x" * 128
    traceparent = ("traceparent", f"00-{TRACE}-{PARENT}-01")
    assert request_id(scope(traceparent, ("X-Request-Id", "abc"))) == "abc"


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a\tb", "a\x00b", "é", "a\r\nb", "a\x7f"])
def test_an_id_that_is_not_sane_is_not_taken(value: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", request_id(scope(("X-Request-Id", value))))


@pytest.mark.parametrize("value", [f"00-{TRACE}-{PARENT}-01", f"cc-{TRACE}-{PARENT}-00-what-comes-later"])
def test_the_traces_id(value: str) -> None:
    assert request_id(scope(("traceparent", value))) == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "",
        TRACE,
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01\n",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-00more",
    ],
)
def test_a_trace_that_is_not_valid_is_not_taken(value: str) -> None:
    taken = request_id(scope(("traceparent", value)))
    assert re.fullmatch("[0-9a-f]{32}", taken)
    assert taken != TRACE


def test_two_traces_are_none() -> None:
    header = ("traceparent", f"00-{TRACE}-{PARENT}-01")
    assert request_id(scope(header, header)) != TRACE


def test_new_ids_differ() -> None:
    ids = {request_id(scope()) for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_ids_of_forked_workers_differ() -> None:
    drawn = []
    for _ in range(3):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writer, request_id(scope()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        drawn.append(os.read(reader, 32).decode())
        os.close(reader)
    assert len({*drawn, request_id(scope())}) == 4


# Lines


@pytest.fixture
def written() -> Iterator[Callable[[str], io.StringIO]]:
    """`written("json")` sets logging up as the service does, and returns what comes on stderr."""
    names = ["", "bidmatch", "bidmatch.access", "uvicorn", "uvicorn.access"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(each.level, list(each.handlers), each.propagate) for each in loggers]

    def setting_up(log_format: Any, level: str = "info") -> io.StringIO:
        logging.config.dictConfig(log_config(log_format, level))
        stream = io.StringIO()
        for each in loggers:
            for handler in each.handlers:
                if type(handler) is logging.StreamHandler:
                    handler.setStream(stream)
        return stream

    yield setting_up
    for each, (level, handlers, propagate) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.handlers = handlers
        each.propagate = propagate


def in_a_request(work: Callable[[], object], *headers: tuple[str, str]) -> None:
    def working() -> None:
        logs.current_request.set(request_id(scope(*headers)))
        work()

    contextvars.Context().run(working)


def test_a_json_line(written: Callable) -> None:
    stream = written("json")
    logging.getLogger("bidmatch.service").warning("%d phrases", 3)
    entry = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert entry == {"level": "warning", "logger": "bidmatch.service", "message": "3 phrases"}


def test_a_text_line(written: Callable) -> None:
    stream = written("text")
    logging.getLogger("bidmatch.service").warning("%d phrases", 3)
    assert re.fullmatch(r"\S+Z WARNING bidmatch\.service: 3 phrases\n", stream.getvalue())


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_lines_in_a_request_carry_its_id(written: Callable, log_format: str) -> None:
    stream = written(log_format)
    in_a_request(lambda: logging.getLogger("bidmatch.x").warning("inside"), ("X-Request-Id", "abc"))
    logging.getLogger("bidmatch.x").warning("outside")
    inside, outside = stream.getvalue().splitlines()
    assert "abc" in inside
    assert "request_id" not in outside


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_client_cannot_begin_a_line(written: Callable, log_format: str) -> None:
    stream = written(log_format)
    log = logging.getLogger("bidmatch.service")
    log.warning("said %s", NASTY, extra={"fields": {"field": NASTY, "list": [NASTY]}})
    log.warning("said " + NASTY)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029]", line)
    if log_format == "json":
        first, second = map(json.loads, lines)
        assert first["message"] == second["message"] == "said " + NASTY
        assert (first["field"], first["list"]) == (NASTY, [NASTY])
        assert first["level"] == "warning"


def fail() -> None:
    raise ValueError(f"odd: {NASTY}\nERROR forged")


def test_an_exception_in_json(written: Callable) -> None:
    stream = written("json")
    try:
        fail()
    except ValueError:
        logging.getLogger("bidmatch.service").exception("failed")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["level"] == "error"
    assert entry["exception"].startswith("Traceback (most recent call last):")
    assert entry["exception"].endswith(f"ValueError: odd: {NASTY}\nERROR forged")


def test_an_exception_in_text(written: Callable) -> None:
    stream = written("text")
    try:
        fail()
    except ValueError:
        logging.getLogger("bidmatch.service").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR bidmatch.service: failed")
    assert rest[-1] == "    ERROR forged"
    assert all(line.startswith("    ") for line in rest)


def test_fields_do_not_replace_what_a_line_is() -> None:
    record = logging.LogRecord("bidmatch", logging.INFO, "", 0, "true", None, None)
    record.fields = {
        "message": "false",
        "level": "none",
        "odd": {
            1,
        },
        "fine": 1.5,
    }
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["message"], entry["level"], entry["odd"], entry["fine"]) == ("true", "info", "{1}", 1.5)


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_arguments_that_do_not_fit_do_not_cost_the_line(formatter: logging.Formatter) -> None:
    for message, arguments in (("%d of %d", ("one",)), ("%(name)s", ({"other": 1},)), ("%q", (1,))):
        record = logging.LogRecord("bidmatch", logging.INFO, "", 0, message, arguments, None)
        assert message in formatter.format(record)


def test_levels(written: Callable) -> None:
    stream = written("json", "warning")
    logging.getLogger("bidmatch.service").info("not this")
    logging.getLogger("uvicorn.error").info("nor this")
    logging.getLogger("uvicorn.access").info('%s - "%s" %d', "client", "GET /match?q=secret", 200)
    logging.getLogger("uvicorn.error").error("this", extra={"color_message": "\x1b[1mthis"})
    logging.getLogger("another.library").warning("and this")
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(entry["logger"], entry["message"]) for entry in entries] == [
        ("uvicorn.error", "this"),
        ("another.library", "and this"),
    ]


# Access lines


def access(stream: io.StringIO, log: AccessLog, *headers: tuple[str, str]) -> str:
    queries = ["red shoes", NASTY]
    in_a_request(
        lambda: log.write(scope(*headers), "/match", 200, 0.00123456, queries, 10, "auction"), *headers
    )
    (line,) = stream.getvalue().splitlines()
    return line


def test_an_access_line_in_json(written: Callable) -> None:
    line = access(written("json", "critical"), AccessLog(on=True, queries=False), ("X-Request-Id", "abc"))
    entry = json.loads(line)
    entry.pop("time")
    assert entry == {
        "level": "info",
        "logger": "bidmatch.access",
        "message": "request",
        "method": "POST",
        "route": "/match",
        "status": 200,
        "milliseconds": 1.235,
        "client": "192.0.2.1:4321",
        "caller": "auction",
        "queries": 2,
        "k": 10,
        "request_id": "abc",
    }


def test_an_access_line_in_text(written: Callable) -> None:
    line = access(written("text"), AccessLog(on=True, queries=False), ("X-Request-Id", 'a"b'))
    assert line.split(" ", 1)[1] == (
        "INFO bidmatch.access: request method=POST route=/match status=200 milliseconds=1.235 "
        'client=192.0.2.1:4321 caller=auction queries=2 k=10 request_id="a\\"b"'
    )


def test_queries_are_in_it_where_asked_for(written: Callable) -> None:
    entry = json.loads(access(written("json"), AccessLog(on=True, queries=True)))
    assert entry["texts"] == ["red shoes", NASTY]
    assert entry["queries"] == 2


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_query_is_in_it_otherwise(written: Callable, log_format: str) -> None:
    line = access(written(log_format), AccessLog(on=True, queries=False))
    assert "red shoes" not in line
    assert "texts" not in line


def test_an_access_line_of_a_request_whose_id_was_not_set(written: Callable) -> None:
    stream = written("json")
    lonely = scope(("X-Request-Id", "abc"), method="GET") | {"client": None}
    contextvars.Context().run(AccessLog(True, True).write, lonely, "/healthz", 200, 0.0, None, None)
    entry = json.loads(stream.getvalue())
    assert entry["request_id"] == "abc"
    assert not {"client", "caller", "queries", "texts", "k"} & entry.keys()


def test_what_is_said_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    announcer("text")("ready: http://127.0.0.1:8000")
    announcer("json")("ready: http://127.0.0.1:8000")
    plain, line = capsys.readouterr().err.splitlines()
    assert plain == "ready: http://127.0.0.1:8000"
    assert json.loads(line)["message"] == plain
    assert logs.current_request.get() is None
