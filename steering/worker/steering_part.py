"""Steering as a part of one worker: its sites in the graph, its tables before each step, and the proof at start-up that
every site steers, by dummy steps through the same code that will serve.

Each batch row of a dummy step is a request of its own and is steered at one site only. So a row with unchanged output
names the site whose code did not run: because of a stale graph from a compile cache, or a module that is bypassed.
Op sites are driven twice: with a vector, and with a program that adds one.

Attention has no keys and values to look at in a dummy step, so its output says nothing about its input, and may be
memory that was never written, other in each step. What is not seen of `attn_in` is said, and is no error. In families
with post-norms a vector in front of one changes the stream by no more than the norm's gain, however long it is, and so
does attention's output: what such noise hides is said, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts, WorkerHooks
from headgate.capture.engine.site_action import SiteAction
from headgate.capture.monitoring.step_log import compact
from headgate.capture.schema.batch import BatchView, BoolArray, NewRequest
from headgate.capture.schema.errors import ConfigError, SelfTestError
from headgate.capture.schema.sites import BEFORE_KERNEL, HookPoint, Site
from headgate.steering.config import WHERE, SteeringConfig, cross_stages
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.gates.step_table import CoefficientChanges, ReportedCounts
from headgate.steering.programs.codes import CODE, WRITE, WRITE_SCALE, Code
from headgate.steering.programs.program import Program
from headgate.steering.spec import PhaseContent, SteeringSpec, from_wire, steered
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import Vectors, sum_of
from headgate.steering.worker import program_action, site_action
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.gates.readings import SignalReadings
from headgate.steering.worker.gates.requests import OwnGates
from headgate.steering.worker.gates.step_gates import StepGates, no_gates
from headgate.steering.worker.placed_programs import ActingRule
from headgate.steering.worker.reconstruction import EncodedSae, ReconstructionFigures, load_sae, weight_bytes
from headgate.steering.worker.rows.row_table import RowTable, rows_needed
from headgate.steering.worker.rows.step_rows import RowResolver, StepSequence
from headgate.steering.worker.rows.vector_pool import SlotPool
from headgate.steering.worker.transfers import inference_mode

logger = logging.getLogger("headgate")


def is_in_one_stage(sites: Sequence[Site], facts: WorkerFacts) -> bool:
    """Whether a worker owns all of some sites, or none."""
    return len({facts.owns(site) for site in sites}) == 1


class EntryLimits(NamedTuple):
    """How much memory programs have on the device.

    Attributes:
        entries: Entries of a program at a site, at most.
        changes: Features of a program that are read at one site and written at others, at most.
        columns: Numbers that gates keep for each row; 0 where there can be no gates. A pipeline stage without op sites
            has them, too: it passes on what others compute.
        row_size: Width of the vectors of the widest site; 0: of the stream.
    """

    entries: int = 0
    changes: int = 0
    columns: int = 0
    row_size: int = 0


NO_ENTRIES = EntryLimits()


class WorkerSteering:
    """Requests, modules and global vectors of one worker, and the tables that follow them. Step thread only.

    Args:
        num_slots: Size of the pool, slot 0 included.
        sites: This worker's, in the order of the forward pass.
        facts: This worker's.
        op_sites: The sites of `sites` where operations act, in the same order.
        limits: Limits of programs.
        saes: Encoded SAEs, by the index of their op site.

    Attributes:
        table: Requests and rows, on the host.
        tables: The memory that the forward reads.
        gates: Requests with gates; None where there can be none.
    """

    def __init__(
        self,
        num_slots: int,
        sites: Sequence[Site],
        facts: WorkerFacts,
        op_sites: Sequence[Site] = (),
        limits: EntryLimits = NO_ENTRIES,
        saes: Mapping[int, EncodedSae] | None = None,
    ) -> None:
        self._op_sites, here = tuple(op_sites), None if facts.pp_size == 1 else frozenset(op_sites)
        num_rows, dtype = rows_needed(facts.max_num_seqs), cast("StoredType", str(facts.dtype).removeprefix("torch."))
        pool = SlotPool(num_slots, limits.row_size or facts.model.hidden_size, dtype)
        self.table = RowTable(sites=sites, num_rows=num_rows, pool=pool, op_sites=op_sites, max_entries=limits.entries)
        self.gates: StepGates | None = None
        if limits.columns:
            sizes = facts.max_tokens, facts.max_num_seqs, limits.columns, facts.device
            self.gates = StepGates(*sizes, is_output_rank=facts.is_output_rank, sites=here)
        self.tables = DeviceTables(
            num_sites=len(sites),
            num_slots=num_slots,
            num_rows=num_rows,
            max_tokens=facts.max_tokens,
            hidden_size=pool.row_size,
            dtype=facts.dtype,
            device=facts.device,
            num_op_sites=len(op_sites),
            max_entries=limits.entries,
            num_changes=limits.changes,
            saes=saes or {},
            gates=None if self.gates is None else self.gates.tensors,
        )
        self._figures = ReconstructionFigures(self.tables.saes.values())
        self._sequence, self._resolver = StepSequence(), RowResolver(self.table, facts.max_tokens)
        self._step = self._resolver.resolve(None)
        self._acting_sites: BoolArray | None = None  # of the step, once something has asked for them
        self._contents: dict[bytes, PhaseVectors] = {}
        """Vectors of modules by their content keys, until `forget`."""
        self._programs: dict[bytes, Program] = {}
        """Programs of modules, likewise."""
        self._modules: set[str] = set()

    def add(self, req_id: str, num_prompt: int, wire: Mapping[str, Any] | None, *, is_captured: bool = False) -> None:
        """Add a request with its `SteeringWire`, in which the core resolved the modules; None if it is not steered."""
        if wire is None:
            self.table.add(req_id, num_prompt)
            if self.gates is not None:
                self.gates.add(req_id, OwnGates(num_prompt, is_captured=is_captured))
            return
        own = from_wire(wire)
        prefill, decode = (
            (wire.get(f"{phase}_parts", ()), wire.get(f"{phase}_programs", ()), content)
            for phase, content in zip(("prefill", "decode"), own.phases, strict=True)
        )
        acting = _acting(self._contents, self._programs, *prefill)
        acting_later = acting if decode == prefill else _acting(self._contents, self._programs, *decode)
        self.table.add(req_id, num_prompt, acting, acting_later, own.rules)
        programs = tuple(program for program in (own.prefill_program, own.decode_program) if program is not None)
        if self.gates is not None:
            gates = OwnGates(
                num_prompt=num_prompt,
                programs=programs,
                selection=own.rules,
                is_traced=bool(wire.get("trace")),
                is_captured=is_captured,
                is_counted=bool(wire.get("counted")),
            )
            self.gates.add(req_id, gates)

    def remove(self, req_id: str) -> None:
        """Remove a request."""
        self.table.remove(req_id)
        if self.gates is not None:
            self.gates.remove(req_id)

    def step_begins(self, view: BatchView | None) -> None:
        """Aim the tables at a step; None for dummy and idle steps."""
        is_idle = self.table.is_idle and (self.gates is None or not self.gates.num_requests)
        goes_on = self._sequence.goes_on(None if is_idle else view)
        step = self._step = self._resolver.resolve(view, goes_on=goes_on)
        self._acting_sites = None
        gates = None if self.gates is None else self.gates.step_begins(view, goes_on=goes_on)
        self.tables.update(self.table.take_writes(), step, gates, view)
        if self.gates is not None:
            self.gates.launches()

    def acts(self, active: Tensor) -> bool:
        """Return whether the program of any row of the step has entries at an op site.

        Args:
            active: The site's part of `ProgramTables.active`. True where it is not known: it is in other memory.
        """
        if self.tables.programs is None:
            return True
        every = self.tables.programs.active
        at, rest = divmod(active.data_ptr() - every.data_ptr(), every.stride(0) * every.element_size())
        if rest or not 0 <= at < len(self._op_sites):
            return True
        if self._acting_sites is None:
            self._acting_sites = self.table.acting_sites(self._step.rows)
        return bool(self._acting_sites[at])

    def scans(self) -> bool:
        """Return whether a request with gates has several rows in the step."""
        return self.gates is not None and self.gates.has_several_rows

    def step_ends(self) -> None:
        """Follow up a step whose forward was launched."""
        if self.gates is not None:
            with inference_mode():
                if (again := self.gates.take_back()) is not None:
                    sites, gates = again
                    at = [index for index, site in enumerate(self._op_sites) if site in sites]
                    self.tables.evaluate_again(at, gates)
                self.gates.step_ends()

    def to_next_stage(self) -> Tensor | None:
        """Return what the next pipeline stage needs of the step that ended; None if nothing."""
        with inference_mode():
            return None if self.gates is None else self.gates.to_next_stage()

    def from_last_stage(self, sent: Tensor) -> None:
        """Take what the stage before returned of `to_next_stage`."""
        if self.gates is None:
            raise AssertionError("steering: signals came to a worker without gates")
        with inference_mode():
            self.gates.from_last_stage(sent)

    def readings(self) -> SignalReadings | None:
        """Return what the engine core gets of the step that ended; None if nothing."""
        return None if self.gates is None else self.gates.readings()

    def set_global(self, spec: Mapping[str, Any]) -> None:
        """RPC: set the phases of a `SteeringWire` as the global vectors; an empty one clears them."""
        self.table.set_global(*_content(from_wire(spec)))

    def set_rules(self, rules: Sequence[Mapping[str, Any]]) -> None:
        """RPC: make `rules` the ones that act, on requests that run too; each as `ActingRule.from_wire` reads it."""
        read = tuple(ActingRule.from_wire(rule) for rule in rules)
        self.table.set_rules(read)
        if self.gates is not None:
            self.gates.set_rules(read)

    def drive(self, changes: CoefficientChanges) -> None:
        """Follow what controllers decided for requests that were added."""
        if self.gates is None:
            raise AssertionError("steering: a worker without op sites is driven")
        for req_id, columns in self.gates.drive(changes).items():
            self.table.drive(req_id, columns)

    def keep_module(self, name: str, spec: Mapping[str, Any]) -> None:
        """RPC: keep the vectors of a registered module, in place of an earlier one of its name."""
        if name in self._modules:
            self.release_module(name)
        read = from_wire(spec)
        self._contents.update({vectors.key: vectors for vectors, _ in read.phases if vectors is not None})
        self._programs.update({program.key: program for _, program in read.phases if program is not None})
        self.table.keep_module(name, *_content(read))
        self._modules.add(name)

    def release_module(self, name: str) -> None:
        """RPC: release an unregistered module; requests that use it keep its vectors.

        A module that is not kept is passed over: where `keep_module` failed in one worker, it is undone in all.
        """
        if name in self._modules:
            self._modules.remove(name)
            self.table.release_module(name)

    def forget(self, keys: Sequence[bytes]) -> None:
        """RPC: forget the contents of modules that no request refers to any more, by their content keys."""
        for key in keys:
            self._contents.pop(key, None)
            self._programs.pop(key, None)

    def op_sites(self) -> list[str]:
        """RPC: return the names of the op sites on this worker's pipeline stage."""
        return [site.name for site in self._op_sites]

    def checksum(self) -> int:
        """RPC: return the state as a number, equal on all tensor-parallel ranks."""
        return self.table.checksum()

    def stats(self) -> dict[str, Any]:
        """Return plain counters. Waits for the device where an SAE is encoded."""
        return {
            "slots_live": self.table.num_live_slots,
            "slots_used": self.table.num_slots_used,
            "modules": len(self._modules),
            "reconstructions": self._figures.read(),
        }


