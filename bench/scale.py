"""What training costs at full scale: 1.3M simulated labels, batch and label pool of the UniDEC paper.

    python -m bench.scale [--labels N] [--encoder minilm] [--precision bf16 --precision fp32]
                          [--table-device cpu] [--json]
    torchrun --nproc-per-node 2 -m bench.scale ...          # the same on several GPUs of a machine

Ψ, its moments, the label texts and the click log have their full size; token ids and clicks are random, the
encoder has random weights of the named architecture (speed does not depend on their values). The queries of
a batch click and mine labels from one window, so wide that a batch's label pool is as large as the paper's:
that is what batches of similar queries do there. Steps are those of training, from sampling to the update,
each timed with the GPU idle before and after. The passes between epochs are timed on a part (or, for the
labels' bf16 encoding, the whole) and extended linearly to the whole, as the rows of the output say.

Projected hours = epochs x (steps an epoch x step + encoding of labels for the epoch's figures)
                + epochs / τ x (encoding of queries and labels + clustering + mining)
                + checkpoints, one in `checkpoint_seconds`.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log2
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
import torch
from scipy.optimize import brentq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bidmatch.base.console import emit_json, progress, say
from trainer.classifiers.pairs import new_classifiers
from trainer.clustering import balanced_clusters
from trainer.config import BatchConfig, TrainConfig
from trainer.corpus import TokenSource
from trainer.devices import choose_device
from trainer.distributed import Workers, join_workers, leave_workers
from trainer.embed import embed
from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import Encoder
from trainer.encoders.transformer import TransformerEncoder
from trainer.loop import Training
from trainer.mining import approximate_top_k, build_index, exact_top_k
from trainer.model import DualHeadModel, widths_of
from trainer.plan import Plan
from trainer.row_adam import RowAdam
from trainer.step import train_step
from trainer.tokenise import TokenisedTexts

VOCABULARY = 30_522
# LF-AmazonTitles-1.3M, and what UniDEC took there (batch, pool and hours: table 2.3 of the thesis).
QUERIES, POSITIVES_A_QUERY = 2_248_619, 22
PAPER_HOURS = 78
# Hidden width, layers, heads and inner width.
SHAPES = {"minilm": (384, 6, 12, 1536), "distilbert": (768, 6, 12, 3072)}
WARM_UP = 10
TEXTS_SAMPLED, QUERIES_SAMPLED, CLUSTERED = 100_000, 4_096, 262_144


@dataclass(frozen=True)
class Scale:
    """What is simulated.

    Attributes:
        labels: L.
        queries: N.
        encoder: a name in SHAPES, or `bag`.
        batch: |Q_B|.
        pool: |L_B| that is aimed at.
        tokens: mean length of a text; lengths are spread as those of product titles, up to 32.
        epochs: that are projected.
        steps: that are timed.
        hnsw: whether mining by HNSW is timed, too.
        attention: `eager`, as in training, or another of transformers' kinds.
    """

    labels: int
    queries: int
    encoder: str
    batch: int
    pool: int
    tokens: int
    epochs: int
    steps: int
    hnsw: bool
    attention: str


@dataclass(frozen=True)
class Log:
    """Texts, clicks and mined negatives, the same for all rows of the measurement."""

    queries: TokenSource
    labels: TokenSource
    targets: sp.csr_matrix
    plan: Plan


def random_texts(count: int, mean: int, seed: int) -> TokenSource:
    """`count` texts of random token ids, 3 to 32 of them, `mean` on average."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.round(rng.gamma(4.0, mean / 4.0, count)), 3, 32).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, VOCABULARY, int(offsets[-1]), dtype=np.int32)
    return TokenSource(TokenisedTexts(ids, offsets))


def window_of(pool: int, draws: int) -> int:
    """Labels from which `draws` draws with replacement find `pool` distinct ones on average."""
    if draws <= pool:
        raise click.UsageError(f"a batch draws {draws} labels, fewer than the pool of {pool}")
    return round(brentq(lambda width: width * (1 - exp(-draws / width)) - pool, pool, 1e9))


