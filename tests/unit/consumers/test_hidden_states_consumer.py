"""The consumers whose payload is part of the answer: the last row of a sample, and small captures."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
import torch

from headgate.capture.engine.requests.call_context import SPEC, plain_state, read_form, tensor_of
from headgate.capture.schema.consumer import ConsumerContext
from headgate.capture.schema.errors import ConsumerError, RequestError
from headgate.capture.schema.positions import Named
from headgate.capture.schema.results import CaptureResult, Origin, join_key
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.filesystem.formats.request_layout import read_header
from headgate.consumers.hidden_states import KEEP_ROWS, HiddenStatesConsumer
from headgate.consumers.inline import MAX_CALLS, InlineConsumer

PROMPT = 3
CONTEXT = ConsumerContext(instance_name="hidden_states", model=EXAMPLE_MODEL)
ROW_BYTES = EXAMPLE_MODEL.hidden_size * 2


@pytest.fixture
def feed() -> Feed:
    return Feed(HiddenStatesConsumer({}, CONTEXT))


def request(output: int, name: str = "r", **kwargs: Any) -> ExampleRequest:
    return ExampleRequest(SPEC, request_id=name, prompt=PROMPT, output=output, **kwargs)


def state(payload: Any) -> torch.Tensor | None:
    return tensor_of(CaptureResult(status="ok", payload=payload))


@pytest.mark.parametrize("num_output", [1, 2, 9, KEEP_ROWS + 50])
def test_the_last_row_is_kept(feed: Feed, num_output: int) -> None:
    one = request(num_output)

    payload = feed.whole(one)

    assert payload["position"] == PROMPT + num_output - 2
    expected = one.rows(FINAL_NORM_SITE, one.wanted())[-1]
    found = state(payload)
    assert found is not None
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_rows_past_the_end_are_passed_over(feed: Feed) -> None:
    one = request(3)
    feed.begin(one)
    feed.step({one: (0, 3)})
    for position in range(3, 40):
        feed.step({one: (position, position + 1)})

    assert feed.finish(one)["position"] == 4


def test_an_engine_that_ran_too_far_ahead_is_an_error(feed: Feed) -> None:
    one = request(3)
    feed.begin(one)
    feed.step({one: (0, 3)})
    for position in range(3, 6 + KEEP_ROWS):
        feed.step({one: (position, position + 1)})

    with pytest.raises(ConsumerError, match=r"past the end of request client-r before .*stop_token_ids"):
        feed.finish(one)


def test_without_its_last_row_there_is_no_state(feed: Feed) -> None:
    one = request(3, status="abort")
    feed.begin(one)
    feed.step({one: (0, 3)})

    assert feed.finish(one) is None


def test_requests_are_kept_apart(feed: Feed) -> None:
    one, other = request(2, "one"), request(3, "other")
    feed.begin(one, other)
    feed.step({one: (0, 4), other: (0, 5)})
    feed.abandon(one)

    found = state(feed.finish(other))
    assert found is not None
    assert torch.equal(found, other.rows(FINAL_NORM_SITE, other.wanted())[-1])


def test_a_stage_without_the_norm_says_nothing(feed: Feed) -> None:
    one = ExampleRequest(CaptureSpec(sites=(), positions=Named("all")), request_id="r", prompt=PROMPT, output=1)
    feed.begin(one)

    assert feed.finish(one) is None


@pytest.mark.parametrize(
    ("value", "form"), [(None, None), (False, None), (True, "list"), ("list", "list"), ("base64", "base64")]
)
def test_forms(value: object, form: str | None) -> None:
    assert read_form(value) == form


@pytest.mark.parametrize("value", ["yes", 1, 0, [], {}], ids=repr)
def test_other_forms_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match=r"return_hidden_states: expected true, false"):
        read_form(value)


def test_a_state_as_json() -> None:
    payload = {"dtype": "float32", "shape": [2], "data": base64.b64encode(torch.tensor([1.5, -2.0]).numpy()).decode()}
    result = CaptureResult(status="ok", payload=payload)

    assert plain_state(result, "list") == [1.5, -2.0]
    assert plain_state(result, "base64") == payload


@pytest.mark.parametrize("payload", [None, "x", {}, {"dtype": "float32", "data": "?"}], ids=repr)
def test_what_is_no_state_is_null(payload: Any) -> None:
    for form in ("list", "base64"):
        assert plain_state(CaptureResult(status="ok", payload=payload), form) is None  # type: ignore[arg-type]
    assert plain_state(None, "list") is None


def small(max_bytes: int) -> Feed:
    return Feed(InlineConsumer({"max_bytes": max_bytes}, CONTEXT))


def wide(name: str = "r") -> ExampleRequest:
    spec = CaptureSpec(
        sites=(Site(1, HookPoint.POST_MLP), FINAL_NORM_SITE),
        positions=Named("all"),
        options={"tag": "inline", "request_id": name},
    )
    return ExampleRequest(spec, request_id=name, prompt=PROMPT, output=3)


def test_a_capture_of_just_the_limit_fits() -> None:
    assert small(2 * 5 * ROW_BYTES).whole(wide())["format"] == "safetensors"


def test_a_capture_above_the_limit_is_an_error_and_spares_others() -> None:
    feed = small(2 * 5 * ROW_BYTES - 1)
    one = wide()
    feed.begin(one)
    for position in range(5):
        feed.step({one: (position, position + 1)})

    with pytest.raises(ConsumerError, match=f"more than an answer may hold here, {2 * 5 * ROW_BYTES - 1} bytes"):
        feed.finish(one)
    other = ExampleRequest(wide().info.spec, request_id="other", prompt=PROMPT, output=2)
    assert feed.whole(other)["format"] == "safetensors"


def of_call(call: str, name: str, *, output: int = 3) -> ExampleRequest:
    """A request of an HTTP call: five rows at two sites, unless it has another `output`."""
    one = ExampleRequest(wide(name).info.spec, request_id=name, prompt=PROMPT, output=output)
    one.info = replace(one.info, origin=Origin(None, join_key(call, name)))
    return one


def test_the_samples_and_prompts_of_a_call_share_its_limit() -> None:
    feed = small(3 * 5 * 2 * ROW_BYTES)
    running = [of_call("call", f"sample-{index}") for index in range(3)]
    feed.begin(*running)
    for one in running:
        feed.step({one: (0, 5)})

    assert [feed.finish(one)["format"] for one in running] == ["safetensors"] * 3
    with pytest.raises(ConsumerError, match="other prompts and samples"):
        feed.whole(of_call("call", "later"))
    assert feed.whole(of_call("another call", "free"))["format"] == "safetensors"


def test_rows_that_are_not_sent_leave_room_for_others() -> None:
    feed = small(5 * 2 * ROW_BYTES)
    given_up, long, short = of_call("call", "given-up"), of_call("call", "long", output=4), of_call("call", "short")
    for one in (given_up, long):
        feed.begin(one)
        feed.step({one: (0, 3)})
        feed.abandon(one)
    with pytest.raises(ConsumerError, match="other prompts and samples"):
        feed.whole(of_call("call", "too-long", output=4))

    assert feed.whole(short)["format"] == "safetensors"


def test_calls_that_have_ended_are_remembered_up_to_a_bound() -> None:
    feed = small(5 * 2 * ROW_BYTES)
    last = f"call-{MAX_CALLS}"
    for index in range(MAX_CALLS + 1):
        feed.begin(one := of_call(f"call-{index}", f"r-{index}"))
        if index in (0, MAX_CALLS):
            feed.step({one: (0, 5)})
        feed.abandon(one) if 0 < index < MAX_CALLS else feed.finish(one)

    assert feed.whole(of_call("call-0", "forgotten"))["format"] == "safetensors"
    with pytest.raises(ConsumerError, match="other prompts and samples"):
        feed.whole(of_call(last, "remembered"))


def test_it_says_what_files_say_about_themselves() -> None:
    content = base64.b64decode(small(1 << 20).whole(wide("cmpl-1"))["data"])

    class Bytes:
        def size(self, path: str) -> int:
            return len(content)

        def read(self, path: str, offset: int, length: int) -> bytes:
            return content[offset : offset + length]

    _, metadata = read_header(Bytes(), "x")  # type: ignore[arg-type]
    assert (metadata["format"], metadata["request_id"]) == ("headgate-capture", "cmpl-1")
    assert metadata["num_prompt_tokens"] == "3"
