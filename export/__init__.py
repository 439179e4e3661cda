"""Checkpoint to bundle: ONNX graph, quantisation, HNSW build."""
