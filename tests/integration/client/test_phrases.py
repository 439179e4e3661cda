"""Phrases, rules on them and administration, against the real service."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bidmatch import client as api
from bidmatch.base.text import key
from export.bundle.read import read_manifest

Connect = Callable[..., Any]


@pytest.fixture
def admin(connect: Connect, with_keys: Any) -> Any:
    """Either client, with an admin key."""
    return connect(with_keys.url, api_key=with_keys.admin_key, timeout=30)


@pytest.fixture
def caller(connect: Connect, with_keys: Any) -> Any:
    """Either client, with a key for matching."""
    return connect(with_keys.url, api_key=with_keys.match_key, timeout=30)


def ids(answer: api.Answer) -> list[str]:
    return [match.id for match in answer.matches]


def test_the_life_of_a_phrase(admin: Any, caller: Any) -> None:
    columns = {"match_type": "phrase", "negative_keywords": ["used", '"for sale"'], "bid": 0.5}
    put = admin.put_phrases([api.NewPhrase("n1", "Red Tent", columns), api.NewPhrase("n2", "blue tent")])
    assert [phrase.id for phrase in put] == ["n1", "n2"]
    first = put[0]
    assert (first.text, first.columns, first.state, first.source) == ("Red Tent", columns, "active", "live")
    assert abs(datetime.now(UTC) - first.changed) < timedelta(minutes=1)
    assert admin.get_phrase("n1") == first
    assert admin.get_phrase("n2").columns == {}

    def matched() -> bool:
        return "n1" in ids(caller.match("red tent", k=50))

    (live,) = [match for match in caller.match("cheap red tent", k=300).matches if match.id == "n1"]
    assert (live.source, live.phrase) == ("live", "Red Tent")
    assert live.columns["match_type"] == "phrase"
    assert matched()
    assert "n1" not in ids(caller.match("used red tent", k=300))
    assert admin.pause("n1").state == "paused"
    assert admin.get_phrase("n1").state == "paused"
    assert not matched()
    assert admin.resume("n1").state == "active"
    assert matched()
    for _ in range(2):
        assert admin.remove("n1").state == "removed"
    assert not matched()
    with pytest.raises(api.Conflict) as caught:
        admin.resume("n1")
    assert (caught.value.status, caught.value.kind) == (409, "phrase-removed")
    assert admin.put_phrases([api.NewPhrase("n1", "red tent")])[0].state == "active"
    assert matched()


def test_a_phrase_of_the_bundle(admin: Any, caller: Any) -> None:
    phrase = admin.get_phrase("p18")
    assert (phrase.text, phrase.source, phrase.state) == ("cheap tent", "bundle", "active")
    assert (phrase.columns["market"], phrase.columns["negative_keywords"]) == ("us", ["used"])
    assert admin.pause("p18").state == "paused"
    assert "p18" not in ids(caller.match("cheap tent", k=50))
    assert admin.resume("p18").state == "active"
    assert "p18" in ids(caller.match("cheap tent", k=50))


@pytest.mark.parametrize(
    "id", ["a/b", "..", ".", "../match", "a?b#c", "100%", "%2F", "größe 👟", " ", "p/pause"]
)
def test_any_id(admin: Any, id: str) -> None:
    admin.put_phrases([api.NewPhrase(id, "tent")])
    assert admin.get_phrase(id).id == id
    assert admin.pause(id).state == "paused"
    assert admin.resume(id).state == "active"
    assert admin.remove(id).id == id


def test_a_phrase_that_is_not_there(admin: Any) -> None:
    for method in (admin.get_phrase, admin.pause, admin.resume, admin.remove):
        with pytest.raises(api.NotFound, match="404 no-such-phrase: There is no phrase 'nowhere'"):
            method("nowhere")


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (api.NewPhrase("n9", " "), "body.phrases.1.text"),
        (api.NewPhrase("", "tent"), "body.phrases.1.id"),
        (api.NewPhrase("n9", "tent", {"colour": "red"}), "body.phrases.1.columns.colour"),
        (api.NewPhrase("n9", "tent", {"bid": "much"}), "body.phrases.1.columns.bid"),
    ],
)
def test_phrases_that_are_refused(admin: Any, wrong: api.NewPhrase, where: str) -> None:
    with pytest.raises(api.InvalidRequest) as caught:
        admin.put_phrases([api.NewPhrase("n8", "tent"), wrong])
    assert [error.where for error in caught.value.errors] == [where]
    with pytest.raises(api.NotFound):
        admin.get_phrase("n8")


def test_without_a_folder_for_them(connect: Connect, server: Any) -> None:
    with pytest.raises(api.NotFound) as caught:
        connect(server.url, timeout=20).put_phrases([api.NewPhrase("n1", "tent")])
    assert caught.value.kind == "live-phrases-off"


def test_what_cannot_be_stored_is_stored_later(without_keys: Any) -> None:
    """Another process holds the store's lock until the service has given the change up once."""
    with (
        api.Client(without_keys.url, timeout=60, retries=1) as client,
        ThreadPoolExecutor(1) as pool,
        closing(sqlite3.connect(without_keys.live / "live.db", isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        put = pool.submit(client.put_phrases, [api.NewPhrase("late", "tent")])
        until = time.monotonic() + 50
        while not refused(client.metrics()) and time.monotonic() < until:
            time.sleep(0.05)
        other.execute("ROLLBACK")
        assert put.result(60)[0].state == "active"
        assert refused(client.metrics())
        assert client.get_phrase("late").text == "tent"


def refused(metrics: str) -> bool:
    """Whether a change was answered 503."""
    return any('"/phrases"' in line and '"503"' in line for line in metrics.splitlines())


def test_filters(caller: Any) -> None:
    every = caller.match("red running shoes", k=300).matches

    def found(filter: api.Filter) -> list[str]:
        return ids(caller.match("red running shoes", k=300, filter=filter))

    def expected(holds: Callable[[Any], bool]) -> list[str]:
        chosen = [match.id for match in every if holds(match.columns)]
        assert 0 < len(chosen) < len(every)
        return chosen

    assert set(found({"market": "de"})) == set(expected(lambda has: has.get("market") == "de"))
    assert set(found({"market": ["de", "fr"], "bid": {"gte": 0.25, "lt": 2.0}})) == set(
        expected(lambda has: has.get("market") in ("de", "fr") and 0.25 <= (has.get("bid") or 0) < 2)
    )
    assert set(found({"market": {"not": ["us", "de"]}})) == set(
        expected(lambda has: has.get("market") not in ("us", "de"))
    )
    assert found({"market": "nowhere"}) == []


def test_lists_and_distinct(caller: Any) -> None:
    best = ids(caller.match("red running shoes", k=5))
    assert ids(caller.match("red running shoes", k=5, allow=iter(best[2:4]))) == best[2:4]
    assert caller.match("red running shoes", k=5, allow=[]).matches == ()
    assert not set(ids(caller.match("red running shoes", k=50, deny=best[:2]))) & set(best[:2])
    both = caller.match("red running shoes", k=50).matches
    once = caller.match("red running shoes", k=50, distinct=True).matches
    assert {"p0", "p1"} <= {match.id for match in both}
    texts = [key(match.phrase) for match in once]
    assert len(texts) == len(set(texts))
    assert len({"p0", "p1"} & {match.id for match in once}) == 1


def test_several_queries_under_rules(caller: Any) -> None:
    rules: dict[str, Any] = {"k": 5, "filter": {"market": "de"}, "deny": ["p17"], "min_score": -1.0}
    answers = caller.match_many(["red running shoes", "tent"], **rules, deadline_ms=9000)
    for result in answers.results:
        assert result.matches == caller.match(result.query, **rules).matches
        assert {match.columns["market"] for match in result.matches} == {"de"}


@pytest.mark.parametrize("method", ["get_phrase", "pause", "resume", "remove", "explain", "reload"])
def test_keys(connect: Connect, with_keys: Any, method: str) -> None:
    for api_key, status in ((None, 401), ("x" * 40, 401), (with_keys.match_key, 403)):
        client = connect(with_keys.url, api_key=api_key, timeout=20)
        with pytest.raises(api.Unauthorized) as caught:
            getattr(client, method)("p0")
        assert caught.value.status == status
        assert client.ready()


def test_keys_for_matching(connect: Connect, with_keys: Any) -> None:
    for api_key in (None, "x" * 40):
        with pytest.raises(api.Unauthorized):
            connect(with_keys.url, api_key=api_key, timeout=20).match("tent")
    for api_key in (with_keys.match_key, with_keys.admin_key):
        assert connect(with_keys.url, api_key=api_key, timeout=20).match("tent").matches


def test_reload(admin: Any, caller: Any, with_keys: Any) -> None:
    first, second = (read_manifest(path).bundle_id for path in (with_keys.bundle, with_keys.other))
    assert caller.match("red tent").bundle == first
    admin.put_phrases([api.NewPhrase("stays", "red tent")])
    done = admin.reload(str(with_keys.other))
    assert (done.bundle, done.previous) == (second, first)
    assert done.phrases == read_manifest(with_keys.other).counts.phrases
    assert done.live_phrases >= 1
    assert done.agreement is None or 0 <= done.agreement <= 1
    assert done.seconds > 0
    assert caller.match("red tent").bundle == second
    assert "stays" in ids(caller.match("red tent"))
    back = admin.reload()
    assert (back.bundle, back.previous) == (first, second)
    assert back.phrases == done.phrases + 100
    with pytest.raises(api.InvalidRequest, match="422 bundle-refused: ") as caught:
        admin.reload(str(with_keys.live))
    assert caught.value.kind == "bundle-refused"
    assert caller.match("red tent").bundle == first


def test_one_reload_at_a_time(with_keys: Any) -> None:
    async def reload() -> list[Any]:
        async with api.AsyncClient(with_keys.url, api_key=with_keys.admin_key) as client:
            return await asyncio.gather(*(client.reload() for _ in range(8)), return_exceptions=True)

    done = asyncio.run(reload())
    assert {type(one) for one in done} == {api.Reload, api.Conflict}
    assert {one.kind for one in done if isinstance(one, api.Conflict)} == {"reload-running"}


def test_explain(admin: Any, caller: Any) -> None:
    admin.put_phrases(
        [
            api.NewPhrase("e1", "red tent", {"match_type": "phrase", "negative_keywords": ["used"]}),
            api.NewPhrase("e2", "red tent"),
            api.NewPhrase("e3", "red tent"),
        ]
    )
    admin.pause("e3")
    asked = ["e1", "e2", "e3", "p0", "nowhere"]
    found = admin.explain("used Red tent", k=3, deny=["e2"], filter={"market": {"not": "de"}}, ids=asked)
    assert (found.query, found.tokens, found.words) == ("used red tent", *[("used", "red", "tent")] * 2)
    assert found.missing == ("nowhere",)
    assert found.bundle == caller.match("tent").bundle
    assert found.ef > 0
    assert found.depth >= 3
    assert 0 < found.admitted < 305
    assert found.searched in ("graph", "comparison")
    assert found.rescored is False
    dropped = {one.id: one.dropped for one in found.candidates}
    assert {id: dropped[id] for id in asked[:4]} == {
        "e1": "negative keyword: used",
        "e2": "deny: in the list",
        "e3": "paused",
        "p0": "filter: market: the phrase has de",
    }
    matches = caller.match("used Red tent", k=3, deny=["e2"], filter={"market": {"not": "de"}}).matches
    ranked = [one for one in found.candidates if one.rank is not None]
    assert [one.rank for one in ranked] == [1, 2, 3]
    for one, match in zip(ranked, matches, strict=True):
        assert (one.id, one.phrase, one.source, one.dropped) == (match.id, match.phrase, match.source, None)
        assert one.score == pytest.approx(match.score, abs=1e-5)
        assert (one.encoder, one.classifier) == pytest.approx((match.encoder, match.classifier), abs=1e-5)
