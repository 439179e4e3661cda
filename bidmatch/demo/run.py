"""The whole chain on a simulated log: simulate, train, export, serve, match over HTTP, measure."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError, ConfigError, MissingDependencyError
from bidmatch.base.files import atomic_file
from bidmatch.demo.server import post_match, serving
from bidmatch.evaluation import Popularity, measure_lexical, query_counts
from trainer.data.dataset import Dataset
from trainer.data.options import ReadOptions
from trainer.data.read import read_dataset

MARKER = "demo.json"
CALLS = 5
PHRASES_A_CALL = 5
_STAGES = 6
_ROWS = {
    "bidmatch": "bidmatch, as served",
    "tfidf": "TF-IDF, query to phrase text",
    "nearest": "TF-IDF, 20 nearest training queries",
    "hybrid": "sum of these two",
}


@dataclass(frozen=True)
class Demo:
    """A demo's folder and sizes.

    Attributes:
        out: everything goes here.
        phrases: of the simulated log.
        queries: drawn for it.
        seed: of the log, of training and of the choice of queries shown.
        train_arguments: further arguments of `bidmatch train`.
    """

    out: Path
    phrases: int
    queries: int
    seed: int
    train_arguments: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """The simulated click log."""
        return self.out / "log.tsv"

    @property
    def run(self) -> Path:
        """The training run."""
        return self.out / "run"

    @property
    def bundle(self) -> Path:
        """The exported bundle."""
        return self.out / "bundle"

    @property
    def report(self) -> Path:
        """Figures and matches as JSON."""
        return self.out / "report.json"

    @property
    def server_log(self) -> Path:
        """What the server said."""
        return self.out / "server.log"


def run_demo(demo: Demo) -> dict[str, Any]:
    """Run all stages and write `report.json`.

    Returns:
        The report: "arguments", "seconds" of each stage, "data", "matches" of the calls, "metrics" of the
        bundle and of the baselines on the same held-out queries.

    Raises:
        BidmatchError: a stage failed, or the folder is no demo's.
    """
    missing = [name for name in ("torch", "onnx", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"the demo trains and exports, and {missing[0]} is not installed",
            hint="Install the training extra: pip install '.[train]' in bidmatch's folder",
        )
    started = time.monotonic()
    _clear(demo)
    say("No ads click log is public, so this one is simulated: the figures show that the chain works,")
    say("not how well it does on your traffic. Every step is a command you can run on your own log.")
    with _stage(demo, 1, "simulate", f"a click log with {demo.phrases:,} phrases"):
        sizes = ("--phrases", str(demo.phrases), "--queries", str(demo.queries), "--seed", str(demo.seed))
        _bidmatch("simulate", *sizes, "--out", str(demo.log))
    with _stage(demo, 2, "train", "the dual encoder and the classifier table"):
        settings = ("--set", f"seed={demo.seed}", *demo.train_arguments)
        _bidmatch("train", "--data", str(demo.log), "--out", str(demo.run), "--preset", "wide", *settings)
    with _stage(demo, 3, "export", "an ONNX encoder and an HNSW index"):
        _bidmatch("export", "--checkpoint", str(demo.run), "--out", str(demo.bundle))
    with _stage(demo, 4, "serve", "the bundle, and ask it"):
        dataset = _dataset(demo)
        matches = _ask(demo, dataset)
    with _stage(demo, 5, "eval", "the bundle on held-out queries, through the code that serves"):
        evaluated = orjson.loads(
            _bidmatch("eval", "--bundle", str(demo.bundle), "--data", str(demo.log), "--json", capture=True)
        )
    with _stage(demo, 6, "baselines", "on the same queries"):
        constants = evaluated["propensity"]
        popularity = Popularity(
            query_counts(dataset.train), len(dataset.train), constants["A"], constants["B"]
        )
        lexical = measure_lexical(dataset, 100, popularity)
    report = {
        "arguments": {"phrases": demo.phrases, "queries": demo.queries, "seed": demo.seed},
        "seconds": demo.seconds | {"total": time.monotonic() - started},
        "data": {
            "simulated": True,
            "training_queries": len(dataset.train),
            "held_out_queries": len(dataset.test),
            "phrases": len(dataset.phrases),
            "fingerprint": dataset.report.fingerprint,
        },
        "propensity": constants,
        "bundle": evaluated["bundle_id"],
        "matches": matches,
        "metrics": {"bidmatch": evaluated["metrics"]} | {n: q.metrics for n, q in lexical.items()},
        "by_frequency": {"bidmatch": evaluated["by_frequency"]}
        | {n: q.by_frequency for n, q in lexical.items()},
    }
    _write(demo.report, report)
    say(f"Done in {report['seconds']['total']:.0f} s. Everything is in {demo.out}; to serve it again:")
    program = "bidmatch" if shutil.which("bidmatch") else str(Path(sys.executable).with_name("bidmatch"))
    say(f"  {shlex.quote(program)} serve --bundle {shlex.quote(str(demo.bundle))}")
    return orjson.loads(demo.report.read_bytes())


def _clear(demo: Demo) -> None:
    """Make the folder, or empty it of what an earlier demo left."""
    marker = demo.out / MARKER
    if demo.out.exists() and not demo.out.is_dir():
        raise ConfigError(f"{demo.out} is a file", hint="Name a folder with --out.")
    if demo.out.is_dir() and any(demo.out.iterdir()) and not marker.is_file():
        raise ConfigError(
            f"{demo.out} holds something that no demo has left there", hint="Name another folder with --out."
        )
    demo.out.mkdir(parents=True, exist_ok=True)
    arguments = {"phrases": demo.phrases, "queries": demo.queries, "seed": demo.seed}
    _write(marker, arguments)
    for folder in (demo.run, demo.bundle):
        if folder.is_dir():
            shutil.rmtree(folder)
    for file in (demo.log, demo.report, demo.server_log):
        file.unlink(missing_ok=True)


def _write(path: Path, value: Any) -> None:
    with atomic_file(path) as partial:
        partial.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))


@contextmanager
def _stage(demo: Demo, number: int, name: str, what: str) -> Iterator[None]:
    say(f"\n[{number}/{_STAGES}] {name}: {what}")
    started = time.monotonic()
    yield
    demo.seconds[name] = time.monotonic() - started
    say(f"[{number}/{_STAGES}] {name}: {demo.seconds[name]:.1f} s")


def _bidmatch(*arguments: str, capture: bool = False) -> bytes:
    """Run one command of this program in a process of its own; its stdout, where captured."""
    say(f"$ bidmatch {shlex.join(arguments)}")
    # A command's results are no results of the demo, whose stdout may be read by a program.
    output = subprocess.PIPE if capture else sys.stderr
    done = subprocess.run([sys.executable, "-m", "bidmatch", *arguments], stdout=output, check=False)
    if done.returncode:
        raise BidmatchError(f"bidmatch {arguments[0]} failed with exit code {done.returncode}")
    return done.stdout or b""


def _dataset(demo: Demo) -> Dataset:
    """The log, split as the bundle records."""
    from export.bundle.read import read_manifest

    split = read_manifest(demo.bundle).data.split
    return read_dataset([demo.log], ReadOptions(test_share=split.share, split_seed=split.seed))


def _ask(demo: Demo, dataset: Dataset) -> list[dict[str, Any]]:
    """Real HTTP calls with held-out queries drawn at random, and which of the answers were clicked."""
    n = len(dataset.test)
    chosen = np.random.default_rng(demo.seed).choice(n, min(CALLS, n), replace=False)
    texts = dataset.phrases["text"].to_pylist()
    out = []
    with serving(demo.bundle, demo.server_log) as address:
        say(f"serving at {address}; {len(chosen)} held-out queries, drawn at random")
        for row in chosen:
            query = dataset.test.queries[row].as_py()
            answer, seconds = post_match(address, query, PHRASES_A_CALL)
            lo, hi = dataset.test.clicks.indptr[row : row + 2]
            clicked = {texts[column] for column in dataset.test.clicks.indices[lo:hi]}
            matches = [match | {"clicked": match["phrase"] in clicked} for match in answer["matches"]]
            out.append({"query": query, "clicked": sorted(clicked), "ms": 1e3 * seconds, "matches": matches})
    return out


def tables(report: dict[str, Any]) -> list[Table]:
    """The report for a person: what was answered, and how good that is."""
    return [_match_table(report["matches"]), _metric_table(report)]


def _match_table(matches: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        title="Answers of POST /match to held-out queries (* clicked in the held-out log)",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("query")
    table.add_column("")
    table.add_column("phrase")
    for name in ("score", "encoder", "classifier", "ms"):
        table.add_column(name, justify="right")
    for call in matches:
        for place, match in enumerate(call["matches"]):
            parts = match["parts"]
            table.add_row(
                "" if place else call["query"],
                "*" if match["clicked"] else "",
                match["phrase"],
                f"{match['score']:.3f}",
                f"{parts['encoder']:.3f}",
                f"{parts['classifier']:.3f}",
                "" if place else f"{call['ms']:.1f}",
                end_section=place == len(call["matches"]) - 1,
            )
    return table


def _metric_table(report: dict[str, Any]) -> Table:
    names = ["P@1", "P@3", "P@5", "PSP@1", "PSP@5", "recall@10", "recall@100"]
    data, constants = report["data"], report["propensity"]
    table = Table(
        title=f"Percent on {data['held_out_queries']:,} held-out queries of the simulated log, "
        f"{data['phrases']:,} phrases (PSP: A = {constants['A']:g}, B = {constants['B']:g})",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for method, label in _ROWS.items():
        values = report["metrics"][method]
        table.add_row(label, *("-" if values[name] is None else f"{values[name]:.1f}" for name in names))
    return table
