"""Reading a request's body within limits, and noticing a client that leaves."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

from service.problems import ProblemError

# Of a body too long, this much more is read: closed at once, the connection would be reset under a client
# that still sends, and the answer lost.
_DISCARDED_BYTES = 8 << 20


class ClientLeftError(Exception):
    """The client closed its connection before the answer."""


async def read_json_body(
    scope: Scope, receive: Receive, max_bytes: int, timeout: float, whole: bytes | None = None
) -> bytes:
    """The body of a request that says it is JSON.

    Args:
        scope: the request.
        receive: gives its body, nothing read of it yet.
        max_bytes: most bytes taken.
        timeout: seconds the client has to send it.
        whole: the body, where all of it is here already.

    Raises:
        ProblemError: 415 another content type, 413 too long, 408 too slow.
        ClientLeftError: the client left while sending.
    """
    kind, declared, expects = b"application/json", b"", False
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value
        elif name == b"content-length":
            declared = value
        elif name == b"expect":
            expects = True
    if kind != b"application/json":
        kind = kind.partition(b";")[0].strip().lower()
        if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            raise ProblemError(
                415, "unsupported-media-type", "Send JSON, with the header Content-Type: application/json."
            )
    # int() refuses more than some thousand digits.
    length = 0 if not declared.isdigit() else int(declared) if len(declared) <= 18 else 10**18
    enough = max_bytes + _DISCARDED_BYTES
    if length > enough or (length > max_bytes and expects):
        raise _too_large(max_bytes)
    if whole is not None:
        if len(whole) > max_bytes:
            raise _too_large(max_bytes)
        return whole
    message: Message | None = None
    parts: list[bytes] = []
    size = 0
    until = asyncio.get_running_loop().time() + timeout
    while True:
        if message is None:
            message = await _next(receive, until - asyncio.get_running_loop().time(), timeout)
        part = message.get("body", b"")
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        if size > enough or not message.get("more_body"):
            break
        message = None
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


async def _next(receive: Receive, left: float, timeout: float | None = None) -> Message:
    try:
        async with asyncio.timeout(left):
            message = await receive()
    except TimeoutError:
        raise ProblemError(
            408,
            "request-timeout",
            f"The body was not sent within {timeout or left:g} seconds.",
            headers={"Connection": "close"},
        ) from None
    if message["type"] == "http.disconnect":
        raise ClientLeftError
    return message


def _too_large(max_bytes: int) -> ProblemError:
    # The rest of the body may be on its way, so this connection can't carry another request.
    return ProblemError(
        413, "too-large", f"The body has more than {max_bytes} bytes.", headers={"Connection": "close"}
    )