def _ask_counts(worker: WorkerSteering) -> list[ReportedCounts]:
    """RPC: return how many rows gates wrote; see `StepGates.ask_counts`."""
    return [] if worker.gates is None else worker.gates.ask_counts()


Part = tuple[bytes, float]
"""Content key of a module's vectors or program, and its scale."""


def _acting(
    contents: Mapping[bytes, PhaseVectors],
    known: Mapping[bytes, Program],
    parts: Sequence[Part],
    programs: Sequence[Part],
    own: PhaseContent,
) -> Vectors | None:
    """Return what acts on a request in one phase: the modules that it names, and its own.

    Args:
        contents: Vectors of modules by their content keys.
        known: Programs of modules, likewise.
        parts: Vectors that it takes from them.
        programs: Programs that it takes from them.
        own: Its own.
    """
    vectors, program = own
    try:
        named: list[tuple[PhaseVectors | None, float]] = [(contents[key], scale) for key, scale in parts]
        acting = [(known[key], scale) for key, scale in programs]
    except KeyError as error:
        raise AssertionError(f"steering: no module has the content {error.args[0]!r}") from None
    return steered(sum_of([*named, (vectors, 1.0)]), acting + ([] if program is None else [(program, 1.0)]))


def _content(spec: SteeringSpec) -> tuple[Vectors | None, Vectors | None]:
    """Return what a spec without modules has for the two phases."""
    prefill, decode = (
        steered(vectors, [] if program is None else [(program, 1.0)]) for vectors, program in spec.phases
    )
    return prefill, decode


