"""What the parent decides: all workers switch, or none; whatever happens, all answer with the same bundle."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from export.bundle.read import open_bundle
from service.channel import channel_pair
from service.children import Child
from service.swaps import Asker, Stage, Swaps, Worker
from tests.integration.service.swapping import damage, id_of, variant


@pytest.fixture(scope="module")
def bundles(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_bundle, variant(tiny_bundle, tmp_path_factory.mktemp("swaps") / "other", mark="B-")


class Process:
    """A worker's process as the parent sees it: it hears, and the test answers for it."""

    def __init__(self, pid: int):
        ours, self.end = channel_pair()
        self.child = Child(pid, ours)
        self.heard: list[dict[str, Any]] = []
        self.done = 0

    def hear(self) -> list[str]:
        """What it was told since it was asked last."""
        messages, _ = self.end.receive()
        self.heard += messages
        return [message["op"] for message in messages]


@dataclass
class Crew:
    """Does what the parent's loop does: starts a process where one has ended."""

    workers: list[Worker]
    swaps: Any = None
    pids: int = 100
    asked: list[Path | None] = field(default_factory=list)
    verifying: bool = False
    ending: list[tuple[int, bool]] = field(default_factory=list)
    processes: dict[int, Process] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def verify(self, path: Path | None) -> None:
        self.asked.append(path)
        self.verifying = True

    def end_verifying(self) -> None:
        self.verifying = False

    def end(self, worker: Worker, *, at_once: bool) -> None:
        worker.leaving = True
        self.ending.append((worker.number, at_once))

    def start(self, worker: Worker) -> Process:
        self.pids += 1
        process = Process(self.pids)
        worker.child, worker.ready, worker.leaving = process.child, False, False
        worker.generation = self.swaps.generation
        self.processes[worker.number] = process
        return process

    def die(self, worker: Worker) -> None:
        """It ends; the loop hears of it, and has not started another one yet."""
        assert worker.child is not None
        worker.child.channel.close()
        worker.child = None
        self.processes.pop(worker.number).end.close()
        self.swaps.ended(worker)

    def restart(self, worker: Worker) -> Process:
        self.die(worker)
        process = self.start(worker)
        self.swaps.ready(worker)
        return process


class Parent:
    """Swaps over so many workers, which all answer with the first bundle."""

    def __init__(self, first: Path, other: Path, count: int):
        self.other = other
        self.workers = [Worker(number) for number in range(count)]
        self.crew = Crew(self.workers)
        self.swaps = Swaps(open_bundle(first), self.workers, self.crew, self.crew.said.append)
        self.crew.swaps = self.swaps
        for worker in self.workers:
            self.crew.start(worker)
            self.swaps.ready(worker)

    def told(self) -> list[list[str]]:
        """What each worker was told since."""
        return [
            self.crew.processes[worker.number].hear() if worker.child is not None else []
            for worker in self.workers
        ]

    def begin(self, asker: Asker | None = None) -> int:
        """A swap whose bundle is sound; its token."""
        self.swaps.begin(self.other, asker)
        assert self.crew.verifying
        with open_bundle(self.other) as bundle:
            self.crew.verifying = False
            self.swaps.verified(self.other, dict(bundle.stamps))
        return self.swaps._begun

    @property
    def serving(self) -> str:
        return self.swaps.bundle.manifest.bundle_id

    def settle(self) -> None:
        """Whoever was told something does it, whoever was told to end ends, until nothing more happens."""
        for _ in range(100):
            moved = bool(self.crew.ending)
            for number, _at_once in self.crew.ending:
                if self.workers[number].leaving and self.workers[number].child is not None:
                    self.crew.restart(self.workers[number])
            self.crew.ending.clear()
            for worker in self.workers:
                if worker.child is None:
                    self.crew.start(worker)
                    self.swaps.ready(worker)
                    moved = True
                process = self.crew.processes[worker.number]
                process.hear()
                for message in process.heard[process.done :]:
                    moved = True
                    process.done += 1
                    if message["op"] == "prepare":
                        self.swaps.prepared(worker, message["token"])
                    elif message["op"] == "switch":
                        self.swaps.switched(worker, message["token"], {"bundle": "new"})
            if not moved:
                return
        raise AssertionError("it never comes to rest")

    def agree(self) -> bool:
        return {worker.generation for worker in self.workers} == {self.swaps.generation}


