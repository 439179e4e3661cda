from __future__ import annotations

import csv
import io

import openpyxl
import pytest

from bidmatch.base.errors import InputError
from trainer.data.read import ReadOptions, read_log

GOOGLE = {
    ("running shoes", "running shoes", "exact"): 1214,
    ("womens running shoes", "running shoes", "exact"): 87,
    ("cheap running shoes near me", "running shoes", "phrase"): 40,
    ("trail running shoes", "trail shoes", "broad"): 19,
    ("best shoes for trail running", "trail running shoes", "broad"): 6,
    ("zapatillas de correr", "zapatillas de correr", "broad"): 3,
}
MICROSOFT = {
    ("robot lawn mower", "lawn mower", "broad"): 112,
    ("lawn mower", "lawn mower", "exact"): 301,
    ("lawn mowers", "lawn mower", "exact"): 21,
    ("garden hose 50 ft", "garden hose", "phrase"): 9,
    ('hose "heavy duty"', "garden hose", "phrase"): 2,
}
AMAZON = {
    ("steel water bottle", "steel water bottle", "exact"): 61,
    ("stainless steel water bottle 32 oz", "steel water bottle", "broad"): 30,
    ("kids bottle with straw", "kids bottle", "phrase"): 4,
}


def rows_of(samples, name):
    with (samples / name).open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


def as_text(rows, delimiter, quoting=csv.QUOTE_MINIMAL):
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator="\r\n").writerows(rows)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "platform", "expected"),
    [
        ("google_ads.csv", "Google Ads", GOOGLE),
        ("microsoft_advertising.csv", "Microsoft Advertising", MICROSOFT),
        ("amazon_ads.csv", "Amazon Ads", AMAZON),
    ],
)
class TestEachPlatform:
    def test_utf8_csv(self, read, samples, name, platform, expected):
        pairs, log = read((samples / name).read_bytes())
        assert pairs == expected
        assert log.report.format == f"{platform} search terms report (CSV, UTF-8)"

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
    def test_tab_separated_in_every_encoding(self, read, samples, name, platform, expected, encoding):
        text = as_text(rows_of(samples, name), "\t")
        pairs, log = read(text.encode(encoding), name=name)
        assert pairs == expected
        assert log.report.format.startswith(f"{platform} search terms report (TSV, ")

    def test_workbook(self, tmp_path, samples, pairs_of, name, platform, expected):
        book = openpyxl.Workbook()
        book.active.append(["Read me first"])
        sheet = book.create_sheet("Search terms")
        for row in rows_of(samples, name):
            sheet.append([as_cell(cell) for cell in row])
        path = tmp_path / "report.bin"
        book.save(path)
        log = read_log([path])
        assert pairs_of(log.phrases, log.interactions) == expected
        assert log.report.format == f"{platform} search terms report (Excel, sheet 'Search terms')"

    def test_same_fingerprint_and_counts_in_every_form(self, read, samples, name, platform, expected):
        _, plain = read((samples / name).read_bytes(), name="a")
        _, quoted = read(as_text(rows_of(samples, name), ";", csv.QUOTE_ALL).encode("utf-16"), name="b")
        assert quoted.report.fingerprint == plain.report.fingerprint
        assert quoted.report.skipped == plain.report.skipped
        assert quoted.phrases.equals(plain.phrases)


def as_cell(cell):
    plain = cell.replace(",", "")
    return int(plain) if plain.isdigit() else cell


def test_google_counts_what_it_leaves_out(read, samples):
    _, log = read((samples / "google_ads.csv").read_bytes())
    assert log.report.rows == 12
    assert log.report.duplicates_merged == 1
    assert log.report.skipped == {
        "total line": 2,
        "target is no keyword: dynamic search ads": 1,
        "target is no keyword: Performance Max": 1,
        "weight is 0 (no clicks)": 1,
    }
    assert log.report.columns == {"query": "Search term", "phrase": "Keyword", "weight": "Clicks"}
    assert "July 1, 2026 - July 31, 2026" in log.report.notes[0]
    assert "5 phrases are 4 texts" in log.report.notes[-1]


