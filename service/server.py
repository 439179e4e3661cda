"""`bidmatch serve`: binds the port, opens the bundle, starts workers, swaps bundles, stops without dropping
requests.

The parent process opens and verifies bundles and watches over the workers; it answers no request. Workers are
forked from it, so what is mapped or read before is in memory once, and each makes its ONNX Runtime sessions
and threads for itself. They all accept from one socket, so a worker that dies leaves no connection waiting.
"""

from __future__ import annotations

import errno
import os
import socket

from bidmatch.base.errors import BidmatchError, ConfigError
from service.settings import Settings
from service.shared import shared_folder


def serve(settings: Settings) -> None:
    """Open the bundle and answer requests until SIGTERM (returns by SystemExit(0)) or SIGINT.

    Raises:
        DamagedError: the bundle is no sound bundle.
        ConfigError: the host is none, keys are required and there are none, or a provider is not there.
        BidmatchError: the port can't be had.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with shared_folder() as folder, bind(settings.host, settings.port) as listener:
        # Read by prometheus_client when it is first imported.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        from service.supervisor import Supervisor

        Supervisor(settings, listener, folder).run()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; port 0 takes a free one.

    Raises:
        ConfigError: the host is none, or none of this machine's.
        BidmatchError: the port is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"there is no host {host!r} to listen on", hint="See --host.") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise refused(error, host, port) from None
    return listener


def refused(error: OSError, host: str, port: int) -> BidmatchError:
    """Why the address can't be had."""
    if error.errno == errno.EADDRINUSE:
        return BidmatchError(
            f"port {port} on {host} is in use", hint="Choose another with --port; --port 0 takes a free one."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{host} is no address of this machine", hint="See --host.")
    return BidmatchError(f"cannot listen on {host}, port {port}: {error.strerror}")
