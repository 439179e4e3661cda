"""States of the application that a sound process hardly gets into."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from service.app import create_app
from service.engine import Engine
from service.settings import Settings


@pytest.fixture
def engine(tiny_bundle: Path) -> Engine:
    return Engine.load(tiny_bundle)


def client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://service")


def test_a_failure_of_ours_is_a_problem_too_and_the_next_request_is_answered(
    engine: Engine, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(engine, Settings(bundle=tiny_bundle))

    async def scene() -> None:
        async with client(app) as http:
            with monkeypatch.context() as broken:
                broken.setattr(engine, "_index", None)
                failed = await http.post("/match", json={"query": "red tent"})
            assert failed.status_code == 500
            assert failed.headers["content-type"] == "application/problem+json"
            assert failed.json()["type"] == "urn:bidmatch:internal-error"
            assert "NoneType" not in failed.text
            assert (await http.post("/match", json={"query": "red tent"})).status_code == 200
            assert 'status="500"} 1.0' in (await http.get("/metrics")).text

    asyncio.run(scene())
    assert "AttributeError" in caplog.text


def test_when_stopping_it_is_alive_but_not_ready(engine: Engine, tiny_bundle: Path) -> None:
    app = create_app(engine, Settings(bundle=tiny_bundle))

    async def scene() -> None:
        async with client(app) as http:
            async with app.router.lifespan_context(app):
                assert (await http.get("/readyz")).status_code == 200
            assert (await http.get("/healthz")).status_code == 200
            for answer in (await http.get("/readyz"), await http.post("/match", json={"query": "tent"})):
                assert answer.status_code == 503
                assert answer.json()["type"] == "urn:bidmatch:stopping"

    asyncio.run(scene())