METHODS: dict[str, Callable[..., Any]] = {
    "set_global": WorkerSteering.set_global,
    "set_rules": WorkerSteering.set_rules,
    "keep_module": WorkerSteering.keep_module,
    "release_module": WorkerSteering.release_module,
    "forget": WorkerSteering.forget,
    "ask_counts": _ask_counts,
    "checksum": WorkerSteering.checksum,
    "op_sites": WorkerSteering.op_sites,
}


STRENGTH = 12288.0
"""Size of the vector's values: far beyond the values of a stream, and exact in bf16, fp16 and fp32."""
SCRATCH_SLOT = 1
MIN_RESPONSE = 1e-3
"""Smallest change of a steered row's output that counts, relative to the largest value in it."""

UNSEEN = {*BEFORE_KERNEL, HookPoint.ROUTER_LOGITS, HookPoint.ATTN_OUT_PRE}
"""Hook points that dummy steps need not show: attention looks at nothing in them, and every row may be the same; or its
output, which may be of any size, goes through a norm with the vector."""
BEFORE_POST_NORM = {
    HookPoint.HOOK_Z: HookPoint.ATTN_OUT_PRE,
    HookPoint.MLP_ACT: HookPoint.MLP_OUT_PRE,
    HookPoint.MLP_OUT_PRE: HookPoint.MLP_OUT_PRE,
}
"""Hook points of branches that end in a post-norm in some families, and the one in front of that norm."""

