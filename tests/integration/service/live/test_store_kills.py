"""What a store has acknowledged is there, whatever its writers are killed at, and whoever else writes."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.live.store import LiveStore, PhraseRow

# Arguments: the folder, a number for its texts, how many changes (0: until killed). Says "start" before it
# opens the store; then before each change what it will do, and after it the rows that were acknowledged.
WRITER = """
import json, random, sys
from pathlib import Path
import numpy as np
from service.live.store import LiveStore, PhraseRecord, PhraseVectors, StateError

folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
chance = random.Random(name)

def say(what):
    print(json.dumps(what), flush=True)

def plain(row):
    return [row.id, row.text, row.columns, row.state, row.source, row.changed, row.sequence, row.edited]

say("start")
store = LiveStore.open(folder)
done = 0
while not count or done < count:
    done += 1
    if chance.random() < 0.6:
        text = f"{name} {done}"
        records = [PhraseRecord(f"p{i}", text, {"n": done}) for i in chance.sample(range(60), 20)]
        narrow = np.full((20, 16), 1000 * int(name) + done, np.float32)
        vectors = PhraseVectors("model", narrow, -narrow)
        say({"put": text})
        say({"rows": [plain(row) for row in store.put(records, vectors)]})
    else:
        id = f"{chance.choice('pb')}{chance.randrange(60)}"
        state = chance.choice(["active", "paused", "removed"])
        say({"state": state, "id": id})
        try:
            row = store.set_state(id, state, in_bundle=id.startswith("b"))
        except StateError:
            row = None
        say({"rows": [] if row is None else [plain(row)]})
"""


@dataclass
class Writer:
    """A process that writes; what it says goes to a file, which outlives it."""

    folder: Path
    number: int
    output: Path
    count: int = 0
    process: subprocess.Popen = field(init=False)

    def __post_init__(self) -> None:
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(self.folder), str(self.number), str(self.count)],
                stdout=stream,
            )

    def wait_for(self, lines: int) -> None:
        """Until it has said so many lines."""
        until = time.monotonic() + 60
        while self.output.read_bytes().count(b"\n") < lines:
            assert self.process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.002)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(60) == -signal.SIGKILL

    def said(self) -> list[Any]:
        """Its whole lines."""
        lines = self.output.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def acknowledged(self) -> list[PhraseRow]:
        return [PhraseRow(*row) for line in self.said() if "rows" in line for row in line["rows"]]


def assert_sound(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def assert_vectors(store: LiveStore, rows: list[PhraseRow]) -> None:
    """Each phrase that is not removed has the vectors of its text, and no other has any."""
    wanted = [i for i, row in enumerate(rows) if row.source == "live" and row.state != "removed"]
    found = store.vectors("model", rows, 16, 16)
    assert found.positions.tolist() == wanted
    texts = [str(rows[i].text).split() for i in wanted]
    values = np.array([1000 * int(name) + int(change) for name, change in texts], np.float32)
    np.testing.assert_array_equal(found.narrow, np.repeat(values[:, None], 16, axis=1))
    np.testing.assert_array_equal(found.wide, -found.narrow)


@pytest.mark.slow
def test_what_was_acknowledged_survives_kills(tmp_path: Path) -> None:
    chance = random.Random(0)
    folder = tmp_path / "live"
    known: dict[str, PhraseRow] = {}
    for number in range(24):
        writer = Writer(folder, number, tmp_path / f"{number}.jsonl")
        writer.wait_for(1 + 2 * chance.randrange(1, 4))
        # With another process at the file, the log outlives the writer in another way than without.
        other = LiveStore.open(folder) if number % 2 else None
        if other is not None:
            other.last_sequence()
        time.sleep(chance.uniform(0, 0.08))
        writer.kill()
        acknowledged = writer.acknowledged()
        assert acknowledged
        last = max(row.sequence for row in [*known.values(), *acknowledged])
        for row in acknowledged:
            known[row.id] = row
        with other or LiveStore.open(folder) as store:
            rows = store.changes(0, 1000)
            assert_vectors(store, rows)
            assert_sound(store.path)
        # What the change that the kill interrupted has left: all of it or nothing.
        late = {row.id: row for row in rows if row.sequence > last}
        doing = writer.said()[-1]
        if late and "put" in doing:
            assert [row.text for row in late.values()] == [doing["put"]] * 20
        elif late:
            assert [(row.id, row.state) for row in late.values()] == [(doing["id"], doing["state"])]
        known |= late
        assert {row.id: row for row in rows} == known
    assert len(known) > 60


def test_killed_while_the_store_is_made(tmp_path: Path) -> None:
    chance = random.Random(1)
    for number in range(12):
        folder = tmp_path / f"{number}"
        writer = Writer(folder, number, tmp_path / f"{number}.jsonl")
        writer.wait_for(1)
        time.sleep(chance.uniform(0, 0.02))
        writer.kill()
        with LiveStore.open(folder) as store:
            latest = {row.id: row for row in writer.acknowledged()}
            rows = {row.id: row for row in store.changes(0, 1000)}
            assert rows.keys() >= latest.keys()
            assert all(rows[id].sequence >= row.sequence for id, row in latest.items())
            assert_sound(store.path)
        assert [path.name for path in folder.iterdir()] == ["live.db"]


def test_several_writers_and_one_who_polls(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    seen: dict[str, PhraseRow] = {}
    after = received = 0
    with LiveStore.open(folder) as store:
        writers = [Writer(folder, number, tmp_path / f"{number}.jsonl", 150) for number in range(4)]
        running = True
        while running:
            running = any(writer.process.poll() is None for writer in writers)
            last = store.last_sequence()
            while page := store.changes(after, 7):
                sequences = [row.sequence for row in page]
                assert sequences == sorted(set(sequences))
                assert sequences[0] > after
                after = sequences[-1]
                seen.update((row.id, row) for row in page)
                received += len(page)
            assert after >= last
        assert [writer.process.returncode for writer in writers] == [0] * 4
        # A commit that became visible after one with a higher number would be missing here.
        assert seen == {row.id: row for row in store.changes(0, 1000)}
        assert_vectors(store, list(seen.values()))
    assert received > len(seen), "nothing was polled while they wrote"
    acknowledged = [row for writer in writers for row in writer.acknowledged()]
    latest = {row.id: row for row in sorted(acknowledged, key=lambda row: row.sequence)}
    assert latest == seen
    # No number was given to two changes; a change that left a row as it was repeats the row.
    changes = {row.sequence: row for row in acknowledged}
    assert all(changes[row.sequence] == row for row in acknowledged)
    assert sorted(changes) == list(range(1, after + 1))
    assert_sound(folder / "live.db")


FULL_DISK = """
import resource, sys
from pathlib import Path
from service.live.store import LiveStore, PhraseRecord, StoreError

