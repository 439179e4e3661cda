"""Requests and answers of the HTTP API: what is accepted, how it is checked and described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from fastapi import Path
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic.json_schema import models_json_schema

from bidmatch.base import text
from service.problems import Problem, ProblemError, field_errors, invalid
from service.rules.filters import filter_schema
from service.settings import Settings

MIN_SCORE, MAX_SCORE = -2.0, 2.0
_DEFAULT_K = 10
MIN_RELEVANCE = (
    "leave out phrases that search found with a lesser relevance; the bundle must have a calibration"
)

# What `bidmatch.base.text.normalise` leaves nothing of: white space, controls, zero-width marks.
SOMETHING_VISIBLE = r"[^\s\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2060\ufeff]"

# As text, ids may hold anything but nothing, in a path as in a body.
PhraseId = Annotated[StrictStr, Field(min_length=1, max_length=200)]
PathId = Annotated[str, Path(min_length=1, max_length=200, description="the phrase's id, percent-encoded")]

_EXAMPLE: dict[str, Any] = {"query": "red running shoes", "k": 5}
_EXAMPLES: dict[str, Any] = {"queries": ["red running shoes", "garden hose"], "k": 5}
_EITHER = "give an object with exactly one of `query` (a text) and `queries` (a list of texts)"


class Parts(BaseModel):
    """The two parts that a score is the sum of."""

    encoder: float = Field(
        description="cosine of the dual encoder's vectors of query and phrase, times its weight in the "
        "bundle: -1 to 1, unless the export found that one part should count for more"
    )
    classifier: float = Field(
        description="cosine with the phrase's row of the classifier table, times its weight likewise; both "
        "weights add up to 2"
    )


class Match(BaseModel):
    """A phrase that belongs to the query."""

    id: str = Field(description="the phrase's id")
    phrase: str = Field(description="the phrase as the advertiser wrote it")
    score: float = Field(description="the sum of the parts, -2 to 2")
    parts: Parts
    relevance: float | None = Field(
        None,
        ge=0,
        le=1,
        description="how likely the phrase was clicked for such a query in the log, 0 to 1; only where the "
        "bundle has a calibration",
    )
    source: Literal["index", "exact", "live"] = Field(
        description="`exact`: equals the normalised query, so it stands first; `index`: a phrase of the "
        "bundle, found by search; `live`: likewise, a phrase that was added since"
    )
    columns: dict[str, Any] = Field(
        default={}, description="the phrase's other columns, such as its match type"
    )


class OneAnswer(BaseModel):
    """The matches of one query."""

    matches: list[Match] = Field(description="best first")
    bundle: str = Field(description="version of the bundle that answered")


class Result(BaseModel):
    """The matches of one query of several."""

    query: str = Field(description="the query as it was sent")
    matches: list[Match] = Field(description="best first; none for a query of white space only")


class ManyAnswers(BaseModel):
    """The matches of several queries, in the order they were sent in."""

    results: list[Result]
    bundle: str = Field(description="version of the bundle that answered")


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """The service takes requests."""

    status: Literal["ready"]
    bundle: str = Field(description="version of the bundle that answers")
    provider: Literal["cpu", "cuda"] = Field(description="what encodes")
    degraded: str | None = Field(None, description="why it is not what was wanted; null where all is well")


class ReloadRequest(BaseModel):
    """Let another bundle answer, or the same path's present one."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {}})

    bundle: Annotated[StrictStr, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="path of the bundle on the service's machine; if not given, what it was started with",
    )


class PhraseState(BaseModel):
    """A phrase, as it is now."""

    id: str = Field(description="the phrase's id")
    text: str = Field(description="the phrase as the advertiser wrote it; empty where it is gone")
    columns: dict[str, Any] = Field(description="its other columns, such as its match type")
    state: Literal["active", "paused", "removed"] = Field(description="only active phrases are matched")
    source: Literal["live", "bundle"] = Field(
        description="`live`: added since the bundle was made; `bundle`: the bundle has it"
    )
    changed: str = Field(description="when it was last changed, RFC 3339")


class PhraseStates(BaseModel):
    """Phrases, as they are now."""

    phrases: list[PhraseState] = Field(description="in the order of the request")


class Reloaded(BaseModel):
    """Another bundle answers now."""

    bundle: str = Field(description="version of the bundle that answers now")
    previous: str = Field(description="version of the one before")
    phrases: int = Field(description="phrases of the bundle")
    live_phrases: int = Field(description="live phrases that are matched beside them")
    agreement: float | None = Field(
        description="share of the earlier bundle's matches of recent queries that it finds, too; null without"
    )
    seconds: float = Field(description="how long it took")


class Candidate(BaseModel):
    """A phrase that was looked at."""

    id: str
    phrase: str
    score: float
    parts: Parts
    source: Literal["index", "exact", "live"]
    rank: int | None = Field(description="its place among the matches, from 1; null where it is none")
    dropped: str | None = Field(description="the rule that left it out; null where none did")


