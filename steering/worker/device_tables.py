"""The steering tables in the memory of the forward pass, and the copies into them.

Shapes: S sites of this worker, O of them op sites, P slots of the pool, R rows of the map, T batch rows, D hidden size,
E entries of a program at a site, K changes of a batch row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.schema.batch import BatchView, Int32Array, Int64Array
from headgate.steering.programs.codes import (
    ACTIVATION_MASK,
    CODE,
    CODE_MASK,
    NUM_CODES,
    NUM_PARAMS,
    Code,
    FeatureActivation,
)
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.reference import GateTensors, evaluate_scored
from headgate.steering.worker.gates.step_gates import GateWrites
from headgate.steering.worker.placed_programs import ProgramWrites
from headgate.steering.worker.reconstruction import EncodedSae
from headgate.steering.worker.rows.row_table import TableWrites
from headgate.steering.worker.rows.step_rows import StepRows
from headgate.steering.worker.transfers import (
    ALIGNMENT,
    ENTRIES,
    UPLOAD_BYTES,
    CudaUpload,
    HostUpload,
    Upload,
    Write,
    inference_mode,
    packed_size,
    value_upload,
)


class GateUpdates:
    """Writes into the tensors of gates, before the forwards of steps. Step thread only.

    Args:
        gates: The tensors.
    """

    def __init__(self, gates: GateTensors) -> None:
        self._gates = gates
        self._signals, self._states = gates.signals.view(-1), gates.states.view(-1)
        self._places: tuple[Int64Array | None, Tensor] = (None, self._states)
        """Places of the states that were written last, here and on the device: mostly they are written again."""
        self._upload = value_upload(self._states, min(ENTRIES, self._states.numel()))

    def write_again(self, changed: GateWrites) -> bool:
        """Write the states of a step, if it has nothing else to write and they lie where the last ones did.

        Returns:
            Whether that was so; if not, nothing was written.
        """
        if self._upload is None or changed.state_places is not self._places[0]:
            return False
        if len(changed.tokens) or len(changed.places) or len(changed.cleared) or changed.columns:
            return False
        self._upload.write(self._places[1], changed.states)
        return True

    def writes(self, changed: GateWrites) -> list[Write]:
        """Return the writes of a step."""
        gates, count = self._gates, len(changed.tokens)
        for first, end in changed.columns:
            gates.states[:, first:end] = math.nan
        made = [Write(gates.tokens[:count].copy_, (changed.tokens,))] if count else []
        if len(changed.cleared):
            made.append(Write(lambda slots: gates.states.index_fill_(0, slots.long(), math.nan), (changed.cleared,)))
        made += _flat_writes(self._signals, changed.places, changed.strengths)
        return made + self._state_writes(changed.state_places, changed.states)

    def _state_writes(self, places: Int64Array, values: Float32Rows) -> list[Write]:
        if places is self._places[0]:
            return [Write(partial(self._states.index_copy_, 0, self._places[1]), (values,))]
        if len(places) > ENTRIES:
            return _flat_writes(self._states, places, values)
        return [Write(partial(self._write_states, places), (places, values))] if len(places) else []

    def _write_states(self, host_places: Int64Array, places: Tensor, values: Tensor) -> None:
        self._places = host_places, places
        self._states.index_copy_(0, places, values)


def _flat_writes(flat: Tensor, places: Int64Array, values: Float32Rows) -> list[Write]:
    chunks = [slice(start, start + ENTRIES) for start in range(0, len(places), ENTRIES)]
    return [Write(partial(flat.index_copy_, 0), (places[chunk], values[chunk])) for chunk in chunks]


_NO_TOKENS: Int32Array = np.empty(0, np.int32)
_NO_SAES: Mapping[int, EncodedSae] = {}


class ProgramTables:
    """The programs in the memory of the forward pass. Step thread only.

    Args:
        counts: `counts`, for which the owner of the memory cares.
        active: Likewise.
        max_entries: E.
        num_changes: K.

    Attributes:
        counts: int32 ``[O, R]``: entries of each table row at each op site.
        codes: int32 ``[O, R, E, NUM_CODES]``.
        params: float32 ``[O, R, E, NUM_PARAMS]``.
        active: int32 ``[O, T]``: entries of each batch row at each op site, resolved once a step.
        groups: int64 ``[T]``: position groups of each batch row whose program has some.
        changes: float32 ``[T, K]``: of features that are read at one site and written at later ones; the forward writes
            each before it reads it. Empty if there can be no such feature.
    """

    def __init__(self, counts: Tensor, active: Tensor, max_entries: int, num_changes: int = 0) -> None:
        device = counts.device
        self.counts = counts
        self.codes = torch.zeros(*counts.shape, max_entries, NUM_CODES, dtype=torch.int32, device=device)
        self.params = torch.zeros(*counts.shape, max_entries, NUM_PARAMS, device=device)
        self.active = active
        self.groups = torch.zeros(active.shape[1], dtype=torch.int64, device=device)
        self.changes = torch.zeros(active.shape[1], num_changes, device=device)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory, without `counts` and `active`."""
        return sum(table.nbytes for table in (self.codes, self.params, self.groups, self.changes))

    def writes(self, changed: ProgramWrites) -> list[Write]:
        """Return the writes of changed rows' entries, each of a size that can be sent."""
        chunks = (slice(start, start + ENTRIES) for start in range(0, len(changed.places), ENTRIES))
        entries = changed.places, changed.codes, changed.params
        return [Write(self._write, tuple(array[chunk] for array in entries)) for chunk in chunks]

    def write_groups(self, groups: Int64Array) -> Write:
        """Return the write of the position groups of a step's batch rows."""
        return Write(self.groups[: len(groups)].copy_, (groups,))

    def _write(self, places: Tensor, codes: Tensor, params: Tensor) -> None:
        self.codes.view(-1, NUM_CODES).index_copy_(0, places, codes)
        self.params.view(-1, NUM_PARAMS).index_copy_(0, places, params)


