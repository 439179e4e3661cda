"""`bidmatch export` and `bidmatch inspect` as processes, killed ones included."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from bidmatch.base.files import sha256_file
from export.bundle.encoder import QueryEncoder
from export.bundle.index import PhraseIndex
from export.bundle.read import open_bundle

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
KILLS = int(os.environ.get("BIDMATCH_KILLS", "3"))


def bidmatch(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "bidmatch", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )


def start_export(run, out):
    return subprocess.Popen(
        [sys.executable, "-m", "bidmatch", "export", "--checkpoint", str(run), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )


def digests(folder):
    """SHA-256 of every file but the manifest, whose times differ from run to run."""
    return {file.name: sha256_file(file) for file in folder.iterdir() if file.name != "manifest.json"}


@pytest.fixture(scope="module")
def exported(small_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "bundle"
    done = bidmatch("export", "--checkpoint", small_run, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout), done.stderr


def test_a_real_run_becomes_a_bundle_that_matches(exported):
    out, manifest, said = exported
    with open_bundle(out) as bundle:
        assert bundle.manifest.bundle_id == manifest["bundle_id"]
        assert bundle.phrases.column_names[:2] == ["id", "text"]
        vectors = QueryEncoder(bundle).encode(["best red garden hose"]).narrow
        rows = PhraseIndex(bundle).search(vectors, 3).rows
        assert "red garden hose" in [bundle.phrases["text"][int(row)].as_py() for row in rows[0]]
    assert manifest["encoder"]["parity"]["min_cosine"] >= 0.9999
    assert manifest["encoder"]["parity"]["queries"] > 20
    assert manifest["index"]["reached"]
    assert manifest["index"]["recall"] >= manifest["index"]["target_recall"] == 0.99
    assert {"P@1", "PSP@5", "recall@10"} <= manifest["quality"]["exact"].keys()
    assert "int8 encoder" in said
    assert manifest["model"]["not_in_index"] is None
    assert "not in the index" not in said


def test_what_is_said_names_no_folder_of_this_machine_in_the_manifest(exported):
    out, _, _ = exported
    assert str(out.parent) not in (out / "manifest.json").read_text()
    assert "site-packages" not in (out / "manifest.json").read_text()


def test_inspect(exported):
    out, manifest, _ = exported
    shown = bidmatch("inspect", out)
    assert shown.returncode == 0, shown.stderr
    assert manifest["bundle_id"] in shown.stdout
    assert "files verified" in shown.stdout
    as_json = json.loads(bidmatch("inspect", out, "--json").stdout)
    assert as_json.pop("path") == str(out)
    assert as_json.pop("verified") is True
    assert as_json == manifest


def test_a_run_with_wide_heads_becomes_a_bundle_that_re_scores(small_wide_run, tmp_path):
    done = bidmatch("export", "--checkpoint", small_wide_run, "--out", tmp_path / "wide", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)["rescore"]
    assert (record["dim"], record["encoder_dim"], record["candidates"]) == (48, 24, 48)
    assert record["queries"] > 20
    assert record["rescored"]["recall@10"] > 50
    assert "re-scoring 48 candidates (1 a match) with 48 numbers a phrase in 8 bits" in done.stderr
    shown = bidmatch("inspect", tmp_path / "wide")
    assert "Re-scoring: 48 candidates" in shown.stdout
    assert "from exact search" in shown.stdout
    plain = bidmatch("export", "--checkpoint", small_wide_run, "--out", tmp_path / "narrow", "--no-rescore")
    assert plain.returncode == 0, plain.stderr
    assert not (tmp_path / "narrow" / "wide.npy").exists()
    assert "Re-scoring" not in bidmatch("inspect", tmp_path / "narrow").stdout


def test_candidates_of_a_run_without_wide_heads_are_refused(small_run, tmp_path):
    done = bidmatch("export", "--checkpoint", small_run, "--out", tmp_path / "b", "--candidates", "50")
    assert done.returncode == 2
    assert "no wide heads" in done.stderr
    assert not (tmp_path / "b").exists()


def test_a_run_is_measured_by_all_its_views(small_wide_run):
    done = bidmatch("eval", "--checkpoint", small_wide_run, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"concatenation", "wide", "rescored"} <= report["views"].keys()
    assert report["metrics"] == report["views"]["rescored"]["metrics"]


def test_nothing_is_written_into_a_bundle(exported, tmp_path):
    bundle, log = exported[0], tmp_path / "log.tsv"
    log.write_text("query\nshoes\n")
    for command in (
        ("inspect", bundle, "--html", bundle / "manifest.json"),
        ("score", "--bundle", bundle, "--input", log, "--output", bundle / "matches.csv"),
    ):
        done = bidmatch(*command)
        assert "holds nothing but its own files" in done.stderr, done.stderr
    assert bidmatch("inspect", bundle).returncode == 0


def test_inspect_of_a_damaged_bundle_exits_4_and_says_why(exported, tmp_path):
    copy = shutil.copytree(exported[0], tmp_path / "copy")
    os.truncate(copy / "links.npy", 100)
    done = bidmatch("inspect", copy)
    assert done.returncode == 4
    assert "links.npy has 100 bytes" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_taken_folder_is_left_alone_unless_overwriting_is_asked_for(exported, small_run, tmp_path):
    out = tmp_path / "bundle"
    out.mkdir()
    (out / "precious.txt").write_text("x")
    refused = bidmatch("export", "--checkpoint", small_run, "--out", out)
    assert refused.returncode == 1
    assert "already exists" in refused.stderr
    foreign = bidmatch("export", "--checkpoint", small_run, "--out", out, "--overwrite")
    assert foreign.returncode == 1
    assert "is no bundle" in foreign.stderr
    # A web application's manifest has the same name.
    (out / "manifest.json").write_text("{}")
    assert bidmatch("export", "--checkpoint", small_run, "--out", out, "--overwrite").returncode == 1
    assert (out / "precious.txt").read_text() == "x"
    bundle = shutil.copytree(exported[0], tmp_path / "old")
    os.truncate(bundle / "vectors.npy", 7)
    replaced = bidmatch(
        "export", "--checkpoint", small_run, "--out", bundle, "--overwrite", "--target-recall", "0.9"
    )
    assert replaced.returncode == 0, replaced.stderr
    with open_bundle(bundle) as opened:
        assert opened.manifest.index.target_recall == 0.9
        assert opened.manifest.bundle_id != exported[1]["bundle_id"]


def test_a_folder_that_is_no_run(tmp_path):
    done = bidmatch("export", "--checkpoint", tmp_path, "--out", tmp_path / "bundle")
    assert done.returncode == 2
    assert "holds no checkpoint" in done.stderr
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kill_at_random_moments_leaves_nothing_or_all_and_a_rerun_gives_the_same(
    exported, small_run, tmp_path
):
    """BIDMATCH_KILLS=10 kills ten times; moments are drawn over the time in which files are being written."""
    reference, manifest, _ = exported
    out = tmp_path / "bundle"
    begun = time.monotonic()
    process = start_export(small_run, tmp_path / "measure")
    while not list(tmp_path.glob(".measure.*")):
        assert process.poll() is None
        time.sleep(0.005)
    writing = time.monotonic() - begun
    assert process.wait() == 0
    whole = time.monotonic() - begun
    chance = random.Random(int(os.environ.get("BIDMATCH_KILL_SEED", "0")))
    killed = tries = 0
    while killed < KILLS:
        tries += 1
        assert tries <= 10 * KILLS, "it ends before it can be killed"
        process = start_export(small_run, out)
        time.sleep(chance.uniform(writing * 0.8, whole))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        if out.exists():
            with open_bundle(out) as bundle:
                assert bundle.manifest.bundle_id == manifest["bundle_id"]
            shutil.rmtree(out)
    done = bidmatch("export", "--checkpoint", small_run, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bundle_id"] == manifest["bundle_id"]
    assert digests(out) == digests(reference)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bundle", "measure"]


def test_a_cascade_says_what_its_index_leaves_out(small_cascade_run, tmp_path):
    done = bidmatch("export", "--checkpoint", small_cascade_run, "--out", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert "not in the index: the cascade looks into the" in done.stderr
    with open_bundle(tmp_path / "b") as bundle:
        assert "no group head" in bundle.manifest.model.not_in_index
        assert bundle.vectors.shape == (48, 16)
    assert "no group head" in " ".join(bidmatch("inspect", tmp_path / "b").stdout.split())