def test_microsoft_counts_what_it_leaves_out(read, samples):
    _, log = read((samples / "microsoft_advertising.csv").read_bytes())
    assert log.report.skipped == {
        "target is no keyword: empty (dynamic search ads, Performance Max or shopping)": 1,
        "copyright line": 1,
        "weight is 0 (no clicks)": 1,
    }
    assert log.report.columns["match_type"] == "Bid match type"


def test_amazon_counts_targets_that_are_no_keyword(read, samples):
    _, log = read((samples / "amazon_ads.csv").read_bytes())
    assert log.report.skipped == {
        "target is no keyword: automatic targeting": 2,
        "target is no keyword: product (ASIN)": 1,
        "target is no keyword: product category": 1,
        "search term is a product (ASIN), not typed text": 1,
        "weight is 0 (no clicks)": 1,
    }


def test_impressions_weigh_where_asked(read, samples):
    pairs, log = read((samples / "google_ads.csv").read_bytes(), weight="impressions")
    assert pairs["running shoes", "running shoes", "exact"] == 15870 + 121
    assert pairs["shoe size chart", "trail shoes", "broad"] == 44
    assert log.report.columns["weight"] == "Impr."


def test_one_text_in_two_match_types_is_two_phrases(read, samples):
    _, log = read((samples / "google_ads.csv").read_bytes())
    kinds = [row["match_type"] for row in log.phrases.to_pylist() if row["text"] == "running shoes"]
    assert sorted(kinds) == ["exact", "phrase"]


def test_phrase_notation_that_csv_quoting_would_swallow(read):
    text = (
        "Search terms report\n1 July 2026 - 31 July 2026\n"
        "Search term,Match type,Campaign,Keyword,Clicks\n"
        'buy red shoes,Phrase match,C,"red shoes",1\n'
        "red shoes,Exact match,C,[red shoes],2\nshoes,Broad match,C,shoes,3\n"
    )
    pairs, log = read(text)
    assert pairs == {
        ("buy red shoes", "red shoes", "phrase"): 1,
        ("red shoes", "red shoes", "exact"): 2,
        ("shoes", "shoes", "broad"): 3,
    }
    assert any("plain quotes" in note for note in log.report.notes)


def test_match_type_column_counts_where_keywords_have_no_notation(read):
    text = (
        "Search term\tSearch keyword\tSearch keyword match type\tMatch type\tClicks\n"
        "red shoe\tred shoes\tPhrase match\tExact match (close variant)\t5\n"
    )
    assert read(text)[0] == {("red shoe", "red shoes", "phrase"): 5}
    without = (
        "Search term\tKeyword\tMatch type\tCampaign\tClicks\n"
        "red shoe\tred shoes\tExact match (close variant)\tC\t5\n"
    )
    pairs, log = read(without, name="other")
    assert pairs == {("red shoe", "red shoes", "exact"): 5}
    assert log.report.columns["match_type"] == "Match type"


@pytest.mark.parametrize(
    "written", ["1,234", "1.234", "1 234", "1\u202f234", "1\u00a0234", "1'234", "1234", "1,234.00"]
)
def test_thousands_separators(read, written):
    text = f"Search term\tKeyword\tCampaign\tClicks\nred shoe\tred shoes\tC\t{written}\n"
    assert read(text)[0] == {("red shoe", "red shoes", ""): 1234}


def test_several_platforms_in_one_call_are_merged_and_named(samples, pairs_of):
    log = read_log(
        [samples / "google_ads.csv", samples / "amazon_ads.csv", samples / "microsoft_advertising.csv"]
    )
    assert pairs_of(log.phrases, log.interactions) == {**GOOGLE, **MICROSOFT, **AMAZON}
    for name in ("Google Ads", "Amazon Ads", "Microsoft Advertising"):
        assert name in log.report.format


def test_user_columns_of_the_phrase_are_kept(read, samples):
    _, log = read((samples / "microsoft_advertising.csv").read_bytes(), phrase_columns=("Ad group name",))
    assert {row["text"]: row["Ad group name"] for row in log.phrases.to_pylist()} == {
        "lawn mower": "Mowers",
        "garden hose": "Hoses",
    }
    with pytest.raises(InputError, match="Currency differs within one phrase"):
        read("query\tphrase\tCurrency\na\tx\tUSD\nb\tx\tEUR\n", name="c", phrase_columns=("Currency",))


