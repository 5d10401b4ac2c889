"""Answers of the process of the controllers, as the engine core takes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from headgate.steering.controllers.actions import Action, SetSteeringEach
from headgate.steering.controllers.controller_thread import ControllerFigures
from headgate.steering.controllers.hosting.controller_process import ControllerProcess
from headgate.steering.controllers.hosting.host import NO_ANSWERS, Answers, Repeat, SwitchedOff
from headgate.steering.controllers.hosting.messages import (
    REPEATS,
    TOKEN_STEPS,
    Answer,
    AskFigures,
    Figures,
    Repeated,
    SameRequests,
)

FIGURES_S = 1.0
"""Seconds that somebody who asks for figures waits at most; then he gets the last ones."""


class AnswerReader:
    """Takes the answers of the process, in their order.

    While the forward hears the repeats of the last action, they are left there. That ends when something else is to be
    done, in the very `take` that returns it: those that came since the one before are then taken like any others.

    Implements `headgate.steering.controllers.hosting.host.HeardAnswers`.

    Args:
        process: The process.
        names: Of its controllers.
        acts_from: As of `HeardAnswers`.
    """

    def __init__(
        self, process: ControllerProcess, names: Collection[str], acts_from: Callable[[str], int | None]
    ) -> None:
        self.acts_from = acts_from
        self._process = process
        self._figures = {name: ControllerFigures() for name in names}
        self._taken = Answers()
        self._num_repeats = self._num_actions = self._num_left = 0
        """Repeats that were taken, or left to the forward; the scales in them; and those left that nobody counted."""
        self._is_heard = self._has_left = False
        """Whether the forward hears further ones, and whether some were left to it."""
        self._is_to_settle = False
        self._last_requests: tuple[str, ...] = ()
        self._last_one: tuple[str, str] = ("", "")
        """Controller and module of the last action for these."""
        self._has_lost = False

    def begin(self) -> None:
        """See `HeardAnswers.begin`."""
        self._is_heard, self._has_left, self._is_to_settle = True, False, False

    def cancel(self) -> bool:
        """See `HeardAnswers.cancel`."""
        self._is_heard = self._is_heard and self._has_left
        return not self._is_heard

    def take_count(self) -> int:
        """See `HeardAnswers.take_count`."""
        found, self._num_left = self._num_left, 0
        return found

    def settle(self) -> None:
        """See `HeardAnswers.settle`."""
        self._is_to_settle = True

    def take(self, told_of: Collection[str]) -> Answers:
        """Return the answers that are there.

        Args:
            told_of: Requests that the process was told of.
        """
        process, words = self._process, self._process.board.words
        if self._is_heard and not process.has_answers:
            if process.lost is not None or (self._is_to_settle and not process.num_behind):
                self._settle(None)
            else:
                self._leave()
                return NO_ANSWERS
        while process.has_answers or (self._num_repeats < words[REPEATS] and not self._is_heard):
            if process.has_answers and (self._is_heard or self._num_repeats == words[REPEATS]):
                self._take_one()
            else:
                self._take_repeat()
        if self._process.lost is not None and not self._has_lost:
            self._has_lost = True
            on = [name for name, figures in self._figures.items() if figures.error is None]
            self._taken.switched_off += [SwitchedOff(name, self._process.lost, tuple(told_of)) for name in on]
        found, self._taken = self._taken, Answers()
        if len(found.actions) != 1:
            found.repeat = None
        return found

    def ask_figures(self) -> Mapping[str, ControllerFigures]:
        """Return the present figures; the last ones if the process does not answer soon."""
        if self._process.lost is None:
            self._process.send(AskFigures())
            before = self._figures
            while self._figures is before and self._process.await_answer(FIGURES_S):
                self._take_one()
        return self._figures

    def _leave(self) -> None:
        """Leave the repeats that have come to the forward."""
        board = self._process.board
        self._num_repeats = board.words[REPEATS]
        num_actions = int(board.repeats[self._num_repeats % TOKEN_STEPS, -1])
        self._num_left += num_actions - self._num_actions
        self._num_actions, self._has_left = num_actions, True

    def _settle(self, before: Repeated | None) -> None:
        """Take repeats again.

        Args:
            before: Those before the message that makes an end; None if there is none, and the process has no work.
        """
        scales = self._process.board.current if before is None else before.scales
        self._is_heard = self._is_to_settle = False
        self._taken.settled = scales[: len(self._last_requests)].copy()

    def _take_one(self) -> None:
        answer = self._process.receive()
        if isinstance(answer, Figures):
            self._figures = dict(answer.figures)
        elif isinstance(answer, Answer):
            if self._is_heard:
                self._settle(answer.before)
            while answer.before is not None and self._num_repeats < answer.before.num_repeats:
                self._take_repeat()
            if answer.requests is not None:
                self._last_requests = answer.requests
            self._taken.repeat = None
            self._taken.actions += [(name, self._unpacked(name, action)) for name, action in answer.actions]
            self._taken.switched_off += answer.switched_off
            for off in answer.switched_off:
                self._figures[off.controller].error = off.error

    def _take_repeat(self) -> None:
        """Take the last action once more, with other scales."""
        board = self._process.board
        row = (self._num_repeats + 1) % TOKEN_STEPS
        size, has_places, num_answers, epoch, num_actions = board.repeats[row].tolist()
        while self._process.num_answers < num_answers:
            self._take_one()
        at = board.places[row, :size].copy() if has_places else None
        controller, module = self._last_one
        again = SetSteeringEach(self._last_requests, module, board.scales[row, :size].copy(), at)
        self._taken.actions.append((controller, again))
        self._taken.repeat = Repeat(controller, self._last_requests, module, epoch) if epoch else None
        self._num_repeats += 1
        self._num_actions = num_actions

    def _unpacked(self, controller: str, action: Action | SameRequests) -> Action:
        if isinstance(action, SameRequests):
            self._last_one = controller, action.module
            return SetSteeringEach(self._last_requests, action.module, action.scales, action.at)
        return action
