"""What tests of several stages share: a small bundle, exported by the real code from a real model."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from bidmatch.base.text import key

# A shell starts background jobs with SIGINT ignored, and children inherit that; Ctrl-C must reach them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PRODUCTS = ["garden hose", "running shoes", "led light bulb", "ceiling fan", "cordless drill", "office chair"]
ATTRIBUTES = ["red", "blue", "cheap", "outdoor", "steel", "10 ft", "kids", "wireless"]
OTHERS = ["красные кроссовки", "مروحة سقف", "花园软管", "Café crème", "STRASSE & straße", "Ø 10 mm rohr"]


def phrase_texts() -> list[str]:
    """54 phrases: every attribute with every product, and six in other scripts."""
    return [f"{attribute} {product}" for product in PRODUCTS for attribute in ATTRIBUTES] + OTHERS


@pytest.fixture(scope="session")
def small_wide_source():
    """A `bag` model of width 64: MiniLM's word vectors, projected; heads at random; Ψ = g2(Φ(z)).

    Narrow heads of 16 + 16, wide ones of 48 + 48.
    """
    import numpy as np
    import pyarrow as pa
    import scipy.sparse as sp
    import torch

    from export.bundle.format import DataRecord, ModelRecord, SplitInfo
    from export.source import ExportSource
    from trainer.data.dataset import Interactions
    from trainer.encoders.bag import BagEncoder
    from trainer.encoders.pretrained import PACKAGED_NAME, load_tokenizer, load_word_vectors
    from trainer.model import DualHeadModel

    torch.manual_seed(0)
    words = load_word_vectors(PACKAGED_NAME)
    encoder = BagEncoder(words.shape[0], 64, 0.0, 0.0)
    model = DualHeadModel(encoder, [(16, 16), (48, 48)], 0.1).eval()
    tokenizer = load_tokenizer(PACKAGED_NAME, 32, special_tokens=False)
    texts = phrase_texts()
    keys = [key(text) for text in texts]
    with torch.no_grad():
        encoder.words.weight.copy_(words @ torch.linalg.qr(torch.randn(words.shape[1], 64)).Q)
        rows = [torch.tensor([encoding.ids]) for encoding in tokenizer.encode_batch(keys)]
        found = [model(ids, torch.ones_like(ids)) for ids in rows]
        table, wide_table = (torch.cat([pairs[level].phi_c for pairs in found]).numpy() for level in range(2))
    # Each query is a phrase with a word in front, and belongs to it.
    queries = [f"buy {text}" for text in keys]
    return ExportSource(
        model=model,
        tokenizer=tokenizer,
        table=table,
        phrases=pa.table(
            {
                "id": [f"p{row}" for row in range(len(texts))],
                "text": texts,
                "match_type": [("broad", "exact", "phrase")[row % 3] for row in range(len(texts))],
                "train_clicks": np.arange(len(texts), dtype=np.int64) % 7,
            }
        ),
        train_clicks=np.arange(len(texts), dtype=np.int64) % 7,
        train_queries=200,
        validation=Interactions(
            pa.array(queries, type=pa.large_string()), sp.identity(len(texts), dtype=np.float32, format="csr")
        ),
        test_queries=0,
        record=ModelRecord(id="small-bag", kind="bag", name=PACKAGED_NAME, config={"seed": 0}),
        data=DataRecord(
            fingerprint="0" * 32,
            split=SplitInfo(kind="by_query_hash", share=0.1, seed=0, train_queries=200, test_queries=0),
        ),
        wide_table=wide_table,
    )


@pytest.fixture(scope="session")
def small_source(small_wide_source):
    """The same without its wide heads."""
    return dataclasses.replace(small_wide_source, wide_table=None)


@pytest.fixture(scope="session")
def small_bundle(small_source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole bundle of 54 phrases; read only, copy it before changing anything."""
    from export.build import ExportOptions, build_bundle

    out = tmp_path_factory.mktemp("small") / "bundle"
    build_bundle(small_source, out, ExportOptions(threads=1))
    return out


@pytest.fixture(scope="session")
def small_wide_bundle(small_wide_source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same phrases; 20 of what the index finds are re-scored with 96 numbers a phrase."""
    from export.build import ExportOptions, build_bundle

    out = tmp_path_factory.mktemp("small_wide") / "bundle"
    build_bundle(small_wide_source, out, ExportOptions(threads=1, candidates=20))
    return out
