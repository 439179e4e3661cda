"""What the service can be told: `BIDMATCH_*` environment variables, which command line flags override."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from export.bundle.milvus_client import MilvusAccess, checked_uri
from service.engine import EngineSettings

# A query that is encoded in less leaves the most of its time to Python.
_CHEAP_S = 0.3e-3
_LONGEST_MS = 10_000


def usable_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Settings(BaseSettings):
    """The service's settings. Each field is also `BIDMATCH_<NAME>` and a flag of `bidmatch serve`."""

    model_config = SettingsConfigDict(env_prefix="BIDMATCH_", extra="forbid", frozen=True)

    bundle: Path = Field(description="bundle folder to serve, or a folder of bundles: the one made last")
    watch: bool = Field(
        False, description="take another bundle over as soon as the path leads to one (a link, a new folder)"
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    workers: int = Field(1, ge=1, le=256, description="worker processes; they share the bundle's memory")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="batches a worker works on at once; if not given, its share of the processors, 1 where "
        "encoding costs little",
    )
    encoder_threads: int = Field(1, ge=1, le=1024, description="threads of one encoder call")
    provider: Literal["auto", "cpu", "cuda"] = Field(
        "cpu",
        description="what encodes: cuda refuses to start without one, auto falls back to the CPU aloud",
    )
    ef: int | None = Field(None, ge=1, le=100_000, description="a wider index search than the bundle's own")
    rescore: bool | None = Field(
        None, description="re-score what the index finds with the bundle's wide vectors; on where it has some"
    )
    candidates: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="phrases to re-score for a query, if not as many as the bundle says",
    )
    honour_match_types: bool = Field(
        True, description="honour the match types and negative keywords that phrases were bought with"
    )
    max_batch: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="most queries in a batch; if not given, what measurement finds worth it",
    )
    queue: int = Field(
        1024, ge=1, description="most queries waiting in a worker; a request beyond is answered 429"
    )
    queue_kb: int = Field(
        4096, ge=1, description="most kilobytes of queries, filters and lists waiting; likewise"
    )
    deadline_ms: int = Field(
        1000, ge=1, le=3_600_000, description="a request not answered within this is answered 504"
    )
    max_deadline_ms: int | None = Field(
        None,
        ge=1,
        le=3_600_000,
        description="largest X-Request-Timeout-Ms, a request's own deadline; if not given 10000, or "
        "deadline_ms where that is more",
    )
    cache_mb: int = Field(
        64, ge=0, le=1_000_000, description="memory for whole answers in a worker; 0 turns it off"
    )
    milvus_uri: str | None = Field(
        None,
        description="Milvus of a bundle whose index is there, if not where it was exported to; the token is "
        "read from the environment alone, BIDMATCH_MILVUS_TOKEN",
    )
    milvus_timeout_ms: int = Field(
        500, ge=1, le=3_600_000, description="time a search in Milvus may take; beyond is 503"
    )
    milvus_calls: int = Field(
        32, ge=1, le=10_000, description="most calls to Milvus at once from a worker; others wait"
    )
    live: Path | None = Field(
        None,
        description="folder that keeps live phrases; without one phrases can't be added, paused or removed",
    )
    max_head_bytes: int = Field(
        65_536, ge=256, description="most bytes of a request line and its headers; beyond is 431"
    )
    max_headers: int = Field(100, ge=8, description="most headers of a request; beyond is 431")
    max_body_bytes: int = Field(1_048_576, ge=64, description="largest request body; beyond is 413")
    body_timeout_ms: int = Field(
        10_000, ge=1, le=3_600_000, description="time a client has to send the body; beyond is 408"
    )
    head_timeout_ms: int = Field(
        10_000, ge=1, le=3_600_000, description="time a client has to send a request's head; beyond is 408"
    )
    keep_alive_ms: int = Field(
        75_000, ge=1, le=3_600_000, description="time after which an idle connection is closed"
    )
    write_timeout_ms: int = Field(
        30_000, ge=1, le=3_600_000, description="time a client has to take an answer; then it is cut off"
    )
    max_connections: int = Field(4096, ge=1, description="most connections open in a worker; beyond is 503")
    max_queries: int = Field(256, ge=1, description="most queries in one request")
    max_query_chars: int = Field(1000, ge=1, description="longest query, in characters")
    max_k: int = Field(1000, ge=1, description="largest k")
    max_listed: int = Field(1000, ge=1, description="most ids in an allow or deny list")
    max_phrases: int = Field(1000, ge=1, description="most live phrases in one request")
    auth: Literal["auto", "on", "off"] = Field(
        "auto", description="whether keys are required: auto asks for them on every address but loopback's"
    )
    api_keys_file: Path | None = Field(
        None, description="file of keys for matching, one a line; read again when it changes"
    )
    admin_keys_file: Path | None = Field(
        None, description="file of keys for changing phrases and bundles; read again when it changes"
    )
    probes: int = Field(64, ge=0, le=10_000, description="queries of late that a new bundle is tried with")
    canary: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of the queries that exact search checks the index with; see the docs",
    )
    shutdown_ms: int = Field(
        10_000, ge=0, le=3_600_000, description="time that requests in flight have to end when stopping"
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "warning", description="least severe level that the server logs"
    )
    log_format: Literal["text", "json"] = Field("text", description="how log lines are written")
    log_queries: bool = Field(False, description="write queries into access lines")
    access_log: bool = Field(False, description="log a line for each request")
    traces: bool = Field(False, description="OpenTelemetry traces; needs the package's extra `traces`")

    @field_validator("milvus_uri")
    @classmethod
    def _uri_of_a_server(cls, uri: str | None) -> str | None:
        return None if uri is None else checked_uri(uri)

    @model_validator(mode="after")
    def _queue_holds_a_request(self) -> Settings:
        if self.queue < self.max_queries:
            raise ValueError(
                f"queue ({self.queue}) is less than max_queries ({self.max_queries}): "
                "a request of that many queries could never be taken"
            )
        if self.longest_deadline_ms < self.deadline_ms:
            raise ValueError(
                f"max_deadline_ms ({self.max_deadline_ms}) is less than deadline_ms ({self.deadline_ms})"
            )
        return self

    @property
    def longest_deadline_ms(self) -> int:
        """The largest deadline that a request may ask for, in milliseconds."""
        return max(_LONGEST_MS, self.deadline_ms) if self.max_deadline_ms is None else self.max_deadline_ms

    @staticmethod
    def is_cheap(query_seconds: float) -> bool:
        """Whether Python is the cost of a query that takes so long to encode."""
        return query_seconds < _CHEAP_S

    def batches_at_once(self, query_seconds: float) -> int:
        """Batches that one worker works on at once.

        Args:
            query_seconds: of encoding a query. Where that is next to nothing Python is the cost, for which
                the threads of a process take turns, and each turn costs: then one does more than several.
        """
        if self.threads is not None:
            return self.threads
        if self.is_cheap(query_seconds):
            return 1
        return max(1, usable_cpus() // (self.workers * self.encoder_threads))

    def engine(self) -> EngineSettings:
        """The part that concerns the engine."""
        return EngineSettings(
            encoder_threads=self.encoder_threads,
            ef=self.ef,
            rescore=self.rescore,
            candidates=self.candidates,
            honour_match_types=self.honour_match_types,
            provider=self.provider,
            milvus=MilvusAccess(
                uri=self.milvus_uri, timeout_ms=self.milvus_timeout_ms, calls=self.milvus_calls
            ),
        )

    def lines(self) -> list[str]:
        """Every setting and its value, a line each."""
        return [f"{name} = {value}" for name, value in self.model_dump(mode="json").items()]
