"""Signals of the gates of a step, on their way to the host: for the engine core, and for rows computed again.

Letters in shape comments: G requests with gates in a step, N their rows, C columns.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.batch import BoolArray, Int32Array
from headgate.steering.programs.gate_codes import TokenFlag
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.requests import GatedBatch, GatedRequest, GateRows

_FOLLOWING = 2
"""Of a gate's columns, the strength that acts on the next row at earlier sites."""


class StepSignals:
    """The signals of one step's rows with gates, copied to the host while the step runs. Any thread may read them.

    Args:
        signals: float32 ``[T, C]``, as the forward writes them; the copy is made on the current stream.
        rows: The step's.
        index: int64 ``[N]`` on the device: their batch rows.
    """

    def __init__(self, signals: Tensor, rows: GateRows, index: Tensor) -> None:
        self.rows = rows
        found = signals[index]
        self._done: torch.cuda.Event | None = None
        if found.device.type == "cuda":
            pinned = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            pinned.copy_(found, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
            found = pinned
        self._values = found
        self._lock = Lock()

    def values(self) -> Float32Rows:
        """Return the signals ``[N, C]`` of the rows; waits for the copy."""
        with self._lock:
            if self._done is not None:
                self._done.synchronize()
                self._done = None
        values: Float32Rows = self._values.numpy()
        return values

    def of(self, req_id: str) -> tuple[int, Float32Rows]:
        """Return position of the first row, and the signals, of one of the requests."""
        at = self.rows.req_ids.index(req_id)
        start = int(self.rows.counts[:at].sum())
        return int(self.rows.firsts[at]), self.values()[start : start + int(self.rows.counts[at])]


class SignalReadings:
    """Implements `StepReadings` of `headgate.capture.engine.contracts.worker_hooks`: what the engine core is told.

    Args:
        signals: Of the step.
        read: ``[G]``: the requests that are told of.
    """

    def __init__(self, signals: StepSignals, read: BoolArray) -> None:
        self._signals = signals
        self._read = read

    def collect(self) -> dict[str, Any]:
        """Return the requests, the position of the first row and the number of rows of each, and their signals.

        ``ids`` are a list; ``firsts`` and ``counts`` int64, ``values`` float32 ``[rows, columns]``, as bytes.
        """
        rows, read = self._signals.rows, self._read
        values = self._signals.values()
        if not read.all():
            values = values[np.repeat(read, rows.counts)]
        return {
            "ids": [req_id for req_id, is_read in zip(rows.req_ids, read.tolist(), strict=True) if is_read],
            "firsts": rows.firsts[read].tobytes(),
            "counts": rows.counts[read].tobytes(),
            "columns": values.shape[1],
            "values": values.tobytes(),
        }


class GateHistory:
    """Strengths that acted at sites before their gates, of requests that run: rows may be computed again.

    Rows that are computed again, after a preemption, share a forward; the strength that acted on one at an earlier site
    followed from the row before it. Step thread only.
    """

    def __init__(self) -> None:
        self._steps: dict[str, list[tuple[int, StepSignals]]] = {}
        """By request, each with its number."""
        self._num_kept = 0
        self._since: dict[int, int] = {}
        """Number of the first step in which a column of a rule means what it does now."""

    def begin_columns(self, first: int, end: int) -> None:
        """Let the columns ``first : end`` belong to another rule from the next step on."""
        self._since.update(dict.fromkeys(range(first, end), self._num_kept))

    def keep(self, signals: StepSignals, batch: GatedBatch) -> None:
        """Keep what a step's rows hand on, of requests with gates that act early."""
        ends = (signals.rows.firsts + signals.rows.counts).tolist()
        for req_id, request, end in zip(signals.rows.req_ids, batch.requests, ends, strict=True):
            if request.early and end >= request.num_prompt:
                self._steps.setdefault(req_id, []).append((self._num_kept, signals))
        self._num_kept += 1

    def forget(self, req_id: str) -> None:
        """Forget a request that ended."""
        self._steps.pop(req_id, None)

    def strengths(self, rows: GateRows, batch: GatedBatch, flags: Int32Array) -> list[tuple[int, int, float]]:
        """Return the strengths that act again on replayed rows: batch row, column and value of each.

        Args:
            rows: Of a step.
            batch: Of the step.
            flags: `TokenFlag` of each row, int32 ``[N]``.

        Raises:
            AssertionError: If a row was not computed before.
        """
        found: list[tuple[int, int, float]] = []
        end = 0
        for at, (req_id, request) in enumerate(zip(rows.req_ids, batch.requests, strict=True)):
            start, end = end, end + int(rows.counts[at])
            replayed = np.flatnonzero(flags[start:end] & TokenFlag.IS_REPLAYED).tolist() if request.early else []
            known = self._known(req_id) if replayed else {}
            for index in replayed:
                before = int(rows.firsts[at]) + index - 1
                row = int(rows.starts[at]) + index
                for column in request.early:
                    found.append((row, column, self._strength(req_id, request, known, before, column)))
        return found

    def _strength(self, req_id: str, request: GatedRequest, known: dict[int, Any], position: int, column: int) -> float:
        """Return the strength that the row at `position` hands on; 0 if the gate is of a rule that came later."""
        number, values = known.get(position, (-1, None))
        if column in request.of_rules and number < self._since.get(column, 0):
            return 0.0
        if values is None:
            raise AssertionError(f"request {req_id}: nothing is known of its gates at position {position}")
        return float(values[column + _FOLLOWING])

    def _known(self, req_id: str) -> dict[int, Any]:
        known: dict[int, Any] = {}
        for number, step in self._steps.get(req_id, ()):
            first, values = step.of(req_id)
            known.update((first + index, (number, row)) for index, row in enumerate(values))
        return known
