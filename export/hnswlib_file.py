"""The header of hnswlib's index file, read without hnswlib, whose loader a damaged file can crash."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

_LAYOUT = struct.Struct(
    "<6QiI3QdQ"
)  # HierarchicalNSW::saveIndex of hnswlib 0.8 on a 64-bit little-endian machine
HEADER_BYTES = _LAYOUT.size
_MAX_LEVEL = 64


@dataclass(frozen=True)
class IndexHeader:
    """The fields of the header that matter here; sizes and offsets are in bytes.

    Attributes:
        level0: where the nodes' block starts, from the end of the header.
        capacity: nodes there is room for.
        count: nodes there are.
        node_bytes: size of a node: links (4 bytes of count, 4 each), vector, label (8 bytes).
        label_offset: where a node's label is.
        vector_offset: where a node's vector is.
        max_level: the top level of the graph.
        entry: the node a search starts from.
        max_links: links a node has above level 0.
        max_links0: links a node has at level 0.
        M: links asked for.
        level_scale: 1 / ln M.
        ef_construction: width of the search at build time.
    """

    level0: int
    capacity: int
    count: int
    node_bytes: int
    label_offset: int
    vector_offset: int
    max_level: int
    entry: int
    max_links: int
    max_links0: int
    M: int
    level_scale: float
    ef_construction: int

    @classmethod
    def parse(cls, raw: bytes) -> IndexHeader:
        """Read the header from the first `HEADER_BYTES` bytes.

        Raises:
            ValueError: there are fewer.
        """
        if len(raw) < HEADER_BYTES:
            raise ValueError(f"it has {len(raw)} bytes, a header alone has {HEADER_BYTES}")
        return cls(*_LAYOUT.unpack(raw[:HEADER_BYTES]))

    def problem(self, *, count: int, dim: int, M: int, ef_construction: int, file_bytes: int) -> str | None:
        """What does not fit an index of `count` float32 vectors of width `dim`, or None."""
        links0 = 4 + 4 * 2 * M
        expected = {
            "count": (self.count, count),
            "capacity": (self.capacity, count),
            "M": (self.M, M),
            "ef_construction": (self.ef_construction, ef_construction),
            "level0": (self.level0, 0),
            "vector_offset": (self.vector_offset, links0),
            "label_offset": (self.label_offset, links0 + 4 * dim),
            "node_bytes": (self.node_bytes, links0 + 4 * dim + 8),
            "max_links": (self.max_links, M),
            "max_links0": (self.max_links0, 2 * M),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                return f"its header says {name} = {found}, not {wanted}"
        if not abs(self.level_scale * math.log(M) - 1) < 1e-6:
            return f"its header says level_scale = {self.level_scale}"
        if not 0 <= self.max_level <= _MAX_LEVEL or self.entry >= count:
            return f"its header says max_level = {self.max_level}, entry = {self.entry}"
        smallest = HEADER_BYTES + count * (self.node_bytes + 4)
        if file_bytes < smallest:
            return f"it has {file_bytes} bytes, {count} nodes need {smallest}"
        return None


def nodes(raw: np.ndarray, header: IndexHeader, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels (int64, n) and vectors (float32, n x dim) of some nodes.

    Args:
        raw: the whole file as uint8.
        header: its header, found sound.
        rows: internal node numbers, int64 (n,).
    """
    start = HEADER_BYTES
    block = raw[start : start + header.count * header.node_bytes].reshape(header.count, header.node_bytes)[
        rows
    ]
    vectors = np.ascontiguousarray(block[:, header.vector_offset : header.label_offset]).view(np.float32)
    labels = np.ascontiguousarray(block[:, header.label_offset : header.label_offset + 8]).view(np.int64)
    return labels[:, 0], vectors
