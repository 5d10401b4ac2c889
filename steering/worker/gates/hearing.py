"""Coefficients that the forward hears by itself, from somebody who writes them into its memory. Step thread only.

The engine core says whose and from which row on, and says when it ends. Until then nobody here knows what acts; the
forward notes it row by row (`Code.HEAR`), and it is read when rows are computed again, or before the notes are
overwritten. Numpy only.

Letters in shape comments: Q slots of requests, n requests that hear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.steering.gates.coefficient_changes import Hears
from headgate.steering.programs.gate_codes import HEARD_POSITION_BITS, HEARD_ROWS, HEARD_WORDS
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.driven import NOBODY, DrivenStrengths
from headgate.steering.worker.gates.driven_columns import Piece
from headgate.steering.worker.gates.requests import GatedBatch, GateRows

_COUNT_SHIFT = 32
_VALUE_MASK = (1 << _COUNT_SHIFT) - 1
_NO_SERIALS: Int64Array = np.empty(0, np.int64)
_NO_VALUES: Float32Rows = np.empty(0, np.float32)


class Listeners(NamedTuple):
    """Changes of `GateTensors.hearing`, to write before the next forward.

    Attributes:
        places: int64 ``[k]``: flat.
        values: int32 ``[k]``.
    """

    places: Int64Array
    values: Int32Array


class HeardRun:
    """Coefficients that some requests heard in one column, from a row of each on; implements `HeardPiece`.

    Args:
        words: int64 ``[Q, HEARD_WORDS + HEARD_ROWS]``: `GateTensors.heard`, as the host has it.
        wait: Waits for what was launched.
        order: Whom it is of.
        serials: int64 ``[n]``: serial numbers of the requests.
        slots: int64 ``[n]``.

    Attributes:
        order: As given.
        slots: As given.
        firsts: int64 ``[n]``: the position of the first row of each.
        ends: int64 ``[n]``: behind the last one of each so far.
        is_on: bool ``[n]``: those that hear on.
    """

    def __init__(
        self, words: Int64Array, wait: Callable[[], object], order: Hears, serials: Int64Array, slots: Int64Array
    ) -> None:
        self.order, self.slots = order, slots
        self.firsts, self.ends = order.firsts, order.firsts.copy()
        self.is_on = np.ones(len(slots), np.bool_)
        self._words, self._wait = words, wait
        self._serials = serials
        self._read: dict[int, Piece] = {}
        """Of requests whose notes may have been overwritten since, by serial number."""
        self._whole: Piece | None = None

    def rows_of(self, serial: int) -> tuple[Int64Array, Float32Rows]:
        """See `HeardPiece.rows_of`."""
        if self._whole is not None:
            return self._whole.rows_of(serial)
        if serial not in self._read:
            return self._noted(np.flatnonzero(self._serials == serial))[1:]
        return self._read[serial][1:]

    def piece(self) -> Piece | None:
        """See `HeardPiece.piece`."""
        if self._whole is None and not self.is_on.any():
            is_left = ~np.isin(self._serials, list(self._read))
            pieces = [*self._read.values(), self._noted(np.flatnonzero(is_left))]
            self._whole = Piece.joined(pieces, self._serials)
            self._read = {}
        return self._whole

    def turn_off(self, at: int) -> None:
        """Let a request hear no more, by its place; what it was to hear on its next rows acts on them all the same."""
        self.is_on[at] = False
        noted, first = self._noted(np.array([at])), int(self.ends[at])
        words = self._words[self.slots[at], :HEARD_WORDS]
        tags = words >> _COUNT_SHIFT
        positions = tags & (1 << HEARD_POSITION_BITS) - 1
        is_due = (tags >> HEARD_POSITION_BITS == self.order.epoch) & (positions >= first)
        due = np.flatnonzero(is_due)[np.argsort(positions[is_due])]
        serials = np.full(len(due), self._serials[at])
        following = Piece(serials, positions[due], _values_of(words[due]))
        self._read[int(self._serials[at])] = Piece.joined([noted, following], self._serials)

    def keep(self, req_id: str) -> None:
        """Read the notes of a request that hears no more: its slot will be another's."""
        if self._whole is None and req_id in self.order.req_ids:
            at = self.order.req_ids.index(req_id)
            serial = int(self._serials[at])
            if serial not in self._read:
                self._read[serial] = self._noted(np.array([at]))

    def forget(self, at: int) -> None:
        """Forget a request that has ended, by its place."""
        self.is_on[at], self.ends[at] = False, self.firsts[at]
        self._read.pop(int(self._serials[at]), None)

    def _noted(self, at: Int64Array) -> Piece:
        """Return what acted on the rows of some requests, by their places: the first of each, and where it changed."""
        length = int((self.ends - self.firsts)[at].max(initial=0))
        if not length:
            return Piece(_NO_SERIALS, _NO_SERIALS, _NO_VALUES)
        positions = self.firsts[at, None] + np.arange(length)
        is_row = positions < self.ends[at, None]
        places = self.slots[at, None], HEARD_WORDS + positions % HEARD_ROWS
        words = self._words[places]
        if (words >> _COUNT_SHIFT != positions)[is_row].any():
            self._wait()
            words = self._words[places]
            if (words >> _COUNT_SHIFT != positions)[is_row].any():
                raise AssertionError("what acted on rows of requests whose coefficients were heard is not known")
        values = _values_of(words)
        is_row[:, 1:] &= values[:, 1:] != values[:, :-1]
        serials = np.broadcast_to(self._serials[at, None], is_row.shape)
        return Piece(serials[is_row], positions[is_row], values[is_row])


