"""The adapter that watches one model runner of vLLM and calls the worker hooks.

Instance methods of the runner are wrapped, never its class: draft models and other runners stay as they are. The
V1 and the V2 runner differ in one thing only, where the layout of a step's batch can be read.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.engine.contracts.wire_format import (
    FINAL_ATTRIBUTE,
    ORDERS_ATTRIBUTE,
    READINGS_ATTRIBUTE,
    WIRE_KEY,
    Final,
    wire_of,
)
from headgate.capture.engine.contracts.worker_hooks import PendingReadings, WorkerHooks, in_turn, overrides
from headgate.capture.engine.vllm_names import V2_RUNNER_MODULES, WORKS_WITH
from headgate.capture.engine.vllm_types import (
    AsyncRunnerOutput,
    DraftedTokens,
    Function,
    ModelRunner,
    ModelRunnerV1,
    NewRequestData,
    RequestParams,
    RunnerOutput,
    SampledTokens,
    SchedulerOutput,
    StageTensors,
    StepBatch,
)
from headgate.capture.monitoring.step_log import StepLog, compact
from headgate.capture.schema.batch import WIRE_VERSION, BatchView, FinalState, NewRequest, RequestWire
from headgate.capture.schema.errors import UnsupportedError

_PENDING = "_headgate_step"


def _sent(part: str) -> str:
    """Name of what a part sends from one pipeline stage to the next, among the model's tensors."""
    return f"headgate_{part}"


def with_readings(output: Any, readings: Mapping[str, PendingReadings]) -> Any:
    """Return the output of a step with what its parts read, under `READINGS_ATTRIBUTE`.

    Args:
        output: A ``ModelRunnerOutput``; an ``AsyncModelRunnerOutput``, whose ``get_output`` then completes what it
            returns, on whichever thread calls it; None of a step that failed.
        readings: Of that step, by part.
    """
    if output is None:
        return None
    if hasattr(output, "get_output"):
        setattr(output, _PENDING, readings)
        # A subclass, and no method of the object: that would lead back to it, and hold device memory in a circle.
        output.__class__ = _completing(output.__class__)
        return output
    return _complete(output, readings)


def _complete(output: RunnerOutput, readings: Mapping[str, PendingReadings]) -> RunnerOutput:
    if not output.req_ids:
        # vLLM has one such output for all steps; what is put on it would come with every one of them.
        raise AssertionError(f"a step in which {', '.join(readings)} read something has an output without requests")
    setattr(output, READINGS_ATTRIBUTE, {part: found.collect() for part, found in readings.items()})
    return output


@cache
def _completing(kind: type[AsyncRunnerOutput]) -> type[AsyncRunnerOutput]:
    """Make the subclass of a class of outputs that come later."""

    class Completing(kind):  # type: ignore[misc, valid-type]
        """The output of a step that was read."""

        def get_output(self) -> RunnerOutput:
            """Wait for the output, and complete it."""
            output: RunnerOutput = super().get_output()
            return _complete(output, self.__dict__.pop(_PENDING))

    Completing.__name__, Completing.__qualname__ = kind.__name__, kind.__qualname__
    return Completing


class BatchReader(Protocol):
    """Reads how a step's batch is laid out, in one generation of the model runner."""

    method: str
    """Name of the runner's method that lays out a step's inputs."""
    sampling: str
    """Name of the runner's method that samples a step's tokens, and verifies its drafts."""

    def view(self, args: Sequence[object], result: object) -> BatchView:
        """Read the layout after the method returned `result` for the arguments `args`."""
        ...

    def token_ids(self, result: object) -> Tensor:
        """Read the token of each batch row, int32 on the device.

        Both runners lay the tokens out on every pipeline stage, with sampled tokens that the last stage broadcasts or
        the scheduler sends back. The embedding, which reads them, is on the first stage.
        """
        ...

    def num_computed(self, result: object, num_requests: int) -> Tensor:
        """Read how many tokens of each request were computed before the step that was laid out, ``[num_requests]``.

        On the device, where it is exact: the host may not know yet which drafts of steps in flight were rejected. Valid
        until the step's tokens were sampled.
        """
        ...

    def num_rejected(self, args: Sequence[object], result: object, num_requests: int) -> Tensor:
        """Read how many of each request's rows, the last ones, are of rejected drafts: on the device, integers.

        Args:
            args: Of the sampling.
            result: What it returned.
            num_requests: Length of the tensor.
        """
        ...


