"""One part of headgate at work in one engine core: its requests, who may enter the scheduler, and calls to it.

Requests that wait for the part are not known to the scheduler. They cannot be left over: each fits in alone, so one
waits only while another holds what it waits for, and that one is in the scheduler.

How a request ended is noted here and sent to the worker with the next step: the worker sees ids only. The scheduler
knows the tokens and why it stopped; of stop strings the front end alone knows, since it has the text. While it looks,
the engine runs ahead and may even end the request for a reason of its own, so the final state of a request with stop
strings is held back until the front end has said how many tokens it kept. Requests that the front end aborts are
treated alike: the user has fewer tokens than the engine. `contracts.core_part` has the messages.

An engine core opens the part that is configured there when it starts, or refuses to start. In a process of its own an
engine core loads plugins inside its constructor, when it is too late to wrap that. So two of the constructor's calls
are wrapped: the one after plugins were loaded and workers started notes the engine core, and the last one opens it.

A part may note something about a request in any step, and `StepNotes` hands it to the front end with the request's
next output. A step of a prompt's chunk has readings and no output, so notes are kept until their request has one. They
are put into a field of vLLM's that is free here; see `NOTES_KEY`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import wraps
from itertools import chain
from typing import cast

from headgate.capture.engine import vllm_names
from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.contracts.core_part import CoreAnswer, CoreFacts, CorePart
from headgate.capture.engine.contracts.parts import Part, core_part_names, load_part
from headgate.capture.engine.contracts.wire_format import (
    CAPTURE,
    FINAL_ATTRIBUTE,
    NOTES_KEY,
    ORDERS_ATTRIBUTE,
    OUTDATED_KEY,
    READINGS_ATTRIBUTE,
    WIRE_KEY,
    is_captured,
    wants_notes,
    wire_of,
)
from headgate.capture.engine.core import block_keys, part_services, steps_in_flight
from headgate.capture.engine.core.fan_out import SharedWires
from headgate.capture.engine.core.part_services import SERVICES, PartServices, SentAway, after_step, send_away
from headgate.capture.engine.core.request_ends import Ended, SchedulerEnds, is_mark, split_marks
from headgate.capture.engine.core.steps_in_flight import StepsInFlight
from headgate.capture.engine.setup.hosts import SETUP_RPC, action_target, check_agreement
from headgate.capture.engine.setup.settings import model_info, section, sections
from headgate.capture.engine.setup.startup_checks import check_servable
from headgate.capture.engine.vllm_names import WORKS_WITH
from headgate.capture.engine.vllm_types import (
    AsyncEngineClient,
    CoreOutputs,
    EngineCore,
    EngineCoreOutput,
    EngineCoreProc,
    EngineCoreRequest,
    Function,
    Request,
    RequestType,
    RunnerOutput,
    Scheduler,
    SchedulerOutput,
    VllmConfig,
)
from headgate.capture.links.actions import ActionInbox
from headgate.capture.monitoring.logs import ReasonLog, speak_through_vllm
from headgate.capture.schema.batch import WIRE_VERSION, Document, RequestWire
from headgate.capture.schema.errors import ForbiddenError, OverloadedError, RequestError, UnsupportedError


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
        release: Frees what is kept for a request; None unless drafts are verified. Then a step's rows count as far as
            its tokens do: they are taken after these, and requests that end with them are released after that.
    """

    def __init__(
        self, scheduler: Scheduler, name: str, part: CorePart, release: Callable[[str], None] | None = None
    ) -> None:
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
        self._release = release
        self._ending: dict[str, tuple[Request, Callable[[], None]]] | None = None
        """Requests that ended with a step's tokens, whose readings are yet to be taken, and what notes their ends;
        None between steps."""
        self._running: list[str] = []
        """Requests of the last step that was looked at, if all of them ran and none was freed since."""

    def update(
        self, original: Function, scheduler_output: SchedulerOutput, output: RunnerOutput
    ) -> Mapping[int, CoreOutputs]:
        """Let the scheduler make the outputs of a step, and complete them with its notes and earlier ones."""
        readings: Mapping[str, Document] | None = getattr(output, READINGS_ATTRIBUTE, None)
        outdated = self._take_outdated() if self._outdated else set()
        discarded = set() if readings is None else self._ended(scheduler_output.num_scheduled_tokens) | outdated
        if readings is not None and self._release is None:
            self._take(readings, discarded)
        self._is_in_step = True
        try:
            made = self._outputs(original, scheduler_output, output, readings, discarded)
            self._decide(made)
            if self._kept:
                self._attach(made.values())
        finally:
            self._is_in_step = False
        for req_id in [known for known in self._kept if known not in self._scheduler.requests]:
            del self._kept[req_id]
        return made

    def _outputs(
        self,
        original: Function,
        scheduler_output: SchedulerOutput,
        output: RunnerOutput,
        readings: Mapping[str, Document] | None,
        discarded: Collection[str],
    ) -> dict[int, CoreOutputs]:
        """Let the scheduler make the outputs of a step; where drafts are verified, take what was read after that."""
        made: dict[int, CoreOutputs]
        if self._release is None or readings is None:
            made = original(self._scheduler, scheduler_output, output)
            return made
        known = self._scheduler.requests
        held = {req_id: known[req_id] for req_id in scheduler_output.num_scheduled_tokens if req_id in known}
        self._ending = {}
        try:
            made = original(self._scheduler, scheduler_output, output)
            self._take(readings, discarded, {req_id: request.num_tokens - 1 for req_id, request in held.items()})
        finally:
            ending, self._ending = self._ending, None
            for req_id, (_, note_end) in ending.items():
                note_end()
                self._release(req_id)
        return made

    def waits(self, request: Request, note_end: Callable[[], None]) -> bool:
        """Whether a request that was freed is released later, once the readings of the present step were taken.

        `note_end` is called in front of that, as what it notes may describe these readings.
        """
        if self._ending is None:
            return False
        self._ending[request.request_id] = request, note_end
        return True

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
        if found is None:
            return nothing_noted

        def described(end: int) -> Document:
            document = found(end)
            return {self._name: document} if document else {}

        return described

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
            request = self._scheduler.requests.get(req_id) or (self._ending or {}).get(req_id, (None,))[0]
            if request is None:
                return
            wants = self._wanting[req_id] = wants_notes(request.sampling_params)
        if wants:
            self._kept.setdefault(req_id, []).append(note)

    def _take(
        self, readings: Mapping[str, Document], discarded: Collection[str], ends: Mapping[str, int] | None = None
    ) -> None:
        for name, document in readings.items():
            if name != self._name:
                raise AssertionError(f"nothing in this engine core takes the readings of part {name!r}")
            for req_id, note in self._part.take_readings(document, discarded, ends).items():
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
                    _carry(output, {NOTES_KEY: {self._name: notes}})


