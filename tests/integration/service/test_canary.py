"""Recall of the index, told from samples of what is served."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from export.bundle.index import Found
from service.engine import Engine
from service.live.store import LiveStore, PhraseRecord
from service.live.sync import prepared
from service.options import MatchOptions
from service.search import index_recall


def told(service: Any) -> dict[str, float]:
    families = text_string_to_metric_families(service.ask("GET", "/metrics").text)
    wanted = ("bidmatch_recall", "bidmatch_canary_hits_total", "bidmatch_canary_wanted_total")
    return {one.name: one.value for family in families for one in family.samples if one.name in wanted}


def checked(service: Any, wanted: float) -> dict[str, float]:
    """What is told when samples of so many phrases were checked, while queries come."""
    until = time.monotonic() + 30
    at = 0
    while (figures := told(service))["bidmatch_canary_wanted_total"] < wanted:
        assert time.monotonic() < until, figures
        service.ask("POST", "/match", json={"query": f"cheap red tent {at}", "k": 5})
        at += 1
    return figures


def test_a_sound_index_finds_what_exact_search_does(application: Callable, tiny_bundle: Path) -> None:
    service = application(tiny_bundle, canary=1.0, cache_mb=0)
    # Nothing was sampled yet, and there is no recall of nothing.
    assert told(service) == {"bidmatch_canary_hits_total": 0, "bidmatch_canary_wanted_total": 0}
    figures = checked(service, 25)
    assert figures["bidmatch_recall"] == 1
    assert figures["bidmatch_canary_hits_total"] == figures["bidmatch_canary_wanted_total"]


def test_one_that_loses_phrases_shows(
    application: Callable, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = application(tiny_bundle, canary=1.0, cache_mb=0)
    index = service.serving.current.engine.index
    search = index.search

    def half_of_it(*arguments: Any, **options: Any) -> Found:
        found = search(*arguments, **options)
        return found._replace(rows=np.where(np.arange(found.rows.shape[1]) % 2, -1, found.rows))

    monkeypatch.setattr(index, "search", half_of_it)
    figures = checked(service, 25)
    # Of the five best the first, third and fifth are left.
    assert figures["bidmatch_recall"] == pytest.approx(0.6)
    assert figures["bidmatch_canary_hits_total"] == 0.6 * figures["bidmatch_canary_wanted_total"]


def test_a_failure_ends_neither_checks_nor_answers(
    application: Callable,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = application(tiny_bundle, canary=1.0, cache_mb=0)
    index = service.serving.current.engine.index
    exact, failed = index.exact, []

    def once(*arguments: Any, **options: Any) -> Found:
        if not failed:
            failed.append(True)
            raise MemoryError("no room")
        return exact(*arguments, **options)

    monkeypatch.setattr(index, "exact", once)
    assert checked(service, 10)["bidmatch_recall"] == 1
    assert failed
    assert "the recall of a query could not be checked" in caplog.text


def test_which_of_equal_ones_are_found_does_not_matter(tiny_bundle: Path, tmp_path: Path) -> None:
    with LiveStore.open(tmp_path / "live") as store:
        store.put([PhraseRecord(f"n{at}", "cheap red tent") for at in range(300)])
        engine = Engine.load(tiny_bundle)
        engine.live, _ = prepared(engine, store)
        engine.live.link(300)
        assert index_recall(engine, "cheap red tents", MatchOptions(10)) == (10, 10)
        assert (
            index_recall(
                engine, "cheap red tents", MatchOptions(10, deny=tuple(f"n{at}" for at in range(295)))
            )[1]
            == 10
        )


def test_it_takes_no_more_than_its_share(
    application: Callable, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of 0.2 s is 2% of a processor's time in 10 s: in less there is no other."""
    done: list[float] = []

    def check(*_: Any) -> tuple[int, int]:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        done.append(time.monotonic())
        return 5, 5

    monkeypatch.setattr("service.canary.index_recall", check)
    service = application(tiny_bundle, canary=1.0, cache_mb=0)
    until = time.monotonic() + 20
    while not done and time.monotonic() < until:
        service.ask("POST", "/match", json={"query": "cheap red tent", "k": 5})
    asked = 0
    while time.monotonic() < done[0] + 2:
        service.ask("POST", "/match", json={"query": f"cheap red tent {asked}", "k": 5})
        asked += 1
    assert asked
    assert len(done) == 1


def test_off_it_samples_nothing(application: Callable, tiny_bundle: Path) -> None:
    service = application(tiny_bundle, canary=0.0, cache_mb=0)
    for at in range(20):
        service.ask("POST", "/match", json={"query": f"cheap red tent {at}", "k": 5})
    assert told(service)["bidmatch_canary_wanted_total"] == 0
