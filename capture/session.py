"""Capture in one worker: plans each step, stages its rows, and has them delivered, from start to close."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headgate.capture.capture_process import open_delivery
from headgate.capture.delivery.delivery import CloseReport, Delivery
from headgate.capture.links.network import NetworkKeys
from headgate.capture.local_delivery import WorkerPlace
from headgate.capture.monitoring.stats import CaptureStats
from headgate.capture.monitoring.step_log import compact
from headgate.capture.planning.planner import StepPlanner
from headgate.capture.planning.step_plan import PackGroup, StepPlan
from headgate.capture.schema.batch import (
    WIRE_VERSION,
    BatchView,
    Begin,
    End,
    FinalState,
    Int64Array,
    MemoryWanted,
    NewRequest,
    StepOutcome,
)
from headgate.capture.schema.config import MAX_LINGER_S, CaptureConsumersConfig
from headgate.capture.schema.consumer import NOWHERE, ActionTarget, CaptureConsumer, ModelInfo, ReadoutSite
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.sites import NO_SHAPES, Site, SiteShape
from headgate.capture.schema.spec import SpecReader
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.ring import StagingRing

if TYPE_CHECKING:
    from torch import Tensor


class BatchingWindow:
    """How long captured rows may wait in the ring for the next steps' rows: as long as all their consumers allow.

    Step thread only.

    Args:
        allowed_s: Seconds that each consumer allows, by its bit.
    """

    def __init__(self, allowed_s: Mapping[int, float]) -> None:
        self._allowed_s = dict(allowed_s)
        self._running: dict[str, float] = {}
        self.seconds = MAX_LINGER_S
        """Seconds that rows may wait, from the launch of the forward that computed the first of them."""

    @property
    def least(self) -> float:
        """The shortest wait that any consumer allows, in seconds."""
        return min(self._allowed_s.values(), default=0.0)

    @property
    def is_anything_running(self) -> bool:
        """Whether there are requests that may get further steps."""
        return bool(self._running)

    def begin(self, req_id: str, bits: Iterable[int]) -> None:
        """Note a request that begins, for the consumers with these bits."""
        self._running[req_id] = allowed_s = min((self._allowed_s[bit] for bit in bits), default=MAX_LINGER_S)
        self.seconds = min(self.seconds, allowed_s)

    def stop(self, req_id: str) -> None:
        """Note that a request gets no further step. Its rows may be waiting, so its limit counts until `collected`."""
        self._running.pop(req_id, None)

    def collected(self) -> None:
        """Note that no row is waiting."""
        self.seconds = min(self._running.values(), default=MAX_LINGER_S)


logger = logging.getLogger("headgate")

STAGING_GRACE_S = 60.0
"""Patience with the dispatch thread beyond that with all consumers together: copies, and the GPU."""


class CaptureSession:
    """Follows the steps of one worker and delivers what its requests want.

    The step thread calls `request_added`, `request_finished`, `step_begins` and `step_ends`, in the engine's order.
    It never waits for a consumer there, except under ``overload="block"`` and then through the staging memory alone,
    whose lock no consumer ever holds. `stats` is for any other thread, and so is `close`, if need be.

    Args:
        config: As configured.
        sites: The sites that this worker owns, in the order of the ring.
        staging: The memory that the forward pass writes to.
        delivery: Where rows and requests go.
        bits: Of each consumer, by its instance: its bit in a row's mask.
        linger_s: Seconds that rows of each consumer may wait for others, by its bit: see `lingers`.
        readouts: The readouts that consumers get in place of rows, in the order of the ring.
        shapes: Of the sites whose rows are not those of the stream.
    """

    def __init__(
        self,
        *,
        config: CaptureConsumersConfig,
        sites: Sequence[Site],
        staging: StagingRing,
        delivery: Delivery,
        bits: Mapping[str, int],
        linger_s: Mapping[int, float],
        readouts: Sequence[ReadoutSite] = (),
        shapes: Mapping[Site, SiteShape] = NO_SHAPES,
    ) -> None:
        self._specs = SpecReader(sites)
        self._bits = dict(bits)
        self._staging = staging
        self._delivery = delivery
        self._keys: dict[str, str] = {}
        self._window = BatchingWindow(linger_s)
        self._urgent = set[str]()  # requests whose clients wait for what consumers make of their rows
        self._ends: dict[str, End] = {}  # requests that have ended, while rows are left in the ring
        self._plan: StepPlan | None = None
        self._unsettled: deque[tuple[StepOutcome, tuple[str, ...], StepPlan]] = deque()
        """Outcome, requests and plan of kept steps with drafts that are undecided."""
        self._step_thread: int | None = None
        self._drafted: tuple[StepOutcome, tuple[str, ...]] | None = None
        self._planner = StepPlanner(sites, readouts, shapes)
        self._patience_s = _patience_s(config)
        self._close_report: CloseReport | None = None
        staging.on_wait = partial(_ask_for_memory, delivery)

    def request_added(self, new: NewRequest) -> None:
        """Take a request; one that is known under its id is given up for it.

        Raises:
            RuntimeError: If it names a consumer that this worker does not have: front end and worker disagree.
        """
        capture = None if new.wire is None else new.wire.get("capture")
        if self._delivery.is_lost:
            self._start_afresh()
        if capture is None and new.req_id not in self._keys:
            return
        key = "" if capture is None else capture["key"]
        if new.req_id in self._keys or new.req_id in self._ends:
            self._collect()  # what belongs to the request that was known under this id
        elif any(new.req_id in req_ids for _, req_ids, _ in self._unsettled):
            self._settle(waits=True)  # rows of a request that had this id, and wants nothing or has ended
        if new.wire is not None and new.wire.get("v") != WIRE_VERSION:
            raise RuntimeError(f"request {new.req_id}: expected wire version {WIRE_VERSION}, got {new.wire}")
        wanted = {} if capture is None else capture["specs"]
        specs = {self._bit(instance): self._specs.read(raw) for instance, raw in wanted.items()}
        self._step_thread = threading.get_ident()
        is_same_client = self._keys.get(new.req_id) == key
        prompt = np.asarray(new.prompt_token_ids, np.int64)
        if self._delivery.put(Begin(new.req_id, prompt, capture, is_same_client)):
            self._keys[new.req_id] = key
            self._window.begin(new.req_id, specs)
            if capture is not None and capture["wait"]:
                self._urgent.add(new.req_id)
            self._planner.add(new.req_id, new.num_prompt_tokens, specs)
            self._forget_arguments(new.req_id)
            given = {(new.req_id, bit): spec.arguments for bit, spec in specs.items() if spec.arguments}
            self._staging.readouts.arguments.update(given)

    def request_stopped(self, req_id: str) -> None:
        """The request gets no further step; how it ended is said later."""
        self._window.stop(req_id)
        self._collect_if_last()

    def request_finished(self, req_id: str, final: FinalState | None) -> None:
        """The request has got its last step, and this is how it ended. One that asked for nothing is not known here.

        Args:
            req_id: Internal id.
            final: How it ended; None if unknown, which makes its results errors.
        """
        if self._keys.pop(req_id, None) is None:
            return
        # Steps that sampled tokens of its answer have known outcomes. Rows of a later step are of no token of it.
        self._settle(waits=False)
        self._planner.remove(req_id)
        self._ends[req_id] = End(req_id, final)
        self._window.stop(req_id)
        if req_id in self._urgent or self._staging.kept_since is None:
            self._urgent.discard(req_id)
            self._collect(waits=False)
        self._collect_if_last()

    def step_begins(self, view: BatchView | None, token_ids: Tensor | None = None) -> None:
        """Before the forward of a step.

        Args:
            view: Its layout; None if it computes nothing for requests.
            token_ids: The token of each batch row on the device, as the runner laid it out; None with `view`. Rows that
                stand for other tokens than their request's own end the request with an error.
        """
        if self._delivery.is_lost:
            self._start_afresh()
        is_idle = view is None or not self._keys or self._close_report is not None
        self._plan = None if is_idle or view is None else self._plan_step(view)
        if self._plan is not None and self._staging.has_to_collect(self._plan):
            self._collect()
        self._staging.begin(self._plan, token_ids)

    def _plan_step(self, view: BatchView) -> StepPlan | None:
        if view.outcome is None:
            return self._planner.plan(view)
        self._settle(waits=False)
        self._drafted = view.outcome, view.req_ids
        return self._planner.candidates(view)

    def step_ends(self) -> None:
        """After the forward of the step was launched, and after its sampling."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self._staging.keep(plan)
            if not plan.is_decided and self._drafted is not None:
                self._unsettled.append((*self._drafted, plan))
        since = self._staging.kept_since
        if since is not None and (self._staging.is_well_filled or time.monotonic() >= since + self._window.seconds):
            self._collect(waits=False)

    def describe_step(self) -> dict[str, Any] | None:
        """Return the plan of the step that has begun, for the step log; None if nothing of it is captured.

        Ring rows are read from the device: ``ring_rows`` has the one of each batch row up to the last wanted one, and
        each group those of its rows.
        """
        plan = self._plan
        if plan is None:
            return None
        if not plan.is_decided:
            return {"candidate_rows": compact(plan.token_rows.tolist())}
        ring_rows = self._staging.slots[: int(plan.token_rows[-1]) + 1].cpu().numpy()
        groups = [
            {
                "sites": [site.name for site in group.sites],
                "num_outputs": group.shape.width if group.shape and group.site_set.is_read_out else 0,
                "rows": list(_described(group, plan.token_rows, ring_rows, self._bits)),
            }
            for group in plan.groups
        ]
        return {"ring_rows": compact(ring_rows.tolist()), "groups": groups}

    def _collect_if_last(self) -> None:
        """Without a request that runs there may be no step after which to look again.

        A step whose outcome is not known yet was launched in vain: its requests ended with tokens of earlier ones.
        """
        if not self._window.is_anything_running:
            self._collect(waits=False)

    def _settle(self, *, waits: bool) -> None:
        """Plan the kept steps with drafts whose outcomes are known: rows of rejected drafts never leave the ring.

        Args:
            waits: Whether to wait for the outcomes of all of them.
        """
        while self._unsettled and (waits or self._unsettled[0][0].is_known()):
            outcome, _, plan = self._unsettled.popleft()
            self._planner.settle(plan, outcome.view())
            self._staging.count_kept()

    def _collect(self, *, waits: bool = True) -> None:
        """Start the copies of the rows that are left in the ring: some calls for each time, however many steps.

        What ended meanwhile had its last rows among them.

        Args:
            waits: Whether to wait until the last steps were sampled, if they have drafts; else their rows stay.
        """
        self._settle(waits=waits)
        self._staging.collect(self._hand_over_rows, patience_s=self._patience_s)
        self._window.collected()
        self._hand_over_ends()

    def _hand_over_rows(self, staged: StagedRows) -> None:
        if not self._delivery.put(staged):
            staged.release()

    def _hand_over_ends(self) -> None:
        ends, self._ends = self._ends, {}
        for end in ends.values():
            self._delivery.put(end)
            self._forget_arguments(end.req_id)
        self._delivery.flush()

    def _forget_arguments(self, req_id: str) -> None:
        """Let go of what the readouts of a request needed: no row of it is left in the ring."""
        given = self._staging.readouts.arguments
        if given:
            for bit in self._bits.values():
                given.pop((req_id, bit), None)

    def _start_afresh(self) -> None:
        """Forget all requests and rows: what was to deliver them is gone, and has said so to their clients."""
        for req_id in self._keys:
            self._planner.remove(req_id)
            self._window.stop(req_id)
        self._keys.clear()
        self._ends.clear()
        self._urgent.clear()
        self._staging.readouts.arguments.clear()
        self._staging.drop_kept()
        self._unsettled.clear()
        self._window.collected()
        self._delivery.recover()

    def stats(self) -> CaptureStats:
        """Counters as of now."""
        delivered = self._delivery.stats()
        return CaptureStats(
            **asdict(self._staging.counters),
            staged_bytes=self._staging.staged_bytes,
            dispatch_errors=delivered.dispatch_errors,
            lost_results=delivered.lost_results,
            lost_messages=delivered.lost_messages,
            restarts=delivered.restarts,
            consumers=delivered.consumers,
        )

    def close(self, timeout_s: float) -> CloseReport:
        """Take nothing more, deliver what is there, close the consumers, and end every thread.

        What is not through after `timeout_s` seconds is given up: its requests get an error, and a consumer that is
        still in a call keeps its thread, a daemon, until the call returns. Closing again changes nothing.
        """
        if self._close_report is not None:
            return self._close_report
        self._end_what_waits()
        self._close_report = report = self._delivery.close(timeout_s)
        self._staging.memory.close()
        if not report.is_clean:
            logger.warning("capture was closed before everything was delivered: %s", report)
        return report

    def _end_what_waits(self) -> None:
        """Requests that have ended get their last rows; on a thread other than the step thread, an error instead."""
        if threading.get_ident() == self._step_thread:
            self._collect()
        self._hand_over_ends()

    def _bit(self, instance: str) -> int:
        bit = self._bits.get(instance)
        if bit is None:
            raise RuntimeError(
                f"a request names the consumer {instance!r}, which this worker does not have; it has "
                f"{', '.join(sorted(self._bits))}. Front end and worker have different configurations: a bug"
            )
        return bit


