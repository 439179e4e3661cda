"""How Milvus is reached, and what is said where it is not."""

from __future__ import annotations

import grpc
import pytest

from export.bundle.milvus_client import MilvusAccess, checked_uri, reason_of


def test_a_search_that_nobody_waits_for_has_a_minute_unless_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MilvusAccess().timeout_ms == 500
    assert MilvusAccess.offline().timeout_ms == 60_000
    monkeypatch.setenv("BIDMATCH_MILVUS_TIMEOUT_MS", "700")
    assert MilvusAccess.offline().timeout_ms == 700


@pytest.mark.parametrize("uri", ["./milvus.db", "/data/milvus.db", "milvus:19530", "file:///x.db", "http://"])
def test_what_is_no_server_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="milvus-lite server"):
        checked_uri(uri)


@pytest.mark.parametrize("uri", ["http://milvus:19530", "https://cloud.example:443", "tcp://10.0.0.1:19530"])
def test_servers_are_taken(uri: str) -> None:
    assert checked_uri(uri) == uri


def test_grpcs_errors_are_said_in_one_line() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as failure:
        channel.unary_unary("/none/none")(b"", timeout=2)
    said = reason_of(failure.value)
    assert "_InactiveRpcError" not in said
    assert "127.0.0.1:1" in said
    assert "\n" not in said
