from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from service.settings import Settings

SLOW = {"queries": ["red running shoes"] * 256, "k": 100}


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """`bidmatch serve` where it should end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "bidmatch", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def test_it_says_every_setting_and_its_address(server: object, tiny_bundle: Path) -> None:
    said = server.said  # type: ignore[attr-defined]
    settings = dict(
        line.removeprefix("setting ").split(" = ", 1) for line in said if line.startswith("setting")
    )
    assert list(settings) == list(Settings.model_fields)
    assert settings["bundle"] == str(tiny_bundle)
    assert settings["host"] == "127.0.0.1"
    assert any(line.startswith("ready: http://127.0.0.1:") for line in said)
    assert not server.url.endswith(":0")  # type: ignore[attr-defined]


def test_requests_in_flight_are_answered_when_it_is_told_to_stop(start: Callable) -> None:
    with (
        start(
            *["--threads=1", "--queue=8192", "--cache-mb=0", "--shutdown-ms=60000"],
            *["--deadline-ms=60000", "--max-deadline-ms=60000"],
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(client.post("/match", json=SLOW).status_code))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        # All 8 have arrived when those answered, the one at work and those waiting are 8.
        while True:
            seen = len(answers)
            depth = re.search(r"^bidmatch_queue_depth (\S+)$", client.get("/metrics").text, re.MULTILINE)
            assert depth is not None
            if seen + 1 + float(depth[1]) / 256 >= 8:
                break
            assert time.monotonic() < until
        assert server.stop(signal.SIGTERM) == 0
        for thread in threads:
            thread.join()
        assert answers == [200] * 8
        assert seen < 8, "all were answered before the signal"
        assert any(line.startswith("stopping") for line in server.said)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/healthz")


def test_it_stops_at_once_when_idle_even_with_open_connections(start: Callable) -> None:
    with start() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/healthz").status_code == 200
        assert server.stop(signal.SIGTERM) == 0


def test_interrupted_from_the_keyboard(start: Callable) -> None:
    with start() as server:
        assert server.stop(signal.SIGINT) == 130
        assert "Traceback" not in server.text()


def alive(pid: int) -> bool:
    """Whether the process is there, and has not ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_parent_and_its_workers_begin_and_end_together(start: Callable, number: int) -> None:
    with start("--workers", "3") as server:
        workers = children(server.process.pid)
        assert len(workers) == 3
        assert server.said.count(f"ready: {server.url}") == 1
        for _ in range(30):
            assert httpx.get(f"{server.url}/match", params={"q": "tent"}).status_code == 200
        assert server.stop(number) == (0 if number == signal.SIGTERM else 130)
        assert not any(alive(pid) for pid in workers)
        assert "Traceback" not in server.text()


def test_workers_that_lose_their_parent_end_and_leave_nothing_behind(start: Callable) -> None:
    with start("--workers", "2") as server:
        workers = children(server.process.pid)
        shared = [
            path
            for pid in workers
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if (path := line.split()[-1]).endswith(".db")
        ]
        assert shared
        server.process.kill()
        server.process.wait(10)
        until(lambda: not any(alive(pid) for pid in workers))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/healthz")
        assert not any(Path(path).exists() for path in shared)


def test_lines_in_json(start: Callable) -> None:
    with start("--log-format", "json", "--access-log") as server, httpx.Client(base_url=server.url) as client:
        client.post("/match", json={"query": "a secret query"}, headers={"X-Request-Id": "mine"})
        assert server.stop() == 0
        entries = [json.loads(line) for line in server.said]
        assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries)
        (access,) = [entry for entry in entries if entry["logger"] == "bidmatch.access"]
        assert (access["route"], access["status"], access["request_id"]) == ("/match", 200, "mine")
        assert any(entry["message"] == f"ready: {server.url}" for entry in entries)
        assert "secret" not in server.text()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_client_begins_a_line_of_what_it_says(start: Callable, log_format: str) -> None:
    with start("--log-format", log_format, "--access-log") as server:
        with httpx.Client(base_url=server.url) as client:
            for end in ("\n", "\r", "\u2028", "\x1b[2K\r", "\0"):
                name = f"/nowhere{end}ready: http://forged"
                assert client.post("/admin/reload", json={"bundle": name}).status_code == 422
                client.get("/nowhere%0Aready: http://forged", headers={"X-Request-Id": "a b"})
        assert server.stop() == 0
        # Split at every end of line that Python knows, as a terminal may.
        lines = server.text().splitlines()
        assert any("forged" in line for line in lines)
        assert not any(line.startswith(("ready: http://forged", "http://forged")) for line in lines)
        assert all(character.isprintable() for line in lines for character in line)


