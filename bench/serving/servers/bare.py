"""The least a server can do, to see how much the load generator can: fixed bytes for whatever comes.

python -m bench.serving.servers.bare PORT ANSWER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import cast

import uvloop


class Fixed(asyncio.Protocol):
    """One answer for each packet; each of the generator's requests is one."""

    def __init__(self, answer: bytes):
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, _: bytes) -> None:
        """Answer."""
        self._transport.write(self._answer)


async def serve(port: int, body: bytes) -> None:
    """Answer until killed."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    server = await asyncio.get_running_loop().create_server(lambda: Fixed(head + body), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Path(sys.argv[2]).read_bytes()))