class TestBrokenReports:
    """What a marketer reads when a report cannot be used: where, why, what to do."""

    def fails(self, read, content, **options):
        with pytest.raises(InputError) as caught:
            read(content, name="report.csv", **options)
        assert "report.csv" in str(caught.value)
        return caught.value

    def test_no_keyword_column(self, read):
        above = 'Search terms report\n"July 1, 2026 - July 31, 2026"\n'
        error = self.fails(read, above + "Search term,Match type,Added/Excluded,Campaign,Clicks\na,b,c,d,1\n")
        assert error.line == 3
        assert "has no Keyword column" in error.reason
        assert "Columns" in error.hint

    def test_no_clicks_column(self, read, samples):
        text = (samples / "google_ads.csv").read_text().replace(",Clicks,", ",Klicks,")
        error = self.fails(read, text)
        assert "has no Clicks column" in error.reason
        assert "--weight impressions" in error.hint

    def test_clicks_are_no_number(self, read, samples):
        text = (samples / "google_ads.csv").read_text().replace(",87,", ",eighty,")
        error = self.fails(read, text)
        assert error.line == 5
        assert error.reason.endswith("Clicks is 'eighty', not a number")
        assert "--bad-lines skip" in error.hint

    def test_negative_clicks(self, read, samples):
        error = self.fails(read, (samples / "google_ads.csv").read_text().replace(",87,", ",-87,"))
        assert error.line == 5
        assert error.reason.endswith("the weight is negative")

    def test_download_cut_short(self, read, samples):
        text = (samples / "amazon_ads.csv").read_text()
        error = self.fails(read, text[: text.index("kids bottle with straw")])
        assert error.line == 4
        assert "cells where the header has" in error.reason

    GERMAN = (
        "Bericht zu Suchbegriffen\n1. Juli 2026 - 31. Juli 2026\n"
        "Suchbegriff\tKeyword-Option\tKampagne\tKeyword\tKlicks\nschuhe\tx\ty\t[schuhe]\t1.204\n"
    )

    def test_foreign_language(self, read):
        error = self.fails(read, self.GERMAN.encode("utf-16"))
        assert "not English (Suchbegriff)" in error.reason
        assert "English" in error.hint

    def test_foreign_language_with_columns_named(self, read):
        columns = {"query_column": "Suchbegriff", "phrase_column": "Keyword", "weight_column": "Klicks"}
        assert read(self.GERMAN.encode("utf-16"), **columns)[0] == {("schuhe", "schuhe", "exact"): 1204}

    def test_keyword_report_instead_of_search_terms(self, read):
        header = "Keyword status,Keyword,Match type,Campaign,Ad group,Clicks,Impr."
        error = self.fails(read, f"Search keyword report\nx\n{header}\nEnabled,a,b,c,d,1,2\n")
        assert "without the search terms" in error.reason

    def test_dynamic_ads_report(self, read):
        header = '"Account name","Search term","Dynamic ad target","Clicks"'
        error = self.fails(read, f'"Report Name: x"\n\n{header}\n"a","b","c","1"\n')
        assert "dynamic search ads report" in error.reason

    def test_only_totals(self, read):
        lines = ["Search terms report", "x", "Search term,Match type,Campaign,Keyword,Clicks"]
        with pytest.raises(InputError, match=r"no .*pair is left") as caught:
            read("\n".join([*lines, "Total: Search terms,--,--,--,0"]))
        assert "1 total line" in str(caught.value)

    def test_old_excel(self, read):
        error = self.fails(read, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 512)
        assert "old Excel workbook" in error.reason
        assert ".xlsx or CSV" in error.hint

    def test_web_page_saved_as_report(self, read):
        assert "web page" in self.fails(read, "<!DOCTYPE html><html></html>").reason

    def test_damaged_workbook(self, read):
        assert "damaged or cut short" in self.fails(read, b"PK\x03\x04" + b"\x01" * 200).reason

    def test_spreadsheet_error_cell(self, read):
        error = self.fails(read, "Search term\tKeyword\tCampaign\tClicks\nred shoe\t#NAME?\tC\t1\n")
        assert error.line == 2
        assert error.reason.endswith("a spreadsheet turned the text into the error #NAME?")

    def test_two_clicks_columns(self, read):
        error = self.fails(read, "Search term\tKeyword\tCampaign\tClicks\tClicks\na\tb\tc\t1\t2\n")
        assert "two columns are named 'Clicks'" in error.reason

    def test_skipping_counts_instead(self, read, samples):
        text = (samples / "google_ads.csv").read_text().replace(",87,", ",eighty,").replace(",40,", ",-40,")
        pairs, log = read(text, bad_lines="skip")
        assert len(pairs) == len(GOOGLE) - 2
        assert log.report.skipped["bad line: Clicks is 'eighty', not a number"] == 1
        assert log.report.skipped["bad line: the weight is negative"] == 1


