"""Several processes train the model that one would, and end as one whatever becomes of one of them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file

from bidmatch.base.errors import BidmatchError, ConfigError, InputError
from trainer.checkpoint import checkpoints
from trainer.distributed import Workers, join_workers

RELATIVE = 1e-4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Processes:
    """The processes of one training command, as `torchrun` would start them on one machine."""

    command: Any
    count: int = 2

    def start(self) -> list[Any]:
        shared = {"WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": self.count}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        return [
            self.command.server.start(
                self.command.arguments,
                {k: str(v) for k, v in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            )
            for rank in range(self.count)
        ]

    def run(self) -> list[subprocess.CompletedProcess[str]]:
        return [process.finish() for process in self.start()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    final = checkpoints(run)[-1]
    assert final.name.endswith("-final")
    return load_file(final / "model.safetensors") | load_file(final / "table.safetensors")


def losses(run: Path) -> list[dict[str, float]]:
    return [record["loss"] for record in orjson.loads((run / "report.json").read_bytes())["history"]]


# Softmax ignores what all scores of a row have in common, so the gradient of a key's bias is rounding alone,
# and Adam makes whole steps of it. It is as idle in the model's output as in its gradient.
IDLE = ("key.bias", "k_lin.bias")


def assert_same_training(run: Path, other: Path) -> None:
    """Loss curves and weights within `RELATIVE`, weights by the norm of each tensor."""
    for record, expected in zip(losses(run), losses(other), strict=True):
        assert record == pytest.approx(expected, rel=RELATIVE)
    found, expected = weights(run), weights(other)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if not name.endswith(IDLE):
            error = (value.double() - expected[name].double()).norm()
            assert error <= RELATIVE * expected[name].double().norm(), name


@pytest.fixture(scope="session")
def one_epoch(small_settings) -> dict[str, object]:
    """Batches that no number of processes divides, and no dropout."""
    return small_settings | {
        "epochs": 1,
        "batch.queries": 33,
        "batch.hard_negatives": 2,
        "head_dropout": 0,
        "precision": "fp32",
    }


CASES = {
    "bag": {},
    "bag, all that a bag can have": {
        "wide_dim": 32,
        "table_device": "cpu",
        "loss.distillation": 0.5,
        "gandalf.enabled": True,
        "batch.exact_mining_up_to": 0,
        "batch.cluster_size": 8,
    },
    "transformer": {"encoder.kind": "transformer", "optimiser.encoder_lr": 0.001},
    "transformer, frozen below, and local labels": {
        "encoder.kind": "transformer",
        "encoder.frozen_layers": 1,
        "optimiser.encoder_lr": 0.001,
        "classifier.kind": "mhp",
    },
}


def test_only_the_first_process_writes_and_speaks(one_epoch, tmp_path, train_command):
    first, second = Processes(train_command(tmp_path / "run", one_epoch, "--json")).run()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert orjson.loads(first.stdout)["device"]["processes"] == 2
    assert "each of 2 processes" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")
    assert not (tmp_path / "run" / "cache").exists()


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case, one_epoch, tmp_path, tiny_encoders, train_command):
    settings = one_epoch | {"encoder.dropout": 0} | CASES[case]
    if "encoder.kind" in CASES[case]:
        settings |= {"encoder.pretrained": without_dropout(tiny_encoders.bert, tmp_path / "bert")}
        del settings["encoder.dropout"]
    alone = train_command(tmp_path / "one", settings).run()
    assert alone.returncode == 0, alone.stderr
    for process in Processes(train_command(tmp_path / "two", settings)).run():
        assert process.returncode == 0, process.stderr
    assert_same_training(tmp_path / "two", tmp_path / "one")


def without_dropout(encoder: Path, copy: Path) -> Path:
    copy.mkdir()
    for file in encoder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = orjson.loads((encoder / "config.json").read_bytes())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (copy / "config.json").write_bytes(orjson.dumps(config))
    return copy


def test_dropout_masks_do_not_depend_on_processes_where_texts_are_encoded_in_chunks(
    one_epoch, tmp_path, train_command
):
    settings = one_epoch | {"encoder.kind": "transformer", "optimiser.encoder_lr": 0.001, "head_dropout": 0.1}
    chunked = settings | {"batch.chunk": 8}
    assert train_command(tmp_path / "one", chunked).run().returncode == 0
    two = Processes(train_command(tmp_path / "two", chunked))
    assert [process.returncode for process in two.run()] == [0, 0]
    assert_same_training(tmp_path / "two", tmp_path / "one")
    # They do elsewhere: the comparison can fail.
    assert train_command(tmp_path / "whole", settings).run().returncode == 0
    with pytest.raises(AssertionError):
        assert_same_training(tmp_path / "whole", tmp_path / "one")


def test_more_processes_than_queries_in_a_batch(one_epoch, tmp_path, click_log, train_command):
    log = tmp_path / "small.tsv"
    log.write_text("".join(click_log.read_text(encoding="utf-8").splitlines(keepends=True)[:24]))
    settings = one_epoch | {"batch.queries": 2, "batch.hard_negatives": 0, "batch.positives": 1}
    alone = train_command(tmp_path / "one", settings, data=log).run()
    assert alone.returncode == 0, alone.stderr
    for process in Processes(train_command(tmp_path / "three", settings, data=log), 3).run():
        assert process.returncode == 0, process.stderr
    assert_same_training(tmp_path / "three", tmp_path / "one")


LOG = "query\tphrase\n" + "".join(f"q{n}\tp{n % 3}\n" for n in range(30))
CANNOT_BEGIN = {
    "setting": ({"loss.temperatur": 1}, LOG, ConfigError, "did you mean loss.temperature"),
    "data": ({}, LOG + "no tab here\n", InputError, "line 32"),
    "encoder": ({"encoder.pretrained": "/no/such/folder"}, LOG, ConfigError, "/no/such/folder"),
}


@pytest.mark.parametrize(("change", "log", "error", "message"), CANNOT_BEGIN.values(), ids=CANNOT_BEGIN)
def test_what_the_first_process_cannot_begin_ends_all(
    change, log, error, message, one_epoch, tmp_path, train_command
):
    data = tmp_path / "log.tsv"
    data.write_text(log)
    command = train_command(tmp_path / "run", one_epoch | change, data=data)
    first, second = Processes(command).run()
    assert (first.returncode, second.returncode) == 2 * (error.exit_code,), first.stderr + second.stderr
    assert message in first.stderr
    assert "Traceback" not in first.stderr
    assert second.stderr == ""


def test_under_torchrun_the_exit_code_is_the_errors(tmp_path, click_log):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "bidmatch", "train", "--data", str(click_log), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [*launch, *train, "--preset", "bag", "--set", "dims=3"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "did you mean dim" in done.stderr
    assert "terminate called" not in done.stderr
    assert re.search(r"exitcode\s*: 2 ", done.stderr), done.stderr


def test_a_run_that_is_held_by_another_is_refused_by_all(one_epoch, tmp_path, train_command):
    import fcntl

    run = tmp_path / "run"
    run.mkdir()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first, second = Processes(train_command(run, one_epoch)).run()
    assert (first.returncode, second.returncode) == (1, 1)
    assert "being trained by another process" in first.stderr


def test_a_process_that_never_comes_is_not_waited_for_forever(monkeypatch):
    places = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BidmatchError, match="process 0 of 2 could not join"):
        join_workers(timedelta(seconds=1))


def test_without_torchrun_a_process_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert join_workers() == Workers()


@pytest.fixture(scope="session")
def resumable(one_epoch) -> dict[str, object]:
    """All that is random in training switched on, and a checkpoint after every step."""
    return one_epoch | {
        "encoder.dropout": 0.1,
        "encoder.word_dropout": 0.1,
        "head_dropout": 0.1,
        "batch.queries": 16,
        "batch.refresh": 1,
        "epochs": 2,
        "checkpoint_seconds": 0,
    }


@pytest.fixture(scope="session")
def undisturbed(resumable, tmp_path_factory, train_command) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    for process in Processes(train_command(run, resumable)).run():
        assert process.returncode == 0, process.stderr
    return run


def assert_same_outcome(run: Path, other: Path) -> None:
    """Bit for bit."""
    found, expected = weights(run), weights(other)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert losses(run) == losses(other)


def newest(run: Path) -> int:
    return max((int(folder.name.split("-")[1]) for folder in checkpoints(run)), default=-1)


def wait_for_step(run: Path, step: int, running: Any) -> None:
    while newest(run) < step and running.poll() is None:
        time.sleep(0.001)


@pytest.mark.parametrize("killed", [[0], [1], [0, 1]], ids=["first", "second", "both"])
def test_killed_processes_resume_to_the_same_end(killed, resumable, undisturbed, tmp_path, train_command):
    run = tmp_path / "run"
    processes = Processes(train_command(run, resumable))
    for step in (3, 25) if len(killed) == 2 else (3,):
        started = processes.start()
        wait_for_step(run, step, started[0])
        # The second one may notice the loss of the first, and leave, before it can be killed.
        kills = [started[rank].kill() for rank in killed]
        assert kills[0], "training ended before it could be killed"
        for rank in {0, 1} - set(killed):
            # It notices by itself, and leaves no process behind that waits.
            left = started[rank].finish()
            assert left.returncode == 1
            assert "the connection to another process of this run is lost" in left.stderr
            assert "Traceback" not in left.stderr
        assert newest(run) < newest(undisturbed)
    first, second = processes.run()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "resuming at epoch" in first.stderr
    assert_same_outcome(run, undisturbed)


@pytest.mark.slow
def test_torchrun_starts_a_killed_process_again_to_the_same_end(
    resumable, undisturbed, tmp_path, train_command
):
    run = tmp_path / "run"
    arguments = train_command(run, resumable).arguments
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", *torchrun, "-m", "bidmatch", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(run, 3, process)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "resuming at epoch" in said
    assert_same_outcome(run, undisturbed)


def children(pid: int) -> list[int]:
    """Ids of a process's children that train, in order of their start."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"bidmatch" in Path(f"/proc/{child}/cmdline").read_bytes()]