@pytest.fixture
def parent(bundles: tuple[Path, Path]) -> Parent:
    return Parent(*bundles, count=3)


def test_one_prepares_then_the_others_then_all_switch(parent: Parent, bundles: tuple[Path, Path]) -> None:
    asker = Asker(parent.workers[1].child.pid, 7)
    token = parent.begin(asker)
    assert parent.told() == [["prepare"], [], []]
    message = parent.crew.processes[0].heard[-1]
    assert message["path"] == str(bundles[1])
    with open_bundle(bundles[1]) as bundle:
        assert {name: tuple(stamp) for name, stamp in message["stamps"].items()} == bundle.stamps
    parent.swaps.prepared(parent.workers[0], token)
    assert parent.told() == [[], ["prepare"], ["prepare"]]
    parent.swaps.prepared(parent.workers[2], token)
    assert parent.told() == [[], [], []]
    assert parent.serving == id_of(bundles[0])
    parent.swaps.prepared(parent.workers[1], token)
    assert parent.told() == [["switch"]] * 3
    assert parent.serving == id_of(bundles[1])
    assert parent.swaps.running
    for worker in parent.workers:
        parent.swaps.switched(worker, token, {"bundle": "b", "previous": "a", "seconds": 0.0})
    assert not parent.swaps.running
    assert parent.told() == [[], ["reloaded"], []]
    answer = parent.crew.processes[1].heard[-1]
    assert answer["request"] == 7
    assert answer["report"].keys() == {"bundle", "previous", "seconds"}
    assert parent.agree()
    assert parent.crew.ending == []


def test_what_nobody_asked_for_over_http_is_counted_by_one_worker(parent: Parent) -> None:
    parent.begin()
    parent.settle()
    counted = [m for p in parent.crew.processes.values() for m in p.heard if m["op"] == "count"]
    assert counted == [{"op": "count", "outcome": "taken"}]
    parent.swaps.begin(None, None)
    parent.swaps.unverified("damaged", None)
    parent.settle()
    counted = [m for p in parent.crew.processes.values() for m in p.heard if m["op"] == "count"]
    assert counted[1:] == [{"op": "count", "outcome": "refused"}]


def test_a_bundle_that_is_not_sound(parent: Parent, bundles: tuple[Path, Path]) -> None:
    asker = Asker(parent.workers[0].child.pid, 1)
    parent.swaps.begin(Path("/none"), asker)
    assert parent.crew.asked == [Path("/none")]
    parent.swaps.unverified("there is no such folder", "Copy it.")
    assert parent.told() == [["refused"], [], []]
    answer = parent.crew.processes[0].heard[-1]
    assert (answer["kind"], answer["reason"], answer["hint"]) == (
        "bundle",
        "there is no such folder",
        "Copy it.",
    )
    assert not parent.swaps.running
    assert parent.serving == id_of(bundles[0])
    assert any("there is no such folder" in line for line in parent.crew.said)


def test_a_bundle_that_changes_after_it_was_verified(
    parent: Parent, bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundles[1], copy)
    with open_bundle(copy) as bundle:
        stamps = dict(bundle.stamps)
    parent.swaps.begin(copy, Asker(parent.workers[0].child.pid, 1))
    damage(copy, "vectors.npy")
    parent.swaps.verified(copy, stamps)
    assert parent.told() == [["refused"], [], []]
    assert not parent.swaps.running
    parent.swaps.begin(copy, Asker(parent.workers[0].child.pid, 2))
    shutil.rmtree(copy)
    parent.swaps.verified(copy, stamps)
    assert parent.told() == [["refused"], [], []]