_Int32Array = npt.NDArray[np.int32]


class _Views:
    """Makes the views of steps. Those of the same requests, with as many rows each, have the same tuple and arrays."""

    def __init__(self) -> None:
        self._last: BatchView | None = None
        self._key: tuple[Sequence[str], bytes, bytes] | None = None

    def make(
        self, req_ids: Sequence[str], starts: _Int32Array, counts: _Int32Array, computed: _Int32Array
    ) -> BatchView:
        """Return the view of a step; the arrays may be longer than the requests are many, and may change later."""
        num_reqs = len(req_ids)
        starts, counts, computed = starts[:num_reqs], counts[:num_reqs], computed[:num_reqs]
        key, known = (req_ids, starts.tobytes(), counts.tobytes()), self._last
        if known is None or key != self._key:
            found = [each.astype(np.int64) for each in (starts, counts, computed)]
            known = BatchView(tuple(req_ids), found[0], found[1], found[2])
            self._key = key
        else:
            known = BatchView(known.req_ids, known.starts, known.num_scheduled, computed.astype(np.int64))
        self._last = known
        return known


class V1Layout:
    """``vllm.v1.worker.gpu_model_runner``: the persistent batch holds the layout."""

    method, sampling = "_prepare_inputs", "_sample"

    def __init__(self, runner: ModelRunnerV1) -> None:
        self._runner = runner
        self._views = _Views()

    def view(self, args: Sequence[object], result: object) -> BatchView:
        batch, num_scheduled = self._runner.input_batch, cast("_Int32Array", args[1])
        req_ids, starts = batch.req_ids[: batch.num_reqs], self._runner.query_start_loc.np
        return self._views.make(req_ids, starts, num_scheduled, batch.num_computed_tokens_cpu)

    def token_ids(self, result: object) -> Tensor:
        return self._runner.input_ids.gpu

    def num_computed(self, result: object, num_requests: int) -> Tensor:
        return self._runner.num_computed_tokens[:num_requests]

    def num_rejected(self, args: Sequence[object], result: object, num_requests: int) -> Tensor:
        sampled = cast("SampledTokens", result).sampled_token_ids[:num_requests]
        drafted = cast("DraftedTokens | None", args[1] if len(args) > 1 else None)
        if drafted is None:
            return torch.zeros(num_requests, dtype=torch.int64, device=sampled.device)
        num_drafts = torch.tensor(drafted.num_draft_tokens, dtype=torch.int64)
        if sampled.is_cuda:
            num_drafts = num_drafts.pin_memory().to(sampled.device, non_blocking=True)
        # A row of them ends with the placeholders of what was rejected.
        num_sampled = ((sampled >= 0) & (sampled < self._runner.input_batch.vocab_size)).sum(dim=1)
        return torch.where(num_drafts > 0, num_drafts + 1 - num_sampled, 0)


class V2Layout:
    """``vllm.v1.worker.gpu.model_runner``: the returned input batch holds the layout."""

    method, sampling = "prepare_inputs", "sample"

    def __init__(self) -> None:
        self._views = _Views()

    def view(self, args: Sequence[object], result: object) -> BatchView:
        batch = cast("StepBatch", result)
        req_ids = batch.req_ids[: batch.num_reqs]
        return self._views.make(
            req_ids, batch.query_start_loc_np, batch.num_scheduled_tokens, batch.num_computed_tokens_np
        )

    def token_ids(self, result: object) -> Tensor:
        return cast("StepBatch", result).input_ids

    def num_computed(self, result: object, num_requests: int) -> Tensor:
        batch = cast("StepBatch", result)
        return batch.positions.index_select(0, batch.query_start_loc[:num_requests])

    def num_rejected(self, args: Sequence[object], result: object, num_requests: int) -> Tensor:
        _, _, num_rejected = cast("tuple[object, Tensor, Tensor]", result)
        return num_rejected[:num_requests]


