"""Capture as a part of one worker: its sites in the graph, its session after the step.

Each action scatters the value at a site into the staging ring. Unwanted rows go to the ring's trash rows, so the traced
code is the same for every batch.

At start-up, dummy steps through the very graphs that will serve prove that every site responds. That finds a stale
graph from a compile cache, a module whose forward is bypassed, and a hook at the wrong place: where the sites allow it,
the identities of the residual stream are checked on the captured rows.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headgate.capture.capture_process import deal_out
from headgate.capture.engine.compiler.inductor_heuristics import register_exclusion
from headgate.capture.engine.compiler.unfused_copy import register_unfused_copy, unfused_copy
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.contracts.worker_hooks import WorkerFacts, WorkerHooks
from headgate.capture.engine.model.forward_wrappers import tensor_prefix
from headgate.capture.engine.site_action import SiteAction, SiteRun, SiteValue
from headgate.capture.engine.vllm_names import versions
from headgate.capture.links.shared_memory import SharedStaging
from headgate.capture.monitoring.machine_memory import available_memory, share_of_memory
from headgate.capture.planning.step_plan import row_cost
from headgate.capture.schema.batch import BatchView, Document, FinalState, NewRequest
from headgate.capture.schema.config import HELD_STEPS, MIB, CaptureConsumersConfig
from headgate.capture.schema.consumer import HeadReadout, HeadReduction, ReadoutSite
from headgate.capture.schema.errors import ConfigError, SelfTestError
from headgate.capture.schema.registry import load_configured, load_readouts
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.session import CaptureSession, open_session
from headgate.capture.staging.column_shards import ColumnShards
from headgate.capture.staging.readouts import BoundReadout, Function, bind
from headgate.capture.staging.ring import NUM_TRASH_ROWS, StagingRing, most_part_rows

ROWS = "rows"
SLOTS = "slots"
RUN_COUNTS = "run_counts"
_ROWS, _SLOTS, _RUN_COUNTS = tensor_prefix(ROWS), tensor_prefix(SLOTS), tensor_prefix(RUN_COUNTS)


def stored_value(site: SiteValue) -> Tensor:
    """Return the site's value, ``[num_tokens, width]``, rounded as the norm that consumes it rounds it.

    The sum is taken in fp32 and rounded once to the stream's dtype.
    """
    value = site.value
    if site.addend is not None:
        value = (value.float() + site.addend.float()).to(value.dtype)
    return value if value.ndim == 2 else value.reshape(-1, value.shape[-1])


def capture_plain(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Capture where the forward runs as written, and not on a GPU."""
    _scatter(module, hook, stored_value(site))
    return site.carry


