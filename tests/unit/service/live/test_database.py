from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from bidmatch.base.errors import ConfigError, DamagedError
from service.live import database
from service.live.store import LiveStore, PhraseRecord, PhraseVectors, StoreError

TENT = PhraseRecord("p1", "tent")


def filled(folder: Path, count: int = 500) -> Path:
    """The database file of a store of some phrases."""
    with LiveStore.open(folder) as store:
        store.put([PhraseRecord(f"p{i}", f"text {i}") for i in range(count)])
        return store.path


def log_size(store: LiveStore) -> int:
    return store.path.with_name("live.db-wal").stat().st_size


def test_folders_are_made_and_nothing_but_the_database_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with LiveStore.open(folder) as store:
        assert [path.name for path in folder.iterdir()] == ["live.db"]
        store.put([TENT])
        assert store.last_sequence() == 1
    assert [path.name for path in folder.iterdir()] == ["live.db"]


def test_what_killed_makers_left_is_removed(tmp_path: Path) -> None:
    """Whether they were killed before the database was in its place or right after."""
    for _ in range(2):
        left = tmp_path / ".live.db.abc.partial"
        left.mkdir()
        (left / "live.db").write_bytes(b"half")
        LiveStore.open(tmp_path).close()
        assert [path.name for path in tmp_path.iterdir()] == ["live.db"]


def test_commits_are_synced_and_readers_do_not_wait_for_the_writer(tmp_path: Path) -> None:
    with LiveStore.open(tmp_path) as store, store._database.writing() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert store.last_sequence() == 0


def test_a_closed_store(tmp_path: Path) -> None:
    store = LiveStore.open(tmp_path)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.put([TENT])
    with pytest.raises(ValueError, match="closed"):
        store.last_sequence()


def test_a_link_to_the_file(tmp_path: Path) -> None:
    real = filled(tmp_path / "real")
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "live.db").symlink_to(real)
    with LiveStore.open(tmp_path / "live") as store:
        assert store.path == real
        assert store.last_sequence() == 500
    real.unlink()
    with pytest.raises(ConfigError, match=r"live\.db can't be kept in the folder"):
        LiveStore.open(tmp_path / "live")


def test_names_that_mean_something_in_an_address(tmp_path: Path) -> None:
    assert filled(tmp_path / "50% off? #1 ä").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"50% off? #1 ä"}


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(8192))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def altered(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for start in range(4096, len(content), 4096):
        content[start : start + 64] = bytes(range(64))
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [garbage, empty, cut, altered])
def test_a_damaged_file(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = filled(tmp_path)
    damage(path)
    with pytest.raises(DamagedError) as refused:
        LiveStore.open(tmp_path)
    assert str(path) in str(refused.value)
    assert "Restore it from a backup" in str(refused.value)


def test_a_file_that_is_damaged_while_it_is_open(tmp_path: Path) -> None:
    path = filled(tmp_path, 5000)
    with LiveStore.open(tmp_path) as store:
        altered(path)
        with pytest.raises(DamagedError, match="is damaged"):
            store.changes(0, 5000)


def test_a_log_without_its_database(tmp_path: Path) -> None:
    (tmp_path / "live.db-wal").write_bytes(b"something")
    with pytest.raises(DamagedError, match=r"live\.db is gone, but its log live\.db-wal is still there"):
        LiveStore.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["live.db-wal"]


def test_the_database_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "live.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE phrases (id TEXT)")
    content = path.read_bytes()
    with pytest.raises(ConfigError, match=r"live\.db is a database of another program"):
        LiveStore.open(tmp_path)
    assert path.read_bytes() == content


def test_the_database_of_a_newer_version(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with closing(sqlite3.connect(path)) as newer:
        newer.execute("PRAGMA user_version = 3")
    with pytest.raises(DamagedError, match=r"live\.db has version 3 .* reads version 2") as refused:
        LiveStore.open(tmp_path)
    assert "Use the bidmatch that wrote it" in str(refused.value)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "in it", Path("/proc/none")):
        with pytest.raises(ConfigError, match=f"can't be kept in the folder {folder}"):
            LiveStore.open(folder)
    (tmp_path / "live.db").mkdir()
    with pytest.raises(ConfigError, match="can't be kept in the folder"):
        LiveStore.open(tmp_path)


AS_SOMEONE_ELSE = """
import os, sys
from pathlib import Path
from bidmatch.base.errors import ConfigError
from service.live.store import LiveStore
if os.getuid() == 0:
    os.setuid(65534)
try:
    LiveStore.open(Path(sys.argv[1]))
except ConfigError as refused:
    print(refused)
"""


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_may_not_be_written(there: bool) -> None:
    # pytest's own folders can't be entered by another user, not even to be refused.
    with TemporaryDirectory() as name:
        folder = Path(name)
        if there:
            filled(folder).chmod(0o444)
        folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", AS_SOMEONE_ELSE, name], capture_output=True, text=True, timeout=60
        )
        folder.chmod(0o755)
        assert f"live.db can't be kept in the folder {folder}" in done.stdout, done.stderr
        assert "this user may write" in done.stdout
        assert [path.name for path in folder.iterdir()] == (["live.db"] if there else [])


def test_a_file_that_is_deleted_does_not_come_back_empty(tmp_path: Path) -> None:
    filled(tmp_path)
    store = LiveStore.open(tmp_path)
    store.path.unlink()
    with pytest.raises(StoreError, match="Nothing was stored"):
        store.put([TENT])
    with pytest.raises(StoreError, match="could not be read"):
        store.last_sequence()
    assert not store.path.exists()


