"""Checkpoints and run folders: safetensors, YAML and the tokenizer, whole or not there, no pickle."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import scipy.sparse as sp
import torch
import yaml
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from bidmatch.base.errors import BidmatchError, ConfigError, DamagedError
from bidmatch.base.files import atomic_dir, atomic_file, remove_partials, sha256_file
from trainer.classifiers.pairs import PAIRS, classifier_at, new_classifiers, tables_of
from trainer.config import TrainConfig
from trainer.data.dataset import Interactions
from trainer.model import DualHeadModel, empty_model
from trainer.plan import Plan
from trainer.settings import validate_config

FORMAT_VERSION = 2


class CheckpointState(BaseModel):
    """Where a run stands.

    Attributes:
        format_version: of the checkpoint folder.
        epoch: the epoch of the next step, from 0.
        step: the next step within the epoch, from 0.
        global_step: steps done in all.
        finished: training is complete; optimiser and plan are left out.
        history: one record an epoch done: losses, seconds, metrics.
        loss_sums: sums of the losses of the epoch's steps so far.
        model_id: digest of the weights.
        sha256: digest of each file of the folder.
    """

    format_version: int = FORMAT_VERSION
    epoch: int = 0
    step: int = 0
    global_step: int = 0
    finished: bool = False
    history: list[dict[str, Any]] = []
    loss_sums: dict[str, float] = {}
    model_id: str = ""
    sha256: dict[str, str] = {}


@dataclass(frozen=True)
class TrainedRun:
    """A finished run, for export and evaluation.

    Attributes:
        path: the run folder.
        model: in evaluation mode, on the CPU.
        tokenizer: the encoder's, cutting at max_tokens.
        config: of the run.
        phrases: Arrow table of the L labels, with `train_clicks` (training queries of each).
        table: Ψ, float32 (L, Φ_C's width); no columns where the classifier is off.
        wide_table: Ψ of the wide heads, likewise; None where the run has none.
        validation: queries kept out of training for choices.
        test: held-out queries, for final figures only.
        info: run.json: data fingerprint, split, versions, counts.
        model_id: digest of the weights.
        label_vectors: Φ_D(z) of the L labels by each pair of heads, float32 (L, Φ_D's width), where they are
            not the model's own: a student keeps its teacher's. None otherwise.
        not_in_index: see Classifier.not_in_index; None where there is no classifier, too.
    """

    path: Path
    model: DualHeadModel
    tokenizer: Tokenizer
    config: TrainConfig
    phrases: pa.Table
    table: np.ndarray
    wide_table: np.ndarray | None
    validation: Interactions
    test: Interactions
    info: dict[str, Any]
    model_id: str
    label_vectors: list[np.ndarray] | None = None
    not_in_index: str | None = None


def _names(model: nn.Module, classifiers: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by the name a checkpoint knows them by."""
    tables = {f"Ψ.{name}": value for name, value in classifiers.named_parameters()}
    return dict(model.named_parameters()) | tables


def _optimiser_state(
    model: nn.Module, classifiers: nn.Module, optimisers: tuple[torch.optim.Optimizer, ...]
) -> dict[str, torch.Tensor]:
    names = {id(value): name for name, value in _names(model, classifiers).items()}
    return {
        f"{names[id(parameter)]}/{field}": torch.as_tensor(value)
        for optimiser in optimisers
        for parameter, state in optimiser.state.items()
        for field, value in state.items()
    }


def _own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def save_checkpoint(
    run: Path,
    state: CheckpointState,
    config: TrainConfig,
    architecture: dict[str, Any],
    tokenizer: Tokenizer,
    model: DualHeadModel,
    classifiers: nn.ModuleDict,
    optimisers: tuple[torch.optim.Optimizer, ...],
    plan: Plan | None,
    label_vectors: Sequence[torch.Tensor] = (),
) -> Path:
    """Write `run/checkpoints/step-NNNNNNNN`, whole or not at all; keep the last `keep_checkpoints`.

    Where there are `label_vectors`, see `TrainedRun`, they go into `labels.safetensors`.

    Raises:
        BidmatchError: the disk is full or broken.
    """
    folder = run / "checkpoints" / f"step-{state.global_step:08}{'-final' if state.finished else ''}"
    # A resumed run need not come by the step at which it was killed: clear what was left at any.
    remove_partials(folder.with_name("step-*"))
    with atomic_dir(folder, overwrite=True) as partial:
        tensors = {"model": model.state_dict(), "table": classifiers.state_dict()}
        if not state.finished:
            tensors["optimiser"] = _optimiser_state(model, classifiers, optimisers)
            if plan is not None:
                tensors["plan"] = {
                    "clusters": torch.from_numpy(plan.clusters),
                    "hard": torch.from_numpy(plan.hard),
                }
        if label_vectors:
            tensors["labels"] = dict(zip(PAIRS, label_vectors, strict=False))
        for name, values in tensors.items():
            try:
                save_file(_own(values), partial / f"{name}.safetensors")
            except SafetensorError as failure:
                raise BidmatchError(
                    f"the checkpoint of step {state.global_step} can't be written to {run}: {failure}",
                    hint="Free some space; the same command goes on from the checkpoint before.",
                ) from failure
        tokenizer.save(str(partial / "tokenizer.json"))
        (partial / "architecture.yaml").write_text(yaml.safe_dump(architecture), encoding="utf-8")
        write_config(partial / "config.yaml", config)
        digests = {entry.name: sha256_file(entry) for entry in sorted(partial.iterdir())}
        state.model_id = sha256_text(digests["model.safetensors"] + digests["table.safetensors"])[:16]
        state.sha256 = digests
        text = yaml.safe_dump(state.model_dump(), sort_keys=False, allow_unicode=True)
        (partial / "state.yaml").write_text(f"{text}checksum: {sha256_text(text)}\n", encoding="utf-8")
    for old in checkpoints(run)[: -config.keep_checkpoints]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_config(file: Path, config: TrainConfig) -> None:
    """The whole configuration as YAML."""
    file.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.name.startswith("step-") and entry.is_dir())


def read_state(folder: Path) -> CheckpointState:
    """The state of one checkpoint, every file of it checked against its digest.

    Raises:
        DamagedError: something is missing, altered, or of another format version.
    """
    file = folder / "state.yaml"
    try:
        text, _, checksum = file.read_text(encoding="utf-8").rpartition("checksum: ")
        if sha256_text(text) != checksum.strip():
            raise ValueError("the checksum differs")
        state = CheckpointState.model_validate(yaml.safe_load(text))
    except (OSError, ValueError, yaml.YAMLError, ValidationError) as wrong:
        raise DamagedError(f"{folder} is no whole checkpoint: {file.name} is missing or altered") from wrong
    if state.format_version != FORMAT_VERSION:
        raise DamagedError(
            f"{folder} has checkpoint format {state.format_version}; this version reads {FORMAT_VERSION}"
        )
    for name, digest in state.sha256.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != digest:
            raise DamagedError(
                f"{folder / name} is missing or altered (SHA-256 differs)",
                hint="Delete this checkpoint's folder; training goes on from the one before.",
            )
    return state


def restore_weights(folder: Path, model: DualHeadModel, classifiers: nn.ModuleDict) -> None:
    """Load Φ, its heads and Ψ in place."""
    model.load_state_dict(load_file(folder / "model.safetensors"))
    classifiers.load_state_dict(load_file(folder / "table.safetensors"))


def restore_training(
    folder: Path,
    model: DualHeadModel,
    classifiers: nn.ModuleDict,
    optimisers: tuple[torch.optim.Optimizer, ...],
) -> Plan | None:
    """Load weights and the optimisers' moments in place; returns the plan, if one was made."""
    restore_weights(folder, model, classifiers)
    parameters = _names(model, classifiers)
    owners = {
        id(parameter): optimiser
        for optimiser in optimisers
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    for full, value in load_file(folder / "optimiser.safetensors").items():
        name, _, field = full.rpartition("/")
        parameter = parameters[name]
        owners[id(parameter)].state[parameter][field] = value.to(parameter.device)
    file = folder / "plan.safetensors"
    if not file.is_file():
        return None
    arrays = load_file(file)
    return Plan(arrays["clusters"].numpy(), arrays["hard"].numpy())


def write_interactions(file: Path, interactions: Interactions) -> None:
    """Queries and their labels as an Arrow file: `query`, `labels`, `weights`; `filtered` if there is any."""
    clicks = interactions.clicks
    offsets = pa.array(clicks.indptr.astype(np.int64))
    labels = pa.LargeListArray.from_arrays(offsets, pa.array(clicks.indices.astype(np.int32)))
    weights = pa.LargeListArray.from_arrays(offsets, pa.array(clicks.data.astype(np.float32)))
    columns = {"query": interactions.queries.cast(pa.large_string()), "labels": labels, "weights": weights}
    if interactions.filtered is not None:
        out = interactions.filtered
        columns["filtered"] = pa.LargeListArray.from_arrays(
            pa.array(out.indptr.astype(np.int64)), pa.array(out.indices.astype(np.int32))
        )
    write_table(file, pa.table(columns))


def write_table(file: Path, table: pa.Table) -> None:
    """An Arrow IPC file, whole or not at all."""
    with atomic_file(file) as partial, pa.ipc.new_file(str(partial), table.schema) as writer:
        writer.write_table(table)


def read_table(file: Path) -> pa.Table:
    """An Arrow IPC file, memory mapped.

    Raises:
        DamagedError: it can't be read.
    """
    try:
        return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except (OSError, pa.ArrowInvalid) as wrong:
        raise DamagedError(f"{file} is missing or damaged") from wrong


def read_interactions(file: Path, n_labels: int) -> Interactions:
    """What `write_interactions` wrote, as queries and a CSR (n, `n_labels`)."""
    table = read_table(file).combine_chunks()
    n = len(table)
    if n == 0:
        empty = sp.csr_matrix((0, n_labels), dtype=np.float32)
        return Interactions(pa.array([], type=pa.large_string()), empty)
    labels, weights = table["labels"].chunk(0), table["weights"].chunk(0)
    offsets = labels.offsets.to_numpy()
    clicks = sp.csr_matrix(
        (weights.values.to_numpy(), labels.values.to_numpy(), offsets), shape=(n, n_labels)
    )
    filtered = None
    if "filtered" in table.column_names:
        out = table["filtered"].chunk(0)
        pairs = (np.ones(len(out.values), dtype=bool), out.values.to_numpy(), out.offsets.to_numpy())
        filtered = sp.csr_matrix(pairs, shape=(n, n_labels))
    return Interactions(table["query"].chunk(0), clicks, filtered)


def sha256_data(run: Path) -> dict[str, str]:
    """Digest of each file of a run's `data` folder."""
    return {file.name: sha256_file(file) for file in sorted((run / "data").glob("*.arrow"))}


def read_run_info(run: Path) -> dict[str, Any]:
    """run.json, once the data files of the run are what it says.

    Raises:
        DamagedError: it can't be read, or a data file is missing or altered.
    """
    file = run / "run.json"
    hint = "Train again with --overwrite, or restore the file."
    try:
        info: dict[str, Any] = orjson.loads(file.read_bytes())
        expected, _, _ = info["sha256"], info["data"]["fingerprint"], info["split"]
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise DamagedError(f"{file} is missing or damaged", hint=hint) from wrong
    found = sha256_data(run)
    for name in sorted(expected | found):
        if found.get(name) != expected.get(name):
            raise DamagedError(f"{run / 'data' / name} is missing or altered (SHA-256 differs)", hint=hint)
    return info


def load_run(run: Path) -> TrainedRun:
    """A finished training run.

    Raises:
        ConfigError: the folder is no run, or its training is not finished.
        DamagedError: a file of it is missing or altered.
    """
    found = checkpoints(run)
    if not found:
        raise ConfigError(f"{run} holds no checkpoint", hint="Give the --out folder of `bidmatch train`.")
    state = read_state(found[-1])
    if not state.finished:
        raise ConfigError(
            f"{run}: training is not finished (epoch {state.epoch + 1}, step {state.step})",
            hint="Run the same `bidmatch train` command again; it goes on from its last checkpoint.",
        )
    folder = found[-1]
    config = validate_config(
        yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")), str(folder / "config.yaml")
    )
    architecture = yaml.safe_load((folder / "architecture.yaml").read_text(encoding="utf-8"))
    info = read_run_info(run)
    phrases = read_table(run / "data" / "phrases.arrow")
    model = empty_model(config, architecture)
    classifiers = new_classifiers(config, len(phrases))
    restore_weights(folder, model, classifiers)
    labels = folder / "labels.safetensors"
    kept = load_file(labels) if labels.name in state.sha256 else {}
    tables = [table.numpy() for table in tables_of(classifiers)]
    if not tables:
        tables = [np.zeros((len(phrases), 0), dtype=np.float32)] * len(model.widths)
    return TrainedRun(
        path=run,
        model=model.eval(),
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        config=config,
        phrases=phrases,
        table=tables[0],
        wide_table=tables[1] if config.wide_dim else None,
        validation=read_interactions(run / "data" / "validation.arrow", len(phrases)),
        test=read_interactions(run / "data" / "test.arrow", len(phrases)),
        info=info,
        model_id=state.model_id,
        label_vectors=[kept[name].numpy() for name in PAIRS if name in kept] or None,
        not_in_index=classifier_at(classifiers, 0).not_in_index if classifiers else None,
    )
