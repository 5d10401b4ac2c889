"""Requests that reach an engine core without a part of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.contracts.wire_format import WIRE_KEY
from headgate.capture.engine.core import engine_core
from headgate.capture.schema.errors import RequestError


def request(**wire: Any) -> SimpleNamespace:
    return SimpleNamespace(request_id="r", sampling_params=SimpleNamespace(extra_args={WIRE_KEY: wire}))


def test_a_request_that_captures_alone_passes_as_it_is() -> None:
    take = engine_core.preprocess_add_request(lambda engine, request: request)
    captures = request(v=1, capture={})

    assert take(SimpleNamespace(), captures) is captures


def test_a_request_for_a_part_that_is_not_open_is_a_bug() -> None:
    take = engine_core.preprocess_add_request(lambda engine, request: request)

    with pytest.raises(AssertionError, match="steering is not open"):
        take(SimpleNamespace(), request(v=1, parts={"steering": {}}))


@pytest.mark.parametrize("features", [["image"], None])
def test_images_of_a_refused_request_are_kept_since_they_are_not_sent_again(features: list[str] | None) -> None:
    """vLLM's front ends send of an image that they have sent the hash alone."""
    kept: list[str] = []

    def accept(request: object) -> None:
        raise RequestError("steering_name", "unknown")

    core = SimpleNamespace(mm_receiver_cache=SimpleNamespace(get_and_update_features=kept.extend))
    setattr(core, engine_core.CORE_ADAPTER, SimpleNamespace(accept=accept, has_own_process=False))
    take = engine_core.preprocess_add_request(lambda engine, request: request)

    with pytest.raises(RequestError, match="steering_name"):
        take(core, SimpleNamespace(request_id="r", mm_features=features))

    assert kept == (features or [])


def test_a_refusal_reaches_stock_as_a_request_that_is_answered_when_it_is_added() -> None:
    """Stock logs a traceback of whatever is raised while a request is taken from the socket."""
    error = RequestError("steering_name", "unknown")

    def accept(request: object) -> None:
        raise error

    answered: list[object] = []
    core = SimpleNamespace(_send_error_outputs_to_client=lambda ids, client: answered.extend([*ids, client]))
    adapter = SimpleNamespace(accept=accept, has_own_process=True, refused={}, forget_refused=answered.append)
    setattr(core, engine_core.CORE_ADAPTER, adapter)
    take = engine_core.preprocess_add_request(lambda engine, request: (request, 0))
    add = engine_core.handle_client_request(lambda engine, kind, request: answered.append("served"))

    made = take(core, SimpleNamespace(request_id="r", client_index=2, mm_features=None))
    add(core, SimpleNamespace(name="ADD"), made)

    assert answered == ["r", 2, "r"]
    assert adapter.refused == {}
