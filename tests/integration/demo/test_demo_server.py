"""The demo's server process: it answers, and it is gone afterwards, whatever happened in between."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bidmatch.base.errors import BidmatchError
from bidmatch.demo.server import post_match, serving


def refuses(address: str) -> bool:
    parts = urlsplit(address)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) != 0


def ask_and_fail(bundle: Path, log: Path, seen: list[str]) -> None:
    with serving(bundle, log) as address:
        seen.append(address)
        answer, seconds = post_match(address, "red garden hose", 3)
        assert answer["matches"][0]["phrase"] == "red garden hose"
        assert len(answer["matches"]) == 3
        assert seconds > 0
        with pytest.raises(BidmatchError, match=r"POST .* failed"):
            post_match(address, "", 3)
        raise ZeroDivisionError


def test_it_answers_and_is_gone_after_a_failure(small_bundle: Path, tmp_path: Path):
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError):
        ask_and_fail(small_bundle, tmp_path / "log", seen)
    assert refuses(seen[0])


def test_a_server_that_cannot_start_is_quoted(tmp_path: Path):
    (tmp_path / "bundle").mkdir()
    with (
        pytest.raises(BidmatchError, match=r"ended with code 4.*error:"),
        serving(tmp_path / "bundle", tmp_path / "log"),
    ):
        pass
