"""The reading side works where torch and its company are not installed."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
training = "torch transformers sklearn onnx onnxscript safetensors hnswlib trainer.model"
for name in training.split():
    sys.modules[name] = None
import export.bundle
from pathlib import Path
from export.bundle.read import open_bundle
from export.bundle.encoder import QueryEncoder
from export.bundle.index import PhraseIndex

bundle = open_bundle(Path(sys.argv[1]))
vectors = QueryEncoder(bundle, threads=1).encode(["RED  garden hose"]).narrow
rows = PhraseIndex(bundle).search(vectors, 1).rows
print(bundle.phrases["text"][int(rows[0, 0])].as_py())
print(any(name.partition(".")[0] == "trainer" for name in sys.modules if sys.modules[name] is not None))
"""


def test_opens_encodes_and_searches(small_bundle):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(small_bundle)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["red garden hose", "False"]


def test_inspect_runs_there_too(small_bundle):
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'sklearn', 'onnx', 'onnxscript'): sys.modules[name] = None\n"
        "from bidmatch.commands.inspect import command\n"
        "command([sys.argv[1]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(small_bundle)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "All 13 files verified." in done.stdout or "All 14 files verified." in done.stdout
