"""Keys before the real service: who may do what, refusals as problems, keys changed while it runs."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

MATCH_KEY, ADMIN_KEY, OTHER_KEY = "match-key-" + "m" * 32, "admin-key-" + "a" * 32, "other-key-" + "o" * 32
MATCHING: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/match", {"json": {"query": "red tent"}}),
    ("POST", "/match", {"json": {"queries": ["red tent", "boots"]}}),
    ("GET", "/match", {"params": {"q": "red tent"}}),
]
ADMINISTERING: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/phrases", {"json": {"phrases": [{"id": "new", "text": "blue tent"}]}}),
    ("GET", "/phrases/new", {}),
    ("POST", "/phrases/new/pause", {}),
    ("POST", "/phrases/new/resume", {}),
    ("DELETE", "/phrases/new", {}),
    ("POST", "/admin/explain", {"json": {"query": "red tent"}}),
    ("POST", "/admin/reload", {}),
]
OPEN = ["/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/", "/page.js"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def is_problem(answer: httpx.Response, status: int, kind: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["type"]) == (status, f"urn:bidmatch:{kind}")
    assert problem["title"]
    assert problem["detail"]
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def files(folder: Path) -> tuple[Path, Path]:
    api, admin = folder / "api.keys", folder / "admin.keys"
    api.write_text(f"# callers\nauction: {MATCH_KEY}\n")
    admin.write_text(f"ops: sha256:{hashlib.sha256(ADMIN_KEY.encode()).hexdigest()}\n")
    return api, admin


@pytest.fixture(scope="module")
def guarded(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Two workers, keys of both sorts, live phrases."""
    folder = tmp_path_factory.mktemp("keys")
    api, admin = files(folder)
    arguments = [f"--api-keys-file={api}", f"--admin-keys-file={admin}", f"--live={folder / 'live'}"]
    with start(*arguments, "--workers=2") as server, httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("call", [*MATCHING, *ADMINISTERING], ids=lambda call: f"{call[0]} {call[1]}")
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(OTHER_KEY),
        {"Authorization": "Bearer"},
        bearer(MATCH_KEY[:-1]),
        bearer(ADMIN_KEY + "x"),
        bearer("x" * 5000),
        {"Authorization": f"Basic {MATCH_KEY}"},
        {"Authorization": MATCH_KEY},
        {"X-API-Key": OTHER_KEY},
        {"X-API-Key": ""},
        {"X-Api-Key": f"{MATCH_KEY}, {ADMIN_KEY}"},
        {"X-API-Key": ADMIN_KEY} | bearer(MATCH_KEY),
        {"Cookie": f"key={ADMIN_KEY}"},
    ],
)
def test_without_a_key_that_is_known_nothing_is_done(
    guarded: httpx.Client, call: tuple[str, str, dict], headers: Mapping[str, str]
) -> None:
    method, path, content = call
    is_problem(guarded.request(method, path, headers=headers, **content), 401, "unauthorized")
    # A key in the address is none, and would stand in logs.
    stray = guarded.request(method, path, **content | {"params": {"q": "a", "key": ADMIN_KEY}})
    is_problem(stray, 401, "unauthorized")


@pytest.mark.parametrize("key", [MATCH_KEY, ADMIN_KEY])
@pytest.mark.parametrize("call", MATCHING, ids=lambda call: f"{call[0]} {call[1]}")
def test_both_keys_may_match(guarded: httpx.Client, call: tuple[str, str, dict], key: str) -> None:
    method, path, content = call
    for headers in (bearer(key), {"authorization": f"bEARER   {key}"}, {"X-API-Key": key}):
        assert guarded.request(method, path, headers=headers, **content).status_code == 200


@pytest.mark.parametrize("call", ADMINISTERING, ids=lambda call: f"{call[0]} {call[1]}")
def test_a_key_for_matching_may_not_administer(guarded: httpx.Client, call: tuple[str, str, dict]) -> None:
    method, path, content = call
    for headers in (bearer(MATCH_KEY), {"X-API-Key": MATCH_KEY}):
        is_problem(guarded.request(method, path, headers=headers, **content), 403, "forbidden")


def test_an_admin_key_may_do_everything(guarded: httpx.Client) -> None:
    for method, path, content in ADMINISTERING:
        answer = guarded.request(method, path, headers=bearer(ADMIN_KEY), **content)
        assert answer.status_code == 200, (path, answer.text)


def test_nobody_learns_without_a_key_what_is_wrong_with_a_request(guarded: httpx.Client) -> None:
    for method, path, content in (
        ("POST", "/match", {"content": b"{", "headers": {"Content-Type": "text/plain"}}),
        ("POST", "/match", {"content": b"x" * 2_000_000}),
        ("GET", "/match", {}),
        ("GET", "/phrases/" + "x" * 300, {}),
        ("DELETE", "/phrases/nobody", {}),
        ("POST", "/phrases", {"content": b"{"}),
        ("POST", "/admin/reload", {"json": {"bundle": 5}}),
        ("POST", "/admin/explain", {"content": b""}),
    ):
        is_problem(guarded.request(method, path, **content), 401, "unauthorized")  # type: ignore[arg-type]


def test_probes_metrics_and_pages_need_no_key(guarded: httpx.Client) -> None:
    for headers in ({}, bearer(OTHER_KEY), {"X-API-Key": "-"}):
        for path in OPEN:
            assert guarded.get(path, headers=headers).status_code == 200, path
        assert guarded.get("/nowhere", headers=headers).status_code == 404


