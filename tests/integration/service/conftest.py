"""A tiny bundle whose every score is known; the service in this process, and in processes of its own."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hnswlib
import httpx
import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from bidmatch.base.files import atomic_dir
from export.bundle import format as fmt
from export.bundle.read import open_bundle
from export.bundle.write import create_vectors, finish, write_phrases, write_tokenizer
from export.graph import BuiltIndex
from service.admin import Phrases
from service.app import App
from service.live.store import LiveStore
from service.security import Guard
from service.serving import Serving
from service.settings import Settings

DIM = 16
HALF = DIM // 2
ENGLISH = "red blue green running hiking shoes boots socks tent cheap women men kids for sale waterproof"
WORDS = f"{ENGLISH} трава зелёная größe straße".split()
# Phrases of equal key, with different match types; HTML; an odd spelling.
PHRASES = [
    ("p0", "red running shoes", "broad"),
    ("p1", "Red Running Shoes", "exact"),
    ("p2", "red  shoes", "phrase"),
    ("p3", "blue hiking boots", "exact"),
    ("p4", "<img src=x onerror=alert(1)> & <b>tent</b>", None),
    ("p5", "зелёная трава", "broad"),
    ("p6", "STRASSE", "exact"),
]


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def _encoder(table: np.ndarray) -> bytes:
    """Mean of word vectors, each half at unit length: the shape of the real encoder, by hand."""
    nodes = [
        helper.make_node("Gather", ["table", fmt.INPUT_IDS], ["words"]),
        helper.make_node("Cast", [fmt.ATTENTION_MASK], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
        helper.make_node("Mul", ["words", "mask3"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "one"], ["sum"], keepdims=0),
        helper.make_node("Split", ["sum", "halves"], ["d", "c"], axis=1),
    ]
    for half in "dc":
        nodes += [
            helper.make_node("ReduceL2", [half, "one"], [f"{half}_length"], keepdims=1),
            helper.make_node("Max", [f"{half}_length", "tiny"], [f"{half}_safe"]),
            helper.make_node("Div", [half, f"{half}_safe"], [f"{half}_unit"]),
        ]
    nodes.append(helper.make_node("Concat", ["d_unit", "c_unit"], [fmt.EMBEDDING], axis=1))
    constants = {
        "table": table,
        "last": np.array([2]),
        "one": np.array([1]),
        "halves": np.array([HALF, HALF]),
        "tiny": np.array(1e-12, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "encoder",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"])
            for name in (fmt.INPUT_IDS, fmt.ATTENTION_MASK)
        ],
        [helper.make_tensor_value_info(fmt.EMBEDDING, TensorProto.FLOAT, ["n", DIM])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 phrases over 20 words: [Φ_D ⊕ N(Ψ)] with Φ_D the encoder's and Ψ drawn at random."""
    rng = np.random.default_rng(7)
    vocabulary = {"[UNK]": 0} | {word: i + 1 for i, word in enumerate(WORDS)}
    table = rng.normal(size=(len(vocabulary), DIM)).astype(np.float32)
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    drawn = {" ".join(rng.choice(ENGLISH.split(), size=4, replace=False)) for _ in range(600)}
    phrases = PHRASES + [(f"q{i}", text, "broad") for i, text in enumerate(sorted(drawn)[:393])]
    ids, texts, kinds = (list(column) for column in zip(*phrases, strict=True))
    means = np.stack([table[tokenizer.encode(text.lower()).ids].sum(0) for text in texts])
    vectors = np.concatenate([_unit(means[:, :HALF]), _unit(rng.normal(size=(len(texts), HALF)))], 1)
    vectors = vectors.astype(np.float32)
    index = hnswlib.Index("ip", DIM)
    index.init_index(len(texts), M=16, ef_construction=200, random_seed=1)
    index.add_items(vectors, np.arange(len(texts)), num_threads=1)
    path = tmp_path_factory.mktemp("tiny") / "bundle"
    with atomic_dir(path) as folder:
        (folder / fmt.ENCODER_FP32).write_bytes(_encoder(table))
        write_tokenizer(folder, tokenizer.to_str())
        write_phrases(folder, pa.table({"id": ids, "text": texts, "match_type": kinds}))
        mapped = create_vectors(folder, len(texts), DIM)
        mapped[:] = vectors
        mapped.flush()
        BuiltIndex(index, vectors).save(folder)
        finish(folder, _record(len(texts)))
    return path


