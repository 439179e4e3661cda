"""Imports point one way, and what serves needs no package of training: read from the source."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from bidmatch.cli import COMMANDS, TRAIN_PACKAGES

ROOT = Path(__file__).parents[2]
PRODUCT = ("bidmatch", "trainer", "export", "service")
SERVING = ("bidmatch.base", "bidmatch.cli", "service", "export.bundle", "trainer.data", "trainer.metrics")


@dataclass(frozen=True)
class Import:
    """One imported module. `lazy`: inside a function; `typing`: for the type checker alone."""

    module: str
    line: int
    lazy: bool
    typing: bool


def files() -> Iterator[Path]:
    for stage in PRODUCT:
        yield from sorted((ROOT / stage).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in files()}


@cache
def imports(module: str) -> tuple[Import, ...]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.append(Import(whole if whole in MODULES else base, node.lineno, lazy, typing))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "importlib.import_module",
        ):
            assert module == "bidmatch.cli", (
                f"{path}:{node.lineno} imports by a name that cannot be read here"
            )
        here_lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        here_typing = typing or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            visit(child, here_lazy, here_typing)

    visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), False, False)
    return tuple(found)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def own(module: str) -> bool:
    return within(module, *PRODUCT)


def reached(module: str, *, lazy: bool) -> dict[str, str]:
    """Modules that run when `module` is imported (with `lazy`: or used), each with the way there."""
    paths = {module: module}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        for one in imports(current) if current in MODULES else ():
            if one.typing or (one.lazy and not lazy):
                continue
            parents = one.module.split(".")
            for depth in range(1, len(parents) + 1):
                target = ".".join(parents[:depth])
                if target not in paths and (target in MODULES or depth == len(parents)):
                    paths[target] = f"{paths[current]} -> {target}"
                    waiting.append(target)
    return paths


def test_the_source_is_there() -> None:
    assert {"bidmatch.cli", "trainer.metrics", "export.bundle.read", "service.engine"} <= set(MODULES)
    assert all(f"bidmatch.commands.{command}" in MODULES for command in COMMANDS)
    assert any(one.module == "service.scoring.run" and one.lazy for one in imports("bidmatch.commands.score"))
    assert any(one.module == "torch" for one in imports("trainer.model"))
    assert "torch" in reached("bidmatch.commands.train", lazy=True)
    assert "torch" not in reached("bidmatch.commands.score", lazy=True)


ALLOWED = {
    "bidmatch.base": ("bidmatch.base",),
    "trainer": ("trainer", "bidmatch.base"),
    "export.bundle": ("export.bundle", "bidmatch.base"),
    "export": ("export", "trainer", "bidmatch.base"),
    "service": ("service", "export.bundle", "bidmatch.base"),
    "bidmatch.client": ("bidmatch.client",),
}


def version_of_the_front_door(module: str, importer: str) -> bool:
    return module == "bidmatch" and not within(importer, "bidmatch.base") and not imports("bidmatch")


@pytest.mark.parametrize("stage", ALLOWED)
def test_a_stage_imports_only_what_stands_before_it(stage: str) -> None:
    members = [module for module in MODULES if within(module, stage)]
    if stage == "export":
        members = [module for module in members if not within(module, "export.bundle")]
    wrong = [
        f"{module}, line {one.line}: imports {one.module}"
        for module in members
        for one in imports(module)
        if own(one.module)
        and not within(one.module, *ALLOWED[stage])
        and not version_of_the_front_door(one.module, module)
    ]
    assert members
    assert wrong == []


def test_only_the_commands_import_the_service() -> None:
    wrong = [
        f"{module}, line {one.line}: imports {one.module}"
        for module in MODULES
        for one in imports(module)
        if within(one.module, "service") and not within(module, "service", "bidmatch.commands")
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [module for module in MODULES if within(module, *SERVING)])
def test_what_serves_never_reaches_a_package_of_training(module: str) -> None:
    everything = reached(module, lazy=True)
    found = [path for name, path in everything.items() if name.partition(".")[0] in TRAIN_PACKAGES]
    assert found == []


@pytest.mark.parametrize("command", COMMANDS)
def test_importing_a_command_imports_no_package_of_training(command: str) -> None:
    everything = reached(f"bidmatch.commands.{command}", lazy=False)
    assert [path for name, path in everything.items() if name.partition(".")[0] in TRAIN_PACKAGES] == []


def test_the_front_door_imports_no_stage() -> None:
    for module in ("bidmatch", "bidmatch.__main__", "bidmatch.cli"):
        everything = reached(module, lazy=True)
        stages = [
            path
            for name, path in everything.items()
            if own(name)
            and not within(name, "bidmatch.base", "bidmatch.cli")
            and name not in (module, "bidmatch")
        ]
        assert stages == [], module


@pytest.mark.parametrize("package", ["trainer", "export", "bidmatch.commands"])
def test_packages_that_import_nothing(package: str) -> None:
    assert [one.module for one in imports(package) if one.module not in sys.stdlib_module_names] == []


@dataclass(frozen=True)
class Declared:
    """Names of distributions that pyproject.toml asks for: of the serving install, and of its extras."""

    serving: set[str]
    training: set[str]
    client: set[str]
    traces: set[str]
    milvus: set[str]
    scale: set[str]


def declared() -> Declared:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {_canonical(re.split(r"[\[<>=!~; ]", one)[0]) for one in requirements}

    extras = project["optional-dependencies"]
    return Declared(
        names(project["dependencies"]),
        *(names(extras[extra]) for extra in ("train", "client", "traces", "milvus", "scale")),
    )


# What comes with another: FastAPI is made of Starlette, and its documentation has users import from there;
# uvicorn[standard] runs on httptools, whose errors its protocol raises; the API is a part of its SDK.
CARRIED = {"starlette": "fastapi", "httptools": "uvicorn", "opentelemetry-api": "opentelemetry-sdk"}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_uvicorn_carries_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(one.startswith("uvicorn[standard]") for one in project["dependencies"])


def test_every_imported_package_is_declared_where_it_is_needed() -> None:
    known = declared()
    providers = packages_distributions()
    wrong = []
    for module in MODULES:
        for one in imports(module):
            package = one.module.partition(".")[0]
            if own(package) or package in sys.stdlib_module_names or one.typing:
                continue
            named = {_canonical(CARRIED.get(name, name)) for name in providers.get(package, [])}
            allowed = known.serving if within(module, *SERVING) else known.serving | known.training
            if within(module, "bidmatch.client"):
                allowed = known.client
            if module in ("export.bundle.milvus_client", "export.milvus") and one.lazy:
                allowed = allowed | known.milvus
            if module == "service.scoring.cluster" and one.lazy:
                allowed = known.serving | known.scale
            if module == "service.traces" and one.lazy:
                allowed = known.serving | known.traces
            if not named & allowed:
                wrong.append(f"{module}, line {one.line}: {package} ({', '.join(named) or 'not installed'})")
    assert wrong == []


def test_what_an_extra_alone_brings_is_imported_only_where_it_is_asked_for() -> None:
    """The service starts without OpenTelemetry, pymilvus or Ray; the client's HTTP library is its own."""
    homes = {
        "opentelemetry": ("service.traces",),
        "httpx": ("bidmatch.client",),
        "pymilvus": ("export.bundle.milvus_client", "export.milvus"),
        "ray": ("service.scoring.cluster",),
    }
    for package, home in homes.items():
        users = {module for module in MODULES for one in imports(module) if within(one.module, package)}
        assert users
        assert all(within(user, *home) for user in users), users
    for module in ("service.app", "service.worker", "bidmatch.commands.serve"):
        everything = reached(module, lazy=False)
        assert not [path for name, path in everything.items() if within(name, *homes)]


def test_a_missing_package_of_training_is_known_as_one() -> None:
    needed = declared()
    providers = packages_distributions()
    known = {
        package
        for package, names in providers.items()
        if {_canonical(name) for name in names} & (needed.training - needed.serving)
    }
    used = {one.module.partition(".")[0] for module in MODULES for one in imports(module)}
    assert known & used - TRAIN_PACKAGES == set()