@contextmanager
def dummy_rows_routed(runner: Any) -> Iterator[None]:
    """Have a router send the rows of dummy steps to experts, as it does with the rows of requests.

    From vLLM 0.32 on a dummy step says that all its rows are padding, and routers choose no expert for those: what
    happens in front of the experts would not show. Earlier releases mark no rows, and nothing is changed there.
    """
    mark = getattr(runner, "_prepare_padding_mask", None)
    # A runner for CPUs is a subclass elsewhere.
    defines = getattr(getattr(type(runner), "_dummy_run", None), "__module__", None)
    batch: Any = getattr(sys.modules.get(str(defines)), "InputBatch", None)
    make: Any = getattr(batch, "make_dummy", None)
    is_marked = make is not None and "is_padding" in inspect.signature(make).parameters
    kept = inspect.getattr_static(batch, "make_dummy") if is_marked else None
    if mark is not None:
        runner._prepare_padding_mask = lambda _, num_tokens: mark(num_tokens, num_tokens)
    if is_marked:
        batch.make_dummy = staticmethod(lambda *args, **kwargs: make(*args, **{**kwargs, "is_padding": False}))
    try:
        yield
    finally:
        if mark is not None:
            del runner._prepare_padding_mask
        if is_marked:
            batch.make_dummy = kept


@contextmanager
def drafts_left_out(runner: Any) -> Iterator[None]:
    """Have dummy steps run the model alone.

    A draft model runs after the model and may share the memory of its CUDA graphs (``draft_model`` under vLLM 0.26):
    what the model returned would be overwritten before the self-test reads it.
    """
    methods = (("drafter", "dummy_run"), ("speculator", "propose"))
    found = [(getattr(runner, holder, None), method) for holder, method in methods]
    drafters = [(drafter, method) for drafter, method in found if hasattr(drafter, method)]
    for drafter, method in drafters:
        setattr(drafter, method, lambda *_args, **_kwargs: None)
    try:
        yield
    finally:
        for drafter, method in drafters:
            delattr(drafter, method)


def batch_reader_of(runner: ModelRunner) -> BatchReader:
    """Choose the layout reader for `runner`'s generation."""
    is_v2 = type(runner).__module__.startswith(V2_RUNNER_MODULES)
    return V2Layout() if is_v2 else V1Layout(cast("ModelRunnerV1", runner))


class SampledStep:
    """The rows of a step that count, which the device knows once its tokens were sampled: see `StepOutcome`.

    Args:
        view: The step, as the host has laid it out.
    """

    def __init__(self, view: BatchView) -> None:
        self._planned = view
        self._found: Tensor | None = None
        self._rejected: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._view: BatchView | None = None

    @property
    def num_requests(self) -> int:
        """Requests of the step."""
        return len(self._planned.req_ids)

    def sampled(self, num_computed: Tensor, num_rejected: Tensor) -> None:
        """Start to copy to the host what the device knows; both ``[num_requests]`` there."""
        found = torch.stack([num_computed.to(torch.int64), num_rejected.to(torch.int64)])
        self._rejected = found[1]
        if not found.is_cuda:
            self._found = found
            return
        self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._found.copy_(found, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(found.device))

    def is_known(self) -> bool:
        """Whether `view` returns without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def num_rejected(self) -> Tensor | None:
        """Return how many rows of each request do not count, on the device; None if the step was not sampled."""
        return self._rejected

    def view(self) -> BatchView:
        """Wait until the device knows, and return the rows that count."""
        if self._view is None:
            self._view = self._read()
        return self._view

    def _read(self) -> BatchView:
        if self._event is not None:
            self._event.synchronize()
        if self._found is None:  # the step ended before its tokens were sampled
            return replace(self._planned, num_scheduled=np.zeros_like(self._planned.num_scheduled), outcome=None)
        num_computed, num_rejected = self._found.numpy()
        num_scheduled = self._planned.num_scheduled - num_rejected
        return replace(self._planned, num_scheduled=num_scheduled, num_computed=num_computed, outcome=None)


class StageMessages:
    """Tensors of parts that go from one pipeline stage to the next beside the model's. Step thread only.

    Args:
        parts: The worker parts, by name.

    Attributes:
        incoming: Sent by the stage before for the step that begins; None on the first stage, and once it was received
            or the forward was launched.
    """

    def __init__(self, parts: Mapping[str, WorkerHooks]) -> None:
        self.incoming: StageTensors | None = None
        self._senders = overrides(parts, "headgate_to_next_stage")
        self._receivers = overrides(parts, "headgate_from_last_stage")

    def receive(self) -> None:
        """Let the parts take theirs out of `incoming`: the runner knows the model's own tensors alone."""
        incoming, self.incoming = self.incoming, None
        if incoming is not None:
            for part, receive in self._receivers.items():
                if (sent := incoming.tensors.pop(_sent(part), None)) is not None:
                    receive(sent)

    def send(self, output: StageTensors) -> StageTensors:
        """Return the output of a stage with what the parts add to it."""
        found = {_sent(part): sent for part, send in self._senders.items() if (sent := send()) is not None}
        if not found:
            return output
        # Graphs return the same object for every step.
        output = copy.copy(output)
        output.tensors = {**output.tensors, **found}
        return output


