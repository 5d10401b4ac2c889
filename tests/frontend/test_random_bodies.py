"""Bodies that nobody thought of: made from the server's own OpenAPI description, and at random; never a status 5xx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headgate.capture.schema.sites import HOOK_NAMES
from headgate.steering.requests.request_fields import FIELDS
from tests.fakes.server import Server, serving
from tests.fakes.steering_forms import ROW, listed, packed
from tests.frontend.test_app import started  # noqa: F401  (a fixture)
from tests.frontend.test_bad_bodies import COMMAND, FLAGS, send

pytestmark = [pytest.mark.engine, pytest.mark.extended]

OURS = r"^/v1/(steering|capture)"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with serving([*COMMAND, str(model_dir), *FLAGS]) as running:
        yield running


@pytest.fixture
def description(request: pytest.FixtureRequest) -> Any:
    app = request.getfixturevalue("started")().app
    app.state.log_stats = False
    return schemathesis.openapi.from_asgi("/openapi.json", app).include(path_regex=OURS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_routes_answer_as_they_are_described(description: Any, mode: GenerationMode) -> None:
    statuses = Counter[int]()

    def check(operation: Any) -> None:
        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def is_answered_as_described(case: schemathesis.Case[Any]) -> None:
            response = case.call_and_validate(checks=CHECKS)
            statuses[response.status_code] += 1

        is_answered_as_described()

    for found in description.get_all_operations():
        operation = found.ok()
        if operation.body or mode is GenerationMode.POSITIVE:  # without a body there is nothing to get wrong
            check(operation)

    assert set(statuses) <= {200, 400, 404, 415}, statuses
    assert statuses[400] > 20, statuses


def test_every_route_is_described(description: Any) -> None:
    found = {operation.ok().label for operation in description.get_all_operations()}

    assert found == {
        "POST /v1/steering/set",
        "POST /v1/steering/clear",
        "POST /v1/steering/modules/register",
        "POST /v1/steering/modules/unregister",
        "GET /v1/steering",
        "GET /v1/steering/layers",
        "GET /v1/steering/modules",
        "GET /v1/capture/consumers",
    }


words = st.sampled_from(
    [
        *HOOK_NAMES,
        *("0", "3", "-1", "29", "30", "vector", "scale", "scales", "data", "dtype", "shape", "layer_indices"),
        *("hooks", "positions", "rows", "name"),
    ]
)
"""Names that mean something somewhere."""

leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    words,
    st.sampled_from([listed(ROW), packed([3]), [576], "float32", "all"]),
)
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from([*FIELDS, "capture", "capture_wait"]), values, min_size=1, max_size=3))
def test_any_value_of_a_field_is_served_or_refused_by_name(server: Server, fields: dict[str, Any]) -> None:
    response = send(server, "/v1/completions", max_tokens=1, **fields)

    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"].partition(".")[0] in fields
