"""The hooks of one vLLM worker: the base class of the object that a part's `Part.worker` returns.

Capture and steering implement these alike and never learn of each other. Everything here is our own types; the folder
``worker`` translates from vLLM. All hooks run on the step thread of the worker.

The hooks of every step and every request are looked up once: see `overrides` and `in_turn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headgate.capture.engine.site_action import SiteAction
from headgate.capture.links.network import NetworkKeys
from headgate.capture.schema.batch import BatchView, Document, FinalState, NewRequest
from headgate.capture.schema.consumer import NOWHERE, ActionTarget, ModelHead, ModelInfo
from headgate.capture.schema.sites import Site
from headgate.capture.staging.readouts import no_head


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """One worker, after its model was loaded and before anything was traced.

    Attributes:
        model: The whole model, as configured.
        owned_layers: Global indices of the decoder layers on this pipeline stage.
        device: Where the forward pass runs.
        dtype: Of the residual stream.
        max_tokens: Upper limit of batch rows in one forward, padding included.
        max_num_seqs: Upper limit of requests in one forward.
        is_compiled: Whether the forward is traced by torch.compile; else it runs as written.
        tp_rank: The stream is replicated over tensor-parallel ranks; rank 0 captures.
        tp_size: Number of tensor-parallel ranks.
        gather: Collective of these ranks: from a tensor of each, ``[...]``, to those of all, ``[tp_size, ...]``.
        pp_rank: Pipeline stage.
        pp_size: Number of stages.
        reapplies_mid: Whether layers carry the stream alone, so that `SiteAction.reapply_to_residual` is called.
        post_norms: Sites of this stage in front of a norm whose result is added to the stream.
        has_one_row_each: Says to operations, while a forward is launched or recorded, whether each request has one row
            in it; False if that is not certain.
        runs_requests: Says to operations, while a forward is launched, whether it is that of the step that
            `headgate_step_begins` was called for last. False for dummy steps, and while a CUDA graph is recorded.
        actions: Where the actions of consumers go.
        network_keys: To reach front ends on other hosts; None if all are on this one.
        head: Finds the model's head, before actions are put into the forward; raises `UnsupportedError` if this worker
            has none that takes rows of any layer. All tensor-parallel ranks call it at the same point.
    """

    model: ModelInfo
    owned_layers: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    max_tokens: int
    max_num_seqs: int
    is_compiled: bool
    tp_rank: int = 0
    tp_size: int = 1
    gather: Callable[[Tensor], Tensor] = lambda tensor: tensor[None]
    pp_rank: int = 0
    pp_size: int = 1
    reapplies_mid: bool = False
    post_norms: frozenset[Site] = frozenset()
    has_one_row_each: Callable[[], bool] = lambda: False
    runs_requests: Callable[[], bool] = lambda: False
    actions: ActionTarget = NOWHERE
    network_keys: NetworkKeys | None = None
    head: Callable[[], ModelHead] = no_head

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last stage, which owns the final norm."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_output_rank(self) -> bool:
        """Whether the scheduler gets this worker's output: the first tensor-parallel rank of the last stage."""
        return self.is_last_stage and self.tp_rank == 0

    def owns(self, site: Site) -> bool:
        """Whether `site` lies on this pipeline stage."""
        return self.is_last_stage if site.layer < 0 else site.layer in self.owned_layers


class PendingReadings(Protocol):
    """Values that a part read in one step, on their way to the host."""

    def collect(self) -> Document:
        """Return them as plain values, bytes and numpy arrays, which are pickled if a process lies between.

        Arrays are not written to after that.

        Called once, when the step's output is on the host, on the thread that makes the output; steps that follow may
        have been launched meanwhile. If the values were copied on another stream than the forward's, it waits for them.
        """
        ...


