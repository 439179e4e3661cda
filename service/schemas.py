"""Requests and answers of the HTTP API: what is accepted, how it is checked and described."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic.json_schema import models_json_schema

from bidmatch.base import text
from service.problems import Problem, ProblemError, field_errors, invalid
from service.settings import Settings

MIN_SCORE, MAX_SCORE = -2.0, 2.0
MIN_RELEVANCE = (
    "leave out phrases that search found with a lesser relevance; the bundle must have a calibration"
)

# What `bidmatch.base.text.normalise` leaves nothing of: white space, controls, zero-width marks.
SOMETHING_VISIBLE = r"[^\s\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2060\ufeff]"

_EXAMPLE: dict[str, Any] = {"query": "red running shoes", "k": 5}
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
    source: Literal["index", "exact"] = Field(
        description="`exact`: equals the normalised query, so it stands first; `index`: found by search"
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


class Asked(BaseModel):
    """A checked request."""

    queries: list[str]
    k: int
    min_score: float | None
    min_relevance: float | None
    many: bool


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
    """Checks the bodies of `POST /match` against the limits in force.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: Settings):
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
                Field(10, description="most phrases for a query"),
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
        self.models: tuple[type[BaseModel], type[BaseModel]] = (
            create_model(
                "QueryRequest",
                __config__=ConfigDict(extra="forbid", json_schema_extra={"example": _EXAMPLE}),
                __doc__="Match one query.",
                query=(query, Field(description="the query as typed")),
                **common,
            ),
            create_model(
                "QueriesRequest",
                __config__=ConfigDict(extra="forbid"),
                __doc__="Match several queries.",
                queries=(many, Field(description="the queries as typed")),
                **common,
            ),
        )
        one_model, many_model = self.models
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
        try:
            asked = self._adapter.validate_json(body)
        except ValidationError as wrong:
            errors = wrong.errors(include_url=False, include_context=False, include_input=False)
            if errors[0]["type"] == "json_invalid":
                reason = errors[0]["msg"].removeprefix("Invalid JSON: ")
                raise ProblemError(400, "malformed-json", f"The body is not JSON: {reason}") from None
            # The first part of a location is the member of the union, which no client knows of.
            raise invalid(
                field_errors([{**error, "loc": error["loc"][1:]} for error in errors], ("body",))
            ) from None
        many = "queries" in type(asked).model_fields
        return Asked(
            queries=asked.queries if many else [asked.query],
            k=asked.k,
            min_score=asked.min_score,
            min_relevance=asked.min_relevance,
            many=many,
        )

    def body_schema(self) -> dict[str, Any]:
        """OpenAPI of the request body."""
        refs = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in self.models]
        return {"required": True, "content": {"application/json": {"schema": {"oneOf": refs}}}}

    def components(self) -> dict[str, Any]:
        """OpenAPI schemas of the requests and of every answer."""
        models = (*self.models, OneAnswer, ManyAnswers, Health, Readiness, Problem)
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
