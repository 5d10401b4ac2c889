"""Capture in the process that owns requests: who is answered, and for how long they wait."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.frontends.async_llm import check_health
from headgate.capture.engine.frontends.startup import open_drivers_with_engine
from headgate.capture.engine.requests.call_context import HttpCall, enter
from headgate.capture.engine.requests.capture_frontend import FRONT_END, FrontEnd, add_results, attach_results
from headgate.capture.engine.requests.sampling_params import CaptureRequest
from headgate.capture.links.hub import ResultHub
from headgate.capture.links.messages import Result
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import BatchedConsumer, CapturedRequest, ModelInfo, SpecContext
from headgate.capture.schema.errors import ConfigError, RequestError, UnsupportedError
from headgate.capture.schema.positions import Named
from headgate.capture.schema.results import CaptureResult, Origin
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from tests.deadlines import patience

MODEL = ModelInfo(name="tiny", num_layers=2, hidden_size=8, dtype="float32", sites=(Site(0, HookPoint.POST_MLP),))
ASKING = {"rows": {"hooks": {"post_mlp": [0]}}}


class Rows(BatchedConsumer):
    def on_capture(self, captured: CapturedRequest) -> Any:
        raise AssertionError("nothing is captured here")


class Watching(Rows):
    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec:
        return CaptureSpec(sites=context.model.sites, positions=Named("last_prompt"))


class WatchingHere(Watching):
    location = "driver"


class FrontEnds:
    """Makes front ends and closes them."""

    def __init__(self) -> None:
        self.made: list[FrontEnd] = []
        self.opened: list[ResultHub] = []

    def __call__(self, open_drivers: Any = None, **consumers: type[BatchedConsumer]) -> FrontEnd:
        config = CaptureConsumersConfig(
            consumers=tuple(CaptureConsumerSpec(name=name) for name in consumers), result_timeout_s=20.0
        )
        front = FrontEnd(config, MODEL, consumers, num_stages=1, open_drivers=open_drivers or self.opened.append)
        self.made.append(front)
        return front


@pytest.fixture
def front_ends() -> Iterator[FrontEnds]:
    front_ends = FrontEnds()
    yield front_ends
    for front in front_ends.made:
        front.close()


def params(**extra: Any) -> Any:
    return SimpleNamespace(extra_args=extra or None)


def ask(front: FrontEnd, *, is_offline: bool = False, **extra: Any) -> CaptureRequest:
    found = front.read(params(**extra), "r", is_offline=is_offline)
    assert found is not None
    return found


def deliver(front: FrontEnd, asked: CaptureRequest, **result: Any) -> None:
    front.hub.deliver(Result(key=asked.key, instance="rows", result=CaptureResult(status="ok", **result)))


def test_nothing_is_opened_before_a_request_captures(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows, watching=WatchingHere)

    assert front_ends.opened == []
    assert ask(front, capture=ASKING).reply == front.hub.address
    assert front_ends.opened == [front.hub]


def test_keys_of_one_call_begin_alike(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)

    def keys_of_a_call() -> list[str]:
        enter(HttpCall())
        return [ask(front, capture=ASKING).key for _ in range(2)]

    first, second = (contextvars.copy_context().run(keys_of_a_call) for _ in range(2))

    assert len({*first, *second}) == 4
    assert len({Origin(None, key).call for key in first}) == len({Origin(None, key).call for key in second}) == 1
    assert Origin(None, first[0]).call != Origin(None, second[0]).call


class Parts(Rows):
    sends_parts = True


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        (HttpCall(), "DELTA", True),
        (HttpCall(), "FINAL_ONLY", False),
        (HttpCall(has_turns=True), "DELTA", False),
        (None, "DELTA", False),
    ],
)
def test_parts_are_sent_for_chunks_alone(
    front_ends: FrontEnds, call: HttpCall | None, kind: str, expected: bool
) -> None:
    front = front_ends(rows=Parts, others=Rows)
    streamed = SimpleNamespace(extra_args={"capture": ASKING}, output_kind=SimpleNamespace(name=kind))

    def read() -> CaptureRequest | None:
        if call is not None:
            enter(call)
        return front.read(streamed, "r", is_offline=False)  # type: ignore[arg-type]

    asked = contextvars.copy_context().run(read)
    assert asked is not None
    assert (asked.is_streamed, asked.to_wire(1, "r").get("streamed", False)) == (expected, expected)
    front.hub.expect(asked.key, instances=["rows"])
    for payload, num_rows in (("part", 3), ("second", 4), ("third", 5)):
        result = CaptureResult(status="ok", payload=payload)
        front.hub.deliver_part(Result(key=asked.key, instance="rows", result=result, num_rows=num_rows))
    take_new = front.streamed(asked)
    assert (take_new is not None) == expected
    if take_new is not None:
        taken = [take_new(0, num_rows) for num_rows in (2, 3, 3, 5)]
        assert taken == [{}, {"rows": {"payload": "part"}}, {}, {"rows": {"payload": ["second", "third"]}}]


class Naming(Rows):
    @classmethod
    def own_names(cls, spec: CaptureSpec, context: SpecContext, num_samples: int) -> tuple[str, ...]:
        assert context.field == "capture.rows"
        return tuple(f"file-{sample}" for sample in range(num_samples))


def test_a_request_has_its_names_for_itself_as_long_as_it_runs(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Naming)
    running = front.resolve(ask(front, capture=ASKING), 4, SimpleNamespace(max_tokens=2, n=1), None)  # type: ignore[arg-type]

    with pytest.raises(RequestError, match=r"^capture\.rows\.request_id: file-0 is being written for another request"):
        ask(front, capture=ASKING)
    assert ask(front_ends(rows=Naming), capture=ASKING).own_names == running.own_names
    del running
    gc.collect()
    assert ask(front, capture=ASKING).own_names == {"file-0": "capture.rows"}


def test_prompts_of_one_call_cannot_share_names_and_turns_of_one_answer_need_none(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Naming)

    def prompts() -> None:
        enter(HttpCall())
        held = ask(front, capture=ASKING)
        with pytest.raises(RequestError, match="all prompts of this call would write file-0"):
            ask(front, capture=ASKING)
        assert held.claim is not None

    def turns() -> None:
        call = HttpCall(has_turns=True)
        enter(call)
        first = ask(front, capture=ASKING)
        call.expect()
        assert first.own_names
        assert not ask(front, capture=ASKING).own_names

    for check in (prompts, turns):
        contextvars.copy_context().run(check)
        gc.collect()


def test_consumers_that_live_here_are_opened_before_requests_come(front_ends: FrontEnds) -> None:
    here, elsewhere = front_ends(watching=WatchingHere), front_ends(watching=Watching)

    here.open()
    elsewhere.open()

    assert front_ends.opened == [here.hub]
    assert ask(here).reply == here.hub.address
    assert front_ends.opened == [here.hub]


def test_an_engine_whose_consumers_cannot_be_opened_does_not_start(front_ends: FrontEnds) -> None:
    def fail(hub: ResultHub) -> None:
        raise ConfigError("somebody holds the lock")

    class Engine:
        def __init__(self, vllm_config: object) -> None:
            self.vllm_config = SimpleNamespace(additional_config={})
            self.input_processor = SimpleNamespace(**{FRONT_END: front_ends(fail, rows=WatchingHere)})
            self.engine_core = SimpleNamespace(shutdown=lambda: ended.append(self))

    ended: list[object] = []
    engine = Engine.__new__(Engine)
    with pytest.raises(ConfigError, match="somebody holds the lock"):
        open_drivers_with_engine(Engine.__init__)(engine, None)

    assert ended == [engine]


def test_consumers_elsewhere_are_not_opened_here(front_ends: FrontEnds) -> None:
    ask(front_ends(rows=Rows), capture=ASKING)

    assert front_ends.opened == []


@pytest.mark.parametrize(
    ("consumer", "is_offline", "extra", "is_answered"),
    [
        (Watching, False, {}, False),
        (Watching, False, {"capture_wait": True}, True),
        (Watching, True, {}, True),
        (WatchingHere, False, {}, True),
    ],
    ids=["online", "online-and-waiting", "offline", "located-here"],
)
def test_who_is_answered_of_those_that_global_consumers_look_at(
    front_ends: FrontEnds, consumer: type[BatchedConsumer], is_offline: bool, extra: dict[str, Any], is_answered: bool
) -> None:
    asked = ask(front_ends(watching=consumer), is_offline=is_offline, **extra)

    assert (asked.reply is not None) == is_answered


def test_consumers_that_cannot_be_opened_are_told_every_time(front_ends: FrontEnds) -> None:
    def fail(hub: ResultHub) -> None:
        raise ConfigError("no such file")

    front = front_ends(fail, rows=WatchingHere)

    for _ in range(2):
        with pytest.raises(ConfigError, match="no such file"):
            ask(front)


def test_results_that_are_there_are_handed_out(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)
    asked = ask(front, capture=ASKING)
    front.expect(asked, 1)
    deliver(front, asked, num_rows=4)

    results = front.wait(asked, deadline=time.monotonic() + patience(20))

    assert results.merged["rows"].num_rows == 4
    assert front.hub.stats().waiting == 0


def test_a_request_does_not_wait_long_unless_it_asks_to(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)
    asked = ask(front, capture=ASKING)
    front.expect(asked, 1)

    results = asyncio.run(front.wait_async(asked, is_aborted=False))

    assert results.merged["rows"].status == "pending"
    assert front.hub.stats().waiting == 0


class Prompt(Rows):
    linger_s = 0.0


def test_a_request_does_not_wait_in_vain_while_the_rows_of_others_are_awaited(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows, prompt=Prompt)
    asked, other = ask(front, capture=ASKING), ask(front, capture=ASKING)
    prompt = ask(front, capture={"prompt": ASKING["rows"]})
    wait_s = front.config.result_wait_s

    for wanted, running in ((wait_s, asked), (0.0, other), (wait_s, prompt)):
        front.expect(running, 1)
        assert front.patience_s() == wanted
    front.forget(prompt)
    assert front.patience_s() == 0.0
    assert asyncio.run(front.wait_async(other, is_aborted=False)).merged["rows"].status == "pending"
    assert front.patience_s() == wait_s


def test_what_is_there_is_answered_without_waiting(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)
    asked, other = ask(front, capture=ASKING), ask(front, capture=ASKING)
    for each in (asked, other):
        front.expect(each, 1)
    deliver(front, asked, num_rows=3)

    assert asyncio.run(front.wait_async(asked, is_aborted=False)).merged["rows"].num_rows == 3


def test_a_request_that_asks_to_waits_for_its_results(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)
    asked = ask(front, capture=ASKING, capture_wait=True)
    front.expect(asked, 1)

    async def wait() -> Any:
        waiting = asyncio.create_task(front.wait_async(asked, is_aborted=False))
        # Longer than a request waits that did not ask to.
        done, _ = await asyncio.wait({waiting}, timeout=4 * front.config.result_wait_s)
        assert not done
        deliver(front, asked, num_rows=7)
        return await waiting

    assert asyncio.run(wait()).merged["rows"].num_rows == 7


def test_an_aborted_request_does_not_wait_for_an_answer_that_may_never_come(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)
    asked = ask(front, capture=ASKING, capture_wait=True)
    front.expect(asked, 1)

    results = asyncio.run(asyncio.wait_for(front.wait_async(asked, is_aborted=True), patience(10)))

    assert results.merged["rows"].status == "pending"


def test_results_are_put_on_an_output_and_on_its_samples(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)
    asked = ask(front, capture=ASKING)
    front.expect(asked, 1)
    deliver(front, asked, num_rows=2)
    output = SimpleNamespace(outputs=[SimpleNamespace(index=0)])

    attach_results(output, front.wait(asked, deadline=time.monotonic() + patience(20)))

    assert output.capture_results["rows"].num_rows == 2
    assert output.outputs[0].capture_results == output.capture_results


def test_closing_twice_is_fine(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)
    ask(front, capture=ASKING)

    front.close()
    front.close()


def test_a_closed_front_end_stays_closed_and_late_waits_are_pending(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows, watching=WatchingHere)
    asked, late = ask(front, capture=ASKING), ask(front, capture=ASKING)
    front.expect(asked, 1)
    before = set(threading.enumerate())
    front.close()
    left = set(threading.enumerate()) - before

    started = time.monotonic()
    front.expect(late, 1)
    for each in (asked, late):
        results = front.wait(each, deadline=time.monotonic() + patience(20))
        assert results.merged["rows"] == CaptureResult(status="pending", key="rows")
    assert time.monotonic() - started < patience(20)
    with pytest.raises(UnsupportedError, match="shut down"):
        ask(front, capture=ASKING)
    assert len(front_ends.opened) == 1
    assert left == set()


def test_a_front_end_that_was_never_used_stays_closed_too(front_ends: FrontEnds) -> None:
    front = front_ends(watching=WatchingHere)
    front.close()

    with pytest.raises(UnsupportedError, match="shut down"):
        ask(front)
    assert front_ends.opened == []


def test_health_tells_when_results_can_no_longer_come(front_ends: FrontEnds) -> None:
    front = front_ends(rows=Rows)
    parallel = SimpleNamespace(
        local_engines_only=False, data_parallel_rank_local=None, data_parallel_size=1, data_parallel_size_local=1
    )
    engine = SimpleNamespace(
        input_processor=SimpleNamespace(**{FRONT_END: front}),
        dead_error=RuntimeError("dead"),
        vllm_config=SimpleNamespace(parallel_config=parallel),
    )

    async def stock(engine: Any) -> None:
        return None

    asyncio.run(check_health(stock)(engine))
    ask(front, capture=ASKING)
    asyncio.run(check_health(stock)(engine))
    front.hub.fail("the thread ended")

    with pytest.raises(RuntimeError, match="dead") as raised:
        asyncio.run(check_health(stock)(engine))
    assert "the thread ended; restart the server" in str(raised.value.__cause__)


def test_an_output_that_captured_nothing_has_empty_results() -> None:
    outputs = type("RequestOutput", (), {}), type("CompletionOutput", (), {})

    add_results(*outputs)
    add_results(*outputs)

    for kind in outputs:
        assert kind().capture_results == {}
        with pytest.raises(TypeError, match="does not support item assignment"):
            kind().capture_results["rows"] = 1


def test_a_vllm_whose_outputs_have_results_of_their_own_is_not_touched() -> None:
    outputs = type("RequestOutput", (), {"capture_results": None}), type("CompletionOutput", (), {})

    with pytest.raises(TypeError, match="vLLM's RequestOutput has an attribute 'capture_results' of its own"):
        add_results(*outputs)
