"""The wide vectors of a bundle: mapped, near what they are made from, and refused where they are damaged."""

from __future__ import annotations

import dataclasses
import mmap
import os
import random

import numpy as np
import pytest

from bidmatch.base.errors import ConfigError, DamagedError
from export.build import ExportOptions, build_bundle
from export.bundle.encoder import QueryEncoder, QueryVectors, TextEncoder, make_session
from export.bundle.read import open_bundle
from export.bundle.rescore import Rescorer
from export.onnx_graph import export_onnx
from export.rescoring import JUDGED
from export.vectors import check_parity, torch_vectors

WIDE_FILES = ("wide.npy", "wide_scales.npy")


def refused(path) -> str:
    """The reason for which a bundle is refused."""
    with pytest.raises(DamagedError) as caught:
        QueryEncoder(open_bundle(path))
    return str(caught.value)


@pytest.fixture(scope="module")
def bundle(small_wide_bundle):
    with open_bundle(small_wide_bundle) as bundle:
        yield bundle


def test_wide_vectors_are_phi_d_and_the_normalised_table_in_8_bits(small_wide_source, bundle):
    wide = bundle.wide
    assert (wide.rows.shape, wide.scales.shape, wide.encoder_dim) == ((54, 96), (54, 2), 48)
    encoder = TextEncoder(
        make_session(bundle.read_bytes("encoder.onnx"), threads=1), small_wide_source.tokenizer, 32, 96
    )
    texts = bundle.phrases["text"].to_pylist()
    expected = torch_vectors(small_wide_source.model, encoder, texts).wide.copy()
    table = small_wide_source.wide_table
    expected[:, 48:] = table / np.linalg.norm(table, axis=1, keepdims=True)
    step = np.repeat(wide.scales, 48, axis=1)
    assert (np.abs(wide.rows * step - expected) <= step / 2 + 1e-5).all()


def test_they_are_mapped_not_loaded_and_cannot_be_written_to(bundle):
    for array in (bundle.wide.rows, bundle.wide.scales):
        owner = array
        while isinstance(owner, np.ndarray):
            assert not owner.flags.writeable
            owner = owner.base
        assert isinstance(owner, mmap.mmap)


def test_they_outlive_the_bundles_files(small_wide_bundle):
    with open_bundle(small_wide_bundle) as bundle:
        query = QueryEncoder(bundle).encode(["red garden hose"])
    encoder, classifier = Rescorer(bundle.wide).score(query.wide, np.arange(54)[None])
    best = int((encoder + classifier).argmax())
    assert bundle.phrases["text"][best].as_py() == "red garden hose"


def test_the_manifest_says_what_re_scoring_costs_and_brings(small_wide_bundle, bundle):
    record = bundle.manifest.rescore
    assert (record.dim, record.encoder_dim, record.candidates, record.per_match) == (96, 48, 20, 1)
    assert record.bytes == sum((small_wide_bundle / name).stat().st_size for name in WIDE_FILES)
    assert record.microseconds > 0
    assert record.queries == 54
    assert record.reason == "as asked for"
    assert [point.candidates for point in record.curve] == [20, 50, 54]
    for figures in (record.narrow, record.rescored, *(point.quality for point in record.curve)):
        assert set(figures) == set(JUDGED)
    assert bundle.manifest.quality.served["recall@100"] == record.rescored["recall@100"]
    assert {name: bundle.manifest.quality.index[name] for name in JUDGED} == record.narrow
    assert bundle.manifest.index.results == 54


def test_without_re_scoring_what_is_served_is_what_the_index_finds(small_bundle):
    with open_bundle(small_bundle) as bundle:
        assert bundle.wide is None
        assert bundle.manifest.rescore is None
        assert bundle.manifest.quality.served == bundle.manifest.quality.index


def test_no_rescore_gives_the_bundle_of_a_run_without_wide_heads(small_wide_source, small_bundle, tmp_path):
    manifest = build_bundle(small_wide_source, tmp_path / "b", ExportOptions(threads=1, rescore=False))
    with open_bundle(small_bundle) as bundle:
        assert manifest.files["encoder.onnx"] == bundle.manifest.files["encoder.onnx"]
        assert manifest.bundle_id == bundle.manifest.bundle_id


def test_candidates_without_wide_heads_are_refused_before_any_work(small_source, small_wide_source, tmp_path):
    with pytest.raises(ConfigError, match="no wide heads"):
        build_bundle(small_source, tmp_path / "b", ExportOptions(candidates=50))
    with pytest.raises(ConfigError, match="nothing is to be re-scored"):
        build_bundle(small_wide_source, tmp_path / "b", ExportOptions(candidates=50, rescore=False))
    assert not (tmp_path / "b").exists()


def test_the_number_of_candidates_is_part_of_the_bundles_id(small_wide_source, small_wide_bundle, tmp_path):
    none = small_wide_source.validation.take(np.zeros(0, dtype=np.int64))
    source = dataclasses.replace(small_wide_source, validation=none)
    manifest = build_bundle(source, tmp_path / "b", ExportOptions(threads=1))
    assert manifest.rescore.candidates == 54
    assert "no validation queries" in manifest.rescore.reason
    assert (manifest.rescore.narrow, manifest.rescore.curve) == ({}, [])
    other = build_bundle(source, tmp_path / "c", ExportOptions(threads=1, candidates=30))
    assert manifest.files["wide.npy"] == other.files["wide.npy"]
    assert manifest.bundle_id != other.bundle_id


