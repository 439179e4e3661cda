"""The service against its own OpenAPI document, all of it: valid and invalid requests, by schemathesis.

`BIDMATCH_HTTP_CASES=10000` draws as many; without it so many that a test run stays short.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.core.errors import UnsupportedSchema
from schemathesis.schemas import BaseSchema

from export.bundle.read import open_bundle

PROBLEM = "application/problem+json"
CASES = int(os.environ.get("BIDMATCH_HTTP_CASES", "1500"))
# Each operation's part of the cases: valid requests, and invalid ones where there are such.
SHARES: dict[tuple[str, str], tuple[int, int]] = {
    ("POST", "/match"): (8, 8),
    ("GET", "/match"): (4, 4),
    ("POST", "/phrases"): (6, 6),
    ("GET", "/phrases/{id}"): (3, 1),
    ("POST", "/phrases/{id}/pause"): (2, 1),
    ("POST", "/phrases/{id}/resume"): (2, 1),
    ("DELETE", "/phrases/{id}"): (2, 1),
    ("POST", "/admin/reload"): (1, 4),
    ("POST", "/admin/explain"): (5, 5),
    ("GET", "/healthz"): (0, 0),
    ("GET", "/readyz"): (0, 0),
    ("GET", "/metrics"): (0, 0),
}
OPERATIONS = list(SHARES)
WHOLE = sum(map(sum, SHARES.values()))


@pytest.fixture(scope="module")
def address(
    columns_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[..., AbstractContextManager[str]],
) -> Iterator[str]:
    """Two workers with live phrases. Low limits, so that values on both sides of them are drawn."""
    limits = "--max-k=20 --max-queries=8 --max-query-chars=100 --max-listed=5 --max-phrases=4 --workers=2"
    live = tmp_path_factory.mktemp("live")
    with serving(columns_bundle, *limits.split(), "--max-deadline-ms=60000", f"--live={live}") as url:
        yield url


@pytest.fixture(scope="module")
def api(address: str) -> BaseSchema:
    # What is answered to valid requests is looked at below.
    answers = ["200", "404", "409", "422", "504"]
    checks = {"checks": {"positive_data_acceptance": {"expected-statuses": answers}}}
    return schemathesis.openapi.from_url(
        f"{address}/openapi.json", config=SchemathesisConfig.from_dict(checks)
    )


@pytest.fixture(scope="module")
def session() -> requests.Session:
    return requests.Session()


@dataclass
class Meant:
    """Gives drawn requests a meaning, where nothing in the schema could: ids and columns that there are."""

    columns: list[str]
    nowhere: str
    drawn: int = 0

    def column(self) -> str:
        self.drawn += 1
        return self.columns[self.drawn % len(self.columns)]

    def id(self, drawn: str) -> str:
        self.drawn += 1
        # Clients take these for steps in the path, whether they are percent-encoded or not.
        steps = drawn in (".", "..")
        return drawn if self.drawn % 3 == 0 and not steps else f"p{self.drawn % 60}"

    def renamed(self, conditions: dict[str, Any]) -> dict[str, Any]:
        return {self.column(): value for value in conditions.values()}

    def __call__(self, case: Case) -> Case:
        path, body = case.operation.path, case.body
        if path == "/admin/reload":
            # What is drawn may name any file of the machine.
            if isinstance(body, dict) and isinstance(body.get("bundle"), str) and body["bundle"]:
                case.body = body | {"bundle": (self.nowhere + body["bundle"])[:4096]}
        elif path.startswith("/phrases/"):
            case.path_parameters["id"] = self.id(str(case.path_parameters["id"]))
        elif path == "/phrases" and isinstance(body, dict):
            phrases = body.get("phrases")
            if isinstance(phrases, list):
                case.body = body | {"phrases": [self.phrase(one) for one in phrases]}
        elif isinstance(body, dict) and isinstance(body.get("filter"), dict):
            case.body = body | {"filter": self.renamed(body["filter"])}
        return case

    def phrase(self, phrase: Any) -> Any:
        if not isinstance(phrase, dict):
            return phrase
        changed = dict(phrase)
        if isinstance(phrase.get("columns"), dict):
            changed["columns"] = self.renamed(phrase["columns"])
        if isinstance(phrase.get("id"), str) and phrase["id"]:
            changed["id"] = self.id(phrase["id"])
        return changed


@pytest.fixture(scope="module")
def meant(columns_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Meant:
    with open_bundle(columns_bundle) as bundle:
        columns = [name for name in bundle.phrases.column_names if name not in ("id", "text")]
    return Meant(columns, f"{tmp_path_factory.mktemp('none') / 'nowhere'}/")


def drawn(share: int, least: int) -> settings:
    return settings(
        max_examples=max(least, round(CASES * share / WHOLE)),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def cases(draw: st.DrawFn, api: BaseSchema, method: str, path: str, mode: GenerationMode) -> Case:
    """Requests that are valid, or not; without those of some mutation that schemathesis cannot draw from."""
    try:
        return draw(api[path][method].as_strategy(generation_mode=mode))
    except UnsupportedSchema:
        reject()


def send(case: Case, session: requests.Session) -> schemathesis.Response:
    """The answer, as the document declares it; a problem where it is an error, and never one of ours."""
    response = case.call(session=session, timeout=60)
    # A request may ask for a deadline that can't be met.
    late = response.status_code == 504 and int(case.headers["X-Request-Timeout-Ms"]) < 500
    without = [schemathesis.checks.not_a_server_error] if late else []
    case.validate_response(response, excluded_checks=without)
    assert response.status_code < 500 or late
    if response.status_code >= 400:
        assert response.headers["content-type"] == [PROBLEM]
        assert response.json()["status"] == response.status_code
    return response


def wheres(response: schemathesis.Response) -> set[str]:
    """What is wrong with a request, without the numbers and names in it."""
    parts = [error["where"].split(".") for error in response.json().get("errors", [])]
    return {
        ".".join(part[:2]) if part[1] != "phrases" else ".".join([*part[:2], *part[3:4]]) for part in parts
    }


# What the document can't say: which columns there are, of which sort; which phrases, in which state.
ELSE = {
    ("POST", "/match"): {422: {"body.filter"}},
    ("POST", "/admin/explain"): {422: {"body.filter"}},
    ("POST", "/phrases"): {422: {"body.phrases.columns"}},
    ("GET", "/phrases/{id}"): {404: set()},
    ("DELETE", "/phrases/{id}"): {404: set(), 409: set()},
    ("POST", "/phrases/{id}/pause"): {404: set(), 409: set()},
    ("POST", "/phrases/{id}/resume"): {404: set(), 409: set()},
    ("POST", "/admin/reload"): {422: set()},
}


def test_the_operations_are_those_tried_here(api: BaseSchema) -> None:
    operations = [result.ok() for result in api.get_all_operations()]
    assert {(operation.method.upper(), operation.path) for operation in operations} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda part: part)
def test_valid_requests_are_answered_as_the_schema_says(
    api: BaseSchema, session: requests.Session, meant: Meant, method: str, path: str
) -> None:
    statuses: Counter[int] = Counter()

    @drawn(SHARES[method, path][0], least=2)
    @given(case=cases(api, method, path, GenerationMode.POSITIVE))
    def check(case: Case) -> None:
        response = send(meant(case), session)
        statuses[response.status_code] += 1
        if response.status_code not in (200, 504):
            allowed = ELSE.get((method, path), {})
            assert response.status_code in allowed, response.text
            assert wheres(response) <= allowed[response.status_code], response.text

    check()
    assert statuses[200] > 0.2 * sum(statuses.values()), statuses


@pytest.mark.parametrize(
    ("method", "path"), [one for one in OPERATIONS if SHARES[one][1]], ids=lambda part: part
)
def test_invalid_requests_are_refused_with_a_problem(
    api: BaseSchema, session: requests.Session, meant: Meant, method: str, path: str
) -> None:
    statuses: Counter[int] = Counter()

    @drawn(SHARES[method, path][1], least=5)
    @given(case=cases(api, method, path, GenerationMode.NEGATIVE))
    def check(case: Case) -> None:
        statuses[send(meant(case), session).status_code] += 1

    check()
    assert any(400 <= status < 500 for status in statuses), statuses


def test_after_all_of_it_the_service_is_as_sound_as_before(
    api: BaseSchema, session: requests.Session, address: str
) -> None:
    ready = session.get(f"{address}/readyz").json()
    assert (ready["status"], ready["degraded"]) == ("ready", None)
    phrase = {"id": "a/b c%2F?", "text": "solar garden gnome", "columns": {"market": "de", "tags": ["x"]}}
    put = session.post(f"{address}/phrases", json={"phrases": [phrase]})
    assert put.status_code == 200, put.text
    found = session.post(f"{address}/match", json={"query": "Solar garden gnome"}).json()["matches"][0]
    assert (found["id"], found["columns"]) == (phrase["id"], phrase["columns"])
    assert unquote("a%2Fb%20c%252F%3F") == phrase["id"]
    one = session.get(f"{address}/phrases/a%2Fb%20c%252F%3F")
    assert one.json() == put.json()["phrases"][0]
