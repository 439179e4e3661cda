from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bidmatch.base.errors import BidmatchError, ConfigError
from service.scoring.output import Written
from service.scoring.work import InputRecord, Plan, Work, open_work, work_folder


def plan_of(path: Path, **changes: object) -> Plan:
    values = {
        "bundle_id": "abc",
        "index_sha256": "0" * 64,
        "inputs": [InputRecord.of(path)],
        "query_column": None,
        "encoding": None,
        "bad_lines": "stop",
        "k": 10,
        "min_score": None,
        "ef": None,
        "min_relevance": None,
        "rescore": None,
        "candidates": None,
        "honour_match_types": True,
        "output_kind": "csv",
    }
    return Plan.model_validate(values | changes)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.tsv"
    path.write_text("red\n")
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results" / "matches.csv"


def _leave(work: Work, part: int = 0) -> None:
    """What a run leaves that was killed while scoring."""
    work.counts.write_text("{}")
    work.part(part).write_text("result")


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_the_output_appears_whole_and_the_folder_goes(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        assert not work.resumed
        with work.writing() as path:
            path.write_text("half")
            assert not output.exists()
            path.write_text("whole")
        assert not output.exists()
        work.seal("{}")
        work.move_out()
    assert output.read_text() == "whole"
    assert names(output.parent) == {"matches.csv"}


def test_work_is_kept_and_gone_on_with(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        _leave(work, 3)
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        assert work.resumed
        assert work.part(3).read_text() == "result"
        assert work.finished() is None


@pytest.mark.parametrize(
    "change",
    [
        {"k": 11},
        {"min_score": 0.5},
        {"bundle_id": "abd"},
        {"index_sha256": "1" * 64},
        {"encoding": "utf-8"},
        {"ef": 3},
        {"rescore": False},
        {"candidates": 50},
        {"shard": "1/2"},
        {"unordered": True},
        {"rows_per_file": 5},
    ],
)
def test_another_plan_is_refused_unless_begun_anew(
    output: Path, log: Path, change: dict[str, object]
) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        _leave(work)
    other = plan_of(log, **change)
    name = next(iter(change))
    with (
        pytest.raises(ConfigError, match=f"other settings or input .{name}: .*, now "),
        open_work(output, other, restart=False, overwrite=False),
    ):
        pass
    assert work.part(0).exists()
    with open_work(output, other, restart=True, overwrite=False) as anew:
        assert not anew.resumed
        assert not anew.part(0).exists()


def test_a_changed_input_is_another_plan(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        _leave(work)
    state = log.stat()
    log.write_text("rod\n")
    os.utime(log, ns=(state.st_atime_ns, state.st_mtime_ns))
    with (
        pytest.raises(ConfigError, match=r"inputs: .*log\.tsv of 4 bytes"),
        open_work(output, plan_of(log), restart=False, overwrite=False),
    ):
        pass


def test_a_plan_that_cannot_be_read_is_another_plan(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        _leave(work)
        (work.folder / "plan.json").write_text("{}")
    with pytest.raises(ConfigError), open_work(output, plan_of(log), restart=False, overwrite=False):
        pass


def test_parts_without_a_plan_are_thrown_away(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        _leave(work)
        (work.folder / "plan.json").unlink()
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        assert not work.part(0).exists()


def test_an_output_that_is_there_is_not_replaced_unasked(output: Path, log: Path) -> None:
    output.parent.mkdir()
    output.write_text("old")
    with (
        pytest.raises(BidmatchError, match="already exists"),
        open_work(output, plan_of(log), restart=False, overwrite=False),
    ):
        pass
    assert names(output.parent) == {"matches.csv"}
    with open_work(output, plan_of(log), restart=False, overwrite=True) as work:
        _leave(work)
    with (
        pytest.raises(BidmatchError, match="already exists"),
        open_work(output, plan_of(log), restart=False, overwrite=False),
    ):
        pass
    with open_work(output, plan_of(log), restart=False, overwrite=True) as work:
        assert work.resumed
        with work.writing() as path:
            path.write_text("new")
        assert output.read_text() == "old"
        work.seal("{}")
        work.move_out()
    assert output.read_text() == "new"


@pytest.mark.parametrize("moved", [False, True])
def test_killed_between_the_seal_and_the_clean_up(output: Path, log: Path, moved: bool) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        with work.writing() as path:
            path.write_text("whole")
        _leave(work)
        work.seal('{"a": 1}')
        if moved:
            (work.folder / "output.whole").rename(output)
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        assert work.finished() == '{"a": 1}'
        work.move_out()
    assert output.read_text() == "whole"
    assert names(output.parent) == {"matches.csv"}


def test_what_a_killed_clean_up_left_is_removed(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        _leave(work)
        shutil.copytree(work.folder, output.parent / ".matches.csv.0a1b2c3d.partial")
    assert len(names(output.parent)) == 2
    with open_work(output, plan_of(log), restart=False, overwrite=False):
        assert names(output.parent) == {work_folder(output).name}


def test_one_run_at_a_time(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        _leave(work)
        for restart in (False, True):
            with (
                pytest.raises(BidmatchError, match="another run is writing"),
                open_work(output, plan_of(log), restart=restart, overwrite=True),
            ):
                pass
        assert work.part(0).exists()
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        assert work.resumed


def test_a_run_that_was_killed_while_reading_begins_anew_with_any_plan(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log), restart=False, overwrite=False) as work:
        _leave(work)
    work.counts.unlink()
    with open_work(output, plan_of(log, k=11), restart=False, overwrite=False) as work:
        assert not work.resumed
        assert not work.part(0).exists()


def _write(output: Path, work: Work, files: int) -> None:
    for number in range(files):
        (output / f"part-{number:05}.csv").write_text(str(number))
    work.counts.write_text("{}")
    work.keep(Written(files=files, part=7, row=2))


def test_a_folder_is_gone_on_with_behind_its_last_whole_file(output: Path, log: Path) -> None:
    plan = plan_of(log, rows_per_file=5)
    with open_work(output, plan, restart=False, overwrite=False) as work:
        assert work.open_folder() == Written()
        _write(output, work, 2)
        (output / ".part-00002.csv.0a1b2c3d.partial").write_text("half")
    with open_work(output, plan, restart=False, overwrite=False) as work:
        assert work.open_folder() == Written(files=2, part=7, row=2)
        assert names(output) == {"part-00000.csv", "part-00001.csv"}
        work.seal("{}")
        work.move_out()
    assert names(output) == {"part-00000.csv", "part-00001.csv", "_SUCCESS"}
    assert names(output.parent) == {output.name}
    with (
        pytest.raises(BidmatchError, match="already exists"),
        open_work(output, plan, restart=False, overwrite=False),
    ):
        pass
    with open_work(output, plan, restart=False, overwrite=True) as work:
        # Until there is something new the old output is whole.
        assert (output / "_SUCCESS").exists()
        assert work.open_folder() == Written()
        assert names(output) == set()


def test_a_folder_whose_files_were_taken_away_is_written_anew(output: Path, log: Path) -> None:
    plan = plan_of(log, rows_per_file=5)
    with open_work(output, plan, restart=False, overwrite=False) as work:
        work.open_folder()
        _write(output, work, 2)
    (output / "part-00000.csv").unlink()
    with open_work(output, plan, restart=False, overwrite=False) as work:
        assert work.open_folder() == Written()
        assert names(output) == set()


def test_a_folder_begun_by_a_run_with_other_options_needs_restart_alone(output: Path, log: Path) -> None:
    with open_work(output, plan_of(log, rows_per_file=5), restart=False, overwrite=False) as work:
        work.open_folder()
        _write(output, work, 2)
    other = plan_of(log, rows_per_file=6)
    with pytest.raises(ConfigError), open_work(output, other, restart=False, overwrite=False):
        pass
    assert len(names(output)) == 2
    with open_work(output, other, restart=True, overwrite=False) as work:
        assert work.open_folder() == Written()
        assert names(output) == set()