class Explanation(BaseModel):
    """How the matches of a query came about."""

    query: str = Field(description="the query, normalised")
    tokens: list[str] = Field(description="what the encoder reads")
    words: list[str] = Field(description="the words that match types and negative keywords look at")
    ef: int = Field(description="width of the index search")
    depth: int = Field(description="phrases that the index was searched for")
    admitted: int = Field(description="phrases of the bundle that search could return under the rules")
    searched: Literal["graph", "comparison"] = Field(
        description="`graph`: by the index; `comparison`: all admitted phrases, for they are few"
    )
    rescored: bool = Field(description="whether the order is that of wide vectors")
    candidates: list[Candidate] = Field(
        description="the matches, then what was dropped, each by falling score"
    )
    missing: list[str] = Field(description="of the ids that were asked about, those of no phrase")
    bundle: str


@dataclass(slots=True)
class Asked:
    """A checked request."""

    queries: list[str]
    k: int
    min_score: float | None = None
    min_relevance: float | None = None
    filter: dict[str, Any] | None = None
    allow: list[str] | None = None
    deny: Sequence[str] = ()
    distinct: bool = False
    many: bool = False
    ids: Sequence[str] = ()

    @property
    def plain(self) -> bool:
        """Whether it asks for nothing but k and a least score."""
        return (
            self.min_relevance is None
            and self.filter is None
            and self.allow is None
            and not self.deny
            and not self.distinct
        )


