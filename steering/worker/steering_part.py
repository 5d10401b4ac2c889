"""Steering as a part of one worker: its sites in the graph, its tables before each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headgate.capture.engine.contracts.worker_hooks import SiteAction, WorkerFacts
from headgate.capture.schema.batch import BatchView, NewRequest
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.part_hooks import hookimpl
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.config import WHERE, SteeringConfig, cross_stages
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.programs.program import Program
from headgate.steering.spec import PhaseContent, SteeringSpec, from_wire, steered
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import Vectors, sum_of
from headgate.steering.worker import program_action, site_action
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.reconstruction import EncodedSae, load_sae, weight_bytes
from headgate.steering.worker.row_table import RowTable, rows_needed
from headgate.steering.worker.self_test import check_steering
from headgate.steering.worker.step_rows import RowResolver
from headgate.steering.worker.vector_pool import SlotPool

logger = logging.getLogger("headgate")

PART = "steering"


class SteeringPart:
    """Implements the engine hooks for steering. Every rank steers: each carries the whole stream."""

    def __init__(self, config: SteeringConfig) -> None:
        self._config = config
        self._state: WorkerSteering | None = None
        self._sites: tuple[Site, ...] = ()
        self._op_sites: tuple[Site, ...] = ()
        self._num_slots = 0
        self._num_changes = 0
        self._run_counts: Tensor | None = None

    @hookimpl
    def headgate_allocate(self, facts: WorkerFacts) -> int:
        """Allocate the tables of this worker's sites."""
        model = facts.model
        steerable = self._config.steerable(
            num_layers=model.num_layers, hidden_size=model.hidden_size, dtype=str(facts.dtype).removeprefix("torch.")
        )
        self._sites = tuple(site for site in steerable.sites if facts.owns(site))
        self._op_sites = tuple(site for site in steerable.op_sites if facts.owns(site))
        self._num_slots = self._config.num_slots(model.num_layers)
        encoded = self._config.encoded_saes(model.hidden_size)
        coders = {index: encoded[site] for index, site in enumerate(self._op_sites) if site in encoded}
        self._check_memory(facts, coders.values())
        _check_stages(self._config, facts)
        self._num_changes = self._config.num_changes
        saes = {index: load_sae(coder, facts) for index, coder in coders.items()}
        limits = self._config.max_entries, self._num_changes
        self._state = WorkerSteering(self._num_slots, self._sites, facts, self._op_sites, *limits, saes)
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

    @hookimpl
    def headgate_actions(self, facts: WorkerFacts) -> dict[Site, SiteAction]:
        """Declare the steering action of every site of this worker."""
        return self._make_actions(facts, self._allocated().tables)

    @hookimpl
    def headgate_graph_key(self) -> dict[str, Any]:
        """Return the sites and shapes that the traced code depends on."""
        sites = [site.name for site in self._sites]
        key: dict[str, Any] = {"sites": sites, "slots": self._num_slots, "run_counts": self._config.fire_counter}
        if self._op_sites:
            entries = self._config.max_entries
            key |= {"op_sites": [site.name for site in self._op_sites], "entries": entries}
            key["changes"] = self._num_changes
        if saes := self._allocated().tables.saes:
            key["saes"] = [
                [index, int(sae.norm), str(sae.encoder.dtype), *sae.encoder.shape] for index, sae in saes.items()
            ]
        return {PART: key}

    @hookimpl
    def headgate_request_added(self, new: NewRequest) -> None:
        """Add a request with what it steers with, if anything."""
        wire = new.wire.get("parts", {}).get(PART) if new.wire is not None else None
        self._allocated().add(new.req_id, new.num_prompt_tokens, wire)

    @hookimpl
    def headgate_plain_request_added(self, req_id: str, num_prompt_tokens: int) -> None:
        """Add a request without vectors of its own; global vectors act on it."""
        self._allocated().add(req_id, num_prompt_tokens, None)

    @hookimpl
    def headgate_request_stopped(self, req_id: str) -> None:
        """Remove a request."""
        self._allocated().table.remove(req_id)

    @hookimpl
    def headgate_needs_plain_steps(self) -> bool:
        """Return whether anybody is steered: then steps without requests that steer count too."""
        return not self._allocated().table.is_idle

    @hookimpl
    def headgate_step_begins(self, view: BatchView | None) -> None:
        """Aim the tables at the step."""
        self._allocated().step_begins(view)

    @hookimpl
    def headgate_self_test(self, facts: WorkerFacts, run: Callable[[int], Sequence[Tensor]]) -> None:
        """Prove that every site of this worker steers; every rank runs the same dummy steps."""
        if self._config.self_test:
            rows = min(facts.max_num_seqs, facts.max_tokens)
            check_steering(self._allocated().tables, self._sites, rows, run, self._op_sites)

    @hookimpl
    def headgate_call(self, part: str, method: str, args: Mapping[str, Any]) -> Any:
        """Run a method of `WorkerSteering` that the engine core called by name."""
        if part != PART:
            return None
        call = _METHODS.get(method)
        if call is None:
            raise AssertionError(f"steering: workers have no method {method!r}; known: {', '.join(sorted(_METHODS))}")
        return call(self._allocated(), **args)

    @hookimpl
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

    def _check_memory(self, facts: WorkerFacts, coders: Iterable[SparseCoder]) -> None:
        num_slots, row_bytes = self._num_slots, facts.model.hidden_size * facts.dtype.itemsize
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

    def _make_actions(self, facts: WorkerFacts, tables: DeviceTables) -> dict[Site, SiteAction]:
        plain = site_action.addition(facts)
        operations = program_action.operation(facts) if self._op_sites else plain
        if self._config.fire_counter:
            self._run_counts = torch.zeros(len(self._sites), dtype=torch.int64, device=facts.device)
        op_tensors = _op_tensors(self._op_sites, facts, tables)
        norms = {self._op_sites[index]: sae.norm for index, sae in tables.saes.items()}
        actions = {}
        for index, site in enumerate(self._sites):
            tensors = {
                site_action.POOL: tables.pool,
                site_action.SLOTS: tables.slots[index],
                **op_tensors.get(site, {}),
            }
            ways = operations if site in op_tensors else plain
            reapply = ways.reapply or ways.run
            if site in norms:
                ways = program_action.reconstructing(ways, norms[site])
            if self._run_counts is not None:
                tensors[site_action.RUN_COUNTS] = torch.utils.dlpack.from_dlpack(self._run_counts[index : index + 1])
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
    made = {
        site: {
            program_action.ROWS: tables.rows,
            program_action.CODES: programs.codes[index],
            program_action.PARAMS: programs.params[index],
            program_action.ACTIVE: programs.active[index],
            program_action.GROUPS: programs.groups,
            program_action.CHANGES: programs.changes,
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


def is_in_one_stage(sites: Sequence[Site], facts: WorkerFacts) -> bool:
    """Whether a worker owns all of some sites, or none."""
    return len({facts.owns(site) for site in sites}) == 1


class WorkerSteering:
    """Requests, modules and global vectors of one worker, and the tables that follow them. Step thread only.

    Args:
        num_slots: Size of the pool, slot 0 included.
        sites: This worker's, in the order of the forward pass.
        facts: This worker's.
        op_sites: Those of `sites` where operations act, in the same order.
        max_entries: Entries of a program at a site, at most.
        num_changes: Features of a program that are read at one site and written at others, at most.
        saes: Encoded SAEs, by the index of their op site.

    Attributes:
        table: Requests and rows, on the host.
        tables: The memory that the forward reads.
    """

    def __init__(
        self,
        num_slots: int,
        sites: Sequence[Site],
        facts: WorkerFacts,
        op_sites: Sequence[Site] = (),
        max_entries: int = 0,
        num_changes: int = 0,
        saes: Mapping[int, EncodedSae] | None = None,
    ) -> None:
        self._facts = facts
        dtype: Any = str(facts.dtype).removeprefix("torch.")
        num_rows = rows_needed(facts.max_num_seqs)
        pool = SlotPool(num_slots, facts.model.hidden_size, dtype)
        self.table = RowTable(sites=sites, num_rows=num_rows, pool=pool, op_sites=op_sites, max_entries=max_entries)
        self.tables = DeviceTables(
            num_sites=len(sites),
            num_slots=num_slots,
            num_rows=num_rows,
            max_tokens=facts.max_tokens,
            hidden_size=facts.model.hidden_size,
            dtype=facts.dtype,
            device=facts.device,
            num_op_sites=len(op_sites),
            max_entries=max_entries,
            num_changes=num_changes,
            saes=saes or {},
        )
        self._resolver = RowResolver(self.table, facts.max_tokens)
        self._contents: dict[bytes, PhaseVectors] = {}
        """Vectors of modules by their content keys, until `forget`."""
        self._programs: dict[bytes, Program] = {}
        """Programs of modules, likewise."""
        self._modules: set[str] = set()

    def add(self, req_id: str, num_prompt: int, wire: Mapping[str, Any] | None) -> None:
        """Add a request with its `SteeringWire`, in which the core resolved the modules; None if it is not steered."""
        if wire is None:
            self.table.add(req_id, num_prompt)
            return
        own = from_wire(wire)
        prefill, decode = (
            (wire.get(f"{phase}_parts", ()), wire.get(f"{phase}_programs", ()), content)
            for phase, content in zip(("prefill", "decode"), own.phases, strict=True)
        )
        acting = self._acting(*prefill)
        self.table.add(req_id, num_prompt, acting, acting if decode == prefill else self._acting(*decode))

    def step_begins(self, view: BatchView | None) -> None:
        """Aim the tables at a step; None for dummy and idle steps."""
        step = self._resolver.resolve(view)
        with torch.inference_mode():
            self.tables.update(self.table.take_writes(), step)

    def set_global(self, spec: Mapping[str, Any]) -> None:
        """RPC: set the phases of a `SteeringWire` as the global vectors; an empty one clears them."""
        self.table.set_global(*_content(from_wire(spec)))

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

    def is_in_one_stage(self, sites: Sequence[str]) -> bool:
        """RPC: return whether this worker owns all of some sites, by their names, or none."""
        return is_in_one_stage([Site.parse(name) for name in sites], self._facts)

    def checksum(self) -> int:
        """RPC: return the state as a number, equal on all tensor-parallel ranks."""
        return self.table.checksum()

    def stats(self) -> dict[str, Any]:
        """Return plain counters."""
        return {
            "slots_live": self.table.num_live_slots,
            "slots_used": self.table.num_slots_used,
            "modules": len(self._modules),
        }

    def _acting(self, parts: Sequence[Part], programs: Sequence[Part], own: PhaseContent) -> Vectors | None:
        """Return what acts on a request in one phase: the modules that it names, and its own."""
        vectors, program = own
        try:
            named: list[tuple[PhaseVectors | None, float]] = [(self._contents[key], scale) for key, scale in parts]
            acting = [(self._programs[key], scale) for key, scale in programs]
        except KeyError as error:
            raise AssertionError(f"steering: no module has the content {error.args[0]!r}") from None
        return steered(sum_of([*named, (vectors, 1.0)]), acting + ([] if program is None else [(program, 1.0)]))


Part = tuple[bytes, float]
"""Content key of a module's vectors or program, and its scale."""


def _content(spec: SteeringSpec) -> tuple[Vectors | None, Vectors | None]:
    """Return what a spec without modules has for the two phases."""
    prefill, decode = (
        steered(vectors, [] if program is None else [(program, 1.0)]) for vectors, program in spec.phases
    )
    return prefill, decode


_METHODS: dict[str, Callable[..., Any]] = {
    "set_global": WorkerSteering.set_global,
    "keep_module": WorkerSteering.keep_module,
    "release_module": WorkerSteering.release_module,
    "forget": WorkerSteering.forget,
    "checksum": WorkerSteering.checksum,
    "is_in_one_stage": WorkerSteering.is_in_one_stage,
}
