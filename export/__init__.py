"""Checkpoint to bundle: ONNX graph, quantisation, HNSW build."""

import os

# ONNX Runtime's wheels would report to their makers what runs, with threads and a database in the home
# folder: nothing for a process that forks, or a container without one. Read when it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