def simulate(scale: Scale, batch: BatchConfig) -> Log:
    """The log: cluster c of |Q_B| queries clicks within its own window of the labels."""
    rng = np.random.default_rng(0)
    drawn = scale.batch * (batch.positives + batch.hard_negatives)
    window = min(window_of(scale.pool, drawn), scale.labels)
    clusters = np.arange(scale.queries, dtype=np.int32) // scale.batch
    first = rng.integers(0, scale.labels - window + 1, clusters[-1] + 1, dtype=np.int32)[clusters][:, None]
    with progress("simulating the log", scale.queries, "queries") as step:
        shape = (scale.queries, POSITIVES_A_QUERY)
        columns = np.sort(first + rng.integers(0, window, shape, dtype=np.int32), axis=1)
        ends = np.arange(scale.queries + 1) * POSITIVES_A_QUERY
        targets = sp.csr_matrix(
            (np.ones(columns.size, np.float32), columns.ravel(), ends), (scale.queries, scale.labels)
        )
        keep = batch.hard_negatives * batch.refresh
        hard = first + rng.integers(0, window, (scale.queries, keep), dtype=np.int32)
        step.advance(scale.queries)
    return Log(
        random_texts(scale.queries, scale.tokens, 1),
        random_texts(scale.labels, scale.tokens, 2),
        targets,
        Plan(clusters, hard),
    )


def make_encoder(name: str, attention: str) -> Encoder:
    """An encoder of the named architecture with random weights; attention as transformers names its kinds."""
    if name == "bag":
        return BagEncoder(VOCABULARY, 384, 0.0, 0.0)
    from transformers import AutoModel, BertConfig

    hidden, layers, heads, inner = SHAPES[name]
    shape = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=512,
    )
    return TransformerEncoder(AutoModel.from_config(shape, attn_implementation=attention), "mean", 0)


def make_training(scale: Scale, config: TrainConfig, log: Log, run: Path, workers: Workers) -> Training:
    """A run on the simulated log, before its first step."""
    device = choose_device(config, workers)
    torch.manual_seed(0)
    model = DualHeadModel(
        make_encoder(scale.encoder, scale.attention), widths_of(config), config.head_dropout
    )
    classifiers = new_classifiers(config, scale.labels)
    classifiers.to("cpu" if config.table_device == "cpu" else device.device)
    return Training(
        config=config,
        device=device,
        run=run,
        model=model.to(device.device).train(),
        classifiers=classifiers,
        architecture={"encoder": scale.encoder},
        tokenizer=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        queries=log.queries,
        labels=log.labels,
        targets=log.targets,
        workers=workers,
        plan=log.plan,
    )


def seconds(device: torch.device, action: Callable[[], Any]) -> float:
    """Wall time of an action, the GPU idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def first_texts(source: TokenSource, count: int) -> TokenSource:
    """The first `count` texts."""
    offsets = source.tokens.offsets[: count + 1]
    return TokenSource(TokenisedTexts(source.tokens.ids[: offsets[-1]], offsets))


def time_steps(training: Training, steps: int) -> dict[str, Any]:
    """Steps on batch after batch, and the memory they take."""
    device, size = training.device.device, training.config.batch.queries
    batches = training.targets.shape[0] // size
    taken = []
    with progress("steps", WARM_UP + steps, "steps") as bar:
        for number in range(WARM_UP + steps):
            rows = np.arange(size) + number % batches * size
            training.state.step = training.state.global_step = number
            if number == WARM_UP and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            taken.append(seconds(device, lambda rows=rows: train_step(training, rows)))  # type: ignore[misc]
            bar.advance()
    timed = np.array(taken[WARM_UP:])
    pool = len(next(iter(training.classifiers.values())).psi.weight.grad.coalesce().values())
    step = float(np.median(timed))
    found = {
        "step_ms": round(1e3 * step, 2),
        "step_ms_quartiles": [round(1e3 * float(q), 2) for q in np.percentile(timed, [25, 75])],
        "label_pool": pool,
        "examples_per_s": round(size / step, 1),
        "texts_per_s": round((size + pool) / step, 1),
        "peak_host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    if device.type == "cuda":
        found["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
        for optimiser in training.optimisers:
            optimiser.zero_grad(set_to_none=True)
        found["standing_gpu_gb"] = round(torch.cuda.memory_allocated(device) / 1e9, 2)
    return found


def time_passes(training: Training, scale: Scale) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each pass between epochs for the whole log, and of the HNSW mining where it is asked for."""
    device, bf16, workers = training.device.device, training.device.bf16, training.workers
    kept: list[torch.Tensor] = []

    def encode(source: TokenSource, label: str, *, fast: bool) -> None:
        vectors = embed(training.model, source, device, label, bf16=fast, workers=workers)
        kept.append(vectors[0].phi_d)

    sample = min(TEXTS_SAMPLED, scale.labels, scale.queries)
    part = first_texts(training.labels, sample)  # type: ignore[arg-type]
    encode(first_texts(part, min(2_000, sample)), "warming up", fast=bf16)
    passes = {
        "labels_encoded": seconds(device, lambda: encode(training.labels, "labels", fast=bf16)),  # type: ignore[arg-type]
    }
    labels = kept[-1]
    passes["labels_encoded_fp32"] = (
        seconds(device, lambda: encode(part, "a sample of labels, fp32", fast=False)) * scale.labels / sample
    )
    queries = first_texts(training.queries, sample)  # type: ignore[arg-type]
    passes["queries_encoded"] = (
        seconds(device, lambda: encode(queries, "a sample of queries", fast=bf16)) * scale.queries / sample
    )
    vectors = kept[-1]

    some = np.resize(vectors.cpu().numpy(), (min(CLUSTERED, scale.queries), vectors.shape[1]))
    rng = np.random.default_rng(0)
    started = time.perf_counter()
    balanced_clusters(some, scale.batch, rng)
    halvings = [max(1, ceil(log2(count / scale.batch))) for count in (scale.queries, len(some))]
    passes["clustering"] = (
        (time.perf_counter() - started) * scale.queries * halvings[0] / len(some) / halvings[1]
    )

    count = training.config.batch.hard_negatives * training.config.batch.refresh + POSITIVES_A_QUERY
    few = vectors[: min(QUERIES_SAMPLED, sample)]
    exact_top_k(few[:64], labels, count)
    taken = seconds(device, lambda: exact_top_k(few, labels, count))
    passes["mining_exact"] = taken * scale.queries / len(few) / workers.count
    further = {}
    if scale.hnsw:
        numbers, threads = labels.cpu().numpy(), training.device.threads
        started = time.perf_counter()
        index = build_index(numbers, threads)
        built = time.perf_counter() - started
        started = time.perf_counter()
        approximate_top_k(index, few, numbers, count, threads)
        further["mining_hnsw"] = built + (time.perf_counter() - started) * scale.queries / len(few)
    return passes, further


