"""Another bundle takes over while requests go on: in all workers or in none, and no request fails."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.conftest import Server
from tests.integration.service.swapping import (
    Connection,
    Load,
    alive,
    anonymous_kb,
    call,
    children,
    damage,
    eventually,
    id_of,
    mapped_files,
    metrics,
    one_to_each,
    open_files,
    serving,
    total,
    variant,
    workers_of,
)

LATER = (datetime.now(UTC) + timedelta(days=365)).isoformat()


@dataclass(frozen=True)
class Bundles:
    """The tiny bundle; one whose ids begin with `B-`; one that matches nothing but its own phrases."""

    a: Path
    b: Path
    silent: Path

    def check(self, answer: dict[str, Any]) -> str | None:
        """What is wrong with an answer: matches of another bundle than the one it names."""
        of_b = answer["bundle"] == id_of(self.b)
        wrong = [
            one["id"] for one in answer["matches"] if one["source"] != "live" and of_b != ("B-" in one["id"])
        ]
        return f"{answer['bundle']} answered {wrong}" if wrong or not answer["matches"] else None


@pytest.fixture(scope="module")
def bundles(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("swap")
    return Bundles(
        tiny_bundle,
        variant(tiny_bundle, folder / "b", mark="B-"),
        variant(tiny_bundle, folder / "silent", match_type="exact"),
    )


@pytest.fixture(scope="module")
def pair(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers with live phrases. Tests leave them serving the tiny bundle."""
    with start("--workers", "2", "--live", str(tmp_path_factory.mktemp("live"))) as server:
        yield server


def reload(server: Server, bundle: Path | None = None) -> tuple[int, Any]:
    return call(server.address, "POST", "/admin/reload", {} if bundle is None else {"bundle": str(bundle)})


def ids_of(answer: Any) -> list[str]:
    return [match["id"] for match in answer["matches"]]


def test_swaps_under_load(pair: Server, bundles: Bundles) -> None:
    a, b = id_of(bundles.a), id_of(bundles.b)
    taken = total(pair.address, "bidmatch_reloads_total", outcome="taken")
    with Load(pair.address, bundles.check, connections=6) as load:
        load.more(200)
        for turn in range(8):
            before, after = ((bundles.a, bundles.b), (bundles.b, bundles.a))[turn % 2]
            status, report = reload(pair, after)
            assert status == 200
            assert report["seconds"] > 0
            assert {name: report[name] for name in ("bundle", "previous", "phrases", "live_phrases")} == {
                "bundle": id_of(after),
                "previous": id_of(before),
                "phrases": 400,
                "live_phrases": 0,
            }
            # Whoever asks from now on is answered by it.
            assert call(pair.address, "POST", "/match", {"query": "red tent"})[1]["bundle"] == id_of(after)
            load.more(60)
    assert load.wrong == []
    assert set(load.statuses) == {200}
    assert set(load.bundles) == {a, b}
    assert serving(pair, 2) == {a}
    held = metrics(pair.address)
    for bundle in (a, b):
        assert (
            sum(value for labels, value in held["bidmatch_queries_total"] if labels["bundle"] == bundle) > 60
        )
        assert any(labels["bundle"] == bundle for labels, _ in held["bidmatch_best_score_count"])
    info = {labels["bundle"]: value for labels, value in held["bidmatch_bundle_info"]}
    assert info == {a: 1, b: 0}
    assert total(pair.address, "bidmatch_reloads_total", outcome="taken") == taken + 8
    assert sum("has taken over" in line for line in pair.said) >= 8


def bad_bundles(bundles: Bundles, folder: Path) -> dict[str, tuple[Path, str]]:
    """name -> bundle, and what is said of it."""

    def copy(name: str) -> Path:
        shutil.copytree(bundles.b, folder / name)
        return folder / name

    bad = {"none": (folder / "none", "there is no such folder")}
    for name in ("vectors.npy", "links.npy", "encoder.onnx", "phrases.arrow"):
        bad[f"damaged {name}"] = copy(f"damaged-{name}"), f"{name} was altered"
        damage(folder / f"damaged-{name}", name)
    bad["no manifest"] = copy("no-manifest"), "it has no manifest.json"
    (folder / "no-manifest" / "manifest.json").unlink()
    bad["missing"] = copy("missing"), "tokenizer.json is missing"
    (folder / "missing" / "tokenizer.json").unlink()
    bad["cut off"] = copy("cut-off"), "links.npy has"
    os.truncate(folder / "cut-off" / "links.npy", 1000)
    bad["more"] = copy("more"), "notes.txt does not belong to it"
    (folder / "more" / "notes.txt").write_text("x")
    bad["another's version"] = copy("version"), "format 99"
    manifest = folder / "version" / "manifest.json"
    manifest.write_text(re.sub(r'("format_version": *)\d+', r"\g<1>99", manifest.read_text()))
    bad["a file"] = folder / "file", "it is no folder"
    (folder / "file").write_text("x")
    bad["a pipe in it"] = copy("pipe"), "vectors.npy is no regular file"
    (folder / "pipe" / "vectors.npy").unlink()
    os.mkfifo(folder / "pipe" / "vectors.npy")
    bad["a name too long"] = Path("/x" + "y" * 3000), "cannot be opened"
    bad["no name at all"] = Path("/x\0y"), "cannot be opened"
    return bad


