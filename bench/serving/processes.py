"""Server processes of a measurement: started, stopped while others are measured, watched, ended."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bidmatch.base.errors import BidmatchError

START_S = 180.0
_STOP_S = 15.0
_TICK = os.sysconf("SC_CLK_TCK")
_READY = re.compile(r"^ready: http://([\d.]+):(\d+)", re.MULTILINE)


@dataclass
class Server:
    """A server and the processes it has started, all of one session.

    Attributes:
        name: for people.
        process: the one that was started.
        log: file of what it says.
        host: where it listens.
        port: see host.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    host: str = "127.0.0.1"
    port: int = 0

    def pids(self) -> list[int]:
        """Its processes that are alive."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _stat(entry, 3) == str(self.process.pid):
                found.append(int(entry.name))
        return found

    def cpu_seconds(self) -> float:
        """Processor time of its processes that are alive."""
        ticks = 0
        for pid in self.pids():
            folder = Path(f"/proc/{pid}")
            ticks += int(_stat(folder, 11) or 0) + int(_stat(folder, 12) or 0)
        return ticks / _TICK

    def memory(self) -> dict[str, int]:
        """Resident bytes of its processes, pages that they share counted once: `all`, and `anonymous`.

        The rest is of mapped files, which the system may drop at any time.
        """
        found = {"all": 0, "anonymous": 0}
        for pid in self.pids():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
            except OSError:  # it has ended
                continue
            for name, field in (("all", "Pss"), ("anonymous", "Pss_Anon")):
                line = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
                found[name] += 1024 * int(line[1]) if line else 0
        return found

    def pause(self) -> None:
        """Stop it where it stands: while another is measured, it takes no processor time at all."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it and all it started."""
        if self.process.poll() is None:
            self.resume()
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        """All that it has said."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def _stat(folder: Path, field: int) -> str | None:
    """A field of /proc/PID/stat, counted from behind the name (0: state); None where it has ended."""
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[field]


def end_in_order() -> None:
    """Let SIGTERM end this process as an exception does, so that no stopped server is left behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(
    name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Server:
    """Start a server in a session of its own; what it says goes to `folder`/`name`.log."""
    log = folder / f"{name}.log"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("BIDMATCH_")}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**inherited, **(environment or {})},
        )
    return Server(name, process, log)


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    port: int,
    ready: str,
) -> Iterator[Server]:
    """A server on `port` that answers GET `ready` with a status below 500.

    Raises:
        BidmatchError: it ended, or was not ready in time.
    """
    server = launch(name, command, folder, environment)
    server.port = port
    try:
        _wait(server, lambda: answers(server, ready))
        yield server
    finally:
        server.stop()


@contextmanager
def bidmatch(
    name: str,
    bundle: Path,
    folder: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`bidmatch serve` on a free port, as people start it.

    Raises:
        BidmatchError: it ended, or was not ready in time.
    """
    command = [sys.executable, "-m", "bidmatch", "serve", "--bundle", str(bundle), "--port", "0", *flags]
    server = launch(name, command, folder, environment)

    def ready() -> bool:
        address = _READY.search(server.said())
        if address is not None:
            server.host, server.port = address[1], int(address[2])
        return address is not None and answers(server, "/readyz")

    try:
        _wait(server, ready)
        yield server
    finally:
        server.stop()


def serve_options() -> str:
    """What `bidmatch serve --help` says."""
    command = [sys.executable, "-m", "bidmatch", "serve", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def flags_for(options: str, **wanted: object) -> list[str]:
    """`--name value` of each setting; `cache_mb=0` is `--cache-mb 0`.

    Raises:
        BidmatchError: `bidmatch serve` has no such setting, so something else would be measured.
    """
    flags = []
    for name, value in wanted.items():
        flag = "--" + name.replace("_", "-")
        if flag not in options:
            raise BidmatchError(f"bidmatch serve has no {flag}")
        flags += [flag, str(value)]
    return flags


def answers(server: Server, path: str) -> bool:
    """Whether GET `path` is answered, with a status below 500."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _wait(server: Server, ready: Callable[[], bool]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if server.process.poll() is not None:
            break
        if ready():
            return
        time.sleep(0.1)
    end = " | ".join(server.said().splitlines()[-8:])
    raise BidmatchError(f"{server.name} did not become ready: {end}")
