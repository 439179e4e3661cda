"""How long a trained model takes for a query once it is exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from export.bundle.encoder import TextEncoder, make_session
from export.onnx_graph import export_onnx
from export.quantise import milliseconds_per_query
from trainer.model import DualHeadModel


def milliseconds_of(model: DualHeadModel, tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Mean milliseconds of the fp32 ONNX encoder a query: one thread, one query a call, tokens at hand.

    Args:
        model: in evaluation mode, on the CPU.
        tokenizer: what it reads with.
        texts: queries, at least one.
    """
    widths = [sum(pair) for pair in model.widths]
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_padding()
    with TemporaryDirectory(prefix="bidmatch-timing-") as folder:
        file = Path(folder) / "encoder.onnx"
        export_onnx(model, file, len(widths))
        session = make_session(file.read_bytes(), threads=1)
    encoder = TextEncoder(session, plain, widths[0], sum(widths[1:]))
    return milliseconds_per_query(encoder, texts, 1)
