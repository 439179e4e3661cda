"""Served bundles, for tests from a person's or a client's seat."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bidmatch.base.files import atomic_dir
from export.bundle.format import PHRASES
from export.bundle.read import open_bundle
from export.bundle.write import finish, write_phrases


@contextmanager
def _serving(bundle: Path, *arguments: str) -> Iterator[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BIDMATCH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "bidmatch", "serve", "--bundle", str(bundle), "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    said: list[str] = []
    ready = threading.Event()

    def read() -> None:
        # To the end: whoever can't write what there is to say stands still.
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("ready: "):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(60)
        addresses = [line.split()[1] for line in said if line.startswith("ready: ")]
        assert addresses, "the service did not start:\n" + "".join(said)
        yield addresses[0]
    finally:
        process.terminate()
        process.wait(30)
        reader.join(10)
    text = "".join(said)
    assert process.returncode == 0, text
    assert "Traceback" not in text, text


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[str]]:
    """`with serving(bundle, "--max-k", "20") as url:` is a real `bidmatch serve` in a process of its own."""
    return _serving


def _columns(rows: int) -> dict[str, pa.Array]:
    """Columns of every sort that can be filtered, with gaps."""

    def some(make: Callable[[int], Any], type_: pa.DataType) -> pa.Array:
        return pa.array([None if row % 7 == 3 else make(row) for row in range(rows)], type_)

    return {
        "market": some(lambda row: ("de", "fr", "us")[row % 3], pa.string()),
        "language": some(lambda row: ("de", "fr")[row % 2], pa.dictionary(pa.int8(), pa.string())),
        "advertiser": some(lambda row: row % 5, pa.int32()),
        "big": some(lambda row: 2**63 + row, pa.uint64()),
        "bid": some(lambda row: row / 8, pa.float64()),
        "price": some(lambda row: row / 10, pa.float32()),
        "on": some(lambda row: row % 2 == 0, pa.bool_()),
        "tags": some(lambda row: ["a", "b"][: row % 3], pa.list_(pa.string())),
        "since": some(lambda row: datetime(2024, 1, 1) + timedelta(days=row), pa.timestamp("ms")),
        "until": some(lambda row: date(2024, 1, 1) + timedelta(days=row), pa.date32()),
        "at": some(lambda row: datetime(2024, 1, 1) + timedelta(days=row), pa.timestamp("ns", "UTC")),
        "negative_keywords": some(lambda row: ["free", '"for kids"'][: row % 3], pa.list_(pa.string())),
    }


@pytest.fixture(scope="session")
def columns_bundle(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small bundle with columns of every sort."""
    path = tmp_path_factory.mktemp("columns") / "bundle"
    with open_bundle(small_bundle) as source, atomic_dir(path) as folder:
        for name in source.manifest.files:
            if name != PHRASES:
                shutil.copyfile(small_bundle / name, folder / name)
        table = source.phrases.select(["id", "text", "match_type"])
        for name, values in _columns(table.num_rows).items():
            table = table.append_column(name, values)
        write_phrases(folder, table)
        made = {"format_version", "bundle_id", "files", "checksum"}
        finish(folder, {name: value for name, value in source.manifest if name not in made})
    return path
