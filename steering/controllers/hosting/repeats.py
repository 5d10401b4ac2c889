"""Answers of the process of the controllers, as they travel: most of them are the last one with other scales.

Those cost no message. Where forwards hear (`Code.HEAR`), the scales are also written where the next ones find them, so
that the engine core may leave them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headgate.capture.schema.batch import Float64Array, Int32Array, Int64Array
from headgate.steering.controllers.actions import Action, SetSteeringEach, are_places
from headgate.steering.controllers.hosting.host import Answers
from headgate.steering.controllers.hosting.messages import (
    ANSWERS,
    HAS_ORDER,
    MAX_REQUESTS,
    REPEATS,
    STEPS,
    TOKEN_STEPS,
    Answer,
    Board,
    Repeated,
    SameRequests,
)
from headgate.steering.controllers.hosting.told_words import ToldWords
from headgate.steering.programs.gate_codes import HEARD_POSITION_BITS, MAX_EPOCH
from headgate.steering.vectors.sums import MAX_STRENGTH


class ActingRows(Protocol):
    """Requests of steps that the forward tells, and the rows on which what is decided behind such a step acts."""

    def find(self, req_ids: Sequence[str]) -> Int64Array | None:
        """Return the places of some requests, int64 ``[n]``; None if one is not there."""
        ...

    def slots(self, places: Int64Array) -> Int32Array:
        """Return the slots of requests, by their places."""
        ...

    def positions(self, places: Int64Array) -> Int64Array:
        """Return the positions of their first rows on which a decision behind the last step acts."""
        ...


class Repeats:
    """Packs answers, and says those without a message that need none.

    Args:
        board: Shared with the engine core.
    """

    def __init__(self, board: Board) -> None:
        self._board, self._words = board, board.words
        self._requests: tuple[str, ...] = ()
        """Of the last action, or the one before."""
        self._one: tuple[str, str] | None = None
        """Controller and module of the last action for these, if it came by itself."""
        self._num_actions = 0
        """Scales in all repeats."""
        self._epoch = 0
        """Counts the actions that may be repeated; forwards listen to those of one."""
        self._num_repeats = self._num_packed = 0
        """Of this epoch, and of the one before the last answer."""
        self._is_heard = False
        """Whether forwards could hear all of them."""
        self._places: tuple[ActingRows | None, Int64Array] = (None, np.empty(0, np.int64))
        self._scales: Float64Array = board.current[:0]
        """Of the requests, as they were said last in this epoch; NaN for those that were not."""

    def pack(self, answers: Answers) -> Answer:
        """Return answers as they travel: the requests of most actions are those of the last ones."""
        before = None
        if self._num_repeats:
            before = Repeated(self._words[REPEATS], self._scales.copy())
        requests: tuple[str, ...] | None = None
        actions: list[tuple[str, Action | SameRequests]] = []
        has_same = False
        for name, action in answers.actions:
            if isinstance(action, SetSteeringEach) and isinstance(action.requests, tuple):
                if action.requests is not self._requests and not has_same:
                    requests = self._requests = action.requests
                if action.requests is self._requests:
                    has_same = True
                    actions.append((name, SameRequests(action.module, action.scales, action.at)))
                    continue
            actions.append((name, action))
        (name, last) = actions[0] if len(actions) == 1 else ("", None)
        self._one = (name, last.module) if isinstance(last, SameRequests) else None
        self._num_packed, self._num_repeats = self._num_repeats, 0
        self._places = None, self._places[1]
        return Answer(requests=requests, actions=actions, switched_off=answers.switched_off, before=before)

    def forget(self) -> None:
        """Follow the loss of the answer that was packed last."""
        self._requests, self._num_repeats = (), self._num_packed

    def say(
        self, number: int, actions: Sequence[tuple[str, Action]], rows: ActingRows | None, memory: ToldWords | None
    ) -> bool:
        """Say the last action once more, with other scales, if that is all; returns whether it was.

        Not while the engine core is ahead: it might not have taken the repeats before.

        Args:
            number: Of the step.
            actions: That came of it, each with its controller's name.
            rows: Of the step, if forwards tell the next ones.
            memory: Of the worker; None if forwards hear nothing there.
        """
        name, action = actions[0]
        if not HAS_ORDER or len(actions) > 1 or not isinstance(action, SetSteeringEach) or self._words[STEPS] != number:
            return False
        if action.requests is not self._requests or (name, action.module) != self._one:
            return False
        at, scales, size = action.at, action.scales, len(action.scales)
        if not _is_array(scales, "f8") or not (at is None or (_is_array(at, "i8") and len(at) == size)):
            return False
        most = len(self._requests)
        if most > MAX_REQUESTS or not (size == most if at is None else are_places(at, most)):
            return False  # the engine core says what is wrong with it
        begins = not self._num_repeats or (not self._is_heard and rows is not None and memory is not None)
        if begins:
            self._epoch = self._epoch % MAX_EPOCH + 1
        is_heard = self._write(scales, at, rows, memory, begins=begins)
        if begins:
            self._num_repeats, self._is_heard = 0, is_heard
            self._scales = self._board.current[: len(self._requests)]
            self._scales[:] = np.nan
        elif self._is_heard and not is_heard:
            return False
        self._put(size, scales, at)
        return True

    def _put(self, size: int, scales: Float64Array, at: Int64Array | None) -> None:
        board, words = self._board, self._words
        row = (words[REPEATS] + 1) % TOKEN_STEPS
        board.scales[row, :size] = scales
        if at is not None:
            board.places[row, :size] = at
        self._num_actions += size
        board.repeats[row] = size, at is not None, words[ANSWERS], self._epoch * self._is_heard, self._num_actions
        self._scales[slice(None) if at is None else at] = scales
        self._num_repeats += 1
        words[REPEATS] += 1

    def _write(
        self,
        scales: Float64Array,
        at: Int64Array | None,
        rows: ActingRows | None,
        memory: ToldWords | None,
        *,
        begins: bool,
    ) -> bool:
        """Let forwards hear scales; returns whether they can."""
        if rows is None or memory is None:
            return False
        if self._places[0] is not rows:
            places = rows.find(self._requests)
            if places is None:
                return False
            self._places = rows, places
        places = self._places[1]
        if begins:
            memory.clear(rows.slots(places))
        if at is not None:
            places = places[at]
        positions = rows.positions(places)
        if positions.max(initial=0) >> HEARD_POSITION_BITS or not (np.abs(scales) <= MAX_STRENGTH).all():
            return False
        memory.write(rows.slots(places), self._epoch, positions, scales.astype(np.float32))
        return True


def _is_array(values: object, kind: str) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == kind
