"""Steering as a part of one worker: its sites in the graph, its tables before each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headgate.capture.engine.contracts.worker_hooks import SiteAction, WorkerFacts
from headgate.capture.schema.batch import BatchView, NewRequest
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.part_hooks import hookimpl
from headgate.capture.schema.sites import Site, parse_sites
from headgate.steering.config import SteeringConfig
from headgate.steering.vectors.phase_vectors import PhaseVectors, from_wire
from headgate.steering.vectors.sums import Vectors, sum_of
from headgate.steering.worker import site_action
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.row_table import RowResolver, RowTable, rows_needed
from headgate.steering.worker.self_test import check_steering
from headgate.steering.worker.vector_pool import SlotPool

logger = logging.getLogger("headgate")

PART = "steering"


class SteeringPart:
    """Implements the engine hooks for steering. Every rank steers: each carries the whole stream."""

    def __init__(self, config: SteeringConfig) -> None:
        self._config = config
        self._state: WorkerSteering | None = None
        self._sites: tuple[Site, ...] = ()
        self._num_slots = 0
        self._run_counts: Tensor | None = None

    @hookimpl
    def headgate_allocate(self, facts: WorkerFacts) -> int:
        """Allocate the tables of this worker's sites."""
        sites = parse_sites(self._config.sites, facts.model.num_layers, "steering.sites")
        self._sites = tuple(site for site in sites if facts.owns(site))
        self._num_slots = self._config.num_slots(facts.model.num_layers)
        self._check_memory(facts)
        self._state = WorkerSteering(self._num_slots, self._sites, facts)
        logger.info(
            "steering: %d sites, %d slots, %.1f MiB of %s memory",
            len(self._sites),
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
        return {PART: {"sites": sites, "slots": self._num_slots, "run_counts": self._config.fire_counter}}

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
            check_steering(self._allocated().tables, self._sites, rows, run)

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

    def _check_memory(self, facts: WorkerFacts) -> None:
        num_slots, row_bytes = self._num_slots, facts.model.hidden_size * facts.dtype.itemsize
        if facts.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(facts.device)
            if num_slots * row_bytes > free:
                raise ConfigError(
                    f"steering.max_steering_slots: {num_slots} vectors of {row_bytes} bytes are "
                    f"{num_slots * row_bytes / 2**20:.1f} MiB, but {free / 2**20:.1f} MiB are free; lower it"
                )

    def _make_actions(self, facts: WorkerFacts, tables: DeviceTables) -> dict[Site, SiteAction]:
        add = site_action.addition(facts)
        reapply = add.run
        if self._config.fire_counter:
            self._run_counts = torch.zeros(len(self._sites), dtype=torch.int64, device=facts.device)
            add = add.counted()
        actions = {}
        for index, site in enumerate(self._sites):
            tensors = {site_action.POOL: tables.pool, site_action.SLOTS: tables.slots[index]}
            if self._run_counts is not None:
                tensors[site_action.RUN_COUNTS] = torch.utils.dlpack.from_dlpack(self._run_counts[index : index + 1])
            actions[site] = SiteAction(
                run=add.run,
                before_attention=add.before_attention,
                unfused=add.unfused,
                reapply_to_residual=reapply,
                tensors=tensors,
                order=20,
            )
        return actions


class WorkerSteering:
    """Requests, modules and global vectors of one worker, and the tables that follow them. Step thread only.

    Args:
        num_slots: Size of the pool, slot 0 included.
        sites: This worker's, in the order of the forward pass.
        facts: This worker's.

    Attributes:
        table: Requests and rows, on the host.
        tables: The memory that the forward reads.
    """

    def __init__(self, num_slots: int, sites: Sequence[Site], facts: WorkerFacts) -> None:
        dtype: Any = str(facts.dtype).removeprefix("torch.")
        num_rows = rows_needed(facts.max_num_seqs)
        pool = SlotPool(num_slots, facts.model.hidden_size, dtype)
        self.table = RowTable(sites=sites, num_rows=num_rows, pool=pool)
        self.tables = DeviceTables(
            num_sites=len(sites),
            num_slots=num_slots,
            num_rows=num_rows,
            max_tokens=facts.max_tokens,
            hidden_size=facts.model.hidden_size,
            dtype=facts.dtype,
            device=facts.device,
        )
        self._resolver = RowResolver(self.table, facts.max_tokens)
        self._contents: dict[bytes, PhaseVectors] = {}
        """Vectors of modules by their content keys, until `forget`."""
        self._modules: set[str] = set()

    def add(self, req_id: str, num_prompt: int, wire: Mapping[str, Any] | None) -> None:
        """Add a request with its `SteeringWire`, in which the core resolved the modules; None if it is not steered."""
        if wire is None:
            self.table.add(req_id, num_prompt)
            return
        own = from_wire(wire)
        prefill = self._sum(wire.get("prefill_parts", ()), own.prefill)
        decode = self._sum(wire.get("decode_parts", ()), own.decode)
        self.table.add(req_id, num_prompt, prefill, decode)

    def step_begins(self, view: BatchView | None) -> None:
        """Aim the tables at a step; None for dummy and idle steps."""
        step = self._resolver.resolve(view)
        with torch.inference_mode():
            self.tables.update(self.table.take_writes(), step)

    def set_global(self, spec: Mapping[str, Any]) -> None:
        """RPC: set the phases of a `SteeringWire` as the global vectors; an empty one clears them."""
        read = from_wire(spec)
        self.table.set_global(read.prefill, read.decode)

    def keep_module(self, name: str, spec: Mapping[str, Any]) -> None:
        """RPC: keep the vectors of a registered module, in place of an earlier one of its name."""
        if name in self._modules:
            self.release_module(name)
        read = from_wire(spec)
        self._contents.update({vectors.key: vectors for vectors in (read.prefill, read.decode) if vectors is not None})
        self.table.keep_module(name, read.prefill, read.decode)
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

    def _sum(self, parts: Sequence[tuple[bytes, float]], own: PhaseVectors | None) -> Vectors | None:
        try:
            named: list[tuple[PhaseVectors | None, float]] = [(self._contents[key], scale) for key, scale in parts]
        except KeyError as error:
            raise AssertionError(f"steering: no module has the content {error.args[0]!r}") from None
        return sum_of([*named, (own, 1.0)])


_METHODS: dict[str, Callable[..., Any]] = {
    "set_global": WorkerSteering.set_global,
    "keep_module": WorkerSteering.keep_module,
    "release_module": WorkerSteering.release_module,
    "forget": WorkerSteering.forget,
    "checksum": WorkerSteering.checksum,
}
