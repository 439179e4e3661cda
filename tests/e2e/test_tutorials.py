"""The tutorials as a reader follows them: each page's commands in order, in one shell and an empty folder."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from bidmatch.cli import COMMANDS

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [*TUTORIALS, ROOT / "docs" / "operating.md"]
# Commands are in `sh`; the others show what is said or written.
LANGUAGES = {"sh", "text", "json", "ini", "yaml"}
LEFT_OUT = re.compile(r"<!-- not run by the test:(.*)-->")
# What needs a daemon that a test has not.
DAEMONS = {"docker", "kubectl", "systemctl", "journalctl"}
# Errors and the trap name the page's own lines, for these are the script's.
HEAD = "set -Eeuo pipefail; trap 'echo \"${BASH_SOURCE##*/}, line $LINENO failed: $BASH_COMMAND\" >&2' ERR"
ENDING_S = 30


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: the file.
        line: of the fence, from 1.
        language: what is behind the fence.
        lines: what is in it.
        left_out: why its commands are not run; None: they are.
    """

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]
    left_out: str | None

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, f"{page.name}: a block is not closed"
    for first, last in zip(fences[::2], fences[1::2], strict=True):
        comment = LEFT_OUT.fullmatch(lines[first - 1].strip())
        yield Block(
            page,
            first + 1,
            lines[first].removeprefix("```").strip(),
            tuple(lines[first + 1 : last]),
            None if comment is None else comment[1].strip(),
        )


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose_of(page))]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def script_of(page: Path) -> str:
    """The page with nothing left but its commands, each on the line where it was."""
    script = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in BLOCKS:
        if block.page == page and block.language == "sh" and block.left_out is None:
            script[block.line : block.line + len(block.lines)] = block.lines
    assert not script[0], f"{page.name} begins with a command"
    script[0] = HEAD
    return "\n".join(script) + "\n"


def tool(name: str) -> None:
    if os.environ.get("BIDMATCH_NO_TUTORIALS") == "1":
        pytest.skip("BIDMATCH_NO_TUTORIALS=1: this machine lacks what the tutorials use")
    if shutil.which(name) is None:
        pytest.fail(f"{name} is missing: apt-get install {name} (BIDMATCH_NO_TUTORIALS=1 skips this)")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def environment(folder: Path, port: int) -> dict[str, str]:
    """A reader's: this checkout's `bidmatch` and this `python` on the path, no settings, no proxy."""
    folder.mkdir()
    program = folder / "bidmatch"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m bidmatch "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BIDMATCH_")}
    paths = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PATH": os.pathsep.join(paths), "PYTHONPATH": os.pathsep.join(modules), "PORT": str(port)}
    return kept | own | {"NO_PROXY": "*", "no_proxy": "*"}


def tail(file: Path) -> str:
    return f"{file.name}:\n{file.read_text(encoding='utf-8', errors='replace')[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=[page.stem for page in TUTORIALS])
def test_its_commands_work(page: Path, tmp_path: Path) -> None:
    for name in ("bash", "curl", "jq"):
        tool(name)
    port = free_port()
    script, folder, said = tmp_path / page.name, tmp_path / "empty", tmp_path / "said"
    script.write_text(script_of(page), encoding="utf-8")
    folder.mkdir()
    # A pipe would stay open as long as a server that the page forgot to stop.
    with said.open("wb") as out:
        process = subprocess.Popen(
            ["bash", str(script)],
            cwd=folder,
            env=environment(tmp_path / "bin", port),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(500)
        finally:
            # What it left behind, too.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
            process.wait(ENDING_S)
    assert code == 0, f"exit code {code}\n" + "\n".join(map(tail, [*sorted(folder.glob("*.log")), said]))


@pytest.mark.parametrize("page", TUTORIALS, ids=[page.stem for page in TUTORIALS])
def test_what_it_starts_it_stops(page: Path) -> None:
    script = script_of(page)
    assert script.count("\nSERVER=$!") == script.count('\nkill "$SERVER"') == script.count("bidmatch serve ")


def test_blocks_say_what_they_are() -> None:
    assert TUTORIALS
    for block in BLOCKS:
        assert block.language in LANGUAGES, block
        assert block.language == "sh" or block.left_out is None, block


def test_only_what_needs_a_daemon_is_left_out() -> None:
    for block in BLOCKS:
        if block.left_out is None:
            continue
        assert block.left_out, f"{block}: no reason"
        commands = "\n".join(block.lines).replace("\\\n", " ").splitlines()
        for command in commands:
            words = [word for word in shlex.split(command, comments=True) if word != "sudo"]
            assert not words or words[0] in DAEMONS, f"{block}: {command}"


def options_of(name: str) -> set[str]:
    command: click.Command = importlib.import_module(f"bidmatch.commands.{name}").command
    options = (option for one in command.params for option in (*one.opts, *one.secondary_opts))
    return {"--help", *(option for option in options if option.startswith("-"))}


OPTIONS = {name: options_of(name) for name in COMMANDS}
EVERY_OPTION = set().union(*OPTIONS.values())


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_commands_and_options_exist(page: Path) -> None:
    left_out = [line for block in blocks_of(page) if block.left_out is not None for line in block.lines]
    for code in (*inline_code(page), *left_out):
        program, _, rest = code.partition(" ")
        if code.startswith("--"):
            assert code.split("=")[0].split()[0] in EVERY_OPTION, code
        elif program == "bidmatch" and rest:
            name, *arguments = rest.split()
            assert name in COMMANDS, code
            for word in arguments:
                assert not word.startswith("-") or word.split("=")[0] in OPTIONS[name], code


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.casefold()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose_of(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_the_readme_and_each_other_lead_to_them() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"({page.relative_to(ROOT)})" in readme, page
    for page in TUTORIALS:
        for other in TUTORIALS:
            assert other == page or f"({other.name})" in prose_of(page), (page, other)
        assert "(../operating.md)" in prose_of(page), page
