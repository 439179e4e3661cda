"""A student of a trained run: it comes near its teacher, keeps the teacher's labels, and can be exported."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from bidmatch.base.errors import BidmatchError, ConfigError
from bidmatch.commands.distill import command
from bidmatch.commands.eval import command as evaluate
from export.build import ExportOptions, build_bundle
from export.bundle.encoder import QueryEncoder
from export.bundle.read import open_bundle
from export.source import from_run
from export.timing import milliseconds_of
from trainer.checkpoint import checkpoints, load_run
from trainer.corpus import keys_of, token_source
from trainer.distil import distil
from trainer.embed import embed
from trainer.run_folder import locked_run
from trainer.student import StudentOptions

BAG = StudentOptions(encoder="bag", epochs=3, queries=64, threads=1, device="cpu")


@pytest.fixture(scope="module")
def teacher(train_command, small_settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the bag encoder, with wide heads."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    done = train_command(out, {**small_settings, "wide_dim": 32, "epochs": 3}).run()
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def student(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("student") / "run"
    distil(teacher, BAG, out, milliseconds_of)
    return out


def cosines(run: Path) -> dict[str, dict[str, float]]:
    return json.loads((run / "report.json").read_bytes())["student"]["cosine"]


def test_a_bag_of_a_bag_is_its_teacher_over_again(student: Path):
    """It starts from the teacher's word vectors and heads, and has nothing to learn but a residual block."""
    after = cosines(student)["after"]
    assert list(after) == ["Φ_D", "N(Φ_C)", "wide Φ_D", "wide N(Φ_C)"]
    assert 0.999 < min(after.values()) <= max(after.values()) <= 1


def test_labels_and_tables_are_the_teachers(teacher: Path, student: Path):
    mine, theirs = load_run(student), load_run(teacher)
    np.testing.assert_array_equal(mine.table, theirs.table)
    np.testing.assert_array_equal(mine.wide_table, theirs.wide_table)
    source = token_source(theirs.tokenizer, keys_of(theirs.phrases), "phrases")
    pairs = embed(theirs.model, source, torch.device("cpu"), "phrases", wide=True)
    assert mine.label_vectors is not None
    for kept, pair in zip(mine.label_vectors, pairs, strict=True):
        np.testing.assert_allclose(kept, pair.phi_d.numpy(), atol=1e-6)
    assert theirs.label_vectors is None


def test_the_run_says_whose_student_it_is_and_of_what_data(teacher: Path, student: Path):
    mine, theirs = load_run(student), load_run(teacher)
    assert mine.info["teacher"]["model_id"] == theirs.model_id
    assert mine.info["data"] == theirs.info["data"]
    assert mine.info["sha256"] == theirs.info["sha256"]
    assert mine.model_id != theirs.model_id
    assert mine.config.wide_dim == 32
    assert mine.validation.queries == theirs.validation.queries


def test_the_report_holds_both_side_by_side(teacher: Path, student: Path):
    report = json.loads((student / "report.json").read_bytes())
    measured = report["student"]["validation"]
    own = json.loads((teacher / "report.json").read_bytes())
    for view, figures in own["validation"]["metrics"].items():
        assert measured["teacher"]["metrics"][view] == pytest.approx(figures, abs=1e-6, nan_ok=True)
    assert measured["student"] == report["validation"]
    assert min(report["student"]["milliseconds"].values()) > 0
    page = (student / "report.html").read_text(encoding="utf-8")
    assert "Cosine with the teacher" in page
    assert own["model_id"] in page


def test_its_bundle_has_the_teachers_phrase_vectors(teacher: Path, student: Path, tmp_path: Path):
    bundles = {}
    for name, run in (("teacher", teacher), ("student", student)):
        build_bundle(from_run(run), tmp_path / name, ExportOptions(threads=1, candidates=20))
        bundles[name] = open_bundle(tmp_path / name)
    mine, theirs = bundles["student"], bundles["teacher"]
    np.testing.assert_allclose(mine.vectors, theirs.vectors, atol=1e-5)
    step = theirs.wide.scales.max()
    np.testing.assert_allclose(
        mine.wide.rows * np.repeat(mine.wide.scales, 16, axis=1),
        theirs.wide.rows * np.repeat(theirs.wide.scales, 16, axis=1),
        atol=2 * step,
    )
    assert mine.manifest.model.id == load_run(student).model_id
    assert mine.manifest.files["encoder.onnx"] != theirs.manifest.files["encoder.onnx"]
    with pytest.raises(AssertionError):  # its own encoder would have given the phrases other vectors
        np.testing.assert_allclose(
            QueryEncoder(mine, precision="fp32").encode(mine.phrases["text"].to_pylist()).narrow[:, :8],
            mine.vectors[:, :8],
            atol=1e-5,
        )


