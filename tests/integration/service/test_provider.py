"""What encodes: asked for by name it is there or the service does not start; `auto` says what it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.service.swapping import call, total
from tests.integration.service.test_serve_command import serve

has_cuda = Path("/dev/nvidia0").exists()


@pytest.mark.skipif(has_cuda, reason="there is CUDA here")
def test_cuda_without_one_is_refused_once(tiny_bundle: Path) -> None:
    done = serve("--bundle", str(tiny_bundle), "--port", "0", "--provider", "cuda", "--workers", "2")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == done.stderr.count("CUDAExecutionProvider") == 1, done.stderr
    assert "Is the device there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(has_cuda, reason="there is CUDA here")
def test_auto_falls_back_aloud(start: Callable) -> None:
    with start("--provider", "auto", "--workers", "2") as server:
        state = call(server.address, "GET", "/readyz")[1]
        assert (state["status"], state["provider"]) == ("ready", "cpu")
        assert "CUDA" in state["degraded"]
        assert total(server.address, "bidmatch_degraded") == 2
        assert sum("CUDA does not work here" in line for line in server.said) == 2
        assert call(server.address, "POST", "/match", {"query": "red tent"})[0] == 200


def test_the_cpu_is_nothing_to_complain_of(server: object) -> None:
    state = call(server.address, "GET", "/readyz")[1]  # type: ignore[attr-defined]
    assert (state["provider"], state["degraded"]) == ("cpu", None)
    assert total(server.address, "bidmatch_degraded") == 0  # type: ignore[attr-defined]
