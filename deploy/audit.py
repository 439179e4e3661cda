"""Looks the pinned dependencies up among known vulnerabilities: `python deploy/audit.py constraints.txt`.

pip-audit, in an environment of its own, asks PyPI or else OSV. What a service does not know it passes over,
and then reports that nothing was found; so a version known to be vulnerable is looked up first, and only a
service that finds fault with it is believed. Where none is, this says that nothing was audited, and does not
fail.

Exits with 1 where a dependency has a known vulnerability that deploy/audit-accepted.txt does not list.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

PIP_AUDIT = "pip-audit==2.10.1"
SERVICES = ("pypi", "osv")
KNOWN_VULNERABLE = "requests==2.19.0"
ACCEPTED = Path(__file__).with_name("audit-accepted.txt")
TIMEOUT_S = 300


def main(constraints: Path, environment: Path) -> int:
    """The exit code."""
    python = environment / "bin" / "python"
    if not install(environment, python):
        return not_audited("pip-audit could not be installed")
    for service in SERVICES:
        if not is_believed(python, service):
            print(f"audit: the vulnerability service {service!r} does not answer", file=sys.stderr)
            continue
        report = ask(python, service, constraints)
        if report is None:
            print(f"audit: the vulnerability service {service!r} stopped answering", file=sys.stderr)
            continue
        return judge(report, accepted(ACCEPTED))
    return not_audited("no vulnerability service reachable")


def install(environment: Path, python: Path) -> bool:
    """Whether pip-audit is there now."""
    if not python.exists():
        venv.create(environment, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", PIP_AUDIT]
    ended = subprocess.run(pip, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
    return ended.returncode == 0


def ask(python: Path, service: str, requirements: Path) -> list[dict[str, Any]] | None:
    """pip-audit's finding for each requirement, or None where it has none."""
    command = [str(python), "-m", "pip_audit", "--vulnerability-service", service]
    command += ["--requirement", str(requirements), "--no-deps", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        return list(json.loads(ended.stdout)["dependencies"])
    except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError):
        return None


def is_believed(python: Path, service: str) -> bool:
    """Whether the service finds fault with a version that has some."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(KNOWN_VULNERABLE + "\n")
        report = ask(python, service, requirements)
    return bool(report and report[0].get("vulns"))


def accepted(file: Path) -> dict[str, str]:
    """Vulnerabilities that do not concern the project, and why: `ID reason`, one a line."""
    if not file.exists():
        return {}
    lines = [line.split(maxsplit=1) for line in file.read_text().splitlines() if not line.startswith("#")]
    reasons = {line[0]: line[1] for line in lines if len(line) == 2}
    if len(reasons) < sum(bool(line) for line in lines):
        raise SystemExit(f"{file}: each line has the id of a vulnerability and the reason to accept it, once")
    return reasons


def judge(report: list[dict[str, Any]], reasons: dict[str, str]) -> int:
    """Say what was found; the exit code."""
    found, unknown, audited = 0, [], 0
    for dependency in report:
        if "vulns" not in dependency:
            unknown.append(dependency["name"])
            continue
        audited += 1
        for vulnerability in dependency["vulns"]:
            names = {vulnerability["id"], *vulnerability.get("aliases", ())}
            reason = next((reasons[name] for name in sorted(names) if name in reasons), None)
            what = f"{dependency['name']} {dependency['version']}: {', '.join(sorted(names))}"
            if reason is not None:
                print(f"audit: accepted: {what}: {reason}")
                continue
            found += 1
            fixed = ", ".join(vulnerability.get("fix_versions", ())) or "no version yet"
            print(f"audit: VULNERABLE: {what}; fixed in {fixed}", file=sys.stderr)
    if not audited:
        return not_audited("the vulnerability service knows none of the dependencies")
    if unknown:
        print(f"audit: NOT AUDITED, unknown to the service: {', '.join(unknown)}", file=sys.stderr)
    print(f"audit: {audited} dependencies looked up, {found} vulnerabilities to act on")
    return 1 if found else 0


def not_audited(reason: str) -> int:
    """Say so where nobody overlooks it; the exit code."""
    line = f"NOT AUDITED: {reason}"
    frame = "*" * (len(line) + 4)
    print(f"{frame}\n* {line} *\n{frame}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else ".audit")))
