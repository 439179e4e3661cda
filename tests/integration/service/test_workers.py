"""Several worker processes as one service: their metrics, their deaths, and its end."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.integration.service.swapping import (
    Connection,
    Load,
    alive,
    call,
    children,
    eventually,
    listening,
    metrics,
    one_to_each,
    open_files,
    total,
    workers_of,
)
from tests.integration.service.test_serve_command import serve

SLOW = {"queries": ["red running shoes"] * 256, "k": 100}
PLAIN = {"query": "red tent", "k": 3}


def shared_folder(pid: int) -> Path:
    """Where the processes of a service keep their metrics."""
    return next(Path(name).parent for name in open_files(pid) if name.endswith(".db") and "counter_" in name)


def begin(*settings: str) -> subprocess.Popen[str]:
    """`bidmatch serve` in a session of its own, as a terminal or a supervisor starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "bidmatch", "serve", "--port", "0", *settings],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_both_answer_and_the_metrics_are_the_sum(start: Callable) -> None:
    with start("--workers", "2") as server:
        workers = workers_of(server, 2)
        with one_to_each(server, workers) as each:
            before = total(server.address, "bidmatch_requests_total", route="/match")
            for at, connection in enumerate(each.values()):
                for number in range(3 + at):
                    assert connection("POST", "/match", {"query": f"tent {number}"})[0] == 200
            for connection in each.values():
                assert connection("GET", "/metrics")[0] == 200
            assert total(server.address, "bidmatch_requests_total", route="/match") == before + 7
            assert total(server.address, "bidmatch_queries_total") == before + 7
            # Gauges of all workers, too: each keeps answers of its own.
            assert total(server.address, "bidmatch_cache_bytes") > 0
        held = metrics(server.address)
        processes = {labels["process"] for labels, _ in held["bidmatch_process_resident_memory_bytes"]}
        assert processes == {"parent", "worker-0", "worker-1"}
        assert {labels["bundle"] for labels, value in held["bidmatch_bundle_info"] if value == 1} == {
            call(server.address, "GET", "/readyz")[1]["bundle"]
        }


def test_connections_are_shared_out(start: Callable) -> None:
    with start("--workers", "2") as server:
        workers = workers_of(server, 2)
        with Load(server.address, connections=16) as load:
            load.more(400)
            held = {pid: sum(name.startswith("socket:") for name in open_files(pid)) for pid in workers}
        assert load.wrong == []
        assert min(held.values()) > 3, held


def test_a_worker_that_is_killed_comes_back(start: Callable) -> None:
    with start("--workers", "2") as server:
        workers = workers_of(server, 2)
        with one_to_each(server, workers) as each, Load(server.address, connections=4) as load:
            load.more(50)
            stays, dies = workers
            before = total(server.address, "bidmatch_requests_total")
            os.kill(dies, signal.SIGKILL)
            # The other one answers meanwhile.
            for _ in range(5):
                assert each[stays]("POST", "/match", PLAIN)[0] == 200
            eventually(lambda: dies not in children(server.process.pid))
            again = workers_of(server, 2)
            assert stays in again
            assert dies not in again
            load.more(50)
            counted = total(server.address, "bidmatch_requests_total")
        assert counted >= before + 55
        assert set(load.statuses) == {200}
        # Only those that the killed one had accepted are lost: one a connection at most.
        assert len(load.wrong) <= 4
        held = metrics(server.address)
        assert {labels["process"] for labels, _ in held["bidmatch_process_resident_memory_bytes"]} == {
            "parent",
            "worker-0",
            "worker-1",
        }
        assert any("ended with signal 9" in line for line in server.said)


def test_a_worker_that_is_killed_again_and_again_is_back_at_once(start: Callable) -> None:
    """It was sound each time, so nobody waits longer for the next one."""
    with start("--workers", "1") as server:
        assert call(server.address, "POST", "/match", PLAIN)[0] == 200
        for answered in range(1, 5):
            (worker,) = workers_of(server, 1)
            # An answer is counted behind it.
            eventually(
                lambda answered=answered: (
                    total(server.address, "bidmatch_requests_total", route="/match") == answered
                )
            )
            os.kill(worker, signal.SIGKILL)
            eventually(lambda worker=worker: not alive(worker))
            # Who connects meanwhile waits, and is answered by the next one.
            assert call(server.address, "POST", "/match", PLAIN)[0] == 200
        eventually(lambda: total(server.address, "bidmatch_requests_total", route="/match") == 5)
        assert "Traceback" not in server.text()


def test_gauges_of_a_dead_worker_do_not_count(start: Callable) -> None:
    with start("--workers", "2") as server:
        with one_to_each(server, workers_of(server, 2)) as each:
            for connection in each.values():
                assert connection("POST", "/match", PLAIN)[0] == 200
            dies, _ = each
        time.sleep(1.5)  # each says once a second how it is
        both = total(server.address, "bidmatch_cache_bytes")
        os.kill(dies, signal.SIGKILL)
        eventually(lambda: not alive(dies))
        workers_of(server, 2)
        eventually(lambda: total(server.address, "bidmatch_cache_bytes") == both / 2)