def time_checkpoint(training: Training) -> dict[str, float]:
    """One checkpoint in the middle of training: seconds and bytes."""
    started = time.perf_counter()
    training.save()
    taken = time.perf_counter() - started
    size = sum(file.stat().st_size for file in training.run.rglob("*") if file.is_file())
    return {"checkpoint_s": round(taken, 2), "checkpoint_gb": round(size / 1e9, 3)}


def bytes_held(training: Training) -> dict[str, float]:
    """Gigabytes of what grows with labels and queries."""
    psi = next(group for group in training.optimisers if isinstance(group, RowAdam))
    tables = [table for group in psi.param_groups for table in group["params"]]
    plan = training.plan
    assert plan is not None
    return {
        "tables_gb": round(sum(table.nbytes for table in tables) / 1e9, 3),
        "moments_gb": round(sum(v.nbytes for t in tables for v in psi.state[t].values()) / 1e9, 3),
        "label_tokens_gb": round(_bytes(training.labels.tokens) / 1e9, 3),
        "query_tokens_gb": round(_bytes(training.queries.tokens) / 1e9, 3),
        "clicks_gb": round(
            sum(a.nbytes for a in (training.targets.data, training.targets.indices, training.targets.indptr))
            / 1e9,
            3,
        ),
        "plan_gb": round((plan.hard.nbytes + plan.clusters.nbytes) / 1e9, 3),
    }


def _bytes(tokens: TokenisedTexts) -> int:
    return tokens.ids.nbytes + tokens.offsets.nbytes


def projected(scale: Scale, config: TrainConfig, row: dict[str, Any]) -> dict[str, float]:
    """Hours of a whole run by parts; see the formula above."""
    passes = row["passes_s"]
    refreshes = ceil(scale.epochs / config.batch.refresh)
    mining = min(passes["mining_exact"], row.get("mining_hnsw_s", passes["mining_exact"]))
    a_refresh = passes["labels_encoded"] + passes["queries_encoded"] + passes["clustering"] + mining
    parts = {
        "steps": scale.epochs * ceil(scale.queries / scale.batch) * row["step_ms"] / 1e3,
        "refreshes": refreshes * a_refresh,
        "epoch_figures": scale.epochs * passes["labels_encoded_fp32"],
    }
    parts["checkpoints"] = sum(parts.values()) / config.checkpoint_seconds * row["checkpoint_s"]
    hours = {name: round(value / 3600, 3) for name, value in parts.items()}
    return hours | {"total": round(sum(parts.values()) / 3600, 2)}


def measure(scale: Scale, config: TrainConfig, log: Log, workers: Workers) -> dict[str, Any]:
    """One row: a precision and a place for Ψ."""
    with tempfile.TemporaryDirectory() as folder:
        training = make_training(scale, config, log, Path(folder), workers)
        row: dict[str, Any] = {
            "precision": "bf16" if training.device.bf16 else "fp32",
            "table_device": training.table_device.type,
        }
        say(f"{row['precision']}, Ψ on {row['table_device']}")
        row |= time_steps(training, scale.steps) | bytes_held(training) | time_checkpoint(training)
        passes, further = time_passes(training, scale)
    row["passes_s"] = {name: round(value, 2) for name, value in passes.items()}
    row |= {f"{name}_s": round(value, 2) for name, value in further.items()}
    row["projected_hours"] = projected(scale, config, row)
    del training
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