def open_session(
    *,
    config: CaptureConsumersConfig,
    model: ModelInfo,
    sites: Sequence[Site],
    staging: StagingRing,
    pp_rank: int = 0,
    pp_size: int = 1,
    versions: Mapping[str, str] | None = None,
    actions: ActionTarget = NOWHERE,
    keys: NetworkKeys | None = None,
    readouts: Sequence[ReadoutSite] = (),
) -> CaptureSession:
    """Open the configured consumers, and a session that sends results over ZMQ.

    Args:
        config: As configured.
        model: The model being served.
        sites: The sites that this worker owns, in the order of the ring.
        staging: The memory that the forward pass writes to. A capture process delivers what is in it if they share it.
        pp_rank: Pipeline stage of this worker.
        pp_size: Number of stages.
        versions: Of headgate, vllm and torch.
        actions: Where actions of consumers go.
        keys: To reach front ends on other hosts.
        readouts: The readouts that the ring computes, in its order.

    Raises:
        ConfigError: If a consumer cannot be opened; consumers opened before it are closed.
    """
    classes = [load_configured(spec) for spec in config.consumers]
    linger_s = lingers(config, dict(enumerate(classes)))
    place = WorkerPlace(
        config=_located(config, classes),
        model=model,
        sites=tuple(sites),
        staging_bytes=staging.host_bytes,
        linger_s=min(linger_s.values(), default=0.0),
        pp_rank=pp_rank,
        pp_size=pp_size,
        versions=dict(versions or {}),
        actions=actions,
        keys=keys,
        readouts=tuple(readouts),
    )
    delivery = open_delivery(place, staging.memory)
    return CaptureSession(
        config=config,
        sites=sites,
        staging=staging,
        delivery=delivery,
        bits=config.bits,
        linger_s=linger_s,
        readouts=readouts,
        shapes=model.stored_shapes,
    )