Run = Callable[[int], Sequence[Tensor]]


def check_steering(
    tables: DeviceTables,
    sites: Sequence[Site],
    max_rows: int,
    run: Run,
    op_sites: Sequence[Site] = (),
    post_norms: Collection[Site] = (),
) -> None:
    """Steer every site once, in as few dummy steps as `max_rows` requests allow, and leave the tables as new.

    Args:
        tables: The worker's.
        sites: Sites of the worker, in the order of the tables.
        max_rows: Requests of one dummy step, at most.
        run: Runs a dummy step of so many requests, one token each, and returns the tensors that the stage hands on.
        op_sites: The sites of `sites` where programs act, in the order of the tables.
        post_norms: See `WorkerFacts.post_norms`. After such a norm a vector of any length changes the stream by the
            norm's gain, so dummy steps show what is in front of it only where equal steps give equal output.

    Raises:
        SelfTestError: Naming the sites that did not respond.
    """
    bounded = {each for each in sites if each._replace(hook=BEFORE_POST_NORM.get(each.hook, each.hook)) in post_norms}
    silent, hidden, is_seen = _silent_sites(sites, max_rows, run, partial(_add_vectors, tables), bounded)
    silent_ops, hidden_ops, is_op_seen = _silent_sites(op_sites, max_rows, run, partial(_add_programs, tables), bounded)
    unseen = {site for site in (*silent, *silent_ops) if site.hook in UNSEEN} | hidden | hidden_ops
    names = [site.name for site in silent if site not in unseen]
    names += [f"{site.name} (operations)" for site in silent_ops if site not in unseen]
    if names:
        raise SelfTestError(
            f"steering at {', '.join(names)} did not change a dummy step: the code there did not run. A stale compiled "
            "graph (remove vLLM's cache folder) or a model whose forward bypasses its modules"
        )
    if not (is_seen and is_op_seen):
        logger.warning(
            "steering: dummy steps of this stage show no output, or none that is finite: its sites are not checked"
        )
        return
    if unseen:
        logger.info(
            "steering: %d sites in front of attention, of experts or of post-norms are not checked: dummy steps do not "
            "show them. headgate verify --steering-sites checks them with real requests",
            len(unseen),
        )
    num_sites, num_op_sites = len({*sites} - unseen), len({*op_sites} - unseen)
    logger.info("steering: self-test passed, %d sites respond, %d of them to operations", num_sites, num_op_sites)