_refusals = ReasonLog("headgate: requests are refused")

CORE_ADAPTER = "_headgate_core"
"""Attribute of an ``EngineCore`` and of its scheduler; absent where no part is open."""

Made = tuple[Request, int]
"""vLLM's ``Request`` and the wave of data-parallel steps that it belongs to."""


class EngineCoreAdapter:
    """Joins an engine core and a part.

    Args:
        core: vLLM's ``EngineCore``, constructed.
        steps: Of it, in flight.
        part: Whose half in the engine core is opened.

    Attributes:
        shared_wires: Of samples on their way here.
        notes: About requests, on their way to the front end.
        has_own_process: Requests come over a socket, and refusals are sent back over it.
        refused: Requests that the part has refused and that were not answered yet, by id. Put in on the input thread,
            taken out on the engine core's.
    """

    def __init__(self, core: EngineCore, steps: StepsInFlight, part: Part) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._name = part.name
        self._waiting: dict[str, Request] = {}
        """Requests that wait for the part, by id."""
        self.shared_wires = SharedWires()
        self._unreported: list[SentAway] = []
        """Requests that ended between two steps, which the next one reports to their clients."""
        self._entering: str | None = None
        self._goes_by_priority = core.vllm_config.scheduler_config.policy == "priority"
        self.has_own_process = _has_own_process(core)
        self.refused: dict[str, RequestError] = {}
        config = core.vllm_config
        parallel = config.parallel_config
        facts = CoreFacts(
            model=model_info(config),
            engine=parallel.data_parallel_index,
            num_stages=parallel.pipeline_parallel_size,
            num_engines=parallel.data_parallel_size,
            has_drafts=config.speculative_config is not None,
            has_own_process=self.has_own_process,
        )
        target = action_target(config)
        actions = None if target.address is None else ActionInbox(target.address)
        self._services = PartServices(core, part.name, steps, self._waiting, actions)
        self._part: CorePart = part.core(facts, section(config, part.name), self._services)
        self.notes = StepNotes(core.scheduler, part.name, self._part, self.release if facts.has_drafts else None)
        steps.begin_again = self.notes.begin_again
        self._services.open(self._part)
        setattr(core.scheduler, SERVICES, self._services)

    def accept(self, request: EngineCoreRequest) -> None:
        """Take an ``EngineCoreRequest`` in: the part's answer for the workers is written into it. Input thread."""
        params = request.sampling_params
        wire: RequestWire = self.shared_wires.restore(wire_of(params) or {"v": WIRE_VERSION})
        parts = wire.get("parts", {})
        num_prompt = _prompt_length(request)
        ours = self._part.accept(request.request_id, parts.get(self._name), num_prompt)
        if CAPTURE in wire:
            self.notes.describe(request.request_id, num_prompt)
        if params is not None and ours is not None:
            # Samples of one prompt share their parameters, so nothing of them is changed in place: where the front end
            # is in this process, the next sample would come with the answer for this one.
            changed: RequestWire = {**wire, "parts": {**parts, self._name: ours}}
            request.sampling_params = params = copy(params)
            params.extra_args = {**(params.extra_args or {}), WIRE_KEY: changed}

    def make_request(self, original: Callable[[], Made], request: EngineCoreRequest) -> Made:
        """Let stock make its ``Request`` of one that was accepted: it hashes the prompt's blocks. Input thread."""
        try:
            keys = self._part.block_keys(request.request_id)
            block_keys.attach_keys(request.sampling_params, keys)
            result = original()
        except BaseException:
            self._part.forget(request.request_id)
            raise
        block_keys.note_hashed(result[0], keys)
        return result

    def may_enter(self, request: Request) -> bool:
        """Whether a ``Request`` goes to the scheduler now; otherwise it waits here.

        Raises:
            RequestError: If it can never run.
            OverloadedError: If too many others wait.
        """
        req_id = request.request_id
        if req_id == self._entering or req_id in self._scheduler.requests:  # the latter: more input for a session
            return True
        try:
            priority = request.priority if self._goes_by_priority else 0
            is_offline = "offline" in (wire_of(request.sampling_params) or ())
            may_enter = self._part.offer(req_id, priority=priority, is_session=request.resumable, is_offline=is_offline)
        except BaseException:
            self._part.release(req_id)
            raise
        # Global vectors may have changed since it was hashed.
        block_keys.rehash(request, self._part.block_keys(req_id))
        if not may_enter:
            self._waiting[req_id] = request
        return may_enter

    def admit_waiting(self) -> None:
        """Hand the requests that need wait no longer to the scheduler."""
        for req_id in self._part.admit():
            self._entering = req_id
            try:
                self._scheduler.add_request(self._waiting.pop(req_id))
            finally:
                self._entering = None

    def release(self, req_id: str) -> None:
        """Follow the scheduler, which freed a request: others may enter."""
        self._part.release(req_id)
        self._services.release(req_id)
        self.notes.release(req_id)
        self.admit_waiting()

    def attach_orders(self, scheduler_output: SchedulerOutput) -> None:
        """Attach what the part has decided to a step that was just scheduled."""
        attach_orders(self._name, self._part, scheduler_output)

    def withdraw(self, req_ids: Collection[str] | None, status: object) -> list[Request]:
        """End those of `req_ids` (None: all) that wait; return them, as the scheduler returns its own."""
        gone = []
        for req_id in self._part.withdraw(req_ids) if self._waiting else ():
            request = self._waiting.pop(req_id)
            self._part.release(req_id)
            request.status = status
            # With several front ends, or data parallelism, the client is sent the ids that ended.
            if (reported := self._scheduler.finished_req_ids_dict) is not None:
                reported[request.client_index].add(req_id)
            gone.append(request)
        return gone

    def end_overdue(self) -> list[SentAway]:
        """End the requests that have waited too long, between two steps; return them with the reasons."""
        unreported, self._unreported = self._unreported, []
        if not self._waiting or not (overdue := self._part.overdue()):
            return unreported
        RequestStatus = vllm_names.REQUEST_STATUS.get()

        gone = self.withdraw(overdue.keys(), RequestStatus.FINISHED_ABORTED)
        self.admit_waiting()
        return [*unreported, *((request, overdue[request.request_id]) for request in gone)]

    def forget_refused(self, req_id: str) -> None:
        """Release a request that stock refused before the scheduler saw it, unless it is there or waits."""
        if req_id not in self._scheduler.requests and req_id not in self._waiting:
            self._part.release(req_id)

    def call(self, part: str, method: str, args: Document) -> CoreAnswer:
        """Serve ``EngineCore.headgate_call``: the front end calls a method of `part`. Between two steps.

        Returns:
            What it returned, or its refusal.
        """
        try:
            self._check_part(part)
            return {"ok": self._part.call(method, args)}
        except (RequestError, ForbiddenError) as error:
            message = str(error).removeprefix(f"{error.field}: ")
            return {
                "error": {
                    "field": error.field,
                    "message": message,
                    "is_forbidden": isinstance(error, ForbiddenError),
                }
            }
        finally:
            self._end_stranded()
            self.admit_waiting()

    def _end_stranded(self) -> None:
        """Send away what waits in vain since a call changed something; beside the front end the next step does."""
        gone = self.end_overdue()
        if self.has_own_process:
            for request, why in gone:
                send_away(cast("EngineCoreProc", self._core), request, why)
        else:
            self._unreported += gone

    def _check_part(self, part: str) -> None:
        if part != self._name:
            raise RequestError("part", f"no part {part!r} is open in this engine; open: {self._name}")


