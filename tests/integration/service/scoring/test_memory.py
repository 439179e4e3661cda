"""None of what the commands allocate comes from the allocators of Arrow that keep what is freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import log_queries, write_log

_PEAKS = """
from contextlib import suppress
from bidmatch.cli import main
try:
    main()
finally:
    import pyarrow as pa
    print()
    for pool in (pa.system_memory_pool, pa.mimalloc_memory_pool, pa.jemalloc_memory_pool):
        with suppress(NotImplementedError):
            print(f"peak {pool().backend_name} {pool().max_memory()}")
"""


@pytest.mark.parametrize("command", ["score", "diff"])
def test_arrow_allocates_from_the_system_alone(command: str, small_bundle: Path, tmp_path: Path) -> None:
    log, output = write_log(tmp_path / "log.tsv", log_queries(2000)), tmp_path / "out.parquet"
    arguments = {
        "score": ["--bundle", small_bundle, "--input", log, "--output", output, "--json"],
        "diff": [small_bundle, small_bundle, "--queries", log, "--output", output, "--json"],
    }[command]
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS, command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("peak ")]
    peaks = {name: int(peak) for _, name, peak in found}
    assert peaks.pop("system") > 0
    assert set(peaks.values()) <= {0}
