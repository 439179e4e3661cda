"""What the service answers, as immutable objects.

Fields that this version doesn't know are passed over, so a newer service can be called; a missing one is an
error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from bidmatch.client.errors import ProtocolError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Match:
    """A phrase that belongs to a query.

    Attributes:
        id: the phrase's id.
        phrase: the phrase as the advertiser wrote it.
        score: the sum of `encoder` and `classifier`, -2 to 2.
        encoder: what the dual encoder's cosine adds to the score.
        classifier: what the cosine with the classifier's row adds.
        source: `exact` (equal to the normalised query), `index` or `live`; newer services may know more.
        relevance: how likely a click is, 0 to 1; None where the bundle has no calibration.
        columns: the phrase's other columns, such as its match type.
    """

    id: str
    phrase: str
    score: float
    encoder: float
    classifier: float
    source: str
    relevance: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """The matches of one query.

    Attributes:
        matches: best first.
        bundle: version of the bundle that answered.
    """

    matches: tuple[Match, ...]
    bundle: str


@dataclass(frozen=True, slots=True)
class Result:
    """The matches of one query of several.

    Attributes:
        query: the query as it was sent.
        matches: best first.
    """

    query: str
    matches: tuple[Match, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """The matches of several queries.

    Attributes:
        results: one a query, in their order.
        bundle: version of the bundle that answered.
    """

    results: tuple[Result, ...]
    bundle: str


@dataclass(frozen=True, slots=True)
class Phrase:
    """A phrase and its state.

    Attributes:
        id: its id.
        text: its text as the advertiser wrote it.
        columns: its other columns.
        state: `active`, `paused` or `removed`.
        source: `live` (added to the running service) or `bundle`.
        changed: when its state, text or columns last changed.
    """

    id: str
    text: str
    columns: Mapping[str, Any] = field(hash=False)
    state: str
    source: str
    changed: datetime


@dataclass(frozen=True, slots=True)
class Reload:
    """A change of bundles that took place.

    Attributes:
        bundle: version of the bundle that answers from now on.
        previous: version of the one before.
        phrases: phrases of the bundle.
        live_phrases: live phrases beside it.
        agreement: share of the earlier bundle's matches of recent queries that it finds, too, 0 to 1; None
            where it was not tried on any.
        seconds: what it took.
    """

    bundle: str
    previous: str
    phrases: int
    live_phrases: int
    agreement: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A phrase that was looked at.

    Attributes:
        id: its id.
        phrase: its text as the advertiser wrote it.
        score: the sum of `encoder` and `classifier`, -2 to 2.
        encoder: what the dual encoder's cosine adds to the score.
        classifier: what the cosine with the classifier's row adds.
        source: as of a `Match`.
        rank: its place among the matches, from 1; None where it is none of them.
        dropped: the rule that left it out, in words; None where none did.
    """

    id: str
    phrase: str
    score: float
    encoder: float
    classifier: float
    source: str
    rank: int | None
    dropped: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """How the matches of a query came about.

    Attributes:
        query: the query, normalised.
        tokens: what the encoder reads.
        words: the words that match types and negative keywords look at.
        ef: width of the index search.
        depth: phrases that the index was searched for.
        admitted: phrases of the bundle that search could return under the rules.
        searched: `graph` (by the index) or `comparison` (all admitted phrases, for they are few).
        rescored: whether the order is that of wide vectors.
        candidates: the matches, then what was dropped, each by falling score.
        missing: of the ids that were asked about, those of no phrase.
        bundle: version of the bundle that answered.
    """

    query: str
    tokens: tuple[str, ...]
    words: tuple[str, ...]
    ef: int
    depth: int
    admitted: int
    searched: str
    rescored: bool
    candidates: tuple[Candidate, ...]
    missing: tuple[str, ...]
    bundle: str


class _WrongError(Exception):
    """Something at `path` of an answer is not as it should be."""

    def __init__(self, path: str, what: str):
        super().__init__(path, what)
        self.path, self.what = path, what

    def within(self, path: str) -> _WrongError:
        """The same, seen from further out."""
        between = "" if not self.path or self.path.startswith("[") else "."
        return _WrongError(f"{path}{between}{self.path}", self.what)


