"""A real `bidmatch serve` process for as long as it is needed, and plain HTTP calls to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bidmatch.base.errors import BidmatchError

_ADDRESS = re.compile(r"http://[\w.\[\]:-]+:\d+")
_START_S = 60.0
_STOP_S = 15.0
_CALL_S = 10.0
# A proxy set for the outside world has no business between this process and its own server.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def serving(bundle: Path, log: Path) -> Iterator[str]:
    """Serve `bundle` on a free port of this machine; yields the address, stops the process at the end.

    Args:
        bundle: bundle folder.
        log: file that gets what the server says.

    Raises:
        BidmatchError: the server ended, or was not ready in time.
    """
    arguments = [sys.executable, "-m", "bidmatch", "serve", "--bundle", str(bundle), "--port", "0"]
    with log.open("wb") as sink:
        process = subprocess.Popen(arguments, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield _ready(process, log)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BidmatchError(f"the server ended with code {process.returncode}: {_tail(log)}")
        address = _ADDRESS.search(log.read_text(encoding="utf-8", errors="replace"))
        if address is not None and _answers(address[0]):
            return address[0]
        time.sleep(0.1)
    raise BidmatchError(f"the server was not ready within {_START_S:g} s: {_tail(log)}")


def _answers(address: str) -> bool:
    try:
        with _DIRECT.open(f"{address}/readyz", timeout=_CALL_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])


def post_match(address: str, query: str, k: int) -> tuple[dict[str, Any], float]:
    """One `POST /match`: the answer, and the seconds until it was there.

    Raises:
        BidmatchError: the server refused, or did not answer.
    """
    body = json.dumps({"query": query, "k": k}).encode()
    request = urllib.request.Request(
        f"{address}/match", data=body, headers={"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    try:
        with _DIRECT.open(request, timeout=_CALL_S) as answer:
            found: dict[str, Any] = json.loads(answer.read())
    except (urllib.error.URLError, OSError) as error:
        raise BidmatchError(f"POST {address}/match failed: {error}") from error
    return found, time.perf_counter() - started