@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_if_one_refuses_none_switches(parent: Parent, bundles: tuple[Path, Path], refuses: int) -> None:
    token = parent.begin(Asker(parent.workers[2].child.pid, 5))
    for worker in parent.workers:
        if worker.number != refuses and (refuses or worker.number == 0):
            parent.swaps.prepared(worker, token)
    parent.told()
    parent.swaps.unprepared(parent.workers[refuses], token, "no matches", None)
    told = parent.told()
    assert told[2][-1] == "refused"
    others = {number for number in range(3) if number != refuses} if refuses else set()
    assert {number for number, ops in enumerate(told) if "discard" in ops} == others
    assert not any("switch" in ops for ops in told)
    assert parent.serving == id_of(bundles[0])
    assert not parent.swaps.running
    # What it had asked others for comes too late.
    for worker in parent.workers:
        parent.swaps.prepared(worker, token)
        parent.swaps.switched(worker, token, {})
    assert parent.told() == [[], [], []]
    assert parent.agree()
    parent.begin()
    parent.settle()
    assert parent.serving == id_of(bundles[1])
    assert parent.agree()


def test_another_one_meanwhile_is_refused_at_each_stage(parent: Parent) -> None:
    asker = Asker(parent.workers[0].child.pid, 3)

    def refused() -> None:
        parent.told()
        parent.swaps.begin(None, asker)
        parent.swaps.begin(None, None)
        assert parent.told() == [["refused"], [], []]
        assert parent.crew.processes[0].heard[-1]["kind"] == "running"

    parent.swaps.begin(parent.other, None)
    refused()
    with open_bundle(parent.other) as bundle:
        parent.swaps.verified(parent.other, dict(bundle.stamps))
    refused()
    for worker in parent.workers:
        parent.swaps.prepared(worker, 1)
    assert parent.swaps.generation == 1
    refused()
    for worker in parent.workers:
        parent.swaps.switched(worker, 1, {})
    assert not parent.swaps.running
    assert parent.crew.asked == [parent.other]


def test_the_asker_is_gone_and_another_process_has_its_number(parent: Parent) -> None:
    asker = Asker(parent.workers[0].child.pid, 1)
    parent.swaps.begin(None, asker)
    parent.crew.restart(parent.workers[0])
    parent.swaps.unverified("damaged", None)
    assert parent.told() == [[], [], []]


def test_a_worker_that_dies_while_it_prepares_is_waited_for_once(
    parent: Parent, bundles: tuple[Path, Path]
) -> None:
    token = parent.begin()
    parent.told()
    parent.crew.die(parent.workers[0])
    # The next one shows that it can be done.
    assert parent.told() == [[], ["prepare"], []]
    parent.crew.start(parent.workers[0])
    parent.swaps.ready(parent.workers[0])
    parent.swaps.prepared(parent.workers[1], token)
    assert parent.told() == [["prepare"], [], ["prepare"]]
    parent.settle()
    assert parent.serving == id_of(bundles[1])
    assert parent.agree()


def test_a_bundle_that_kills_workers_does_not_take_over(parent: Parent, bundles: tuple[Path, Path]) -> None:
    parent.begin(Asker(parent.workers[2].child.pid, 1))
    parent.crew.die(parent.workers[0])
    parent.crew.die(parent.workers[1])
    assert parent.told()[2] == ["refused"]
    assert not parent.swaps.running
    assert parent.serving == id_of(bundles[0])
    parent.settle()
    assert parent.agree()


def test_the_only_worker_is_killed_by_a_bundle(bundles: tuple[Path, Path]) -> None:
    parent = Parent(*bundles, count=1)
    parent.begin()
    for _ in range(2):
        assert parent.told() == [["prepare"]]
        parent.crew.restart(parent.workers[0])
    assert not parent.swaps.running
    assert parent.serving == id_of(bundles[0])


def test_the_only_worker_dies_when_it_has_prepared(bundles: tuple[Path, Path]) -> None:
    """Before it could be told to switch: the next one begins with the new bundle."""
    parent = Parent(*bundles, count=2)
    token = parent.begin()
    parent.crew.die(parent.workers[1])
    parent.swaps.prepared(parent.workers[0], token)
    assert parent.swaps.generation == token
    parent.crew.die(parent.workers[0])
    assert not parent.swaps.running
    parent.settle()
    assert parent.agree()
    assert parent.serving == id_of(bundles[1])