def _record(phrases: int) -> dict[str, object]:
    return {
        "created": "2024-01-01T00:00:00+00:00",
        "model": fmt.ModelRecord(id="by-hand", kind="bag", name="none", config={}),
        "dim": DIM,
        "encoder_dim": HALF,
        "metric": "ip",
        "blend": None,
        "counts": fmt.Counts(phrases=phrases, train_queries=0, validation_queries=0, test_queries=0),
        "encoder": fmt.EncoderRecord(
            file="encoder.onnx",
            precision="fp32",
            opset=18,
            max_tokens=None,
            parity=fmt.Parity(queries=0, min_cosine=1.0, mean_cosine=1.0),
            quality_bound=0.5,
            candidates=[],
        ),
        "index": fmt.IndexRecord(
            M=16,
            ef_construction=200,
            ef=100,
            k=100,
            results=100,
            target_recall=0.99,
            recall=1.0,
            reached=True,
            queries=0,
            query_source="phrases",
            seed=1,
            build_threads=1,
            build_seconds=0.0,
            curve=[],
        ),
        "rescore": None,
        "data": fmt.DataRecord(
            fingerprint="none",
            split=fmt.SplitInfo(kind="given", share=0.0, seed=0, train_queries=0, test_queries=0),
        ),
        "quality": fmt.Quality(queries=0, propensity={}, exact={}, index={}, served={}),
        "calibration": None,
        "measured_on": {"cpu": platform.processor()},
        "versions": {},
        "licences": [],
    }


class Application:
    """The service in this process, asked without a server.

    Args:
        bundle: what answers.
        guard: who may do what; None for anyone anything.
        settings: those that are not the defaults.
    """

    def __init__(self, bundle: Path, guard: Guard | None = None, **settings: Any):
        self.settings = Settings(**{"bundle": bundle, "canary": 0.0} | settings)
        live = self.settings.live
        self.store = None if live is None else LiveStore.open(live)
        self.serving = Serving(
            open_bundle(bundle),
            self.settings.engine(),
            cache_bytes=self.settings.cache_mb * 1_000_000,
            store=self.store,
            probes=self.settings.probes,
        )
        self.serving.start()
        self.phrases = Phrases(self.serving, self.store)
        self.app = App(
            self.serving,
            self.settings,
            guard=guard or Guard(None, None, required=False),
            phrases=self.phrases,
        )

    def client(self) -> httpx.AsyncClient:
        """For several requests of one event loop."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://service")

    def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        """The answer to one request, when it is counted, too."""

        async def asking() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **content)

        answer = asyncio.run(asking())
        while self.app.matcher.batcher._in_work:
            time.sleep(0.001)
        return answer

    def close(self) -> None:
        """End all of its threads."""
        asyncio.run(self.app.matcher.batcher.close())
        self.app.canary.stop()
        self.serving.stop()
        self.phrases.close()
        if self.store is not None:
            self.store.close()


@pytest.fixture
def application() -> Iterator[Callable[..., Application]]:
    """`application(bundle, cache_mb=0)` is the service under these settings, in this process."""
    made: list[Application] = []

    def make(bundle: Path, guard: Guard | None = None, **settings: Any) -> Application:
        made.append(Application(bundle, guard, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Server:
    """`bidmatch serve`, parent and workers, in processes of its own."""

    def __init__(self, *arguments: str):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BIDMATCH_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bidmatch", "serve", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        self.said: list[str] = []
        self.url: str | None = None
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(60), self.text()
        assert self.url is not None, self.text()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip("\n"))
            # As a line of text, or within one of JSON.
            if ready := re.search(r'(?:^|")ready: (http://[^\s"]+)', line):
                self.url = ready[1]
                self._ready.set()
        self._ready.set()

    def text(self) -> str:
        """All that it has said."""
        return "\n".join(self.said)

    @property
    def address(self) -> tuple[str, int]:
        assert self.url is not None
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        code = self.process.wait(30)
        self._reader.join(10)
        return code


@pytest.fixture(scope="session")
def start(tiny_bundle: Path) -> Callable[..., object]:
    """`with start("--queue", "4") as server:` serves the tiny bundle under these settings."""

    @contextmanager
    def starting(*arguments: str) -> Iterator[Server]:
        server = Server("--bundle", str(tiny_bundle), *arguments)
        try:
            yield server
        finally:
            try:
                server.stop()
            finally:
                server.process.kill()
        assert "Traceback" not in server.text(), server.text()

    return starting


@pytest.fixture(scope="session")
def server(start: Callable[..., object]) -> Iterator[Server]:
    """One server with default settings for all tests that leave it as it is."""
    with start() as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client