def _has_own_process(core: EngineCore) -> bool:
    OwnProcess = vllm_names.ENGINE_CORE_PROCESS.get()

    return isinstance(core, OwnProcess)


def adapter_of(owner: EngineCore | Scheduler) -> EngineCoreAdapter | None:
    """Return the adapter of an ``EngineCore`` or of a scheduler; None if no part is open there."""
    adapter: EngineCoreAdapter | None = vars(owner).get(CORE_ADAPTER)
    return adapter


def preprocess_add_request(original: Function) -> Function:
    """Wrap ``EngineCore.preprocess_add_request``: the part accepts the request before its blocks are hashed."""

    @wraps(original)
    def wrapped(self: EngineCore, request: EngineCoreRequest) -> object:
        adapter = adapter_of(self)
        if adapter is None:
            _check_unopened(request)
            return original(self, request)
        try:
            with as_client_error():
                adapter.accept(request)
        except RequestError as error:
            if not adapter.has_own_process:
                _keep_images(self, request)
                raise
            # Stock takes whatever is raised here for a bug: it is raised where the request is added.
            adapter.refused[request.request_id] = error
            return original(self, request)
        return adapter.make_request(lambda: original(self, request), request)

    return wrapped


def _prompt_length(request: EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else len(request.prompt_embeds)


def _keep_images(core: EngineCore, request: EngineCoreRequest) -> None:
    """Keep the images of a request that is refused, as stock does first: its front end will not send them again."""
    if core.mm_receiver_cache is not None and request.mm_features:
        core.mm_receiver_cache.get_and_update_features(request.mm_features)


def _check_unopened(request: EngineCoreRequest) -> None:
    wire = wire_of(request.sampling_params)
    asked = [name for name in sorted(core_part_names()) if name in wire.get("parts", {})] if wire else []
    if wire and "fan_out" in wire:
        asked.append("a part of its samples")
    if asked:
        raise AssertionError(f"request {request.request_id}: {', '.join(asked)} is not open in this engine core")


def handle_client_request(original: Function) -> Function:
    """Wrap ``EngineCoreProc._handle_client_request``: a request that cannot run ends, and the engine does not."""

    @wraps(original)
    def wrapped(self: EngineCoreProc, request_type: RequestType, request: Made) -> object:
        adapter = adapter_of(self)
        if adapter is None or request_type.name != "ADD":
            return original(self, request_type, request)
        added = request[0]
        try:
            if (refusal := adapter.refused.pop(added.request_id, None)) is not None:
                raise refusal
            return original(self, request_type, request)
        except RequestError as error:
            _answer(self, added, error)
            return None
        except OverloadedError as error:
            send_away(self, added, str(error))
            return None
        finally:
            adapter.forget_refused(added.request_id)

    return wrapped


def _answer(core: EngineCoreProc, request: Request, error: RequestError) -> None:
    """End a request with the finish reason "error"."""
    if hasattr(core, "_handle_request_validation_error"):  # vLLM 0.33 gives the client the reason
        core._handle_request_validation_error(request, error)
    else:
        _refusals.info(error.field.partition("[")[0], f"request {request.request_id}: {error}")
        core._send_error_outputs_to_client([request.request_id], request.client_index)


def add_request(original: Function) -> Function:
    """Wrap ``Scheduler.add_request``: a request enters when the part lets it in."""

    @wraps(original)
    def wrapped(self: Scheduler, request: Request) -> object:
        adapter = adapter_of(self)
        if adapter is None:
            return original(self, request)
        with as_client_error():
            may_enter = adapter.may_enter(request)
        return original(self, request) if may_enter else None

    return wrapped


def finish_requests(original: Function) -> Function:
    """Wrap ``Scheduler.finish_requests``: requests that wait outside end as those inside do."""

    @wraps(original)
    def wrapped(self: Scheduler, request_ids: str | Iterable[str] | None, finished_status: object) -> object:
        adapter = adapter_of(self)
        if adapter is None:
            return original(self, request_ids, finished_status)
        if request_ids is not None:
            request_ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        # First, so that none of them enters when those inside are freed.
        withdrawn = adapter.withdraw(request_ids, finished_status)
        finished = original(self, request_ids, finished_status)
        adapter.admit_waiting()
        return [*finished, *withdrawn]

    return wrapped


def update_from_output(original: Function) -> Function:
    """Wrap ``Scheduler.update_from_output``: the part takes what was read, and its notes leave with the outputs.

    Outputs of requests whose captured prompt was computed again are marked.
    """

    @wraps(original)
    def wrapped(self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: RunnerOutput) -> object:
        adapter, steps = adapter_of(self), steps_in_flight.steps_of(self)
        outdated = frozenset() if steps is None else steps.outdated  # a step may free a request with its first token
        if adapter is None:
            made = original(self, scheduler_output, model_runner_output)
        else:
            made = adapter.notes.update(original, scheduler_output, model_runner_output)
        if outdated:
            for output in chain.from_iterable(outputs.outputs for outputs in made.values()):
                if output.request_id in outdated:
                    _carry(output, {OUTDATED_KEY: True})
        return made

    return wrapped


def _carry(output: EngineCoreOutput, carried: dict[str, object]) -> None:
    """Let an output carry something to the front end, which takes it out again."""
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), **carried}


