"""From a finished run to its student's: a run folder of the same data, ready for export."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import scipy.sparse as sp
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer

from bidmatch.base.console import say
from bidmatch.base.errors import ConfigError
from bidmatch.base.files import atomic_dir, refuse_folder
from trainer.checkpoint import (
    CheckpointState,
    TrainedRun,
    checkpoints,
    load_run,
    read_interactions,
    save_checkpoint,
    write_config,
)
from trainer.classifiers.pairs import new_classifiers
from trainer.config import TrainConfig
from trainer.corpus import keys_of, token_source
from trainer.devices import Device, choose_device
from trainer.embed import embed
from trainer.evaluate import metrics_by_frequency, metrics_of, rankings, served_view
from trainer.metrics import propensities
from trainer.model import DualHeadModel, HeadVectors
from trainer.report import write_report
from trainer.run_folder import holds_only_a_run, locked_run, package_versions
from trainer.settings import validate_config
from trainer.student import (
    RATES,
    Student,
    StudentOptions,
    mean_cosines,
    new_student,
    teacher_vectors,
    train_student,
)

# Milliseconds a query of a model as it is served, on these texts.
Timer = Callable[[DualHeadModel, Tokenizer, Sequence[str]], float]
_TIMED_QUERIES = 500


def distil(
    run: Path, options: StudentOptions, out: Path, timer: Timer, *, overwrite: bool = False
) -> dict[str, Any]:
    """Train a student of the run's model into the run folder `out`, which appears whole or not at all.

    The classifier's tables and the labels' vectors stay the teacher's, so that an index of them does, too.

    Args:
        run: a finished run.
        options: see StudentOptions.
        out: the folder to make: config.yaml, run.json with a record `teacher`, data/, checkpoints/, reports.
        timer: measures a model's speed.
        overwrite: replace the run that is there.

    Returns:
        the report, as in report.json.

    Raises:
        BidmatchError: `out` is taken, or is to be replaced and holds other files or is being trained.
        ConfigError: `run` holds no finished training or is `out`, or the teacher has no such layers.
        DamagedError: a file of it is missing or altered.
    """
    if out.resolve() == run.resolve():
        raise ConfigError(f"{out} is the teacher", hint="Name another folder for the student.")
    refuse_folder(out, "run", holds_only_a_run, overwrite=overwrite)
    teacher = load_run(run)
    newest = checkpoints(run)[-1]
    architecture = yaml.safe_load((newest / "architecture.yaml").read_text(encoding="utf-8"))
    student = new_student(teacher, architecture, options)
    with ExitStack() as held:
        if out.exists():
            held.enter_context(locked_run(out))
        folder = held.enter_context(atomic_dir(out, overwrite=overwrite))
        return _distil(teacher, newest, student, options, folder, timer)


def _distil(
    teacher: TrainedRun, newest: Path, student: Student, options: StudentOptions, folder: Path, timer: Timer
) -> dict[str, Any]:
    """Train the student and write its run into an empty folder; `newest` is the teacher's checkpoint."""
    config = _config(teacher.config, student, options)
    device = choose_device(config)
    say(f"device {device.device}, {'bf16' if device.bf16 else 'fp32'}, {device.threads} threads")
    for model in (teacher.model, student.model):
        model.to(device.device)
    judge = _Judge(teacher, device)
    texts = pa.concat_arrays([_training_queries(teacher), keys_of(teacher.phrases)])
    scratch = folder / "teacher.f16"
    history, cosines = _train(teacher, student, config, judge, texts, scratch)
    scratch.unlink(missing_ok=True)
    figures = {name: judge.figures(student.model, student.tokenizer, name) for name in ("validation", "test")}
    teachers = judge.figures(teacher.model, teacher.tokenizer, "validation")
    for model in (teacher.model, student.model):
        model.to("cpu").eval()
    about: dict[str, Any] = {
        "encoder": options.encoder,
        "teacher": _teacher_record(teacher, options),
        "texts": len(texts),
        "cosine": cosines,
        "validation": {"teacher": teachers, "student": figures["validation"]},
        "milliseconds": _timed(teacher, student, timer),
    }
    steps = config.epochs * -(-len(texts) // config.batch.queries)
    state = CheckpointState(epoch=config.epochs, global_step=steps, finished=True, history=history)
    classifiers = new_classifiers(config, len(teacher.phrases))
    classifiers.load_state_dict(load_file(newest / "table.safetensors"))
    info = _write_inputs(folder, teacher, config, about["teacher"])
    save_checkpoint(
        folder,
        state,
        config,
        student.architecture,
        student.tokenizer,
        student.model,
        classifiers,
        (),
        None,
        [pair.phi_d.cpu() for pair in judge.labels],
    )
    report = {
        "config": config.model_dump(),
        "run": info,
        "model_id": state.model_id,
        "device": {
            "name": str(device.device),
            "bf16": device.bf16,
            "threads": device.threads,
            "processes": 1,
        },
        "cpu_count": os.cpu_count(),
        "propensity": {"A": config.propensity_a, "B": config.propensity_b},
        "history": history,
        **figures,
        "student": about,
    }
    write_report(folder, report)
    return report


class _Judge:
    """Figures of the teacher's and the student's queries against the teacher's labels, by exact search.

    Attributes:
        device: where it computes.
        labels: the teacher's Φ_D(z) by each pair of heads, on the device.
    """

    def __init__(self, teacher: TrainedRun, device: Device):
        self.device = device
        self._parts = {"validation": teacher.validation, "test": teacher.test}
        known = _training_clicks(teacher)
        self._counts = np.bincount(known.indices, minlength=len(teacher.phrases))
        constants = teacher.config.propensity_a, teacher.config.propensity_b
        self._propensity = propensities(self._counts, known.shape[0], *constants)
        if teacher.label_vectors is not None:
            found = [torch.from_numpy(vectors).to(device.device) for vectors in teacher.label_vectors]
        else:
            source = token_source(teacher.tokenizer, keys_of(teacher.phrases), "phrases")
            pairs = embed(teacher.model, source, device.device, "encoding labels", wide=True)
            found = [pair.phi_d for pair in pairs]
        self.labels = [HeadVectors(phi_d, phi_d[:, :0]) for phi_d in found]
        tables = [table for table in (teacher.table, teacher.wide_table) if table is not None]
        self._tables = [torch.from_numpy(table) for table in tables if table.shape[1]]

    def figures(self, model: DualHeadModel, tokenizer: Tokenizer, name: str) -> dict[str, Any] | None:
        """Measures of the views of `validation` or `test` queries; None where there are none."""
        part = self._parts[name]
        if not len(part):
            return None
        source = token_source(tokenizer, part.queries, f"{name} queries")
        queries = embed(model, source, self.device.device, f"encoding {name} queries", wide=True)
        found = rankings(queries, self.labels, self._tables, part.filtered)
        return {
            "queries": len(part),
            "metrics": metrics_of(found, part.clicks, self._propensity),
            "by_frequency": metrics_by_frequency(found, part.clicks, self._counts, self._propensity),
        }


def _train(
    teacher: TrainedRun, student: Student, config: TrainConfig, judge: _Judge, texts: pa.Array, file: Path
) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """The history, and the mean cosine of each part before and after.

    Cosines are those of validation queries, which the student does not train on; where there are none, of
    the texts that it trains on.
    """
    device = judge.device
    source = token_source(student.tokenizer, texts, "texts for the student")
    expected = teacher_vectors(
        teacher.model,
        token_source(teacher.tokenizer, texts, "texts for the teacher"),
        device,
        "encoding by the teacher",
        file,
    )
    judged, aims = source, expected
    if len(teacher.validation):
        judged = token_source(student.tokenizer, teacher.validation.queries, "validation queries")
        own = token_source(teacher.tokenizer, teacher.validation.queries, "validation queries")
        aims = teacher_vectors(teacher.model, own, device, "encoding validation queries by the teacher")
    before = mean_cosines(student.model, judged, aims, device)

    def after_epoch(epoch: int) -> dict[str, Any]:
        cosines = mean_cosines(student.model, judged, aims, device)
        said = ", ".join(f"{name} {cosine:.4f}" for name, cosine in cosines.items())
        record: dict[str, Any] = {"cosine": cosines}
        found = judge.figures(student.model, student.tokenizer, "validation")
        if found is not None:
            record["validation"] = found["metrics"]
            best = found["metrics"][served_view(found["metrics"])]
            figures = ", ".join(f"{name} {best[name]:.1f}" for name in ("P@1", "P@5", "recall@10"))
            said += f"; validation {figures}"
        say(f"epoch {epoch}/{config.epochs}: cosine with the teacher {said}")
        return record

    history = train_student(student, source, expected, config, device, after_epoch)
    return history, {"before": before, "after": history[-1]["cosine"]}


def _config(teacher: TrainConfig, student: Student, options: StudentOptions) -> TrainConfig:
    """The teacher's configuration with what the student changes of it."""
    rates = RATES[student.config.kind]
    values = teacher.model_dump()
    values |= {
        "encoder": student.config.model_dump(),
        "epochs": options.epochs,
        "head_dropout": 0.0,
        "seed": options.seed,
        "device": options.device,
        "threads": options.threads,
    }
    values["batch"] |= {"queries": options.queries, "cluster_size": 1}
    values["optimiser"] |= {
        "encoder_lr": options.encoder_lr or rates[0],
        "heads_lr": options.heads_lr or rates[1],
    }
    return validate_config(values, "student")


def _training_queries(teacher: TrainedRun) -> pa.Array:
    queries = read_interactions(teacher.path / "data" / "train.arrow", len(teacher.phrases)).queries
    return queries.cast(pa.large_string())


def _training_clicks(teacher: TrainedRun) -> sp.csr_matrix:
    """Clicks of training and validation queries, which frequencies count in a run's own report, too."""
    train = read_interactions(teacher.path / "data" / "train.arrow", len(teacher.phrases)).clicks
    return sp.vstack([train, teacher.validation.clicks]).tocsr()


def _teacher_record(teacher: TrainedRun, options: StudentOptions) -> dict[str, Any]:
    return {
        "model_id": teacher.model_id,
        "encoder": teacher.config.encoder.model_dump(mode="json"),
        "student": options.model_dump(mode="json"),
    }


def _timed(teacher: TrainedRun, student: Student, timer: Timer) -> dict[str, float]:
    texts = teacher.validation.queries.to_pylist() or teacher.phrases["text"].to_pylist()
    texts = texts[:_TIMED_QUERIES]
    taken = {
        "teacher": round(timer(teacher.model, teacher.tokenizer, texts), 4),
        "student": round(timer(student.model, student.tokenizer, texts), 4),
    }
    said = ", ".join(f"{name} {milliseconds:.3f}" for name, milliseconds in taken.items())
    say(f"milliseconds a query (ONNX, one thread, one query a call): {said}")
    return {"queries": len(texts), **taken}


def _write_inputs(
    folder: Path, teacher: TrainedRun, config: TrainConfig, record: dict[str, Any]
) -> dict[str, Any]:
    """Data, configuration and run.json of the student's run; returns the latter."""
    shutil.copytree(teacher.path / "data", folder / "data")
    (folder / ".lock").touch()
    write_config(folder / "config.yaml", config)
    info = teacher.info | {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": config.seed,
        "versions": package_versions(),
        "teacher": record,
    }
    (folder / "run.json").write_bytes(orjson.dumps(info, option=orjson.OPT_INDENT_2))
    return info