def _silent_sites(
    sites: Sequence[Site], max_rows: int, run: Run, steer: Callable[[range], None], bounded: Collection[Site]
) -> tuple[list[Site], set[Site], bool]:
    """Return the sites that do not respond to `steer`, those of `bounded` that noise may hide, and whether all steps
    showed their output."""
    silent: list[Site] = []
    hidden: set[Site] = set()
    is_seen = True
    for start in range(0, len(sites), max_rows):
        chunk = range(start, min(start + max_rows, len(sites)))
        with torch.inference_mode():
            before, again = _output(run, len(chunk)), _output(run, len(chunk))
            steer(chunk)
            try:
                after, after_again = _output(run, len(chunk)), _output(run, len(chunk))
            finally:
                steer(range(0))
            if before is None or again is None or after is None or after_again is None or not before.isfinite().all():
                is_seen = False
                continue
            # Mamba's dummy steps hand on memory that was never written, until the vector outweighs it.
            rows = _silent_rows(before, again, after) & _silent_rows(after, after_again, before)
            noisy = _noisy_rows(before, again) | _noisy_rows(after, after_again)
            hidden |= {site for row in rows & noisy if (site := sites[chunk[row]]) in bounded}
            silent += [site for row in sorted(rows) if (site := sites[chunk[row]]) not in hidden]
    return silent, hidden, is_seen


def _add_vectors(tables: DeviceTables, chunk: range) -> None:
    """Steer the sites of `chunk` with a vector, each in a batch row of its own; an empty one takes all back."""
    _write_scratch(tables, is_on=bool(chunk))
    if not chunk:
        tables.slots.zero_()
    for row, site in enumerate(chunk):
        tables.slots[site, row] = SCRATCH_SLOT


def _add_programs(tables: DeviceTables, chunk: range) -> None:
    """Do the same at op sites, with a program that adds the vector."""
    programs = tables.programs
    if programs is None:
        raise AssertionError("op sites without tables of programs")
    _write_scratch(tables, is_on=bool(chunk))
    if not chunk:
        for table in (tables.rows, programs.active, programs.counts, programs.codes, programs.params):
            table.zero_()
    for row, site in enumerate(chunk):
        table_row = row + 1
        tables.rows[row] = table_row
        programs.active[site, row] = programs.counts[site, table_row] = 1
        programs.codes[site, table_row, 0, CODE] = Code.ADD
        programs.codes[site, table_row, 0, WRITE] = SCRATCH_SLOT
        programs.params[site, table_row, 0, WRITE_SCALE] = 1.0


def _write_scratch(tables: DeviceTables, *, is_on: bool) -> None:
    hidden_size = tables.pool.shape[1]
    pattern = torch.where(torch.arange(hidden_size, device=tables.pool.device) % 3 == 0, -STRENGTH, STRENGTH)
    tables.pool[SCRATCH_SLOT] = pattern.to(tables.pool.dtype) * int(is_on)


def _output(run: Run, num_rows: int) -> Tensor | None:
    """Return the output of the stage, ``[num_rows, n]`` in fp32 on the host; None if it shows none."""
    shown = [tensor.detach().reshape(-1, tensor.shape[-1])[:num_rows].float().cpu() for tensor in run(num_rows)]
    return torch.cat(shown, dim=1) if shown else None


