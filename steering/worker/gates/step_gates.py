"""The gates of each step of one worker: before its forward, and after. Step thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.batch import BatchView, Int32Array, Int64Array
from headgate.steering.gates.coefficient_changes import CoefficientChanges
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.driven import DrivenStrengths, Places
from headgate.steering.worker.gates.readings import GateHistory, SignalReadings, StepSignals, ToldColumns
from headgate.steering.worker.gates.reference import FLAGS, SLOT, GateTensors
from headgate.steering.worker.gates.requests import (
    GatedBatch,
    GatedRequest,
    GateRows,
    GateSlots,
    OwnGates,
    gated_request,
    slots_needed,
)
from headgate.steering.worker.rows.rule_programs import ActingRule, acting_of

_NO_TOKENS: Int32Array = np.empty((0, 2), np.int32)
_NO_SLOTS: Int32Array = np.empty(0, np.int32)
_NO_PLACES: Int64Array = np.empty(0, np.int64)
_NO_VALUES: Float32Rows = np.empty(0, np.float32)


class GateWrites(NamedTuple):
    """Changes of the gates' tensors, to write before the next forward.

    Attributes:
        tokens: int32 ``[n, 2]``: those of the first batch rows.
        places: int64 ``[k]``: flat places in the signals.
        strengths: float32 ``[k]``: their values before the forward.
        cleared: int32 ``[m]``: slots whose states are to be NaN.
        columns: Columns whose states are to be NaN for all: first, and behind the last.
        state_places: int64 ``[d]``: flat places in the states, written behind the others.
        states: float32 ``[d]``: their values.
    """

    tokens: Int32Array
    places: Int64Array
    strengths: Float32Rows
    cleared: Int32Array
    columns: tuple[tuple[int, int], ...] = ()
    state_places: Int64Array = _NO_PLACES
    states: Float32Rows = _NO_VALUES


class StepGates:
    """Follows the requests with gates of one worker through its steps.

    Args:
        max_tokens: Upper limit of batch rows in one forward.
        max_num_seqs: Upper limit of requests in one forward.
        num_columns: Of signals and states.
        device: Where the forward runs.

    Attributes:
        tensors: Read and written by the forward.
    """

    def __init__(self, max_tokens: int, max_num_seqs: int, num_columns: int, device: torch.device) -> None:
        num_slots = slots_needed(max_num_seqs)
        self.tensors = GateTensors(
            signals=torch.zeros(max_tokens, num_columns, device=device),
            states=torch.full((num_slots, num_columns), torch.nan, device=device),
            tokens=torch.zeros(max_tokens, 2, dtype=torch.int32, device=device),
        )
        self._requests: dict[str, GatedRequest] = {}
        self._own: dict[str, OwnGates] = {}
        """Of all requests."""
        self._rules: Sequence[ActingRule] = ()
        self._new_columns: list[tuple[int, int]] = []
        self._slots = GateSlots(num_slots)
        self._history = GateHistory()
        self._driven = DrivenStrengths(num_slots)
        self._tokens = np.zeros((max_tokens, 2), np.int32)
        """As the device has them after the writes."""
        self._num_marked = 0
        """Behind these rows all of it is 0."""
        self._batch: GatedBatch | None = None
        self._decoded: tuple[GatedBatch, bytes] | None = None
        """Batch and first batch rows of the step before, if each request had one generated row."""
        self._rows: GateRows | None = None
        self._index: tuple[bytes, Tensor | None] | None = None
        """Batch rows of the last step that was read, as bytes, and on the device; None there for the first ones."""
        self._signals: StepSignals | None = None
        self._told: ToldColumns | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_requests(self) -> int:
        """Requests with gates."""
        return len(self._requests)

    def add(self, req_id: str, own: OwnGates) -> None:
        """Add a request, with or without gates, or start a known id afresh."""
        self.remove(req_id)
        self._own[req_id] = own
        self._follow(req_id, own)

    def set_rules(self, rules: Sequence[ActingRule]) -> None:
        """Make `rules` the ones that act, from the next step on. Columns of those that stay keep their states."""
        before = {rule.columns: tuple(program.key for program in rule.programs) for rule in self._rules}
        self._rules = rules
        for rule in rules:
            if before.get(rule.columns) != tuple(program.key for program in rule.programs):
                self._new_columns.append(rule.columns)
                self._history.clear(*rule.columns)
        for req_id, own in self._own.items():
            self._follow(req_id, own)

    def drive(self, changes: CoefficientChanges) -> dict[str, frozenset[int]]:
        """Take coefficients that controllers set.

        Returns:
            All columns in which a request has been driven, of each request that has another one now.

        Raises:
            AssertionError: If a request is not known.
        """
        changed = {req_id: self._driven.columns(req_id) for req_id in self._driven.set(changes)}
        for req_id in changed:
            if req_id not in self._own:
                raise AssertionError(f"request {req_id!r} is driven, but was never added")
            self._follow(req_id, self._own[req_id])
        return changed

    def _follow(self, req_id: str, own: OwnGates) -> None:
        request = gated_request(own, acting_of(self._rules, own.selection, self._driven.columns(req_id)))
        if request is None:
            self._leave(req_id)
        elif self._requests.get(req_id) != request:
            self._requests[req_id] = request
            self._history.follow(req_id, request)
            self._batch = None

    def remove(self, req_id: str) -> None:
        """Remove a request, if it is known."""
        self._own.pop(req_id, None)
        self._leave(req_id)

    def _leave(self, req_id: str) -> None:
        if req_id not in self._own:
            self._driven.forget(req_id)
        if self._requests.pop(req_id, None) is not None:
            self._slots.release(req_id)
            self._history.forget(req_id)
            self._batch = None

    def step_begins(self, view: BatchView | None) -> GateWrites | None:
        """Return what to write before the forward of a step; None if nothing changes, or nothing has gates."""
        self._rows = self._signals = None
        if view is None or not self._requests:
            return None
        if self._batch is None or self._batch.req_ids != view.req_ids:
            self._batch = GatedBatch(view.req_ids, self._requests, self._slots)
        batch = self._batch
        rows = batch.rows(view)
        if not rows.req_ids:
            return None
        self._rows = rows
        decoded = (batch, rows.starts.tobytes()) if batch.is_decoding(rows) else None
        if decoded is not None and decoded == self._decoded and not self._new_columns:
            changed = self._driven.changes(rows, batch)
            return (
                GateWrites(_NO_TOKENS, _NO_PLACES, _NO_VALUES, _NO_SLOTS, (), *self._flat(changed))
                if len(changed)
                else None
            )
        self._decoded = decoded
        return self._writes(rows, batch)

    def _writes(self, rows: GateRows, batch: GatedBatch) -> GateWrites | None:
        columns, self._new_columns = tuple(self._new_columns), []
        cleared = batch.cleared(rows)
        index, flags = rows.batch_rows, batch.take_flags(rows)
        handed_on = self._history.strengths(rows, batch, flags) if batch.has_early else []
        replayed = Places.joined(Places.of(handed_on), self._driven.replayed(rows, batch, flags))
        states = self._driven.states(rows, batch, cleared)
        changed = np.empty((len(flags), 2), np.int32)
        changed[:, SLOT], changed[:, FLAGS] = np.repeat(batch.slots, rows.counts), flags
        end = int(index.max()) + 1
        # Rows of other requests keep no flag of the step before: those that are scanned are walked one by one.
        tokens = np.zeros((max(end, self._num_marked), 2), np.int32)
        tokens[index] = changed
        self._num_marked = end
        if np.array_equal(self._tokens[: len(tokens)], tokens) and not (
            len(replayed) or len(states) or len(cleared) or columns
        ):
            return None
        self._tokens[: len(tokens)] = tokens
        return GateWrites(tokens, *self._flat(replayed), cleared, columns, *self._flat(states))

    def _flat(self, places: Places) -> tuple[Int64Array, Float32Rows]:
        """Return flat places of signals or states, int64, and their values, float32."""
        return places.rows * self.tensors.signals.shape[1] + places.columns, places.values

    def step_ends(self) -> None:
        """Copy what the gates of the step did, behind its forward."""
        rows, batch = self._rows, self._batch
        if rows is None or batch is None:
            return
        index = rows.batch_rows
        key = index.tobytes()
        if self._index is None or self._index[0] != key:
            are_first = np.array_equal(index, np.arange(len(index)))
            self._index = key, None if are_first else torch.from_numpy(index).to(self.tensors.signals.device)
        if self._told is None or not np.array_equal(self._told.columns, batch.told):
            self._told = ToldColumns(batch.told, self.tensors.signals.device)
        self._signals = StepSignals(self.tensors.signals, rows, self._index[1], self._told)
        if batch.has_early:
            self._history.keep(self._signals, batch)

    def readings(self) -> SignalReadings | None:
        """Return what the engine core is told of the step that ended; None if nothing."""
        return None if self._signals is None else SignalReadings(self._signals)


def no_gates(device: torch.device) -> GateTensors:
    """Return the tensors of a worker where there can be no gates: they have no columns."""
    return GateTensors(
        torch.zeros(1, 0, device=device),
        torch.zeros(1, 0, device=device),
        torch.zeros(1, 2, dtype=torch.int32, device=device),
    )
