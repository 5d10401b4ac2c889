"""Names that requests have for themselves: one has each, for as long as it runs or its files are being written."""

from __future__ import annotations

import gc

import pytest

from headgate.capture.engine.requests.capture_frontend import LINGER_S, Claims
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.results import CaptureResult, CaptureResults

NAMES = {"root/a": "capture.files"}


def results(status: str) -> CaptureResults:
    result = CaptureResult(status=status)  # type: ignore[arg-type]
    return CaptureResults([{"files": result}], {"files": result})


def test_a_name_is_free_once_its_request_is_gone() -> None:
    claims = Claims()
    first = claims.claim(NAMES, None)

    with pytest.raises(RequestError, match=r"^capture\.files\.request_id: root/a is being written for another request"):
        claims.claim(NAMES, None)
    assert claims.claim({"root/b": "capture.files"}, None) is not None
    del first
    gc.collect()
    assert claims.claim(NAMES, None) is not None


def test_prompts_of_one_call_are_told_to_part() -> None:
    claims = Claims()
    first = claims.claim(NAMES, "call")

    with pytest.raises(RequestError, match="all prompts of this call would write root/a"):
        claims.claim(NAMES, "call")
    with pytest.raises(RequestError, match="is being written for another request"):
        claims.claim(NAMES, "other")
    assert first is not None


def test_a_name_is_held_on_while_its_file_is_being_written() -> None:
    now = 0.0
    claims = Claims(lambda: now)
    for status, is_held in (("ok", False), ("pending", True)):
        claim = claims.claim(NAMES, None)
        claims.linger(claim, results(status))
        del claim
        if is_held:
            with pytest.raises(RequestError):
                claims.claim(NAMES, None)
    now = LINGER_S
    assert claims.claim(NAMES, None) is not None


def test_a_request_without_names_claims_nothing() -> None:
    claims = Claims()

    assert claims.claim({}, None) is None
    claims.linger(None, results("pending"))