def _silent_rows(before: Tensor, again: Tensor, after: Tensor) -> set[int]:
    """Return the rows that changed by no more than they do between two equal steps, `before` and `again`."""
    noise = torch.nan_to_num(again - before, posinf=torch.inf).abs().amax(dim=1)
    change = torch.nan_to_num(after - before).abs().amax(dim=1)
    scale = before.abs().amax(dim=1)
    has_changed = (change > MIN_RESPONSE * scale) & (change > 4 * noise)
    return set(torch.nonzero(~has_changed & after.isfinite().all(dim=1)).flatten().tolist())


def _noisy_rows(before: Tensor, again: Tensor) -> set[int]:
    """Return the rows that change between two equal steps."""
    noise = torch.nan_to_num(again - before, posinf=torch.inf).abs().amax(dim=1)
    return set(torch.nonzero(noise > MIN_RESPONSE * before.abs().amax(dim=1)).flatten().tolist())


PART = "steering"


class SteeringPart(WorkerHooks):
    """Implements the engine hooks for steering. Every rank steers: each carries the whole stream."""

    def __init__(self, config: SteeringConfig) -> None:
        self._config = config
        self._state: WorkerSteering | None = None
        self._sites: tuple[Site, ...] = ()
        self._op_sites: tuple[Site, ...] = ()
        self._gathered: tuple[Site, ...] = ()
        self._num_slots = 0
        self._num_changes = 0
        self._run_counts: Tensor | None = None

    def headgate_allocate(self, facts: WorkerFacts) -> int:
        """Allocate the tables of this worker's sites."""
        model, dtype = facts.model, str(facts.dtype).removeprefix("torch.")
        steerable = self._config.steerable(
            num_layers=model.num_layers, hidden_size=model.hidden_size, dtype=dtype, shapes=model.shapes
        )
        self._sites = tuple(site for site in steerable.sites if facts.owns(site))
        self._op_sites = tuple(site for site in steerable.op_sites if facts.owns(site))
        self._gathered = tuple(site for site in self._op_sites if site in steerable.gathered)
        self._num_slots = self._config.num_slots(model.num_layers) + self._config.num_reserved_slots(model.num_layers)
        encoded = self._config.encoded_saes(model.hidden_size)
        coders = {index: encoded[site] for index, site in enumerate(self._op_sites) if site in encoded}
        _check_memory(self._num_slots, steerable.row_size, facts, coders.values())
        _check_stages(self._config, facts)
        self._num_changes = self._config.num_changes
        saes = {index: load_sae(coder, facts) for index, coder in coders.items()}
        num_columns = self._config.num_columns if steerable.op_sites else 0
        limits = EntryLimits(self._config.max_entries, self._num_changes, num_columns, steerable.row_size)
        self._state = WorkerSteering(self._num_slots, self._sites, facts, self._op_sites, limits, saes)
        program_action.serve(facts, self._state)
        logger.info(
            "steering: %d sites, %d of them for operations, %d encoded SAEs, %d slots, %.1f MiB of %s memory",
            len(self._sites),
            len(self._op_sites),
            len(saes),
            self._num_slots,
            self._state.tables.device_bytes / 2**20,
            facts.device.type,
        )
        return self._state.tables.device_bytes

    def headgate_actions(self, facts: WorkerFacts) -> dict[Site, SiteAction]:
        """Declare the steering action of every site of this worker."""
        if self._config.fire_counter:
            self._run_counts = torch.zeros(len(self._sites), dtype=torch.int64, device=facts.device)
        tables = self._allocated().tables
        return _make_actions(self._sites, self._op_sites, facts, tables, self._run_counts, self._gathered)

    def headgate_graph_key(self) -> dict[str, Any]:
        """Return the sites and shapes that the traced code depends on."""
        sites = [site.name for site in self._sites]
        key: dict[str, Any] = {"sites": sites, "slots": self._num_slots, "run_counts": self._config.fire_counter}
        if self._op_sites:
            entries = self._config.max_entries
            key |= {"op_sites": [site.name for site in self._op_sites], "entries": entries}
            key["changes"], key["gate_columns"] = self._num_changes, self._config.num_columns
            key["gathered"] = [site.name for site in self._gathered]
        if saes := self._allocated().tables.saes:
            key["saes"] = [
                [index, int(sae.norm), sae.k, str(sae.encoder.dtype), *sae.encoder.shape] for index, sae in saes.items()
            ]
        return {PART: key}

    def headgate_request_added(self, new: NewRequest) -> None:
        """Add a request with what it steers with, if anything."""
        found = new.wire or {}
        wire, is_captured = found.get("parts", {}).get(PART), "capture" in found
        self._allocated().add(new.req_id, new.num_prompt_tokens, wire, is_captured=is_captured)

    def headgate_plain_request_added(self, req_id: str, num_prompt_tokens: int) -> None:
        """Add a request without vectors of its own; global vectors act on it."""
        self._allocated().add(req_id, num_prompt_tokens, None)

    def headgate_request_stopped(self, req_id: str) -> None:
        """Remove a request."""
        self._allocated().remove(req_id)

    def headgate_ordered(self, part: str, orders: Mapping[str, Any]) -> None:
        """Let requests be steered as the engine core's controllers decided."""
        if part == PART:
            self._allocated().drive(orders["drives"])

    def headgate_needs_plain_steps(self) -> bool:
        """Return whether anybody is steered: then steps without requests that steer count too."""
        return not self._allocated().table.is_idle

    def headgate_step_begins(self, view: BatchView | None, token_ids: Tensor | None = None) -> None:
        """Aim the tables at the step."""
        self._allocated().step_begins(view)

    def headgate_step_ends(self) -> None:
        """Copy what gates did in the step to the host."""
        self._allocated().step_ends()

    def headgate_to_next_stage(self) -> Tensor | None:
        """Return the strengths of gates, and the scores that they read."""
        return self._allocated().to_next_stage()

    def headgate_from_last_stage(self, sent: Tensor) -> None:
        """Take those of the stages before."""
        self._allocated().from_last_stage(sent)

    def headgate_step_readings(self) -> SignalReadings | None:
        """Return what the engine core gets of the step."""
        return self._allocated().readings()

    def headgate_describe_step(self, view: BatchView) -> dict[str, Any]:
        """Return the table row and the slots of each batch row, and its entries at op sites, as the device has them.

        Sites where no row has a slot, or no row an entry, are left out.
        """
        tables, num_rows = self._allocated().tables, view.num_tokens
        slots = dict(zip(self._sites, tables.slots[:, :num_rows].tolist(), strict=True))
        active = [] if tables.programs is None else tables.programs.active[:, :num_rows].tolist()
        entries = dict(zip(self._op_sites, active, strict=True))
        found: dict[str, Any] = {"table_rows": compact(tables.rows[:num_rows].tolist())}
        for name, by_site in (("slots", slots), ("entries", entries)):
            found[name] = {site.name: compact(values) for site, values in by_site.items() if any(values)}
        return {PART: found}

    def headgate_self_test(self, facts: WorkerFacts, run: Callable[[int], Sequence[Tensor]]) -> None:
        """Prove that every site of this worker steers; every rank runs the same dummy steps."""
        if self._config.self_test:
            rows = min(facts.max_num_seqs, facts.max_tokens)
            check_steering(self._allocated().tables, self._sites, rows, run, self._op_sites, facts.post_norms)

    def headgate_call(self, part: str, method: str, args: Mapping[str, Any]) -> Any:
        """Run a method of `WorkerSteering` that the engine core called by name."""
        if part != PART:
            return None
        call = METHODS.get(method)
        if call is None:
            raise AssertionError(f"steering: workers have no method {method!r}; known: {', '.join(sorted(METHODS))}")
        return call(self._allocated(), **args)

    def headgate_stats(self) -> dict[str, Any]:
        """Return the counters of this worker, with the runs of each site if they are counted."""
        stats: dict[str, Any] = self._allocated().stats()
        if self._run_counts is not None:
            counts = self._run_counts.tolist()
            stats["run_counts"] = {site.name: count for site, count in zip(self._sites, counts, strict=True)}
        return {PART: stats}

    def _allocated(self) -> WorkerSteering:
        if self._state is None:
            raise AssertionError("steering: the worker was used before its tables were allocated")
        return self._state


