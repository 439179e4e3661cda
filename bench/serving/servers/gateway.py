"""A thin FastAPI service in front of an embedding server: POST /embeddings there, hnswlib here.

Reads where these are from BENCH_* variables.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hnswlib
import httpx
import numpy as np
import orjson
import pyarrow as pa
from fastapi import FastAPI
from pydantic import BaseModel

from bench.serving.servers.heads import Heads

MODEL = os.environ["BENCH_MODEL_NAME"]
heads = Heads(os.environ["BENCH_HEADS"])
with pa.memory_map(os.environ["BENCH_PHRASES"]) as source:
    phrases = pa.ipc.open_file(source).read_all().to_pydict()
index = hnswlib.Index(space="ip", dim=64)
index.load_index(os.environ["BENCH_INDEX"])
index.set_ef(int(os.environ["BENCH_EF"]))
limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
client = httpx.AsyncClient(
    base_url=os.environ["BENCH_EMBEDDINGS"], limits=limits, timeout=60, trust_env=False
)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Close the connections at the end."""
    yield
    await client.aclose()


app = FastAPI(lifespan=lifespan)


class Request(BaseModel):
    """What is asked."""

    query: str
    k: int = 10


class Match(BaseModel):
    """A phrase that was found."""

    id: str
    phrase: str
    score: float


class Answer(BaseModel):
    """What was found, best first."""

    matches: list[Match]


@app.post("/match")
async def match(request: Request) -> Answer:
    """The nearest phrases."""
    answer = await client.post("/embeddings", json={"model": MODEL, "input": [request.query]})
    answer.raise_for_status()
    embedding = orjson.loads(answer.content)["data"][0]["embedding"]
    # The embedding server hands out unit vectors, and the heads are made for longer ones.
    vector = heads(np.array([embedding], dtype=np.float32) * np.float32(heads.length))
    rows, distances = index.knn_query(vector, k=request.k, num_threads=1)
    return Answer(
        matches=[
            Match(id=phrases["id"][row], phrase=phrases["text"][row], score=1 - distance)
            for row, distance in zip(rows[0], distances[0], strict=True)
        ]
    )


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """It is there."""
    return {"status": "ok"}
