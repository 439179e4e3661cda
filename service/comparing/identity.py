"""What tells that a phrase of one side is one of the other's: its id or its text."""

from __future__ import annotations

from dataclasses import dataclass

from bidmatch.base import text
from bidmatch.base.errors import ConfigError
from service.comparing.given import FileSide
from service.comparing.sides import By, Side


@dataclass(frozen=True)
class Identity:
    """What phrases are told apart by.

    Attributes:
        by: their ids or their texts.
        notes: what a reader of the comparison should know of that.
    """

    by: By
    notes: list[str]


@dataclass(frozen=True)
class _Shared:
    """Ids of a sample of one side that the other has, too: how many, and how many with the same text.

    Where one side has no texts, none can be compared.
    """

    sampled: int
    ids: int
    same_text: int
    compared: int


def tell_apart(a: Side, b: Side, wanted: By | None) -> Identity:
    """What to tell phrases apart by: what is wanted, or what a sample of ids suggests.

    It is the text where no id of the sample is on both sides, or where most of those that are have another
    text on each: then the ids are alike by chance.

    Raises:
        ConfigError: a side does not hold what is needed.
    """
    possible = a.holds & b.holds
    if wanted is not None and wanted not in possible:
        lacking = next(side for side in (a, b) if wanted not in side.holds)
        column = "id" if wanted == "id" else "phrase"
        raise ConfigError(f"--by {wanted} needs a column {column!r}, and {lacking.path} has none")
    if not possible:
        raise ConfigError(
            f"{a.path} has no {'ids' if 'text' in a.holds else 'phrases'} and {b.path} has nothing else, "
            "so that nothing tells which phrases are the same",
            hint="Add the column 'phrase' or 'id' to one of them.",
        )
    if wanted == "text" or "id" not in possible:
        return Identity("text", [])
    shared = _shared(a, b)
    different = shared.compared - shared.same_text
    mostly = different > shared.same_text
    share = f"{different:,} of the {shared.compared:,} sampled ids that A and B share"
    if wanted == "id" or possible == {"id"}:
        if not shared.ids:
            return Identity("id", [f"none of {shared.sampled:,} sampled ids is in both A and B"])
        warned = [f"{share} belong to different texts; ids may be alike by chance"] if mostly else []
        return Identity("id", warned)
    if not shared.ids:
        reason = f"none of {shared.sampled:,} sampled ids is in both A and B, so phrases are told by text"
        return Identity("text", [reason])
    if mostly:
        return Identity(
            "text", [f"{share} belong to different texts, so phrases are told by text, not by id"]
        )
    return Identity("id", [f"{share} have another text in B; they count as the same"] if different else [])


def _shared(a: Side, b: Side) -> _Shared:
    # A file knows its sample alone, a bundle all of its ids.
    sampled, other = (b, a) if isinstance(b, FileSide) else (a, b)
    sample = sampled.sample()
    found = other.texts_of(list(sample))
    texts = [(sample[one], theirs) for one, theirs in found.items()]
    compared = [(one, theirs) for one, theirs in texts if one is not None and theirs is not None]
    same = sum(text.key(one) == text.key(theirs) for one, theirs in compared)
    return _Shared(len(sample), len(found), same, len(compared))
