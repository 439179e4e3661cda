"""A query log, the command in a process of its own, and what the output should be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ATTRIBUTES = ["red", "blue", "cheap", "outdoor", "steel", "kids", "wireless", "garden"]
WORDS = [*ATTRIBUTES, "hose", "running", "shoes", "led", "light", "bulb", "fan", "drill", "chair"]


def log_queries(rows: int, seed: int = 0) -> list[str]:
    """Queries of one to six words, some of them often, in several spellings; some empty."""
    rng = np.random.default_rng(seed)
    drawn = [" ".join(rng.choice(WORDS, rng.integers(1, 7))) for _ in range(rows)]
    again = rng.integers(0, rows, rows // 4)
    drawn += [drawn[at].upper() for at in again[::2]] + [f"  {drawn[at]}" for at in again[1::2]]
    drawn += [
        "",
        " ",
        "\u200b",
        "красные кроссовки",
        "STRASSE & straße",
        "unheard-of",
        'hose 3/4"',
        "花园软管",
    ]
    return [drawn[at] for at in rng.permutation(len(drawn))]


def write_log(path: Path, queries: list[str]) -> Path:
    """The queries as TSV with a header line."""
    path.write_text("query\tday\n" + "".join(f"{query}\t1\n" for query in queries), encoding="utf-8")
    return path


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def start(small_bundle: Path) -> Start:
    """`start("--input", ..., "--output", ...)` runs `bidmatch score` on the small bundle."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BIDMATCH_")}

    def starting(*arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "bidmatch", "score", "--bundle", str(small_bundle), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )

    return starting
