from __future__ import annotations

import asyncio
import collections
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

LONG = ("--deadline-ms=60000", "--max-deadline-ms=60000")
SLOW = {"queries": ["red running shoes"] * 256, "k": 100}


def sample(client: httpx.Client, name: str, **labels: str) -> float:
    """The sum of the samples of this name and these labels."""
    found = [
        one.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    ]
    if not found:
        raise KeyError(name)
    return sum(found)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


async def all_at_once(url: str, bodies: list[dict]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:
        return await asyncio.gather(*(client.post("/match", json=body) for body in bodies))


def test_more_requests_than_the_queue_holds(start: Callable) -> None:
    limits = "--threads=1 --queue=8 --max-queries=8 --max-batch=2 --cache-mb=0"
    with start(*limits.split()) as server:
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


def test_more_characters_than_the_queue_holds(start: Callable) -> None:
    limits = (
        "--threads=1 --queue-kb=2 --max-body-bytes=2000 --max-query-chars=1900 --max-batch=1 --cache-mb=0"
    )
    with start(*limits.split()) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        # Far fewer queries than the queue holds, 1,024.
        bodies = [{"query": f"{at} " + "tent " * 300, "k": 300} for at in range(150)]
        answers = asyncio.run(all_at_once(server.url, bodies))
        counts = collections.Counter(answer.status_code for answer in answers)
        assert set(counts) <= {200, 429, 504}
        assert counts[200] > 0
        assert counts[429] > 0
        assert client.post("/match", json=bodies[0]).status_code == 200
        assert sample(client, "bidmatch_dropped_total", reason="queue_full") == counts[429]


def test_what_is_cached_is_answered_beside_a_full_queue(start: Callable) -> None:
    limits = "--threads=1 --queue=256 --deadline-ms=10000 --max-batch=1"
    with start(*limits.split()) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.post("/match", json={"query": "red tent"}).status_code == 200
        # Each of these texts is worked on, for no two are the same.
        bodies = [{"queries": [f"{at} {number} tent" for number in range(256)], "k": 300} for at in range(8)]
        with ThreadPoolExecutor(8) as pool:
            working = [pool.submit(client.post, "/match", json=body) for body in bodies]
            statuses = []
            while not all(one.done() for one in working):
                answer = client.post("/match", json={"query": "Red TENT"})
                statuses.append(answer.status_code)
                assert answer.headers["server-timing"].startswith("cache;desc=hit")
                assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        assert 429 in {one.result().status_code for one in working}
        assert set(statuses) == {200}


def test_a_request_past_its_deadline_is_answered_504(start: Callable) -> None:
    with start("--threads", "1", "--deadline-ms", "1") as server, httpx.Client(base_url=server.url) as client:
        late = client.post("/match", json=SLOW)
        assert late.status_code == 504
        assert late.headers["content-type"] == "application/problem+json"
        assert late.json()["type"] == "urn:bidmatch:deadline"
        assert sample(client, "bidmatch_dropped_total", reason="deadline") == 1
        patient = {"X-Request-Timeout-Ms": "10000"}
        assert client.post("/match", json=SLOW, headers=patient).status_code == 200


def test_clients_that_leave_are_dropped_before_inference(start: Callable) -> None:
    body = json.dumps(SLOW).encode()
    head = b"POST /match HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    with (
        start("--threads=1", "--queue=8192", "--cache-mb=0", *LONG) as server,
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
        until(lambda: sample(client, "bidmatch_queue_depth") == 0)
        assert sample(client, "bidmatch_dropped_total", reason="client_left") >= 10
        worked_on = sample(client, "bidmatch_matches_returned_count")
        assert worked_on <= 11 * 256
        assert client.post("/match", json={"query": "tent"}).status_code == 200


def test_a_client_that_leaves_while_it_sends(start: Callable) -> None:
    with start() as server, httpx.Client(base_url=server.url) as client:
        with socket.create_connection(server.address) as connection:
            connection.sendall(b'POST /match HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{"que')
        until(lambda: sample(client, "bidmatch_dropped_total", reason="client_left") == 1)
        assert sample(client, "bidmatch_requests_total", route="/match", status="499") == 1


def test_metrics(start: Callable) -> None:
    with start("--threads", "1") as server, httpx.Client(base_url=server.url) as client:
        client.post("/match", json={"query": "red tent", "k": 3})
        client.post("/match", json={"queries": ["red tent", " ", "boots"], "k": 5})
        client.post("/match", json={"query": "boots", "k": 5})  # as above, so from the cache
        client.get("/match", params={"q": ""})
        client.get("/nowhere/1")
        client.get("/nowhere/2")
        client.get("/phrases/p0")
        client.get("/phrases/p1")
        bundle = client.get("/readyz").json()["bundle"]
        until(lambda: sample(client, "bidmatch_best_score_count", bundle=bundle) == 4)
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
        assert sample(client, "bidmatch_queue_duration_seconds_count") == 2
        assert sample(client, "bidmatch_batch_queries_sum") == 4
        assert sample(client, "bidmatch_batch_queries_count") == 2
        assert sample(client, "bidmatch_matches_returned_sum", bundle=bundle) == 3 + 5 + 0 + 5 + 5
        assert sample(client, "bidmatch_queries_total", bundle=bundle, matched="true") == 4
        assert sample(client, "bidmatch_queries_total", bundle=bundle, matched="false") == 1
        assert sample(client, "bidmatch_cache_hits_total") == 1
        assert sample(client, "bidmatch_cache_misses_total") == 4
        assert sample(client, "bidmatch_cache_bytes") > 0
        assert sample(client, "bidmatch_queue_depth") == 0
        assert sample(client, "bidmatch_degraded") == 0
        assert sample(client, "bidmatch_requests_total", route="/match", method="POST", status="200") == 3
        assert sample(client, "bidmatch_requests_total", route="/match", method="GET", status="422") == 1
        assert sample(client, "bidmatch_requests_total", route="other", method="GET", status="404") == 2
        assert sample(client, "bidmatch_requests_total", route="/phrases/{id}", status="200") == 2
        assert sample(client, "bidmatch_request_duration_seconds_count", route="/match") == 4
        for reason in ("queue_full", "deadline", "client_left"):
            assert sample(client, "bidmatch_dropped_total", reason=reason) == 0
        for outcome in ("taken", "refused"):
            assert sample(client, "bidmatch_reloads_total", outcome=outcome) == 0
        created = "2024-01-01T00:00:00+00:00"
        assert sample(client, "bidmatch_bundle_info", bundle=bundle, phrases="400", created=created) == 1
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
                provider="cpu",
            )
            == 1
        )
        for process in ("parent", "worker-0"):
            assert sample(client, "bidmatch_process_resident_memory_bytes", process=process) > 1e6
            assert sample(client, "bidmatch_process_cpu_seconds_total", process=process) > 0
        with pytest.raises(KeyError):
            sample(client, "bidmatch_requests_total", route="/nowhere/1")


