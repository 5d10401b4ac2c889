"""How many rows the gates of requests wrote: counted on the device, in their states, and copied when somebody asks.

So nothing of a step is read for requests of which nobody wants to know more. Step thread only, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from headgate.steering.gates.step_table import ToldCounts
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.pinned_copies import PinnedCopies, PinnedCopy, sent
from headgate.steering.worker.gates.requests import GatedRequest, GateSlots
from headgate.steering.worker.tables.uploads import inference_mode


@dataclass(frozen=True, slots=True, eq=False)
class CountPiece:
    """`ToldCounts` of some requests, on the way to the host or there: states float32 ``[n, columns]``, one of each."""

    req_ids: Sequence[str]
    states: PinnedCopy | Float32Rows
    is_last: bool
    has_ended: bool

    @property
    def is_there(self) -> bool:
        """Whether `told` waits for nothing."""
        return not isinstance(self.states, PinnedCopy) or self.states.is_there

    def told(self) -> list[ToldCounts]:
        """Return it as it is told to the engine core. To be called once; waits for the copy. Any thread."""
        states = self.states.take() if isinstance(self.states, PinnedCopy) else self.states
        return [
            ToldCounts(req_id, each, self.is_last, self.has_ended)
            for req_id, each in zip(self.req_ids, states, strict=True)
        ]


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
        slots.on_loss.append(self.read_last)

    def read_last(self, req_id: str, *, has_ended: bool = False) -> None:
        """Read the counts of a request behind what was launched, before they begin anew."""
        if (slot := self._slot_of(req_id)) is not None:
            with inference_mode():
                self._read([req_id], self._states[slot : slot + 1], is_last=True, has_ended=has_ended)

    def take(self) -> Sequence[CountPiece]:
        """Take everything that was read."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def ask(self) -> list[ToldCounts]:
        """Return what was read and is there. Of requests that run, the rest comes with a later step.

        While none runs there may be no later step: then everything is waited for.
        """
        running = {req_id: slot for req_id in self._requests if (slot := self._slot_of(req_id)) is not None}
        if running:
            with inference_mode():
                index = sent(np.array([*running.values()], np.int64), self._states.device)
                self._read([*running], self._states[index], is_last=False, has_ended=False)
        there = [piece for piece in self._pieces if not running or piece.is_there]
        self._pieces = [piece for piece in self._pieces if piece not in there]
        return [told for piece in there for told in piece.told()]

    def _slot_of(self, req_id: str) -> int | None:
        """Return the slot of a request that counts; None if it has none."""
        request = self._requests.get(req_id)
        return self._slots.find(req_id) if request is not None and request.is_counted else None

    def _read(self, req_ids: Sequence[str], states: Tensor, *, is_last: bool, has_ended: bool) -> None:
        found = states.numpy().copy() if self._copies is None else self._copies.start(states)
        self._pieces.append(CountPiece(req_ids, found, is_last, has_ended))
