"""A file of matches as a side: which matches each query of a log gets, and what phrases are told by."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bidmatch.base import text
from bidmatch.base.errors import ConfigError, InputError
from service.comparing.given import FileSide
from service.comparing.identity import tell_apart
from service.comparing.sides import By
from service.scoring.distinct import PART_QUERIES, LogCounts, write_distinct
from service.scoring.queries import BadLines


def given(tmp_path: Path, content: str, name: str = "m.tsv") -> FileSide:
    (tmp_path / name).write_text(content, encoding="utf-8")
    side = FileSide(tmp_path / name, tmp_path / f"{name}.scratch")
    side.read(BadLines(skip=False), lambda done: None)
    return side


def log(tmp_path: Path, queries: list[str]) -> Path:
    path = tmp_path / "queries.arrow"
    write_distinct([pa.array(queries, pa.large_string())], LogCounts(), path, tmp_path / "work")
    return path


def answered(side: FileSide, tmp_path: Path, queries: list[str], by: By, k: int) -> list[list[str]]:
    side.look_up(log(tmp_path, queries), by, k)
    found: list[list[str]] = []
    for part in range(-(-len(queries) // PART_QUERIES)):
        members = queries[part * PART_QUERIES : (part + 1) * PART_QUERIES]
        answers = side.answers(part, members)
        phrases = answers.phrases.to_pylist()
        ends = np.searchsorted(answers.rows, np.arange(len(members) + 1))
        found += [phrases[low:high] for low, high in pairwise(ends.tolist())]
    return found


def test_ranks_duplicates_spellings_and_k(tmp_path: Path) -> None:
    side = given(
        tmp_path,
        "query\tphrase\trank\nRed  Hose\tthird\t3\nred hose\tfirst\t1\nother\tx\t1\nRED HOSE\tFirst\t2\n"
        "red hose\tfourth\t4\nred hose\tsecond\t3\n\u200b\tinvisible\t1\n",
    )
    queries = ["unheard of", "red hose"]
    # "First" is "first", third and second share a rank, so that the row counts; fourth is beyond k.
    assert answered(side, tmp_path, queries, "text", 3) == [[], ["first", "third", "second"]]
    assert (side.matches, side.known) == (7, 3)


def test_row_order_is_the_rank_where_there_is_none_and_ids_tell(tmp_path: Path) -> None:
    side = given(tmp_path, "query,id,phrase\nx,2,same\nx,1,same\nx,2,other\nx,3,z\n", "m.csv")
    assert answered(side, tmp_path, ["x"], "id", 10) == [["same", "same", "z"]]


def test_ids_stand_for_phrases_without_texts(tmp_path: Path) -> None:
    side = given(tmp_path, "query,id\nx,2\nx,1\n", "m.csv")
    assert side.holds == {"id"}
    assert answered(side, tmp_path, ["x"], "id", 10) == [["2", "1"]]


def test_many_queries_agree_with_a_dictionary(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    queries = [f"query {number}" for number in range(2 * PART_QUERIES + 100)]
    rows = [
        (queries[at].upper() if at % 2 else queries[at], f"Phrase {phrase}")
        for at, phrase in zip(rng.integers(0, len(queries), 60_000), rng.integers(0, 40, 60_000), strict=True)
        if not PART_QUERIES <= at < 2 * PART_QUERIES  # a whole part without any match
    ]
    expected: dict[str, dict[str, None]] = {}
    for query, phrase in rows:
        expected.setdefault(text.key(query), {})[phrase] = None
    side = given(tmp_path, "query\tphrase\n" + "".join(f"{query}\t{phrase}\n" for query, phrase in rows))
    assert answered(side, tmp_path, queries, "text", 4) == [
        list(expected.get(one, {}))[:4] for one in queries
    ]


def test_files_of_one_side_need_the_same_columns(tmp_path: Path) -> None:
    folder = tmp_path / "matches"
    folder.mkdir()
    (folder / "a.tsv").write_text("query\tid\tphrase\nx\t1\ty\n")
    (folder / "b.tsv").write_text("query\tphrase\nx\ty\n")
    with pytest.raises(InputError, match=r"b.tsv: has no column 'id', which .*a.tsv has"):
        FileSide(folder, tmp_path / "scratch")
    (folder / "b.tsv").write_text("")
    assert [file.name for file in FileSide(folder, tmp_path / "scratch").files] == ["a.tsv", "b.tsv"]
    (folder / "a.tsv").write_text("")
    with pytest.raises(InputError, match="holds no matches"):
        FileSide(folder, tmp_path / "more")


A = "query\tid\tphrase\nq\t1\tred\nq\t2\tgreen\nq\t3\tblue\n"


@pytest.mark.parametrize(
    ("other", "wanted", "by", "note"),
    [
        (A.replace("red", "RED").replace("green", " green"), None, "id", None),
        (
            A.replace("red", "scarlet"),
            None,
            "id",
            "1 of the 3 sampled ids .* have another text in B",
        ),
        (A.replace("red", "x").replace("green", "y"), None, "text", "2 of the 3 sampled ids .* not by id"),
        (
            A.replace("red", "x").replace("green", "y"),
            "id",
            "id",
            "2 of the 3 .* alike by chance",
        ),
        ("query\tid\tphrase\nq\t9\tred\n", None, "text", "none of 1 sampled ids is in both A and B, so"),
        ("query\tphrase\nq\tred\n", None, "text", None),
        ("query\tid\nq\t2\n", None, "id", None),
        ("query\tid\nq\t9\n", None, "id", "none of 1 sampled ids is in both A and B"),
        (A, "text", "text", None),
    ],
)
def test_what_tells_phrases_apart(
    tmp_path: Path, other: str, wanted: By | None, by: By, note: str | None
) -> None:
    found = tell_apart(given(tmp_path, A, "a.tsv"), given(tmp_path, other, "b.tsv"), wanted)
    assert found.by == by
    assert len(found.notes) == (note is not None)
    if note is not None:
        assert re.search(note, found.notes[0])


def test_nothing_tells_phrases_apart(tmp_path: Path) -> None:
    ids, texts = (
        given(tmp_path, "query\tid\nq\t1\n", "a.tsv"),
        given(tmp_path, "query\tphrase\nq\tx\n", "b.tsv"),
    )
    with pytest.raises(ConfigError, match="nothing tells which phrases are the same"):
        tell_apart(ids, texts, None)
    with pytest.raises(ConfigError, match=r"--by id needs a column 'id', and .*b.tsv has none"):
        tell_apart(ids, texts, "id")


def test_samples_of_two_files_share_what_the_files_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.comparing.given.SAMPLED", 50)
    a, b = (
        given(
            tmp_path,
            "query\tid\tphrase\n" + "".join(f"q\t{one}\tphrase {one}\n" for one in ids),
            f"{ids.start}.tsv",
        )
        for ids in (range(0, 40_000), range(20_000, 60_000))
    )
    sample = a.sample()
    assert len(sample) == len(b.sample()) == 50
    assert all(one == f"phrase {number}" for number, one in sample.items())
    shared = b.texts_of(list(sample))
    assert 5 < len(shared) < 45
    assert all(int(one) >= 20_000 for one in shared)