class LaunchedStep:
    """Whether the forward of a step of requests is being launched: `WorkerFacts.runs_requests` of one worker.

    Args:
        device: The worker's.

    Attributes:
        is_on: Whether the runner executes a step of requests. The runner's adapter sets it.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on, self._has_graphs = False, device.type == "cuda"

    def __call__(self) -> bool:
        """Return whether it is, and no CUDA graph is recorded."""
        return self.is_on and not (self._has_graphs and torch.cuda.is_current_stream_capturing())


class RunnerAdapter:
    """Calls the worker hooks for one model runner. Step thread only.

    A request that carries no wire form is a plain request: unless a part asks for those, it is never looked at again,
    and steps without any capturing or steering request cost one comparison.

    Args:
        runner: vLLM's model runner.
        parts: The worker parts, by name.
        is_output_rank: Whether the scheduler gets the outputs of `runner`; only then the parts' readings are asked for.
        verifies_drafts: Whether `runner` verifies drafts of speculative decoding, so that views have an outcome.
        is_last_stage: Whether `runner` samples. On earlier pipeline stages ``sample_tokens`` receives what was sampled,
            and nothing is gained by following a step up after it.
        step_log: Gets a line for each step that the parts see; None if steps are not logged.
        running: Set while a step of requests is executed; None if nothing asks for it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        parts: Mapping[str, WorkerHooks],
        *,
        is_output_rank: bool = True,
        is_last_stage: bool = True,
        verifies_drafts: bool = False,
        step_log: StepLog | None = None,
        running: LaunchedStep | None = None,
    ) -> None:
        self._runner, self._step_log = runner, step_log
        self._samples, self._running = is_last_stage, running or LaunchedStep(torch.device("cpu"))
        self._describers = overrides(parts, "headgate_describe_step")
        self._step_begins = in_turn(overrides(parts, "headgate_step_begins").values())
        self._step_ends = in_turn(overrides(parts, "headgate_step_ends").values())
        self._ordered = in_turn(overrides(parts, "headgate_ordered").values())
        self._request_added = in_turn(overrides(parts, "headgate_request_added").values())
        self._request_stopped = in_turn(overrides(parts, "headgate_request_stopped").values())
        self._request_finished = in_turn(overrides(parts, "headgate_request_finished").values())
        readers = overrides(parts, "headgate_step_readings") if is_output_rank else {}
        self._readers: dict[str, Callable[[], PendingReadings | None]] = readers
        self._needs_plain_steps = tuple(overrides(parts, "headgate_needs_plain_steps").values())
        self._readings: dict[str, PendingReadings] | None = None
        """Readings of the step that was launched last, until its output is there."""
        self._is_to_follow_up = False
        """Whether a step was launched that no part has followed up yet: its sampling comes first."""
        self._layout, self._stages = batch_reader_of(runner), StageMessages(parts)
        self._live, self._plain = set[str](), set[str]()
        self._ended: set[str] = set()  # without further steps; how they ended is said later: the front end knows
        plain = overrides(parts, "headgate_plain_request_added")
        self._follows_plain, self._plain_request_added = bool(plain), in_turn(plain.values())
        self._was_active = self._is_laid_out = self._in_self_test = False
        self._verifies_drafts = verifies_drafts
        self._unsampled: tuple[SampledStep, object] | None = None
        """The step that was laid out last, and what laid it out, until its tokens are sampled."""
        self._watch_methods()
        # The V1 runner leaves attention out of dummy steps, and its output uninitialised, unless it is asked not to.
        takes = inspect.signature(runner._dummy_run).parameters
        self._with_attention = {"force_attention": True} if "force_attention" in takes else {}

    def _watch_methods(self) -> None:
        self._watch("execute_model", self._execute_model)
        self._watch("_dummy_run", self._dummy_run)
        self._watch(self._layout.method, self._lay_out)
        self._watch("sample_tokens", self._sample_tokens)
        if self._verifies_drafts:
            self._watch(self._layout.sampling, self._sample)

    def run_dummy(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Drive a dummy forward without resetting the step state first: for the self-test.

        Returns:
            What the model returned, as far as the runner shows it: hidden states, or what goes to the next stage.
        """
        self._in_self_test = True
        try:
            with dummy_rows_routed(self._runner), drafts_left_out(self._runner):
                result = self._runner._dummy_run(num_tokens, **self._with_attention)
        finally:
            self._in_self_test = False
        output = result[0] if isinstance(result, tuple) else result
        tensors = getattr(output, "tensors", {"hidden_states": output})
        return tuple(tensor for tensor in tensors.values() if isinstance(tensor, Tensor))

    def _watch(self, name: str, replacement: Function) -> None:
        original = getattr(self._runner, name, None)
        if original is None:
            raise UnsupportedError(
                f"{type(self._runner).__name__} has no method {name!r}, by which headgate.capture.engine.worker.runner "
                f"follows its steps ({type(self._layout).__name__} and RunnerAdapter name them). {WORKS_WITH}"
            )

        @wraps(original)
        def watched(*args: object, **kwargs: object) -> object:
            return replacement(original, *args, **kwargs)

        setattr(self._runner, name, watched)

    def _execute_model(
        self, original: Function, scheduler_output: SchedulerOutput, *args: object, **kwargs: object
    ) -> object:
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            return original(scheduler_output, *args, **kwargs)
        self._follow_up()  # of a step that was never sampled: its rows are there until the next forward
        self._follow(scheduler_output)
        for part, orders in (getattr(scheduler_output, ORDERS_ATTRIBUTE, None) or {}).items():
            self._ordered(part, orders)
        self._is_laid_out = False
        self._readings = self._unsampled = None
        self._stages.incoming = cast("StageTensors | None", args[0] if args else kwargs.get("intermediate_tensors"))
        self._running.is_on = True
        try:
            result = original(scheduler_output, *args, **kwargs)
        finally:
            self._running.is_on = False
        self._stages.incoming = None  # also of a step that was not laid out for the parts
        self._is_to_follow_up = self._is_laid_out
        if result is not None or not self._samples:
            self._follow_up()
            if self._is_laid_out and not self._samples and hasattr(result, "tensors"):
                result = self._stages.send(result)
        return result if result is None else self._complete(result)

    def _sample_tokens(self, original: Function, *args: object, **kwargs: object) -> object:
        """Follow `execute_model`, which returns None and leaves the output of its step to this method.

        What follows a step up comes after its sampling, so that a GPU that waits for this thread has its work first.
        """
        result = original(*args, **kwargs)
        self._follow_up()
        return self._complete(result)

    def _sample(self, original: Function, *args: object, **kwargs: object) -> object:
        """Follow the sampling of a step, before its drafter overwrites anything."""
        result = original(*args, **kwargs)
        step, self._unsampled = self._unsampled, None
        if step is not None:
            outcome, laid_out = step
            num_requests = outcome.num_requests
            outcome.sampled(
                self._layout.num_computed(laid_out, num_requests),
                self._layout.num_rejected(args, result, num_requests),
            )
        return result

    def _follow_up(self) -> None:
        if self._is_to_follow_up:
            self._is_to_follow_up = False
            self._step_ends()
            if self._readers:
                self._readings = self._read()

    def _complete(self, output: object) -> object:
        if self._readings is None:
            return output
        readings, self._readings = self._readings, None
        return with_readings(output, readings)

    def _read(self) -> dict[str, PendingReadings] | None:
        found = {part: readings for part, read in self._readers.items() if (readings := read()) is not None}
        return found or None

    def _dummy_run(self, original: Function, *args: object, **kwargs: object) -> object:
        if not self._in_self_test:
            self._clear_step()
        return original(*args, **kwargs)

    def _lay_out(self, original: Function, *args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        if self._live or (self._plain and any(needs() for needs in self._needs_plain_steps)):
            self._was_active = self._is_laid_out = True
            view = self._layout.view(args, result)
            if self._verifies_drafts:
                outcome = SampledStep(view)
                self._unsampled = outcome, result
                view = replace(view, outcome=outcome)
            token_ids = self._layout.token_ids(result)
            self._stages.receive()
            self._step_begins(view, token_ids)
            if self._step_log is not None:
                self._log_step(self._step_log, view, token_ids, result)
        else:
            self._clear_step()
        return result

    def _log_step(self, log: StepLog, view: BatchView, token_ids: Tensor, laid_out: object) -> None:
        if view.outcome is not None:
            exact = self._layout.num_computed(laid_out, len(view.req_ids))
            view = replace(view, num_computed=np.array(exact.tolist(), dtype=np.int64))
        requests = []
        columns = (view.starts.tolist(), view.num_scheduled.tolist(), view.num_computed.tolist())
        for req_id, start, size, computed in zip(view.req_ids, *columns, strict=True):
            tokens = compact(token_ids[start : start + size].tolist())
            rows, positions = (compact(range(first, first + size)) for first in (start, computed))
            requests.append({"id": req_id, "rows": rows, "positions": positions, "tokens": tokens})
        found = [describe(view) for describe in self._describers.values()]
        log.write({"requests": requests} | {name: step for part in found for name, step in part.items()})

    def _clear_step(self) -> None:
        """Clear whatever a forward without live requests could act on."""
        if self._was_active:
            self._was_active = False
            self._step_begins(None, None)

    def _follow(self, scheduler_output: SchedulerOutput) -> None:
        """Report requests that end and begin with a step.

        Finished first: an id may end and begin again in one step. Sorted, so that all ranks see one order.
        """
        finals = getattr(scheduler_output, FINAL_ATTRIBUTE, None) or {}
        for req_id in sorted(scheduler_output.finished_req_ids):
            if req_id in self._plain:
                self._plain.remove(req_id)
                self._request_stopped(req_id)
            elif req_id in self._live:
                self._live.remove(req_id)
                self._ended.add(req_id)
                self._request_stopped(req_id)
                if req_id not in finals:
                    self._finish(req_id, None)
        for req_id, final in finals.items():
            if req_id in self._ended and final is not None:
                self._finish(req_id, final)
        for data in scheduler_output.scheduled_new_reqs:
            self._add(data, wire_of(data.sampling_params))

    def _add(self, data: NewRequestData, wire: RequestWire | None) -> None:
        # A known id comes back after preemption (V2 runner): its state, and what it has captured, stay.
        if wire is not None and data.req_id not in self._live:
            if data.req_id in self._ended:
                self._finish(data.req_id, None)
            self._live.add(data.req_id)
            self._request_added(_new_request(data, wire))
        if wire is not None:
            data.sampling_params = _without_content(data.sampling_params)
        elif self._follows_plain and data.req_id not in self._plain:
            self._plain.add(data.req_id)
            self._plain_request_added(data.req_id, _num_prompt_tokens(data))

    def _finish(self, req_id: str, noted: Final | None) -> None:
        self._ended.remove(req_id)
        self._request_finished(req_id, _final(noted))


def _without_content(params: RequestParams | None) -> RequestParams | None:
    """Return a copy of parameters that still says whose they are, without vectors and the like.

    The runner keeps them while the request lives, for each sample of a prompt; the parts have what they need.
    """
    kept = copy.copy(params)
    if kept is not None:
        kept.extra_args = {**(kept.extra_args or {}), WIRE_KEY: {"v": WIRE_VERSION}}
    return kept


def _new_request(data: NewRequestData, wire: RequestWire) -> NewRequest:
    if data.prompt_token_ids is None:
        raise UnsupportedError(
            f"request {data.req_id}: prompts given as embeddings cannot be captured; the front end refuses them"
        )
    return NewRequest(req_id=data.req_id, prompt_token_ids=tuple(data.prompt_token_ids), wire=wire)


def _num_prompt_tokens(data: NewRequestData) -> int:
    if data.prompt_token_ids is not None:
        return len(data.prompt_token_ids)
    return 0 if data.prompt_embeds is None else len(data.prompt_embeds)


def _final(noted: Final | None) -> FinalState | None:
    if noted is None:
        return None
    num_prompt, token_ids, status, notes, num_outdated = noted
    return FinalState(
        num_prompt_tokens=num_prompt,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        status=status,
        notes=notes,
        num_outdated=num_outdated,
    )