def capture_traced(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Capture where torch.compile fuses the sum and the scatter into the kernel of the following norm.

    That kernel is cut into blocks as it is without us.
    """
    rows, value = getattr(module, _ROWS + hook), stored_value(site)
    slots = torch.ops.headgate.excluded(getattr(module, _SLOTS + hook), rows)
    rows.index_put_((slots[: value.shape[0]],), value.to(rows.dtype))
    return site.carry


def capture_unfused(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Capture where torch.compile makes C++ of the forward: that computes what it does without us, bit for bit."""
    _scatter(module, hook, unfused_copy(stored_value(site)))
    return site.carry


def _scatter(module: nn.Module, hook: str, value: Tensor) -> None:
    """Write each row of `value`, ``[num_tokens, width]``, to its slot of the site's ring."""
    rows = getattr(module, _ROWS + hook)
    slots = getattr(module, _SLOTS + hook)
    rows.index_put_((slots[: value.shape[0]],), value.to(rows.dtype))


def capture_with_kernel(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Capture in one kernel where the forward runs as written on a GPU; only wanted rows are read."""
    from headgate.capture.kernels.scatter_rows import scatter_rows

    value = site.value.reshape(-1, site.value.shape[-1])
    addend = None if site.addend is None else site.addend.reshape(-1, value.shape[-1])
    rows = getattr(module, _ROWS + hook)
    slots = getattr(module, _SLOTS + hook)
    scatter_rows(value, addend, slots[: value.shape[0]], rows, num_trash_rows=NUM_TRASH_ROWS)
    return site.carry


def count_run(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Count on the device that the site ran: one for each forward, also for each graph replay."""
    getattr(module, _RUN_COUNTS + hook).add_(1)
    return site.carry


logger = logging.getLogger("headgate")

SENTINEL = 12288.0
"""Exact in bf16, fp16 and fp32, and no value that a whole row of a residual stream holds."""
NUM_TOKENS = 4
MAX_RELATIVE_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def check_capture(
    staging: StagingRing | None,
    sites: Sequence[Site],
    facts: WorkerFacts,
    run: Callable[[int], object],
    columns: ColumnShards | None = None,
) -> None:
    """Drive one dummy step of a few tokens and one of a single token, and check what arrived in the ring.

    A worker without a ring of its own (tensor-parallel rank above 0) runs the steps with the others, and sends its
    columns as in every step.

    Raises:
        SelfTestError: Naming the sites that did not respond, or whose values contradict each other.
    """
    sizes = tuple(size for size in (NUM_TOKENS, 1) if size <= facts.max_tokens)
    for num_tokens in sizes:
        with torch.inference_mode():
            for parts in () if columns is None else columns.rows.values():
                parts[:num_tokens].fill_(SENTINEL)
            if staging is not None:
                _fill_with_sentinel(staging, num_tokens)
        run(num_tokens)
        if columns is not None:
            columns.gather(columns.rows, columns.slots[:num_tokens])
        if staging is None:
            continue
        with torch.inference_mode():
            written = zip(sites, staging.site_rows, strict=True)
            rows = {site: values[:num_tokens].float() for site, values in written}
            parts_of = {} if columns is None else columns.rows
            _check_written(rows, {site: parts.shape[1] for site, parts in parts_of.items()}, num_tokens)
            _check_identities(rows, MAX_RELATIVE_ERROR[facts.dtype])
    if staging is not None:
        staging.reset()
        logger.info("capture: self-test passed, %d sites respond", len(sites))


def _fill_with_sentinel(staging: StagingRing, num_tokens: int) -> None:
    """Fill the ring with the sentinel and send the first batch rows to its first slots."""
    staging.reset()
    for rows in staging.site_rows:
        rows[:num_tokens].fill_(SENTINEL)
    staging.slots[:num_tokens].copy_(torch.arange(num_tokens, device=staging.slots.device))


def _check_written(rows: Mapping[Site, Tensor], part_widths: Mapping[Site, int], num_tokens: int) -> None:
    """Look for rows, or parts of rows that one rank computes, that still hold the sentinel."""
    silent = [
        site.name
        for site, values in rows.items()
        if bool((values.reshape(-1, part_widths.get(site, values.shape[1])) == SENTINEL).all(dim=1).any())
    ]
    if silent:
        raise SelfTestError(
            f"sites {', '.join(silent)} did not respond to a dummy step of {num_tokens} tokens: their code did not "
            "run. A stale compiled graph (remove vLLM's cache folder) or a model whose forward bypasses its modules"
        )


class Identity(NamedTuple):
    """``total = sum(parts)`` on the residual stream."""

    total: Site
    parts: tuple[Site, ...]


def identities(sites: Sequence[Site]) -> Iterator[Identity]:
    """Yield the identities that can be checked with `sites`: neighbouring layers, and each branch's addition."""
    for layer in sorted({site.layer for site in sites if site.layer >= 0}):
        mid = Site(layer, HookPoint.POST_ATTN)
        end = Site(layer, HookPoint.POST_MLP)
        begin = Site(layer, HookPoint.PRE_ATTN)
        attn, mlp = Site(layer, HookPoint.ATTN_OUT), Site(layer, HookPoint.MLP_OUT)
        for identity in (
            Identity(Site(layer + 1, HookPoint.PRE_ATTN), (end,)),
            Identity(mid, (begin, attn)),
            Identity(end, (mid, mlp)),
        ):
            if {identity.total, *identity.parts} <= set(sites):
                yield identity


def _check_identities(rows: Mapping[Site, Tensor], max_relative_error: float) -> None:
    """Check what can be checked. A dummy step's attention may leave its output uninitialised: what is not finite must
    then be so on both sides."""
    for identity in identities(tuple(rows)):
        total = rows[identity.total]
        summed = torch.stack([rows[part] for part in identity.parts]).sum(dim=0)
        is_finite = total.isfinite()
        scale = max(_largest(rows[site], is_finite) for site in (identity.total, *identity.parts))
        error = _largest(total - summed, is_finite)
        if not torch.equal(is_finite, summed.isfinite()) or error > max_relative_error * scale:
            parts = " + ".join(part.name for part in identity.parts)
            raise SelfTestError(
                f"{identity.total.name} is not {parts}: off by {error:.3g} at a scale of {scale:.3g}. The model's "
                "layers are not understood; take these sites out of capture.sites and report the architecture"
            )


def _largest(values: Tensor, where: Tensor) -> float:
    return float(torch.where(where, values, 0.0).abs().max())


class CapturePart(WorkerHooks):
    """Implements the worker hooks for capture.

    Only tensor-parallel rank 0 of a stage captures; the others send it the columns that they have of some sites' rows.
    """

    def __init__(self, config: CaptureConsumersConfig) -> None:
        self._config = config
        self._sites: tuple[Site, ...] = ()
        self._readouts: tuple[ReadoutSite, ...] = ()
        self._staging: StagingRing | None = None
        self._columns: ColumnShards | None = None
        self._session: CaptureSession | None = None
        self._run_counts: torch.Tensor | None = None

    def headgate_allocate(self, facts: WorkerFacts) -> int:
        """Allocate the staging ring of this worker's sites, and pinned host memory."""
        self._sites = tuple(site for site in facts.model.sites if facts.owns(site))
        before = _allocated(facts.device)
        self._readouts, bound = bind_readouts(self._config, facts, self._sites)
        readout_bytes = _allocated(facts.device) - before
        if facts.tp_rank == 0:
            self._allocate_ring(facts, bound)
        split = {site: shape for site in self._sites if (shape := facts.model.shape(site)).shard == "columns"}
        if split:
            places = {site: index for index, site in enumerate(self._sites)}
            self._columns = ColumnShards(
                split,
                num_ranks=facts.tp_size,
                max_tokens=facts.max_tokens,
                device=facts.device,
                gather=facts.gather,
                ring=None if self._staging is None else (self._staging, places),
            )
            logger.info(
                "capture: %.1f MiB of %s memory for this rank's columns of %d sites",
                self._columns.device_bytes / MIB,
                facts.device.type,
                len(split),
            )
        parts = (self._staging, self._columns)
        return readout_bytes + sum(found.device_bytes for found in parts if found is not None)

    def _allocate_ring(self, facts: WorkerFacts, bound: Sequence[BoundReadout]) -> None:
        num_rows = self._num_rows(facts)
        ring = self._check_memory(facts, num_rows)
        staging_bytes = self._config.staging_bytes or self._default_staging_bytes(facts)
        num_readers = deal_out(self._config).num_readers
        self._staging = StagingRing(
            sites=self._sites,
            num_rows=num_rows,
            max_tokens=facts.max_tokens,
            hidden_size=facts.model.hidden_size,
            dtype=facts.dtype,
            device=facts.device,
            staging_bytes=staging_bytes,
            memory=shared_staging(facts, self._sites, staging_bytes, num_readers) if num_readers else None,
            readouts=bound,
            shapes=facts.model.stored_shapes,
        )
        if self._config.fire_counter:
            self._run_counts = torch.zeros(len(self._sites), dtype=torch.int64, device=facts.device)
        logger.info(
            "capture: %.1f MiB of %s memory, of which the staging ring has %s; %.0f MiB of host memory. "
            "capture.ring_rows and capture.staging_bytes set other sizes",
            self._staging.device_bytes / MIB,
            facts.device.type,
            ring,
            self._staging.host_bytes / MIB,
        )

    def headgate_actions(self, facts: WorkerFacts) -> dict[Site, SiteAction]:
        """Declare the capture action of every site of this worker."""
        run = capture_action(facts)
        if self._run_counts is not None:
            run = counted(run)
        actions, parts = {}, {} if self._columns is None else self._columns.rows
        for index, site in enumerate(self._sites):
            if site in parts and self._columns is not None:
                tensors = {ROWS: parts[site], SLOTS: self._columns.slots}
            elif self._staging is not None:
                tensors = {ROWS: unaliased(self._staging.site_rows[index]), SLOTS: self._staging.slots}
            else:
                continue
            if self._run_counts is not None:
                tensors[RUN_COUNTS] = unaliased(self._run_counts[index : index + 1])
            actions[site] = SiteAction(run=run, tensors=tensors, order=0)
        return actions

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

    def headgate_graph_key(self) -> Document:
        """Return sites, ring rows and variant: whatever the traced code depends on."""
        written = {} if self._staging is None else dict(zip(self._sites, self._staging.site_rows, strict=True))
        written |= {} if self._columns is None else self._columns.rows
        if not written and self._staging is None:
            return {"capture": None}
        sites = [[site.name, *rows.shape, str(rows.dtype)] for site, rows in written.items()]
        return {"capture": {"sites": sites, "run_counts": self._config.fire_counter}}

    def headgate_request_added(self, new: NewRequest) -> None:
        if new.wire is None or CAPTURE not in new.wire:
            return
        if self._columns is not None:
            self._columns.request_added(new)
        if self._session is not None:
            self._session.request_added(new)

    def headgate_request_stopped(self, req_id: str) -> None:
        if self._session is not None:
            self._session.request_stopped(req_id)

    def headgate_request_finished(self, req_id: str, final: FinalState | None) -> None:
        if self._columns is not None:
            self._columns.request_finished(req_id)
        if self._session is not None:
            self._session.request_finished(req_id, final)

    def headgate_step_begins(self, view: BatchView | None, token_ids: torch.Tensor | None) -> None:
        if self._columns is not None:
            self._columns.step_begins(view)
        if self._session is not None:
            self._session.step_begins(view, token_ids)

    def headgate_step_ends(self) -> None:
        if self._columns is not None:
            self._columns.step_ends()
        if self._session is not None:
            self._session.step_ends()

    def headgate_describe_step(self, view: BatchView) -> Document:
        return {"capture": None if self._session is None else self._session.describe_step()}

    def headgate_self_test(self, facts: WorkerFacts, run: Callable[[int], object]) -> None:
        """Prove that every site of this worker writes its rows; every rank runs the same dummy steps."""
        if self._config.self_test:
            check_capture(self._staging, self._sites, facts, run, self._columns)

    def headgate_stats(self) -> Document:
        if self._session is None:
            return {"capture": None}
        stats = dataclasses.asdict(self._session.stats())
        if self._run_counts is not None:
            counts = self._run_counts.tolist()
            stats["run_counts"] = {site.name: count for site, count in zip(self._sites, counts, strict=True)}
        return {"capture": stats}

    def headgate_close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(self._config.close_timeout_s)

    def _num_rows(self, facts: WorkerFacts) -> int:
        rows = self._config.ring_rows or default_ring_rows(facts, self._sites)
        if rows < facts.max_tokens:
            raise ConfigError(
                f"capture.ring_rows: {rows} rows cannot hold one full step of {facts.max_tokens} tokens; "
                f"leave it out, set it to at least {facts.max_tokens}, or lower --max-num-batched-tokens"
            )
        return rows

    def _default_staging_bytes(self, facts: WorkerFacts) -> int:
        chosen = default_staging_bytes(facts, self._sites)
        step_bytes = facts.max_tokens * facts.model.position_bytes(self._sites)
        if chosen < step_bytes:
            logger.warning(
                "capture: %.1f GiB of host memory are available, so rows on their way get %.0f MiB. A full step of all "
                "sites has %.0f MiB: the engine will wait until rows of such steps are handed on. Set "
                "capture.staging_bytes, configure fewer capture.sites, or lower --max-num-batched-tokens",
                available_memory() / (1 << 30),
                chosen / MIB,
                step_bytes / MIB,
            )
        return chosen

    def _check_memory(self, facts: WorkerFacts, num_rows: int) -> str:
        """Say what the ring takes, for people.

        Raises:
            ConfigError: If the device has less.
        """
        shapes, stream = {site: facts.model.shape(site) for site in self._sites}, facts.model.stream
        counts = Counter(
            ("" if shape.row_bytes == stream.row_bytes else f" of {site.hook}", shape.row_bytes)
            for site, shape in shapes.items()
        )
        num_slots = num_rows + NUM_TRASH_ROWS
        needed = num_slots * sum(count * row_bytes for (_, row_bytes), count in counts.items())
        blocks = [
            f"{count} sites{of_hook} x {num_slots} rows x {row_bytes} bytes"
            for (of_hook, row_bytes), count in counts.items()
        ]
        text = f"{' + '.join(blocks) or 'no site'} = {needed / MIB:.1f} MiB"
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
    """Bring the readouts that consumers declare for sites of this worker to its device, if it captures.

    Every tensor-parallel rank calls this at the same point: if a readout uses the model's head, they share it.

    Raises:
        ConfigError: If one cannot be made, or fails there.
    """
    found = []
    if facts.tp_rank == 0:
        classes = [load_configured(spec) for spec in config.consumers]
        found = load_readouts(config, classes, facts.model, sites)
    bound, head = [], cache(facts.head)
    if facts.tp_size > 1:
        uses_head = any(isinstance(readout, HeadReadout) for _, readout in found)
        flag = torch.tensor([uses_head], dtype=torch.float32, device=facts.device)  # what every gather takes
        if bool(facts.gather(flag).any()) and facts.tp_rank > 0:
            head()

    @cache
    def reduce(reduction: HeadReduction) -> Function:
        return reduction.with_head(facts.device, head())

    for (bit, site, _), readout in found:
        name = f"consumer {config.consumers[bit].instance!r}: {site.name}"
        place, width = sites.index(site), facts.model.shape(site).width
        bound.append(bind(readout, place, width=width, device=facts.device, name=name, bit=bit, reduce=reduce))
    if bound:
        names = ", ".join(dict.fromkeys(each.site.name for each, _ in found))
        logger.info("capture: readouts on %s, of %s", facts.device.type, names)
    return tuple(each for each, _ in found), bound


def _allocated(device: torch.device) -> int:
    """Return the bytes of device memory that torch has allocated; 0 for a CPU."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


BURST_STEPS = 4
"""Full steps of prompts that staging memory takes before the step thread waits for their rows to be handed on."""


def default_ring_rows(facts: WorkerFacts, sites: Sequence[Site]) -> int:
    """Choose the rows of the ring: two full steps, so that a step need not wait for the copies of the one before.

    They take a 24th of a GPU's memory at most. It is one full step where this is more than an eighth of what is free
    there, and on a CPU, where rows are copied at once. Graphs are compiled for the number of rows, so it must not
    follow every change of the free memory.
    """
    if facts.device.type != "cuda" or not sites:
        return facts.max_tokens
    free, total = torch.cuda.mem_get_info(facts.device)
    row_bytes = facts.model.position_bytes(sites)
    chosen = max(facts.max_tokens, min(2 * facts.max_tokens, total // 24 // row_bytes // 256 * 256))
    return chosen if chosen * row_bytes <= free // 8 else facts.max_tokens


def default_staging_bytes(facts: WorkerFacts, sites: Sequence[Site]) -> int:
    """Choose the host memory for rows on their way: `BURST_STEPS` full steps of all sites, or the steps of decoding
    that are held together, within 256 MiB and 16 GiB and a tenth of the memory that is available on this machine.

    A power of two, since pinned memory is allocated in those.
    """
    num_rows = max(BURST_STEPS * facts.max_tokens, HELD_STEPS * facts.max_num_seqs)
    wanted = max(256 * MIB, num_rows * facts.model.position_bytes(sites))
    most = share_of_memory(10 * facts.pp_size, least=256 * MIB, most=16 << 30)
    return int(min(1 << (wanted - 1).bit_length(), 1 << (most.bit_length() - 1)))


def shared_staging(facts: WorkerFacts, sites: Sequence[Site], staging_bytes: int, num_readers: int) -> SharedStaging:
    """Allocate the staging memory that the worker and its capture processes share.

    Raises:
        ConfigError: If it cannot hold two rows of every site, or cannot be pinned.
    """
    row_bytes = facts.model.hidden_size * facts.dtype.itemsize
    num_rows = staging_bytes // row_bytes
    shapes = facts.model.stored_shapes
    most_part_rows(num_rows, sum(row_cost(shapes.get(site), row_bytes) for site in sites), row_bytes)
    return SharedStaging(num_rows, facts.model.hidden_size, facts.dtype, facts.device, num_readers)


def capture_action(facts: WorkerFacts) -> SiteRun:
    """Choose the way to capture: by device, and by whether the forward is compiled."""
    is_cuda = facts.device.type == "cuda"
    if not facts.is_compiled:
        return capture_with_kernel if is_cuda else capture_plain
    if is_cuda:
        register_exclusion()
        return capture_traced
    register_unfused_copy()
    return capture_unfused


def counted(run: SiteRun) -> SiteRun:
    """Make an action that runs `run` and counts on the device that it did."""

    def run_and_count(module: torch.nn.Module, hook: str, site: SiteValue) -> torch.Tensor:
        count_run(module, hook, site)
        return run(module, hook, site)

    return run_and_count


def unaliased(view: torch.Tensor) -> torch.Tensor:
    """Return the memory of `view` as a tensor that shares no storage with its siblings.

    The sites' buffers are slices of one ring, so that one gather can pack rows of all sites. The compiler would take
    slices that are written to for aliases of each other and copy the whole ring around every graph piece; through
    DLPack each is an input of its own. The ring must outlive it: `StagingRing` and the module hold both.
    """
    return torch.utils.dlpack.from_dlpack(view)  # type: ignore[no-untyped-call,unused-ignore]