def test_a_bad_bundle_is_refused_by_all_workers(pair: Server, bundles: Bundles, tmp_path: Path) -> None:
    bad = bad_bundles(bundles, tmp_path)
    refused = total(pair.address, "bidmatch_reloads_total", outcome="refused")
    workers = workers_of(pair, 2)
    with Load(pair.address, bundles.check) as load:
        for name, (bundle, reason) in bad.items():
            status, problem = reload(pair, bundle)
            assert (status, problem.get("type")) == (422, "urn:bidmatch:bundle-refused"), (name, problem)
            assert reason in problem["detail"], name
        load.more(40)
    assert load.wrong == []
    assert set(load.statuses) == {200}
    assert set(load.bundles) == {id_of(bundles.a)}
    assert serving(pair, 2) == {id_of(bundles.a)}
    assert total(pair.address, "bidmatch_reloads_total", outcome="refused") == refused + len(bad)
    assert workers_of(pair, 2) == workers
    assert any("bundle refused, the one before still answers" in line for line in pair.said)
    assert "Traceback" not in pair.text()


@pytest.mark.parametrize("body", [[], {"bundle": ""}, {"bundle": 3}, {"bundle": "x" * 5000}, {"other": 1}])
def test_a_body_that_is_none(pair: Server, body: Any) -> None:
    assert call(pair.address, "POST", "/admin/reload", body)[0] == 422


def test_if_one_of_two_workers_refuses_none_switches(pair: Server, bundles: Bundles) -> None:
    """Only the one that has been asked of late knows what the new bundle has no matches for."""
    assert reload(pair, bundles.a)[0] == 200
    with one_to_each(pair, workers_of(pair, 2)) as each:
        asked, *_ = each.values()
        for number in range(5):
            assert asked("POST", "/match", {"query": f"cheap tent {number}"})[0] == 200
        for _ in range(2):
            status, problem = reload(pair, bundles.silent)
            assert status == 422
            assert "queries of late" in problem["detail"]
            for connection in each.values():
                assert connection("GET", "/readyz")[1]["bundle"] == id_of(bundles.a)
                answer = connection("POST", "/match", {"query": "red tent"})[1]
                assert answer["bundle"] == id_of(bundles.a)
                assert answer["matches"]


def test_the_way_back_is_the_same_call(pair: Server, bundles: Bundles) -> None:
    for bundle in (bundles.b, bundles.a, bundles.b):
        assert reload(pair, bundle)[0] == 200
        assert serving(pair, 2) == {id_of(bundle)}
    # Without a bundle it is the one that the service was started with.
    assert call(pair.address, "POST", "/admin/reload")[0] == 200
    assert serving(pair, 2) == {id_of(bundles.a)}


def test_a_reload_while_another_runs(pair: Server, bundles: Bundles) -> None:
    for _ in range(10):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(reload, [pair] * 4, [bundles.a] * 4))
        statuses = sorted(status for status, _ in found)
        assert statuses[0] == 200
        assert set(statuses) <= {200, 409}
        if 409 in statuses:
            break
    problem = next(problem for status, problem in found if status == 409)
    assert problem["type"] == "urn:bidmatch:reload-running"
    assert reload(pair, bundles.a)[0] == 200


def test_answers_that_were_kept_are_those_of_their_bundle(pair: Server, bundles: Bundles) -> None:
    workers = workers_of(pair, 2)
    with one_to_each(pair, workers) as each:
        for connection in each.values():
            for bundle in (bundles.a, bundles.b, bundles.a):
                assert reload(pair, bundle)[0] == 200
                first, again = (
                    connection("POST", "/match", {"query": "cheap red boots", "k": 7})[1] for _ in range(2)
                )
                assert first == again
                assert first["bundle"] == id_of(bundle)
                assert bundles.check(first) is None
    assert total(pair.address, "bidmatch_cache_hits_total") >= 6


