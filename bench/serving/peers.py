"""Starts the services that are measured beside ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.environments import Environment, prepare
from bench.serving.processes import Server, free_port, running
from export.bundle.format import PHRASES
from export.bundle.read import read_manifest
from trainer.encoders.pretrained import packaged_minilm

# It pins numpy below 2 and sentence-transformers below 4; torch is that of the running environment.
INFINITY = Environment("infinity", ("infinity-emb[server,torch]==0.0.78",), inherits=True)
# The flags under which `bidmatch serve` runs uvicorn.
_AS_OURS = (
    "--loop",
    "uvloop",
    "--http",
    "httptools",
    "--no-access-log",
    "--no-server-header",
    "--no-proxy-headers",
)
_EMBEDDER = "minilm"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
}


@dataclass(frozen=True)
class Peer:
    """What a service needs to answer like ours.

    Attributes:
        bundle: whose phrases it loads, and whose ef it searches with.
        index: hnswlib's index of the same graph, see `bench.serving.bundles.hnswlib_of`.
        heads: the bundle's heads, see `bench.serving.bundles.heads_of`.
    """

    bundle: Path
    index: Path
    heads: Path

    def environment(self) -> dict[str, str]:
        """Where these are, for a process that is started."""
        return {
            "BENCH_INDEX": str(self.index),
            "BENCH_PHRASES": str(self.bundle / PHRASES),
            "BENCH_EF": str(read_manifest(self.bundle).index.ef),
            "BENCH_HEADS": str(self.heads),
            "BENCH_MODEL": str(packaged_minilm()),
        } | _OFFLINE


def _uvicorn(application: str, port: int, flags: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "uvicorn",
        application,
        "--port",
        str(port),
        "--log-level",
        "warning",
        *flags,
    ]


@contextmanager
def naive(peer: Peer, folder: Path, threads: int | None) -> Iterator[Server]:
    """`servers.naive` under uvicorn as it comes, one worker; torch with so many threads, or as it likes."""
    port = free_port()
    name = "naive" if threads is None else f"naive-{threads}"
    told = peer.environment() | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    command = _uvicorn("bench.serving.servers.naive:app", port, ["--no-access-log"])
    with running(name, command, folder, told, port=port, ready="/healthz") as server:
        yield server


@contextmanager
def infinity(peer: Peer, folder: Path) -> Iterator[tuple[Server, Server]]:
    """The gateway in front of infinity-emb with the same MiniLM, and infinity-emb itself."""
    python = prepare(INFINITY)
    port = free_port()
    command = [
        str(python.parent / "infinity_emb"),
        *("v2", "--model-id", str(packaged_minilm()), "--served-model-name", _EMBEDDER),
        *("--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-vector-disk-cache"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
    ]
    with running("infinity", command, folder, _OFFLINE, port=port, ready="/health") as embedder:
        address = f"http://127.0.0.1:{port}"
        told = peer.environment() | {"BENCH_EMBEDDINGS": address, "BENCH_MODEL_NAME": _EMBEDDER}
        port = free_port()
        command = _uvicorn("bench.serving.servers.gateway:app", port, ["--no-access-log"])
        with running("gateway", command, folder, told, port=port, ready="/healthz") as gateway:
            yield gateway, embedder


@contextmanager
def route(answer: Path, folder: Path, workers: int) -> Iterator[Server]:
    """An empty FastAPI route that returns these bytes, under the flags and with the workers of ours."""
    port = free_port()
    flags = [*_AS_OURS, "--workers", str(workers)]
    command = _uvicorn("bench.serving.servers.route:app", port, flags)
    told = {"BENCH_ANSWER": str(answer)}
    with running("route", command, folder, told, port=port, ready="/openapi.json") as server:
        yield server


@contextmanager
def bare(answer: Path, folder: Path) -> Iterator[Server]:
    """Fixed bytes from a bare socket: what the load generator itself can do."""
    port = free_port()
    command = [sys.executable, "-m", "bench.serving.servers.bare", str(port), str(answer)]
    with running("bare", command, folder, port=port, ready="/") as server:
        yield server