def _check_memory(num_slots: int, row_size: int, facts: WorkerFacts, coders: Iterable[SparseCoder]) -> None:
    """Refuse vectors and weights that do not fit the device."""
    row_bytes = row_size * facts.dtype.itemsize
    if facts.device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(facts.device)
    if num_slots * row_bytes > free:
        raise ConfigError(
            f"steering.max_steering_slots: {num_slots} vectors of {row_bytes} bytes are "
            f"{num_slots * row_bytes / 2**20:.1f} MiB, but {free / 2**20:.1f} MiB are free; lower it"
        )
    free -= num_slots * row_bytes
    for coder in coders:
        taken = weight_bytes(coder, facts)
        if taken > free:
            raise ConfigError(
                f"steering.sae_encode (--sae-encode): the weights of SAE {coder.name!r} are "
                f"{taken / 2**20:.1f} MiB ({coder.num_features} features of width {coder.width}), but "
                f"{free / 2**20:.1f} MiB are free; encode a smaller SAE, or fewer"
            )
        free -= taken


def _make_actions(
    sites: Sequence[Site],
    op_sites: Sequence[Site],
    facts: WorkerFacts,
    tables: DeviceTables,
    run_counts: Tensor | None,
    gathered: Collection[Site],
) -> dict[Site, SiteAction]:
    """Return the action of each site; `run_counts`, int64 ``[S]``, counts how often each ran.

    At the op sites `gathered`, programs run on whole rows.
    """
    plain = site_action.addition(facts)
    operations = program_action.operation(facts) if op_sites else plain
    op_tensors = _op_tensors(op_sites, facts, tables)
    norms = {op_sites[index]: (sae.norm, sae.k) for index, sae in tables.saes.items()}
    actions = {}
    for index, site in enumerate(sites):
        shape, pool = facts.model.shape(site), tables.pool
        pool = pool if shape.width == pool.shape[1] else pool[:, : shape.width]
        tensors = {
            site_action.POOL: program_action.own_columns(pool, shape.part_width(facts.tp_size), facts),
            site_action.SLOTS: tables.slots[index],
            **op_tensors.get(site, {}),
        }
        if site in gathered:
            tensors[program_action.WHOLE_POOL] = pool
        ways = operations if site in op_tensors else plain
        reapply = ways.reapply or ways.run
        if site in norms:
            ways = program_action.reconstructing(ways, norms[site])
        if run_counts is not None:
            tensors[site_action.RUN_COUNTS] = torch.utils.dlpack.from_dlpack(run_counts[index : index + 1])
            ways = ways.counted()
        actions[site] = SiteAction(
            run=ways.run,
            before_attention=ways.before_attention,
            unfused=ways.unfused,
            reapply_to_residual=reapply,
            run_and_keep=ways.run_and_keep,
            tensors=tensors,
            order=20,
        )
    return actions