def test_live_phrases_survive(pair: Server, bundles: Bundles, tmp_path: Path) -> None:
    def phrase(id: str) -> dict[str, Any]:
        status, found = call(pair.address, "GET", f"/phrases/{id}")
        assert status == 200
        return {name: found[name] for name in ("text", "state", "source")}

    def everything(query: str) -> list[list[str]]:
        with one_to_each(pair, workers_of(pair, 2)) as each:
            asked = {"query": query, "k": 500}
            return [ids_of(connection("POST", "/match", asked)[1]) for connection in each.values()]

    phrases = [
        {"id": "mine", "text": "waterproof tent"},
        {"id": "trained", "text": "waterproof socks"},
        {"id": "off", "text": "waterproof boots"},
    ]
    assert call(pair.address, "POST", "/phrases", {"phrases": phrases})[0] == 200
    assert call(pair.address, "POST", "/phrases/off/pause")[0] == 200
    assert call(pair.address, "POST", "/phrases/p3/pause")[0] == 200
    assert call(pair.address, "DELETE", "/phrases/p0")[0] == 200
    new = variant(
        bundles.a,
        tmp_path / "new",
        renamed={
            50: ("trained", "waterproof socks, as trained"),
            51: ("off", "waterproof boots, as trained"),
        },
        created=LATER,
    )
    status, report = reload(pair, new)
    assert status == 200
    assert report["live_phrases"] == 1
    eventually(lambda: total(pair.address, "bidmatch_live_phrases") == 1)
    assert phrase("mine") == {"text": "waterproof tent", "state": "active", "source": "live"}
    assert phrase("trained") == {
        "text": "waterproof socks, as trained",
        "state": "active",
        "source": "bundle",
    }
    assert phrase("off")["state"] == "paused"
    assert phrase("p3")["state"] == "paused"
    assert phrase("p0")["state"] == "removed"
    for found in everything("red running shoes"):
        assert not {"p0", "p3", "off"} & set(found)
        assert found.count("mine") == found.count("trained") == 1
    for found in everything("waterproof tent"):
        assert found[0] == "mine"
    # Changed since, in an old bundle's eyes: it stands for the bundle's own.
    old = variant(
        bundles.a,
        tmp_path / "old",
        renamed={50: ("trained", "waterproof socks, as trained")},
        created="2001-01-01T00:00:00+00:00",
    )
    assert reload(pair, old)[0] == 200
    assert phrase("trained") == {"text": "waterproof socks", "state": "active", "source": "live"}
    for found in everything("waterproof socks"):
        assert found[0] == "trained"
        assert found.count("trained") == 1
    assert reload(pair, bundles.a)[0] == 200
    eventually(lambda: total(pair.address, "bidmatch_live_phrases") == 2)
    for name in ("p3", "off"):
        assert call(pair.address, "POST", f"/phrases/{name}/resume")[0] == 200
    # The one that was not asked to hears of it within a second.
    eventually(lambda: all({"p3", "off"} <= set(found) for found in everything("blue hiking boots")))
    for name in ("mine", "trained", "off"):
        assert call(pair.address, "DELETE", f"/phrases/{name}")[0] == 200


def test_adds_during_swaps_are_in_whatever_answers_next(pair: Server, bundles: Bundles) -> None:
    over = threading.Event()
    missing: list[str] = []

    def add() -> None:
        with Connection(pair.address) as connection:
            for number in range(10_000):
                if over.is_set():
                    return
                one = {"id": f"add-{number}", "text": f"tent number {number}"}
                assert connection("POST", "/phrases", {"phrases": [one]})[0] == 200
                answer = connection("POST", "/match", {"query": one["text"], "k": 2})[1]
                if one["id"] not in ids_of(answer):
                    missing.append(one["id"])
                assert connection("DELETE", f"/phrases/{one['id']}")[0] == 200
                answer = connection("POST", "/match", {"query": one["text"], "k": 2})[1]
                if one["id"] in ids_of(answer):
                    missing.append(f"{one['id']} came back")

    adding = threading.Thread(target=add)
    adding.start()
    for turn in range(6):
        assert reload(pair, (bundles.b, bundles.a)[turn % 2])[0] == 200
    over.set()
    adding.join()
    assert missing == []