def test_unknown_phrase_column_lists_the_columns(read, samples):
    with pytest.raises(InputError, match="there is no column 'market'") as caught:
        read((samples / "google_ads.csv").read_bytes(), phrase_columns=("market",))
    assert "Ad group" in caught.value.hint


def test_options_reject_unknown_fields():
    with pytest.raises(ValueError):
        ReadOptions(columns="x")


class TestHeaderVariants:
    """Names that the platforms gave, or give, the same columns."""

    @pytest.mark.parametrize(
        ("header", "row", "platform"),
        [
            (
                "Search term,Search keyword,Search keyword match type,Campaign,Impr.,Clicks",
                "a b,a,Exact match,C,9,2",
                "Google",
            ),
            (
                "Day,Search term,Keyword,Match type,Added/Excluded,Interactions",
                "x,a b,[a],Broad match,None,2",
                "Google",
            ),
            (
                "AccountName,SearchQuery,Keyword,BidMatchType,DeliveredMatchType,Clicks",
                "x,a b,a,Exact,Broad,2",
                "Microsoft",
            ),
            (
                "Gregorian date,Account name,Search query,Keyword,Delivered match type,Clicks",
                "x,y,a b,a,Exact,2",
                "Microsoft",
            ),
            (
                "Date,Portfolio name,Targeting,Match Type,Customer Search Term,Impressions,Clicks",
                "x,y,a,EXACT,a b,9,2",
                "Amazon",
            ),
            (
                "Campaign name,Ad product,Search term,Target value,Target match type,Clicks",
                "x,SP,a b,a,EXACT,2",
                "Amazon",
            ),
        ],
    )
    def test_read_alike(self, read, header, row, platform):
        pairs, log = read(f"{header}\n{row}\n")
        assert pairs == {("a b", "a", "exact"): 2}
        assert log.report.format.startswith(platform)


@pytest.mark.parametrize(
    ("targeting", "match_type", "reason"),
    [
        ("loose-match", "-", "automatic targeting"),
        ("substitutes", "TARGETING_EXPRESSION_PREDEFINED", "automatic targeting"),
        ('asin-expanded="B07XYZ12AB"', "-", "product (ASIN)"),
        ("B07XYZ12AB", "-", "product (ASIN)"),
        ('category="123"', "-", "product category"),
        ('keyword-group="related-to-your-brand"', "-", "theme"),
        ("something new", "TARGETING_EXPRESSION", "product target"),
    ],
)
def test_amazon_targets(read, targeting, match_type, reason):
    rows = [
        ["Targeting", "Match Type", "Customer Search Term", "Clicks"],
        [targeting, match_type, "flask", 3],
    ]
    pairs, log = read(as_text([*rows, ["flask", "BROAD", "steel flask", 1]], ","))
    assert pairs == {("steel flask", "flask", "broad"): 1}
    assert log.report.skipped == {f"target is no keyword: {reason}": 1}


def test_keyword_that_looks_like_a_product_is_a_keyword(read):
    rows = [
        ["Targeting", "Match Type", "Customer Search Term", "Clicks"],
        ["b07xyz12ab", "EXACT", "acme flask", 3],
    ]
    assert read(as_text(rows, ","))[0] == {("acme flask", "b07xyz12ab", "exact"): 3}


def test_keyword_matched_by_ai_max_is_a_keyword(read):
    text = "Search term,Match type,Keyword,Campaign,Clicks\nred shoe,AI Max,shoes,C,3\nhat,AI Max,--,C,1\n"
    pairs, log = read(text)
    assert list(pairs) == [("red shoe", "shoes", "")]
    assert log.report.skipped == {"target is no keyword: AI Max": 1}
