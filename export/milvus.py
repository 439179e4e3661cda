"""Loads a bundle's vectors into Milvus: in bulk, resumable, and all of them before an alias leads there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from bidmatch.base.console import progress, say
from bidmatch.base.errors import BidmatchError
from bidmatch.base.files import sha256_file
from export.bundle.format import VECTORS, MilvusIndexType, MilvusRecord, collection_of
from export.bundle.milvus_client import (
    ROW,
    VECTOR,
    MilvusAccess,
    checked_uri,
    connect,
    count_rows,
    difference,
    nearest,
    reason_of,
    search_params,
)

_BATCH = 5_000
# Kinds whose M and ef_construction are chosen as hnswlib's are; of the others Milvus chooses.
LADDERS: dict[MilvusIndexType, tuple[tuple[int, int], ...] | None] = {
    "HNSW": None,
    "DISKANN": ((16, 200),),
    "AUTOINDEX": ((16, 200),),
    "FLAT": ((16, 200),),
}
_ASKED_AT_ONCE = 64
_CALL_S, _LONG_CALL_S = 60.0, 24 * 3600.0

Result = TypeVar("Result")


class MilvusTarget(BaseModel):
    """Where a bundle's index goes instead of into a file.

    Attributes:
        uri: of the deployment; recorded in the bundle.
        alias: is made to lead to the new collection when the bundle is there.
        index_type: the kind of Milvus' index.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    uri: str = Field(min_length=1)
    alias: str = Field("bidmatch", pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,200}$")
    index_type: MilvusIndexType = "HNSW"

    @field_validator("uri")
    @classmethod
    def _uri_of_a_server(cls, uri: str) -> str:
        return checked_uri(uri)

    @property
    def record(self) -> MilvusRecord:
        """What the bundle says of it."""
        return MilvusRecord(uri=self.uri, alias=self.alias, index_type=self.index_type)


class MilvusGraph:
    """A loaded collection, searched as `export.hnsw` searches hnswlib's index.

    Args:
        loader: of the collection.
    """

    def __init__(self, loader: MilvusLoader):
        self._loader = loader
        self._ef = 1

    def set_ef(self, ef: int) -> None:
        """Search as wide from now on."""
        self._ef = ef

    def knn_query(self, queries: np.ndarray, k: int, num_threads: int) -> tuple[np.ndarray, None]:  # noqa: ARG002
        """Rows of the k nearest of each query, int64 (n, k), and no distances.

        Raises:
            RuntimeError: the index gives fewer.
        """
        blocks = [
            self._loader.nearest(queries[start : start + _ASKED_AT_ONCE], k, max(k, self._ef))
            for start in range(0, len(queries), _ASKED_AT_ONCE)
        ]
        rows = np.concatenate([np.empty((0, k), np.int64), *blocks])
        if (rows < 0).any():
            raise RuntimeError("the index gives fewer than k")
        return rows, None