_ENDS = "_headgate_ends"


def _ends(scheduler: Scheduler) -> SchedulerEnds:
    found: SchedulerEnds | None = vars(scheduler).get(_ENDS)
    if found is None:
        found = SchedulerEnds()
        setattr(scheduler, _ENDS, found)
    return found


def _end_of(scheduler: Scheduler, request: Request, notes: StepNotes | None, num_outdated: int) -> Callable[[], None]:
    """Return what notes how a capturing request ended: its tokens as they are now, its description as it is then."""
    req_id, params, status = request.request_id, request.sampling_params, str(request.get_finished_reason())
    num_prompt, token_ids = int(request.num_prompt_tokens), list(request.all_token_ids)

    def note_end() -> None:
        describe = nothing_noted if notes is None else notes.description(req_id)
        ended = Ended(num_prompt, token_ids, status, describe, num_outdated)
        _ends(scheduler).end(req_id, ended, is_decided=status == "abort" or not params.stop)

    return note_end


def _not_captured() -> None:
    """Stand in for what notes the end of a request that captures."""


def free_request(original: Function) -> Function:
    """Wrap ``Scheduler._free_request``: note how a capturing request ended, and free what `core` keeps for any."""

    @wraps(original)
    def _free_request(self: Scheduler, request: Request, *args: object, **kwargs: object) -> object:
        adapter, steps = adapter_of(self), steps_in_flight.steps_of(self)
        num_outdated = 0 if steps is None else steps.release(request.request_id)
        note_end = _not_captured
        if is_captured(request.sampling_params):
            note_end = _end_of(self, request, None if adapter is None else adapter.notes, num_outdated)
        result = original(self, request, *args, **kwargs)
        if adapter is None or not adapter.notes.waits(request, note_end):
            note_end()
            if adapter is not None:
                adapter.release(request.request_id)
        return result

    return _free_request


