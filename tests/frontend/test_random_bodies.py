"""Bodies without a thought behind them, made from the server's own OpenAPI description; never a status 5xx."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.frontend.test_app import started  # noqa: F401  (a fixture)

pytestmark = pytest.mark.engine

OURS = r"^/v1/(steering|capture)"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture
def description(request: pytest.FixtureRequest) -> Any:
    app = request.getfixturevalue("started")().app
    app.state.log_stats = False
    return schemathesis.openapi.from_asgi("/openapi.json", app).include(path_regex=OURS)


@pytest.mark.parametrize("num_examples", [12, pytest.param(60, marks=pytest.mark.extended)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_routes_answer_as_they_are_described(description: Any, mode: GenerationMode, num_examples: int) -> None:
    statuses = Counter[int]()

    def check(operation: Any) -> None:
        @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def is_answered_as_described(case: schemathesis.Case[Any]) -> None:
            response = case.call_and_validate(checks=CHECKS, headers={"Host": "127.0.0.1"})
            statuses[response.status_code] += 1

        is_answered_as_described()

    for found in description.get_all_operations():
        operation = found.ok()
        if operation.body or mode is GenerationMode.POSITIVE:  # without a body there is nothing to get wrong
            check(operation)

    assert set(statuses) <= {200, 400, 404, 415}, statuses
    assert statuses[400] > num_examples // 3, statuses


def test_every_route_is_described(description: Any) -> None:
    found = {operation.ok().label for operation in description.get_all_operations()}

    assert found == {
        "POST /v1/steering/set",
        "POST /v1/steering/clear",
        "POST /v1/steering/modules/register",
        "POST /v1/steering/modules/unregister",
        "GET /v1/steering",
        "GET /v1/steering/audit",
        "GET /v1/steering/layers",
        "GET /v1/steering/modules",
        "GET /v1/steering/saes",
        "POST /v1/steering/saes/register",
        "GET /v1/steering/saes/{name}/features",
        "GET /v1/steering/dynamic",
        "GET /v1/steering/probes",
        "POST /v1/steering/probes/register",
        "POST /v1/steering/probes/unregister",
        "GET /v1/steering/rules",
        "POST /v1/steering/rules/register",
        "POST /v1/steering/rules/unregister",
        "GET /v1/capture/consumers",
        "GET /v1/capture/{consumer}",
        "POST /v1/capture/{consumer}",
        "GET /v1/capture/{consumer}/captures",
        "GET /v1/capture/{consumer}/captures/{tag}/{name}",
        "GET /v1/capture/{consumer}/captures/{tag}/{name}/rows",
    }
