"""Scores the distinct queries on a Ray cluster: actors with an engine each, fed by Ray Data.

This process alone reads the log and writes the output. Parts of the queries go to the actors, and their
results come back, through Ray's object store; so the machines of the cluster need no file of the run, only
the bundle. How many parts are on their way is bounded by the object store's share that Ray Data may use.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from bidmatch.base.errors import BidmatchError, ConfigError, MissingDependencyError
from bidmatch.base.files import atomic_file
from service.engine import Engine, EngineSettings
from service.memory import keep_little
from service.scoring.parts import Job, ScoredParts, Scorer, read_results, score_part, write_results
from service.settings import usable_cpus

_CLIENT = "ray://"
_STORE_BYTES = 256 << 20
_FAILED_STARTS = 3
_REACH_S = 10.0
_GO_ON = "What was done so far is kept; the same command goes on with it."
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")
_ASKED = pa.schema([("part", pa.int64()), ("queries", pa.large_binary())])
_ANSWERED = pa.schema(
    [
        ("part", pa.int64()),
        ("queries", pa.int64()),
        ("results", pa.large_binary()),
        ("problem", pa.large_binary()),
    ]
)


@contextmanager
def ray_scorer(address: str | None, actors: int | None, threads: int) -> Iterator[Scorer]:
    """Yields a `Scorer` on a Ray cluster, with which this process is connected meanwhile.

    The bundle's path has to lead to the same bundle on each machine.

    Args:
        address: `auto` for the cluster that this machine belongs to, or that cluster's HOST:PORT; None starts
            a Ray of this machine's own, which ends with the context.
        actors: how many; None for as many as the cluster's processors allow.
        threads: parts that an actor works on at once, for which it takes as many processors.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: the address leads to no cluster that can be used from here, or no machine there has
            enough processors for an actor.
    """
    ray = _ray(address)
    _reach(address)
    start: dict[str, Any] = {}
    if address is None:
        actors = actors or max(1, usable_cpus() // threads)
        start = {"num_cpus": actors * threads, "num_gpus": 0, "include_dashboard": False}
    # What Ray tells of workers that died it would print among the results.
    with redirect_stdout(sys.stderr):
        try:
            ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **start)
        except (ConnectionError, RuntimeError, ValueError) as problem:
            raise ConfigError(
                f"no Ray cluster can be used at {address or 'this machine'}: {_gist(problem)}",
                hint="`ray status` says whether this machine belongs to a cluster, which `auto` then finds. "
                "Without --ray-address a Ray of this machine's own is started.",
            ) from problem
        try:
            yield _RayScorer(ray, actors or _most_actors(ray, threads), threads)
        finally:
            ray.shutdown()


def _ray(address: str | None) -> Any:
    """The package, quiet and without reports to its makers."""
    if address is not None and address.startswith(_CLIENT):
        raise ConfigError(
            f"Ray Data does not work from outside of a cluster, as {address} would have it",
            hint="Run the command on a machine of the cluster, such as by `ray job submit`, with "
            "--ray-address auto.",
        )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # It takes actors that are started anew for an error worth a line.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as missing:
        raise MissingDependencyError(
            f"--engine ray needs the package {missing.name}, which is not installed",
            hint="Install the extra: pip install 'bidmatch[scale]'",
        ) from missing
    # What it has to say goes to files of its session, and what is wrong is raised.
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)
    return ray


def _reach(address: str | None) -> None:
    """Refuse an address that nobody answers at: Ray would try for as long as one lets it."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as problem:
        raise ConfigError(
            f"nothing answers at {address}: {problem}",
            hint="It is the head's address of the cluster, as `ray start --head` says it.",
        ) from problem