def test_eval_measures_it_against_the_teachers_labels(student: Path):
    done = CliRunner().invoke(evaluate, ["--checkpoint", str(student), "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)["views"]
    expected = json.loads((student / "report.json").read_bytes())["test"]["metrics"]
    for view, figures in expected.items():
        assert {name: found[view]["metrics"][name] for name in figures} == pytest.approx(figures, nan_ok=True)


def test_equal_settings_give_an_equal_student(teacher: Path, student: Path, tmp_path: Path):
    distil(teacher, BAG, tmp_path / "again", lambda *_: 1.0)
    assert load_run(tmp_path / "again").model_id == load_run(student).model_id


def test_students_of_a_transformer_come_near_it(train_command, small_settings, tiny_encoders, tmp_path: Path):
    """Of two layers of width 16: one student has the first of them, the other is a bag; both learn.

    How near they come is told by validation queries, which they do not train on.
    """
    settings = {**small_settings, "epochs": 1, "encoder.kind": "transformer"}
    done = train_command(tmp_path / "run", settings).run()
    assert done.returncode == 0, done.stderr
    options = BAG.model_copy(update={"encoder": "transformer:1", "epochs": 5, "encoder_lr": 1e-3})
    distil(tmp_path / "run", options, tmp_path / "student", milliseconds_of)
    mine, theirs = load_run(tmp_path / "student"), load_run(tmp_path / "run")
    assert mine.config.encoder.kind == "transformer"
    assert mine.model.encoder.model.config.num_hidden_layers == 1
    assert theirs.model.encoder.model.config.num_hidden_layers == 2
    bag = BAG.model_copy(update={"epochs": 10, "encoder_lr": 0.01})
    distil(tmp_path / "run", bag, tmp_path / "bag", lambda *_: 1.0)
    for kind, reached in (("student", 0.2), ("bag", 0.5)):
        found = cosines(tmp_path / kind)
        for part, before in found["before"].items():
            assert before + reached * (1 - before) < found["after"][part] <= 1.00001, (kind, part, found)
    text = "red garden hose"
    assert len(load_run(tmp_path / "bag").tokenizer.encode(text).ids) == 3
    assert len(mine.tokenizer.encode(text).ids) == 5
    with pytest.raises(ConfigError, match="asks for 3 layers; the teacher has 2"):
        distil(tmp_path / "run", BAG.model_copy(update={"encoder": "transformer:3"}), tmp_path / "x", len)
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_done_is_refused_before_any_work(teacher: Path, student: Path, tmp_path: Path):
    with pytest.raises(BidmatchError, match="already exists"):
        distil(teacher, BAG, student, milliseconds_of)
    with pytest.raises(ConfigError, match="has no layers to take"):
        distil(teacher, BAG.model_copy(update={"encoder": "transformer:1"}), tmp_path / "s", milliseconds_of)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary", encoding="utf-8")
    with pytest.raises(BidmatchError, match="is no run or holds other files"):
        distil(teacher, BAG, tmp_path / "mine", milliseconds_of, overwrite=True)
    (tmp_path / "mine" / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BidmatchError, match="is no run or holds other files"):
        distil(teacher, BAG, tmp_path / "mine", milliseconds_of, overwrite=True)
    assert (tmp_path / "mine" / "diary.txt").exists()
    other = shutil.copytree(student, tmp_path / "other")
    (other / "notes.md").write_text("what I found", encoding="utf-8")
    with pytest.raises(BidmatchError, match="is no run or holds other files"):
        distil(teacher, BAG, other, milliseconds_of, overwrite=True)
    (other / "notes.md").unlink()
    with locked_run(other), pytest.raises(BidmatchError, match="is being trained by another process"):
        distil(teacher, BAG, other, milliseconds_of, overwrite=True)
    assert not (tmp_path / "s").exists()
    with pytest.raises(ConfigError, match="is the teacher"):
        distil(teacher, BAG, teacher / ".." / teacher.name, milliseconds_of, overwrite=True)
    assert load_run(teacher).model_id


def test_a_killed_distillation_leaves_nothing_behind_the_next_one(teacher: Path, tmp_path: Path):
    out = tmp_path / "out"
    short = BAG.model_copy(update={"epochs": 1})
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nimport trainer.distil as d\n"
        "d.save_checkpoint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "d.distil(Path(sys.argv[1]), d.StudentOptions.model_validate_json(sys.argv[2]), Path(sys.argv[3]),"
        " lambda *_: 1.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, teacher, short.model_dump_json(), out], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".partial")
    distil(teacher, short, out, milliseconds_of)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert not list(out.rglob("*.f16"))


def test_the_command_says_which_students_there_are(teacher: Path, tmp_path: Path):
    arguments = ["--checkpoint", str(teacher), "--out", str(tmp_path / "s"), "--encoder", "tree"]
    done = CliRunner().invoke(command, arguments)
    assert isinstance(done.exception, ConfigError)
    assert done.exception.reason == "encoder tree: there is no such student"


def test_a_student_that_does_not_converge_is_not_kept(teacher: Path, tmp_path: Path):
    with pytest.raises(BidmatchError, match="does not converge: the loss is nan"):
        distil(
            teacher,
            BAG.model_copy(update={"encoder_lr": 1e38, "heads_lr": 1e38}),
            tmp_path / "s",
            milliseconds_of,
        )
    assert not (tmp_path / "s").exists()


def test_the_command_makes_a_run_and_says_what_comes_next(teacher: Path, tmp_path: Path):
    out = tmp_path / "student"
    arguments = ["--checkpoint", teacher, "--out", out, "--epochs", 1, "--device", "cpu", "--threads", 1]
    done = CliRunner().invoke(command, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    assert "bidmatch export --checkpoint" in done.stdout
    assert (checkpoints(out)[-1] / "labels.safetensors").is_file()
    assert set(load_file(checkpoints(out)[-1] / "labels.safetensors")) == {"narrow", "wide"}


def test_an_altered_file_of_label_vectors_is_refused(student: Path, tmp_path: Path):
    import shutil

    copy = Path(shutil.copytree(student, tmp_path / "copy"))
    file = checkpoints(copy)[-1] / "labels.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(BidmatchError, match=r"labels\.safetensors"):
        load_run(copy)
