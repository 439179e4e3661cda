"""What the client needs and what it offers, as a package."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from bidmatch import client as api

FOLDER = Path(api.__file__).parent
# Python imports nothing of these names.
BLOCKED = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_it_needs_httpx_alone() -> None:
    found = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    others = {
        name
        for name in found
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not f"{name}.".startswith("bidmatch.client.")
    }
    assert others == {"httpx", "bidmatch"}


def test_nothing_of_the_service_comes_with_it() -> None:
    done = run(
        "import sys, bidmatch.client; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "httpx" in loaded
    assert not loaded & {
        "numpy",
        "pydantic",
        "fastapi",
        "onnxruntime",
        "hnswlib",
        "orjson",
        "pyarrow",
        "torch",
    }


def test_without_httpx_it_says_what_to_install() -> None:
    done = run(BLOCKED.format(blocked=["httpx"]) + "import bidmatch.client")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: bidmatch.client needs httpx, which is not installed; install it: pip install httpx"
    )


def test_a_broken_httpx_is_not_called_missing() -> None:
    done = run(BLOCKED.format(blocked=["idna"]) + "import bidmatch.client")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'idna'"


def test_the_front_door_does_not_need_it() -> None:
    done = run(BLOCKED.format(blocked=["httpx"]) + "import bidmatch, bidmatch.cli")
    assert done.returncode == 0, done.stderr


def methods(kind: type) -> dict[str, object]:
    return {name: one for name, one in vars(kind).items() if not name.startswith("_") and callable(one)}


def test_both_clients_have_the_same_methods() -> None:
    assert list(methods(api.Client)) == list(methods(api.AsyncClient))
    assert len(methods(api.Client)) == 13


@pytest.mark.parametrize("name", ["__init__", *methods(api.Client)])
def test_both_clients_take_the_same_arguments(name: str) -> None:
    plain, awaited = getattr(api.Client, name), getattr(api.AsyncClient, name)
    assert inspect.signature(plain) == inspect.signature(awaited)
    if name != "__init__":
        assert inspect.iscoroutinefunction(awaited)
        assert not inspect.iscoroutinefunction(plain)


@pytest.mark.parametrize("name", methods(api.Client))
def test_every_method_has_an_example(name: str) -> None:
    for kind, word in ((api.Client, ""), (api.AsyncClient, "await ")):
        doc = inspect.getdoc(getattr(kind, name))
        assert doc is not None
        assert f"{word}client.{name}(" in doc.partition("Example:")[2]


@pytest.mark.parametrize("name", methods(api.Client))
def test_every_argument_is_described(name: str) -> None:
    method = getattr(api.Client, name)
    doc = inspect.getdoc(method) or ""
    for argument in inspect.signature(method).parameters:
        assert argument == "self" or f"\n    {argument}: " in doc, argument


def test_what_it_offers_can_be_imported() -> None:
    assert sorted(api.__all__) == api.__all__
    assert all(hasattr(api, name) for name in api.__all__)