def decode(body: bytes, says: str, read: Callable[[Any], T]) -> T:
    """What `read` makes of the JSON in `body`.

    Args:
        body: a whole response body.
        says: what was called, for the error.
        read: one of this module's functions below.

    Raises:
        ProtocolError: it isn't JSON, or `read` misses something in it.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError(200, "protocol", f"the answer to {says} is not JSON") from None
    try:
        return read(document)
    except _WrongError as wrong:
        path = f"{wrong.path} " if wrong.path else ""
        raise ProtocolError(200, "protocol", f"the answer to {says}: {path}{wrong.what}") from None


def answer(document: Any) -> Answer:
    """Of `POST /match` with one query."""
    return Answer(_matches(document), _text(document, "bundle"))


def answers(document: Any) -> Answers:
    """Of `POST /match` with several queries."""
    return Answers(_each(document, "results", _result), _text(document, "bundle"))


def phrase(document: Any) -> Phrase:
    """Of the paths below `/phrases/{id}`."""
    changed = _text(document, "changed")
    try:
        time = datetime.fromisoformat(changed)
    except ValueError:
        raise _WrongError("changed", "is not a time") from None
    return Phrase(
        _text(document, "id"),
        _text(document, "text"),
        _columns(document),
        _text(document, "state"),
        _text(document, "source"),
        time,
    )


def phrases(document: Any) -> tuple[Phrase, ...]:
    """Of `POST /phrases`."""
    return _each(document, "phrases", phrase)


def reload(document: Any) -> Reload:
    """Of `POST /admin/reload`."""
    return Reload(
        _text(document, "bundle"),
        _text(document, "previous"),
        _count(document, "phrases"),
        _count(document, "live_phrases"),
        _or_null(document, "agreement", _number),
        _number(document, "seconds"),
    )


def explanation(document: Any) -> Explanation:
    """Of `POST /admin/explain`."""
    return Explanation(
        _text(document, "query"),
        _texts(document, "tokens"),
        _texts(document, "words"),
        _count(document, "ef"),
        _count(document, "depth"),
        _count(document, "admitted"),
        _text(document, "searched"),
        _truth(document, "rescored"),
        _each(document, "candidates", _candidate),
        _texts(document, "missing"),
        _text(document, "bundle"),
    )


def _candidate(document: Any) -> Candidate:
    return Candidate(
        _text(document, "id"),
        _text(document, "phrase"),
        _number(document, "score"),
        *_parts(document),
        _text(document, "source"),
        _or_null(document, "rank", _count),
        _or_null(document, "dropped", _text),
    )


def _result(document: Any) -> Result:
    return Result(_text(document, "query"), _matches(document))


def _matches(document: Any) -> tuple[Match, ...]:
    return _each(document, "matches", _match)


def _match(document: Any) -> Match:
    parts = _parts(document)
    relevance = document.get("relevance")
    return Match(
        _text(document, "id"),
        _text(document, "phrase"),
        _number(document, "score"),
        *parts,
        _text(document, "source"),
        None if relevance is None else _number(document, "relevance"),
        _columns(document),
    )


def _parts(document: Any) -> tuple[float, float]:
    parts = _field(document, "parts")
    try:
        return _number(parts, "encoder"), _number(parts, "classifier")
    except _WrongError as wrong:
        raise wrong.within("parts") from None


def _columns(document: dict[str, Any]) -> dict[str, Any]:
    columns = document.get("columns")
    if columns is None:
        return {}
    if not isinstance(columns, dict):
        raise _WrongError("columns", "is not an object")
    return columns


def _each(document: Any, name: str, read: Callable[[Any], T]) -> tuple[T, ...]:
    items = _field(document, name)
    if not isinstance(items, list):
        raise _WrongError(name, "is not a list")
    made: list[T] = []
    try:
        for item in items:
            made.append(read(item))
    except _WrongError as wrong:
        raise wrong.within(f"{name}[{len(made)}]") from None
    return tuple(made)


def _text(document: Any, name: str) -> str:
    value = _field(document, name)
    if not isinstance(value, str):
        raise _WrongError(name, "is not a text")
    return value


def _number(document: Any, name: str) -> float:
    value = _field(document, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _WrongError(name, "is not a number")
    return float(value)


def _count(document: Any, name: str) -> int:
    value = _number(document, name)
    if not value.is_integer():
        raise _WrongError(name, "is not a whole number")
    return int(value)


def _truth(document: Any, name: str) -> bool:
    value = _field(document, name)
    if not isinstance(value, bool):
        raise _WrongError(name, "is neither true nor false")
    return value


def _texts(document: Any, name: str) -> tuple[str, ...]:
    values = _field(document, name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _WrongError(name, "is not a list of texts")
    return tuple(values)


def _or_null(document: Any, name: str, read: Callable[[Any, str], T]) -> T | None:
    """A field that has to be there, if only to say that there is nothing."""
    return None if _field(document, name) is None else read(document, name)


def _field(document: Any, name: str) -> Any:
    try:
        return document[name]
    except KeyError:
        raise _WrongError(name, "is missing") from None
    except TypeError:
        raise _WrongError("", "is not an object") from None