def _whole(value: Any) -> Any:
    """A whole number written as 10.0 is the integer 10, in JSON Schema and to clients without integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def something(query: str) -> str:
    """The query itself.

    Raises:
        ValueError: nothing is left of it when it is normalised.
    """
    if not text.normalise(query):
        raise ValueError("the query is empty or only white space")
    return query


class MatchRequests:
    """Checks the bodies of requests against the limits in force.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: Settings):
        self.max_deadline_ms = settings.longest_deadline_ms
        self._max_query_chars, self._max_k = settings.max_query_chars, settings.max_k
        query = Annotated[
            StrictStr,
            Field(max_length=settings.max_query_chars, json_schema_extra={"pattern": SOMETHING_VISIBLE}),
            AfterValidator(something),
        ]
        one_of_many = Annotated[StrictStr, Field(max_length=settings.max_query_chars)]
        many = Annotated[list[one_of_many], Field(min_length=1, max_length=settings.max_queries)]
        common: dict[str, Any] = {
            "k": (
                Annotated[StrictInt, Field(ge=1, le=settings.max_k), BeforeValidator(_whole)],
                Field(_DEFAULT_K, description="most phrases for a query"),
            ),
            "min_score": (
                Annotated[StrictFloat, Field(ge=MIN_SCORE, le=MAX_SCORE, allow_inf_nan=False)] | None,
                Field(None, description="leave out phrases that search found with a lesser score"),
            ),
            "min_relevance": (
                Annotated[StrictFloat, Field(ge=0, le=1, allow_inf_nan=False)] | None,
                Field(None, description=MIN_RELEVANCE),
            ),
        }
        ids: Any = Annotated[list[PhraseId], Field(max_length=settings.max_listed)]
        common |= {
            "filter": (
                Annotated[dict[str, Any], WithJsonSchema(filter_schema())] | None,
                Field(None, description="conditions on the phrases' columns, all of which must hold"),
            ),
            "allow": (ids | None, Field(None, description="ids of the only phrases to return")),
            "deny": (ids, Field([], description="ids of phrases that are not to be returned")),
            "distinct": (
                StrictBool,
                Field(False, description="of phrases of one text, in several match types, only the best"),
            ),
        }
        self.models: tuple[type[BaseModel], ...] = (
            create_model(
                "QueryRequest",
                __config__=ConfigDict(extra="forbid", json_schema_extra={"example": _EXAMPLE}),
                __doc__="Match one query.",
                query=(query, Field(description="the query as typed")),
                **common,
            ),
            create_model(
                "QueriesRequest",
                __config__=ConfigDict(extra="forbid", json_schema_extra={"example": _EXAMPLES}),
                __doc__="Match several queries.",
                queries=(many, Field(description="the queries as typed")),
                **common,
            ),
        )
        one_model, many_model = self.models
        self.explained = create_model(
            "ExplainRequest",
            __config__=ConfigDict(extra="forbid", json_schema_extra={"example": _EXAMPLE}),
            __doc__="Explain the matches of one query.",
            query=(query, Field(description="the query as typed")),
            **common,
            ids=(ids, Field([], description="phrases to explain, too, whatever became of them")),
        )
        phrase_text = Annotated[
            StrictStr,
            Field(max_length=settings.max_query_chars, json_schema_extra={"pattern": SOMETHING_VISIBLE}),
            AfterValidator(something),
        ]
        phrase = create_model(
            "Phrase",
            __config__=ConfigDict(extra="forbid"),
            __doc__="A phrase to add or change.",
            id=(
                PhraseId,
                Field(description="names the phrase; one that the bundle or an earlier call has is changed"),
            ),
            text=(phrase_text, Field(description="the phrase as the advertiser wrote it")),
            columns=(
                dict[StrictStr, Any],
                Field({}, description="its other columns, such as `match_type` and `negative_keywords`"),
            ),
        )
        self.phrases = create_model(
            "PhrasesRequest",
            __config__=ConfigDict(
                extra="forbid",
                json_schema_extra={
                    "example": {
                        "phrases": [{"id": "kw-1", "text": "red shoes", "columns": {"match_type": "broad"}}]
                    }
                },
            ),
            __doc__="Phrases to add or change, all of them or none.",
            phrases=(
                Annotated[list[phrase], Field(min_length=1, max_length=settings.max_phrases)],
                Field(description="the phrases"),
            ),
        )
        either: Any = Annotated[
            Annotated[one_model, Tag("query")] | Annotated[many_model, Tag("queries")],
            Discriminator(_which, custom_error_type="one_of", custom_error_message=_EITHER),
        ]
        self._adapter: TypeAdapter[Any] = TypeAdapter(either)

    def parse(self, body: bytes) -> Asked:
        """The request in `body`.

        Raises:
            ProblemError: 400 where it isn't JSON, 422 where its values are not allowed.
        """
        return self._simple(body) or self._checked(body)

    def _simple(self, body: bytes) -> Asked | None:
        """The request in a body of nothing but a sound `query` and `k`, as most are; None for others."""
        try:
            content = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
        if type(content) is not dict:
            return None
        query, k = content.get("query"), content.get("k", _DEFAULT_K)
        if (
            len(content) != 1 + ("k" in content)
            or type(query) is not str
            or type(k) is not int
            or not (len(query) <= self._max_query_chars and 1 <= k <= self._max_k)
            or not text.normalise(query)
        ):
            return None
        return Asked([query], k)

    def _checked(self, body: bytes) -> Asked:
        # The first part of a location is the member of the union, which no client knows of.
        return _asked(_validated(self._adapter, body, hidden=1))

    def explain(self, body: bytes) -> Asked:
        """The request to `/admin/explain` in `body`; raises as `parse`."""
        return _asked(_validated(TypeAdapter(self.explained), body))

    def put_phrases(self, body: bytes) -> list[Any]:
        """The phrases in the body of `POST /phrases`: `id`, `text`, `columns`; raises as `parse`."""
        given: list[Any] = _validated(TypeAdapter(self.phrases), body).phrases
        return given

    def reload(self, body: bytes) -> str | None:
        """The bundle that the body of `POST /admin/reload` names, if any; raises as `parse`."""
        named: str | None = _validated(TypeAdapter(ReloadRequest), body or b"{}").bundle
        return named

    def match_body(self) -> dict[str, Any]:
        """OpenAPI of the request body of `POST /match`."""
        refs = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in self.models]
        return {"required": True, "content": {"application/json": {"schema": {"oneOf": refs}}}}

    def body_of(self, model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
        """OpenAPI of a request body."""
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        return {"required": required, "content": {"application/json": {"schema": schema}}}

    def components(self) -> dict[str, Any]:
        """OpenAPI schemas of the requests and of every answer."""
        models: list[type[BaseModel]] = [*self.models, self.explained, self.phrases, ReloadRequest]
        models += [OneAnswer, ManyAnswers, PhraseState, PhraseStates, Reloaded, Explanation]
        models += [Health, Readiness, Problem]
        _, schema = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        definitions: dict[str, Any] = schema["$defs"]
        return definitions


def _which(body: Any) -> str | None:
    """`query` or `queries`: the one that is given, or None where it isn't exactly one."""
    if not isinstance(body, dict):
        return None
    given = [name for name in ("query", "queries") if name in body]
    return given[0] if len(given) == 1 else None


def _validated(adapter: TypeAdapter[Any], body: bytes, hidden: int = 0) -> Any:
    """The body as the adapter's model; `hidden` parts of errors' locations are ours alone."""
    try:
        return adapter.validate_json(body)
    except ValidationError as wrong:
        errors = wrong.errors(include_url=False, include_context=False, include_input=False)
        if errors[0]["type"] == "json_invalid":
            reason = errors[0]["msg"].removeprefix("Invalid JSON: ")
            raise ProblemError(400, "malformed-json", f"The body is not JSON: {reason}") from None
        raise invalid(
            field_errors([{**error, "loc": error["loc"][hidden:]} for error in errors], ("body",))
        ) from None


def _asked(model: Any) -> Asked:
    fields = type(model).model_fields
    many = "queries" in fields
    return Asked(
        queries=model.queries if many else [model.query],
        k=model.k,
        min_score=model.min_score,
        min_relevance=model.min_relevance,
        filter=model.filter,
        allow=model.allow,
        deny=model.deny,
        distinct=model.distinct,
        many=many,
        ids=model.ids if "ids" in fields else [],
    )
