"""Bundles that differ from the tiny one, load from several connections, a look at a server's processes."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from bidmatch.base.files import atomic_dir
from export.bundle import format as fmt
from export.bundle.read import open_bundle, read_manifest
from export.bundle.write import finish, write_phrases

COLOURS, THINGS = (
    ("red", "blue", "green", "cheap"),
    ("shoes", "boots", "socks", "tent", "kids", "men", "women"),
)


def variant(
    source: Path,
    path: Path,
    *,
    mark: str = "",
    renamed: Mapping[int, tuple[str, str]] | None = None,
    match_type: str | None = None,
    created: str | None = None,
) -> Path:
    """Another bundle over the vectors of `source`.

    Args:
        source: a bundle.
        path: of the new one; appears whole.
        mark: put before every id.
        renamed: row -> id and text that it has there.
        match_type: of all phrases.
        created: when it says it was made.
    """
    with open_bundle(source) as bundle:
        rows = bundle.phrases.to_pylist()
        ours = {"format_version", "bundle_id", "files", "checksum"}
        fields = {name: value for name, value in bundle.manifest if name not in ours}
        for number, row in enumerate(rows):
            row["id"] = mark + row["id"]
            if match_type is not None:
                row["match_type"] = match_type
            if renamed and number in renamed:
                row["id"], row["text"] = renamed[number]
        with atomic_dir(path) as folder:
            for name in (fmt.ENCODER_FP32, fmt.TOKENIZER, fmt.VECTORS, *fmt.INDEX_FILES):
                shutil.copy(source / name, folder / name)
            write_phrases(folder, pa.Table.from_pylist(rows, bundle.phrases.schema))
            finish(folder, fields | ({"created": created} if created else {}))
    return path


def id_of(bundle: Path) -> str:
    """The bundle's own id."""
    return read_manifest(bundle).bundle_id


def damage(bundle: Path, name: str) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)


class Connection:
    """One kept-alive connection."""

    def __init__(self, address: tuple[str, int], timeout: float = 30):
        self._http = http.client.HTTPConnection(*address, timeout=timeout)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and content of a request, read as JSON where it is."""
        content = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._http.request(method, path, content, {"Content-Type": "application/json"} | named)
        answer = self._http.getresponse()
        text = answer.read()
        is_json = "json" in (answer.getheader("content-type") or "")
        return answer.status, json.loads(text) if is_json else text.decode()

    @property
    def local_port(self) -> int:
        """The port at this end."""
        return int(self._http.sock.getsockname()[1])

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call(
    address: tuple[str, int], method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """One request on a connection of its own."""
    with Connection(address) as connection:
        return connection(method, path, body, **headers)


@dataclass
class Load:
    """Requests from several connections, one after the other on each, for as long as the block lasts.

    Attributes:
        statuses: status -> answers.
        bundles: bundle -> answers that name it.
        wrong: answers that `check` found wrong, and requests that got none.
        slowest: seconds of the slowest request.
    """

    address: tuple[str, int]
    check: Callable[[dict[str, Any]], str | None] = lambda _: None
    connections: int = 4
    k: int = 5
    statuses: Counter[int] = field(default_factory=Counter)
    bundles: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self.connections)]

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        connection = Connection(self.address)
        while not self._over.is_set():
            body = {"query": " ".join([draw.choice(COLOURS), *draw.sample(THINGS, 2)]), "k": self.k}
            started = time.perf_counter()
            try:
                status, answer = connection("POST", "/match", body)
            except (OSError, http.client.HTTPException) as failure:
                self.wrong.append(repr(failure))
                connection.close()
                continue
            self.slowest = max(self.slowest, time.perf_counter() - started)
            self.statuses[status] += 1
            if status == 200:
                self.bundles[answer["bundle"]] += 1
                if (wrong := self.check(answer)) is not None:
                    self.wrong.append(wrong)
        connection.close()

    def wait(self, enough: Callable[[Load], bool], timeout: float = 30) -> None:
        """Until it has met with enough."""
        until = time.monotonic() + timeout
        while not enough(self):
            assert time.monotonic() < until, (self.statuses, self.bundles, self.wrong[:3])
            time.sleep(0.01)

    def more(self, answers: int) -> None:
        """Until so many more requests were answered."""
        have = sum(self.statuses.values())
        self.wait(lambda load: sum(load.statuses.values()) >= have + answers)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def children(pid: int) -> list[int]:
    """The processes that a process has started, oldest first."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(server: Any, count: int, timeout: float = 20) -> list[int]:
    """The workers, when there are so many and all answer."""
    until = time.monotonic() + timeout
    while True:
        found = children(server.process.pid)
        if len(found) == count and all(answers(pid, server.address) for pid in found):
            return found
        assert time.monotonic() < until, (found, server.text())
        time.sleep(0.02)