class EncodedRows:
    """The rows of each step that SAEs encode: to reconstruct them, or to edit selected features. Step thread only.

    Args:
        saes: By the index of the op site.
        num_rows: R.
        max_entries: E.
    """

    def __init__(self, saes: Mapping[int, EncodedSae], num_rows: int, max_entries: int) -> None:
        self._saes = saes
        self._num_rows = num_rows
        self._max_entries = max_entries
        self._marks = {index: np.zeros((2, num_rows), np.bool_) for index in saes}
        """Which table rows have an entry `Code.RECONSTRUCT`, and which have any that needs encoding, at each site."""
        self._has_any = False
        self._first: npt.NDArray[Any] = _NO_TOKENS
        """Batch rows of the step that are at position 0."""
        self._listed = dict.fromkeys(saes, 0)

    def note(self, rows: Int64Array, changed: ProgramWrites) -> None:
        """Note the programs of `rows`, int64 ``[K]``, which changed."""
        if not self._saes:
            return
        codes = changed.codes[:, CODE]
        is_made = codes & CODE_MASK == Code.RECONSTRUCT
        is_encoded = is_made | (codes & (CODE_MASK | ACTIVATION_MASK) == Code.FEATURE | FeatureActivation.SELECTED)
        sites, marked = np.divmod(changed.places // self._max_entries, self._num_rows)
        for index, marks in self._marks.items():
            marks[:, rows] = False
            for mark, has_entry in zip(marks, (is_made, is_encoded), strict=True):
                mark[marked[has_entry & (sites == index)]] = True
        self._has_any = any(marks.any() for marks in self._marks.values())

    def follow(self, view: BatchView | None) -> bool:
        """Note which batch rows of a step are at position 0; return whether lists have to be written for that."""
        if not self._saes:
            return False
        earlier = self._first
        self._first = _NO_TOKENS if view is None else view.starts[(view.num_computed == 0) & (view.num_scheduled > 0)]
        return self._has_any and not np.array_equal(earlier, self._first)

    def writes(self, rows: Int32Array) -> list[Write]:
        """Return the writes of the lists of a step whose batch rows have the table rows `rows`, int32 ``[n]``.

        Reconstructed rows stand first, but of these the rows at position 0 last: they do not count towards figures.
        """
        made = []
        for index, listed in self._listed.items():
            is_made, is_encoded = self._marks[index][:, rows]
            tokens = np.flatnonzero(is_encoded).astype(np.int32) if self._has_any else _NO_TOKENS
            if len(tokens) or listed:
                kind = np.where(is_made[tokens], np.isin(tokens, self._first), 2)
                tokens = tokens[np.argsort(kind, kind="stable")]
                counts = np.array([len(tokens), np.sum(kind < 1), np.sum(kind < 2)], np.int32)
                sae = self._saes[index]
                made.append(Write(sae.num_tokens.copy_, (counts,)))
                if len(tokens):
                    made.append(Write(sae.tokens[: len(tokens)].copy_, (tokens,)))
                self._listed[index] = len(tokens)
        return made


class DeviceTables:
    """Static memory that the traced forward reads; nothing in it moves. Step thread only.

    Args:
        num_sites: S.
        num_slots: P.
        num_rows: R.
        max_tokens: T, the upper limit.
        hidden_size: D, the width of the widest site's vectors.
        dtype: The model's.
        device: Where the forward runs.
        num_op_sites: O.
        max_entries: E.
        num_changes: K.
        saes: Encoded SAEs, by the index of the op site.
        gates: The gates' tensors; None where there can be no gates.

    Attributes:
        pool: ``[P, D]``: the vectors; slot 0 stays zero.
        slots: int32 ``[S, T]``: slot of each batch row at each site, resolved once a step.
        rows: int32 ``[T]``: table row of each batch row.
        programs: The programs; None without op sites.
        saes: As given.
        gates: As given.
    """

    def __init__(
        self,
        *,
        num_sites: int,
        num_slots: int,
        num_rows: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_op_sites: int = 0,
        max_entries: int = 0,
        num_changes: int = 0,
        saes: Mapping[int, EncodedSae] = _NO_SAES,
        gates: GateTensors | None = None,
    ) -> None:
        self.pool = torch.zeros(num_slots, hidden_size, dtype=dtype, device=device)
        # Programs' counts lie after the slots, in both tables, so that one launch resolves both.
        self._resolved = torch.zeros(num_sites + num_op_sites, max_tokens, dtype=torch.int32, device=device)
        self._map = torch.zeros(num_sites + num_op_sites, num_rows, dtype=torch.int32, device=device)
        self.slots = self._resolved[:num_sites]
        self.rows = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._extent = 0
        row_bytes = hidden_size * dtype.itemsize
        columns = (8 + self._map.element_size() * len(self._map)) * num_rows
        self._limit = max(UPLOAD_BYTES, row_bytes + 8, 16 * max_tokens, columns) + 4 * ALIGNMENT
        self._upload: Upload = CudaUpload(device, self._limit) if device.type == "cuda" else HostUpload()
        self._vectors_at_once = max(UPLOAD_BYTES // (row_bytes + 8), 1)
        self.programs: ProgramTables | None = None
        if num_op_sites:
            counts, active = self._map[num_sites:], self._resolved[num_sites:]
            self.programs = ProgramTables(counts, active, max_entries, num_changes)
        self.saes = saes
        self.gates = gates
        self._gate_updates = None if gates is None else GateUpdates(gates)
        self._encoded = EncodedRows(saes, num_rows, max_entries)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that all tables take."""
        own = sum(tensor.nbytes for tensor in (self.pool, self._resolved, self._map, self.rows))
        own += sum(sae.device_bytes for sae in self.saes.values())
        own += sum(tensor.nbytes for tensor in self.gates or ())
        return own if self.programs is None else own + self.programs.device_bytes

    def update(
        self,
        writes: TableWrites | None,
        step: StepRows,
        gates: GateWrites | None = None,
        view: BatchView | None = None,
    ) -> None:
        """Bring pool and map up to date and resolve the slots of a step, before its forward.

        Unchanged tables are left alone: while a batch decodes, this costs a few comparisons.

        Args:
            writes: Changes of pool and map.
            step: The rows of the step.
            gates: Changes of the gates' tensors.
            view: The step; None for dummy and idle ones.
        """
        count, is_stale = step.num_changed, writes is not None and len(writes.rows) > 0
        begins_elsewhere = self._encoded.follow(view)
        if not (count or begins_elsewhere) and writes is None and step.groups is None:
            self._update_gates(gates)
            return
        with inference_mode():
            made: list[Write] = []
            if count:
                self._extent = count
                made.append(Write(self.rows[:count].copy_, (step.rows[:count],)))
            if writes is not None:
                made += self._table_writes(writes)
            if step.groups is not None and self.programs is not None:
                made.append(self.programs.write_groups(step.groups))
            if count or is_stale or begins_elsewhere:
                made += self._encoded.writes(step.rows[: self._extent])
            if gates is not None and self._gate_updates is not None:
                made += self._gate_updates.writes(gates)
            self._apply(made)
            if count or is_stale:
                extent = self._extent
                self._resolved[:, :extent] = self._map.index_select(1, self.rows[:extent])

    def evaluate_again(self, op_sites: Iterable[int], gates: GateTensors) -> None:
        """Evaluate the gates of rows that a forward has scored, as it did; nothing is added to the stream.

        Args:
            op_sites: Indices of the sites, whose order does not matter.
            gates: Rows without `TokenFlag.IS_SCANNED` are left out.
        """
        if self.programs is None:
            raise AssertionError("gates without tables of programs")
        evaluate = evaluate_scored
        if gates.states.device.type == "cuda":
            from headgate.steering.kernels.scan_gates import scan_scored as evaluate
        end = len(gates.tokens)
        for index in op_sites:
            programs = self.programs
            tables = self.rows[:end], programs.active[index][:end], programs.codes[index], programs.params[index]
            evaluate(tables, gates)

    def _update_gates(self, gates: GateWrites | None) -> None:
        """Bring the gates' tensors up to date in a step that changes nothing else."""
        if gates is None or self._gate_updates is None:
            return
        with inference_mode():
            if not self._gate_updates.write_again(gates):
                self._apply(self._gate_updates.writes(gates))

    def _table_writes(self, writes: TableWrites) -> list[Write]:
        made = []
        if (changed := writes.slots) is not None:
            for start in range(0, len(changed.slots), self._vectors_at_once):
                chunk = slice(start, start + self._vectors_at_once)
                made.append(Write(self._write_vectors, (changed.slots[chunk], changed.vectors[chunk])))
        if len(writes.rows):
            columns = writes.columns
            if self.programs is not None and writes.programs is not None:
                columns = np.concatenate((columns, writes.programs.counts))
                made += self.programs.writes(writes.programs)
                self._encoded.note(writes.rows, writes.programs)
            made.append(Write(self._write_columns, (writes.rows, columns)))
        return made

    def _apply(self, writes: Sequence[Write]) -> None:
        """Send and make `writes`, as many at a time as can be sent together: mostly that is all of them."""
        if len(writes) == 1:
            self._send(writes)
            return
        waiting: list[Write] = []
        size = 0
        for write in writes:
            more = packed_size(write.arrays)
            if size + more > self._limit:
                self._send(waiting)
                waiting, size = [], 0
            waiting.append(write)
            size += more
        self._send(waiting)

    def _send(self, writes: Sequence[Write]) -> None:
        if not writes:
            return
        sent = iter(self._upload.send([array for write in writes for array in write.arrays]))
        for apply, arrays in writes:
            apply(*islice(sent, len(arrays)))

    def _write_vectors(self, slots: Tensor, vectors: Tensor) -> None:
        self.pool.index_copy_(0, slots, vectors.view(self.pool.dtype))

    def _write_columns(self, rows: Tensor, columns: Tensor) -> None:
        self._map.index_copy_(1, rows, columns)
