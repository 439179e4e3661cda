from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from service.engine import Engine

JSON = {"Content-Type": "application/json"}
PROBLEM = "application/problem+json"


def is_problem(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    problem = response.json()
    assert problem["status"] == status
    assert problem["type"].startswith("urn:bidmatch:")
    assert problem["title"]
    assert problem["detail"]
    return problem


def test_one_query(client: httpx.Client, tiny_bundle: Path) -> None:
    answer = client.post("/match", json={"query": " RED running shoes", "k": 3}).json()
    first, second, third = answer["matches"]
    assert {first["id"], second["id"]} == {"p0", "p1"}
    assert {first["phrase"], second["phrase"]} == {"red running shoes", "Red Running Shoes"}
    assert [match["source"] for match in answer["matches"]] == ["exact", "exact", "index"]
    assert third["columns"] == {"match_type": "broad"}
    for match in answer["matches"]:
        assert match["score"] == pytest.approx(sum(match["parts"].values()), abs=1e-6)
    assert answer["bundle"] == Engine.load(tiny_bundle).bundle_id


def test_get_is_the_same_as_post(client: httpx.Client) -> None:
    got = client.get("/match", params={"q": "cheap tent", "k": 4, "min_score": 0.1}).json()
    posted = client.post("/match", json={"query": "cheap tent", "k": 4, "min_score": 0.1}).json()
    assert got == posted
    assert len(got["matches"]) == 4


def test_several_queries(client: httpx.Client) -> None:
    queries = ["red running shoes", " ", "größe", "red running shoes"]
    answer = client.post("/match", json={"queries": queries, "k": 2}).json()
    assert [result["query"] for result in answer["results"]] == queries
    assert [len(result["matches"]) for result in answer["results"]] == [2, 0, 2, 2]
    assert answer["results"][0] == answer["results"][3]


def test_a_column_without_a_value_is_left_out(client: httpx.Client) -> None:
    match = client.post("/match", json={"query": "<img src=x onerror=alert(1)> & <b>tent</b>"}).json()[
        "matches"
    ][0]
    assert match["id"] == "p4"
    assert "columns" not in match


def test_the_time_of_each_step_comes_with_the_answer(client: httpx.Client) -> None:
    header = client.get("/match", params={"q": "tent"}).headers["server-timing"]
    steps = dict(part.strip().split(";dur=") for part in header.split(","))
    assert list(steps) == ["tokenise", "encode", "search", "total"]
    *parts, total = map(float, steps.values())
    assert 0 < sum(parts) <= total + 0.01


def test_concurrent_requests_get_the_answers_they_get_alone(client: httpx.Client, tiny_bundle: Path) -> None:
    engine = Engine.load(tiny_bundle)
    texts = engine.bundle.phrases.column("text").to_pylist()[7:107]
    ids = engine.bundle.phrases.column("id").to_pylist()

    def ask(i: int) -> tuple[list[str], list[str]]:
        query, k = f"{texts[i]} {texts[-i]}", 1 + i % 7
        answer = client.post("/match", json={"query": query, "k": k})
        assert answer.status_code == 200
        alone = [ids[row] for row in engine.match([query], k).rows]
        return [match["id"] for match in answer.json()["matches"]], alone

    with ThreadPoolExecutor(16) as pool:
        for got, alone in pool.map(ask, range(100)):
            assert got == alone


BAD = {
    "nothing": (b"", 400),
    "broken": (b'{"query": "a"', 400),
    "no JSON": (b"query=a", 400),
    "lone surrogate": (b'{"query": "\\ud800 shoes"}', 400),
    "invalid UTF-8": (b'{"query": "\xff\xfe"}', 400),
    "deep lists": (b"[" * 400_000, 400),
    "deep objects": (b'{"query":' * 100_000, 400),
    "deep and whole": (b'{"query":' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    "null": (b"null", 422),
    "a list": (b'["a"]', 422),
    "no query": (b'{"k": 3}', 422),
    "both": (b'{"query": "a", "queries": ["b"]}', 422),
    "empty query": (b'{"query": ""}', 422),
    "white space": (b'{"query": " \\t\\u00a0\\u200b"}', 422),
    "NUL alone": (b'{"query": "\\u0000"}', 422),
    "query of 2,000 characters": (json.dumps({"query": "a" * 2000}).encode(), 422),
    "nearly 1 MB of text": (json.dumps({"query": "red shoes " * 100_000}).encode(), 422),
    "query is a number": (b'{"query": 5}', 422),
    "query is null": (b'{"query": null}', 422),
    "query is an object": (b'{"query": {"a": 1}}', 422),
    "no queries": (b'{"queries": []}', 422),
    "queries is a text": (b'{"queries": "a"}', 422),
    "too many queries": (json.dumps({"queries": ["a"] * 257}).encode(), 422),
    "one query is a number": (b'{"queries": ["a", 5]}', 422),
    "k is 0": (b'{"query": "a", "k": 0}', 422),
    "k is negative": (b'{"query": "a", "k": -1}', 422),
    "k is over the limit": (b'{"query": "a", "k": 1001}', 422),
    "k is huge": (b'{"query": "a", "k": ' + b"9" * 400 + b"}", 422),
    "k is beyond Python's integers": (b'{"query": "a", "k": ' + b"9" * 6000 + b"}", 400),
    "k is no number": (b'{"query": "a", "k": NaN}', 422),
    "k is infinite": (b'{"query": "a", "k": Infinity}', 422),
    "k is a fraction": (b'{"query": "a", "k": 2.5}', 422),
    "k is a text": (b'{"query": "a", "k": "5"}', 422),
    "k is true": (b'{"query": "a", "k": true}', 422),
    "k is null": (b'{"query": "a", "k": null}', 422),
    "min_score is no number": (b'{"query": "a", "min_score": NaN}', 422),
    "min_score is out of range": (b'{"query": "a", "min_score": 1e300}', 422),
    "an unknown field": (b'{"query": "a", "top": 3}', 422),
    "an unknown field of 100,000 letters": (json.dumps({"query": "a", "x" * 100_000: 3}).encode(), 422),
    "filter is a list": (b'{"query": "a", "filter": ["market"]}', 422),
    "filter on no column": (b'{"query": "a", "filter": {"market": "de"}}', 422),
    "filter of another sort": (b'{"query": "a", "filter": {"match_type": 5}}', 422),
    "filter with no operator": (b'{"query": "a", "filter": {"match_type": {"like": "b"}}}', 422),
    "filter that is empty": (b'{"query": "a", "filter": {"match_type": []}}', 422),
    "filter of null": (b'{"query": "a", "filter": {"match_type": null}}', 422),
    "filter of many values": (
        json.dumps({"query": "a", "filter": {"match_type": [str(i) for i in range(1001)]}}).encode(),
        422,
    ),
    "filter of many columns": (
        json.dumps({"query": "a", "filter": {f"c{i}": 1 for i in range(5000)}}).encode(),
        422,
    ),
    "filter on a column of 100,000 letters": (
        json.dumps({"query": "a", "filter": {"c" * 100_000: 1}}).encode(),
        422,
    ),
    "filter, deep": (b'{"query": "a", "filter": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, 400),
    "allow is a text": (b'{"query": "a", "allow": "p0"}', 422),
    "an empty id": (b'{"query": "a", "deny": [""]}', 422),
    "too many ids": (json.dumps({"query": "a", "deny": ["p0"] * 1001}).encode(), 422),
    "min_relevance without a calibration": (b'{"query": "a", "min_relevance": 0.5}', 422),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_bodies(client: httpx.Client, what: str) -> None:
    body, status = BAD[what]
    problem = is_problem(client.post("/match", content=body, headers=JSON), status)
    assert ("errors" in problem) == (status == 422)
    # What a client sent is not sent back to it.
    assert len(json.dumps(problem)) < 2000
    assert client.get("/healthz").status_code == 200


SOUND = {
    "NUL within": (b'{"query": "red\\u0000shoes"}', 10),
    "other scripts": ('{"query": "зелёная трава 花园 مروحة 👟"}'.encode(), 10),
    # Of 400, four are bought as `phrase` or `exact`, which no such query gets.
    "k over the number of phrases": (b'{"query": "a", "k": 1000}', 396),
    "k over the number of those allowed": (b'{"query": "a", "k": 9, "allow": ["q1", "q2", "none"]}', 2),
    "none allowed": (b'{"query": "a", "allow": []}', 0),
    "denied what is not there": (b'{"query": "a", "deny": ["none"]}', 10),
    "a filter that all phrases of search meet": (
        b'{"query": "a", "k": 1000, "filter": {"match_type": "broad"}}',
        395,
    ),
    "a filter of nothing": (b'{"query": "a", "filter": {}}', 10),
    "an absent one": (b'{"query": "a", "filter": null, "allow": null}', 10),
    "k as 3.0": (b'{"query": "a", "k": 3.0}', 3),
    "min_score null": (b'{"query": "a", "min_score": null}', 10),
    "min_score out of reach": (b'{"query": "a", "min_score": 2}', 0),
    "the last of two equal fields": (b'{"query": "a", "k": 4, "k": 2}', 2),
    "1,000 characters": (json.dumps({"query": "red shoes " * 100}).encode(), 10),
}


@pytest.mark.parametrize("what", SOUND)
def test_odd_bodies_with_a_sound_answer(client: httpx.Client, what: str) -> None:
    body, count = SOUND[what]
    answer = client.post("/match", content=body, headers=JSON)
    assert answer.status_code == 200
    assert len(answer.json()["matches"]) == count


@pytest.mark.parametrize(
    "query",
    ["", "q=", "q=%20%00", "k=3", "q=a&k=0", "q=a&k=x", "q=a&k=1001", "q=a&min_score=nan", "q=" + "a" * 1001],
)
def test_bad_queries_of_get(client: httpx.Client, query: str) -> None:
    is_problem(client.get(f"/match?{query}"), 422)


@pytest.mark.parametrize("value", ["0", "-5", "10001", "5.5", "soon", "", "1" * 5000])
def test_bad_deadlines(client: httpx.Client, value: str) -> None:
    # An answer that is in the cache has no deadline to miss; the header is wrong all the same.
    assert client.get("/match", params={"q": "a"}).status_code == 200
    for method, content in (("POST", {"json": {"query": "a"}}), ("GET", {"params": {"q": "a"}})):
        refused = client.request(
            method,
            "/match",
            headers={"X-Request-Timeout-Ms": value},
            **content,  # type: ignore[arg-type]
        )
        problem = is_problem(refused, 422)
        assert [error["where"] for error in problem["errors"]] == ["header.X-Request-Timeout-Ms"]


def test_a_sound_deadline(client: httpx.Client) -> None:
    headers = {"X-Request-Timeout-Ms": "10000"}
    assert client.post("/match", json={"query": "a deadline"}, headers=headers).status_code == 200


def test_invalid_utf8_in_an_address_is_replaced(client: httpx.Client) -> None:
    assert client.get("/match?q=red%FF%C3shoes").status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_other_content_types(client: httpx.Client, kind: str) -> None:
    is_problem(client.post("/match", content=b'{"query": "a"}', headers={"Content-Type": kind}), 415)


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.a+json"]
)
def test_content_types_that_are_json(client: httpx.Client, kind: str) -> None:
    assert client.post("/match", content=b'{"query": "a"}', headers={"Content-Type": kind}).status_code == 200


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    is_problem(client.get("/nothing"), 404)
    is_problem(client.get("/match/"), 404)
    is_problem(client.get("/..%2f..%2fetc/passwd"), 404)
    refused = client.put("/match", json={"query": "a"})
    is_problem(refused, 405)
    assert refused.headers["allow"] == "GET, POST"
    is_problem(client.request("BREW", "/match"), 400)
    assert client.head("/match").status_code == 405


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("size", [1 << 20, 6 << 20])
def test_a_body_over_the_limit(client: httpx.Client, declared: bool, size: int) -> None:
    body = b'{"query": "' + b"a" * size + b'"}'
    content = body if declared else iter([body[i : i + 65_536] for i in range(0, len(body), 65_536)])
    refused = client.post("/match", content=content, headers=JSON)
    is_problem(refused, 413)
    assert refused.headers["connection"] == "close"


def raw(address: tuple[str, int], sent: bytes) -> httpx.Response:
    """What comes back for bytes that no HTTP client would send."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(65_536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST /match HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /match HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /match HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n", 413),
        (b"POST /match HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /" + b"a" * 300_000, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000, 431),
    ],
)
def test_what_is_hardly_http(server: object, sent: bytes, status: int) -> None:
    is_problem(raw(server.address, sent), status)  # type: ignore[attr-defined]


def test_a_large_body_behind_a_small_head_is_not_taken_for_a_head(client: httpx.Client) -> None:
    """Sent on one connection, several times, so that heads follow bodies within one read."""
    for _ in range(3):
        is_problem(client.post("/match", content=b"[" * 300_000, headers=JSON), 400)


def test_a_body_that_comes_too_slowly(start: Callable) -> None:
    with start("--body-timeout-ms", "100") as server:
        head = (
            b"POST /match HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        )
        is_problem(raw(server.address, head + b'{"query'), 408)


def test_limits_are_settings(start: Callable) -> None:
    limits = "--max-body-bytes=200 --max-queries=2 --max-query-chars=5 --max-k=7 --max-listed=2"
    limits += " --max-phrases=1 --deadline-ms=900 --max-deadline-ms=1000"
    with start(*limits.split()) as server, httpx.Client(base_url=server.url) as client:
        is_problem(client.post("/match", json={"query": "a" * 300}), 413)
        is_problem(client.post("/match", json={"queries": ["a"] * 3}), 422)
        is_problem(client.post("/match", json={"query": "a" * 6}), 422)
        is_problem(client.post("/match", json={"query": "a", "k": 8}), 422)
        is_problem(client.get("/match", params={"q": "a", "k": 8}), 422)
        is_problem(client.get("/match", params={"q": "a" * 6}), 422)
        is_problem(client.post("/match", json={"query": "a", "deny": ["a"] * 3}), 422)
        is_problem(client.post("/admin/explain", json={"query": "a", "ids": ["a"] * 3}), 422)
        is_problem(client.post("/phrases", json={"phrases": [{"id": "a", "text": "a"}] * 2}), 422)
        is_problem(client.post("/phrases", json={"phrases": [{"id": "a", "text": "a" * 6}]}), 422)
        late = {"X-Request-Timeout-Ms": "1001"}
        is_problem(client.post("/match", json={"query": "a"}, headers=late), 422)
        assert client.post("/match", json={"queries": ["a" * 5] * 2, "k": 7}).status_code == 200
        document = client.get("/openapi.json").json()
        query = document["components"]["schemas"]["QueryRequest"]["properties"]
        assert (query["k"]["maximum"], query["query"]["maxLength"]) == (7, 5)
        assert query["deny"]["maxItems"] == 2
        assert document["components"]["schemas"]["PhrasesRequest"]["properties"]["phrases"]["maxItems"] == 1
        for method in ("get", "post"):
            by_name = {one["name"]: one for one in document["paths"]["/match"][method]["parameters"]}
            assert by_name["X-Request-Timeout-Ms"]["schema"]["maximum"] == 1000


def test_health_and_readiness(client: httpx.Client, tiny_bundle: Path) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    bundle = json.loads((tiny_bundle / "manifest.json").read_text())["bundle_id"]
    assert client.get("/readyz").json() == {
        "status": "ready",
        "bundle": bundle,
        "provider": "cpu",
        "degraded": None,
    }


DECLARED = {
    ("/match", "post"): {200, 400, 401, 408, 413, 415, 422, 429, 431, 503, 504},
    ("/match", "get"): {200, 401, 422, 429, 431, 503, 504},
    ("/phrases", "post"): {200, 400, 401, 403, 404, 408, 413, 415, 422, 429, 431, 503},
    ("/phrases/{id}", "get"): {200, 401, 403, 404, 422, 429, 431, 503},
    ("/phrases/{id}", "delete"): {200, 401, 403, 404, 409, 422, 429, 431, 503},
    ("/phrases/{id}/pause", "post"): {200, 401, 403, 404, 409, 422, 429, 431, 503},
    ("/phrases/{id}/resume", "post"): {200, 401, 403, 404, 409, 422, 429, 431, 503},
    ("/admin/reload", "post"): {200, 400, 401, 403, 408, 409, 413, 415, 422, 431, 503},
    ("/admin/explain", "post"): {200, 400, 401, 403, 408, 413, 415, 422, 429, 431, 503},
    ("/healthz", "get"): {200, 431, 503},
    ("/readyz", "get"): {200, 431, 503},
    ("/metrics", "get"): {200, 431, 503},
}


def test_every_answer_is_declared_and_errors_are_problems(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    declared = {
        (path, method): {int(status) for status in operation["responses"]}
        for path, operations in paths.items()
        for method, operation in operations.items()
    }
    assert declared == DECLARED
    for operations in paths.values():
        for operation in operations.values():
            assert operation["operationId"]
            assert operation["summary"]
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert list(response["content"]) == [PROBLEM]
                    assert response["content"][PROBLEM]["schema"] == {"$ref": "#/components/schemas/Problem"}


def test_the_api_description_is_whole(client: httpx.Client) -> None:
    """Whatever it refers to is there, and what it has is referred to; so that clients can be made from it."""
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert referred == set(schemas)
    names = [
        operation["operationId"]
        for operations in document["paths"].values()
        for operation in operations.values()
    ]
    assert len(names) == len(set(names))
    for path, operations in document["paths"].items():
        guarded = path.startswith(("/match", "/phrases", "/admin"))
        for operation in operations.values():
            # No key is needed here.
            assert operation.get("security") == ([] if guarded else None)
    retry = document["paths"]["/match"]["post"]["responses"]["429"]["headers"]["Retry-After"]
    assert retry["schema"] == {"type": "integer", "minimum": 1}


def test_pages_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    for path in ("/", "/docs", "/page.js", "/docs.js", "/page.css"):
        response = client.get(path)
        assert response.status_code == 200
        assert "http://" not in response.text
        assert "https://" not in response.text
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_one_slow_client_does_not_hold_up_others(server: object, client: httpx.Client) -> None:
    with socket.create_connection(server.address) as slow:  # type: ignore[attr-defined]
        slow.sendall(b"POST /match HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
        time.sleep(0.05)
        assert client.post("/match", json={"query": "tent"}).status_code == 200
