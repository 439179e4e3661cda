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


def endpoint(line: str) -> str:
    method = re.search(r"-X (\w+)", line)
    path = re.search(r"localhost:8000(/[\w./]*)", line)
    assert path is not None
    return f"{method[1] if method else 'POST' if ' -d ' in line else 'GET'} {path[1]}"


def test_every_endpoint_has_a_line() -> None:
    assert {endpoint(line) for line in CURLS} == ENDPOINTS


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("keys", ["without_keys", "with_keys"])
@pytest.mark.parametrize("line", CURLS)
def test_curl_lines(line: str, keys: str, request: pytest.FixtureRequest) -> None:
    service = request.getfixturevalue(keys)
    if endpoint(line) != "POST /phrases" and "p81" in line:
        typed(next(line for line in CURLS if endpoint(line) == "POST /phrases"), service)
    if keys == "with_keys" and "/match" in line:
        # As the page says.
        line += ' -H "Authorization: Bearer $KEY"'
    said = typed(line, service)
    if "/metrics" in line:
        assert "bidmatch_queue_depth" in said
    else:
        answer = json.loads(said)
        assert "detail" not in answer, answer
        assert ("openapi" in answer) == ("/openapi.json" in line)


def typed(line: str, service: Any) -> str:
    """What a shell prints for a line of the page."""
    keys = {"ADMIN_KEY": service.admin_key, "KEY": service.match_key, "NO_PROXY": "*"}
    command = line.replace("localhost:8000", service.url.removeprefix("http://"))
    command = command.replace("/bundles/tuesday", str(service.other))
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env=os.environ | keys, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python(without_keys: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("ADMIN_KEY", without_keys.admin_key)
    names: dict[str, Any] = {}
    said = []
    for block in PYTHON:
        exec(
            compile(block.replace("http://localhost:8000", without_keys.url), "docs/client.md", "exec"), names
        )
        said.append(capsys.readouterr().out)
    first, awaited, filtered, caught, phrases = said
    assert first.startswith("p0 red running shoes ") or first.startswith("p1 Red Running Shoes ")
    assert awaited.startswith("[('p")
    assert (filtered, caught, phrases) == ("", "", "active\n")
    assert names["answer"].matches[0].id == "p0"
    assert len(names["matches"]) == 5
