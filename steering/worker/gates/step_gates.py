"""The gates of each step of one worker: before its forward, and after. Step thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from headgate.capture.schema.batch import BatchView, Int32Array, Int64Array
from headgate.steering.gates.coefficient_changes import CoefficientChanges
from headgate.steering.gates.step_table import ReportedCounts
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.driven import DrivenStrengths, Places
from headgate.steering.worker.gates.readings import (
    GateHistory,
    SignalCopier,
    SignalReadings,
    StepSignals,
    WrittenCounts,
)
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
from headgate.steering.worker.placed_programs import ActingRule, acting_of
from headgate.steering.worker.transfers import PinnedCopies

_NO_TOKENS: Int32Array = np.empty((0, 2), np.int32)
_NO_SLOTS: Int32Array = np.empty(0, np.int32)
_NO_PLACES: Int64Array = np.empty(0, np.int64)
_NO_VALUES: Float32Rows = np.empty(0, np.float32)


class GateWrites(NamedTuple):
    """Changes of the gates' tensors, to write before the next forward.

    Attributes:
        tokens: int32 ``[n, 2]``: slot and flags of the first batch rows.
        places: int64 ``[k]``: flat places in the signals.
        strengths: float32 ``[k]``: their values before the forward.
        cleared: int32 ``[m]``: slots whose states are to be NaN.
        columns: Columns whose states are to be NaN for all: the first, and the one after the last.
        state_places: int64 ``[d]``: flat places in the states, written after the others.
        states: float32 ``[d]``: their values.
    """

    tokens: Int32Array = _NO_TOKENS
    places: Int64Array = _NO_PLACES
    strengths: Float32Rows = _NO_VALUES
    cleared: Int32Array = _NO_SLOTS
    columns: tuple[tuple[int, int], ...] = ()
    state_places: Int64Array = _NO_PLACES
    states: Float32Rows = _NO_VALUES


class StepGates:
    """Follows the requests with gates of one worker through its steps.

    Args:
        max_tokens: Upper limit of batch rows in one forward.
        max_num_seqs: Upper limit of requests in one forward.
        num_columns: Number of columns of signals and states.
        device: Where the forward runs.
        is_output_rank: Whether the engine core gets what this worker reads.

    Attributes:
        tensors: Read and written by the forward.
    """

    def __init__(
        self,
        max_tokens: int,
        max_num_seqs: int,
        num_columns: int,
        device: torch.device,
        *,
        is_output_rank: bool = True,
    ) -> None:
        num_slots, self._num_columns = slots_needed(max_num_seqs), num_columns
        self.tensors = _tensors(max_tokens, num_slots, num_columns, device)
        self._requests: dict[str, GatedRequest] = {}
        self._own: dict[str, OwnGates] = {}
        """Own gates of all requests."""
        self._rules: Sequence[ActingRule] = ()
        self._new_columns: list[tuple[int, int]] = []
        self._slots = GateSlots(num_slots)
        self._history = GateHistory()
        copies = PinnedCopies() if device.type == "cuda" else None
        self._copier = SignalCopier(self.tensors.signals, copies)
        # What other ranks read would never be taken.
        reported_of = self._requests if is_output_rank else {}
        self._counts = WrittenCounts(self.tensors.states, copies, self._slots, reported_of)
        self._driven = DrivenStrengths(num_slots, num_columns)
        self._tokens = np.zeros((max_tokens, 2), np.int32)
        """As the device has them after the writes."""
        self._num_marked = 0
        """Number of rows after which everything is 0."""
        self._batch: GatedBatch | None = None
        self._decoded: tuple[GatedBatch, GateRows] | None = None
        """The step before, if each request had one generated row."""
        self._rows: GateRows | None = None
        self._signals: StepSignals | None = None

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
        """Make `rules` the ones that act, from the next step on. Columns of rules that stay keep their states."""
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
        known = self._requests.get(req_id)
        if request is None:
            self._leave(req_id)
            return
        if known is not None and request.is_counted and not known.is_counted:
            request = replace(request, is_counted=False)  # the device has counted rows that were sent
        if known != request:
            if not request.is_counted:
                self._counts.read_last(req_id)
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
        self._counts.read_last(req_id, has_ended=True)
        if self._requests.pop(req_id, None) is not None:
            self._slots.release(req_id)
            self._history.forget(req_id)
            self._batch = None

    def step_begins(self, view: BatchView | None, *, goes_on: bool = False) -> GateWrites | None:
        """Return what to write before the forward of a step; None if nothing changes, or nothing has gates.

        Args:
            view: The step; None for dummy and idle ones.
            goes_on: Whether it goes on from the step before, as `StepSequence` has it.
        """
        self._rows = self._signals = None
        decoded = self._decoded
        if view is not None and goes_on and decoded is not None and decoded[0] is self._batch and not self._new_columns:
            return self._goes_on(view, *decoded)
        self._decoded = None
        if view is None or not self._requests:
            return None
        if self._batch is None or self._batch.req_ids != view.req_ids:
            self._batch = GatedBatch(view.req_ids, self._requests, self._slots)
        batch = self._batch
        rows = batch.rows(view)
        if not rows.req_ids:
            return None
        self._rows = rows
        if batch.is_decoding(rows):
            self._decoded = batch, rows
        return self._writes(rows, batch)

    def _goes_on(self, view: BatchView, batch: GatedBatch, before: GateRows) -> GateWrites | None:
        """Follow a step of one generated row of each request, after such a step: only coefficients can change."""
        self._rows = rows = before._replace(firsts=batch.firsts(view))
        changed = self._driven.changes(rows, batch)
        return GateWrites(state_places=changed.flat, states=changed.values) if len(changed) else None

    def _writes(self, rows: GateRows, batch: GatedBatch) -> GateWrites | None:
        columns, self._new_columns = tuple(self._new_columns), []
        for place in batch.restarted(rows):
            self._counts.read_last(rows.req_ids[place])
        cleared = batch.cleared(rows)
        index, flags = rows.batch_rows, batch.take_flags(rows)
        handed_on = self._history.strengths(rows, batch, flags) if batch.has_early else []
        replayed = Places.joined(Places.of(handed_on, self._num_columns), self._driven.replayed(rows, batch, flags))
        states = self._driven.states(rows, batch, cleared)
        changed = np.empty((len(flags), 2), np.int32)
        changed[:, SLOT], changed[:, FLAGS] = np.repeat(batch.slots, rows.counts), flags
        end = int(index.max()) + 1
        # Rows of other requests keep no flag of the step before: scanned rows are visited one by one.
        tokens = np.zeros((max(end, self._num_marked), 2), np.int32)
        tokens[index] = changed
        self._num_marked = end
        if np.array_equal(self._tokens[: len(tokens)], tokens) and not (
            len(replayed) or len(states) or len(cleared) or columns
        ):
            return None
        self._tokens[: len(tokens)] = tokens
        return GateWrites(
            tokens=tokens,
            places=replayed.flat,
            strengths=replayed.values,
            cleared=cleared,
            columns=columns,
            state_places=states.flat,
            states=states.values,
        )

    def step_ends(self) -> None:
        """Copy what the gates of the step did, after its forward."""
        rows, batch = self._rows, self._batch
        if rows is None or batch is None or not batch.reported_requests:
            return
        self._signals = self._copier.copy(rows, batch)
        if batch.has_early:
            self._history.keep(self._signals, batch.reported_requests)

    def readings(self) -> SignalReadings | None:
        """Return what the engine core gets with the step that ended; None if nothing."""
        counts = self._counts.take()
        return SignalReadings(self._signals, counts) if counts or self._signals is not None else None

    def ask_counts(self) -> list[ReportedCounts]:
        """Return what requests whose rows are not sent have counted, as far as it has arrived."""
        return self._counts.ask()


def _tensors(max_tokens: int, num_slots: int, num_columns: int, device: torch.device) -> GateTensors:
    return GateTensors(
        signals=torch.zeros(max_tokens, num_columns, device=device),
        states=torch.full((num_slots, num_columns), torch.nan, device=device),
        tokens=torch.zeros(max_tokens, 2, dtype=torch.int32, device=device),
    )


def no_gates(device: torch.device) -> GateTensors:
    """Return the tensors of a worker where there can be no gates: they have no columns."""
    return _tensors(1, 1, 0, device)