def test_a_lock_that_others_hold_for_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    with LiveStore.open(tmp_path) as store, LiveStore.open(tmp_path) as other:
        store.put([TENT])
        with other._database.writing():
            with pytest.raises(StoreError, match=r"locked. Nothing was stored") as refused:
                store.put([PhraseRecord("p2", "boots")])
            assert "try again" in str(refused.value)
            assert store.last_sequence() == 1
        assert store.put([PhraseRecord("p2", "boots")])[0].sequence == 2


def test_an_error_in_a_transaction_undoes_it(tmp_path: Path) -> None:
    with LiveStore.open(tmp_path) as store:
        store.put([TENT])
        with pytest.raises(KeyboardInterrupt), store._database.writing() as connection:
            connection.execute("DELETE FROM phrases")
            raise KeyboardInterrupt
        assert store.last_sequence() == 1
        with pytest.raises(StoreError), store._database.writing() as connection:
            connection.execute("DELETE FROM phrases")
            connection.execute("no SQL")
        assert store.last_sequence() == 1
        assert store.put([PhraseRecord("p2", "boots")])[0].sequence == 2


def in_a_child(work: Callable[..., None], *arguments: int) -> int:
    """Fork; the child does the work and ends. Its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    return pid


def test_many_processes_make_the_same_store_at_once(tmp_path: Path) -> None:
    for attempt in range(5):
        folder = tmp_path / f"{attempt}"
        start = time.monotonic() + 0.1

        def work(number: int, folder: Path = folder, start: float = start) -> None:
            time.sleep(max(0, start - time.monotonic()))
            with LiveStore.open(folder) as store:
                store.put([PhraseRecord(f"{number}", "a")])

        children = [in_a_child(work, number) for number in range(8)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
        with LiveStore.open(folder) as store:
            assert {row.id for row in store.changes(0, 100)} == {f"{number}" for number in range(8)}
        assert [path.name for path in folder.iterdir()] == ["live.db"]


def open_files(folder: Path) -> list[str]:
    """Files in a folder that this process has open; other tests' files are none of a test's business."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [str(path) for path in (link.readlink() for link in links) if path.is_relative_to(folder)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads which files are open from /proc")
def test_no_connection_crosses_a_fork(tmp_path: Path) -> None:
    with LiveStore.open(tmp_path) as store:
        store.put([TENT])
        assert store.last_sequence() == 1
        assert open_files(tmp_path) != []

        def work() -> None:
            assert open_files(tmp_path) == []
            assert store.last_sequence() == 1
            assert store.put([PhraseRecord("p2", "boots")])[0].sequence == 2

        assert os.waitpid(in_a_child(work), 0)[1] == 0
        assert [row.id for row in store.changes(0, 10)] == ["p1", "p2"]
        assert store.set_state("p2", "paused", in_bundle=False) == store.get("p2")


def test_forks_while_threads_write_and_read(tmp_path: Path) -> None:
    stop = threading.Event()
    written: list[str] = []
    with LiveStore.open(tmp_path) as store:

        def write() -> None:
            while not stop.is_set():
                written.extend(row.id for row in store.put([PhraseRecord(f"parent {len(written)}", "a")]))

        def read() -> None:
            while not stop.is_set():
                store.changes(0, 100)

        def work(child: int) -> None:
            for i in range(5):
                store.put([PhraseRecord(f"child {child} {i}", "b")])

        threads = [threading.Thread(target=target) for target in (write, read)]
        for thread in threads:
            thread.start()
        children = [in_a_child(work, number) for number in range(8)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
        stop.set()
        for thread in threads:
            thread.join()
        expected = {*written, *(f"child {child} {i}" for child in range(8) for i in range(5))}
        assert {row.id for row in store.changes(0, 100_000)} == expected
        assert store.last_sequence() == len(expected)


def test_the_log_stays_small_while_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "WAL_LIMIT_BYTES", 8 << 20)
    stop = threading.Event()
    with LiveStore.open(tmp_path) as store, LiveStore.open(tmp_path) as reader:

        def poll() -> None:
            while not stop.is_set():
                reader.changes(reader.last_sequence() - 500, 1000)

        thread = threading.Thread(target=poll)
        thread.start()
        records = [PhraseRecord(f"p{i}", "a") for i in range(500)]
        vectors = PhraseVectors("a", np.zeros((500, 1024), np.float32), np.zeros((500, 0), np.float32))
        largest = 0
        for number in range(20):
            store.put([PhraseRecord(one.id, f"{number}") for one in records], vectors)
            largest = max(largest, log_size(store))
        stop.set()
        thread.join()
        # 20 transactions of more than 2 MB; the limit is looked at after each.
        assert 2 << 20 < largest < 11 << 20


def test_a_log_that_a_reader_held_up_shrinks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    monkeypatch.setattr(database, "WAL_LIMIT_BYTES", limit)
    monkeypatch.setattr(database, "_CHECKPOINT_WAIT_MS", 20)
    vectors = PhraseVectors("a", np.zeros((100, 1024), np.float32), np.zeros((100, 0), np.float32))
    with LiveStore.open(tmp_path) as store:
        store.put([TENT])
        stranger = sqlite3.connect(store.path, isolation_level=None)
        stranger.execute("BEGIN")
        stranger.execute("SELECT * FROM phrases").fetchall()

        def write(number: int) -> None:
            store.put([PhraseRecord(f"p{i}", f"{number}") for i in range(100)], vectors)

        for number in range(12):
            write(number)
        assert log_size(store) > 4 * limit
        stranger.execute("COMMIT")
        for number in range(4):
            write(100 + number)
        assert log_size(store) < 2 * limit
        stranger.close()
        assert store.last_sequence() == 1 + 16 * 100
