"""A Milvus that vanishes while requests come: 503 and not ready, no wrong answer; and it comes back."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from milvus_server import MilvusServer, in_milvus

WORDS = ("red", "blue", "green", "running", "hiking", "shoes", "boots", "socks", "tent", "women", "men")
QUERIES = [f"{one} {two}" for one in WORDS for two in WORDS]


@pytest.fixture(scope="module")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    with MilvusServer(tmp_path_factory.mktemp("milvus")) as server:
        yield server


@pytest.fixture(scope="module")
def bundle(milvus: MilvusServer, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_milvus(tiny_bundle, tmp_path_factory.mktemp("outage") / "bundle", milvus.uri)


class Load:
    """Four clients that ask one query after the other until they are stopped."""

    def __init__(self, url: str, right: dict[str, list[str]]):
        self._url, self._right = url, right
        self._over = threading.Event()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0
        self._threads = [threading.Thread(target=self._ask, args=(at,)) for at in range(4)]

    def _ask(self, at: int) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._over.is_set():
                at += 1
                query = QUERIES[at % len(QUERIES)]
                started = time.monotonic()
                answer = client.post("/match", json={"query": query, "k": 5})
                self.slowest = max(self.slowest, time.monotonic() - started)
                self.statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    if ids(answer) != self._right[query]:
                        self.wrong.append(f"{query}: {answer.text}")
                elif answer.status_code == 503:
                    body = answer.json()
                    if (
                        body["type"] != "urn:bidmatch:index-unavailable"
                        or "retry-after" not in answer.headers
                    ):
                        self.wrong.append(answer.text)
                    time.sleep(0.01)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def ids(answer: httpx.Response) -> list[str]:
    return [match["id"] for match in answer.json()["matches"]]


def until(what: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.05)


def ready(url: str) -> int:
    return httpx.get(f"{url}/readyz", timeout=10).status_code


# Without match types all phrases are searched; the few broad ones would be compared without Milvus.
ARGUMENTS = (
    "--cache-mb",
    "0",
    "--workers",
    "2",
    "--canary",
    "0",
    "--no-honour-match-types",
    "--deadline-ms",
    "5000",
)


@pytest.fixture
def right(application: Callable, tiny_bundle: Path) -> dict[str, list[str]]:
    """What the same phrases answer from the bundle's own index."""
    known = application(tiny_bundle, honour_match_types=False)
    answer = [
        known.ask("POST", "/match", json={"query": query, "k": 5}).json()["matches"] for query in QUERIES
    ]
    return {query: [match["id"] for match in matches] for query, matches in zip(QUERIES, answer, strict=True)}


@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_a_milvus_that_vanishes_under_load_and_comes_back(
    start: Callable, milvus: MilvusServer, bundle: Path, right: dict[str, list[str]], how: str
):
    with start("--bundle", str(bundle), "--milvus-timeout-ms", "1000", *ARGUMENTS) as server:
        assert ready(server.url) == 200
        with Load(server.url, right) as load:
            time.sleep(1)
            assert load.statuses[200] > 10
            if how == "killed":
                milvus.kill()
            else:
                milvus.pause(signal.SIGSTOP)
            until(lambda: all(ready(server.url) == 503 for _ in range(6)))
            reason = httpx.get(f"{server.url}/readyz").json()
            assert reason["type"] == "urn:bidmatch:index-unavailable"
            assert str(milvus.port) in reason["detail"]
            before = load.statuses.copy()
            time.sleep(1)
            during = load.statuses - before
            assert during[503] > 10
            assert during[200] == 0
            assert httpx.get(f"{server.url}/healthz").status_code == 200
            if how == "killed":
                milvus.start()
            else:
                milvus.pause(signal.SIGCONT)
            until(lambda: all(ready(server.url) == 200 for _ in range(6)))
            before = load.statuses.copy()
            time.sleep(1)
            after = load.statuses - before
            assert after[200] > 10
        assert load.wrong == []
        assert set(load.statuses) <= {200, 503}
        assert load.slowest < 4


def test_a_service_that_starts_while_milvus_is_gone_is_not_ready_until_it_comes(
    start: Callable, milvus: MilvusServer, bundle: Path
):
    milvus.kill()
    try:
        with start("--bundle", str(bundle), *ARGUMENTS) as server:
            assert ready(server.url) == 503
            asked = httpx.post(f"{server.url}/match", json={"query": "red shoes"})
            assert asked.status_code == 503
            milvus.start()
            until(lambda: all(ready(server.url) == 200 for _ in range(6)))
            assert httpx.post(f"{server.url}/match", json={"query": "red shoes"}).status_code == 200
    finally:
        milvus.kill()
        milvus.start()


def test_a_milvus_that_comes_back_without_all_vectors_is_none(
    start: Callable, milvus: MilvusServer, bundle: Path
):
    from export.bundle.format import VECTORS, collection_of
    from export.bundle.read import read_manifest

    name = collection_of(read_manifest(bundle).files[VECTORS].sha256)
    client = milvus.client()
    client.load_collection(name, timeout=10)
    (row,) = client.query(name, filter="id == 7", output_fields=["id", "vector"], timeout=10)
    client.delete(name, ids=[7], timeout=10)
    with start("--bundle", str(bundle), *ARGUMENTS) as server:
        reason = httpx.get(f"{server.url}/readyz")
        assert reason.status_code == 503
        assert "has 399 vectors, not 400" in reason.text
        client.upsert(name, [dict(row)], timeout=10)
        until(lambda: all(ready(server.url) == 200 for _ in range(6)))


def test_credentials_are_neither_taken_in_a_uri_nor_said(
    start: Callable, milvus: MilvusServer, bundle: Path, monkeypatch
):
    from pydantic import ValidationError

    from export.milvus import MilvusTarget

    with pytest.raises(ValidationError, match="BIDMATCH_MILVUS_TOKEN"):
        MilvusTarget(uri="http://root:hush@host:19530")
    assert "hush" not in json.dumps(json.loads((bundle / "manifest.json").read_text()))
    assert json.loads((bundle / "manifest.json").read_text())["milvus"]["uri"] == milvus.uri


def test_waiting_for_a_free_call_is_no_outage(milvus: MilvusServer, bundle: Path):
    from export.bundle.index import IndexUnavailableError
    from export.bundle.milvus import MilvusIndex
    from export.bundle.milvus_client import MilvusAccess
    from export.bundle.read import open_bundle

    with open_bundle(bundle) as opened:
        index = MilvusIndex(opened, MilvusAccess(calls=1, timeout_ms=300))
        query = np.asarray(opened.vectors[:1])
        assert index._calls.acquire(blocking=False)
        try:
            with pytest.raises(IndexUnavailableError, match="All 1 calls to Milvus are taken"):
                index.search(query, 3)
            # What is left of the time is too short for the call.
            threading.Timer(0.298, index._calls.release).start()
            with suppress(IndexUnavailableError):
                index.search(query, 3)
        finally:
            time.sleep(0.1)
        assert index.failure is None
        assert index.search(query, 3).rows[0, 0] == 0
