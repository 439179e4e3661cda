"""What the service can be told: `BIDMATCH_*` environment variables, which command line flags override."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.engine import EngineSettings


def usable_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Settings(BaseSettings):
    """The service's settings. Each field is also `BIDMATCH_<NAME>` and a flag of `bidmatch serve`."""

    model_config = SettingsConfigDict(env_prefix="BIDMATCH_", extra="forbid", frozen=True)

    bundle: Path = Field(description="bundle folder to serve")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    threads: int = Field(default_factory=usable_cpus, ge=1, le=1024, description="batches worked on at once")
    encoder_threads: int = Field(1, ge=1, le=1024, description="threads of one encoder call")
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
    max_batch: int = Field(32, ge=1, le=4096, description="most queries in one encoder call")
    queue: int = Field(1024, ge=1, description="most queries waiting; a request beyond is answered 429")
    deadline_ms: int = Field(
        1000, ge=1, le=3_600_000, description="a request not answered within this is answered 504"
    )
    max_body_bytes: int = Field(1_048_576, ge=64, description="largest request body; beyond is 413")
    body_timeout_ms: int = Field(
        10_000, ge=1, le=3_600_000, description="time a client has to send the body; beyond is 408"
    )
    max_queries: int = Field(256, ge=1, description="most queries in one request")
    max_query_chars: int = Field(1000, ge=1, description="longest query, in characters")
    max_k: int = Field(1000, ge=1, description="largest k")
    shutdown_ms: int = Field(
        10_000, ge=0, le=3_600_000, description="time that requests in flight have to end when stopping"
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "warning", description="least severe level that the server logs"
    )
    access_log: bool = Field(False, description="log a line for each request")

    @model_validator(mode="after")
    def _queue_holds_a_request(self) -> Settings:
        if self.queue < self.max_queries:
            raise ValueError(
                f"queue ({self.queue}) is less than max_queries ({self.max_queries}): "
                "a request of that many queries could never be taken"
            )
        return self

    def engine(self) -> EngineSettings:
        """The part that concerns the engine."""
        return EngineSettings(
            encoder_threads=self.encoder_threads,
            ef=self.ef,
            rescore=self.rescore,
            candidates=self.candidates,
        )

    def lines(self) -> list[str]:
        """Every setting and its value, a line each."""
        return [f"{name} = {value}" for name, value in self.model_dump(mode="json").items()]