def _located(config: CaptureConsumersConfig, classes: Sequence[type[CaptureConsumer]]) -> CaptureConsumersConfig:
    """Say where each consumer is: who delivers does not load those of the driver again."""
    specs = zip(config.consumers, classes, strict=True)
    located = tuple(msgspec.structs.replace(spec, location=found.location) for spec, found in specs)
    return msgspec.structs.replace(config, consumers=located)


def _described(
    group: PackGroup, token_rows: Int64Array, ring_rows: Int64Array, bits: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of each request in a group, by the consumers that want them."""
    for req_id, start, stop in group.spans:
        masks = group.masks[start:stop]
        for mask in dict.fromkeys(masks.tolist()):
            picks = start + np.flatnonzero(masks == mask)
            rows = token_rows[group.rows[picks]]
            yield {
                "request": req_id,
                "consumers": [name for name, bit in bits.items() if mask >> bit & 1],
                "positions": compact(group.positions[picks].tolist()),
                "rows": compact(rows.tolist()),
                "ring_rows": compact(ring_rows[rows].tolist()),
            }


def _ask_for_memory(delivery: Delivery) -> None:
    delivery.put(MemoryWanted())
    delivery.flush()


def lingers(config: CaptureConsumersConfig, classes: Mapping[int, type[CaptureConsumer]]) -> dict[int, float]:
    """Seconds that rows of each consumer may wait for others, by its bit: as configured, or as its class says.

    The class of a consumer in the driver counts, not that of what stands in for it in a worker.
    """
    return {bit: found.linger_s if config.linger_s is None else config.linger_s for bit, found in classes.items()}


def _patience_s(config: CaptureConsumersConfig) -> float:
    """Seconds that the step thread waits for staging memory: all consumers may stall one after the other."""
    return min(sum(spec.max_stall_s for spec in config.consumers) + STAGING_GRACE_S, threading.TIMEOUT_MAX)
