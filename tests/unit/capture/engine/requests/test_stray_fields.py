"""Names that begin like our fields: found wherever they would act on nothing, refused where our fields are read."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.capture.engine.requests.request_reader import RequestReader
from headgate.capture.engine.requests.stray_fields import find_ignored, refuse_unknown
from headgate.capture.schema.errors import RequestError

UNKNOWN = (
    "steerings",
    "steering_of_tomorrow",
    "prefill_steering_vector",
    "decode_steering_",
    "sae_of_tomorrow",
    "captures",
)


class _Slotted:
    """vLLM's own is a struct: its fields are not among its attributes."""

    __slots__ = ("__dict__", "extra_args")

    def __init__(self, extra_args: dict[str, Any] | None) -> None:
        self.extra_args = extra_args


def params(extra_args: dict[str, Any] | None = None, **attributes: Any) -> Any:
    made = _Slotted(extra_args)
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_engine_refuses_a_name_in_extra_args(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        RequestReader().read(params({name: 1}), "r")

    assert caught.value.field == f"extra_args.{name}"
    assert "steering_vectors" in str(caught.value)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_engine_refuses_an_attribute(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        RequestReader().read_answered(params(None, **{name: 1}), "r", is_offline=True)

    assert caught.value.field == name


@pytest.mark.parametrize("given", [{}, {"steering_clamps": None}, {"temperature_of": 1, "sae": 2, "steer": 3, 4: 5}])
def test_other_names_and_no_values_are_left_alone(given: Any) -> None:
    assert RequestReader().read(params(given), "r") is None
    refuse_unknown(given)
    assert find_ignored(given) is None


def test_fields_within_fields_are_found_by_their_path() -> None:
    nested = {"sampling_params": {"n": 1, "extra_args": {"steering_name": "calm"}}}

    assert find_ignored(nested) == "sampling_params.extra_args.steering_name"
    assert find_ignored(nested, reads_extra_args=True) is None
    assert find_ignored({"extra_args": {"steering_name": "calm"}}, reads_extra_args=True) == "extra_args.steering_name"
    assert find_ignored({"vllm_xargs": "steering_name", "prompt": {"capture": 1}}) is None