@click.command()
@click.option("--labels", default=1_300_000, show_default=True, type=click.IntRange(min=1_000))
@click.option("--queries", default=QUERIES, show_default=True, type=click.IntRange(min=1_000))
@click.option("--encoder", default="minilm", show_default=True, type=click.Choice([*SHAPES, "bag"]))
@click.option("--batch", default=1098, show_default=True, help="Queries a batch.")
@click.option("--pool", default=3000, show_default=True, help="Labels of a batch's pool, about.")
@click.option("--beta", default=2, show_default=True, help="β, positives sampled a query.")
@click.option("--eta", default=5, show_default=True, help="η, hard negatives sampled a query.")
@click.option("--tau", default=5, show_default=True, help="τ, epochs between refreshes.")
@click.option("--dim", default=64, show_default=True, help="Width of the served vector.")
@click.option("--wide-dim", default=0, show_default=True, help="Width of the re-scoring vector; 0 for none.")
@click.option("--tokens", default=12, show_default=True, help="Mean length of a text.")
@click.option("--chunk", default=0, show_default=True, help="Texts encoded at once; 0: the whole batch.")
@click.option("--epochs", default=100, show_default=True, help="That are projected.")
@click.option("--steps", default=60, show_default=True, help="That are timed.")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    default=("auto",),
    type=click.Choice(["auto", "bf16", "fp32"]),
    help="May be repeated.",
)
@click.option(
    "--table-device",
    "places",
    multiple=True,
    default=("auto",),
    type=click.Choice(["auto", "cpu"]),
    help="Where Ψ and its moments lie; may be repeated.",
)
@click.option("--hnsw", is_flag=True, help="Time mining by HNSW, too.")
@click.option(
    "--attention",
    default="eager",
    show_default=True,
    type=click.Choice(["eager", "sdpa"]),
    help="Training's is eager.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(
    labels: int,
    queries: int,
    encoder: str,
    batch: int,
    pool: int,
    beta: int,
    eta: int,
    tau: int,
    dim: int,
    wide_dim: int,
    tokens: int,
    chunk: int,
    epochs: int,
    steps: int,
    precisions: Sequence[str],
    places: Sequence[str],
    hnsw: bool,
    attention: str,
    as_json: bool,
) -> None:
    """Examples a second, memory and projected hours at full scale."""
    workers = join_workers()
    scale = Scale(labels, queries, encoder, batch, pool, tokens, epochs, steps, hnsw, attention)
    plan = BatchConfig(
        queries=batch, positives=beta, hard_negatives=eta, refresh=tau, chunk=chunk, cluster_size=batch
    )
    log = simulate(scale, plan)
    rows = [
        measure(
            scale,
            TrainConfig.model_validate(
                {
                    "dim": dim,
                    "wide_dim": wide_dim,
                    "batch": plan,
                    "encoder": {"kind": "bag" if encoder == "bag" else "transformer"},
                    "precision": precision,
                    "table_device": place,
                }
            ),
            log,
            workers,
        )
        for precision in precisions
        for place in places
    ]
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "processes": workers.count,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "scale": scale.__dict__ | {"beta": beta, "eta": eta, "tau": tau, "dim": dim, "wide_dim": wide_dim},
        "mean_tokens": round(float(log.labels.tokens.lengths.mean()), 2),
        "rows": rows,
        "paper_hours": PAPER_HOURS,
    }
    leave_workers(workers)
    if not workers.first_of_all:
        return
    if as_json:
        emit_json(result)
        return
    click.echo(
        f"{result['device']}, {labels:,} labels, {queries:,} queries, {encoder}, {batch} queries a batch"
    )
    for row in rows:
        memory = f"{row['peak_gpu_gb']} GB of GPU memory at the peak, " if "peak_gpu_gb" in row else ""
        click.echo(
            f"{row['precision']}, Ψ on {row['table_device']}: {row['step_ms']} ms a step "
            f"({row['label_pool']} labels in the pool), {row['examples_per_s']:,} examples/s, {memory}"
            f"{row['peak_host_gb']} GB of host memory; {epochs} epochs: {row['projected_hours']['total']} h "
            f"(paper: {PAPER_HOURS} h) = {row['projected_hours']}"
        )


if __name__ == "__main__":
    main()