def _values_of(words: Int64Array) -> Float32Rows:
    values: Float32Rows = (words & _VALUE_MASK).astype(np.uint32).view(np.float32)
    return values


class Hearing:
    """Which requests of a worker hear their coefficients.

    Args:
        words: int64 ``[Q, HEARD_WORDS + HEARD_ROWS]``: `GateTensors.heard`, as the host has it; None if nothing can be
            heard.
        num_driven: H: contents of which coefficients can be heard.
        wait: Waits for what was launched.
        driven: Follows the coefficients.
    """

    def __init__(
        self, words: Int64Array | None, num_driven: int, wait: Callable[[], object], driven: DrivenStrengths
    ) -> None:
        self._words, self._num_driven, self._wait = words, num_driven, wait
        self._driven = driven
        self._orders: list[Hears] = []
        self._run: HeardRun | None = None
        self._is_present = np.empty(0, np.bool_)
        """Which of its requests were in the last step."""
        self._num_behind = 0
        """Steps of the same requests since its `ends` were true."""
        self._ended: list[HeardRun] = []
        """Runs whose notes were not read."""
        self._written: dict[int, int] = {}
        """Numbers that the device is to have in `GateTensors.hearing` with the next step, by flat place."""

    @property
    def has_orders(self) -> bool:
        """Whether the next step has something to follow."""
        return bool(self._orders)

    def order(self, order: Hears) -> None:
        """Follow an order from the next step on.

        Raises:
            AssertionError: If nothing can be heard here.
        """
        if self._words is None:
            raise AssertionError("requests are to hear coefficients, and nothing can be heard here")
        self._orders.append(order)

    def go_on(self) -> None:
        """Follow a step of the same requests, one row of each, for which nothing was ordered."""
        self._num_behind += 1

    def follow(self, rows: GateRows, batch: GatedBatch, cleared: Sequence[int] = ()) -> None:
        """Follow a step, before its forward, and before `DrivenStrengths` follows it.

        Args:
            rows: Of the step.
            batch: Of the step.
            cleared: Slots whose states are forgotten before.
        """
        for run in self._ended if len(cleared) else ():
            for at in np.flatnonzero(np.isin(run.slots, cleared)).tolist():
                self._catch_up(run, at)
        if self._run is not None:
            self._run.ends[self._is_present & self._run.is_on] += self._num_behind
            self._check(self._run, rows, batch, cleared)
        self._num_behind = 0
        if self._orders:
            self._stop()

    def listeners(self, rows: GateRows, batch: GatedBatch, cleared: Sequence[int] = ()) -> Listeners | None:
        """Return what to write for the step, in which those hear from here on that were ordered to."""
        orders, self._orders = self._orders, []
        if orders and orders[-1].epoch:
            self._start(orders[-1], rows, batch, cleared)
        if self._run is not None:
            self._run.ends[self._is_present & self._run.is_on] += 1
        written, self._written = self._written, {}
        places, values = np.array(list(written), np.int64), np.array(list(written.values()), np.int32)
        return Listeners(places, values) if written else None

    def forget(self, req_id: str) -> None:
        """Forget a request that has ended."""
        for run in self._runs():
            if req_id in run.order.req_ids:
                at = run.order.req_ids.index(req_id)
                if run.is_on[at]:
                    self._written[self._place(run, at)] = 0
                run.forget(at)

    def lose(self, req_id: str) -> None:
        """Follow the loss of a request's slot: it has no step, and begins anew later."""
        run = self._run
        if run is not None and req_id in run.order.req_ids and run.is_on[at := run.order.req_ids.index(req_id)]:
            run.ends[at] += self._num_behind * self._is_present[at]
            self._turn_off(run, at)
        for each in self._runs():
            each.keep(req_id)

    def _runs(self) -> list[HeardRun]:
        return self._ended if self._run is None else [*self._ended, self._run]

    def _place(self, run: HeardRun, at: int) -> int:
        """Return the place of the epoch of a request, by its place in a run; behind it is that of its position."""
        return int((run.slots[at] * self._num_driven + run.order.listener) * 2)

    def _check(self, run: HeardRun, rows: GateRows, batch: GatedBatch, cleared: Sequence[int]) -> None:
        """Let those hear on that have one row, the next one, or none."""
        place_of = {req_id: place for place, req_id in enumerate(rows.req_ids)}
        gone = set(cleared)
        for at in np.flatnonzero(run.is_on).tolist():
            place = place_of.get(run.order.req_ids[at])
            self._is_present[at] = place is not None
            if place is None:
                continue
            slot = int(batch.slots[place])
            is_next = slot == run.slots[at] and slot not in gone and rows.firsts[place] == run.ends[at]
            if not is_next or rows.counts[place] != 1:
                self._turn_off(run, at)

    def _turn_off(self, run: HeardRun, at: int) -> None:
        self._written[self._place(run, at)] = 0
        run.turn_off(at)
        self._catch_up(run, at)

    def _catch_up(self, run: HeardRun, at: int) -> None:
        """Take over what a request heard that hears no more, if it runs."""
        driven = self._driven
        number, column = driven.numbers.get(run.order.req_ids[at]), driven.by_column.get(run.order.column)
        if number is not None and column is not None:
            column.catch_up(number, int(driven.serials[number]), run)

    def _stop(self) -> None:
        """Let all hear no more; what is to act on them from here on has come with the order, or comes later."""
        run, self._run = self._run, None
        if run is not None:
            self._written.update((self._place(run, at), 0) for at in np.flatnonzero(run.is_on).tolist())
            run.is_on[:] = False
            self._ended.append(run)

    def _start(self, order: Hears, rows: GateRows, batch: GatedBatch, cleared: Sequence[int]) -> None:
        """Let those hear whose row is the one that the order says."""
        for run in self._ended:
            run.piece()  # before its notes are overwritten
            for at in range(len(run.slots)):
                self._catch_up(run, at)
        self._ended = []
        place_of = {req_id: place for place, req_id in enumerate(rows.req_ids)}
        gone = set(cleared)
        members: list[int] = []
        slots: list[int] = []
        for at, (req_id, first) in enumerate(zip(order.req_ids, order.firsts.tolist(), strict=True)):
            place = place_of.get(req_id)
            if place is None or rows.firsts[place] != first or rows.counts[place] != 1:
                continue
            if (slot := int(batch.slots[place])) not in gone:
                members.append(at)
                slots.append(slot)
        if not members or self._words is None:
            return
        heard, slots_n = order.part(np.array(members, np.int64)), np.array(slots, np.int64)
        driven = self._driven
        numbers = np.array([driven.numbers.get(req_id, NOBODY) for req_id in heard.req_ids], np.int64)
        column = driven.by_column.get(heard.column)
        if column is None or not column.is_driven(numbers).all():
            raise AssertionError(f"requests are to hear coefficients in column {heard.column}, and have none there")
        self._run = run = HeardRun(self._words, self._wait, heard, driven.serials[numbers], slots_n)
        column.listen(numbers, slots_n, run)
        self._is_present = np.ones(len(slots), np.bool_)
        for index, first in enumerate(heard.firsts.tolist()):
            place = self._place(run, index)
            self._written[place], self._written[place + 1] = heard.epoch, first
