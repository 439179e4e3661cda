from __future__ import annotations

import asyncio
import collections
import json
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

SLOW = {"queries": ["red running shoes"] * 256, "k": 100}


def sample(client: httpx.Client, name: str, **labels: str) -> float:
    """One sample of the server's metrics."""
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for one in family.samples:
            if one.name == name and labels.items() <= one.labels.items():
                return one.value
    raise KeyError(name)


async def all_at_once(url: str, bodies: list[dict]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:
        return await asyncio.gather(*(client.post("/match", json=body) for body in bodies))


def test_more_requests_than_the_queue_holds(start: Callable) -> None:
    with start("--threads", "1", "--queue", "8", "--max-queries", "8", "--max-batch", "2") as server:
        bodies = [{"queries": ["cheap red tent"] * 8, "k": 300}] * 150
        answers = asyncio.run(all_at_once(server.url, bodies))
        counts = collections.Counter(answer.status_code for answer in answers)
        assert set(counts) <= {200, 429, 504}
        assert counts[200] > 0
        assert counts[429] > 0
        for answer in answers:
            if answer.status_code == 200:
                assert [len(result["matches"]) for result in answer.json()["results"]] == [300] * 8
            elif answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["type"] == "urn:bidmatch:queue-full"
        with httpx.Client(base_url=server.url) as client:
            assert client.post("/match", json=bodies[0]).status_code == 200
            assert sample(client, "bidmatch_queue_depth") == 0
            assert sample(client, "bidmatch_dropped_total", reason="queue_full") == counts[429]
            assert sample(client, "bidmatch_requests_total", status="429") == counts[429]


def test_a_request_past_its_deadline_is_answered_504(start: Callable) -> None:
    with start("--threads", "1", "--deadline-ms", "1") as server, httpx.Client(base_url=server.url) as client:
        late = client.post("/match", json=SLOW)
        assert late.status_code == 504
        assert late.headers["content-type"] == "application/problem+json"
        assert late.json()["type"] == "urn:bidmatch:deadline"
        assert sample(client, "bidmatch_dropped_total", reason="deadline") == 1


def test_clients_that_leave_are_dropped_before_inference(start: Callable) -> None:
    body = json.dumps(SLOW).encode()
    head = b"POST /match HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    with (
        start("--threads", "1", "--queue", "8192", "--deadline-ms", "60000") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        staying = threading.Thread(target=lambda: client.post("/match", json=SLOW))
        staying.start()
        leaving = [socket.create_connection(server.address) for _ in range(20)]
        for connection in leaving:
            connection.sendall(head + body)
        for connection in leaving:
            connection.close()
        staying.join()
        until = time.monotonic() + 30
        while sample(client, "bidmatch_queue_depth") > 0 and time.monotonic() < until:
            time.sleep(0.05)
        assert sample(client, "bidmatch_dropped_total", reason="client_left") >= 10
        worked_on = sample(client, "bidmatch_matches_returned_count")
        assert worked_on <= 11 * 256
        assert client.post("/match", json={"query": "tent"}).status_code == 200


def test_a_client_that_leaves_while_it_sends(start: Callable) -> None:
    with start() as server, httpx.Client(base_url=server.url) as client:
        with socket.create_connection(server.address) as connection:
            connection.sendall(b'POST /match HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{"que')
        until = time.monotonic() + 10
        while sample(client, "bidmatch_dropped_total", reason="client_left") < 1:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert sample(client, "bidmatch_requests_total", route="/match", status="499") == 1


def test_metrics(start: Callable) -> None:
    with start() as server, httpx.Client(base_url=server.url) as client:
        client.post("/match", json={"query": "red tent", "k": 3})
        client.post("/match", json={"queries": ["red tent", " ", "boots"], "k": 5})
        client.get("/match", params={"q": ""})
        client.get("/nowhere/1")
        client.get("/nowhere/2")
        response = client.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        assert response.headers["content-type"].startswith("text/plain")
        for step in ("request", "queue", "tokenise", "encode", "search"):
            buckets = [
                float(one.labels["le"])
                for one in families[f"bidmatch_{step}_duration_seconds"].samples
                if one.name.endswith("_bucket") and one.labels.get("route", "/match") == "/match"
            ]
            assert buckets[0] == 50e-6
            assert buckets[-1] == float("inf")
            assert buckets == sorted(buckets)
        for step in ("tokenise", "encode", "search"):
            assert sample(client, f"bidmatch_{step}_duration_seconds_count") == 2
            assert sample(client, f"bidmatch_{step}_duration_seconds_sum") > 0
        assert sample(client, "bidmatch_batch_queries_sum") == 4
        assert sample(client, "bidmatch_batch_queries_count") == 2
        assert sample(client, "bidmatch_matches_returned_sum") == 3 + 5 + 0 + 5
        assert sample(client, "bidmatch_queue_depth") == 0
        assert sample(client, "bidmatch_requests_total", route="/match", method="POST", status="200") == 2
        assert sample(client, "bidmatch_requests_total", route="/match", method="GET", status="422") == 1
        assert sample(client, "bidmatch_requests_total", route="other", method="GET", status="404") == 2
        assert sample(client, "bidmatch_request_duration_seconds_count", route="/match") == 3
        bundle = client.get("/readyz").json()["bundle"]
        assert sample(client, "bidmatch_bundle_info", bundle=bundle, phrases="400") == 1
        assert (
            sample(
                client,
                "bidmatch_model_info",
                model="by-hand",
                kind="bag",
                dim="16",
                precision="fp32",
                wide_dim="0",
                candidates="0",
            )
            == 1
        )
        with pytest.raises(KeyError):
            sample(client, "bidmatch_requests_total", route="/nowhere/1")
