"""Results as JSON: whatever a payload is, the answer is one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headgate.capture.engine.server.openai_routes import encoded_result
from headgate.capture.schema.results import CaptureResult


def plain_result(instance: str, result: CaptureResult) -> Any:
    return json.loads(bytes(encoded_result(instance, result)))


class Summarised:
    def summary(self) -> dict[str, Any]:
        return {"rows": 3}


class Unsummarised:
    def summary(self) -> dict[str, Any]:
        raise OSError("the disk is gone")


def test_a_plain_result_keeps_its_fields() -> None:
    result = CaptureResult(status="ok", payload={"paths": ["a", "b"]}, num_rows=3, num_bytes=6, key="files")

    assert plain_result("files", result) == {
        "status": "ok",
        "error": None,
        "payload": {"paths": ["a", "b"]},
        "num_rows": 3,
        "num_bytes": 6,
        "dropped_rows": 0,
        "key": "files",
        "messages": None,
    }


def test_a_live_object_is_summarised() -> None:
    assert plain_result("x", CaptureResult(status="ok", payload=Summarised()))["payload"] == {"rows": 3}


def test_what_json_cannot_hold_is_null() -> None:
    plain = plain_result("x", CaptureResult(status="ok", payload=[float("nan"), float("inf"), 1.5]))

    assert plain["payload"] == [None, None, 1.5]
    json.dumps(plain, allow_nan=False)


@pytest.mark.parametrize("payload", [object(), {1j: 2}, Unsummarised()], ids=["object", "bad-key", "bad-summary"])
def test_a_payload_that_is_not_json_is_an_error_text(payload: Any) -> None:
    plain = plain_result("scores", CaptureResult(status="ok", payload=payload, num_rows=5))

    assert plain["status"] == "partial_error"
    assert plain["payload"] is None
    assert plain["num_rows"] == 5
    assert plain["error"].startswith(f"consumer 'scores': its payload, a {type(payload).__name__}, is not JSON")


def test_an_error_that_was_there_before_is_kept() -> None:
    plain = plain_result("scores", CaptureResult(status="error", error="it broke", payload=object()))

    assert plain["status"] == "error"
    assert plain["error"].startswith("it broke; consumer 'scores'")
