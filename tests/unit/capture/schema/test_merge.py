"""Answers of several stages and samples become one that says no more and no less than they do together."""

from __future__ import annotations

import pytest

from headgate.capture.schema.results import CaptureResult, Status, merge_samples, merge_stages


def ok(payload: object = None, **counts: int) -> CaptureResult:
    return CaptureResult(status="ok", payload=payload, **counts)


@pytest.mark.parametrize(
    ("statuses", "merged"),
    [
        (["ok", "ok"], "ok"),
        (["error", "error"], "error"),
        (["ok", "error"], "partial_error"),
        (["partial_error", "ok"], "partial_error"),
        (["ok", "pending", "error"], "pending"),
    ],
)
def test_statuses_merge_to_what_they_say_together(statuses: list[Status], merged: Status) -> None:
    results = [
        CaptureResult(status=status, error=None if status in ("ok", "pending") else f"e{index}", payload=index)
        for index, status in enumerate(statuses)
    ]

    stages, samples = merge_stages(dict(enumerate(results))), merge_samples(results)

    assert stages.status == samples.status == merged
    assert stages.payload == samples.payload == list(range(len(results)))
    texts = [(index, result.error) for index, result in enumerate(results) if result.error]
    assert (stages.error or "") == "; ".join(f"stage {index}: {text}" for index, text in texts)
    assert (samples.error or "") == "; ".join(f"sample {index}: {text}" for index, text in texts)


def test_stages_share_positions_and_samples_do_not() -> None:
    results = [ok("a", num_rows=4, num_bytes=10, dropped_rows=1), ok("b", num_rows=5, num_bytes=20)]

    assert merge_stages(dict(enumerate(results))) == ok(["a", "b"], num_rows=5, num_bytes=30, dropped_rows=1)
    assert merge_samples(results) == ok(["a", "b"], num_rows=9, num_bytes=30, dropped_rows=1)


def test_a_stage_that_had_nothing_to_do_is_left_out_unless_all_had() -> None:
    assert merge_stages({0: ok(), 1: ok("a", num_rows=1), 2: ok()}) == ok("a", num_rows=1)
    assert merge_stages({0: ok(), 1: ok()}) == ok()
