"""The writes into the tensors of gates that steps need before their forwards."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from headgate.capture.schema.batch import Int64Array
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.reference import GateTensors
from headgate.steering.worker.gates.step_gates import GateWrites
from headgate.steering.worker.tables.uploads import ENTRIES, Write
from headgate.steering.worker.tables.value_upload import value_upload


class GateUpdates:
    """Writes into the tensors of gates, before the forwards of steps. Step thread only.

    Args:
        gates: The tensors.
    """

    def __init__(self, gates: GateTensors) -> None:
        self._gates = gates
        self._signals, self._states = gates.signals.view(-1), gates.states.view(-1)
        self._places: tuple[Int64Array | None, Tensor] = (None, self._states)
        """Of the states that were written last, and the same on the device: mostly they are written again."""
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
