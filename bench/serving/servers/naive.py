"""The service most people write: FastAPI, sentence-transformers and hnswlib in a plain async handler.

Reads where its model, index and phrases are from BENCH_* variables. The heads that make 64 of MiniLM's 384
dimensions are those of the bundle, so that it searches the same index with the same vectors.
"""

from __future__ import annotations

import os

import hnswlib
import numpy as np
import pyarrow as pa
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

from bench.serving.servers.heads import Heads

model = SentenceTransformer(os.environ["BENCH_MODEL"], device="cpu")
heads = Heads(os.environ["BENCH_HEADS"])
with pa.memory_map(os.environ["BENCH_PHRASES"]) as source:
    phrases = pa.ipc.open_file(source).read_all().to_pydict()
index = hnswlib.Index(space="ip", dim=64)
index.load_index(os.environ["BENCH_INDEX"])
index.set_ef(int(os.environ["BENCH_EF"]))

app = FastAPI()


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
    # The packaged model hands out unit vectors, and the heads are made for longer ones.
    vector = heads(model.encode([request.query]) * np.float32(heads.length))
    rows, distances = index.knn_query(vector, k=request.k)
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
