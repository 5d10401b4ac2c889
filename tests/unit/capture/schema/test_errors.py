"""Errors can be answered whatever names a client has chosen."""

from __future__ import annotations

import pytest

from headgate.capture.schema.errors import MAX_FIELD, ForbiddenError, RequestError

HALF = "\ud800"


@pytest.mark.parametrize("make", [RequestError, lambda field, message: ForbiddenError(message, field)])
def test_half_a_surrogate_pair_is_escaped(make: type[RequestError]) -> None:
    error = make(f"capture.{HALF}.\u00e9", f"no consumer {HALF}")

    assert error.field == "capture.\\ud800.\u00e9"
    assert str(error) == "capture.\\ud800.\u00e9: no consumer \\ud800"
    assert str(error).encode()


def test_a_long_name_is_cut_short() -> None:
    error = RequestError(HALF * 10_000, "is long")

    assert error.field == "\\ud800" * MAX_FIELD + "..."


def test_a_refusal_may_concern_no_field() -> None:
    error = ForbiddenError(f"not {HALF}")

    assert (error.field, str(error)) == (None, "not \\ud800")