def test_parity_looks_at_the_wide_output_too(small_wide_source, tmp_path):
    """A graph whose wide half is another model's passes for the narrow vectors alone, and only for them."""
    import copy

    import torch

    other = copy.deepcopy(small_wide_source.model)
    with torch.no_grad():
        other.heads[1].g2[0].weight[0] += 1.0
    export_onnx(other, tmp_path / "other.onnx", pairs=2)
    session = make_session((tmp_path / "other.onnx").read_bytes(), threads=1)
    tokenizer = small_wide_source.tokenizer
    texts = ["red garden hose", "fan"]
    assert check_parity(other, TextEncoder(session, tokenizer, 32, 96), texts).min_cosine > 0.9999
    narrow_only = TextEncoder(session, tokenizer, 32)
    assert check_parity(small_wide_source.model, narrow_only, texts).min_cosine > 0.9999
    with pytest.raises(Exception, match="differs from torch"):
        check_parity(small_wide_source.model, TextEncoder(session, tokenizer, 32, 96), texts)


def test_the_quantised_encoder_has_both_outputs(bundle):
    assert bundle.manifest.encoder.precision == "int8"
    texts = bundle.phrases["text"].to_pylist()
    small, exact = (QueryEncoder(bundle, precision=kind).encode(texts) for kind in ("int8", "fp32"))
    assert isinstance(small, QueryVectors)
    for one, other in zip(small, exact, strict=True):
        assert one.shape == other.shape
        assert np.allclose(one, other, atol=0.05)
        assert not np.array_equal(one, other)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", WIDE_FILES)
def test_a_flipped_byte(wide_copy, name, seed):
    file = wide_copy.path / name
    raw = bytearray(file.read_bytes())
    raw[seed if seed < 3 else random.Random(f"{name} {seed}").randrange(len(raw))] ^= 1
    file.write_bytes(raw)
    assert name in refused(wide_copy.path)


@pytest.mark.parametrize("name", WIDE_FILES)
def test_a_truncated_a_missing_and_a_superfluous_file(wide_copy, bundle_copy, name):
    file = wide_copy.path / name
    raw = file.read_bytes()
    os.truncate(file, len(raw) - 1)
    assert name in refused(wide_copy.path)
    file.unlink()
    assert name in refused(wide_copy.path)
    (bundle_copy.path / name).write_bytes(raw)
    assert f"{name} does not belong" in refused(bundle_copy.path)


def test_wide_vectors_of_another_shape_type_or_order(wide_copy):
    good = np.load(wide_copy.path / "wide.npy")
    for rows, reason in (
        (good[:, :95], "holds int8 (54, 95)"),
        (good[:53], "holds int8 (53, 96)"),
        (good.view(np.uint8), "holds uint8"),
        (good.astype(np.float32), "holds float32"),
        (np.asfortranarray(good), "wide.npy holds"),
        (np.array([["a"]], dtype=object), "holds object"),
    ):
        np.save(wide_copy.path / "wide.npy", rows, allow_pickle=True)
        wide_copy.reseal()
        assert reason in refused(wide_copy.path)


def test_scales_that_are_none(wide_copy):
    good = np.load(wide_copy.path / "wide_scales.npy")
    bad = {}
    for value in (np.nan, np.inf, -1.0):
        bad[value] = good.copy()
        bad[value][7, 1] = value
    for scales, reason in (
        *((array, "no scales") for array in bad.values()),
        (good[:, :1], "holds float32 (54, 1)"),
        (good.astype(np.float64), "holds float64"),
    ):
        np.save(wide_copy.path / "wide_scales.npy", scales)
        wide_copy.reseal()
        assert reason in refused(wide_copy.path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rescore: rescore.update(dim=95), "holds int8"),
        (lambda rescore: rescore.update(dim=0), "rescore.dim"),
        (lambda rescore: rescore.update(encoder_dim=97), "rescore.encoder_dim is above"),
        (lambda rescore: rescore.update(encoder_dim=-1), "rescore.encoder_dim"),
        (lambda rescore: rescore.update(candidates=0), "rescore.candidates"),
        (lambda rescore: rescore.update(candidates=21), "bundle_id"),
        (lambda rescore: rescore.update(per_match=2), "bundle_id"),
        (lambda rescore: rescore.update(per_match=0), "rescore.per_match"),
        (lambda rescore: rescore.pop("curve"), "rescore.curve"),
        (lambda rescore: rescore.update(unknown=1), "rescore.unknown"),
    ],
)
def test_a_wrong_record_under_a_checksum_made_to_fit(wide_copy, change, reason):
    wide_copy.reseal(lambda manifest: change(manifest["rescore"]))
    assert reason in refused(wide_copy.path)


def test_a_manifest_that_denies_the_files_or_claims_them(wide_copy, bundle_copy):
    record = wide_copy.manifest["rescore"]
    wide_copy.reseal(lambda manifest: manifest.update(rescore=None))
    assert "there should be" in refused(wide_copy.path)
    bundle_copy.reseal(lambda manifest: manifest.update(rescore=record))
    assert "there should be" in refused(bundle_copy.path)


def test_an_encoder_without_the_wide_output(wide_copy, small_wide_source):
    export_onnx(small_wide_source.model, wide_copy.path / "encoder.int8.onnx", pairs=1)
    wide_copy.reseal()
    assert "not embedding of width 32 and wide of width 96" in refused(wide_copy.path)
