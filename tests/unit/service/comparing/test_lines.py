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


EXPECTED = """"""