def _op_tensors(op_sites: Sequence[Site], facts: WorkerFacts, tables: DeviceTables) -> dict[Site, dict[str, Tensor]]:
    """Return what the forward reads at each op site beside the vectors."""
    programs = tables.programs
    if programs is None:
        return {}
    gates = tables.gates or no_gates(facts.device)
    state = dict(zip(program_action.STATE, (programs.changes, *gates), strict=True))
    made = {
        site: {
            program_action.ROWS: tables.rows,
            program_action.CODES: programs.codes[index],
            program_action.PARAMS: programs.params[index],
            program_action.ACTIVE: programs.active[index],
            program_action.GROUPS: programs.groups,
            **state,
        }
        for index, site in enumerate(op_sites)
    }
    for index, sae in tables.saes.items():
        made[op_sites[index]].update(zip(program_action.SAE, sae.tensors, strict=True))
    mid = [site for site in op_sites if site.hook is HookPoint.POST_ATTN]
    if mid and facts.reapplies_mid:
        kept = torch.zeros(facts.max_tokens, facts.model.hidden_size, device=facts.device)
        for site in mid:
            made[site][program_action.KEPT] = kept
    return made


def _check_stages(config: SteeringConfig, facts: WorkerFacts) -> None:
    """Refuse transcoders that read on this pipeline stage and write on another, or the other way round."""
    for name, sites in config.transcoders().items():
        if not is_in_one_stage(sites, facts):
            raise ConfigError(f"{WHERE}.saes.{name} (--saes): {cross_stages(sites)}")
