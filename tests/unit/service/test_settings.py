from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.settings import Settings


def test_environment_then_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIDMATCH_BUNDLE", "some/bundle")
    monkeypatch.setenv("BIDMATCH_PORT", "9001")
    monkeypatch.setenv("BIDMATCH_MAX_K", "50")
    monkeypatch.setenv("BIDMATCH_NO_SUCH_SETTING", "ignored")
    settings = Settings(port=9002)  # type: ignore[call-arg]
    assert (str(settings.bundle), settings.port, settings.max_k) == ("some/bundle", 9002, 50)


@pytest.mark.parametrize(("value", "wanted"), [("off", False), ("on", True), ("0", False), (None, None)])
def test_re_scoring_can_be_switched_off_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool | None
) -> None:
    monkeypatch.delenv("BIDMATCH_RESCORE", raising=False)
    if value is not None:
        monkeypatch.setenv("BIDMATCH_RESCORE", value)
    monkeypatch.setenv("BIDMATCH_CANDIDATES", "50")
    engine = Settings(bundle="b").engine()  # type: ignore[arg-type]
    assert (engine.rescore, engine.candidates) == (wanted, 50)


def test_it_listens_to_this_machine_only_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIDMATCH_HOST", raising=False)
    assert Settings(bundle="b").host == "127.0.0.1"  # type: ignore[arg-type]


def test_every_setting_is_said() -> None:
    lines = Settings(bundle="b", threads=3).lines()  # type: ignore[arg-type]
    assert [line.split(" = ")[0] for line in lines] == list(Settings.model_fields)
    assert "threads = 3" in lines


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"port": 70_000}, "less than or equal to 65535"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"log_level": "loud"}, "'critical', 'error'"),
        ({"queue": 10}, "could never be taken"),
    ],
)
def test_what_can_not_be_is_refused(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Settings(bundle="b", **wrong)  # type: ignore[arg-type]
