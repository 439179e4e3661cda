"""Served bundles, for tests from a person's or a client's seat."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def _serving(bundle: Path, *arguments: str) -> Iterator[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BIDMATCH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "bidmatch", "serve", "--bundle", str(bundle), "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    said = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("ready: "):
                yield line.split()[1]
                break
        else:
            pytest.fail("the service did not start:\n" + "".join(said))
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    assert "Traceback" not in rest, rest


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[str]]:
    """`with serving(bundle, "--max-k", "20") as url:` is a real `bidmatch serve` in a process of its own."""
    return _serving
