from __future__ import annotations

import pytest

from export.bundle.format import bundle_id, checksum_holds

DIGESTS = {"encoder.onnx": "a" * 64, "links.npy": "b" * 64, "vectors.npy": "c" * 64}
TARGETS = {"target_recall": 0.99, "k": 100}


def test_the_id_depends_on_every_file_but_the_index_graph_and_on_its_targets():
    first = bundle_id(DIGESTS, TARGETS)
    assert first == bundle_id(dict(reversed(DIGESTS.items())), TARGETS)
    for name in ("links.npy", "upper.npy", "codes.npy", "steps.npy"):
        assert first == bundle_id({**DIGESTS, name: "d" * 64}, TARGETS)
    assert first != bundle_id({**DIGESTS, "encoder.onnx": "d" * 64}, TARGETS)
    assert first != bundle_id({**DIGESTS, "vectors.npy": "d" * 64}, TARGETS)
    assert first != bundle_id(DIGESTS, {**TARGETS, "k": 10})
    assert first != bundle_id(DIGESTS, {**TARGETS, "candidates": 100})
    assert len(first) == 12


def test_every_single_byte_of_a_manifest_is_under_its_checksum(small_bundle):
    raw = (small_bundle / "manifest.json").read_bytes()
    checksum = raw[raw.rindex(b'"checksum": "') + 13 :][:64].decode()
    assert checksum_holds(raw, checksum)
    own = raw.rindex(checksum.encode())
    for at in [*range(0, own, 37), *range(own + 64, len(raw))]:
        damaged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert not checksum_holds(damaged, checksum), at
    assert not checksum_holds(raw + b" ", checksum)
    assert not checksum_holds(raw[1:], checksum)


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"checksum": "', b'{"checksum": "12"}'])
def test_no_checksum_to_be_found(raw):
    assert not checksum_holds(raw, "0" * 64)
