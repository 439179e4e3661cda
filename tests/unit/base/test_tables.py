from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidmatch.base.tables import table_records


def records(text: str, delimiter: str = ",", *, quoted: bool = True) -> list[tuple[int, list[str] | str]]:
    lines = io.StringIO(text, newline="")
    return list(table_records(enumerate(lines, 1), delimiter, quoted=quoted))


def test_records_and_their_first_lines() -> None:
    assert records('a,b\r\n"c\nd",e\n\nf,"g""h"\n') == [
        (1, ["a", "b"]),
        (2, ["c\nd", "e"]),
        (4, []),
        (5, ["f", 'g"h']),
    ]
    assert records('a\t"b\nc\td', "\t", quoted=False) == [(1, ["a", '"b']), (2, ["c", "d"])]


@pytest.mark.parametrize("behind", [1, 3, 200_000])
def test_a_quotation_mark_that_stands_alone_takes_no_other_line_with_it(behind: int) -> None:
    """Also where the cell grows too large to be one."""
    found = records('a,1\n"b,2\n' + "c,3\n" * behind)
    assert found[0] == (1, ["a", "1"])
    assert found[1] == (2, 'a quotation mark (") is opened and never closed')
    assert found[2:] == [(line, ["c", "3"]) for line in range(3, 3 + behind)]


def test_several_that_stand_alone() -> None:
    found = records('"a,1\n"b,2\nc,3\n"d,4\ne,5\n')
    assert [line for line, _ in found] == [1, 2, 3, 4, 5]
    assert [one for _, one in found if isinstance(one, list)] == [["c", "3"], ["e", "5"]]
    assert "stands in the middle" in found[0][1]


@given(st.lists(st.lists(st.text('ab",\n;', max_size=4), min_size=2, max_size=2), max_size=6))
def test_what_csv_writes_is_read_back(rows: list[list[str]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows(rows)
    assert [cells for _, cells in records(out.getvalue())] == rows