def test_no_key_is_in_metrics_or_descriptions(guarded: httpx.Client) -> None:
    guarded.post("/match", json={"query": "red tent"}, headers=bearer(MATCH_KEY))
    for path in OPEN:
        text = guarded.get(path).text
        assert MATCH_KEY not in text
        assert ADMIN_KEY not in text
        assert "auction" not in text


def ask_until(client: httpx.Client, key: str, status: int, path: str = "/match") -> None:
    """Both workers answer so within seconds: ten times in a row, each on a connection of its own."""
    until, row = time.monotonic() + 20, 0
    while row < 10:
        assert time.monotonic() < until, f"not {status} of late"
        answer = httpx.get(f"{client.base_url}{path}", params={"q": "tent"}, headers=bearer(key))
        assert answer.status_code in (200, 401, 403, 404)
        row = row + 1 if answer.status_code == status else 0
        if row == 0:
            time.sleep(0.1)


def test_keys_change_while_the_service_runs(start: Callable, tmp_path: Path) -> None:
    """Old and new one hold side by side for a while, as callers change over; then the old one is let go."""
    api, admin = files(tmp_path)
    with (
        start(f"--api-keys-file={api}", f"--admin-keys-file={admin}", "--workers=2") as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        ask_until(client, MATCH_KEY, 200)
        api.write_text(f"auction: {MATCH_KEY}\nauction: {OTHER_KEY}\n")
        ask_until(client, OTHER_KEY, 200)
        ask_until(client, MATCH_KEY, 200)
        # As secrets are swapped: another file takes the place of the first.
        (tmp_path / "next").write_text(f"auction: {OTHER_KEY}\n")
        (tmp_path / "next").rename(api)
        ask_until(client, MATCH_KEY, 401)
        ask_until(client, OTHER_KEY, 200)
        # A file that is wrong changes nothing, and is complained about without a word of what it holds.
        api.write_text("short: abc\n")
        time.sleep(1.5)
        ask_until(client, OTHER_KEY, 200)
        api.unlink()
        time.sleep(1.5)
        ask_until(client, OTHER_KEY, 200)
        admin.write_text(f"ops: {MATCH_KEY}\n")
        ask_until(client, MATCH_KEY, 200, "/phrases/p0")
        ask_until(client, ADMIN_KEY, 401, "/phrases/p0")
        assert server.stop() == 0
    assert "the keys stay as they were" in server.text()
    for secret in (MATCH_KEY, ADMIN_KEY, OTHER_KEY, "abc\n"):
        assert secret not in server.text()


def test_no_request_fails_while_keys_change(start: Callable, tmp_path: Path) -> None:
    api, _ = files(tmp_path)
    with start(f"--api-keys-file={api}") as server:

        async def scene() -> Counter[int]:
            statuses: Counter[int] = Counter()
            changing = asyncio.create_task(asyncio.to_thread(change))
            async with httpx.AsyncClient(base_url=server.url, headers=bearer(MATCH_KEY)) as client:
                while not changing.done():
                    answers = await asyncio.gather(*(client.get("/match?q=tent") for _ in range(8)))
                    statuses.update(answer.status_code for answer in answers)
            await changing
            return statuses

        def change() -> None:
            for at in range(40):
                written = tmp_path / "next"
                written.write_text(f"auction: {MATCH_KEY}\nother-{at}: {OTHER_KEY}{at}\n")
                written.rename(api)
                time.sleep(0.05)

        statuses = asyncio.run(scene())
        assert set(statuses) == {200}
        assert sum(statuses.values()) > 50


@pytest.mark.parametrize(
    ("given", "match", "administer"), [("api", MATCH_KEY, None), ("admin", ADMIN_KEY, ADMIN_KEY)]
)
def test_one_file_of_keys_closes_everything(
    start: Callable, tmp_path: Path, given: str, match: str, administer: str | None
) -> None:
    file = dict(zip(("api", "admin"), files(tmp_path), strict=True))[given]
    with (
        start(f"--{given}-keys-file={file}", f"--live={tmp_path / 'live'}") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for method, path, content in MATCHING:
            is_problem(client.request(method, path, **content), 401, "unauthorized")
            assert client.request(method, path, headers=bearer(match), **content).status_code == 200
        for method, path, content in ADMINISTERING:
            answer = client.request(method, path, headers=bearer(administer or match), **content)
            if administer is None:
                is_problem(answer, 403, "forbidden")
            else:
                assert answer.status_code == 200
        assert client.get("/healthz").status_code == 200
        assert any(line.startswith(("no admin keys", "no keys for matching")) for line in server.said)


def test_access_lines_name_the_caller_and_not_the_key(start: Callable, tmp_path: Path) -> None:
    api, admin = files(tmp_path)
    with (
        start(f"--api-keys-file={api}", f"--admin-keys-file={admin}", "--access-log") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        client.post("/match", json={"query": "tent"}, headers=bearer(MATCH_KEY))
        client.post("/match", json={"query": "tent"}, headers=bearer(OTHER_KEY))
        client.get("/match", params={"q": "tent"}, headers=bearer(MATCH_KEY))
        client.get("/phrases/p0", headers=bearer(ADMIN_KEY))
        assert server.stop() == 0
        lines = [line for line in server.said if "bidmatch.access" in line]
    assert ["caller=auction" in line for line in lines] == [True, False, True, False]
    assert ["caller=ops" in line for line in lines] == [False, False, False, True]
    assert ["queries=1" in line for line in lines] == [True, False, True, False]
    assert ["status=401" in line for line in lines] == [False, True, False, False]
    for secret in (MATCH_KEY, ADMIN_KEY, OTHER_KEY):
        assert secret not in server.text()
