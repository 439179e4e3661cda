from __future__ import annotations

from pathlib import Path

import pytest

from bidmatch.base.errors import InputError

from .test_query_files import read

GOOGLE = '''Search terms report
"July 1, 2026 - July 31, 2026"
Search term,Match type,Campaign,Keyword,Clicks,Impr.
running shoes,Exact match,Shoes,[running shoes],"1,204","15,870"
"shoes, red",Phrase match,Shoes,"""shoes""",40,512
="+1 shoes",Phrase match,Shoes,"""shoes""",1,9
total wine,Broad match,Drinks,wine,1,9
(Other search terms),--,--,--,7,99
Total: Search terms, --, --, --,"1,251","16,490"
Total: Account, --, --, --,"1,251","16,490"
'''
TERMS = ["running shoes", "shoes, red", "+1 shoes", "total wine"]


@pytest.mark.parametrize("name", ["report.csv", "report.txt"])
@pytest.mark.parametrize("column", [None, "Search term", "search_term", "1"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_search_terms_below_title_lines(tmp_path: Path, name: str, column: str | None, encoding: str) -> None:
    path = tmp_path / name
    path.write_text(GOOGLE, encoding=encoding)
    queries, layout, bad = read(path, column)
    assert queries == TERMS
    assert layout.name == "search terms report (CSV)"
    assert bad.left_out == {"total line": 2, "search term is hidden by the platform": 1}
    assert bad.count == 0


def test_tabs_and_no_date_in_quotes(tmp_path: Path) -> None:
    path = tmp_path / "report.csv"
    path.write_text(
        "Search terms report\nJuly 1, 2026 - July 9, 2026\nSearch term\tClicks\tCost\nred\t1\t2\n"
        "Total\t1\t2\n",
        encoding="utf-16",
    )
    assert read(path)[0] == ["red"]
    path.write_text("Report\nJuly 1, 2026 - July 31, 2026\nSearch term,Clicks,Cost\nred,1,2\nblue,1,2\n")
    assert read(path)[0] == ["red", "blue"]


def test_a_report_without_title_lines(tmp_path: Path) -> None:
    path = tmp_path / "amazon.csv"
    path.write_text(
        "Campaign Name,Targeting,Customer Search Term,Clicks\n"
        "A,bottle,steel bottle,3\nA,bottle,b07xyz12ab,1\nB,*,total recall,1\n"
    )
    queries, layout, bad = read(path)
    assert queries == ["steel bottle", "total recall"]
    assert layout.name.startswith("search terms report")
    assert bad.left_out == {"search term is a product (ASIN), not typed text": 1}


def test_a_row_of_another_width_is_bad_and_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "report.csv"
    rows = "".join(f"shoes {n},Exact match,S,k,1,2\n" for n in range(30))
    path.write_text(GOOGLE.replace("Total: Search", f"{rows}cut,Exact\nTotal: Search"))
    with pytest.raises(InputError, match="line 39: has 2 cells where there are 6"):
        read(path)
    queries, _, bad = read(path, skip=True)
    assert len(queries) == 34
    assert bad.count == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "deutsch.csv",
            "Bericht\n1. Juli 2026\nSuchbegriff,Kampagne,Klicks\nrot,A,1\nblau,A,2\n",
            r'line 3: looks like a search terms report.*not English[^\n]*\n.*--query-column "Suchbegriff"',
        ),
        ("deutsch.txt", "Suchbegriff,Kampagne,Klicks\nrot,A,1\nblau,A,2\n", "line 1: looks like"),
        ("deutsch.tsv", "Suchbegriff\tKampagne\tKlicks\nrot\tA\t1\nblau\tA\t2\n", "line 1: looks like"),
        (
            "keywords.csv",
            "Keyword report\nLast week\nKeyword,Campaign,Clicks\nred,A,1\nblue,A,2\n",
            r"line 3: no column is named as the query \(Keyword, Campaign, Clicks\)",
        ),
        ("keywords.tsv", "Keyword\tCampaign\tClicks\nred\tA\t1\nblue\tA\t2\n", "line 1: no column is named"),
        ("table.txt", "when,what,how\n1,red,2\n2,blue,3\n", "line 1: no column is named"),
    ],
)
def test_what_is_no_list_of_queries_is_never_read_as_one(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=reason):
        read(path)


def test_a_column_in_another_language_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "deutsch.csv"
    path.write_text("Bericht\nLetzte Woche\nSuchbegriff,Kampagne,Klicks\nrot,A,1\nblau,A,2\n")
    assert read(path, "Suchbegriff")[0] == ["rot", "blau"]


def test_a_missing_column_is_looked_for_in_the_header_line_and_not_in_a_title(tmp_path: Path) -> None:
    path = tmp_path / "report.csv"
    path.write_text(GOOGLE)
    with pytest.raises(InputError, match=r"no column 'queries'\n  The columns are: Search term, Match type"):
        read(path, "queries")


def test_queries_with_commas_are_lines_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    lines = ["red, blue", "search, query", "boots", "a, b, c", "hats, caps", "job search, q", "x"]
    path.write_text("".join(f"{line}\n" for line in lines))
    assert read(path)[0] == lines
