"""What each method sends and how its answer is read: nothing here touches the network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

from bidmatch.client import answers
from bidmatch.client.errors import InvalidRequest, ProtocolError

T = TypeVar("T")

Scalar: TypeAlias = str | int | float | bool
"""A value of a column."""

Condition: TypeAlias = Mapping[str, Scalar | Sequence[Scalar]]
"""Bounds or exclusions: `gte`, `gt`, `lte`, `lt` with a value, `not` with a value or several."""

Filter: TypeAlias = Mapping[str, Scalar | Sequence[Scalar] | Condition]
"""For each column its value, values of which it has one, or a `Condition`; all columns must hold."""


@dataclass(frozen=True, slots=True)
class NewPhrase:
    """A phrase to add, or what a phrase of this id becomes.

    Attributes:
        id: its id, of the caller's choosing.
        text: the phrase as the advertiser wrote it.
        columns: its other columns. The service reads `match_type` (`exact`, `phrase` or `broad`) and
            `negative_keywords` (a list, each as `word word`, `"word word"` or `[word word]`).

    Example:
        >>> NewPhrase("p81", "red tents", {"match_type": "phrase", "negative_keywords": ["used"]})
    """

    id: str
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request to make and how to read its answer.

    Attributes:
        method: HTTP method.
        path: path and query, percent-encoded.
        body: JSON, or None where there is none.
        read: turns the body of a 200 into the answer.
        repeatable: asking twice has the effect of asking once, so that it may be sent again when a connection
            broke before the answer.
    """

    method: str
    path: str
    body: bytes | None
    read: Callable[[bytes], T]
    repeatable: bool = True


def _json_call(
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    read: Callable[[Any], T],
    repeatable: bool = True,
) -> Call[T]:
    says = f"{method} {path}"
    return Call(
        method,
        path,
        None if body is None else _encode(body),
        lambda raw: answers.decode(raw, says, read),
        repeatable,
    )


def _encode(body: Mapping[str, Any]) -> bytes:
    """The JSON of `body`.

    Raises:
        InvalidRequest: it has something that JSON can't say, such as NaN, or text that UTF-8 can't.
    """
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(None, "invalid-request", f"cannot be sent as JSON: {error}") from None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{value!r} is neither text, number, truth value, list nor mapping")


def _several(values: Iterable[T], name: str) -> list[T]:
    """The values as a list; a text, which is iterable too, is surely meant as one of them.

    Raises:
        TypeError: it is a text.
    """
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} takes several, not one text")
    return list(values)


def _options(
    k: int,
    min_score: float | None,
    min_relevance: float | None,
    filter: Filter | None,
    allow: Iterable[str] | None,
    deny: Iterable[str] | None,
    distinct: bool,
) -> dict[str, Any]:
    given = {
        "min_score": min_score,
        "min_relevance": min_relevance,
        "filter": filter,
        "allow": None if allow is None else _several(allow, "allow"),
        "deny": None if deny is None else _several(deny, "deny"),
        "distinct": distinct or None,
    }
    return {"k": k} | {name: value for name, value in given.items() if value is not None}


def match(
    query: str,
    k: int,
    min_score: float | None,
    min_relevance: float | None,
    filter: Filter | None,
    allow: Iterable[str] | None,
    deny: Iterable[str] | None,
    distinct: bool,
) -> Call[answers.Answer]:
    """`POST /match` with one query."""
    options = _options(k, min_score, min_relevance, filter, allow, deny, distinct)
    return _json_call("POST", "/match", {"query": query, **options}, answers.answer)


def match_many(
    queries: Iterable[str],
    k: int,
    min_score: float | None,
    min_relevance: float | None,
    filter: Filter | None,
    allow: Iterable[str] | None,
    deny: Iterable[str] | None,
    distinct: bool,
) -> Call[answers.Answers]:
    """`POST /match` with several queries."""
    sent = _several(queries, "queries")
    options = _options(k, min_score, min_relevance, filter, allow, deny, distinct)

    def read(document: Any) -> answers.Answers:
        found = answers.answers(document)
        _same_number(len(found.results), len(sent), "POST /match", "results")
        return found

    return _json_call("POST", "/match", {"queries": sent, **options}, read)


def explain(
    query: str,
    k: int,
    min_score: float | None,
    min_relevance: float | None,
    filter: Filter | None,
    allow: Iterable[str] | None,
    deny: Iterable[str] | None,
    distinct: bool,
    ids: Iterable[str] | None,
) -> Call[answers.Explanation]:
    """`POST /admin/explain`."""
    body = {"query": query, **_options(k, min_score, min_relevance, filter, allow, deny, distinct)}
    if ids is not None:
        body["ids"] = _several(ids, "ids")
    return _json_call("POST", "/admin/explain", body, answers.explanation)


def put_phrases(phrases: Iterable[NewPhrase]) -> Call[tuple[answers.Phrase, ...]]:
    """`POST /phrases`."""
    sent = [
        {"id": one.id, "text": one.text} | ({"columns": one.columns} if one.columns else {})
        for one in phrases
    ]

    def read(document: Any) -> tuple[answers.Phrase, ...]:
        put = answers.phrases(document)
        _same_number(len(put), len(sent), "POST /phrases", "phrases")
        return put

    return _json_call("POST", "/phrases", {"phrases": sent}, read)


def get_phrase(id: str) -> Call[answers.Phrase]:
    """`GET /phrases/{id}`."""
    return _json_call("GET", _phrase_path(id), None, answers.phrase)


def remove(id: str) -> Call[answers.Phrase]:
    """`DELETE /phrases/{id}`."""
    return _json_call("DELETE", _phrase_path(id), None, answers.phrase)


def pause(id: str) -> Call[answers.Phrase]:
    """`POST /phrases/{id}/pause`."""
    return _json_call("POST", _phrase_path(id) + "/pause", None, answers.phrase)


def resume(id: str) -> Call[answers.Phrase]:
    """`POST /phrases/{id}/resume`."""
    return _json_call("POST", _phrase_path(id) + "/resume", None, answers.phrase)


def reload(bundle: str | None) -> Call[answers.Reload]:
    """`POST /admin/reload`: twice is two reloads."""
    body = {} if bundle is None else {"bundle": bundle}
    return _json_call("POST", "/admin/reload", body, answers.reload, repeatable=False)


def probe(path: str) -> Call[bool]:
    """`GET /healthz` or `GET /readyz`."""
    return Call("GET", path, None, lambda _: True)


def metrics() -> Call[str]:
    """`GET /metrics`."""
    return Call("GET", "/metrics", None, lambda raw: raw.decode("utf-8", "replace"))


def _phrase_path(id: str) -> str:
    """The path of a phrase, whatever its id is made of.

    Raises:
        InvalidRequest: the id is empty, or no text that UTF-8 can carry.
    """
    if not id:
        raise InvalidRequest(None, "invalid-request", "the phrase's id is empty")
    try:
        escaped = quote(id, safe="")
    except UnicodeEncodeError as error:
        raise InvalidRequest(None, "invalid-request", f"cannot be sent as an address: {error}") from None
    # Dots alone would be taken for a step up the path.
    return "/phrases/" + (escaped.replace(".", "%2E") if set(id) == {"."} else escaped)


def _same_number(found: int, sent: int, says: str, what: str) -> None:
    if found != sent:
        raise ProtocolError(
            200, "protocol", f"the answer to {says} has {found} {what} where {sent} were asked for"
        )
