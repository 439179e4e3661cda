"""Torch to ONNX: tokens in, the query vector out, with pooling, heads and normalisation inside the graph."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import onnx
import torch
from torch import nn

from export.bundle.format import ATTENTION_MASK, EMBEDDING, INPUT_IDS

OPSET = 18


class QueryVector(nn.Module):
    """[Φ_D(x) ⊕ N(Φ_C(x))], float32 (n, dim), of a model that gives (Φ_D, Φ_C)."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The vector of int64 (n, t) token ids and mask."""
        phi_d, phi_c = self.model(input_ids, attention_mask)
        return torch.cat([phi_d, nn.functional.normalize(phi_c, dim=1, eps=1e-12)], dim=1)


def export_onnx(model: nn.Module, file: Path) -> None:
    """Write a model as ONNX: int64 `input_ids`, `attention_mask` (n, t) to float32 `embedding` (n, dim).

    Both n and t are free, from 1 up. The file holds no paths or other traces of the machine, so the same
    model gives the same bytes.

    Args:
        model: gives Φ_D (n, dim/2) at unit length and Φ_C (n, dim/2).
        file: written whole; weights inside.

    Raises:
        onnx.checker.ValidationError: the graph is not valid.
    """
    wrapped = QueryVector(model).eval()
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
    _rename(graph.graph, EMBEDDING, f"{EMBEDDING}_inner")  # the exporter calls word vectors that, too
    _rename(graph.graph, graph.graph.output[0].name, EMBEDDING)
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