def update_after_schedule(original: Function) -> Function:
    """Wrap ``Scheduler._update_after_schedule``: attach the finals to the step that carries the finished ids, and what
    the part decided to the step whose requests follow it.
    """

    @wraps(original)
    def _update_after_schedule(self: Scheduler, scheduler_output: SchedulerOutput) -> object:
        if _ENDS in vars(self) and (finals := _ends(self).pop_finals()):
            setattr(scheduler_output, FINAL_ATTRIBUTE, finals)
        if (adapter := adapter_of(self)) is not None:
            adapter.attach_orders(scheduler_output)
        return original(self, scheduler_output)

    return _update_after_schedule


def has_finished_requests(original: Function) -> Function:
    """Wrap ``Scheduler.has_finished_requests``: an idle engine takes one more step while a final is to be reported."""

    @wraps(original)
    def wrapped(self: Scheduler) -> bool:
        return bool(original(self)) or (_ENDS in vars(self) and bool(_ends(self).finals))

    return wrapped


def abort_requests(original: Function) -> Function:
    """Wrap ``EngineCore.abort_requests``: take out what the front end said about requests that it ended."""

    @wraps(original)
    def wrapped(self: EngineCore, request_ids: Sequence[str]) -> object:
        ids, kept, sent = split_marks(request_ids)
        if sent and (adapter := adapter_of(self)) is not None:
            for key in sent:
                adapter.shared_wires.forget(key)
        if kept or _ENDS in vars(self.scheduler):
            ends = _ends(self.scheduler)
            for req_id, said in kept.items():
                request = self.scheduler.requests.get(req_id)
                is_running = request is not None and not request.is_finished()
                ends.front_end_kept(req_id, said, is_running=is_running)
            for req_id in ids:
                ends.front_end_left(req_id)
        return original(self, ids)

    return wrapped


