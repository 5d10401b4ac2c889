"""Capture as a part of one worker: its sites in the graph, its session behind the step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch

from headgate.capture.engine.compiler.inductor_heuristics import register_exclusion
from headgate.capture.engine.compiler.unfused_copy import register_unfused_copy
from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.contracts.worker_hooks import SiteAction, SiteRun, SiteValue, WorkerFacts
from headgate.capture.engine.setup.versions import versions
from headgate.capture.engine.worker import capture_ops, self_test
from headgate.capture.monitoring.machine_memory import share_of_memory
from headgate.capture.process.spread import deal_out
from headgate.capture.schema.batch import BatchView, FinalState, NewRequest
from headgate.capture.schema.config import MIB, CaptureConsumersConfig
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.part_hooks import hookimpl
from headgate.capture.schema.readouts.readout import ReadoutSite
from headgate.capture.schema.registry import load_configured, load_readouts
from headgate.capture.schema.sites import Site
from headgate.capture.session import CaptureSession, open_session
from headgate.capture.staging.readouts import BoundReadout, bind
from headgate.capture.staging.ring import NUM_TRASH_ROWS, StagingRing, most_part_rows
from headgate.capture.staging.shared_memory import SharedStaging

logger = logging.getLogger("headgate")


class CapturePart:
    """Implements the worker hooks for capture. Only tensor-parallel rank 0 of a stage captures."""

    def __init__(self, config: CaptureConsumersConfig) -> None:
        self._config = config
        self._sites: tuple[Site, ...] = ()
        self._readouts: tuple[ReadoutSite, ...] = ()
        self._staging: StagingRing | None = None
        self._session: CaptureSession | None = None
        self._run_counts: torch.Tensor | None = None

    @hookimpl
    def headgate_allocate(self, facts: WorkerFacts) -> int:
        """Allocate the staging ring of this worker's sites, and pinned host memory."""
        if facts.tp_rank != 0:
            return 0
        self._sites = tuple(site for site in facts.model.sites if facts.owns(site))
        num_rows = self._num_rows(facts)
        ring = self._check_memory(facts, num_rows)
        staging_bytes = self._config.staging_bytes or default_staging_bytes(facts, len(self._sites))
        num_readers = deal_out(self._config).num_readers
        self._readouts, bound = bind_readouts(self._config, facts, self._sites)
        self._staging = StagingRing(
            sites=self._sites,
            num_rows=num_rows,
            max_tokens=facts.max_tokens,
            hidden_size=facts.model.hidden_size,
            dtype=facts.dtype,
            device=facts.device,
            staging_bytes=staging_bytes,
            memory=shared_staging(facts, len(self._sites), staging_bytes, num_readers) if num_readers else None,
            readouts=bound,
        )
        if self._config.fire_counter:
            self._run_counts = torch.zeros(len(self._sites), dtype=torch.int64, device=facts.device)
        logger.info(
            "capture: %.1f MiB of %s memory, of which the staging ring has %s; %.0f MiB of host memory",
            self._staging.device_bytes / MIB,
            facts.device.type,
            ring,
            self._staging.host_bytes / MIB,
        )
        return self._staging.device_bytes

    @hookimpl
    def headgate_actions(self, facts: WorkerFacts) -> dict[Site, SiteAction]:
        """Declare the capture action of every site of this worker."""
        if self._staging is None:
            return {}
        run = capture_action(facts)
        if self._run_counts is not None:
            run = counted(run)
        actions = {}
        for index, site in enumerate(self._sites):
            tensors = {
                capture_ops.ROWS: unaliased(self._staging.buffers[index]),
                capture_ops.SLOTS: self._staging.slots,
            }
            if self._run_counts is not None:
                tensors[capture_ops.RUN_COUNTS] = unaliased(self._run_counts[index : index + 1])
            actions[site] = SiteAction(run=run, tensors=tensors, order=0)
        return actions

    @hookimpl
    def headgate_start(self, facts: WorkerFacts) -> None:
        """Open the session, and the consumers that live in this worker or in a process beside it."""
        if self._staging is not None:
            self._session = open_session(
                config=self._config,
                model=facts.model,
                sites=self._sites,
                staging=self._staging,
                pp_rank=facts.pp_rank,
                pp_size=facts.pp_size,
                versions=versions(),
                actions=facts.actions,
                keys=facts.network_keys,
                readouts=self._readouts,
            )

    @hookimpl
    def headgate_graph_key(self) -> Document:
        """Return sites, ring rows and variant: whatever the traced code depends on."""
        if self._staging is None:
            return {"capture": None}
        rows = self._staging.buffers.shape[1]
        sites = [site.name for site in self._sites]
        return {"capture": {"sites": sites, "rows": rows, "run_counts": self._config.fire_counter}}

    @hookimpl
    def headgate_request_added(self, new: NewRequest) -> None:
        if self._session is not None and new.wire is not None and CAPTURE in new.wire:
            self._session.request_added(new)

    @hookimpl
    def headgate_request_stopped(self, req_id: str) -> None:
        if self._session is not None:
            self._session.request_stopped(req_id)

    @hookimpl
    def headgate_request_finished(self, req_id: str, final: FinalState | None) -> None:
        if self._session is not None:
            self._session.request_finished(req_id, final)

    @hookimpl
    def headgate_step_begins(self, view: BatchView | None, token_ids: torch.Tensor | None) -> None:
        if self._session is not None:
            self._session.step_begins(view, token_ids)

    @hookimpl
    def headgate_step_ends(self) -> None:
        if self._session is not None:
            self._session.step_ends()

    @hookimpl
    def headgate_self_test(self, facts: WorkerFacts, run: Callable[[int], object]) -> None:
        """Prove that every site of this worker writes its rows; every rank runs the same dummy steps."""
        if self._config.self_test:
            self_test.check_capture(self._staging, self._sites, facts, run)

    @hookimpl
    def headgate_stats(self) -> Document:
        if self._session is None:
            return {"capture": None}
        stats = dataclasses.asdict(self._session.stats())
        if self._run_counts is not None:
            counts = self._run_counts.tolist()
            stats["run_counts"] = {site.name: count for site, count in zip(self._sites, counts, strict=True)}
        return {"capture": stats}

    @hookimpl
    def headgate_close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(self._config.close_timeout_s)

    def _num_rows(self, facts: WorkerFacts) -> int:
        rows = self._config.ring_rows or facts.max_tokens
        if rows < facts.max_tokens:
            raise ConfigError(
                f"capture.ring_rows: {rows} rows cannot hold one full step of {facts.max_tokens} tokens; "
                f"leave it out, set it to at least {facts.max_tokens}, or lower --max-num-batched-tokens"
            )
        return rows

    def _check_memory(self, facts: WorkerFacts, num_rows: int) -> str:
        """Say what the ring takes, for people.

        Raises:
            ConfigError: If the device has less.
        """
        row_bytes = facts.model.hidden_size * facts.dtype.itemsize
        num_slots = num_rows + NUM_TRASH_ROWS
        needed = len(self._sites) * num_slots * row_bytes
        text = f"{len(self._sites)} sites x {num_slots} rows x {row_bytes} bytes = {needed / MIB:.1f} MiB"
        if facts.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(facts.device)
            if needed > free:
                raise ConfigError(
                    f"capture: the staging ring needs {text}, but {free / MIB:.1f} MiB of {facts.device.type} memory "
                    "are free; configure fewer capture.sites or lower --max-num-batched-tokens"
                )
        return text