def test_metrics_are_those_of_all_workers_whichever_is_asked(start: Callable) -> None:
    with start("--workers", "3", "--threads", "1") as server:
        processes = set()
        for at in range(60):
            # A connection each, so that every worker accepts some.
            with httpx.Client(base_url=server.url) as client:
                # A third of them without a match, for their scores are too low.
                least = {"min_score": 2.0} if at % 3 == 0 else {}
                body = {"query": f"tent {at}", "k": 3, **least}
                assert client.post("/match", json=body).status_code == 200
        with httpx.Client(base_url=server.url) as client:
            until(lambda: sample(client, "bidmatch_queries_total", matched="true") == 40)
            # Gauges are brought up to date once a second.
            until(lambda: sample(client, "bidmatch_query_coverage") == pytest.approx(2 / 3))
        for _ in range(20):
            with httpx.Client(base_url=server.url) as client:
                assert sample(client, "bidmatch_requests_total", route="/match", status="200") == 60
                assert sample(client, "bidmatch_queries_total", matched="true") == 40
                assert sample(client, "bidmatch_queries_total", matched="false") == 20
                assert sample(client, "bidmatch_cache_misses_total") == 60
                assert sample(client, "bidmatch_bundle_info") == 1
                # Ratios are of all queries, not of one worker's; a parts' name is none of the metrics.
                assert sample(client, "bidmatch_query_coverage") == pytest.approx(2 / 3)
                assert sample(client, "bidmatch_matches_per_query") == pytest.approx(2 / 3 * 3)
                assert "bidmatch_latest_" not in client.get("/metrics").text
                text = client.get("/metrics").text
                processes |= set(re.findall(r'bidmatch_process_resident_memory_bytes{process="(.+?)"}', text))
                # Not one series a worker: those who read metrics do not know of them.
                assert "pid=" not in text
        assert processes == {"parent", "worker-0", "worker-1", "worker-2"}
        with httpx.Client(base_url=server.url) as client:
            # Gauges are written once a second.
            until(lambda: sample(client, "bidmatch_cache_bytes") > 60 * 400)
