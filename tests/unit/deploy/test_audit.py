"""deploy/audit.py: what it makes of pip-audit's reports. A script stands in for pip-audit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOUND = {"name": "orjson", "version": "3.11.4", "vulns": []}
UNKNOWN = {"name": "odd", "skip_reason": "Dependency not found on PyPI and could not be audited: odd (1.0)"}
WRONG = {
    "name": "requests",
    "version": "2.19.0",
    "vulns": [{"id": "PYSEC-2018-28", "aliases": ["CVE-2018-18074"], "fix_versions": ["2.20.0"]}],
}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    file = Path(__file__).parents[3] / "deploy" / "audit.py"
    spec = importlib.util.spec_from_file_location("audit", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(tmp_path: Path) -> Any:
    """`environment(pypi=report, osv=None)`: what each service reports of any file; None where it fails."""

    def made(installs: bool = True, **reports: list[dict[str, Any]] | None) -> Path:
        cases = [f"-m\\ pip\\ *) exit {0 if installs else 1} ;;"]
        for service, report in reports.items():
            file = tmp_path / f"{service}.json"
            file.write_text("Traceback" if report is None else json.dumps({"dependencies": report}))
            cases.append(f"*{service}*) cat {file}; exit 1 ;;")
        python = tmp_path / ".audit" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\ncase "$*" in\n' + "\n".join(cases) + "\nesac\n")
        python.chmod(0o755)
        (tmp_path / "constraints.txt").write_text("requests==2.19.0\n")
        return tmp_path / ".audit"

    return made


def test_a_vulnerable_dependency_fails(
    audit: ModuleType, environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(tmp_path / "constraints.txt", environment(pypi=[WRONG, SOUND])) == 1
    said = capsys.readouterr()
    assert "VULNERABLE: requests 2.19.0: CVE-2018-18074, PYSEC-2018-28; fixed in 2.20.0" in said.err
    assert "2 dependencies looked up, 1 vulnerabilities" in said.out


@pytest.mark.parametrize("pypi", [None, [UNKNOWN], [SOUND]])
def test_another_service_is_asked_where_one_cannot_be_believed(
    audit: ModuleType, environment: Any, tmp_path: Path, pypi: list | None
) -> None:
    assert audit.main(tmp_path / "constraints.txt", environment(pypi=pypi, osv=[WRONG])) == 1


def test_no_service_is_said_loudly_and_does_not_fail(
    audit: ModuleType, environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip-audit itself says of such a report: no known vulnerabilities found."""
    assert audit.main(tmp_path / "constraints.txt", environment(pypi=[UNKNOWN], osv=None)) == 0
    assert "NOT AUDITED: no vulnerability service reachable" in capsys.readouterr().err


def test_without_pip_audit_nothing_is_audited(
    audit: ModuleType, environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(tmp_path / "constraints.txt", environment(installs=False)) == 0
    assert "NOT AUDITED: pip-audit could not be installed" in capsys.readouterr().err


def test_what_the_service_does_not_know_is_named(
    audit: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.judge([SOUND, UNKNOWN], {}) == 0
    said = capsys.readouterr()
    assert "NOT AUDITED, unknown to the service: odd" in said.err
    assert "1 dependencies looked up, 0 vulnerabilities" in said.out


@pytest.mark.parametrize("name", ["PYSEC-2018-28", "CVE-2018-18074"])
def test_an_accepted_vulnerability(
    audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = tmp_path / "accepted.txt"
    file.write_text(f"# comment\n\n{name} no redirects are followed\n")
    assert audit.judge([WRONG], audit.accepted(file)) == 0
    assert "no redirects are followed" in capsys.readouterr().out
    assert audit.judge([WRONG], {"CVE-0000-0000": "another"}) == 1


@pytest.mark.parametrize("line", ["PYSEC-2018-28", "A one\nA two"])
def test_acceptance_takes_a_reason(audit: ModuleType, tmp_path: Path, line: str) -> None:
    file = tmp_path / "accepted.txt"
    file.write_text(line + "\n")
    with pytest.raises(SystemExit, match="the reason to accept it"):
        audit.accepted(file)