def test_the_network_needs_keys_unless_that_is_said_aloud(tiny_bundle: Path, start: Callable) -> None:
    done = serve("--bundle", str(tiny_bundle), "--port", "0", "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "0.0.0.0 can be reached from other machines, and no API keys are given" in done.stderr
    assert "BIDMATCH_AUTH=off" in done.stderr
    done = serve("--bundle", str(tiny_bundle), "--port", "0", "--auth", "on")
    assert done.returncode == 2
    assert "auth is on, and no API keys are given" in done.stderr
    with start("--host", "0.0.0.0", "--auth", "off") as server:
        assert any(line.startswith("auth is off: anyone who reaches 0.0.0.0") for line in server.said)
        assert httpx.get(f"{server.url}/match", params={"q": "tent"}).status_code == 200


def test_live_phrases_survive_the_service(start: Callable, tmp_path: Path) -> None:
    phrase = {"id": "new", "text": "green waterproof tent for kids", "columns": {"match_type": "exact"}}
    with start("--live", str(tmp_path / "live"), "--workers", "2") as server:
        put = httpx.post(f"{server.url}/phrases", json={"phrases": [phrase]})
        assert put.status_code == 200
        server.process.kill()
        server.process.wait(10)
    with start("--live", str(tmp_path / "live"), "--workers", "2") as server:
        for _ in range(6):
            found = httpx.get(f"{server.url}/match", params={"q": "Green waterproof TENT for kids"}).json()
            assert found["matches"][0]["id"] == "new"
        assert httpx.get(f"{server.url}/phrases/new").json() == put.json()["phrases"][0]


def test_a_damaged_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, damaged)
    vectors = bytearray((damaged / "vectors.npy").read_bytes())
    vectors[-5] ^= 1
    (damaged / "vectors.npy").write_bytes(vectors)
    done = serve("--bundle", str(damaged), "--port", "0")
    assert done.returncode == 4
    assert "vectors.npy was altered" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    done = serve("--bundle", str(tmp_path / "none"), "--port", "0")
    assert done.returncode == 4
    assert "there is no such folder" in done.stderr


def test_a_port_in_use(server: object, tiny_bundle: Path) -> None:
    port = server.address[1]  # type: ignore[attr-defined]
    done = serve("--bundle", str(tiny_bundle), "--port", str(port))
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "--port 0" in done.stderr


def test_a_port_that_another_takes_while_the_bundle_loads(tiny_bundle: Path) -> None:
    """Two that bound the same port before either listens: one serves, the other says why it can't."""
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", 0))
        port = rival.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "bidmatch", "serve", "--bundle", str(tiny_bundle), "--port", str(port)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("loading"):
                rival.listen(1)
                break
        said = process.stderr.read()
        assert process.wait(30) == 1
        assert f"port {port} on 127.0.0.1 is in use" in said
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        ([], {}, "--bundle (or BIDMATCH_BUNDLE): Field required"),
        (["--bundle", "b", "--port", "99999"], {}, "--port (or BIDMATCH_PORT)"),
        (["--bundle", "b"], {"BIDMATCH_MAX_K": "many"}, "--max-k (or BIDMATCH_MAX_K)"),
        (["--bundle", "b", "--queue", "4"], {}, "could never be taken"),
        (
            ["--bundle", "b", "--max-deadline-ms", "500"],
            {},
            "max_deadline_ms (500) is less than deadline_ms (1000)",
        ),
        (["--bundle", "b", "--workers", "0"], {}, "--workers (or BIDMATCH_WORKERS)"),
        (["--bundle", "b", "--api-keys-file", "/no/such/file"], {}, "/no/such/file cannot be read"),
        (["--bundle", "b"], {"BIDMATCH_AUTH": "perhaps"}, "--auth (or BIDMATCH_AUTH)"),
        (["--bundle", "b", "--host", "no.such.host.invalid"], {}, "no host 'no.such.host.invalid'"),
        (["--bundle", "b", "--no-such-flag"], {}, "No such option"),
    ],
)
def test_wrong_settings(arguments: list[str], environment: dict[str, str], reason: str) -> None:
    done = serve(*arguments, **environment)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_examples_and_every_setting() -> None:
    done = serve("--help")
    assert done.returncode == 0
    assert "bidmatch serve --bundle runs/demo/bundle" in done.stdout
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in done.stdout
        assert f"BIDMATCH_{name.upper()}" in " ".join(done.stdout.split())


ORPHAN = """
import ctypes, os, sys, time
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
if os.fork() == 0:
    if os.fork() == 0:
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
    os._exit(0)
os.wait()
sys.argv = ["bidmatch", *sys.argv[2:]]
from bidmatch.cli import main
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes inherit others' orphans on Linux")
def test_an_orphan_that_it_inherits_does_not_end_it(tiny_bundle: Path, tmp_path: Path) -> None:
    """As the first process of a container does, when a program that was started in it beside dies."""
    go = tmp_path / "go"
    arguments = ["serve", "--bundle", str(tiny_bundle), "--port", "0", "--workers", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(go), *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("ready: "))
        before = set(children(process.pid))
        assert len(before) == 2  # the worker and the orphan
        go.touch()
        until(lambda: len(set(children(process.pid))) == 1)
        assert httpx.get(f"{ready.split()[1]}/healthz").status_code == 200
        process.terminate()
        assert process.wait() == 0
