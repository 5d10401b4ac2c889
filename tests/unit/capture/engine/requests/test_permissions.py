"""What a client's key lets it capture: consumers, tags, sites and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.access.access_key import AccessKey, KeyLimits, digest_of
from headgate.capture.engine.requests.call_context import HttpCall
from headgate.capture.engine.requests.capture_frontend import FrontEnd
from headgate.capture.engine.requests.sampling_params import CaptureRequest
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import BatchedConsumer, CapturedRequest, ModelInfo, SpecContext, parse_client_spec
from headgate.capture.schema.errors import ForbiddenError, RequestError
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from tests.fakes.clients import show
from tests.fakes.driver_consumers import no_drivers

SITES = (Site(0, HookPoint.POST_MLP), Site(1, HookPoint.POST_MLP), FINAL_NORM_SITE)
MODEL = ModelInfo(name="tiny", num_layers=2, hidden_size=8, dtype="float32", sites=SITES)
ROW_BYTES = 32


class Answered(BatchedConsumer):
    is_awaited = True

    def on_capture(self, captured: CapturedRequest) -> Any:
        raise AssertionError("nothing is captured here")


class Tagged(Answered):
    takes_tag = True
    is_awaited = False

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        spec = parse_client_spec(raw, context, options=("tag",))
        return replace(spec, options={"tag": "default", **spec.options})


class Watching(Answered):
    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec:
        return CaptureSpec(sites=context.model.sites, positions=Named("all"))


CONSUMERS: Mapping[str, type[BatchedConsumer]] = {
    "files": Tagged,
    "answers": Answered,
    "watching": Watching,
    "hidden_states": Answered,
}


@pytest.fixture(autouse=True)
def no_caller() -> Iterator[None]:
    show()
    yield
    show()


def ask(capture: Any, *, states: Any = None, call: HttpCall | None = None, **key: Any) -> CaptureRequest:
    """Read and resolve a request of 10 prompt tokens, which may generate 5, of a client with this key."""
    limits = KeyLimits(**key.pop("limits", {}))
    if key.pop("has_key", True):
        alice = AccessKey(name="alice", sha256=digest_of("alice"), roles=("capture",), limits=limits, **key)
        show(alice)
    config = CaptureConsumersConfig(consumers=tuple(CaptureConsumerSpec(name=name) for name in CONSUMERS))
    front = FrontEnd(config, MODEL, CONSUMERS, num_stages=1, open_drivers=no_drivers)
    extra = {"capture": capture, "return_hidden_states": states}
    params = SimpleNamespace(extra_args=extra, max_tokens=5, n=1)
    found = front.capture_reader.read(params, "r")
    assert found is not None
    return front.resolve(found, 10, params, None, call)


def rows(*layers: int, positions: Any = "all_prompt", **options: Any) -> dict[str, Any]:
    return {"hooks": {"post_mlp": list(layers or (0,))}, "positions": positions, **options}


def test_a_key_without_limits_may_capture_everything() -> None:
    asked = ask({"files": rows(0, 1, tag="any"), "answers": rows()}, states=True)

    assert asked.specs.keys() == CONSUMERS.keys()


@pytest.mark.parametrize(
    ("capture", "states", "field"),
    [
        ({"files": rows()}, None, "capture.files"),
        ({"answers": rows(), "files": rows()}, None, "capture.files"),
        ({"answers": rows()}, True, "return_hidden_states"),
    ],
)
def test_a_consumer_that_the_key_does_not_name_is_refused(capture: Any, states: Any, field: str) -> None:
    with pytest.raises(ForbiddenError, match="'alice' may not use this consumer; it may use answers") as raised:
        ask(capture, states=states, consumers=("answers",))

    assert raised.value.field == field


def test_what_the_operator_records_of_everybody_needs_no_permission() -> None:
    asked = ask({"answers": rows()}, consumers=("answers",), sites={"post_mlp": frozenset({0})})

    assert asked.specs["watching"].sites == SITES


@pytest.mark.parametrize(
    ("tag", "patterns", "default", "expected"),
    [
        ("alice-1", ("alice-*",), None, "alice-1"),
        ("shared", ("alice-*", "shared"), None, "shared"),
        (None, ("alice-*",), "alice-runs", "alice-runs"),
        ("alice-2", ("alice-*",), "alice-runs", "alice-2"),
        (None, None, "alice-runs", "alice-runs"),
        (None, None, None, "default"),
    ],
)
def test_a_tag_is_one_of_the_keys(
    tag: str | None, patterns: tuple[str, ...] | None, default: str | None, expected: str
) -> None:
    given = {} if tag is None else {"tag": tag}
    asked = ask({"files": rows(**given), "answers": rows()}, tags=patterns, default_tag=default)

    assert asked.specs["files"].options["tag"] == expected
    assert "tag" not in asked.specs["answers"].options


@pytest.mark.parametrize("tag", ["bob-1", "alice", "xalice-1", None])
def test_another_tag_is_refused(tag: str | None) -> None:
    with pytest.raises(ForbiddenError, match=r"capture\.files\.tag: .* but under alice-\*") as raised:
        ask({"files": rows(**({} if tag is None else {"tag": tag}))}, tags=("alice-*",))

    assert raised.value.field == "capture.files.tag"


def test_a_site_that_the_key_does_not_name_is_refused() -> None:
    sites = {"post_mlp": frozenset({1})}

    assert ask({"answers": rows(1)}, sites=sites).specs["answers"].sites == (SITES[1],)
    with pytest.raises(ForbiddenError, match=r"may not capture the site 0\.post_mlp") as raised:
        ask({"answers": rows(0, 1)}, sites=sites)
    assert raised.value.field == "capture.answers.hooks.post_mlp"
    with pytest.raises(ForbiddenError, match="final_norm"):
        ask({"answers": rows(1)}, states=True, sites=sites)
    ask({"answers": rows(0, 1)}, states=True, sites={"post_mlp": "all", "final_norm": "all"})


def test_a_call_captures_at_most_so_much() -> None:
    limits = {"max_request_bytes": 20 * ROW_BYTES, "max_request_rows": 12}
    call = HttpCall()

    ask({"answers": rows(0, 1)}, limits=limits, call=call)
    with pytest.raises(RequestError, match=r"capture\.answers: .* 20 positions; at most 12"):
        ask({"answers": rows(0)}, limits=limits, call=call)
    with pytest.raises(RequestError, match="640 bytes; at most 639"):
        ask({"answers": rows(0, 1)}, limits={"max_request_bytes": 20 * ROW_BYTES - 1})


def test_an_answer_holds_at_most_so_much_and_files_do_not_count() -> None:
    limits = {"max_inline_bytes": 10 * ROW_BYTES}

    ask({"answers": rows(0), "files": rows(0, 1)}, limits=limits)
    with pytest.raises(RequestError, match=r"capture\.answers: .* 640 bytes; at most 320"):
        ask({"answers": rows(0, 1), "files": rows(0)}, limits=limits)