def test_no_worker_is_ready_when_a_swap_begins(bundles: tuple[Path, Path]) -> None:
    parent = Parent(*bundles, count=1)
    parent.crew.die(parent.workers[0])
    parent.begin()
    assert parent.swaps.running
    assert parent.serving == id_of(bundles[0])
    parent.crew.start(parent.workers[0])
    parent.swaps.ready(parent.workers[0])
    assert parent.told() == [["prepare"]]
    parent.settle()
    assert parent.serving == id_of(bundles[1])
    assert parent.agree()


def test_a_worker_begun_with_the_old_bundle_that_is_ready_too_late_is_ended(
    parent: Parent, bundles: tuple[Path, Path]
) -> None:
    parent.crew.die(parent.workers[2])
    parent.crew.start(parent.workers[2])
    token = parent.begin()
    for worker in parent.workers[:2]:
        parent.swaps.prepared(worker, token)
    assert parent.swaps.generation == token
    parent.swaps.ready(parent.workers[2])
    assert parent.crew.ending == []
    for worker in parent.workers[:2]:
        parent.swaps.switched(worker, token, {})
    assert parent.crew.ending == [(2, False)]
    parent.settle()
    assert parent.agree()


def test_a_worker_begun_with_the_old_bundle_that_is_ready_when_all_is_over_is_ended(parent: Parent) -> None:
    parent.crew.die(parent.workers[2])
    parent.crew.start(parent.workers[2])
    token = parent.begin()
    for worker in parent.workers[:2]:
        parent.swaps.prepared(worker, token)
    for worker in parent.workers[:2]:
        parent.swaps.switched(worker, token, {})
    assert not parent.swaps.running
    parent.swaps.ready(parent.workers[2])
    assert parent.crew.ending == [(2, False)]


def test_a_worker_begun_with_the_old_bundle_is_ended_when_the_next_swap_is_refused(parent: Parent) -> None:
    parent.crew.die(parent.workers[2])
    parent.crew.start(parent.workers[2])
    token = parent.begin()
    for worker in parent.workers[:2]:
        parent.swaps.prepared(worker, token)
    for worker in parent.workers[:2]:
        parent.swaps.switched(worker, token, {})
    parent.swaps.begin(None, None)
    parent.swaps.ready(parent.workers[2])
    parent.swaps.unverified("damaged", None)
    assert parent.crew.ending == [(2, False)]
    parent.settle()
    assert parent.agree()


def test_a_worker_begun_with_the_new_bundle_is_left_alone(parent: Parent) -> None:
    token = parent.begin()
    for worker in parent.workers:
        parent.swaps.prepared(worker, token)
    parent.crew.restart(parent.workers[1])
    for worker in (parent.workers[0], parent.workers[2]):
        parent.swaps.switched(worker, token, {})
    assert not parent.swaps.running
    assert parent.crew.ending == []
    assert parent.agree()


def test_a_worker_that_does_not_take_messages_is_ended(parent: Parent) -> None:
    parent.crew.processes[0].end.close()
    parent.begin()
    assert parent.crew.ending == [(0, True)]
    parent.settle()
    assert parent.agree()


def test_what_is_stuck_is_ended(parent: Parent, bundles: tuple[Path, Path]) -> None:
    parent.swaps.begin(None, Asker(parent.workers[0].child.pid, 1))
    now = parent.swaps._swap.since
    parent.swaps.tick(now + Stage.VERIFYING.value - 1)
    assert parent.crew.verifying
    parent.swaps.tick(now + Stage.VERIFYING.value + 1)
    assert not parent.crew.verifying
    assert not parent.swaps.running
    assert parent.told()[0] == ["refused"]

    token = parent.begin()
    parent.swaps.tick(parent.swaps._swap.since + Stage.PREPARING.value + 1)
    assert parent.crew.ending == [(0, True)]
    parent.crew.ending.clear()
    parent.crew.restart(parent.workers[0])
    for worker in parent.workers:
        parent.swaps.prepared(worker, token)
    for worker in parent.workers:
        parent.swaps.prepared(worker, token)
    assert parent.swaps.generation == token
    parent.swaps.switched(parent.workers[1], token, {})
    parent.swaps.tick(parent.swaps._swap.since + Stage.SWITCHING.value + 1)
    assert sorted(parent.crew.ending) == [(0, True), (2, True)]
    parent.settle()
    assert parent.agree()
    assert not parent.swaps.running


