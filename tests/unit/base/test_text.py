from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidmatch.base.text import key, normalise


@pytest.mark.parametrize(
    ("text", "shown", "identity"),
    [
        ("  Red\t Shoes \n", "Red Shoes", "red shoes"),
        ("ﬁne ＡＢＣ①", "fine ABC1", "fine abc1"),
        ("Straße", "Straße", "strasse"),
        ("İstanbul", "İstanbul", "i̇stanbul"),
        ("a\x00b\x1fc", "a b c", "a b c"),
        ("\ufeffquery\u200b", "query", "query"),
        ("non\u00a0breaking\u3000space", "non breaking space", "non breaking space"),
        ("bad \ud800 half", "bad \ufffd half", "bad \ufffd half"),
        ("é", "é", "é"),
        ("", "", ""),
        (" \t ", "", ""),
    ],
)
def test_known_cases(text: str, shown: str, identity: str) -> None:
    assert normalise(text) == shown
    assert key(text) == identity


@given(st.text())
def test_both_are_idempotent_and_clean(text: str) -> None:
    shown, identity = normalise(text), key(text)
    assert normalise(shown) == shown
    assert key(identity) == identity
    assert key(shown) == identity
    assert identity == " ".join(identity.split())
    identity.encode("utf-8")
