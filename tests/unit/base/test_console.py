from __future__ import annotations

import math

import orjson
import pytest

from bidmatch.base import console


def test_json_goes_to_stdout_with_nan_as_null(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit_json({"P@1": 1.5, "none": math.nan})
    captured = capsys.readouterr()
    assert orjson.loads(captured.out) == {"P@1": 1.5, "none": None}
    assert captured.err == ""


def test_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(console, "_QUIET_BELOW_S", 0.0)
    with console.progress("reading", 4, "lines") as step:
        step.advance(2, note="half")
        step.advance(2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("reading: 2/4, ")
    assert "left" in lines[0]
    assert "half" in lines[0]
    assert lines[1].startswith("reading: 4/4, ")


def test_a_short_step_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("reading", 1, "lines") as step:
        step.advance()
    assert capsys.readouterr().err == ""
