from __future__ import annotations

import os
from typing import Any

import pytest
from pydantic import ValidationError

from service.settings import Settings, usable_cpus


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("BIDMATCH_"):
            monkeypatch.delenv(name)


def settings(**given: Any) -> Settings:
    return Settings(bundle="b", **given)  # type: ignore[arg-type]


def test_environment_then_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIDMATCH_BUNDLE", "some/bundle")
    monkeypatch.setenv("BIDMATCH_PORT", "9001")
    monkeypatch.setenv("BIDMATCH_MAX_K", "50")
    monkeypatch.setenv("BIDMATCH_NO_SUCH_SETTING", "ignored")
    both = Settings(port=9002)  # type: ignore[call-arg]
    assert (str(both.bundle), both.port, both.max_k) == ("some/bundle", 9002, 50)


@pytest.mark.parametrize(("value", "wanted"), [("off", False), ("on", True), ("0", False), (None, None)])
def test_re_scoring_can_be_switched_off_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool | None
) -> None:
    if value is not None:
        monkeypatch.setenv("BIDMATCH_RESCORE", value)
    monkeypatch.setenv("BIDMATCH_CANDIDATES", "50")
    engine = settings().engine()
    assert (engine.rescore, engine.candidates) == (wanted, 50)


def test_what_concerns_the_engine_reaches_it() -> None:
    given: dict[str, Any] = {
        "encoder_threads": 2,
        "ef": 77,
        "rescore": False,
        "candidates": 5,
        "honour_match_types": False,
        "provider": "auto",
    }
    milvus = {"uri": "http://milvus:19530", "timeout_ms": 70, "calls": 3}
    from_environment = {"token": None}
    named = {f"milvus_{name}": value for name, value in milvus.items()}
    engine = settings(**given, **named).engine()
    assert engine.model_dump() == {**given, "milvus": milvus | from_environment}
    assert set(type(engine).model_fields) == {*given, "milvus"}


def test_it_is_open_to_this_machine_alone_unless_told_otherwise() -> None:
    plain = settings()
    assert (plain.host, plain.auth, plain.api_keys_file, plain.admin_keys_file) == (
        "127.0.0.1",
        "auto",
        None,
        None,
    )
    assert not plain.log_queries
    assert plain.live is None


def test_processors_are_shared_out_among_workers_and_encoder_threads() -> None:
    cpus = usable_cpus()
    assert settings().batches_at_once(1e-3) == cpus
    assert settings(workers=cpus).batches_at_once(1e-3) == 1
    assert settings(workers=256, encoder_threads=2).batches_at_once(1e-3) == 1
    assert settings(encoder_threads=cpus).batches_at_once(1e-3) == 1
    assert settings(workers=256, threads=3).batches_at_once(1e-3) == 3
    # Threads that have next to nothing to encode only take turns.
    assert settings().batches_at_once(1e-5) == 1
    assert settings(threads=3).batches_at_once(1e-5) == 3


def test_every_setting_is_said_and_described() -> None:
    lines = settings(threads=3).lines()
    assert [line.split(" = ")[0] for line in lines] == list(Settings.model_fields)
    assert "threads = 3" in lines
    assert all(field.description for field in Settings.model_fields.values())


def test_a_queue_of_just_one_request_is_one() -> None:
    assert settings(queue=8, max_queries=8, queue_kb=8, max_query_chars=1000).queue_kb == 8
    assert settings(queue_kb=2, max_body_bytes=2000).queue_kb == 2


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"port": 70_000}, "less than or equal to 65535"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"workers": 0}, "greater than or equal to 1"),
        ({"log_level": "loud"}, "'critical', 'error'"),
        ({"log_format": "xml"}, "'text' or 'json'"),
        ({"provider": "tpu"}, "'auto', 'cpu' or 'cuda'"),
        ({"auth": "maybe"}, "'auto', 'on' or 'off'"),
        ({"canary": 1.5}, "less than or equal to 1"),
        ({"cache_mb": -1}, "greater than or equal to 0"),
        ({"queue": 10}, "could never be taken"),
        (
            {"deadline_ms": 501, "max_deadline_ms": 500},
            r"max_deadline_ms \(500\) is less than deadline_ms",
        ),
        ({"no_such_setting": 1}, "Extra inputs"),
    ],
)
def test_what_can_not_be_is_refused(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        settings(**wrong)


def test_settings_stay_as_they_are() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        settings().port = 1


@pytest.mark.parametrize(
    ("given", "longest"),
    [
        ({}, 10_000),
        ({"deadline_ms": 20_000}, 20_000),
        ({"max_deadline_ms": 2000}, 2000),
        ({"max_deadline_ms": 60_000}, 60_000),
    ],
)
def test_the_longest_deadline_follows_the_usual_one(given: dict[str, object], longest: int) -> None:
    assert settings(**given).longest_deadline_ms == longest
