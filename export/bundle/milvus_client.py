"""A Milvus deployment: how it is reached, and the calls that loading and searching make."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from bidmatch.base.errors import MissingDependencyError
from export.bundle.format import MilvusIndexType
from export.bundle.index import IndexUnavailableError

ROW, VECTOR = "id", "vector"

# Milvus searches no wider than that.
_MOST_WIDTH = 32_768
_SCHEMES = {"http", "https", "tcp"}
# Of searches that nobody waits for, by the hundred queries at once.
_OFFLINE_MS = 60_000
_SAMPLED = 32
# gRPC would wait up to two minutes before it tries again what was gone for long.
_RECONNECT = {
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.min_reconnect_backoff_ms": 1_000,
    "grpc.max_reconnect_backoff_ms": 1_000,
}


class MilvusAccess(BaseSettings):
    """How Milvus is reached, from `BIDMATCH_MILVUS_*`; the token from nowhere else.

    Attributes:
        uri: of the deployment; None for the one that the bundle was exported to.
        token: `user:password` or an API key.
        timeout_ms: time that a search may take.
        calls: most calls at once from this process.
    """

    model_config = SettingsConfigDict(env_prefix="BIDMATCH_MILVUS_", extra="forbid", frozen=True)

    uri: str | None = None
    token: SecretStr | None = None
    timeout_ms: int = Field(500, ge=1, le=3_600_000)
    calls: int = Field(32, ge=1, le=10_000)

    @classmethod
    def offline(cls) -> MilvusAccess:
        """As the environment says, with a minute for a search unless it says how long."""
        found = cls()
        if "timeout_ms" in found.model_fields_set:
            return found
        return found.model_copy(update={"timeout_ms": _OFFLINE_MS})

    @field_validator("uri")
    @classmethod
    def _uri(cls, uri: str | None) -> str | None:
        return None if uri is None else checked_uri(uri)


def checked_uri(uri: str) -> str:
    """The URI, if it is a server's without user name or password: it is written into bundles and logs.

    Raises:
        ValueError: it is not.
    """
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise ValueError("is no URI") from None
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise ValueError(
            "must be the address of a server, such as http://milvus:19530; a file of Milvus Lite cannot be "
            "opened by several processes: run `milvus-lite server` and give its address"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "must be a scheme, a host and a port alone; put user:password or the API key into "
            "BIDMATCH_MILVUS_TOKEN"
        )
    return uri


def connect(uri: str, token: SecretStr | None, timeout: float) -> Any:
    """A `pymilvus.MilvusClient`; to be made in the process that uses it.

    Args:
        uri: of the deployment.
        token: see `MilvusAccess`.
        timeout: seconds that connecting may take.

    Raises:
        MissingDependencyError: pymilvus is not installed.
        IndexUnavailableError: Milvus does not answer, or not to us.
    """
    try:
        from pymilvus import MilvusClient
    except ImportError as missing:
        raise MissingDependencyError(
            "an index in Milvus needs the package pymilvus, which is not installed",
            hint="Install the extra: pip install '.[milvus]' in bidmatch's folder",
        ) from missing
    # It logs each failed call with a traceback, beside raising it.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    try:
        return MilvusClient(
            uri=uri,
            token="" if token is None else token.get_secret_value(),
            timeout=timeout,
            grpc_options=_RECONNECT,
        )
    except Exception as error:
        raise unavailable(uri, error) from error


def unavailable(uri: str, error: Exception) -> IndexUnavailableError:
    """What a call that pymilvus raised `error` for comes to."""
    return IndexUnavailableError(
        f"Milvus at {uri} does not answer: {reason_of(error)}",
        hint="Is it running, and is BIDMATCH_MILVUS_TOKEN right? BIDMATCH_MILVUS_URI says where else it is, "
        "BIDMATCH_MILVUS_TIMEOUT_MS how long a search may take.",
    )


def reason_of(error: Exception) -> str:
    """What went wrong in a call of pymilvus, in one line."""
    details = getattr(error, "details", None)  # of gRPC's own errors, whose text is many lines
    said = (details() if callable(details) else None) or getattr(error, "message", "") or str(error)
    return next(iter(str(said).splitlines()), type(error).__name__)


def search_params(index_type: MilvusIndexType, width: int) -> dict[str, Any]:
    """What Milvus' search of this kind of index takes to be so wide."""
    width = min(width, _MOST_WIDTH)
    params = {"HNSW": {"ef": width}, "DISKANN": {"search_list": width}}.get(index_type, {})
    return {"metric_type": "IP", "params": params}


def nearest(
    client: Any,
    collection: str,
    vectors: np.ndarray,
    limit: int,
    params: dict[str, Any],
    timeout: float,
) -> np.ndarray:
    """What Milvus finds, best first: rows, int64 (n, limit), -1 where they are fewer.

    Args:
        client: see `connect`.
        collection: loaded.
        vectors: float32 (n, dim).
        limit: results for each.
        params: see `search_params`.
        timeout: seconds.

    Raises:
        Exception: whatever pymilvus raises.
    """
    hits = client.search(
        collection,
        data=list(vectors),
        anns_field=VECTOR,
        limit=limit,
        search_params=params,
        output_fields=[ROW],
        timeout=timeout,
        # Nothing is written to it any more.
        consistency_level="Eventually",
    )
    rows = np.full((len(vectors), limit), -1, np.int64)
    for at, found in enumerate(hits):
        rows[at, : len(found)] = [hit[ROW] for hit in found]
    return rows


def count_rows(client: Any, collection: str, timeout: float, condition: str = "") -> int:
    """Rows of a loaded collection that fulfil a condition, those just written included.

    Raises:
        Exception: whatever pymilvus raises.
    """
    (answer,) = client.query(
        collection,
        filter=condition,
        output_fields=["count(*)"],
        consistency_level="Strong",
        timeout=timeout,
    )
    return int(answer["count(*)"])


def difference(client: Any, collection: str, vectors: np.ndarray, timeout: float) -> str | None:
    """Why a loaded collection is not `vectors` row by row, by its count and a sample; None where it is.

    Args:
        client: see `connect`.
        collection: loaded.
        vectors: float32 (L, dim).
        timeout: seconds of each call.

    Raises:
        Exception: whatever pymilvus raises.
    """
    count = count_rows(client, collection, timeout)
    if count != len(vectors):
        return f"{collection} has {count:,} vectors, not {len(vectors):,}"
    sample = np.unique(np.linspace(0, len(vectors) - 1, _SAMPLED).astype(np.int64)).tolist()
    found = client.query(
        collection,
        filter=f"{ROW} in {sample}",
        output_fields=[ROW, VECTOR],
        consistency_level="Strong",
        timeout=timeout,
    )
    held = {int(one[ROW]): np.asarray(one[VECTOR], np.float32) for one in found}
    if sorted(held) != sample or not all(np.array_equal(held[row], vectors[row]) for row in sample):
        return f"{collection} holds other vectors than the bundle"
    return None
