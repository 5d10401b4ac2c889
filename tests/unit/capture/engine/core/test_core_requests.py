"""Requests that reach an engine core without a part of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.contracts import parts
from headgate.capture.engine.contracts.wire_format import WIRE_KEY
from headgate.capture.engine.core import engine_core


def request(**wire: Any) -> SimpleNamespace:
    return SimpleNamespace(request_id="r", sampling_params=SimpleNamespace(extra_args={WIRE_KEY: wire}))


def test_a_request_that_captures_passes_and_reads_no_metadata_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it takes 10 ms and more, on the thread that takes requests, beside the one that runs the steps."""
    take = engine_core.preprocess_add_request(lambda engine, request: request)
    captures = request(v=1, capture={})
    take(SimpleNamespace(), captures)
    monkeypatch.setattr(parts, "entry_points", None)

    assert take(SimpleNamespace(), captures) is captures


def test_a_request_for_a_part_that_is_not_open_is_a_bug() -> None:
    take = engine_core.preprocess_add_request(lambda engine, request: request)

    with pytest.raises(AssertionError, match="steering is not open"):
        take(SimpleNamespace(), request(v=1, parts={"steering": {}}))