def test_a_worker_that_is_killed_during_a_swap(pair: Server, bundles: Bundles) -> None:
    """Whenever that is, all workers come to serve the same bundle, and swaps go on."""
    draw = random.Random(4)
    outcomes = set()
    for turn in range(8):
        workers = workers_of(pair, 2)
        wanted = (bundles.b, bundles.a)[turn % 2]
        with one_to_each(pair, workers) as each:
            # Asked of the worker that is not killed, or of the one that is.
            killed = workers[turn % 2]
            asked = each[workers[turn // 2 % 2]]
            found: list[int] = []

            def ask(asked: Connection = asked, wanted: Path = wanted, found: list[int] = found) -> None:
                try:
                    found.append(asked("POST", "/admin/reload", {"bundle": str(wanted)})[0])
                except OSError:
                    found.append(0)

            asking = threading.Thread(target=ask)
            asking.start()
            time.sleep(draw.uniform(0, 0.3))
            os.kill(killed, signal.SIGKILL)
            asking.join()
        eventually(lambda killed=killed: not alive(killed))
        outcomes |= set(found)
        eventually(lambda: len(serving(pair, 2)) == 1)
        if found == [200]:
            assert serving(pair, 2) == {id_of(wanted)}
    assert outcomes <= {0, 200, 422}
    assert reload(pair, bundles.a)[0] == 200
    assert serving(pair, 2) == {id_of(bundles.a)}
    info = metrics(pair.address)["bidmatch_bundle_info"]
    assert [labels["bundle"] for labels, value in info if value == 1] == [id_of(bundles.a)]
    assert total(pair.address, "bidmatch_requests_total", route="/admin/reload") > 0


@pytest.fixture
def current(bundles: Bundles, tmp_path: Path) -> Path:
    """A link that deployments move."""
    link = tmp_path / "current"
    link.symlink_to(bundles.a)
    return link


def point(link: Path, bundle: Path) -> None:
    """Move the link in one step."""
    new = link.with_name("new")
    new.symlink_to(bundle)
    new.replace(link)


def test_sighup_takes_what_the_path_leads_to_now(start: Callable, bundles: Bundles, current: Path) -> None:
    with start("--bundle", str(current)) as server, Load(server.address, bundles.check) as load:

        def hup() -> None:
            server.process.send_signal(signal.SIGHUP)

        def served() -> str:
            return call(server.address, "GET", "/readyz")[1]["bundle"]

        point(current, bundles.b)
        load.more(20)
        assert served() == id_of(bundles.a)
        hup()
        eventually(lambda: served() == id_of(bundles.b))
        point(current, bundles.silent)
        hup()
        eventually(lambda: any("queries of late" in line for line in server.said))
        assert served() == id_of(bundles.b)
        assert server.process.poll() is None
        # Each one counts: what the link leads to at the last is what is served at last.
        for turn in range(5):
            point(current, (bundles.a, bundles.b)[turn % 2])
            hup()
            time.sleep(0.03)
        eventually(lambda: served() == id_of(bundles.a))
        load.more(20)
        assert load.wrong == []
        assert set(load.statuses) == {200}
        assert total(server.address, "bidmatch_reloads_total", outcome="refused") == 1
        assert total(server.address, "bidmatch_reloads_total", outcome="taken") >= 2


def test_watching_a_link(start: Callable, bundles: Bundles, current: Path) -> None:
    with start("--bundle", str(current), "--watch") as server, Load(server.address, bundles.check) as load:

        def served() -> str:
            return call(server.address, "GET", "/readyz")[1]["bundle"]

        for bundle in (bundles.b, bundles.a):
            point(current, bundle)
            eventually(lambda bundle=bundle: served() == id_of(bundle))
        # Another one that was asked for stays, for the path has not changed. Until the one before has taken
        # over in all of the service, another one is refused.
        eventually(lambda: reload(server, bundles.b)[0] == 200)
        current.unlink()
        time.sleep(2.5)
        assert served() == id_of(bundles.b)
        current.symlink_to(bundles.silent)
        eventually(lambda: any("queries of late" in line for line in server.said))
        assert served() == id_of(bundles.b)
        current.unlink()
        current.symlink_to(bundles.a)
        eventually(lambda: served() == id_of(bundles.a))
        load.more(20)
        assert load.wrong == []
        assert set(load.statuses) == {200}
        # What is refused is said once, not at every look.
        assert sum("bundle refused" in line for line in server.said) == 1


def test_watching_a_folder_of_bundles(start: Callable, bundles: Bundles, tmp_path: Path) -> None:
    folder = tmp_path / "bundles"
    first = variant(bundles.a, folder / "2024-05-01", created="2024-05-01T00:00:00+00:00")
    with start("--bundle", str(folder), "--watch", "--workers", "2") as server:

        def served() -> str:
            return call(server.address, "GET", "/readyz")[1]["bundle"]

        assert served() == id_of(first)
        # Written elsewhere and renamed, as an export does.
        second = variant(bundles.a, folder / "2024-05-02", mark="C-", created="2024-05-02T00:00:00+00:00")
        eventually(lambda: served() == id_of(second))
        assert serving(server, 2) == {id_of(second)}
        # Copied in place, file by file, the manifest first.
        third = variant(bundles.a, tmp_path / "aside", mark="D-", created="2024-05-03T00:00:00+00:00")
        slow = folder / "2024-05-03"
        slow.mkdir()
        for file in sorted(third.iterdir(), key=lambda file: file.name != "manifest.json"):
            shutil.copyfile(file, slow / file.name)
            time.sleep(0.4)
        eventually(lambda: served() == id_of(third))
        # One that says it was made before is no newer.
        variant(bundles.a, folder / "z-old", mark="E-", created="2024-04-01T00:00:00+00:00")
        time.sleep(2.5)
        assert served() == id_of(third)
        # The newest one is taken away again: what is left is what there is.
        shutil.rmtree(slow)
        eventually(lambda: served() == id_of(second))
        assert serving(server, 2) == {id_of(second)}


def test_a_link_that_leads_to_itself_is_no_bundle(start: Callable, bundles: Bundles, current: Path) -> None:
    with start("--bundle", str(current), "--watch") as server:
        current.unlink()
        current.symlink_to(current)
        time.sleep(2.5)
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: any("bundle refused" in line for line in server.said))
        status, answer = call(server.address, "POST", "/admin/reload", {"bundle": str(current)})[:2]
        assert (status, answer["type"]) == (422, "urn:bidmatch:bundle-refused")
        assert "there is no such folder" in answer["detail"]
        assert call(server.address, "POST", "/match", {"query": "red tent"})[0] == 200
        current.unlink()
        current.symlink_to(bundles.b)
        eventually(lambda: call(server.address, "GET", "/readyz")[1]["bundle"] == id_of(bundles.b))
        assert "Traceback" not in server.text()


def test_the_bundle_that_answers_may_be_deleted(start: Callable, bundles: Bundles, tmp_path: Path) -> None:
    """What is mapped stays; a worker that is started anew has it from the parent."""
    copy = tmp_path / "copy"
    shutil.copytree(bundles.b, copy)
    with start("--workers", "1") as server:
        assert reload(server, copy)[0] == 200
        shutil.rmtree(copy)
        (worker,) = workers_of(server, 1)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: children(server.process.pid) not in ([], [worker]))
        (again,) = workers_of(server, 1)
        assert again != worker
        answer = call(server.address, "POST", "/match", {"query": "red running shoes", "k": 3})[1]
        assert answer["bundle"] == id_of(bundles.b)
        assert bundles.check(answer) is None
        assert reload(server, bundles.a)[0] == 200