def answers(pid: int, address: tuple[str, int]) -> bool:
    """Whether a process accepts connections: its event loop waits on the listening socket."""
    held = f"socket:[{listening(address)}]"
    with suppress(FileNotFoundError, ProcessLookupError):
        for file in Path(f"/proc/{pid}/fdinfo").iterdir():
            waits = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("tfd:")]
            if any(str(Path(f"/proc/{pid}/fd/{fd}").readlink()) == held for fd in waits):
                return True
    return False


def listening(address: tuple[str, int]) -> str | None:
    """The inode of the socket that listens there; None where nobody does."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].partition(":")[2], 16) == address[1] and fields[3] == "0A":
            return fields[9]
    return None


def alive(pid: int) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(holds: Callable[[], bool], timeout: float = 20) -> None:
    """Wait until something is so."""
    until = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.02)


def open_files(pid: int) -> list[str]:
    """What a process has open, by name."""
    found = []
    with suppress(FileNotFoundError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.append(str(entry.readlink()))
    return sorted(found)


def mapped_files(pid: int) -> Counter[str]:
    """Files that are in a process's memory, and how many pieces of each."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return Counter(parts[5] for line in lines if len(parts := line.split(maxsplit=5)) == 6)


def anonymous_kb(pid: int) -> int:
    """Memory of a process's own."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0])


def metrics(address: tuple[str, int]) -> dict[str, list[tuple[dict[str, str], float]]]:
    """name -> (labels, value) of all workers together."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(call(address, "GET", "/metrics")[1]):
        for one in family.samples:
            found.setdefault(one.name, []).append((one.labels, one.value))
    return found


def total(address: tuple[str, int], name: str, **labels: str) -> float:
    """Sum of a metric's samples with these labels."""
    samples = metrics(address).get(name, [])
    return sum(value for held, value in samples if labels.items() <= held.items())


def worker_of(connection: Connection, pids: list[int]) -> int:
    """The process that has accepted a connection which is open."""
    client = connection.local_port
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].partition(":")[2], 16) == client and fields[3] == "01" and fields[9] != "0":
            held = f"socket:[{fields[9]}]"
            for pid in pids:
                if held in open_files(pid):
                    return pid
    raise AssertionError("nobody has accepted it")


@contextmanager
def one_to_each(server: Any, pids: list[int]) -> Iterator[dict[int, Connection]]:
    """A connection to each of the workers, by the worker's pid."""
    with ExitStack() as stack:
        found: dict[int, Connection] = {}
        for _ in range(1000):
            connection = stack.enter_context(Connection(server.address))
            assert connection("GET", "/healthz")[0] == 200
            found.setdefault(worker_of(connection, pids), connection)
            if len(found) == len(pids):
                break
        else:
            raise AssertionError(f"only {list(found)} of {pids} accept connections")
        yield found


def serving(server: Any, count: int) -> set[str]:
    """The bundles that the workers answer with, when there are so many."""
    until = time.monotonic() + 30
    while True:
        pids = workers_of(server, count)
        try:
            with one_to_each(server, pids) as each:
                found = {connection("GET", "/readyz")[1]["bundle"] for connection in each.values()}
            if children(server.process.pid) == pids:
                return found
        except (OSError, http.client.HTTPException, AssertionError):
            # One has ended meanwhile.
            if time.monotonic() > until:
                raise
