"""Alerts, dashboard and operating guide, against a real Prometheus that scrapes a real service."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
ALERTS = MONITORING / "alerts.yml"
METRIC = re.compile(r"\bbidmatch_[a-z_]+")


def tool(name: str) -> str:
    if os.environ.get("BIDMATCH_NO_PROMETHEUS") == "1":
        pytest.skip("BIDMATCH_NO_PROMETHEUS=1: this machine has no Prometheus")
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: apt-get install prometheus (BIDMATCH_NO_PROMETHEUS=1 skips this)")
    return found


@pytest.fixture(scope="module")
def dashboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "deploy" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def expressions(dashboard: ModuleType) -> dict[str, str]:
    """The dashboard's queries, by panel and letter."""
    return dashboard.expressions("15s")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def service(
    small_wide_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[..., AbstractContextManager[str]],
) -> Iterator[str]:
    live = tmp_path_factory.mktemp("live")
    with serving(small_wide_bundle, "--live", str(live), "--canary", "1") as url:
        yield url


@pytest.fixture(scope="module")
def traffic(service: str, small_wide_bundle: Path) -> Iterator[None]:
    """All that a service counts, again and again."""
    over = threading.Event()
    at = urlsplit(service)

    def call(number: int, client: httpx.Client) -> None:
        # The phrase below drops the answer to the first, so it is asked twice.
        for query in ("red garden hose", "red garden hose", f"cheap fan {number}"):
            client.post("/match", json={"query": query, "k": 5}).raise_for_status()
        phrase = {"id": "live-1", "text": f"red garden hose {number}"}
        client.post("/phrases", json={"phrases": [phrase]}).raise_for_status()
        if number % 20 == 1:
            bundle = {"bundle": str(small_wide_bundle)}
            client.post("/admin/reload", json=bundle, timeout=60).raise_for_status()
        with socket.create_connection((str(at.hostname), at.port or 80), timeout=10) as stranger:
            stranger.sendall(b"this is not HTTP\r\n\r\n")
            assert stranger.recv(1000).startswith(b"HTTP/1.1 400")

    failed: list[BaseException] = []

    def go_on() -> None:
        number = 0
        try:
            with httpx.Client(base_url=service, timeout=10) as client:
                while not over.wait(0.2):
                    call(number, client)
                    number += 1
        except BaseException as failure:
            failed.append(failure)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed


@pytest.fixture(scope="module")
def prometheus(service: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the service each second and has the alerts."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [urlsplit(service).netloc]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([tool("prometheus"), *flags], stderr=log, stdout=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            until = time.monotonic() + 60
            while True:
                try:
                    if client.get("/-/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def test_every_query_of_the_dashboard_has_data(
    dashboard: ModuleType, expressions: dict[str, str], prometheus: httpx.Client, traffic: None
) -> None:
    address = str(prometheus.base_url).rstrip("/")
    assert len(expressions) > 40
    until = time.monotonic() + 90
    while empty := dashboard.without_data(address, expressions):
        assert time.monotonic() < until, empty
        time.sleep(1)

    def values(panel: str) -> list[float]:
        return dashboard.values(address, expressions[panel])

    # What the panels say is so.
    assert values("Instances up A") == [1]
    assert values("Bundles at once A") == [1]
    assert values("Degraded workers A") == [0]
    assert values("Recall of the index A") == [1]
    assert 0 < values("Share answered from the cache A")[0] < 1


def test_the_target_is_up_and_the_rules_work(prometheus: httpx.Client, traffic: None) -> None:
    until = time.monotonic() + 30
    while True:
        (target,) = prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]
        groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        found = {rule["name"]: rule for group in groups for rule in group["rules"]}
        if target["health"] == "up" and all(rule["health"] == "ok" for rule in found.values()):
            break
        assert time.monotonic() < until, (target, found)
        time.sleep(0.5)
    assert set(found) == {rule["alert"] for rule in rules()}
    firing = [name for name, rule in found.items() if rule["state"] == "firing"]
    assert not firing


def test_alerts_fire_when_they_should() -> None:
    run = subprocess.run(
        [tool("promtool"), "test", "rules", "alerts-test.yml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    tested = (MONITORING / "alerts-test.yml").read_text(encoding="utf-8")
    # Each alert fires in one of the tests and stays quiet in another.
    for rule in rules():
        name = rule["alert"]
        assert re.search(rf"alertname: {name}\n\s+exp_alerts:", tested), f"no test in which {name} fires"
        assert re.search(rf"alertname: {name}}}", tested), f"no test in which {name} stays quiet"


def test_metrics_alerts_and_the_guide_name_the_same(
    expressions: dict[str, str], service: str, traffic: None
) -> None:
    guide = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    until = time.monotonic() + 60
    while True:
        text = httpx.get(f"{service}/metrics").text
        told = set(re.findall(r"^# TYPE (bidmatch_\w+)", text, re.MULTILINE))
        if {"bidmatch_clients_refused_total", "bidmatch_recall", "bidmatch_query_coverage"} <= told:
            break
        assert time.monotonic() < until
        time.sleep(0.5)
    assert set(METRIC.findall(guide)) == told
    series = told | {f"{name}{end}" for name in told for end in ("_bucket", "_sum", "_count")}
    for where in (*expressions.values(), *(rule["expr"] for rule in rules())):
        assert set(METRIC.findall(where)) <= series, where
    assert set(re.findall(r"\bBidmatch[A-Z]\w+", guide)) == {rule["alert"] for rule in rules()}
