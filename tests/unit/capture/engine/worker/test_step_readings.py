"""Readings of steps: each comes with the output of its own step, however vLLM hands that out."""

from __future__ import annotations

import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from headgate.capture.engine.contracts.worker_hooks import WorkerHooks
from headgate.capture.engine.worker.runner import RunnerAdapter, with_readings
from headgate.capture.schema.errors import UnsupportedError


class Readings:
    """Of one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_collected = False

    def collect(self) -> dict[str, Any]:
        assert not self.is_collected
        self.is_collected = True
        return {"step": self.step}


class Reader(WorkerHooks):
    """A part that reads each step, but for those it is told to skip."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[Readings] = []
        self.is_idle = False

    def headgate_step_ends(self) -> None:
        self.calls.append("ends")

    def headgate_step_readings(self) -> Readings | None:
        self.calls.append("readings")
        if self.is_idle:
            return None
        self.steps.append(Readings(len(self.steps)))
        return self.steps[-1]


class LateOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An output that is on the host when it is asked for."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output

    def get_kv_connector_output(self) -> None:
        return None


class Runner:
    """A V2 runner: `execute_model` returns None, and `sample_tokens` the output."""

    makes = staticmethod(lambda output: output)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> Any:
        if dummy_run or not scheduler_output.counts:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if scheduler_output.fails:
            self.state = None
            raise RuntimeError("the forward fails")
        self.prepare_inputs(scheduler_output, "batch_desc")
        self.state: Any = list(scheduler_output.order)
        return None

    def prepare_inputs(self, scheduler_output: Any, batch_desc: str) -> Any:
        counts = np.array(scheduler_output.counts, dtype=np.int32)
        return SimpleNamespace(
            req_ids=scheduler_output.order,
            num_reqs=len(counts),
            input_ids="tokens",
            num_scheduled_tokens=counts,
            query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            num_computed_tokens_np=np.zeros(len(counts), dtype=np.int32),
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        order, self.state = self.state, None
        return None if order is None else self.makes(ModelRunnerOutput(req_ids=order, req_id_to_index={}))

    def _dummy_run(self, num_tokens: int) -> None:
        self.execute_model(step(), dummy_run=True)


Runner.__module__ = "vllm.v1.worker.gpu.model_runner"


class LateRunner(Runner):
    """The same with asynchronous scheduling."""

    makes = LateOutput


LateRunner.__module__ = Runner.__module__


class DirectRunner(Runner):
    """A runner whose `execute_model` returns the output itself."""

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        result = super().execute_model(*args, **kwargs)
        return Runner.sample_tokens(self, None) if result is None else result


DirectRunner.__module__ = Runner.__module__


def step(*order: str, new: bool = False, wire: Any = True, fails: bool = False) -> Any:
    params = SimpleNamespace(extra_args={"headgate": {"parts": {}}} if wire else {})
    requests = [SimpleNamespace(req_id=one, prompt_token_ids=[1], sampling_params=params) for one in order]
    return SimpleNamespace(
        order=list(order),
        counts=[1] * len(order),
        scheduled_new_reqs=requests if new else [],
        finished_req_ids=set(),
        fails=fails,
    )


def adapted(runner: Any, **options: Any) -> Reader:
    reader = Reader()
    RunnerAdapter(runner, {"reader": reader}, **options)
    return reader


def told(output: Any) -> Any:
    return vars(output).get("headgate_readings")


@pytest.mark.parametrize("kind", [Runner, DirectRunner])
def test_an_output_has_the_readings_of_its_step(kind: type[Runner]) -> None:
    runner = kind()
    reader = adapted(runner)

    for number in range(3):
        output = runner.execute_model(step("a", new=number == 0))
        output = output or runner.sample_tokens(None)

        assert told(output) == {"reader": {"step": number}}
        assert told(pickle.loads(pickle.dumps(output))) == {"reader": {"step": number}}
    assert reader.calls == ["ends", "readings"] * 3


def test_outputs_that_come_late_have_those_of_their_own_step_and_are_of_vllms_class() -> None:
    runner = LateRunner()
    reader = adapted(runner)
    runner.execute_model(step("a", new=True))
    outputs = [runner.sample_tokens(None)]
    for _ in range(2):
        runner.execute_model(step("a"))
        outputs.append(runner.sample_tokens(None))

    assert not any(one.is_collected for one in reader.steps)
    assert all(isinstance(output, LateOutput) for output in outputs)
    assert [told(output.get_output()) for output in reversed(outputs)] == [
        {"reader": {"step": number}} for number in (2, 1, 0)
    ]


def test_an_output_that_comes_late_holds_its_memory_no_longer_than_before() -> None:
    gc.disable()
    try:
        output = with_readings(LateOutput(ModelRunnerOutput(req_ids=["a"], req_id_to_index={})), {"x": Readings(0)})
        known = weakref.ref(output)
        output.get_output()
        del output

        assert known() is None
    finally:
        gc.enable()


def test_a_step_that_nothing_was_read_in_has_a_stock_output() -> None:
    runner = LateRunner()
    reader = adapted(runner)
    reader.is_idle = True
    runner.execute_model(step("a", new=True))
    output = runner.sample_tokens(None)

    assert type(output) is LateOutput
    assert told(output.get_output()) is None


def test_steps_that_are_not_shown_are_not_asked_for() -> None:
    runner = Runner()
    reader = adapted(runner)

    runner.execute_model(step("x", new=True, wire=False))
    plain = runner.sample_tokens(None)
    empty = runner.execute_model(step())

    assert reader.calls == []
    assert told(plain) is told(empty) is None


def test_readings_of_a_step_that_failed_are_not_taken_for_those_of_the_next() -> None:
    runner = Runner()
    reader = adapted(runner)
    runner.execute_model(step("a", new=True))  # its output is never made
    with pytest.raises(RuntimeError, match="the forward fails"):
        runner.execute_model(step("a", fails=True))

    assert runner.sample_tokens(None) is None
    runner.execute_model(step("a"))
    assert told(runner.sample_tokens(None)) == {"reader": {"step": 1}}
    assert not reader.steps[0].is_collected


def test_a_worker_whose_output_goes_nowhere_is_not_asked() -> None:
    runner = Runner()
    reader = adapted(runner, is_output_rank=False)
    runner.execute_model(step("a", new=True))

    assert told(runner.sample_tokens(None)) is None
    assert reader.calls == ["ends"]


def test_the_output_that_all_empty_steps_share_stays_as_it_is() -> None:
    with pytest.raises(AssertionError, match="an output without requests"):
        with_readings(EMPTY_MODEL_RUNNER_OUTPUT, {"x": Readings(0)})

    assert told(EMPTY_MODEL_RUNNER_OUTPUT) is None


def test_a_runner_that_samples_in_another_way_is_refused() -> None:
    runner = SimpleNamespace(execute_model=None, _dummy_run=None, _prepare_inputs=None)
    runner.execute_model = runner._dummy_run = runner._prepare_inputs = lambda: None

    with pytest.raises(UnsupportedError, match="sample_tokens"):
        RunnerAdapter(runner, {"reader": Reader()})  # type: ignore[arg-type]