def test_stopping_ends_a_swap(parent: Parent, bundles: tuple[Path, Path]) -> None:
    token = parent.begin(Asker(parent.workers[1].child.pid, 4))
    parent.swaps.prepared(parent.workers[0], token)
    parent.told()
    parent.swaps.stop()
    assert parent.told() == [[], ["refused"], []]
    assert parent.crew.processes[1].heard[-1]["kind"] == "stopping"
    for worker in parent.workers:
        parent.crew.die(worker)
    assert parent.serving == id_of(bundles[0])


def test_messages_out_of_turn_change_nothing(parent: Parent, bundles: tuple[Path, Path]) -> None:
    first = parent.workers[0]
    for token in (0, 1, "1", None, -1):
        parent.swaps.prepared(first, token)
        parent.swaps.unprepared(first, token, "odd", None)
        parent.swaps.switched(first, token, {})
    parent.swaps.unverified("odd", None)
    parent.swaps.verified(bundles[1], {})
    token = parent.begin()
    parent.swaps.switched(first, token, {})
    parent.swaps.prepared(parent.workers[1], token)
    parent.swaps.unprepared(parent.workers[2], token, "odd", None)
    parent.swaps.verified(bundles[1], {})
    parent.swaps.unverified("odd", None)
    assert parent.swaps.running
    assert parent.serving == id_of(bundles[0])
    parent.settle()
    assert parent.serving == id_of(bundles[1])


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_all_end_with_the_same_bundle(bundles: tuple[Path, Path], seed: int) -> None:
    """Workers die, refuse, start and answer in any order, while swaps and a stop come and go."""
    draw = random.Random(seed)
    parent = Parent(*bundles, count=draw.choice([1, 2, 3]))
    waiting: list[tuple[Worker, Child, dict[str, Any]]] = []
    for _ in range(draw.randrange(10, 120)):
        for worker in parent.workers:
            if worker.child is not None:
                process = parent.crew.processes[worker.number]
                before = len(process.heard)
                process.hear()
                waiting += [(worker, worker.child, message) for message in process.heard[before:]]
        kind = draw.random()
        if kind < 0.15 and not parent.swaps.running:
            parent.other = draw.choice(bundles)
            parent.begin(draw.choice([None, Asker(draw.choice([101, 102]), 1)]))
        elif kind < 0.2:
            parent.swaps.begin(None, None)
            parent.swaps.unverified("damaged", None)
        elif kind < 0.35:
            worker = draw.choice(parent.workers)
            if worker.child is not None:
                parent.crew.die(worker)
        elif kind < 0.5:
            worker = draw.choice(parent.workers)
            if worker.child is None:
                parent.crew.start(worker)
            elif not worker.ready:
                parent.swaps.ready(worker)
        elif waiting:
            worker, child, message = waiting.pop(0)
            if worker.child is not child:
                continue
            if message["op"] == "prepare" and draw.random() < 0.1:
                parent.swaps.unprepared(worker, message["token"], "no matches", None)
            elif message["op"] == "prepare":
                parent.swaps.prepared(worker, message["token"])
            elif message["op"] == "switch":
                parent.swaps.switched(worker, message["token"], {"bundle": "b"})
    for worker, child, message in waiting:
        if worker.child is child and message["op"] == "prepare":
            parent.swaps.prepared(worker, message["token"])
        elif worker.child is child and message["op"] == "switch":
            parent.swaps.switched(worker, message["token"], {})
    for worker in parent.workers:
        if worker.child is not None and not worker.ready:
            parent.swaps.ready(worker)
    parent.settle()
    assert not parent.swaps.running
    assert parent.agree(), (parent.swaps.generation, parent.workers)
    assert all(worker.stays for worker in parent.workers)