class MilvusLoader:
    """Brings `vectors.npy` of a bundle in the making into Milvus.

    The collection has its name from the vectors, so an export that was killed goes on with it: how far it
    came, the collection tells. Rows are written as upserts by row, so twice is as once.

    Args:
        folder: with `vectors.npy` in it.
        vectors: what is in it, float32 (L, dim).
        target: where it goes.
        access: the token, and where the deployment is if not where the target says.
        call_seconds: time of one call.

    Attributes:
        collection: its name.

    Raises:
        IndexUnavailableError: Milvus does not answer.
        MissingDependencyError: pymilvus is not installed.
    """

    def __init__(
        self,
        folder: Path,
        vectors: np.ndarray,
        target: MilvusTarget,
        access: MilvusAccess,
        call_seconds: float = _CALL_S,
    ):
        self._vectors, self._target, self._seconds = vectors, target, call_seconds
        self._uri = access.uri or target.uri
        self._client = connect(self._uri, access.token, call_seconds)
        self.collection = collection_of(sha256_file(folder / VECTORS))
        self._loaded = False

    def build(self, M: int, ef_construction: int) -> MilvusGraph:
        """The index over all vectors with these parameters, which are put there where they are not yet.

        Raises:
            BidmatchError: Milvus failed, or does not hold what was written.
        """
        if not self._loaded:
            self._load_rows()
            self._loaded = True
        wanted = {"M": M, "efConstruction": ef_construction} if self._target.index_type == "HNSW" else {}
        kind = self._target.index_type
        say(f"Milvus builds its {kind} index" + "".join(f", {name}={of}" for name, of in wanted.items()))
        self._index(wanted)
        wrong = self._do(lambda: difference(self._client, self.collection, self._vectors, self._seconds))
        if wrong is not None:
            raise BidmatchError(
                f"Milvus at {self._uri}: {wrong}",
                hint=f"Drop the collection {self.collection} and export again.",
            )
        return MilvusGraph(self)

    def nearest(self, queries: np.ndarray, k: int, width: int) -> np.ndarray:
        """See `export.bundle.milvus_client.nearest`."""
        params = search_params(self._target.index_type, width)
        return self._do(lambda: nearest(self._client, self.collection, queries, k, params, self._seconds))

    def flip(self) -> None:
        """Make the alias lead to this collection, and say which others are left.

        Raises:
            BidmatchError: Milvus failed; the alias leads to where it led.
        """
        alias, timeout = self._target.alias, self._seconds
        before = self._leads_to(alias)
        if before is None:
            self._do(lambda: self._client.create_alias(self.collection, alias, timeout=timeout))
        elif before != self.collection:
            self._do(lambda: self._client.alter_alias(self.collection, alias, timeout=timeout))
        say(f"Milvus' alias {alias} leads to {self.collection}" + _instead_of(before, self.collection))
        names = self._do(lambda: self._client.list_collections(timeout=timeout))
        left = sorted(name for name in names if name.startswith("bidmatch_") and name != self.collection)
        if left:
            say(f"left in Milvus, to be dropped when no bundle is served from them: {', '.join(left)}")

    def _leads_to(self, alias: str) -> str | None:
        names = self._do(lambda: self._client.list_collections(timeout=self._seconds))
        for name in names:
            held = self._do(lambda of=name: self._client.list_aliases(of, timeout=self._seconds))  # type: ignore[misc]
            if alias in held.get("aliases", []):
                return str(name)
        return None

    def _load_rows(self) -> None:
        """Write all vectors that are not there yet."""
        from pymilvus import DataType

        client, name, count = self._client, self.collection, len(self._vectors)
        start = 0
        if self._do(lambda: client.has_collection(name, timeout=self._seconds)):
            start = self._written()
            if start:
                say(f"{name} has {start:,} of {count:,} vectors: going on there")
        else:
            schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field(ROW, DataType.INT64, is_primary=True)
            schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=self._vectors.shape[1])
            self._do(lambda: client.create_collection(name, schema=schema, timeout=self._seconds))
        if start < count:
            with progress(f"loading {name} into Milvus", count, "phrases") as step:
                step.advance(start)
                for first in range(start, count, _BATCH):
                    step.advance(self._write(first, min(first + _BATCH, count)))
        self._do(lambda: client.flush(name, timeout=_LONG_CALL_S))

    def _write(self, first: int, end: int) -> int:
        rows = [{ROW: row, VECTOR: self._vectors[row]} for row in range(first, end)]
        self._do(lambda: self._client.upsert(self.collection, rows, timeout=self._seconds))
        return end - first

    def _written(self) -> int:
        """Rows that are there, from the first on, by what the collection itself says."""
        client, name, timeout = self._client, self.collection, self._seconds
        self._do(lambda: client.flush(name, timeout=_LONG_CALL_S))
        if not self._do(lambda: client.list_indexes(name, timeout=timeout)):
            self._index({"M": 16, "efConstruction": 200} if self._target.index_type == "HNSW" else {})
        else:
            self._do(lambda: client.load_collection(name, timeout=_LONG_CALL_S))
        rows = self._do(lambda: count_rows(client, name, timeout))
        if rows == 0 or self._do(lambda: count_rows(client, name, timeout, f"{ROW} < {rows}")) == rows:
            return rows
        say(f"{name} has gaps: all is written anew")
        return 0

    def _index(self, wanted: dict[str, int]) -> None:
        """Have an index of these parameters, loaded."""
        client, name, timeout = self._client, self.collection, self._seconds
        for held in self._do(lambda: client.list_indexes(name, timeout=timeout)):
            found = self._do(lambda of=held: client.describe_index(name, of, timeout=timeout))  # type: ignore[misc]
            alike = found.get("index_type") == self._target.index_type
            # Where it does not say, it is built anew.
            if alike and all(str(found.get(key)) == str(of) for key, of in wanted.items()):
                self._do(lambda: client.load_collection(name, timeout=_LONG_CALL_S))
                return
            self._do(lambda: client.release_collection(name, timeout=timeout))
            self._do(lambda of=held: client.drop_index(name, of, timeout=timeout))  # type: ignore[misc]
        params = client.prepare_index_params()
        params.add_index(
            VECTOR, index_name=VECTOR, index_type=self._target.index_type, metric_type="IP", params=wanted
        )
        started = time.monotonic()
        self._do(lambda: client.create_index(name, params, timeout=_LONG_CALL_S))
        self._do(lambda: client.load_collection(name, timeout=_LONG_CALL_S))
        say(f"built and loaded in {time.monotonic() - started:.1f} s")

    def _do(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except BidmatchError:
            raise
        except Exception as error:
            raise BidmatchError(
                f"Milvus at {self._uri} failed: {reason_of(error)}",
                hint="What was loaded stays there; the same command goes on with it.",
            ) from error


def _instead_of(before: str | None, now: str) -> str:
    return "" if before in (None, now) else f" instead of {before}"
