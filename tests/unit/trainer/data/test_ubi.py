from __future__ import annotations

import json

import pytest

from bidmatch.base.errors import InputError
from trainer.data.read import ReadOptions, read_log


def event(action="click", query_id="q1", object_id="p1", **more):
    attributes = {"object": {"object_id": object_id, "object_id_field": "sku"}, "position": {"ordinal": 1}}
    return {
        "action_name": action,
        "query_id": query_id,
        "client_id": "c",
        "event_attributes": attributes,
        **more,
    }


def query(query_id="q1", user_query="Red Shoes"):
    return {"application": "shop", "query_id": query_id, "client_id": "c", "user_query": user_query}


@pytest.fixture
def write(tmp_path):
    def write_lines(name, values):
        path = tmp_path / name
        path.write_text(
            "".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values)
        )
        return path

    return write_lines


@pytest.fixture
def files(write):
    events = write(
        "events",
        [
            event("impression"),
            event(),
            event("item_click", "q2", "p2"),
            event(),
            event(query_id="unknown"),
            event(query_id=None, user_query="hat"),
            event(object_id="p9"),
        ],
    )
    return [events, write("queries", [query(), query("q2", "red  shoes"), query("q3", "unused")])]


PHRASES = {
    "csv": "id,text\np1,Running shoes\np2,Hat\np3,never clicked\n",
    "tsv without header": "p1\tRunning shoes\np2\tHat\n",
    "jsonl": '{"sku": "p1", "title": "Running shoes"}\n{"sku": "p2", "title": "Hat"}\n',
}


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
@pytest.mark.parametrize("name", PHRASES)
def test_the_named_encoding_is_not_that_of_json(files, tmp_path, name, encoding):
    own = "utf-8" if name == "jsonl" else encoding
    (tmp_path / "phrases").write_text(PHRASES[name].replace("Hat", "Hüte"), encoding=own)
    log = read_log(files, ReadOptions(phrases=tmp_path / "phrases", encoding=encoding))
    assert log.phrases["text"].to_pylist() == ["Hüte", "Running shoes"]


@pytest.mark.parametrize("form", PHRASES)
def test_clicks_join_queries_and_phrases(files, write, pairs_of, form):
    phrases = write("phrases", [PHRASES[form].rstrip("\n")])
    log = read_log(files, ReadOptions(phrases=phrases))
    assert pairs_of(log.phrases, log.interactions) == {
        ("red shoes", "Running shoes", ""): 2,
        ("red shoes", "Hat", ""): 1,
        ("hat", "Running shoes", ""): 1,
    }
    assert {row["text"]: row["id"] for row in log.phrases.to_pylist()} == {"Running shoes": "p1", "Hat": "p2"}
    assert log.report.skipped == {
        "event is no click (action impression)": 1,
        "click whose query is not known (its query_id is in no ubi_queries file)": 1,
        "click on an object that is not in the --phrases file": 1,
    }
    assert "User Behavior Insights events" in log.report.format
    assert "User Behavior Insights queries" in log.report.format


def test_order_of_the_files_does_not_matter(files, write):
    options = ReadOptions(phrases=write("phrases", [PHRASES["csv"].rstrip("\n")]))
    assert read_log(files, options).report.fingerprint == read_log(files[::-1], options).report.fingerprint


def test_dump_of_a_search_engine_is_unwrapped(write, pairs_of):
    lines = [
        {"index": {"_index": "ubi_events"}},
        event(user_query="a"),
        {"_index": "x", "_source": event(user_query="a")},
    ]
    phrases = write("phrases", [PHRASES["csv"].rstrip("\n")])
    for first in (0, 1, 2):
        log = read_log([write("events", lines[first:] + lines[:first])], ReadOptions(phrases=phrases))
        assert pairs_of(log.phrases, log.interactions) == {("a", "Running shoes", ""): 2}


def test_other_actions_by_option(files, write):
    options = ReadOptions(phrases=write("phrases", [PHRASES["csv"].rstrip("\n")]), actions=("impression",))
    assert read_log(files, options).report.pairs == 1


def test_objects_without_texts_ask_for_the_phrases_file(files):
    with pytest.raises(InputError, match="click names object p1") as caught:
        read_log(files)
    assert caught.value.line == 2
    assert "--phrases FILE" in caught.value.hint


def test_objects_that_carry_their_own_name_need_no_file(write, pairs_of):
    value = event(user_query="a")
    value["event_attributes"]["object"]["name"] = "Trail shoes"
    log = read_log([write("events", [value])])
    assert pairs_of(log.phrases, log.interactions) == {("a", "Trail shoes", ""): 1}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"action_name": "click", "query_id": "q", "user_query": "a", "event_attributes": {}}, "object_id"),
        ({"action_name": 5, "query_id": "q", "user_query": "a"}, "action_name"),
        ("{broken", "not valid JSON"),
    ],
)
def test_bad_events(write, line, reason):
    path = write("events", [event(user_query="a"), line])
    options = {"phrases": write("phrases", [PHRASES["csv"].rstrip("\n")])}
    with pytest.raises(InputError) as caught:
        read_log([path], ReadOptions(**options))
    assert caught.value.line == 2
    assert reason in caught.value.reason
    assert read_log([path], ReadOptions(**options, bad_lines="skip")).report.pairs == 1


@pytest.mark.parametrize("content", ["id,text\np1,a\np1,b", "x,y,z\n1,2,3", "p1,a\np2"])
def test_bad_phrase_files(files, write, content):
    with pytest.raises(InputError, match="phrases"):
        read_log(files, ReadOptions(phrases=write("phrases", [content])))
