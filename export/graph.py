"""From hnswlib's index to the bundle's: the graph as arrays of rows, and the vectors in 8 bits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from export.bundle import _native
from export.bundle.read import GraphArrays
from export.bundle.write import write_graph
from export.hnswlib_file import HEADER_BYTES, IndexHeader

NONE = np.uint32(2**32 - 1)
_LARGEST = 127
_BLOCK = 1 << 16
_LEAST_QUERIES = 64


def codes_of(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in 8 bits: value over the step of its column, rounded.

    A column's step is its largest magnitude / 127; a column of zeros has step 0.

    Args:
        vectors: float32 (L, dim), finite; a memory map will do.

    Returns:
        Codes, int8 (L, dim), and steps, float32 (1, dim).
    """
    steps = np.zeros(vectors.shape[1], dtype=np.float32)
    for rows in _blocks(len(vectors)):
        np.maximum(steps, np.abs(vectors[rows]).max(axis=0, initial=0.0), out=steps)
    steps /= _LARGEST
    divisor = np.where(steps > 0, steps, 1.0)
    codes = np.empty(vectors.shape, dtype=np.int8)
    for rows in _blocks(len(vectors)):
        # Of magnitudes near the least there are, a quotient can come out above 127.
        codes[rows] = np.clip(np.rint(vectors[rows] / divisor), -_LARGEST, _LARGEST)
    return codes, steps[None]


def links_of(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`GraphArrays.links` and `.upper` of a file that hnswlib saved, whose labels are the rows 0 to L - 1.

    Args:
        raw: the whole file, uint8.
    """
    header = IndexHeader.parse(raw[:HEADER_BYTES].tobytes())
    end = HEADER_BYTES + header.count * header.node_bytes
    nodes = raw[HEADER_BYTES:end].reshape(header.count, header.node_bytes)
    row_of = np.concatenate(
        [
            np.ascontiguousarray(nodes[rows, header.label_offset :]).view(np.int64)[:, 0]
            for rows in _blocks(header.count)
        ]
    ).astype(np.uint32)
    links = np.empty((header.count, header.max_links0), dtype=np.uint32)
    for rows in _blocks(header.count):
        block = np.ascontiguousarray(nodes[rows, : header.vector_offset]).view(np.uint32)
        links[row_of[rows]] = _renumbered(block, row_of)
    return links, _upper_of(raw, header, row_of, end)


def _upper_of(raw: np.ndarray, header: IndexHeader, row_of: np.ndarray, end: int) -> np.ndarray:
    width = 1 + header.max_links
    nodes, tops, places = _native.hnswlib_upper(raw, end, header.count, 4 * width)
    upper = np.full((int(tops.sum()), 1 + width), NONE, dtype=np.uint32)
    # The entry comes first; the others stay in their order.
    order = np.argsort(nodes != header.entry, kind="stable")
    nodes, tops, places = nodes[order], tops[order], places[order]
    levels = int(tops.max(initial=0))
    sizes = [int((tops >= level).sum()) for level in range(1, levels + 1)]
    place_of = np.full(header.count, NONE, dtype=np.uint32)
    for level in range(1, levels + 1):
        here = tops >= level
        members, start = nodes[here], sum(sizes[level:])
        rows = slice(start, start + len(members))
        upper[rows, 0] = row_of[members]
        upper[rows, 1] = place_of[members]
        place_of[:] = NONE
        place_of[members] = np.arange(rows.start, rows.stop, dtype=np.uint32)
        lies = places[here][:, None] + (level - 1) * 4 * width + np.arange(4 * width)
        upper[rows, 2:] = _renumbered(np.ascontiguousarray(raw[lies]).view(np.uint32), place_of)
    return upper


def _renumbered(block: np.ndarray, number_of: np.ndarray) -> np.ndarray:
    """Neighbours by other numbers: uint32 (n, degree), from rows of a count and node numbers."""
    counts, ids = block[:, :1] & 0xFFFF, block[:, 1:]
    there = np.arange(ids.shape[1]) < counts
    return np.where(there, number_of[np.where(there, ids, 0)], NONE)


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


class BuiltIndex:
    """The graph of an hnswlib index, searched as it will be served, in hnswlib's own manner.

    Args:
        index: hnswlib's, over all vectors, label = row. It is not kept.
        vectors: float32 (L, dim).

    Attributes:
        graph: its arrays.
    """

    def __init__(self, index: Any, vectors: np.ndarray):
        with tempfile.TemporaryDirectory(prefix="bidmatch-index-") as folder:
            file = Path(folder) / "index"
            index.save_index(str(file))
            links, upper = links_of(np.memmap(file, dtype=np.uint8, mode="r"))
        self.graph = GraphArrays(links, upper, *codes_of(vectors))
        self._search = _native.Graph(
            np.asarray(vectors),
            self.graph.codes,
            self.graph.steps,
            links,
            upper,
            split=0,
            encoder_weight=np.inf,
            classifier_weight=np.inf,
        )
        self._ef = 0

    def set_ef(self, ef: int) -> None:
        """Search so wide, or as wide as there are results asked for."""
        self._ef = ef

    def knn_query(self, queries: np.ndarray, k: int, num_threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Rows, int64 (n, k), best first, and scores, float32 (n, k)."""
        queries = np.ascontiguousarray(queries, dtype=np.float32)

        def part(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found, _, scores = self._search.search(queries[rows], k, self._ef)
            return found, scores

        if len(queries) < _LEAST_QUERIES or num_threads == 1:
            return part(np.arange(len(queries)))
        with ThreadPoolExecutor(num_threads) as pool:
            shares = np.array_split(np.arange(len(queries)), num_threads)
            rows, scores = zip(*pool.map(part, shares), strict=True)
        return np.concatenate(rows), np.concatenate(scores)

    def save(self, folder: Path) -> None:
        """Write its files into a bundle's folder."""
        write_graph(folder, self.graph)
