"""States of the application that a sound process hardly gets into, and what it asks of its environment."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from httpx import Response
from prometheus_client.parser import text_string_to_metric_families

from service.match import Pinned
from service.security import KeyRing

MATCH = {"query": "red tent", "k": 3}
WORDS = ["red", "blue", "green", "running", "hiking", "shoes", "boots", "socks", "tent", "cheap", "men"]


def sample(metrics: Response, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(metrics.text):
        for one in family.samples:
            if one.name == name and labels.items() <= one.labels.items():
                return one.value
    raise KeyError(name)


def is_problem(answer: Response, status: int, kind: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == f"urn:bidmatch:{kind}"


def test_a_failure_of_ours_is_a_problem_too_and_the_next_request_is_answered(
    application: Callable,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = application(tiny_bundle, cache_mb=0)
    engine = service.serving.current.engine
    for method, content in (("POST", {"json": MATCH}), ("GET", {"params": {"q": "red tent", "k": 3}})):
        with monkeypatch.context() as broken:
            broken.setattr(engine, "index", None)
            failed = service.ask(method, "/match", **content)
        is_problem(failed, 500, "internal-error")
        assert "NoneType" not in failed.text
        assert service.ask(method, "/match", **content).status_code == 200
        metrics = service.ask("GET", "/metrics")
        assert sample(metrics, "bidmatch_requests_total", method=method, status="500") == 1
    assert "AttributeError" in caplog.text


def test_a_failure_of_an_admin_path_is_one_too(
    application: Callable,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = application(tiny_bundle)
    monkeypatch.setattr(service.serving.current.engine, "index", None)
    failed = service.ask("POST", "/admin/explain", json={"query": "a secret query"})
    is_problem(failed, 500, "internal-error")
    assert "AttributeError" in caplog.text
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)


def test_when_stopping_it_is_alive_but_not_ready(application: Callable, tiny_bundle: Path) -> None:
    service = application(tiny_bundle)

    async def scene() -> None:
        async with service.client() as http:
            async with service.app.api.router.lifespan_context(service.app.api):
                assert (await http.get("/readyz")).status_code == 200
            assert (await http.get("/healthz")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200
            for answer in (
                await http.get("/readyz"),
                await http.post("/match", json=MATCH),
                await http.get("/match", params={"q": "tent"}),
            ):
                is_problem(answer, 503, "stopping")

    asyncio.run(scene())


def test_probes_and_metrics_answer_while_the_queue_is_full(
    application: Callable, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = application(tiny_bundle, threads=1, queue=2, max_queries=2, cache_mb=0)
    batcher = service.app.matcher.batcher
    begun, go = threading.Event(), threading.Event()
    run = batcher._run

    def held_up(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(20)
        return run(*arguments)

    monkeypatch.setattr(batcher, "_run", held_up)

    async def scene() -> None:
        async with service.client() as http:
            first = asyncio.ensure_future(http.post("/match", json=MATCH))
            await asyncio.to_thread(begun.wait, 10)
            waiting = asyncio.ensure_future(http.post("/match", json={"queries": ["a", "b"]}))
            while batcher.depth < 2:
                await asyncio.sleep(0.005)
            for method, content in (("POST", {"json": MATCH}), ("GET", {"params": {"q": "a"}})):
                full = await http.request(method, "/match", **content)
                is_problem(full, 429, "queue-full")
                assert int(full.headers["retry-after"]) >= 1
            for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/"):
                assert (await http.get(path)).status_code == 200
            metrics = await http.get("/metrics")
            assert sample(metrics, "bidmatch_queue_depth") == 2
            assert sample(metrics, "bidmatch_dropped_total", reason="queue_full") == 2
            go.set()
            answers = await asyncio.gather(first, waiting)
            assert [answer.status_code for answer in answers] == [200, 200]

    asyncio.run(scene())


def test_an_id_may_end_in_a_line_break(application: Callable, tiny_bundle: Path, tmp_path: Path) -> None:
    """And the phrase whose id has none is another."""
    service = application(tiny_bundle, live=tmp_path / "live")
    ids = ["a", "a\n", "a\nb", "\n"]
    phrases = [{"id": id, "text": f"red tent {at}"} for at, id in enumerate(ids)]
    assert service.ask("POST", "/phrases", json={"phrases": phrases}).status_code == 200
    for at, id in enumerate(ids):
        found = service.ask("GET", f"/phrases/{quote(id, safe='')}")
        assert found.status_code == 200, id
        assert (found.json()["id"], found.json()["text"]) == (id, f"red tent {at}")
    assert service.ask("DELETE", "/phrases/a%0A").json()["id"] == "a\n"
    assert [service.ask("GET", f"/phrases/{quote(id, safe='')}").json()["state"] for id in ids] == [
        "active",
        "removed",
        "active",
        "active",
    ]


def test_requests_that_are_given_up_hold_no_bundle(
    application: Callable, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = application(tiny_bundle, threads=1, cache_mb=0)
    batcher = service.app.matcher.batcher
    run = batcher._run
    monkeypatch.setattr(batcher, "_run", lambda *arguments: (time.sleep(0.05), run(*arguments))[1])
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            late = service.ask("POST", "/match", json=MATCH, headers={"X-Request-Timeout-Ms": "1"})
            assert late.status_code == 504
        left = [one for one in gc.get_objects() if type(one) is Pinned]
        assert left == []
    finally:
        gc.enable()


def test_batches_are_as_large_as_was_measured(
    application: Callable, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = application(tiny_bundle, threads=1, cache_mb=0)
    cost = service.serving.current.engine.cost
    assert cost is not None
    monkeypatch.setattr(cost, "best_batch", 3)
    service.ask("POST", "/match", json={"queries": [f"tent {at}" for at in range(8)]})
    metrics = service.ask("GET", "/metrics")
    assert sample(metrics, "bidmatch_batch_queries_count") == 3  # of 3, 3 and 2
    assert sample(metrics, "bidmatch_batch_queries_sum") == 8


def test_a_request_has_the_deadline_that_it_asks_for(
    application: Callable, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = application(tiny_bundle, threads=1, cache_mb=0, deadline_ms=8000, max_deadline_ms=9000)
    batcher = service.app.matcher.batcher
    begun, go = threading.Event(), threading.Event()
    run, worked_on = batcher._run, []

    def held_up(queries: list[str], options: Any) -> Any:
        worked_on.append(queries)
        begun.set()
        assert go.wait(20)
        return run(queries, options)

    monkeypatch.setattr(batcher, "_run", held_up)

    async def scene() -> None:
        async with service.client() as http:
            patient = asyncio.ensure_future(http.post("/match", json=MATCH))
            await asyncio.to_thread(begun.wait, 10)
            for method, content in (
                ("POST", {"json": {"query": "late"}}),
                ("GET", {"params": {"q": "late"}}),
            ):
                late = await http.request(method, "/match", headers={"X-Request-Timeout-Ms": "20"}, **content)
                is_problem(late, 504, "deadline")
                assert "20 ms" in late.json()["detail"]
            assert not patient.done()
            go.set()
            assert (await patient).status_code == 200
            assert worked_on == [["red tent"]]
            metrics = await http.get("/metrics")
            assert sample(metrics, "bidmatch_dropped_total", reason="deadline") == 2
            for value in ("0", "-1", "9001", "1e3", "1.0", "", "x", "٣", "9" * 400):
                refused = await http.post(
                    "/match", json=MATCH, headers={b"X-Request-Timeout-Ms": value.encode()}
                )
                is_problem(refused, 422, "invalid-request")
                assert [one["where"] for one in refused.json()["errors"]] == ["header.X-Request-Timeout-Ms"]
            for value in ("9000", "0009000"):
                answer = await http.post("/match", json=MATCH, headers={"X-Request-Timeout-Ms": value})
                assert answer.status_code == 200

    asyncio.run(scene())


def test_answers_are_cached_by_what_the_query_is_once_normalised(
    application: Callable, tiny_bundle: Path
) -> None:
    service = application(tiny_bundle)
    first = service.ask("POST", "/match", json={"query": "Red  TENT", "k": 3})
    assert "cache;desc=hit" not in first.headers["server-timing"]
    for method, content in (
        ("POST", {"json": {"query": " red tent ", "k": 3}}),
        ("GET", {"params": {"q": "RED\u200b tent", "k": "3"}}),
        ("POST", {"json": {"query": "red tent", "k": 3, "min_score": None, "deny": [], "distinct": False}}),
    ):
        again = service.ask(method, "/match", **content)
        assert again.headers["server-timing"].startswith("cache;desc=hit, total;dur=")
        assert again.json() == first.json()
    several = service.ask("POST", "/match", json={"queries": ["tent", "red TENT"], "k": 3}).json()
    assert several["results"][1] == {"query": "red TENT", "matches": first.json()["matches"]}
    other = service.ask("POST", "/match", json={"query": "red tent", "k": 4})
    assert "cache" not in other.headers["server-timing"]
    metrics = service.ask("GET", "/metrics")
    assert sample(metrics, "bidmatch_cache_hits_total") == 4
    assert sample(metrics, "bidmatch_cache_misses_total") == 3
    assert sample(metrics, "bidmatch_cache_bytes") > 1000
    # What is answered from the cache counts among what is answered.
    assert sample(metrics, "bidmatch_queries_total", matched="true") == 7
    assert sample(metrics, "bidmatch_best_score_count") == 7
    assert sample(metrics, "bidmatch_matches_returned_sum") == 6 * 3 + 4
    assert sample(metrics, "bidmatch_query_coverage") == 1


def test_without_a_cache_every_request_is_worked_on(application: Callable, tiny_bundle: Path) -> None:
    service = application(tiny_bundle, cache_mb=0)
    for _ in range(2):
        answer = service.ask("POST", "/match", json=MATCH)
        assert "encode;dur=" in answer.headers["server-timing"]
    metrics = service.ask("GET", "/metrics")
    for name in ("hits", "misses"):
        assert sample(metrics, f"bidmatch_cache_{name}_total") == 0
    assert sample(metrics, "bidmatch_batch_queries_sum") == 2


def test_live_phrases_are_off_without_a_folder_for_them(application: Callable, tiny_bundle: Path) -> None:
    service = application(tiny_bundle)
    put = service.ask("POST", "/phrases", json={"phrases": [{"id": "new", "text": "blue tent"}]})
    is_problem(put, 404, "live-phrases-off")
    for method, path in (
        ("POST", "/phrases/p0/pause"),
        ("POST", "/phrases/p0/resume"),
        ("DELETE", "/phrases/p0"),
    ):
        is_problem(service.ask(method, path), 404, "live-phrases-off")
    # Those of the bundle can be looked at.
    known = service.ask("GET", "/phrases/p0").json()
    assert (known["text"], known["state"], known["source"]) == ("red running shoes", "active", "bundle")
    is_problem(service.ask("GET", "/phrases/new"), 404, "no-such-phrase")


def test_a_phrase_comes_pauses_and_goes(application: Callable, tiny_bundle: Path, tmp_path: Path) -> None:
    service = application(tiny_bundle, live=tmp_path)

    def found(query: str = "hiking socks cheap") -> dict[str, str]:
        answer = service.ask("POST", "/match", json={"query": query, "k": 5})
        return {match["id"]: match["source"] for match in answer.json()["matches"]}

    before = found()
    put = service.ask(
        "POST",
        "/phrases",
        json={
            "phrases": [
                {"id": "a/b?", "text": " cheap  Hiking socks", "columns": {"match_type": "broad"}},
                {"id": "p0", "text": "cheap hiking socks men", "columns": {}},
            ]
        },
    )
    assert put.status_code == 200
    first, second = put.json()["phrases"]
    assert (first["id"], first["text"], first["state"]) == ("a/b?", "cheap Hiking socks", "active")
    assert (first["columns"], first["source"]) == ({"match_type": "broad"}, "live")
    assert (second["id"], second["columns"], second["source"]) == ("p0", {}, "live")
    assert "a/b?" not in before
    assert found()["a/b?"] == "live"
    assert found("cheap hiking socks men")["p0"] == "exact"
    assert service.ask("GET", "/phrases/a%2Fb%3F").json() == first
    paused = service.ask("POST", "/phrases/a%2Fb%3F/pause").json()
    assert paused == first | {"state": "paused", "changed": paused["changed"]}
    assert "a/b?" not in found()
    assert service.ask("POST", "/phrases/a%2Fb%3F/resume").json()["state"] == "active"
    assert "a/b?" in found()
    removed = service.ask("DELETE", "/phrases/a%2Fb%3F")
    assert removed.json()["state"] == "removed"
    assert "a/b?" not in found()
    is_problem(service.ask("POST", "/phrases/a%2Fb%3F/resume"), 409, "phrase-removed")
    is_problem(service.ask("DELETE", "/phrases/nobody"), 404, "no-such-phrase")
    # The bundle's phrase of the other's id is gone with it.
    assert service.ask("DELETE", "/phrases/p0").status_code == 200
    assert "p0" not in found("red running shoes")
    metrics = service.ask("GET", "/metrics")
    assert sample(metrics, "bidmatch_live_phrases") == 0
    assert sample(metrics, "bidmatch_live_sequence") == 6
    assert sample(metrics, "bidmatch_cache_invalidated_total") == 0


def test_what_is_cached_is_what_would_be_found_now(
    application: Callable, tiny_bundle: Path, tmp_path: Path
) -> None:
    chance = random.Random(5)
    cached = application(tiny_bundle, live=tmp_path)
    fresh = application(tiny_bundle, live=tmp_path, cache_mb=0)

    def text(count: int) -> str:
        return " ".join(chance.sample(WORDS, count))

    queries = [text(chance.choice((2, 3, 4))) for _ in range(8)] + ["red running shoes", "strasse"]
    asked = [
        {"queries": queries, "k": 5},
        {"queries": queries, "k": 200, "min_score": 0.9},
        {"queries": queries, "k": 4, "filter": {"match_type": {"not": "broad"}}},
        {"queries": queries, "k": 3, "distinct": True, "deny": ["q7", "n1"]},
        {"queries": queries, "k": 3, "allow": ["p0", "p1", "n0", "n1", "n2", "q9"]},
    ]
    changed = 0
    before: list[Any] = [None] * len(asked)
    for _ in range(60):
        kind = chance.choice(("put", "put", "pause", "resume", "remove"))
        id = chance.choice([f"n{chance.randrange(6)}", f"q{chance.randrange(40)}", "p0", "p1", "p6"])
        if kind == "put":
            # Sometimes just what a query asks for, or near it.
            phrase = chance.choice([chance.choice(queries), text(3), text(4)])
            columns = chance.choice([{}, {"match_type": chance.choice(["exact", "phrase", "broad"])}])
            put = {"phrases": [{"id": id, "text": phrase, "columns": columns}]}
            assert cached.ask("POST", "/phrases", json=put).status_code == 200
        elif kind == "remove":
            cached.ask("DELETE", f"/phrases/{id}")
        else:
            cached.ask("POST", f"/phrases/{id}/{kind}")
        last = cached.store.last_sequence()
        assert fresh.serving.sync.wait_for(last, 10)
        for at, body in enumerate(asked):
            kept, found = (service.ask("POST", "/match", json=body).json() for service in (cached, fresh))
            lists = [
                [
                    [(match["id"], pytest.approx(match["score"], abs=1e-5)) for match in one["matches"]]
                    for one in answer["results"]
                ]
                for answer in (kept, found)
            ]
            assert lists[0] == lists[1], (kind, id, body)
            changed += kept["results"] != before[at]
            before[at] = kept["results"]
    metrics = cached.ask("GET", "/metrics")
    hits = sample(metrics, "bidmatch_cache_hits_total")
    # Most of it stayed right, and some of it did not.
    assert hits > 0.4 * 60 * len(asked) * len(queries)
    assert sample(metrics, "bidmatch_cache_misses_total") > 1.2 * len(asked) * len(queries)
    assert changed > 30


def test_all_phrases_of_a_request_are_taken_or_none(
    application: Callable, tiny_bundle: Path, tmp_path: Path
) -> None:
    service = application(tiny_bundle, live=tmp_path)
    refused = service.ask(
        "POST",
        "/phrases",
        json={
            "phrases": [
                {"id": "new", "text": "blue tent"},
                {"id": "bad", "text": "blue tent", "columns": {"match_type": 1, "market": "de"}},
            ]
        },
    )
    is_problem(refused, 422, "invalid-request")
    assert [one["where"] for one in refused.json()["errors"]] == [
        "body.phrases.1.columns.match_type",
        "body.phrases.1.columns.market",
    ]
    is_problem(service.ask("GET", "/phrases/new"), 404, "no-such-phrase")
    long = {"phrases": [{"id": "new", "text": "tent", "columns": {"x" * 100_000: 1}}]}
    refused = service.ask("POST", "/phrases", json=long)
    is_problem(refused, 422, "invalid-request")
    assert len(refused.content) < 1000


def test_another_bundle_takes_over_and_back(
    application: Callable, tiny_bundle: Path, small_bundle: Path, tmp_path: Path
) -> None:
    service = application(tiny_bundle, live=tmp_path / "live")
    first = service.ask("GET", "/readyz").json()["bundle"]
    service.ask("POST", "/phrases", json={"phrases": [{"id": "new", "text": "steel office chair kids"}]})
    service.ask("POST", "/match", json=MATCH)
    report = service.ask("POST", "/admin/reload", json={"bundle": str(small_bundle)})
    assert report.status_code == 200, report.text
    second = service.ask("GET", "/readyz").json()["bundle"]
    assert second != first
    assert {name: report.json()[name] for name in ("bundle", "previous", "phrases", "live_phrases")} == {
        "bundle": second,
        "previous": first,
        "phrases": 54,
        "live_phrases": 1,
    }
    answer = service.ask("POST", "/match", json={"query": "steel office chair kids"}).json()
    assert answer["bundle"] == second
    assert (answer["matches"][0]["id"], answer["matches"][0]["source"]) == ("new", "exact")
    back = service.ask("POST", "/admin/reload")
    assert (back.json()["bundle"], back.json()["previous"]) == (first, second)
    metrics = service.ask("GET", "/metrics")
    assert sample(metrics, "bidmatch_reloads_total", outcome="taken") == 2
    # Both bundles' figures stand beside each other; only one of them answers.
    assert sample(metrics, "bidmatch_bundle_info", bundle=first) == 1
    assert sample(metrics, "bidmatch_bundle_info", bundle=second) == 0
    for bundle in (first, second):
        assert sample(metrics, "bidmatch_matches_returned_count", bundle=bundle) == 1


@pytest.mark.parametrize("what", ["nothing there", "a file", "not a bundle", "damaged", "NUL", "too long"])
def test_a_bad_bundle_is_refused_and_the_one_before_still_answers(
    application: Callable, tiny_bundle: Path, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "other"
    if what == "a file":
        path.write_text("{}")
    elif what == "not a bundle":
        path.mkdir()
        (path / "manifest.json").write_text("{}")
    elif what == "damaged":
        shutil.copytree(tiny_bundle, path)
        vectors = bytearray((path / "vectors.npy").read_bytes())
        vectors[-5] ^= 1
        (path / "vectors.npy").write_bytes(vectors)
    name = {"NUL": "a\0b", "too long": "a" * 4000}.get(what, str(path))
    service = application(tiny_bundle)
    before = service.ask("POST", "/match", json=MATCH).json()
    is_problem(service.ask("POST", "/admin/reload", json={"bundle": name}), 422, "bundle-refused")
    assert service.ask("POST", "/match", json=MATCH).json() == before
    metrics = service.ask("GET", "/metrics")
    assert sample(metrics, "bidmatch_reloads_total", outcome="refused") == 1
    assert sample(metrics, "bidmatch_reloads_total", outcome="taken") == 0


def test_who_asks_for_an_explanation_gets_one(application: Callable, tiny_bundle: Path) -> None:
    service = application(tiny_bundle)
    body = {"query": "red SHOES", "k": 3, "deny": ["p0"], "ids": ["p0", "p1", "p2", "nobody"]}
    told = service.ask("POST", "/admin/explain", json=body).json()
    assert (told["query"], told["tokens"], told["words"]) == ("red shoes", ["red", "shoes"], ["red", "shoes"])
    by_id = {one["id"]: one for one in told["candidates"]}
    assert by_id["p0"]["dropped"] == "deny: in the list"
    assert by_id["p1"]["dropped"] == "match type: exact, and the query is another"
    assert (by_id["p2"]["rank"], by_id["p2"]["source"], by_id["p2"]["dropped"]) == (1, "exact", None)
    assert told["missing"] == ["nobody"]
    body.pop("ids")
    matches = service.ask("POST", "/match", json=body).json()["matches"]
    ranked = sorted((one["rank"], one["id"]) for one in told["candidates"] if one["rank"])
    assert [id for _, id in ranked] == [match["id"] for match in matches]


def test_the_one_guard_stands_before_every_route(
    application: Callable, tiny_bundle: Path, tmp_path: Path
) -> None:
    from service.security import Guard

    file = tmp_path / "keys"
    file.write_text("k" * 32)
    service = application(tiny_bundle, Guard(KeyRing(file), KeyRing(file), required=True))
    open_paths = set()
    for path, operations in service.ask("GET", "/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            asked = {scheme for one in operation.get("security", []) for scheme in one}
            assert asked == (set() if path in ("/healthz", "/readyz", "/metrics") else {"bearer", "apiKey"})
            # Not even what is wrong with a request is told to others.
            answer = service.ask(method.upper(), path.replace("{id}", "p" * 300))
            if answer.status_code == 401:
                is_problem(answer, 401, "unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
            else:
                open_paths.add(path)
    assert open_paths == {"/healthz", "/readyz", "/metrics"}


def test_requests_are_known_by_an_id(application: Callable, tiny_bundle: Path) -> None:
    service = application(tiny_bundle)
    for method, path in (("POST", "/match"), ("GET", "/match"), ("GET", "/healthz"), ("GET", "/nowhere")):
        named = service.ask(method, path, headers={"X-Request-Id": "abc-1"})
        assert named.headers["x-request-id"] == "abc-1"
        ids = {service.ask(method, path).headers["x-request-id"] for _ in range(3)}
        assert len(ids) == 3
        forged = service.ask(method, path, headers={"X-Request-Id": "a b\tc"})
        assert len(forged.headers["x-request-id"]) == 32


@pytest.mark.parametrize("threads", [1, 4])
def test_many_requests_at_once_of_all_kinds(
    application: Callable, tiny_bundle: Path, tmp_path: Path, threads: int
) -> None:
    # So long that no machine is so slow that some are refused.
    patience = {"deadline_ms": 60_000, "max_deadline_ms": 60_000}
    service = application(tiny_bundle, live=tmp_path, threads=threads, **patience)

    async def scene() -> None:
        async with service.client() as http:

            async def one(at: int) -> httpx.Response:
                query = f"{('red', 'blue', 'green')[at % 3]} tent {('cheap', 'sale', 'kids')[at // 3 % 3]}"
                kinds = [
                    ("POST", "/match", {"json": {"query": query, "k": 1 + at % 5}}),
                    ("GET", "/match", {"params": {"q": query}}),
                    ("POST", "/match", {"json": {"queries": [query] * (1 + at % 7), "deny": ["p0"]}}),
                    ("POST", "/phrases", {"json": {"phrases": [{"id": f"n{at % 9}", "text": query}]}}),
                    ("POST", "/admin/explain", {"json": {"query": query, "ids": ["n1"]}}),
                    ("POST", "/match", {"json": {"query": query, "filter": {"match_type": "broad"}}}),
                ]
                method, path, content = kinds[at % len(kinds)]
                return await http.request(method, path, **content)

            answers = await asyncio.gather(*(one(at) for at in range(240)))
            assert {answer.status_code for answer in answers} == {200}

    asyncio.run(scene())