def _most_actors(ray: Any, threads: int) -> int:
    processors = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    most = sum(int(count // threads) for count in processors)
    if most:
        return most
    raise ConfigError(
        f"no machine of the cluster has {threads} processors, and an actor takes as many as it has threads",
        hint=f"The largest has {max(processors, default=0):.0f}: give fewer --threads.",
    )


@dataclass(frozen=True)
class _RayScorer:
    """A `Scorer`.

    Attributes:
        ray: the package, connected.
        actors: how many score at once.
        threads: see `ray_scorer`.
    """

    ray: Any
    actors: int
    threads: int

    def __call__(self, engine: Engine, job: Job) -> ScoredParts:
        """Score what is not kept, by Ray; keep it here."""
        missing = [number for number in job.parts if job.kept is None or not job.kept(number).exists()]
        with pa.OSFile(str(job.queries)) as file, closing(self._answers(engine, job, missing)) as answers:
            reader = pa.ipc.open_file(file)
            for number in job.parts:
                kept = None if job.kept is None else job.kept(number)
                if kept is not None and kept.exists():
                    yield read_results(kept), reader.get_batch(number).num_rows
                    continue
                results, queries = next(answers)
                if kept is not None:
                    with atomic_file(kept) as partial:
                        partial.write_bytes(results)
                yield pa.ipc.open_file(results).read_all(), queries

    def _answers(
        self, engine: Engine, job: Job, parts: list[int]
    ) -> Generator[tuple[pa.Buffer, int], None, None]:
        """The results of parts in their order, as `write_results` writes them; how many queries each has."""
        if not parts:
            return
        with closing(self._rows(_Task.of(engine, job), job.queries.absolute(), parts)) as rows:
            for number in parts:
                try:
                    row = next(rows, None)
                except self._failures() as failure:
                    reason = f"scoring on Ray failed: {_gist(failure)}"
                    raise BidmatchError(reason, hint=_GO_ON) from failure
                if row is None or row["part"][0].as_py() != number:
                    raise BidmatchError(f"Ray left out the results of part {number}", hint=_GO_ON)
                problem = row["problem"][0].as_py()
                if problem is not None:
                    raise pickle.loads(problem)
                yield row["results"][0].as_buffer(), row["queries"][0].as_py()

    def _failures(self) -> tuple[type[Exception], ...]:
        return self.ray.exceptions.RayError, self.ray.data.exceptions.ExecutionTimeoutError

    def _rows(self, task: _Task, queries: Path, parts: list[int]) -> Generator[pa.Table, None, None]:
        """The rows of `_ANSWERED`, one at a time, in the order of `parts`."""
        data = self.ray.data
        actors = min(self.actors, len(parts))
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.max_consecutive_actor_init_deaths = _FAILED_STARTS
        # A block is full with its first row: parts are given out one by one.
        context.target_max_block_size = 1
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = data.ExecutionResources.for_limits(
            object_store_memory=_STORE_BYTES * actors * self.threads
        )
        asked = data.from_arrow(pa.table({"part": pa.array(parts, pa.int64())})).map_batches(
            _asked,
            batch_format="pyarrow",
            fn_kwargs={"queries": queries},
            # It waits for no processor, which the actors may have taken all.
            num_cpus=0,
            label_selector={"ray.io/node-id": self.ray.get_runtime_context().get_node_id()},
        )
        answered = asked.map_batches(
            _Actor,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_args=(task,),
            num_cpus=self.threads,
            compute=data.ActorPoolStrategy(
                size=actors,
                max_concurrent_calls_per_actor=self.threads,
                enable_true_multi_threading=self.threads > 1,
            ),
        )
        rows: Generator[pa.Table, None, None] = iter(
            answered.iter_batches(batch_size=1, batch_format="pyarrow")
        )
        return rows


def _asked(parts: pa.Table, queries: Path) -> Iterator[pa.Table]:
    """Rows of `_ASKED`. Runs where the file is: in a task on this process' machine."""
    with pa.OSFile(str(queries)) as file:
        reader = pa.ipc.open_file(file)
        for number in parts["part"].to_pylist():
            batch = reader.get_batch(number)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema, options=_LZ4) as out:
                out.write_batch(batch)
            yield _row(_ASKED, number, sink.getvalue().to_pybytes())


@dataclass(frozen=True)
class _Task:
    """What an actor has to know.

    Attributes:
        bundle: the bundle's path, the same on each machine.
        settings: of the engine.
        bundle_id: of the bundle that is wanted.
        index_sha256: of its index.
        k: most matches for one query.
        min_score: see `Engine.match`.
    """

    bundle: Path
    settings: EngineSettings
    bundle_id: str
    index_sha256: str
    k: int
    min_score: float | None

    @classmethod
    def of(cls, engine: Engine, job: Job) -> _Task:
        """The task of scoring this job as this engine would."""
        manifest = engine.bundle.manifest
        path = engine.bundle.path.absolute()
        return cls(path, engine.settings, manifest.bundle_id, manifest.index_sha256, job.k, job.min_score)


class _Actor:
    """Scores parts in a process of Ray's.

    What a person can act on is an answer of its own, not an exception: Ray would take an actor that cannot
    start for one that is to be started again, and would put its own traces around each reason.
    """

    def __init__(self, task: _Task):
        # Each thread tokenises for itself, as in a run without Ray.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._task = task
        self._engine: Engine | BidmatchError
        try:
            self._engine = _load(task)
        except BidmatchError as problem:
            self._engine = problem

    def __call__(self, asked: pa.Table) -> pa.Table:
        """The row of `_ANSWERED` for a row of `_ASKED`."""
        (number,) = asked["part"].to_pylist()
        try:
            if isinstance(self._engine, BidmatchError):
                raise self._engine
            queries = pa.ipc.open_stream(asked["queries"][0].as_buffer()).read_next_batch()
            sink = pa.BufferOutputStream()
            write_results(sink, score_part(self._engine, queries, self._task.k, self._task.min_score))
        except BidmatchError as problem:
            return _row(_ANSWERED, number, 0, None, pickle.dumps(_named(problem)))
        return _row(_ANSWERED, number, queries.num_rows, sink.getvalue().to_pybytes(), None)


def _load(task: _Task) -> Engine:
    keep_little()
    engine = Engine.load(task.bundle, task.settings)
    found = engine.bundle_id, engine.bundle.manifest.index_sha256
    if found != (task.bundle_id, task.index_sha256):
        raise ConfigError(
            f"{task.bundle} is bundle {found[0]} with index {found[1][:12]}, and the run is of "
            f"{task.bundle_id} with index {task.index_sha256[:12]}",
            hint="Put the same bundle on each machine of the cluster, or where all of them see it.",
        )
    return engine


def _named(problem: BidmatchError) -> BidmatchError:
    """The same, with the name of this machine."""
    kind = type(problem)
    return kind(f"on {socket.gethostname()}: {problem.reason}", hint=problem.hint)


def _row(schema: pa.Schema, *values: int | bytes | None) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, values, strict=True))], schema=schema)


def _gist(problem: BaseException) -> str:
    """One line that says what went wrong, without the trace that Ray puts into texts of other processes."""
    cause = getattr(problem, "cause", None) or problem
    return next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
