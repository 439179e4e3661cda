"""An empty FastAPI route that returns the bytes of the file BENCH_ANSWER, whatever is asked."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

ANSWER = Path(os.environ["BENCH_ANSWER"]).read_bytes()

app = FastAPI()


@app.post("/match")
async def match() -> Response:
    """Always the same."""
    return Response(ANSWER, media_type="application/json")