class WorkerHooks:
    """The hooks of a worker part, which overrides what it needs of them."""

    def headgate_allocate(self, facts: WorkerFacts) -> int:
        """Allocate the memory that the forward reads and writes. Called once, first.

        Returns:
            Bytes of device memory that were allocated.

        Raises:
            ConfigError: If the device has less than the configuration asks for.
        """
        return 0

    def headgate_actions(self, facts: WorkerFacts) -> Mapping[Site, SiteAction]:
        """Declare the code to run in the forward, by site; only sites that ``facts.owns``. Called once, second."""
        return {}

    def headgate_start(self, facts: WorkerFacts) -> None:
        """Start whatever runs beside the forward, such as threads. Called once, after the actions were installed."""

    def headgate_graph_key(self) -> Document:
        """Return plain values that change whenever the traced code or the shapes it sees change.

        They become part of vLLM's compile-cache key, so a graph with other sites is never loaded.
        """
        return {}

    def headgate_request_added(self, new: NewRequest) -> None:
        """Add a request with a `RequestWire`, which was scheduled for the first time."""

    def headgate_request_finished(self, req_id: str, final: FinalState | None) -> None:
        """Close a request that ended, however it did; all its steps were seen.

        Args:
            req_id: Of a request that was stopped.
            final: Its end as the scheduler reports it; None if it does not.
        """

    def headgate_plain_request_added(self, req_id: str, num_prompt_tokens: int) -> None:
        """Add a plain request, one without a `RequestWire`, which was scheduled for the first time.

        Steps of plain requests alone are not shown unless `headgate_needs_plain_steps` asks for them.
        """

    def headgate_request_stopped(self, req_id: str) -> None:
        """Stop a request, which may be a plain one: it has no further steps. How it ended may be known only later."""

    def headgate_ordered(self, part: str, orders: Document) -> None:
        """Follow what the engine core decided (`core_part.CorePart.orders`), before a step is laid out.

        Every rank gets the same, with the same step. A part passes over the orders of others.
        """

    def headgate_needs_plain_steps(self) -> bool:
        """Whether the next step is to be shown even if all its requests are plain ones."""
        return False

    def headgate_step_begins(self, view: BatchView | None, token_ids: Tensor | None) -> None:
        """Prepare a step: its inputs are laid out and its forward follows.

        Args:
            view: The layout; None for dummy and idle steps.
            token_ids: The token of each batch row as the runner laid it out, int32 on the device, static memory that
                the next step overwrites; None for dummy and idle steps. The forward of a later pipeline stage does not
                read them, but they say which token each row of its batch stands for.
        """

    def headgate_step_ends(self) -> None:
        """Follow up a step whose forward was launched, and its sampling if the runner samples apart from it."""

    def headgate_step_readings(self) -> PendingReadings | None:
        """Return what the step read that `headgate_step_ends` has just followed up, for the part's half in the engine
        core; None if nothing. Start its copy to the host here.

        Asked of the worker with ``facts.is_output_rank`` alone: the output of others goes nowhere. What a part reads on
        earlier pipeline stages gets there by `headgate_to_next_stage`.
        """
        return None

    def headgate_to_next_stage(self) -> Tensor | None:
        """Return what the part's half on the next pipeline stage needs of the step that `headgate_step_ends` has just
        followed up; None if nothing.

        It travels with the hidden states: equal on all tensor-parallel ranks, and not written to after that. Asked of
        all stages but the last.
        """
        return None

    def headgate_from_last_stage(self, sent: Tensor) -> None:
        """Take what the part on the pipeline stage before sent of a step, before `headgate_step_begins` for it."""

    def headgate_describe_step(self, view: BatchView) -> Document:
        """Return what the part does in the step that has just begun, by its name, as plain values for the step log.

        Called between `headgate_step_begins` and the forward, and only where steps are logged. It may wait for the
        device.
        """
        return {}

    def headgate_self_test(self, facts: WorkerFacts, run: Callable[[int], Sequence[Tensor]]) -> None:
        """Prove, before serving, that every site responds.

        ``run(num_tokens)`` drives a dummy forward and returns what this stage hands on, each ``[rows, ...]`` with at
        least `num_tokens` rows; empty where the runner does not show it.

        Raises:
            SelfTestError: If one does not.
        """

    def headgate_call(self, part: str, method: str, args: Document) -> object:
        """Serve a call from the engine core, between two steps; every part but the one called returns None.

        Raises:
            AssertionError: If the part has no such method.
        """
        return None

    def headgate_stats(self) -> Document:
        """Return counters as plain values, for the worker RPC of the same name."""
        return {}

    def headgate_close(self) -> None:
        """Close whatever is open: the worker shuts down. Idempotent."""


def overrides(parts: Mapping[str, WorkerHooks], name: str) -> dict[str, Callable[..., Any]]:
    """Return the method of that name of each part that overrides it."""
    plain = getattr(WorkerHooks, name)
    return {part: getattr(hooks, name) for part, hooks in parts.items() if getattr(type(hooks), name) is not plain}


def in_turn(calls: Iterable[Callable[..., None]]) -> Callable[..., None]:
    """Make one function of several without results: the hooks of every step and request are looked up once."""
    found = tuple(calls)
    if len(found) == 1:
        return found[0]

    def call(*args: object) -> None:
        for function in found:
            function(*args)

    return call
