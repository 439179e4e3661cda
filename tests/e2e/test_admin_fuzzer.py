"""The paths that change the service, under what no schema would draw: bytes, depths, sizes, odd encodings.

`BIDMATCH_HTTP_CASES` is the number of requests, and `BIDMATCH_HTTP_SEED` draws others.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import requests

CASES = int(os.environ.get("BIDMATCH_HTTP_CASES", "1500"))
SEED = int(os.environ.get("BIDMATCH_HTTP_SEED", "0"))
PROBLEM = "application/problem+json"
# What the service may answer on these paths, beside 200; 405 where a path is cut so that it is another one.
REFUSALS = {400, 404, 405, 409, 413, 415, 422, 431}

TIMES = [
    "2024-01-31", "0001-01-01", "9999-12-31", "2024-01-31T12:00:00Z", "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59.999999-14:00", "1677-09-21T00:12:43", "2262-04-12T00:00:00", "2024-02-30",
    "2024-W05", "1970-01-01T00:00:00.000001", "nan", "",
]  # fmt: skip
TEXTS = [
    "", " ", "a", "red garden hose", "\0", "\n", "\x7f", "\u200b", "\ufeff", "\u202e", "İ", "ẞ", "ΐ",
    "👟" * 40, "a" * 100, "a" * 101, "é" * 100, "..", ".", "/", "a/b", "../../etc/passwd", "a/pause", "pause",
    "%2F", "%", "%zz", "a?b#c", "a b", "a+b", "a;b", "\\", '"', "'", "--", "NULL", "<b>", "{}", "花园软管",
    "مروحة", "p0", "p1", "de", *TIMES,
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 10, 20, 21, 127, 128, 255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64,
    -(2**63), -(2**63) - 1, 10**18, 10**40, 0.5, -0.0, 1e-320, 1e300, 0.1, 3.0, 1e15,
]  # fmt: skip
# JSON that Python does not write, put in the place of a text that it does.
RAW = {
    "@huge": "9" * 5000,
    "@float": "1e999",
    "@tiny": "1e-999",
    "@nan": "NaN",
    "@infinite": "-Infinity",
    "@surrogate": '"\\ud800"',
    "@reversed": '"\\udc00\\ud800"',
    "@nul": '"\\u0000"',
    "@escape": '"\\x41"',
    "@deep": "[" * 300 + "]" * 300,
    "@objects": '{"a":' * 150 + "1" + "}" * 150,
    "@abyss": "[" * 20_000 + "]" * 20_000,
    "@long": '"' + "x" * 50_000 + '"',
    "@words": '"' + "red garden hose " * 6 + '"',
}
# Columns, and values that are likely for them.
COLUMNS: dict[str, list[Any]] = {
    **{name: ["de", "exact", "phrase", "", *TEXTS] for name in ("market", "language", "match_type", "id")},
    **dict.fromkeys(("advertiser", "big", "bid", "price", "train_clicks"), NUMBERS),
    **dict.fromkeys(("since", "until", "at"), TIMES),
    **{name: [[], ["a"], ["free", "[a]"], [None], "a, b", [""]] for name in ("tags", "negative_keywords")},
    "on": [True, False],
    "nothing": [None],
    "": [1],
}
KINDS = [
    "application/json", "application/json; charset=utf-16", "application/json;", "APPLICATION/JSON",
    "application/x+json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
    "application/octet-stream", "json", "/", "", "application/json, text/plain", "application/\xffjson",
    "x" * 3000,
]  # fmt: skip
ODD_IDS = [
    "%", "%2", "%zz", "%00", "%0d%0aX:1", "%C0%AF", "%FF", "%ED%A0%80", "%F4%90%80%80", "..%2f..", "a//b",
    "%2e%2e", "p0/../p1", "?", "%3F%23", "x" * 70_000, "%E2%80%AE",
]  # fmt: skip


@dataclass
class Draw:
    """Requests by chance.

    Args:
        chance: draws.
        nowhere: paths of bundles begin with it, so that none of them is there.
        bundle: one that is there.
    """

    chance: random.Random
    nowhere: str
    bundle: str

    def often(self, share: float) -> bool:
        return self.chance.random() < share

    def value(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kind = self.chance.randrange(8 if depth < 3 else 5)
        if kind == 0:
            return self.chance.choice(TEXTS)
        if kind == 1:
            return self.chance.choice(NUMBERS)
        if kind == 2:
            return self.chance.choice([None, True, False])
        if kind == 3:
            return self.chance.choice([*RAW])
        if kind == 4:
            return "".join(chr(self.chance.choice([0x20, 0x61, 0xE9, 0x4E2D, 0x1F600])) for _ in range(9))
        several = range(self.chance.randrange(4))
        if kind == 5:
            return [self.value(depth + 1) for _ in several]
        return {self.chance.choice([*TEXTS, *COLUMNS]): self.value(depth + 1) for _ in several}

    def text(self) -> Any:
        return self.chance.choice(TEXTS) if self.often(0.9) else self.value()

    def columns(self) -> Any:
        if self.often(0.1):
            return self.value()
        some = self.chance.sample([*COLUMNS], self.chance.randrange(3))
        return {name: self.likely(name) for name in some}

    def likely(self, column: str) -> Any:
        return self.chance.choice(COLUMNS[column]) if self.often(0.8) else self.value(2)

    def phrase(self) -> Any:
        if self.often(0.05):
            return self.value()
        phrase = {"id": self.text(), "text": self.chance.choice(["red hose", self.text()])}
        if self.often(0.7):
            phrase["columns"] = self.columns()
        return self.changed(phrase)

    def filter(self) -> Any:
        if self.often(0.1):
            return self.value()
        conditions: dict[str, Any] = {}
        for _ in range(self.chance.randrange(1, 3)):
            column = self.chance.choice([*COLUMNS])
            operators = self.chance.sample(
                ["gte", "gt", "lte", "lt", "not", "like"], self.chance.randrange(3)
            )
            ranged = {operator: self.likely(column) for operator in operators}
            several = [self.likely(column) for _ in range(3)]
            conditions[column] = self.chance.choice([self.likely(column), several, ranged])
        return conditions

    def changed(self, body: Any) -> Any:
        """A body with something put in or left out, now and then."""
        if isinstance(body, dict) and self.often(0.1):
            body[self.chance.choice([*COLUMNS, "k", "query", "phrases"])] = self.value()
        if isinstance(body, dict) and body and self.often(0.05):
            del body[self.chance.choice([*body])]
        return body

    def body(self, path: str) -> Any:
        if path == "/phrases":
            several = [self.phrase() for _ in range(self.chance.choice([0, 1, 1, 1, 2, 5]))]
            return self.changed({"phrases": several})
        if path == "/admin/reload":
            name = self.chance.choice([None, self.bundle, self.nowhere + str(self.text()), 1, [], ""])
            return self.changed({"bundle": name} if self.often(0.8) else {})
        asked: dict[str, Any] = {"query": self.text()}
        for name, make in (
            ("k", lambda: self.chance.choice([*NUMBERS, 5, 5, 5, self.value()])),
            ("min_score", lambda: self.chance.choice([*NUMBERS, self.value()])),
            ("min_relevance", lambda: self.chance.choice([*NUMBERS, self.value()])),
            ("filter", self.filter),
            ("allow", lambda: [self.text() for _ in range(3)]),
            ("deny", lambda: [self.text() for _ in range(3)]),
            ("distinct", lambda: self.chance.choice([True, False, self.value()])),
            ("ids", lambda: [self.text() for _ in range(self.chance.randrange(4))]),
        ):
            if self.often(0.3):
                asked[name] = make()
        return self.changed(asked)

    def content(self, path: str) -> bytes:
        how = self.chance.random()
        if how < 0.05:
            return self.chance.randbytes(self.chance.choice([0, 1, 10, 1000, 70_000]))
        if how < 0.08:
            return json.dumps(self.value()).encode()
        text = re.sub(
            r'"(@\w+)"',
            lambda found: RAW.get(found[1], found[0]),
            json.dumps(self.body(path), ensure_ascii=self.often(0.5)),
        )
        content = text.encode()
        if how < 0.11:
            return content[: self.chance.randrange(len(content) + 1)]
        if how < 0.13:
            return b"\xef\xbb\xbf" + content
        if how < 0.15:
            return text.encode("utf-16")
        if how < 0.18:
            at = self.chance.randrange(len(content) + 1)
            return content[:at] + self.chance.randbytes(2) + content[at:]
        if how < 0.19:
            return content + b" " * 1_100_000
        return content

    def id(self) -> str:
        """An id in a path, encoded in one way or another, or wrongly."""
        text = self.chance.choice([*TEXTS, f"p{self.chance.randrange(60)}", "ü/" * 30, "x" * 200, "x" * 201])
        how = self.chance.random()
        if how < 0.6:
            return quote(text, safe="")
        if how < 0.7:
            return "".join(f"%{byte:02X}" for byte in text.encode())
        if how < 0.8:
            return quote(text, safe="/")
        if how < 0.85:
            return quote(quote(text, safe=""), safe="")
        return self.chance.choice(ODD_IDS)

    def request(self) -> tuple[str, str, dict[str, str], bytes | None]:
        path = self.chance.choice(["/phrases", "/phrases", "/admin/explain", "/admin/reload", "/phrases/"])
        if path == "/admin/reload" and self.often(0.7):
            path = "/admin/explain"
        headers = {}
        if self.often(0.95):
            headers["Content-Type"] = self.chance.choice(KINDS) if self.often(0.1) else KINDS[0]
        if self.often(0.05):
            headers[self.chance.choice(["X-Request-Id", "traceparent", "Accept", "X-Request-Timeout-Ms"])] = (
                self.chance.choice(["", "a b", "\xff", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "x" * 9000])
            )
        if path != "/phrases/":
            method = "POST" if self.often(0.95) else self.chance.choice(["PUT", "PATCH", "DELETE", "OPTIONS"])
            return method, path, headers, self.content(path)
        method, end = self.chance.choice(
            [("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "")]
        )
        body = self.content("/phrases") if self.often(0.2) else None
        return method, path + self.id() + end, headers, body


class Wire:
    """One connection after another, for requests that no HTTP client would send."""

    def __init__(self, address: str):
        parts = urlsplit(address)
        self._place = (parts.hostname, parts.port)
        self._connection: socket.socket | None = None

    def ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[int, dict[str, str], bytes]:
        head = [f"{method} {path} HTTP/1.1", "Host: service"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None or method == "POST":
            head.append(f"Content-Length: {len(body or b'')}")
        sent = "\r\n".join([*head, "", ""]).encode("latin-1") + (body or b"")
        if self._connection is None:
            self._connection = socket.create_connection(self._place, timeout=60)
        # Refused in the middle of a long request, the answer is there all the same.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(sent)
        response = http.client.HTTPResponse(self._connection, method=method)
        response.begin()
        content = response.read()
        if response.will_close:
            self._connection.close()
            self._connection = None
        return response.status, {name.lower(): value for name, value in response.getheaders()}, content


def test_nothing_that_is_sent_breaks_it(
    columns_bundle: Path,
    small_bundle: Path,
    tmp_path: Path,
    serving: Callable[..., AbstractContextManager[str]],
) -> None:
    limits = "--max-k=20 --max-query-chars=100 --max-listed=5 --max-phrases=4 --workers=2 --queue=256"
    arguments = [*limits.split(), f"--live={tmp_path / 'live'}"]
    draw = Draw(random.Random(SEED), f"{tmp_path}/none/", str(columns_bundle))
    statuses: dict[str, Counter[int]] = {}
    with serving(columns_bundle, *arguments) as address:
        wire = Wire(address)
        for _ in range(CASES):
            method, path, headers, body = draw.request()
            status, answered, content = wire.ask(method, path, headers, body)
            what = f"{method} {path[:200]} {headers} {(body or b'')[:2000]!r}: {status} {content[:500]!r}"
            kind = path if path.startswith("/admin") or path == "/phrases" else "/phrases/{id}"
            statuses.setdefault(kind, Counter())[status] += 1
            assert status == 200 or status in REFUSALS, what
            if status == 200:
                assert answered["content-type"] == "application/json", what
                json.loads(content)
            else:
                assert answered["content-type"] == PROBLEM, what
                problem = json.loads(content)
                assert problem["status"] == status, what
                assert problem["type"].startswith("urn:bidmatch:"), what
                # What was sent is not sent back at length; a path in error is named.
                assert len(content) < 20_000, what
        with requests.Session() as session:
            check_soundness(session, address)
        for kind, counts in statuses.items():
            assert counts[200] > 0.03 * sum(counts.values()), (kind, counts)
            assert sum(counts[status] for status in (400, 404, 409, 415, 422)) > 0, (kind, counts)

    # What it stored is sound, too: it is read by the next one, of another bundle that lacks the columns.
    for bundle in (columns_bundle, small_bundle):
        with serving(bundle, *arguments) as address, requests.Session() as session:
            check_soundness(session, address)


def check_soundness(session: requests.Session, address: str) -> None:
    ready = session.get(f"{address}/readyz").json()
    assert (ready["status"], ready["degraded"]) == ("ready", None)
    failed = re.findall(r'bidmatch_requests_total\{.*status="5..".*', session.get(f"{address}/metrics").text)
    assert failed == []
    ids = ["solar/garden gnome?%2F#", "\u202eİ\0", "a/pause", " "]
    phrases = [
        {"id": id, "text": f"solar garden gnome {at}", "columns": {"match_type": "exact"}}
        for at, id in enumerate(ids)
    ]
    put = session.post(f"{address}/phrases", json={"phrases": phrases})
    assert put.status_code == 200, put.text
    for at, (id, stored) in enumerate(zip(ids, put.json()["phrases"], strict=True)):
        assert stored["id"] == id
        place = f"{address}/phrases/{quote(id, safe='')}"
        assert session.get(place).json() == stored
        # One that was paused before stays paused.
        assert session.post(f"{place}/resume").json()["state"] == "active"
        query = {"query": f"Solar garden gnome {at}"}
        assert session.post(f"{address}/match", json=query).json()["matches"][0]["id"] == id
        assert session.post(f"{place}/pause").json()["state"] == "paused"
        assert session.get(place).json()["state"] == "paused"
        assert session.post(f"{place}/resume").json()["state"] == "active"
        assert session.delete(place).json()["state"] == "removed"
        found = session.post(f"{address}/match", json=query).json()["matches"]
        assert id not in [match["id"] for match in found]


@pytest.mark.parametrize("path", ["/phrases", "/admin/reload", "/admin/explain", "/match"])
def test_bodies_that_do_not_end_as_they_should(
    small_bundle: Path, serving: Callable[..., AbstractContextManager[str]], path: str
) -> None:
    with serving(small_bundle, "--body-timeout-ms=300") as address:
        parts = urlsplit(address)
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
        for sent, status in (
            (b"Content-Length: 50\r\n\r\n{", 408),
            (b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\r\n", 408),
            (b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", 400),
            (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
            (b"Content-Length: 999999999999\r\n\r\n", 413),
            (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n", 400),
        ):
            with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
                connection.sendall(head + sent)
                response = http.client.HTTPResponse(connection)
                response.begin()
                assert response.status == status, sent
                assert response.getheader("content-type") == PROBLEM
                assert json.loads(response.read())["status"] == status
        assert requests.get(f"{address}/readyz").status_code == 200
