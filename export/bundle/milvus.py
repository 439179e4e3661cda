"""An index that is larger than a machine: the vectors of a bundle searched by a Milvus deployment.

Milvus holds row and vector of each phrase, nothing else. It proposes rows; what they score is computed here,
from the bundle's own mapped vectors, and so are all rules, so that answers are those of `PhraseIndex` over
the same data. What Milvus did not answer, or not with what belongs to the bundle, is an error, never a
shorter answer.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from bidmatch.base.errors import ConfigError, MissingDependencyError
from export.bundle.format import VECTORS, collection_of
from export.bundle.index import (
    Admitted,
    Denied,
    Found,
    IndexUnavailableError,
    checked,
    merged_topk,
    width_of,
)
from export.bundle.milvus_client import (
    MilvusAccess,
    connect,
    difference,
    nearest,
    search_params,
    unavailable,
)
from export.bundle.read import Bundle
from export.bundle.weights import narrow_weights

Result = TypeVar("Result")

# Milvus gives no more results than that.
_MOST_RESULTS = 16_384
# Beyond k, so that of phrases with one score those of least row are among the found.
_SPARE = 16
_DEEPER = 4
# Filtered rows are compared here up to this many: about what a search over the network takes.
_COMPARED_ROWS = 20_000
_ROW_BLOCK, _QUERY_BLOCK = 32_768, 64
# Found rows whose vectors are read at once.
_FOUND_BLOCK = 1 << 17
# Between looks at a deployment that answers, and at one that does not; seconds that loading is waited for.
_LOOK_S, _LOOK_AGAIN_S, _LOAD_S = 1.0, 0.3, 30.0
_log = logging.getLogger("bidmatch.milvus")


class MilvusIndex:
    """`PhraseIndex`'s answers from Milvus. Safe to search from several threads at once.

    Milvus need not be there when it is made: a thread looks for it and after it, and until then and whenever
    it is gone each search fails at once. What is few enough to be compared here needs no Milvus. Make it in
    the process that searches: its connection does not outlive a fork.

    Args:
        bundle: a verified bundle whose manifest has `milvus`.
        access: how Milvus is reached.

    Attributes:
        count: number of phrases, L.
        dim: width of the vectors.
        ef: width of a search unless it asks for more.
        collection: name of the collection.

    Raises:
        ConfigError: the bundle's index is not in Milvus.
        MissingDependencyError: pymilvus is not installed.
    """

    def __init__(self, bundle: Bundle, access: MilvusAccess):
        manifest = bundle.manifest
        if manifest.milvus is None:
            raise ConfigError(f"{bundle.path} has its index in a file, not in Milvus")
        self.count, self.dim, self.ef = manifest.counts.phrases, manifest.dim, manifest.index.ef
        self.collection = collection_of(manifest.files[VECTORS].sha256)
        self._vectors = np.asarray(bundle.vectors)
        self._split = manifest.encoder_dim
        self._weights = narrow_weights(manifest.blend)
        self._type = manifest.milvus.index_type
        self._uri, self._token = access.uri or manifest.milvus.uri, access.token
        self._timeout = access.timeout_ms / 1000
        self._calls = threading.BoundedSemaphore(access.calls)
        self._busy = f"All {access.calls} calls to Milvus are taken."
        self._client: Any = None
        self._failure: str | None = None
        self._answered = 0.0
        self._wake = threading.Event()
        self.look()
        if self._failure is not None:
            _log.warning("%s", self._failure)
        threading.Thread(
            target=_look_after, args=(weakref.ref(self), self._wake), name="milvus", daemon=True
        ).start()

    @property
    def failure(self) -> str | None:
        """Why Milvus can't be searched now; None where it can."""
        return self._failure

    def look(self) -> None:
        """See whether Milvus is there and holds the bundle's vectors, all of them; load them if need be."""
        timeout = max(self._timeout, _LOOK_S)
        try:
            if self._client is None:
                self._client = connect(self._uri, self._token, timeout)
            if self._failure is None and self._answered:
                nearest(self._client, self.collection, self._vectors[:1], 1, self._params(1), timeout)
            else:
                self._loaded(timeout)
                wrong = difference(self._client, self.collection, self._vectors, timeout)
                if wrong is not None:
                    raise IndexUnavailableError(f"Milvus at {self._uri}: {wrong}")
        except MissingDependencyError:
            raise
        except IndexUnavailableError as error:
            self._failure = error.reason
        except Exception as error:
            self._failure = unavailable(self._uri, error).reason
        else:
            if self._failure is not None:
                _log.warning("Milvus at %s answers again", self._uri)
            self._failure, self._answered = None, time.monotonic()

    def look_if_due(self) -> float:
        """`look`, unless a search has just been answered; seconds until the next one."""
        if self._failure is not None or time.monotonic() - self._answered >= _LOOK_S:
            self.look()
        return _LOOK_S if self._failure is None else _LOOK_AGAIN_S

    def _loaded(self, timeout: float) -> None:
        """Have the collection loaded: a deployment that was started anew may hold it on disk alone."""
        if not self._client.has_collection(self.collection, timeout=timeout):
            raise IndexUnavailableError(f"Milvus at {self._uri} has no collection {self.collection}")
        state = self._client.get_load_state(self.collection, timeout=timeout)["state"]
        if getattr(state, "name", state) != "Loaded":
            self._client.load_collection(self.collection, timeout=_LOAD_S)

    def _params(self, width: int) -> dict[str, Any]:
        return search_params(self._type, width)

    def search(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        ef: int | None = None,
        admitted: Admitted | None = None,
        off: np.ndarray | None = None,
        denied: Denied | None = None,
    ) -> Found:
        """See `PhraseIndex.search`.

        Milvus is asked for as many rows more as are left out, in several steps where need be; beyond what it
        gives, all that are admitted are compared here.

        Raises:
            ValueError: k < 1, or the vectors have the wrong shape or are not finite.
            IndexUnavailableError: Milvus is gone, too slow, or taken by other searches.
        """
        vectors = checked(vectors, k, self.dim)
        k = min(k, self.count)
        width = self.width(ef, admitted)
        if self.compares(admitted, max(k, width)):
            return self.exact(vectors, k, admitted=admitted, off=off, denied=denied)
        deadline = time.monotonic() + self._timeout
        found = _nothing(len(vectors), k)
        left, limit = np.arange(len(vectors)), self._first_limit(k, admitted)
        while len(left):
            some, short = [], []
            for part in _parts(left, limit):
                if limit >= self.count or limit > _MOST_RESULTS:
                    short.append(part)
                    some.append(
                        self.exact(vectors[part], k, admitted=admitted, off=off, denied=_of(denied, part))
                    )
                    continue
                rows = self._ask(vectors[part], limit, max(width, limit), deadline)
                lacking = (rows < 0).any(axis=1)
                rows = self._without(rows, admitted, off, _of(denied, part))
                some.append(self._best(vectors[part], rows, k))
                few = (some[-1].rows[:, -1] < 0) | lacking
                short.append(part[few])
            for column, values in zip(found, zip(*some, strict=True), strict=True):
                column[left] = np.concatenate(values)
            if limit >= self.count or limit > _MOST_RESULTS:
                break
            left = np.concatenate(short)
            limit = min(limit * _DEEPER, self.count)
        return found

    def exact(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        admitted: Admitted | None = None,
        off: np.ndarray | None = None,
        denied: Denied | None = None,
    ) -> Found:
        """What `search` would return with perfect recall: the bundle's vectors are compared here."""
        vectors = checked(vectors, k, self.dim)
        k = min(k, self.count)
        found = _nothing(len(vectors), k)
        for start in range(0, len(vectors), _QUERY_BLOCK):
            part = np.arange(start, min(start + _QUERY_BLOCK, len(vectors)))
            best = self._compared(vectors[part], k, admitted, off, _of(denied, part))
            for column, values in zip(found, best, strict=True):
                column[part] = values
        return found

    def width(self, ef: int | None, admitted: Admitted | None = None) -> int:
        """See `PhraseIndex.width`."""
        return width_of(max(self.ef, ef or 0), self.count, admitted)

    def compares(self, admitted: Admitted | None, ef: int) -> bool:
        """Whether a search of this width compares all admitted rows here, for they are few."""
        if admitted is None:
            return False
        return admitted.count <= _COMPARED_ROWS or ef * self.count > _MOST_RESULTS * admitted.count

    def _first_limit(self, k: int, admitted: Admitted | None) -> int:
        limit = k + _SPARE
        if admitted is not None:
            limit = -(-limit * self.count // max(1, admitted.count))
        return min(limit, self.count)

    def _ask(self, vectors: np.ndarray, limit: int, width: int, deadline: float) -> np.ndarray:
        """Rows from Milvus, int64 (n, limit)."""
        rows = self._call(
            lambda client, timeout: nearest(
                client, self.collection, vectors, limit, self._params(width), timeout
            ),
            deadline,
        )
        if rows.max(initial=-1) >= self.count or rows.min(initial=0) < -1:
            raise self._failed(f"Milvus at {self._uri} answers with rows that the bundle does not have")
        return rows

    def _call(self, call: Callable[[Any, float], Result], deadline: float) -> Result:
        if self._failure is not None:
            raise IndexUnavailableError(self._failure)
        if not self._calls.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise IndexUnavailableError(self._busy)
        left = deadline - time.monotonic()
        try:
            result = call(self._client, max(1e-3, left))
        except Exception as error:
            reason = unavailable(self._uri, error).reason
            if left < self._timeout / 2:
                # It had waited here for long: that says nothing of Milvus.
                raise IndexUnavailableError(reason) from error
            raise self._failed(reason) from error
        finally:
            self._calls.release()
        self._answered = time.monotonic()
        return result

    def _failed(self, reason: str) -> IndexUnavailableError:
        """The error of a call that failed; the thread looks at once whether Milvus is gone."""
        if self._failure is None:
            _log.warning("%s", reason)
        self._failure = reason
        self._wake.set()
        return IndexUnavailableError(reason)

    def _without(
        self, rows: np.ndarray, admitted: Admitted | None, off: np.ndarray | None, denied: Denied | None
    ) -> np.ndarray:
        """The rows, int64 (n, c), with -1 for those that may not be returned."""
        keep = rows >= 0
        there = np.maximum(rows, 0)
        if admitted is not None:
            keep &= _bit(admitted.bits, there)
        if off is not None:
            keep &= ~_bit(off, there)
        if denied is not None:
            for at in range(len(rows)):
                theirs = denied.rows[denied.offsets[at] : denied.offsets[at + 1]]
                keep[at] &= ~np.isin(rows[at], theirs)
        return np.where(keep, rows, -1)

    def _best(self, queries: np.ndarray, rows: np.ndarray, k: int) -> Found:
        """The k best of rows, int64 (n, c), -1 for none."""
        held = self._vectors[np.maximum(rows, 0)]
        split = self._split
        encoder = np.einsum("nd,ncd->nc", queries[:, :split], held[..., :split])
        classifier = np.einsum("nd,ncd->nc", queries[:, split:], held[..., split:])
        return _ordered(rows, *self._clipped(encoder, classifier), k)

    def _clipped(self, encoder: np.ndarray, classifier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rounding puts the cosine of equal vectors a little above 1."""
        w_d, w_c = self._weights
        return np.clip(encoder, -w_d, w_d), np.clip(classifier, -w_c, w_c)

    def _compared(
        self,
        queries: np.ndarray,
        k: int,
        admitted: Admitted | None,
        off: np.ndarray | None,
        denied: Denied | None,
    ) -> Found:
        n = len(queries)
        best = np.empty((n, 0), np.int64), np.empty((n, 0), np.float32)
        for block, held in self._blocks(admitted, off):
            scores = queries @ held.T
            if denied is not None:
                rows = self._without(np.broadcast_to(block, scores.shape), None, None, denied)
                scores[rows < 0] = -np.inf
            # Some more than k, for the parts, once clipped, may order near ones otherwise.
            best = merged_topk(*best, block, scores, k + _SPARE)
        rows, scores = best
        return self._best(queries, np.where(np.isneginf(scores), -1, rows), k)

    def _blocks(
        self, admitted: Admitted | None, off: np.ndarray | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows that may be returned, int64, and their vectors, some at a time."""
        listed = None if admitted is None else admitted.rows
        total = self.count if listed is None else len(listed)
        for start in range(0, total, _ROW_BLOCK):
            end = min(start + _ROW_BLOCK, total)
            rows = np.arange(start, end) if listed is None else listed[start:end].astype(np.int64)
            if admitted is not None and listed is None:
                rows = rows[_bit(admitted.bits, rows)]
            if off is not None:
                rows = rows[~_bit(off, rows)]
            if len(rows):
                yield rows, self._vectors[rows]


def _look_after(held: weakref.ref[MilvusIndex], wake: threading.Event) -> None:
    """Look at Milvus again and again, as long as somebody has the index."""
    pause = _LOOK_S
    while True:
        wake.wait(pause)
        wake.clear()
        index = held()
        if index is None:
            return
        pause = index.look_if_due()
        del index


def _nothing(n: int, k: int) -> Found:
    return Found(np.full((n, k), -1, np.int64), np.zeros((n, k), np.float32), np.zeros((n, k), np.float32))


def _ordered(rows: np.ndarray, encoder: np.ndarray, classifier: np.ndarray, k: int) -> Found:
    """The k best, by score, then by row; -1 rows last, with scores of 0."""
    there = rows >= 0
    scores = np.where(there, encoder + classifier, -np.inf)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    rows, there, encoder, classifier = (
        np.take_along_axis(column, order, axis=1) for column in (rows, there, encoder, classifier)
    )
    found = _nothing(len(rows), k)
    size = rows.shape[1]
    found.rows[:, :size] = rows
    found.encoder[:, :size] = np.where(there, encoder, 0)
    found.classifier[:, :size] = np.where(there, classifier, 0)
    return found


def _bit(bits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether the bits of rows are set; see `pack`. Beyond the bits none is."""
    at = rows >> 3
    inside = at < len(bits)
    return np.asarray(inside & ((bits[np.where(inside, at, 0)] >> (rows & 7).astype(np.uint8) & 1) == 1))


def _of(denied: Denied | None, queries: np.ndarray) -> Denied | None:
    """What is denied to some of the queries."""
    if denied is None:
        return None
    parts = [denied.rows[denied.offsets[at] : denied.offsets[at + 1]] for at in queries.tolist()]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return Denied(offsets, np.concatenate([np.empty(0, np.int32), *parts]))


def _parts(queries: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    """The queries, as many at a time as may ask for so many rows at once."""
    size = max(1, min(_QUERY_BLOCK, _FOUND_BLOCK // max(1, limit)))
    for start in range(0, len(queries), size):
        yield queries[start : start + size]