def bind_readouts(
    config: CaptureConsumersConfig, facts: WorkerFacts, sites: Sequence[Site]
) -> tuple[tuple[ReadoutSite, ...], list[BoundReadout]]:
    """Bring the readouts that consumers declare for sites of this worker to its device.

    Raises:
        ConfigError: If one cannot be made, or fails there.
    """
    classes = [load_configured(spec) for spec in config.consumers]
    found = load_readouts(config, classes, facts.model, sites)
    bound = []
    for (bit, site, _), readout in found:
        name = f"consumer {config.consumers[bit].instance!r}: {site.name}"
        place = sites.index(site)
        bound.append(bind(readout, place, hidden_size=facts.model.hidden_size, device=facts.device, name=name))
    if bound:
        names = ", ".join(dict.fromkeys(each.site.name for each, _ in found))
        logger.info("capture: readouts on %s, of %s", facts.device.type, names)
    return tuple(each for each, _ in found), bound


def default_staging_bytes(facts: WorkerFacts, num_sites: int) -> int:
    """Choose the host memory for a full step of all sites: with less, the step thread waits until rows are handed on.

    A power of two, since pinned memory is allocated in those.
    """
    step_bytes = num_sites * facts.max_tokens * facts.model.hidden_size * facts.dtype.itemsize
    most = share_of_memory(16, least=256 * MIB, most=2048 * MIB)
    wanted = max(256 * MIB, 1 << (step_bytes - 1).bit_length())
    return min(wanted, 1 << (most.bit_length() - 1))


def shared_staging(facts: WorkerFacts, num_sites: int, staging_bytes: int, num_readers: int) -> SharedStaging:
    """Allocate the staging memory that the worker and its capture processes share.

    Raises:
        ConfigError: If it cannot hold two rows of every site, or cannot be pinned.
    """
    row_bytes = facts.model.hidden_size * facts.dtype.itemsize
    num_rows = staging_bytes // row_bytes
    most_part_rows(num_rows, num_sites, row_bytes)
    return SharedStaging(num_rows, facts.model.hidden_size, facts.dtype, facts.device, num_readers)


def capture_action(facts: WorkerFacts) -> SiteRun:
    """Choose the way to capture: by device, and by whether the forward is compiled."""
    is_cuda = facts.device.type == "cuda"
    if not facts.is_compiled:
        return capture_ops.capture_with_kernel if is_cuda else capture_ops.capture_plain
    if is_cuda:
        register_exclusion()
        return capture_ops.capture_traced
    register_unfused_copy()
    return capture_ops.capture_unfused


def counted(run: SiteRun) -> SiteRun:
    """Make an action that runs `run` and counts on the device that it did."""

    def run_and_count(module: torch.nn.Module, hook: str, site: SiteValue) -> torch.Tensor:
        capture_ops.count_run(module, hook, site)
        return run(module, hook, site)

    return run_and_count


def unaliased(view: torch.Tensor) -> torch.Tensor:
    """Return the memory of `view` as a tensor that shares no storage with its siblings.

    The sites' buffers are slices of one ring, so that one gather can pack rows of all sites. The compiler would take
    slices that are written to for aliases of each other and copy the whole ring around every graph piece; through
    DLPack each is an input of its own. The ring must outlive it: `StagingRing` and the module hold both.
    """
    return torch.utils.dlpack.from_dlpack(view)  # type: ignore[no-untyped-call,unused-ignore]
