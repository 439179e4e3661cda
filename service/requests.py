"""Reading a request's body within limits, and noticing a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from service.problems import ProblemError

Result = TypeVar("Result")

# Of a body too long, this much more is read: closed at once, the connection would be reset under a client
# that still sends, and the answer lost.
_DISCARDED_BYTES = 8 << 20


class ClientLeftError(Exception):
    """The client closed its connection before the answer."""


async def read_json_body(request: Request, max_bytes: int, timeout: float) -> bytes:
    """The body of a request that says it is JSON.

    Args:
        request: the request, nothing read of it yet.
        max_bytes: most bytes taken.
        timeout: seconds the client has to send it.

    Raises:
        ProblemError: 415 another content type, 413 too long, 408 too slow.
        ClientLeftError: the client left while sending.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ProblemError(
            415, "unsupported-media-type", "Send JSON, with the header Content-Type: application/json."
        )
    declared = request.headers.get("content-length", "")
    # int() refuses more than some thousand digits.
    length = 0 if not declared.isdecimal() else int(declared) if len(declared) <= 18 else 10**18
    enough = max_bytes + _DISCARDED_BYTES
    if length > enough or (length > max_bytes and "expect" in request.headers):
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                size += len(part)
                if size <= max_bytes:
                    parts.append(part)
                elif size > enough:
                    break
    except TimeoutError:
        raise ProblemError(
            408,
            "request-timeout",
            f"The body was not sent within {timeout:g} seconds.",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientLeftError from None
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> ProblemError:
    # The rest of the body may be on its way, so this connection can't carry another request.
    return ProblemError(
        413, "too-large", f"The body has more than {max_bytes} bytes.", headers={"Connection": "close"}
    )


async def while_client_waits(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves first.

    Raises:
        ClientLeftError: it did.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
