"""The service against its own OpenAPI document: valid and invalid requests, drawn by schemathesis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.schemas import BaseSchema

PROBLEM = "application/problem+json"
OPERATIONS = [
    ("POST", "/match"),
    ("GET", "/match"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
]
drawn = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def api(small_bundle: Path, serving: Callable[..., AbstractContextManager[str]]) -> Iterator[BaseSchema]:
    # What the document allows must be answered, not just be no 5xx.
    checks = {"checks": {"positive_data_acceptance": {"expected-statuses": ["200"]}}}
    config = SchemathesisConfig.from_dict(checks)
    # Low limits, so that values on both sides of them are drawn.
    with serving(small_bundle, "--max-k=20", "--max-queries=8", "--max-query-chars=100") as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)


@pytest.fixture(scope="module")
def session() -> requests.Session:
    return requests.Session()


def test_the_operations_are_those_tried_here(api: BaseSchema) -> None:
    operations = [result.ok() for result in api.get_all_operations()]
    assert [(operation.method.upper(), operation.path) for operation in operations] == OPERATIONS


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_valid_requests_are_answered_as_the_schema_says(
    api: BaseSchema, session: requests.Session, method: str, path: str
) -> None:
    few = method == "GET" and path != "/match"

    @settings(drawn, max_examples=2 if few else drawn.max_examples)
    @given(case=api[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Case) -> None:
        response = case.call_and_validate(session=session)
        assert response.status_code == 200

    check()


@pytest.mark.parametrize(("method", "path"), OPERATIONS[:2])
def test_invalid_requests_are_refused_with_a_problem(
    api: BaseSchema, session: requests.Session, method: str, path: str
) -> None:
    statuses = set()

    @drawn
    @given(case=api[path][method].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def check(case: Case) -> None:
        response = case.call_and_validate(session=session)
        statuses.add(response.status_code)
        assert response.status_code < 500
        if response.status_code >= 400:
            assert response.headers["content-type"] == [PROBLEM]
            assert response.json()["status"] == response.status_code

    check()
    assert 422 in statuses
