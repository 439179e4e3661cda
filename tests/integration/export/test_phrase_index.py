from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from bidmatch.base.errors import ConfigError
from export.bundle.encoder import QueryEncoder
from export.bundle.index import PhraseIndex, searchable
from export.bundle.read import open_bundle


@pytest.fixture(scope="module")
def bundle(small_bundle):
    with open_bundle(small_bundle) as bundle:
        yield bundle


@pytest.fixture(scope="module")
def encoder(bundle):
    return QueryEncoder(bundle)


@pytest.fixture(scope="module")
def index(bundle):
    return PhraseIndex(bundle)


def test_a_phrase_finds_itself_whatever_its_script_or_case(bundle, encoder, index):
    texts = bundle.phrases["text"].to_pylist()
    found = index.search(encoder.encode([text.upper() for text in texts]).narrow, 1)
    rows, scores = found.rows, found.scores
    assert rows[:, 0].tolist() == list(range(54))
    assert scores.min() > 1.9  # both cosines near 1; Ψ of this model is Φ_C of the phrase


@pytest.mark.parametrize("k", [1, 10, 54, 55, 10**6])
def test_the_index_agrees_with_exact_search(bundle, encoder, index, k):
    vectors = encoder.encode(["red shoes", "fan", "", "花园"]).narrow
    found = index.search(vectors, k)
    rows, scores = found.rows, found.scores
    wanted_scores = index.exact(vectors, k).scores
    assert rows.shape == scores.shape == (4, min(k, 54))
    assert rows.dtype == np.int64
    assert scores.dtype == np.float32
    assert np.allclose(scores, wanted_scores, atol=1e-5)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len(set(row)) == min(k, 54) for row in rows.tolist())
    recomputed = np.take_along_axis(vectors @ np.asarray(bundle.vectors).T, rows, axis=1)
    assert np.allclose(scores, recomputed, atol=1e-5)


@pytest.mark.parametrize("ef", [None, 1, 54, 5000])
def test_ef_is_a_floor_and_never_changes_the_number_of_answers(encoder, index, ef):
    rows = index.search(encoder.encode(["red shoes"]).narrow, 7, ef=ef).rows
    assert rows.shape == (1, 7)


def test_no_vectors(index):
    found = index.search(np.zeros((0, 32), np.float32), 5)
    assert found.rows.shape == found.scores.shape == (0, 5)


@pytest.mark.parametrize(
    ("vectors", "k", "reason"),
    [
        (np.zeros((1, 32), np.float32), 0, "k must be"),
        (np.zeros((1, 31), np.float32), 1, "width 32"),
        (np.zeros(32, np.float32), 1, "width 32"),
        (np.full((1, 32), np.nan, np.float32), 1, "finite"),
        (np.full((1, 32), np.inf, np.float32), 1, "finite"),
    ],
)
def test_what_no_search_is_made_with(index, vectors, k, reason):
    with pytest.raises(ValueError, match=reason):
        index.search(vectors, k)


def test_threads_share_encoder_and_index(bundle, encoder, index):
    texts = bundle.phrases["text"].to_pylist()

    def match(i):
        vectors = encoder.run(*encoder.tokenise(texts[i : i + 3])).narrow
        return index.search(vectors, 5, ef=(None, 200)[i % 2])[0].tolist()

    alone = [match(i) for i in range(50)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(match, range(50))) == alone


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_vector_depends_on_its_text_alone_not_on_its_batch(bundle, precision):
    encoder = QueryEncoder(bundle, precision=precision)
    texts = [*bundle.phrases["text"].to_pylist(), "", "x"]
    one_by_one = np.concatenate([encoder.encode([text]).narrow for text in texts])
    assert np.allclose(encoder.encode(texts, batch=7).narrow, one_by_one, atol=1e-5)
    assert encoder.encode([]).narrow.shape == (0, 32)


def test_a_provider_that_is_not_there_is_an_error_not_a_silent_cpu(bundle):
    with pytest.raises(ConfigError):
        QueryEncoder(bundle, providers=("CUDAExecutionProvider",))
    with pytest.raises(ConfigError, match="has no NoSuchProvider"):
        QueryEncoder(bundle, providers=("NoSuchProvider",))
    assert QueryEncoder(bundle).providers == ["CPUExecutionProvider"]


@pytest.mark.parametrize(
    "text", ["\0", "\ud800", "a" * 100_000, "\u202e" * 50, "🧯" * 40, " \t\n ", "́" * 1000]
)
def test_odd_texts_have_finite_vectors(encoder, index, text):
    vectors = encoder.encode([text]).narrow
    assert np.isfinite(vectors).all()
    assert index.search(vectors, 3)[0].shape == (1, 3)


def test_the_index_is_searched_as_wide_as_the_manifest_says(small_source, tmp_path):
    from export.build import ExportOptions, build_bundle
    from trainer.data.dataset import Interactions

    count = 3_000
    rng = np.random.default_rng(0)
    table = rng.standard_normal((count, small_source.dim // 2)).astype(np.float32)
    phrases = pa.table(
        {"id": [str(row) for row in range(count)], "text": [f"lamp {n}" for n in range(count)]}
    )
    clicks = small_source.validation.clicks[:0]
    clicks.resize((0, count))
    source = dataclasses.replace(
        small_source,
        table=table,
        phrases=phrases,
        train_clicks=np.zeros(count, dtype=np.int64),
        validation=Interactions(pa.array([], type=pa.large_string()), clicks),
    )
    build_bundle(source, tmp_path / "wide", ExportOptions(threads=1))
    queries = rng.standard_normal((200, small_source.dim)).astype(np.float32)
    with open_bundle(tmp_path / "wide") as bundle:
        manifest = bundle.manifest
        graph = searchable(bundle.graph, np.asarray(bundle.vectors), manifest.encoder_dim, manifest.blend)
        found = {ef: graph.search(queries, 10, ef)[0] for ef in (10, manifest.index.ef)}
        served = PhraseIndex(bundle).search(queries, 10).rows
    assert bundle.manifest.index.ef > 10
    assert (served == found[bundle.manifest.index.ef]).all()
    assert not (served == found[10]).all()
