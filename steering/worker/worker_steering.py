"""Requests, modules, global vectors and gates of one worker, and the tables of the forward that follow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.sites import Site
from headgate.steering.gates.coefficient_changes import CoefficientChanges
from headgate.steering.gates.step_table import ReportedCounts
from headgate.steering.programs.program import Program
from headgate.steering.spec import PhaseContent, SteeringSpec, from_wire, steered
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import Vectors, sum_of
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.gates.readings import SignalReadings
from headgate.steering.worker.gates.requests import OwnGates
from headgate.steering.worker.gates.step_gates import StepGates
from headgate.steering.worker.placed_programs import ActingRule
from headgate.steering.worker.reconstruction import EncodedSae, ReconstructionFigures
from headgate.steering.worker.rows.row_table import RowTable, rows_needed
from headgate.steering.worker.rows.step_rows import RowResolver, StepSequence
from headgate.steering.worker.rows.vector_pool import SlotPool
from headgate.steering.worker.transfers import inference_mode


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
        self._sequence = StepSequence()
        self._resolver = RowResolver(self.table, facts.max_tokens)
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
        step = self._resolver.resolve(view, goes_on=goes_on)
        gates = None if self.gates is None else self.gates.step_begins(view, goes_on=goes_on)
        self.tables.update(self.table.take_writes(), step, gates, view)
        if self.gates is not None:
            self.gates.launches()

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
