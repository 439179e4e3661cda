"""A run killed with SIGKILL, however often and wherever, ends in the weights of one that never stopped."""

from __future__ import annotations

import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file

from bidmatch.base.errors import DamagedError
from trainer.checkpoint import checkpoints, load_run, read_state

KILLS = int(os.environ.get("BIDMATCH_KILLS", "4"))


@pytest.fixture(scope="session")
def resumable(small_settings) -> dict[str, object]:
    """All that is random in training switched on, and a checkpoint after every step."""
    return small_settings | {
        "encoder.dropout": 0.1,
        "encoder.word_dropout": 0.1,
        "batch.cluster_size": 8,
        "batch.hard_negatives": 2,
        "batch.queries": 16,
        "batch.refresh": 1,
        "epochs": max(2, KILLS // 2),
        "checkpoint_seconds": 0,
    }


@pytest.fixture(scope="session")
def uninterrupted(resumable, tmp_path_factory, train_command) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    finished = train_command(run, resumable).run_afresh()
    assert finished.returncode == 0, finished.stderr
    return run


def outcome(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All final weights, and the report without times of day and durations."""
    final = checkpoints(run)[-1]
    weights = load_file(final / "model.safetensors") | load_file(final / "table.safetensors")
    report = orjson.loads((run / "report.json").read_bytes())
    for record in report["history"]:
        del record["train_seconds"]
    del report["run"]["created"]
    return weights, report


def assert_same_outcome(run: Path, other: Path) -> None:
    (weights, report), (expected_weights, expected_report) = outcome(run), outcome(other)
    assert weights.keys() == expected_weights.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected_weights[name]), name
    assert report == expected_report


def partials(run: Path) -> list[Path]:
    return sorted(run.rglob(".*.partial"))


@dataclass
class Watch:
    """What the checkpoints folder of a running process shows."""

    run: Path

    def names(self) -> list[str]:
        try:
            return [entry.name for entry in (self.run / "checkpoints").iterdir()]
        except FileNotFoundError:
            return []

    def newest(self) -> int:
        steps = [int(name.split("-")[1]) for name in self.names() if name.startswith("step-")]
        return max(steps, default=-1)

    def writing(self) -> bool:
        return any(name.endswith(".partial") for name in self.names())


def test_killed_at_random_moments(resumable, uninterrupted, tmp_path, train_command):
    run = tmp_path / "run"
    command = train_command(run, resumable)
    seed = int(os.environ.get("BIDMATCH_KILL_SEED", "0"))
    rng = random.Random(seed)
    watch, killed, reached, torn = Watch(run), 0, [], 0
    last = int(checkpoints(uninterrupted)[-1].name.split("-")[1])
    while killed < KILLS:
        process = command.start()
        before = watch.newest()
        target = before + rng.randint(0, max(1, (last - 1 - before) // (KILLS - killed + 1)))
        in_write = rng.random() < 0.5
        while process.poll() is None and not (watch.newest() >= target and (not in_write or watch.writing())):
            time.sleep(0.0005)
        time.sleep(rng.choice([0.0, 0.002, 0.01, 0.05]))
        assert process.kill(), "training ended before it could be killed: too few steps for so many kills"
        killed += 1
        reached.append(watch.newest())
        torn += watch.writing()
        for folder in checkpoints(run)[-1:]:
            read_state(folder)
    print(f"killed after steps {reached}, {torn} times within a checkpoint's writing; seed {seed}")
    finished = command.run()
    assert finished.returncode == 0, finished.stderr
    assert "resuming at epoch" in finished.stderr
    assert partials(run) == []
    assert_same_outcome(run, uninterrupted)


def test_killed_before_the_first_checkpoint(resumable, uninterrupted, tmp_path, train_command):
    run = tmp_path / "run"
    command = train_command(run, resumable)
    for wanted in ("data", "checkpoints"):
        process = command.start()
        while process.poll() is None and not (run / wanted).exists():
            time.sleep(0.0005)
        assert process.kill()
    finished = command.run()
    assert finished.returncode == 0, finished.stderr
    assert partials(run) == []
    assert_same_outcome(run, uninterrupted)


def test_killed_while_finishing(resumable, uninterrupted, tmp_path, train_command):
    run = tmp_path / "run"
    command = train_command(run, resumable)
    process = command.start()
    while process.poll() is None and not any(name.endswith("-final") for name in Watch(run).names()):
        time.sleep(0.0005)
    assert process.kill(), "it ended before its report could be cut off"
    finished = command.run()
    assert finished.returncode == 0, finished.stderr
    assert "finished already" in finished.stderr
    assert partials(run) == []
    assert_same_outcome(run, uninterrupted)


def test_a_transformer_above_frozen_layers_resumes_exactly(small_settings, tmp_path, train_command):
    settings = small_settings | {
        "encoder.kind": "transformer",
        "encoder.frozen_layers": 1,
        "precision": "fp32",
        "epochs": 1,
        "checkpoint_seconds": 0,
    }
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    process = train_command(stopped, settings).start()
    while process.poll() is None and Watch(stopped).newest() < 3:
        time.sleep(0.0005)
    assert process.kill()
    for run in (stopped, whole):
        finished = train_command(run, settings).run()
        assert finished.returncode == 0, finished.stderr
    assert_same_outcome(stopped, whole)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_half_a_checkpoint_is_none_and_a_damaged_one_is_named(
    resumable, uninterrupted, tmp_path, train_command
):
    run = tmp_path / "run"
    command = train_command(run, resumable)
    process = command.start()
    while process.poll() is None and Watch(run).newest() < 4:
        time.sleep(0.0005)
    assert process.kill()
    before, newest = checkpoints(run)[-2:]
    # As if killed halfway through a later step that no resumed run need write again.
    left = newest.with_name(".step-00009999.0a1b2c3d.partial")
    left.mkdir()
    (left / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:100])
    assert checkpoints(run)[-2:] == [before, newest]

    damage(newest / "optimiser.safetensors")
    refused = command.run()
    assert refused.returncode == DamagedError.exit_code
    assert str(newest / "optimiser.safetensors") in refused.stderr
    assert "Traceback" not in refused.stderr

    # Its hint is followed: the checkpoint before it leads to the same end.
    shutil.rmtree(newest)
    finished = command.run()
    assert finished.returncode == 0, finished.stderr
    assert before.name in finished.stderr
    assert partials(run) == []
    assert_same_outcome(run, uninterrupted)


FINAL_FILES = ["model.safetensors", "table.safetensors", "tokenizer.json", "architecture.yaml"]


@pytest.mark.parametrize("name", [*FINAL_FILES, "config.yaml", "state.yaml"])
@pytest.mark.parametrize("how", ["altered", "cut", "missing"])
def test_a_damaged_final_checkpoint_is_refused(uninterrupted, tmp_path, name, how):
    run = tmp_path / "run"
    run.mkdir()
    for entry in ("data", "run.json", "config.yaml"):
        (run / entry).symlink_to(uninterrupted / entry)
    source = checkpoints(uninterrupted)[-1]
    folder = run / "checkpoints" / source.name
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert load_run(run).model_id == load_run(uninterrupted).model_id
    file = folder / name
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        damage(file)
    with pytest.raises(DamagedError) as refused:
        load_run(run)
    assert name in str(refused.value)