def route_marks(original: Function) -> Function:
    """Wrap ``DPLBAsyncMPClient.abort_requests_async``: it drops ids it does not know; marks go to every engine."""

    @wraps(original)
    async def wrapped(self: AsyncEngineClient, request_ids: Sequence[str]) -> object:
        marks = [entry for entry in request_ids if is_mark(entry)]
        if marks and not self.resources.engine_dead:
            for engine in self.core_engines:
                await self._abort_requests(marks, engine)
        return await original(self, [entry for entry in request_ids if not is_mark(entry)])

    return wrapped


_noted: weakref.ref[EngineCore] | None = None
"""The ``EngineCore`` of this process that is in its constructor."""


def initialize_kv_caches(original: Function) -> Function:
    """Wrap ``EngineCore._initialize_kv_caches``: refuse in this process too, and make sure every worker took part
    and is configured alike.

    It is what an engine core calls next after it has loaded plugins and started its workers.
    """

    @wraps(original)
    def wrapped(self: EngineCore, vllm_config: VllmConfig, *args: object, **kwargs: object) -> object:
        global _noted
        check_servable(vllm_config)
        if sections(vllm_config):
            check_agreement(vllm_config, self.model_executor.collective_rpc(SETUP_RPC))
            _noted = weakref.ref(self)
        return original(self, vllm_config, *args, **kwargs)

    return wrapped


def open_noted(original: Function) -> Function:
    """Wrap ``enable_envs_cache`` as ``EngineCore.__init__`` calls it, last: open what is configured, or refuse."""

    @wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        global _noted
        result = original(*args, **kwargs)
        core, _noted = _noted() if _noted is not None else None, None
        if core is not None:
            _open_configured(core)
        return result

    return wrapped


def _open_configured(core: EngineCore) -> None:
    steps = StepsInFlight(core)
    names = [name for name in sections(core.vllm_config) if name in core_part_names()]
    if not names:
        return
    try:
        _open(core, steps, names)
    except BaseException:
        core.shutdown()
        raise


def _open(core: EngineCore, steps: StepsInFlight, names: list[str]) -> None:
    if len(names) > 1:
        raise UnsupportedError(f"an engine core has room for one part, but {', '.join(names)} are configured")
    speak_through_vllm()
    part_services.check_support(core.scheduler)
    check_carrier()
    block_keys.verify_block_keys(core.request_block_hasher, core.scheduler.hash_block_size)
    adapter = EngineCoreAdapter(core, steps, load_part(names[0]))
    core.headgate_call = adapter.call
    core.step_fn = after_step(core.step_fn, adapter.end_overdue)
    setattr(core, CORE_ADAPTER, adapter)
    setattr(core.scheduler, CORE_ADAPTER, adapter)
