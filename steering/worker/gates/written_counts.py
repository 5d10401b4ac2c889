"""How many rows the gates of requests wrote: counted on the device, in their states, and copied when somebody asks.

So nothing of a step is read for requests of which nobody wants to know more. Step thread only, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from headgate.steering.gates.step_table import ToldCounts
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.pinned_copies import PinnedCopies, PinnedCopy
from headgate.steering.worker.gates.requests import GatedRequest, GateSlots
from headgate.steering.worker.tables.uploads import inference_mode


@dataclass(frozen=True, slots=True, eq=False)
class CountPiece:
    """The states of a request, at a moment: `ToldCounts` that may be on the way to the host."""

    req_id: str
    states: PinnedCopy | Float32Rows
    is_last: bool
    has_ended: bool

    @property
    def is_there(self) -> bool:
        """Whether `told` waits for nothing."""
        return not isinstance(self.states, PinnedCopy) or self.states.is_there

    def told(self) -> ToldCounts:
        """Return it as it is told to the engine core. To be called once; waits for the copy. Any thread."""
        states = self.states.take() if isinstance(self.states, PinnedCopy) else self.states
        return ToldCounts(self.req_id, states, self.is_last, self.has_ended)


class WrittenCounts:
    """Reads the counts of requests whose rows are not told, until the engine core is told of them.

    Args:
        states: float32 ``[Q, C]``: of the gates, as the forward writes them.
        copies: Makes the copies; None where the states are on the host.
        slots: Of the states. What is in one is read here before another request gets it.
        requests: Those with gates, by id, as they are now.
    """

    def __init__(
        self, states: Tensor, copies: PinnedCopies | None, slots: GateSlots, requests: Mapping[str, GatedRequest]
    ) -> None:
        self._states = states
        self._copies = copies
        self._slots = slots
        self._requests = requests
        self._pieces: list[CountPiece] = []
        slots.on_loss = self.read_last

    def read_last(self, req_id: str, *, has_ended: bool = False) -> None:
        """Read the counts of a request behind what was launched, before they begin anew."""
        self._read(req_id, is_last=True, has_ended=has_ended)

    def take(self) -> Sequence[CountPiece]:
        """Take everything that was read."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def ask(self) -> list[ToldCounts]:
        """Return what was read and is there. Of requests that run, the rest comes with a later step.

        While none runs there may be no later step: then everything is waited for.
        """
        running = [req_id for req_id in self._requests if self._read(req_id, is_last=False)]
        there = [piece for piece in self._pieces if not running or piece.is_there]
        self._pieces = [piece for piece in self._pieces if piece not in there]
        return [piece.told() for piece in there]

    def _read(self, req_id: str, *, is_last: bool, has_ended: bool = False) -> bool:
        """Read the counts of a request, if it has any."""
        request, slot = self._requests.get(req_id), self._slots.find(req_id)
        if request is None or not request.is_counted or slot is None:
            return False
        with inference_mode():
            states = self._states[slot]
            found = states.numpy().copy() if self._copies is None else self._copies.start(states)
        self._pieces.append(CountPiece(req_id, found, is_last, has_ended))
        return True
