"""What docs/client.md says to type works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "client.md").read_text(encoding="utf-8")
CURLS = re.findall(r"^curl .*$", PAGE, re.MULTILINE)
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ENDPOINTS = {
    "GET /match",
    "POST /match",
    "POST /phrases",
    "GET /phrases/p81",
    "DELETE /phrases/p81",
    "POST /phrases/p81/pause",
    "POST /phrases/p81/resume",
    "POST /admin/reload",
    "POST /admin/explain",
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",
    "GET /openapi.json",
}


def by_contract(text: str) -> bool:
    return any(
        word in text for word in ("/phrases", "/admin", "ADMIN_TOKEN", '"filter"', '"deny"', "filter=")
    )


def endpoint(line: str) -> str:
    method = re.search(r"-X (\w+)", line)
    path = re.search(r"localhost:8000(/[\w./]*)", line)
    assert path is not None
    return f"{method[1] if method else 'POST' if ' -d ' in line else 'GET'} {path[1]}"


def test_every_endpoint_has_a_line() -> None:
    assert {endpoint(line) for line in CURLS} == ENDPOINTS


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", CURLS)
def test_curl_lines(line: str, server: Any, contract: Any) -> None:
    url = contract.url if by_contract(line) else server.url
    if endpoint(line) != "POST /phrases" and "p81" in line:
        typed(next(line for line in CURLS if endpoint(line) == "POST /phrases"), contract.url, contract)
    said = typed(line, url, contract)
    if line.endswith("/metrics"):
        assert "bidmatch_queue_depth" in said
    else:
        answer = json.loads(said)
        assert "detail" not in answer, answer


def typed(line: str, url: str, contract: Any) -> str:
    """What a shell prints for a line of the page."""
    environment = os.environ | {"ADMIN_TOKEN": contract.admin_token, "NO_PROXY": "*"}
    command = line.replace("localhost:8000", url.removeprefix("http://"))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python(
    server: Any, contract: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("ADMIN_TOKEN", contract.admin_token)
    names: dict[str, Any] = {}
    for block in PYTHON:
        if "filter=" in block:
            # The client of this block was made by the first one, for the real service.
            names["client"] = names["Client"](contract.url, api_key=contract.admin_token)
        url = contract.url if by_contract(block) else server.url
        exec(compile(block.replace("http://localhost:8000", url), "docs/client.md", "exec"), names)
    said = capsys.readouterr().out
    assert "p0 red running shoes" in said
    assert said.endswith("active\n")
    assert len(PYTHON) == 5
