from __future__ import annotations

import numpy as np

from service.comparing.answers import pair
from service.comparing.examples import TopExamples
from service.comparing.figures import Sums
from service.comparing.lines import lines_of
from service.comparing.phrases import PhraseChange, PhraseChanges
from service.comparing.records import Comparison

from .conftest import answers


def test_a_comparison_for_people() -> None:
    a = answers([0, 0, 1], "xyx", [1.0, 0.8, 0.5])
    b = answers([0, 0, 0, 0, 0, 2], "xvwzuz", [0.6, 0.4, 0.3, 0.2, 0.1, 0.9])
    counts, queries = np.array([1_007, 1, 1, 1]), ["red hose", "lost", "gained", "nothing"]
    both = pair(a, b, 4)
    sums = Sums(both, counts)
    found = Comparison(
        a="old.tsv",
        b="bundles/mine",
        bundle_a=None,
        bundle_b="1f2e3d4c5b6a",
        same_bundle=False,
        scores_comparable=True,
        by="text",
        k=5,
        min_score=None,
        notes=["something to know"],
        rows=1_012,
        empty=2,
        skipped=3,
        queries=sums.once,
        traffic=sums.traffic,
        examples=TopExamples(both, queries, counts, 0, 5).examples(),
        phrases=PhraseChanges(
            gained=[PhraseChange(phrase="phrase v", gained=1_007, lost=0, change=1_007)], lost=[]
        ),
        output="changes.tsv",
    )
    assert "\n".join(lines_of(found)) == EXPECTED


EXPECTED = """\
A: old.tsv (matches)
B: bundles/mine (bundle 1f2e3d4c5b6a)
1,012 rows, 2 of them empty, 4 distinct queries; the 5 best matches of each; phrases are told by text
3 bad lines skipped
note: something to know

                                            each query once     each row of the log
                                               A          B            A          B
with a match                              50.0 %     50.0 %       99.8 %     99.8 %
matches a query                             0.75       1.50         2.00       4.99

queries                                                   4                   1,010
  matches in A, none in B                                 1                       1
  matches in B, none in A                                 1                       1
same first match, where both have one               100.0 %                 100.0 %
A's matches that are also B's, mean                  25.0 %                  50.0 %
  none                                         1     50.0 %            1      0.1 %
  over 0 to 25 %                               0      0.0 %            0      0.0 %
  over 25 to 50 %                              1     50.0 %        1,007     99.9 %
  over 50 to 75 %                              0      0.0 %            0      0.0 %
  over 75 %, not all                           0      0.0 %            0      0.0 %
  all                                          0      0.0 %            0      0.0 %

common pairs, B less A
  score, mean                                        -0.400                  -0.400
  5 % of them at most                                -0.400                  -0.400
  25 % of them at most                               -0.400                  -0.400
  50 % of them at most                               -0.400                  -0.400
  75 % of them at most                               -0.400                  -0.400
  95 % of them at most                               -0.400                  -0.400

Most searched queries that B has no match for and A has (rows, query)
  1  lost
     - phrase x

Most searched queries that A has no match for and B has (rows, query)
  1  gained
     + phrase z

Queries matched by both whose phrases changed most (rows, query)
  1,007  red hose
         - phrase y
         + phrase v | phrase w | phrase z and 1 more

Phrases that B answers to more rows than A (rows gained, lost, phrase)
  +1,007  0  phrase v

a row for each query: changes.tsv"""