folder, room = Path(sys.argv[1]), int(sys.argv[2])
store = LiveStore.open(folder)
store.put([PhraseRecord(f"before {i}", "x" * 500) for i in range(500)])
largest = max(path.stat().st_size for path in folder.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (largest + room, resource.RLIM_INFINITY))
stored = 500
try:
    while stored < 20000:
        store.put([PhraseRecord(f"during {stored + i}", "x" * 500) for i in range(50)])
        stored += 50
except StoreError as error:
    print(error)
else:
    sys.exit("the disk did not become full")
for again in range(3):
    try:
        store.put([PhraseRecord(f"full {i}", "x" * 500) for i in range(5000)])
        sys.exit("there was room")
    except StoreError:
        pass
assert store.last_sequence() == stored, "something was stored, or was lost"
assert len(store.changes(0, 100000)) == stored
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert store.put([PhraseRecord("after", "x")])[0].sequence == stored + 1
assert store.get("full 0") is None
store.close()
with LiveStore.open(folder) as store:
    assert store.last_sequence() == stored + 1
print("sound")
"""


@pytest.mark.parametrize("room", [0, 10_000, 100_000, 1_000_000])
def test_a_disk_that_is_full_for_a_while(tmp_path: Path, room: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), str(room)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing was stored." in done.stdout
    assert "has room" in done.stdout
    assert done.stdout.endswith("sound\n")
    assert_sound(tmp_path / "live.db")


FULL_WHEN_MADE = """
import resource, sys
from pathlib import Path
from bidmatch.base.errors import BidmatchError
from service.live.store import LiveStore

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    LiveStore.open(Path(sys.argv[1]))
except BidmatchError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("room", [0, 5000])
def test_a_full_disk_when_the_store_is_made(tmp_path: Path, room: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_WHEN_MADE, str(tmp_path), str(room)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("StoreError")
    assert str(tmp_path / "live.db") in done.stdout
    assert list(tmp_path.iterdir()) == []
    LiveStore.open(tmp_path).close()
