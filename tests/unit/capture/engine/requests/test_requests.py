"""What a request asks of capture: checked, resolved, folded into what travels to the worker."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headgate.capture.engine.contracts.request_part import PartRequest
from headgate.capture.engine.contracts.wire_format import WIRE_KEY
from headgate.capture.engine.requests.capture_request import (
    CaptureRequestReader,
    messages_of,
    refuse_unconfigured,
    resolve,
)
from headgate.capture.engine.requests.chat_messages import LocatedChat, RenderedMessage
from headgate.capture.engine.requests.request_reader import RequestReader
from headgate.capture.engine.requests.sampling_params import (
    REQUEST_KEY,
    CaptureRequest,
    HeadgateRequest,
    attach,
    attached,
    fold,
)
from headgate.capture.schema.batch import RequestWire
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import BatchedConsumer, CapturedRequest, ModelInfo, SpecContext
from headgate.capture.schema.errors import ConsumerError, RequestError
from headgate.capture.schema.positions import Indices, Message, Named, Span, parse_positions, parts_of
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec

MODEL = ModelInfo(
    name="tiny",
    num_layers=4,
    hidden_size=8,
    dtype="float32",
    sites=tuple(Site(layer, HookPoint.POST_MLP) for layer in range(4)),
)
HOOKS = {"hooks": {"post_mlp": [1]}}


class Rows(BatchedConsumer):
    def on_capture(self, captured: CapturedRequest) -> Any:
        raise AssertionError("nothing is captured here")


class Watching(Rows):
    """Looks at requests whose id says so."""

    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec | None:
        if context.client_request_id.startswith("quiet"):
            return None
        return CaptureSpec(sites=context.model.sites[:1], positions=Named("last_prompt"))


class Closed(Watching):
    reads_client_spec = False


class Broken(Rows):
    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        raise KeyError("oops")


class Staggered(Rows):
    """Takes a site at the positions that a request chooses, and another one at others."""

    @classmethod
    def validate_client_spec(cls, raw: Any, context: SpecContext) -> CaptureSpec:
        chosen = {HookPoint.PRE_ATTN: parse_positions(raw["chosen"], f"{context.field}.chosen")}
        sites = (Site(0, HookPoint.PRE_ATTN), Site(0, HookPoint.POST_MLP))
        positions = parse_positions(raw["others"], f"{context.field}.others")
        return CaptureSpec(sites=sites, positions=positions, hook_positions=chosen, positions_field="chosen")


def door(**consumers: type[BatchedConsumer]) -> CaptureRequestReader:
    specs = tuple(CaptureConsumerSpec(name=name) for name in consumers)
    return CaptureRequestReader(CaptureConsumersConfig(consumers=specs), MODEL, consumers)


class Params(SimpleNamespace):
    """As much of a `SamplingParams` as is looked at here."""

    extra_args: dict[str, Any] | None


def params(**extra: Any) -> Params:
    return Params(extra_args=extra or None, n=1, skip_reading_prefix_cache=None)


def read(given: Any, where: CaptureRequestReader, request_id: str = "r") -> CaptureRequest:
    ask = where.read(given, request_id)
    assert ask is not None
    return ask


def request(prompt: list[int], sampling: Params | None = None, **fields: Any) -> Any:
    made = {"sampling_params": sampling or params(), "prompt_token_ids": prompt, "prompt_embeds": None}
    return SimpleNamespace(**{**made, "resumable": False, **fields})


def test_a_request_that_asks_for_nothing() -> None:
    assert door(rows=Rows).read(params(), "r") is None


def test_specs_are_checked_by_their_consumers() -> None:
    ask = read(params(capture={"rows": HOOKS}), door(rows=Rows))

    assert ask.specs == {"rows": CaptureSpec(sites=(Site(1, HookPoint.POST_MLP),), positions=Named("all"))}
    assert ask.is_explicit
    assert not ask.wait


def test_parameters_of_consumers_are_parsed_once_for_all_requests() -> None:
    """Plain requests ask, too, whether a consumer wants them."""
    parsed = []

    def parse(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        parsed.append(given)
        return parsed

    class Asking(Rows):
        @classmethod
        def global_capture_spec(cls, context: SpecContext) -> CaptureSpec | None:
            assert context.parsed_params(parse) is parsed
            return None

    where = door(one=Asking, other=Asking)

    for request_id in ("a", "b", "c"):
        assert where.read(params(), request_id) is None

    assert len(parsed) == 2


@pytest.mark.parametrize(("given", "num_asked"), [({}, 0), ({"hooks": None}, 0), ({"hooks": {}}, 3)])
def test_who_looks_at_no_request_unasked_is_not_asked(given: dict[str, Any], num_asked: int) -> None:
    asked = []

    class Asking(Rows):
        global_spec_param = "hooks"

        @classmethod
        def global_capture_spec(cls, context: SpecContext) -> CaptureSpec | None:
            asked.append(context.client_request_id)
            return None

    config = CaptureConsumersConfig(consumers=(CaptureConsumerSpec(name="it", params=given),))
    where = CaptureRequestReader(config, MODEL, {"it": Asking})

    assert where.has_unasked == bool(num_asked)
    for request_id in ("a", "b", "c"):
        assert where.read(params(), request_id) is None

    assert len(asked) == num_asked


def test_keys_are_never_the_same() -> None:
    where = door(rows=Rows)

    assert read(params(capture={"rows": HOOKS}), where).key != read(params(capture={"rows": HOOKS}), where).key


def test_a_global_consumer_looks_at_every_request_it_wants() -> None:
    where = door(rows=Rows, watching=Watching)

    assert list(read(params(), where).specs) == ["watching"]
    assert not read(params(), where).is_explicit
    assert list(read(params(capture={"rows": HOOKS}), where).specs) == ["rows", "watching"]
    assert where.read(params(), "quiet-1") is None


def test_what_a_client_asks_of_a_global_consumer_takes_its_place() -> None:
    ask = read(params(capture={"watching": HOOKS}), door(watching=Watching))

    assert ask.specs["watching"].positions == Named("all")


@pytest.mark.parametrize(
    ("capture", "field", "reason"),
    [
        ({"nobody": HOOKS}, "capture.nobody", "no such consumer; configured: rows"),
        ({"closed": HOOKS}, "capture.closed", "requests cannot choose"),
        ({"rows": {}}, "capture.rows.hooks", "required"),
        ([HOOKS], "capture", "expected a non-empty object"),
        ({}, "capture", "expected a non-empty object"),
    ],
)
def test_a_wrong_spec_names_its_field(capture: Any, field: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        door(rows=Rows, closed=Closed).read(params(capture=capture), "r")

    assert caught.value.field == field


def test_capture_wait_is_true_or_false() -> None:
    with pytest.raises(RequestError, match="capture_wait: expected true or false"):
        door(rows=Rows).read(params(capture={"rows": HOOKS}, capture_wait=1), "r")


def test_a_consumer_that_fails_to_check_is_named() -> None:
    with pytest.raises(ConsumerError, match=r"consumer 'broken' failed to check capture\.broken: KeyError"):
        door(broken=Broken).read(params(capture={"broken": HOOKS}), "r")


@pytest.mark.parametrize("key", [WIRE_KEY, REQUEST_KEY])
def test_keys_of_headgates_own_are_refused(key: str) -> None:
    with pytest.raises(RequestError, match=rf"extra_args\.{key}: this key is headgate's own"):
        RequestReader().read(params(**{key: {"v": 1, "capture": {"reply": "ipc:///tmp/mine"}}}), "r")


@pytest.mark.parametrize("field", ["capture", "capture_wait"])
def test_an_engine_without_capture_says_how_to_configure_it(field: str) -> None:
    with pytest.raises(RequestError, match=f"{field}: this engine was started without capture.*--capture-consumers"):
        refuse_unconfigured(params(**{field: True}))


def test_positions_are_resolved_and_stay_so() -> None:
    capture = {"rows": {**HOOKS, "positions": [-1, 2]}}
    ask = read(params(capture=capture), door(rows=Rows))

    resolved = resolve(ask, 10, None)

    assert resolved.specs["rows"].positions.described() == [2, 9]
    assert resolve(resolved, 10, None) == resolved


@pytest.mark.parametrize("positions", ["all", [0, 2], {"start": 1, "stop": 4}])
def test_what_is_absolute_already_is_not_made_anew_for_each_prompt(positions: Any) -> None:
    ask = read(params(capture={"rows": {**HOOKS, "positions": positions}}), door(rows=Rows))

    assert resolve(ask, 5, None) is ask
    assert resolve(ask, 2, None) is ask


def test_message_selectors_are_resolved_by_whoever_knows_the_chat() -> None:
    capture = {"rows": {**HOOKS, "positions": {"role": "user", "index": 0}}}
    ask = read(params(capture=capture), door(rows=Rows))
    field = "capture.rows.positions"
    assert messages_of(ask) == {Message("user", 0): field}

    messages = LocatedChat(["user"], {0: RenderedMessage(2, tuple(range(5)))}).messages(range(10))
    resolved = resolve(ask, 10, messages)

    assert resolved.specs["rows"].positions == Span(2, 5)
    with pytest.raises(RequestError, match="needs a chat request"):
        resolve(ask, 10, None)


def test_message_selectors_are_found_among_several() -> None:
    first, last = {"role": "user", "index": 0, "stop": 2}, {"index": -1, "include_generated": True}
    ask = read(params(capture={"rows": {**HOOKS, "positions": [first, "last_prompt", last]}}), door(rows=Rows))
    assert messages_of(ask) == {
        Message("user", 0, Span(0, 2)): "capture.rows.positions[0]",
        Message(None, -1, include_generated=True): "capture.rows.positions[2]",
    }
    rendered = {0: RenderedMessage(1, tuple(range(5))), 1: RenderedMessage(5, tuple(range(7)))}
    messages = LocatedChat(["user", "assistant"], rendered).messages(range(10))

    resolved = resolve(ask, 10, messages).specs["rows"].positions

    assert parts_of(resolved) == (Indices.of([1, 2, 5, 6, 9]), Span(10))
    with pytest.raises(RequestError, match=r"^capture\.rows\.positions\[0\]: a message selector needs a chat"):
        resolve(ask, 10, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"capture": {"rows": HOOKS}, "capture_messages": 1}, "expected true or false, got 1"),
        ({"capture_messages": True}, "set 'capture', too"),
    ],
)
def test_results_tell_of_messages_if_there_are_any(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=f"^capture_messages: .*{said}"):
        door(rows=Rows).read(params(**fields), "r")

    asked = [read(params(capture={"rows": HOOKS}, capture_messages=value), door(rows=Rows)) for value in (True, False)]
    assert [ask.messages for ask in asked] == [[], None]


def test_an_ask_travels_on_a_copy() -> None:
    given = params(capture={"rows": HOOKS}, other=1)
    before = copy.deepcopy(given.extra_args)
    asked = HeadgateRequest(capture=read(given, door(rows=Rows)))

    carrier = attach(given, asked)

    for passed_on in (carrier, copy.copy(carrier), copy.deepcopy(carrier)):
        assert attached(passed_on) is asked
        assert list(passed_on.extra_args) == ["other", REQUEST_KEY]
    assert attached(given) is None
    assert given.extra_args == before


def test_a_fold_is_plain_and_replaces_request_and_fields() -> None:
    given = params(capture={"rows": HOOKS}, capture_wait=True, other=1)
    ask = resolve(read(given, door(rows=Rows)), 10, None)
    asked = HeadgateRequest(capture=ask, parts={"steering": PartRequest(wire={"is_shared": True}, field="f", names={})})
    made = request([5] * 10, cast("Params", attach(given, asked)))

    fold(made, asked, "client-7")

    extra = cast("dict[str, Any]", made.sampling_params.extra_args)
    assert list(extra) == ["other", WIRE_KEY]
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(extra[WIRE_KEY]), type=RequestWire)
    assert wire == extra[WIRE_KEY]
    specs = wire["capture"].pop("specs")
    assert wire["capture"] == {"id": "client-7", "n": 1, "key": ask.key, "reply": None, "wait": True}
    assert CaptureSpec.from_wire(specs["rows"]) == ask.specs["rows"]
    assert wire["parts"] == {"steering": {"is_shared": True}}


def test_a_request_that_comes_to_nothing_leaves_nothing_behind() -> None:
    made = request([5], cast("Params", attach(params(capture_wait=True), HeadgateRequest())))

    fold(made, HeadgateRequest(), "r")

    assert made.sampling_params.extra_args is None


@pytest.mark.parametrize(
    ("chosen", "others", "skips"),
    [("last_prompt", "last_prompt", False), ([2], "last_prompt", True), ("last_prompt", [2], True)],
)
def test_positions_of_a_hook_point_are_resolved_and_computed_as_the_others(
    chosen: Any, others: Any, skips: bool
) -> None:
    ask = read(params(capture={"rows": {"chosen": chosen, "others": others}}), door(rows=Staggered))
    made = request([5] * 10)

    resolved = resolve(ask, 10, None)
    fold(made, HeadgateRequest(capture=resolved), "r")

    assert resolve(resolved, 10, None) is resolved
    assert made.sampling_params.skip_reading_prefix_cache is (True if skips else None)


def test_a_selector_that_chooses_nothing_is_refused_by_the_name_of_its_field() -> None:
    for chosen in ([-11], {"role": "user"}):
        ask = read(params(capture={"rows": {"chosen": chosen, "others": "all"}}), door(rows=Staggered))

        with pytest.raises(RequestError) as caught:
            resolve(ask, 10, None)

        assert caught.value.field == "capture.rows.chosen"
    assert messages_of(ask) == {Message("user", -1): "capture.rows.chosen"}


@pytest.mark.parametrize(
    ("positions", "skips"),
    [("all", True), ("all_prompt", True), ([3], True), ("last_prompt", False), ("all_generated", False), ([-1], False)],
)
def test_rows_of_the_prompt_must_be_computed(positions: Any, skips: bool) -> None:
    made = request([5] * 10)
    ask = read(params(capture={"rows": {**HOOKS, "positions": positions}}), door(rows=Rows))

    fold(made, HeadgateRequest(capture=resolve(ask, 10, None)), "r")

    assert made.sampling_params.skip_reading_prefix_cache is (True if skips else None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_embeds": [[0.5]], "prompt_token_ids": None}, "embeddings"),
        ({"resumable": True}, "streamed input"),
    ],
)
def test_kinds_of_requests_that_cannot_be_captured(fields: dict[str, Any], reason: str) -> None:
    ask = read(params(capture={"rows": HOOKS}), door(rows=Rows))

    with pytest.raises(RequestError, match=reason) as caught:
        fold(request([5], **fields), HeadgateRequest(capture=ask), "r")

    assert caught.value.field == "capture.rows"


class States(Rows):
    reads_client_spec = False
    is_awaited = True


def test_return_hidden_states_asks_for_the_last_rows_of_the_final_norm() -> None:
    asked = door(hidden_states=States, rows=Rows).read(params(return_hidden_states=True), "r")

    assert asked is not None
    assert list(asked.specs) == ["hidden_states"]
    spec = resolve(asked, 7, None).specs["hidden_states"]
    assert [site.name for site in spec.sites] == ["final_norm"]
    assert spec.positions == Span(6)
    assert (asked.is_explicit, asked.wait) == (True, True)


@pytest.mark.parametrize("wait", [None, True, False])
def test_it_is_waited_for_unless_the_client_says_otherwise(wait: bool | None) -> None:
    asked = door(hidden_states=States).read(params(return_hidden_states="base64", capture_wait=wait), "r")

    assert asked is not None
    assert asked.wait is (wait is not False)


def test_false_asks_for_nothing() -> None:
    assert door(hidden_states=States).read(params(return_hidden_states=False), "r") is None
    assert door(rows=Rows).read(params(return_hidden_states=False), "r") is None
    refuse_unconfigured(params(return_hidden_states=False))


def test_where_it_is_not_configured_the_error_says_how() -> None:
    with pytest.raises(RequestError, match=r"return_hidden_states: .*--enable-return-hidden-states"):
        door(rows=Rows).read(params(return_hidden_states=True), "r")
    with pytest.raises(RequestError, match=r"return_hidden_states: .*--enable-return-hidden-states"):
        refuse_unconfigured(params(return_hidden_states=True))


def test_its_consumer_cannot_be_named() -> None:
    with pytest.raises(RequestError, match=r"capture\.hidden_states: set return_hidden_states"):
        door(hidden_states=States).read(params(capture={"hidden_states": {}}), "r")