def test_nothing_grows_over_50_swaps(start: Callable, bundles: Bundles, tmp_path: Path) -> None:
    with start("--live", str(tmp_path / "live")) as server, Load(server.address, connections=2):
        phrases = [{"id": f"live-{n}", "text": f"live tent {n}"} for n in range(300)]
        assert call(server.address, "POST", "/phrases", {"phrases": phrases})[0] == 200
        processes = [server.process.pid, *workers_of(server, 1)]

        def look() -> list[tuple[int, int, int]]:
            def of_bundles(names: Any) -> int:
                return sum(str(one.parent) in name for name in names for one in (bundles.a, bundles.b))

            return [
                (
                    of_bundles(open_files(pid)),
                    of_bundles(mapped_files(pid).elements()),
                    anonymous_kb(pid),
                )
                for pid in processes
            ]

        alone = look()
        seen = []
        for turn in range(50):
            assert reload(server, (bundles.b, bundles.a)[turn % 2])[0] == 200
            seen.append(look())
        most_open = max(one[0] for one in alone)
        most_mapped = max(one[1] for one in alone)
        for before, after in zip(seen[14], seen[-1], strict=True):
            # Two bundles are open at most, while requests that began with the first are answered.
            assert after[0] <= 2 * most_open
            assert after[1] <= 2 * most_mapped
            assert after[2] < before[2] + 16_000
        assert processes == [server.process.pid, *workers_of(server, 1)]
