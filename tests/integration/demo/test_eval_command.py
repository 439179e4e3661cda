"""`bidmatch eval --bundle`: the figures of a real bundle, on the queries they should be of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from bidmatch.base.errors import ConfigError
from bidmatch.commands.eval import command


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def figures(*arguments: str | Path) -> dict:
    done = run(*arguments, "--json")
    assert done.exception is None, done.exception
    return orjson.loads(done.stdout)


@pytest.fixture(scope="module")
def log(small_source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every phrase as a query for itself, its match type with it."""
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    rows = zip(
        small_source.phrases["text"].to_pylist(), small_source.phrases["match_type"].to_pylist(), strict=True
    )
    lines = [f"{text}\t{text}\t1\t{match}" for text, match in rows]
    path.write_text("\n".join(["query\tphrase\tclicks\tmatch type", *lines]) + "\n", encoding="utf-8")
    return path


def test_a_query_that_is_a_phrase_finds_it_first(small_bundle: Path, log: Path):
    said = figures("--bundle", small_bundle, "--data", log, "--all-queries")
    assert said["metrics"]["P@1"] == 100
    assert said["metrics"]["recall@10"] == 100
    assert said["metrics"]["PSP@1"] == pytest.approx(100)
    assert said["queries"] == said["pairs"] == said["phrases"] == 54
    assert said["phrases_not_in_bundle"] == 0
    assert said["by_frequency"]["tail"]["labels"] == 54
    assert said["by_frequency"]["head"]["P@1"] is None
    assert said["propensity"] == {"A": 0.55, "B": 1.5, "training_queries": 200}


def test_only_the_queries_that_the_bundles_split_holds_out_are_measured(small_bundle: Path, log: Path):
    said = figures("--bundle", small_bundle, "--data", log)
    assert said["measured"] == "held-out queries"
    assert said["split"]["share"] == 0.1
    assert 0 < said["queries"] < 20
    other = figures("--bundle", small_bundle, "--data", log, "--test-share", "0.5", "--split-seed", "3")
    assert (other["split"]["share"], other["split"]["seed"]) == (0.5, 3)
    assert other["queries"] > said["queries"]


def test_phrases_that_the_bundle_lacks_are_said_and_count_as_misses(
    small_bundle: Path, log: Path, tmp_path: Path
):
    more = tmp_path / "more.tsv"
    more.write_text(
        log.read_text(encoding="utf-8") + "nowhere\tnot in the bundle\t1\texact\n", encoding="utf-8"
    )
    done = run("--bundle", small_bundle, "--data", more, "--all-queries", "--json")
    said = orjson.loads(done.stdout)
    assert (said["phrases_not_in_bundle"], said["pairs_not_in_bundle"]) == (1, 1)
    assert said["metrics"]["P@1"] == pytest.approx(100 * 54 / 55)
    assert "1 of the data's 55 phrases are not in the bundle" in done.stderr
    assert "not the data the bundle was trained on" in done.stderr


def test_constants_of_psp_can_be_given(small_bundle: Path, log: Path):
    arguments = ("--bundle", small_bundle, "--data", log, "--all-queries", "--propensity-a", "0.5")
    done = run(*arguments, "--propensity-b", "0.4")
    assert "A = 0.5, B = 0.4" in done.stderr
    assert "P@1" in done.stdout
    assert "torso" in done.stdout


def test_a_bundle_and_data_are_needed(small_bundle: Path):
    assert isinstance(run("--bundle", small_bundle).exception, ConfigError)
    assert isinstance(run().exception, ConfigError)


def test_a_serving_install_can_measure_a_bundle(small_bundle: Path, log: Path):
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'sklearn', 'onnx')))"
    program = f"{blocked}; from bidmatch.cli import main; main()"
    arguments = ["eval", "--bundle", str(small_bundle), "--data", str(log), "--all-queries", "--json"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert orjson.loads(done.stdout)["metrics"]["P@1"] == 100


def test_a_bundle_is_measured_re_scored_unless_told_otherwise(small_wide_bundle: Path, log: Path):
    arguments = ("--bundle", small_wide_bundle, "--data", log, "--all-queries", "--depth", "10")
    wide = figures(*arguments)
    assert (wide["candidates"], wide["wide_dim"]) == (20, 96)
    few = figures(*arguments, "--candidates", "11")
    assert few["candidates"] == 11
    narrow = figures(*arguments, "--no-rescore")
    assert (narrow["candidates"], narrow["wide_dim"]) == (0, 0)
    assert wide["metrics"]["P@1"] == narrow["metrics"]["P@1"] == 100
    assert "re-scoring 20 candidates" in run(*arguments).stderr


def test_re_scoring_a_bundle_without_wide_vectors_is_refused(small_bundle: Path, log: Path):
    done = run("--bundle", small_bundle, "--data", log, "--all-queries", "--rescore")
    assert isinstance(done.exception, ConfigError)
    assert "no wide vectors" in str(done.exception)
