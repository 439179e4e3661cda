"""ONNX Runtime reports nothing to its makers: no thread, no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
import export.bundle.read
before = os.listdir("/proc/self/task")  # Arrow starts one
import export.bundle.encoder
import onnxruntime
print(os.listdir("/proc/self/task") == before)
"""


def test_importing_the_encoder_starts_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "True"
    assert list(tmp_path.iterdir()) == []
