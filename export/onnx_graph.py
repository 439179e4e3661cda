"""Torch to ONNX: tokens in, query vectors out, with pooling, heads and normalisation inside the graph."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import onnx
import torch
from torch import nn

from export.bundle.format import ATTENTION_MASK, EMBEDDING, INPUT_IDS, WIDE_EMBEDDING
from trainer.model import DualHeadModel

OPSET = 20  # from 20 on GELU is one operator


class _Served(nn.Module):
    """`DualHeadModel.query_vectors` as the forward pass that is traced."""

    def __init__(self, model: DualHeadModel, pairs: int):
        super().__init__()
        self.model = model
        self.pairs = pairs

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.model.query_vectors(input_ids, attention_mask)[: self.pairs]


def export_onnx(model: DualHeadModel, file: Path, pairs: int = 1) -> None:
    """Write a model as ONNX: int64 `input_ids`, `attention_mask` (n, t) to float32 `embedding` (n, dim).

    With two pairs of heads also to `wide`, float32 (n, wide_dim). Both n and t are free, from 1 up. The file
    holds no paths or other traces of the machine, so the same model gives the same bytes.

    Args:
        model: gives the vectors.
        file: written whole; weights inside.
        pairs: pairs of heads that are exported: 1, the narrow one, or 2, the wide one, too.

    Raises:
        onnx.checker.ValidationError: the graph is not valid.
    """
    wrapped = _Served(model, pairs).eval()
    # Sizes unlike each other and above 1: the exporter takes 1 for a constant.
    ids = torch.arange(1, 16, dtype=torch.int64).reshape(3, 5)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    batch, tokens = torch.export.Dim("n", min=1), torch.export.Dim("t", min=1)
    with _quiet():
        program = torch.onnx.export(
            wrapped,
            (ids, mask),
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT_IDS, ATTENTION_MASK],
            dynamic_shapes={"input_ids": {0: batch, 1: tokens}, "attention_mask": {0: batch, 1: tokens}},
        )
    assert program is not None
    graph = program.model_proto
    _strip(graph)
    names = [EMBEDDING, WIDE_EMBEDDING][:pairs]
    for name in names:
        _rename(graph.graph, name, f"{name}_inner")  # the exporter calls word vectors `embedding`, too
    for output, name in zip(graph.graph.output, names, strict=True):
        _rename(graph.graph, output.name, name)
    onnx.checker.check_model(graph, full_check=True)
    onnx.save_model(graph, str(file))


@contextlib.contextmanager
def _quiet():  # type: ignore[no-untyped-def]
    root = logging.getLogger("torch.onnx")
    level = root.level
    root.setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    root.setLevel(level)


def _strip(model: onnx.ModelProto) -> None:
    """Drop stack traces and source lines, which the exporter leaves on every node, and inferred shapes.

    The quantiser transposes weights without correcting the shapes that were inferred for them.
    """
    graph = model.graph
    del graph.value_info[:]
    for thing in (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        thing.doc_string = ""
        if hasattr(thing, "metadata_props"):
            del thing.metadata_props[:]


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                if name == old:
                    names[position] = new
    for value in (*graph.output, *graph.initializer):
        if value.name == old:
            value.name = new