def test_workers_end_when_the_parent_is_killed(start: Callable, tmp_path: Path) -> None:
    with start("--workers", "2", "--live", str(tmp_path)) as server:
        workers = workers_of(server, 2)
        folder = shared_folder(workers[0])
        with Load(server.address, connections=4) as load:
            load.more(50)
            server.process.kill()
            server.process.wait()
            eventually(lambda: not any(alive(worker) for worker in workers), timeout=10)
        assert listening(server.address) is None
        with socket.socket() as next_one:
            next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            next_one.bind(server.address)
            next_one.listen()
        assert not folder.exists()
        assert set(load.statuses) == {200}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_ends_in_good_order(start: Callable, number: int, code: int, tmp_path: Path) -> None:
    settings = ["--workers", "2", "--threads", "1", "--queue", "8192", "--live", str(tmp_path / "live")]
    with start(*settings, "--max-deadline-ms", "60000", "--deadline-ms", "60000") as server:
        workers = workers_of(server, 2)
        folder = shared_folder(workers[0])
        with one_to_each(server, workers) as each:
            # Both have things to do when the signal comes.
            answers: dict[int, int] = {}

            def ask(pid: int) -> None:
                answers[pid] = each[pid]("POST", "/match", SLOW)[0]

            for connection in each.values():
                assert connection("POST", "/match", PLAIN)[0] == 200
            before = {pid: total(server.address, "bidmatch_requests_total") for pid in workers}
            assert before
            threads = [threading.Thread(target=ask, args=(pid,)) for pid in workers]
            for thread in threads:
                thread.start()
            time.sleep(0.02)
            assert server.stop(number) == code
            for thread in threads:
                thread.join()
        assert answers == dict.fromkeys(workers, 200)
        assert not any(alive(worker) for worker in workers)
        assert not folder.exists()
        assert listening(server.address) is None
        assert sum(line.startswith("stopping") for line in server.said) == 1
        assert "Traceback" not in server.text()


def test_ctrl_c_reaches_all_processes_of_a_terminal(tiny_bundle: Path) -> None:
    """The workers leave it to the parent, which lets them end in good order."""
    process = begin("--bundle", str(tiny_bundle), "--workers", "2")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("ready: "):
            break
    os.killpg(process.pid, signal.SIGINT)
    said = process.stderr.read()
    assert process.wait(20) == 130
    assert "Traceback" not in said


def test_a_signal_while_it_starts(tiny_bundle: Path) -> None:
    """Whenever it comes, everything ends, and soon."""
    for turn in range(6):
        process = begin("--bundle", str(tiny_bundle), "--workers", "2")
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("loading"):
                break
        time.sleep(0.12 * turn)
        started = children(process.pid)
        process.terminate()
        said = process.stderr.read()
        assert process.wait(20) == 0, said
        assert "Traceback" not in said
        assert not any(alive(pid) for pid in started)


def test_workers_that_cannot_start_end_the_service(tiny_bundle: Path, tmp_path: Path) -> None:
    """With the reason, said once, and its exit code: no loop of crashes."""
    (tmp_path / "file").write_text("x")
    other = tmp_path / "other"
    other.mkdir()
    with closing(sqlite3.connect(other / "live.db")) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    for folder, reason in ((tmp_path / "file", "can't be kept in the folder"), (other, "of another program")):
        done = serve("--bundle", str(tiny_bundle), "--port", "0", "--workers", "3", "--live", str(folder))
        assert done.returncode == 2, done.stderr
        assert done.stderr.count(reason) == 1
        assert "Name " in done.stderr
        assert "Traceback" not in done.stderr
        assert "starting" not in done.stderr


def test_a_port_in_use(server: object, tiny_bundle: Path) -> None:
    port = server.address[1]  # type: ignore[attr-defined]
    done = serve("--bundle", str(tiny_bundle), "--port", str(port), "--workers", "2")
    assert done.returncode == 1
    assert done.stderr.count(f"port {port} on 127.0.0.1 is in use") == 1
    assert "Traceback" not in done.stderr


def test_requests_that_are_sent_while_it_ends_are_answered_or_refused_never_left(start: Callable) -> None:
    with start("--workers", "2") as server, Load(server.address, connections=8) as load:
        load.more(100)
        assert server.stop(signal.SIGTERM) == 0
    assert set(load.statuses) <= {200, 503}


def test_probes_answer_while_the_queue_is_full(start: Callable) -> None:
    """And nobody gets anything but an answer, a refusal at once, or word that it was too late."""
    settings = ["--threads", "1", "--queue", "512", "--max-batch", "4", "--cache-mb", "0"]
    with start(*settings) as server:
        over = threading.Event()
        statuses: list[int] = []

        def ask() -> None:
            with httpx.Client(base_url=server.url, timeout=30) as client:
                while not over.is_set():
                    answer = client.post("/match", json=SLOW, headers={"X-Request-Timeout-Ms": "200"})
                    statuses.append(answer.status_code)
                    if answer.status_code == 429:
                        assert int(answer.headers["retry-after"]) >= 1
                        time.sleep(0.005)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        eventually(lambda: statuses.count(429) > 20)
        for _ in range(20):
            for path in ("/healthz", "/readyz", "/metrics"):
                assert call(server.address, "GET", path)[0] == 200
        refused = statuses.count(429)
        eventually(lambda: statuses.count(429) > refused)
        over.set()
        for thread in threads:
            thread.join()
        assert set(statuses) <= {200, 429, 504}
        assert call(server.address, "POST", "/match", PLAIN)[0] == 200


@pytest.mark.parametrize(
    "value", ["0", "-1", "1.5", "", "x", "10001", "1e3", "9" * 400, " ", "0x10", "١٠", "1,2"]
)
def test_a_timeout_that_is_none(server: object, value: str) -> None:
    """Whether or not the answer is at hand."""
    with Connection(server.address) as connection:  # type: ignore[attr-defined]
        assert connection("POST", "/match", PLAIN)[0] == 200
        for _ in range(2):
            named = value.encode().decode("latin-1")
            status, problem = connection("POST", "/match", PLAIN, **{"X_Request_Timeout_Ms": named})
            assert status == 422
            assert problem["errors"][0]["where"] == "header.X-Request-Timeout-Ms"
        assert connection("POST", "/match", PLAIN, **{"X_Request_Timeout_Ms": "1000"})[0] == 200
