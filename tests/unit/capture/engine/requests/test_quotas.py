"""How much a request may capture, known from its prompt and from what it may generate."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.requests.call_context import HttpCall, enter
from headgate.capture.engine.requests.capture_frontend import FrontEnd
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec, parse_config
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CapturedRequest,
    ModelInfo,
    Readout,
    RequestLengths,
    SpecContext,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.limits import count_rows
from headgate.capture.schema.positions import Indices, Named, PositionSelector, Span
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from tests.fakes.driver_consumers import no_drivers
from tests.fakes.readouts import Multiples, Shifted

SITES = (Site(0, HookPoint.POST_MLP), Site(1, HookPoint.POST_MLP), FINAL_NORM_SITE)
MODEL = ModelInfo(name="tiny", num_layers=2, hidden_size=8, dtype="float32", sites=SITES)
ROW_BYTES = 32
NUM_PROMPT, MAX_TOKENS = 10, 5


class Rows(BatchedConsumer):
    def on_capture(self, captured: CapturedRequest) -> Any:
        raise AssertionError("nothing is captured here")


class Watching(Rows):
    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec:
        return CaptureSpec(sites=context.model.sites, positions=Named("all"))


class Reading(Rows):
    """Gets five numbers of each row of the first site, and rows of the others."""

    @classmethod
    def readouts(cls, params: Any, model: ModelInfo) -> dict[Site, Readout]:
        return {SITES[0]: Multiples(5)}


class Asking(Reading):
    """Gives its readouts as many arguments as the client says."""

    @classmethod
    def readouts(cls, params: Any, model: ModelInfo) -> dict[Site, Readout]:
        return {SITES[0]: Shifted(5), SITES[1]: Shifted(2)}

    @classmethod
    def validate_client_spec(cls, raw: Any, context: SpecContext) -> CaptureSpec:
        return CaptureSpec(sites=SITES[: raw["sites"]], positions=Named("all"), arguments=(7,) * raw["arguments"])


class Staggered(Rows):
    """Takes the first site at the last position of the prompt, and the others everywhere; refuses long prompts."""

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        own = {SITES[-1].hook: Named("last_prompt")}
        return CaptureSpec(sites=context.model.sites, positions=Named("all"), hook_positions=own)

    @classmethod
    def check_lengths(cls, spec: CaptureSpec, context: SpecContext, lengths: RequestLengths) -> None:
        assert spec.hook_positions == {SITES[-1].hook: Named("last_prompt")}
        if lengths.num_samples > 3:
            raise RequestError(f"{context.field}.size", f"{lengths}, {lengths.num_rows} rows")


def check(
    capture: Any,
    *,
    n: int = 1,
    states: Any = None,
    max_tokens: int | None = MAX_TOKENS,
    call: HttpCall | None = None,
    **limits: int,
) -> None:
    consumers = {"rows": Rows, "others": Rows, "watching": Watching, "hidden_states": Rows, "reading": Reading}
    consumers["asking"] = Asking
    consumers["staggered"] = Staggered
    specs = tuple(CaptureConsumerSpec(name=name) for name in consumers)
    config = CaptureConsumersConfig(consumers=specs, **limits)  # type: ignore[arg-type]
    front = FrontEnd(config, MODEL, consumers, num_stages=1, open_drivers=no_drivers)
    extra = {"capture": capture, "return_hidden_states": states}
    params = SimpleNamespace(extra_args=extra, max_tokens=max_tokens, n=n)
    ask = front.capture_reader.read(params, "r")
    assert ask is not None
    front.resolve(ask, NUM_PROMPT, params, None, call)


def rows(positions: Any, *layers: int) -> Any:
    return {"hooks": {"post_mlp": list(layers or (0,))}, "positions": positions}


def test_rows_of_sites_with_positions_of_their_own_are_counted_there_alone() -> None:
    count = ROW_BYTES * (2 * 14 + 1)

    check({"staggered": {}}, max_request_bytes=count, max_request_rows=14)
    with pytest.raises(RequestError, match=f"{count} bytes; at most {count - 1} are allowed"):
        check({"staggered": {}}, max_request_bytes=count - 1)


def test_a_consumer_can_refuse_what_its_answer_could_come_to() -> None:
    check({"staggered": {}}, n=4, max_tokens=None)
    message = r"capture\.staggered\.size: .*num_prompt=10, max_tokens=5, num_samples=4.*, 14 rows"
    with pytest.raises(RequestError, match=message):
        check({"staggered": {}}, n=4)


@pytest.mark.parametrize(
    ("positions", "count"),
    [("all", 14), ("all_prompt", 10), ("all_generated", 4), ([0, 3, -1, 13, 14, 99], 4), ({"start": -2}, 6)],
    ids=str,
)
def test_rows_are_counted_as_they_could_be_at_most(positions: Any, count: int) -> None:
    check({"rows": rows(positions)}, max_request_rows=count)
    with pytest.raises(RequestError, match=rf"capture\.rows: .* {count} positions; at most {count - 1} are allowed"):
        check({"rows": rows(positions)}, max_request_rows=count - 1)


def test_outputs_of_readouts_count_for_themselves() -> None:
    num_bytes = 14 * (5 * 4 + ROW_BYTES)

    check({"reading": rows("all", 0, 1)}, max_request_bytes=num_bytes)
    with pytest.raises(RequestError, match=rf"{num_bytes} bytes; at most {num_bytes - 1}"):
        check({"reading": rows("all", 0, 1)}, max_request_bytes=num_bytes - 1)


def test_arguments_that_a_readout_does_not_take_are_refused() -> None:
    check({"asking": {"sites": 1, "arguments": 5}})
    check({"asking": {"sites": 2, "arguments": 2}})

    with pytest.raises(ConsumerError, match="'asking' gave 3 arguments to readouts that take 2 at most"):
        check({"asking": {"sites": 2, "arguments": 3}})
    with pytest.raises(ConsumerError, match="gave 1 arguments to readouts that take 0 at most"):
        check({"asking": {"sites": 3, "arguments": 1}})


def test_samples_count_together() -> None:
    check({"rows": rows("all_generated")}, n=3, max_request_rows=12)
    with pytest.raises(RequestError, match="12 positions; at most 11"):
        check({"rows": rows("all_generated")}, n=3, max_request_rows=11)


def test_the_prompts_of_a_call_count_together() -> None:
    call = HttpCall()
    for _ in range(2):
        check({"rows": rows("all_prompt")}, call=call, max_request_rows=20)
    with pytest.raises(RequestError, match=r"30 positions; at most 20 .* all prompts and samples"):
        check({"rows": rows("all_prompt")}, call=call, max_request_rows=20)

    check({"rows": rows("all_prompt")}, call=HttpCall(), max_request_rows=20)


def test_the_lists_of_a_call_are_bounded_together() -> None:
    call, listed = HttpCall(), [-1, *range(0, 3000, 3)]
    check({"rows": rows(listed)}, call=call, n=1000)
    with pytest.raises(RequestError, match=r"capture\.rows\.positions: the call lists 2000000 positions"):
        check({"rows": rows(listed)}, call=call, n=1000)


@pytest.mark.parametrize(("count", "is_kept"), [(3, True), (5000, False)])
def test_the_prompts_of_a_call_are_parsed_once_and_what_calls_write_alike_unless_it_is_long(
    count: int, is_kept: bool
) -> None:
    front = FrontEnd(CaptureConsumersConfig(consumers=(CaptureConsumerSpec(name="rows"),)), MODEL, {"rows": Rows},
                     num_stages=1, open_drivers=no_drivers)  # fmt: skip

    def read_twice() -> list[Any]:
        enter(HttpCall())
        params = SimpleNamespace(extra_args={"capture": {"rows": rows([0, *range(3, 3 + count)])}})
        return [front.capture_reader.read(params, name).specs["rows"] for name in "ab"]

    first, second = contextvars.copy_context().run(read_twice)
    (other, _) = contextvars.copy_context().run(read_twice)

    assert first.positions is second.positions
    assert first.sites is second.sites
    assert other == first
    assert (other.positions is first.positions) == is_kept


def test_bytes_are_counted_over_sites_and_consumers() -> None:
    capture = {"rows": rows("all_prompt", 0, 1), "others": rows("last_prompt")}
    num_bytes = (10 * 2 + 1) * ROW_BYTES

    check(capture, max_request_bytes=num_bytes)
    with pytest.raises(RequestError, match=rf"capture\.rows: .* {num_bytes} bytes; at most {num_bytes - 1}"):
        check(capture, max_request_bytes=num_bytes - 1)


def test_what_the_operator_records_does_not_count() -> None:
    check(None, max_request_rows=1, max_request_bytes=1)
    check({"rows": rows("last_prompt")}, states=True, max_request_rows=1, max_request_bytes=ROW_BYTES)


def test_nothing_is_refused_while_the_length_is_not_known() -> None:
    check({"rows": rows("all")}, max_tokens=None, max_request_rows=1)


@pytest.mark.parametrize(
    ("selector", "count"),
    [(Span(2, None, 3), 4), (Span(0, 4), 4), (Span(20), 0), (Indices.of((1, 5, 6)), 3), (Indices.of((13, 14)), 1)],
    ids=str,
)
def test_counts(selector: PositionSelector, count: int) -> None:
    assert count_rows(selector, NUM_PROMPT, 14) == count


@pytest.mark.parametrize("name", ["max_request_rows", "max_request_bytes"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_config({name: 0})
