"""Names that begin like our fields: found wherever they would act on nothing, refused where our fields are read."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.capture.engine.requests.request_reader import RequestReader
from headgate.capture.engine.requests.sampling_params import find_ignored, refuse_unknown
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


@pytest.mark.parametrize("field", ["steering_gates", "steering"])
def test_a_name_that_belongs_into_a_field_is_refused_beside_it(field: str) -> None:
    both = {"conversation_id": "c", field: [{}]}
    with pytest.raises(RequestError) as caught:
        refuse_unknown(both)
    assert caught.value.field == "conversation_id"
    assert f"within {field} alone" in str(caught.value)
    for made in (params(both), params(None, **both), params({field: [{}]}, conversation_id="c")):
        with pytest.raises(RequestError, match="conversation_id: is read within"):
            RequestReader().read(made, "r")


@pytest.mark.parametrize("beside", [{}, {"steering_gates": None}, {"return_steering_trace": True}])
def test_elsewhere_that_name_is_somebody_else_s(beside: Any) -> None:
    refuse_unknown({"conversation_id": "c", **beside})
    assert find_ignored({"conversation_id": "c"}) is None
    assert RequestReader().read(params({"conversation_id": "c"}), "r") is None


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
