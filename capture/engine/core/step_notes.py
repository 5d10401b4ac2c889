"""Notes of a part about requests, from the steps that they are of to the outputs that they leave with.

A step of a prompt's chunk has readings and no output, so notes are kept until their request has one. They are put into
a field of vLLM's that is free here; see `NOTES_KEY`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from headgate.capture.engine import vllm_names
from headgate.capture.engine.contracts.core_part import CorePart
from headgate.capture.engine.contracts.wire_format import NOTES_KEY, ORDERS_ATTRIBUTE, READINGS_ATTRIBUTE, wants_notes
from headgate.capture.engine.core import part_services
from headgate.capture.engine.vllm_names import WORKS_WITH
from headgate.capture.engine.vllm_types import (
    CoreOutputs,
    Function,
    RunnerOutput,
    Scheduler,
    SchedulerOutput,
)
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import UnsupportedError


def attach_orders(name: str, part: CorePart, scheduler_output: SchedulerOutput) -> None:
    """Attach to a step that was just scheduled what the part of that name has decided for its requests."""
    orders = part.orders(scheduler_output.num_scheduled_tokens)
    if orders is not None:
        setattr(scheduler_output, ORDERS_ATTRIBUTE, {name: orders})


def end_requests(scheduler: Scheduler, endings: Mapping[str, str], made: dict[int, CoreOutputs]) -> None:
    """End requests after a step, whose last token stays theirs.

    Args:
        scheduler: vLLM's.
        endings: The requests, each with its ``stop_reason``; requests that have ended are passed over.
        made: The outputs of the step by front end, completed here. A request gets an output of its own that ends it,
            after that of its last token: vLLM drops the token of an output that both has one and ends by a stop.
    """
    EngineCoreOutput = vllm_names.ENGINE_CORE_OUTPUT.get()
    EngineCoreOutputs = vllm_names.ENGINE_CORE_OUTPUTS.get()
    FinishReason = vllm_names.FINISH_REASON.get()
    RequestStatus = vllm_names.REQUEST_STATUS.get()

    for req_id, reason in endings.items():
        request = scheduler.requests.get(req_id)
        if request is None or request.is_finished():
            continue
        scheduler.finish_requests(req_id, RequestStatus.FINISHED_STOPPED)
        stopped = EngineCoreOutput(req_id, [], finish_reason=FinishReason.STOP, stop_reason=reason)
        if (outputs := made.get(request.client_index)) is None:
            outputs = made[request.client_index] = EngineCoreOutputs()
        outputs.outputs.append(stopped)


def check_carrier() -> None:
    """Refuse a vLLM whose outputs have no place for notes.

    Raises:
        UnsupportedError: Naming the field.
    """
    EngineCoreOutput = vllm_names.ENGINE_CORE_OUTPUT.get()

    if "kv_transfer_params" not in EngineCoreOutput.__struct_fields__:
        raise UnsupportedError(f"EngineCoreOutput has no field 'kv_transfer_params'. {WORKS_WITH}")


def nothing_noted(_: int) -> Document:
    """Return the notes on a request without anything to report."""
    return {}


class StepNotes:
    """Notes about the requests of one scheduler. Engine thread only.

    Args:
        scheduler: vLLM's.
        name: The part's.
        part: Its half in the engine core.
    """

    def __init__(self, scheduler: Scheduler, name: str, part: CorePart) -> None:
        self._scheduler = scheduler
        self._name = name
        self._part = part
        self._kept: dict[str, list[object]] = {}
        """In order, by request."""
        self._wanting: dict[str, bool] = {}
        """Whether notes are wanted, of requests that notes have come about."""
        self._outdated: dict[str, int] = {}
        """Steps in flight whose rows of a request do not count, since its prompt has begun again."""
        self._is_in_step = False
        self._running: list[str] = []
        """Requests of the last step that was looked at, if all of them ran and none was freed since."""

    def update(
        self, original: Function, scheduler_output: SchedulerOutput, output: RunnerOutput
    ) -> Mapping[int, CoreOutputs]:
        """Let the scheduler make the outputs of a step, and complete them with its notes and earlier ones."""
        readings: Mapping[str, Document] | None = getattr(output, READINGS_ATTRIBUTE, None)
        outdated = self._take_outdated() if self._outdated else set()
        if readings is not None:
            self._take(readings, self._ended(scheduler_output.num_scheduled_tokens) | outdated)
        self._is_in_step = True
        try:
            made: dict[int, CoreOutputs] = original(self._scheduler, scheduler_output, output)
            self._decide(made)
            if self._kept:
                self._attach(made.values())
        finally:
            self._is_in_step = False
        for req_id in [known for known in self._kept if known not in self._scheduler.requests]:
            del self._kept[req_id]
        return made

    def release(self, req_id: str) -> None:
        """Forget a request that was freed; in the middle of a step its last output is yet to be made."""
        self._running = []
        self._wanting.pop(req_id, None)
        self._outdated.pop(req_id, None)
        if not self._is_in_step:
            self._kept.pop(req_id, None)

    def begin_again(self, req_id: str, num_in_flight: int) -> None:
        """Let the part forget the rows of a prompt that begins again under something else.

        Args:
            req_id: The request.
            num_in_flight: Steps that were launched before, and whose outputs come yet.
        """
        if num_in_flight:
            self._outdated[req_id] = num_in_flight
        if (note := self._part.begin_again(req_id)) is not None:
            self._keep(req_id, note)

    def describe(self, req_id: str, num_prompt: int) -> None:
        """Let the part follow a request that captures. Input thread."""
        self._part.describe(req_id, num_prompt)

    def description(self, req_id: str) -> Callable[[int], Document]:
        """Return a function of how many tokens of a capturing request were kept: what there is to report, by part."""
        found = self._part.description(req_id)
        return nothing_noted if found is None else lambda end: {self._name: found(end)}

    def _decide(self, made: dict[int, CoreOutputs]) -> None:
        """Let the part decide after a step whose outputs are `made`, and end the requests that it ends."""
        decided = self._part.decide()
        if decided is None:
            return
        for req_id, note in decided.notes.items():
            self._keep(req_id, note)
        end_requests(self._scheduler, decided.endings, made)

    def _keep(self, req_id: str, note: object) -> None:
        if (wants := self._wanting.get(req_id)) is None:
            request = self._scheduler.requests.get(req_id)
            if request is None:
                return
            wants = self._wanting[req_id] = wants_notes(request.sampling_params)
        if wants:
            self._kept.setdefault(req_id, []).append(note)

    def _take(self, readings: Mapping[str, Document], discarded: Collection[str]) -> None:
        for name, document in readings.items():
            if name != self._name:
                raise AssertionError(f"nothing in this engine core takes the readings of part {name!r}")
            for req_id, note in self._part.take_readings(document, discarded).items():
                if req_id not in discarded:
                    self._keep(req_id, note)

    def _take_outdated(self) -> set[str]:
        """Return the requests whose rows in the step that came do not count, since their prompts have begun again."""
        outdated = set(self._outdated)
        self._outdated = {req_id: number - 1 for req_id, number in self._outdated.items() if number > 1}
        return outdated

    def _ended(self, num_scheduled: Mapping[str, int]) -> set[str]:
        """Return the requests of a step that ended after it was launched: nothing of it counts for them."""
        if self._are_running(list(num_scheduled)):
            return set()
        known = self._scheduler.requests
        return {req_id for req_id in num_scheduled if (one := known.get(req_id)) is None or one.is_finished()}

    def _are_running(self, req_ids: list[str]) -> bool:
        """Whether none of the requests of a step has ended. Steps mostly have those of the step before."""
        if req_ids == self._running:
            return True
        known = self._scheduler.requests
        requests = [one for req_id in req_ids if (one := known.get(req_id)) is not None]
        if len(requests) < len(req_ids) or not part_services.are_unfinished(requests):
            return False
        self._running = req_ids
        return True

    def _attach(self, made: Iterable[CoreOutputs]) -> None:
        for outputs in made:
            for output in outputs.outputs:
                if (notes := self._kept.pop(output.request_id, None)) is not None:
                    carried: dict[str, object] = {NOTES_KEY: {self._name: notes}}
                    others = output.kv_transfer_params
                    output.kv_transfer_params = {**others, **carried} if others else carried
