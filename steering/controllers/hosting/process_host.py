"""Controllers in a process of their own, as the engine core sees them.

Their Python then takes nothing of the interpreter that also schedules and launches steps, and finds its caches warm.
Steps in which the same requests generate on are not sent: the forward tells their scores, and the engine core counts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headgate.steering.controllers.actions import Action, SetSteeringEach
from headgate.steering.controllers.controller_thread import ControllerFigures
from headgate.steering.controllers.hosting.controller_process import ControllerProcess
from headgate.steering.controllers.hosting.host import Answers, SwitchedOff
from headgate.steering.controllers.hosting.messages import (
    HAS_ORDER,
    MAX_REQUESTS,
    REPEATS,
    TOKEN_STEPS,
    Answer,
    AskFigures,
    Attach,
    Attached,
    End,
    Figures,
    NewRequest,
    SameRequests,
    Start,
    Step,
)
from headgate.steering.controllers.hosting.step_reader import TokensOf
from headgate.steering.controllers.hosting.told_words import ToldPlace, ToldRowsOfStep
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.gates.step_table import StepTable

logger = logging.getLogger("headgate")

FIGURES_S = 1.0
"""Seconds that somebody who asks for figures waits at most; then he gets the last ones."""
MAX_BEHIND = 64
"""Steps that may be under way to the process; further ones are skipped."""
_MAX_TOLD_BEHIND = TOKEN_STEPS - 2
"""The same of steps that the forward tells: soon after that, the next ones take their place."""


@dataclass(slots=True)
class _Sent:
    """Tokens of a request, and how many of them the process has."""

    tokens: Sequence[int]
    count: int = 0


@dataclass(slots=True)
class _Told:
    """Requests of a step behind which the forward tells the steps.

    Attributes:
        requests: Those whose tokens are told, each with its place and the position of its row there.
        num_steps: Steps since.
    """

    requests: list[tuple[int, int, _Sent]]
    num_steps: int = 0

    def settle(self) -> None:
        """Count the tokens that the process got beside messages."""
        for _, _, sent in self.requests:
            sent.count += self.num_steps
        self.requests = [(at, first + self.num_steps, sent) for at, first, sent in self.requests]
        self.num_steps = 0


class ProcessHost:
    """Implements `headgate.steering.controllers.hosting.host.ControllerHost`.

    Args:
        specs: The controllers.
        tokens_of: Gives the tokens of requests.
        scores: The columns of all scores in the signals of steps.
        counts: Those of the counts with which they are told.
        ask_aloud: Has the workers send the next step's scores, whatever they tell otherwise.

    Raises:
        ConfigError: If a controller cannot be made, or the process does not start.
    """

    def __init__(
        self,
        specs: Sequence[ControllerSpec],
        tokens_of: TokensOf,
        scores: slice,
        counts: slice,
        ask_aloud: Callable[[], object],
    ) -> None:
        self._tokens_of = tokens_of
        self._score_columns, self._count_columns = scores, counts
        self._ask_aloud = ask_aloud
        self._lock = threading.Lock()
        self._process = ControllerProcess(specs)
        self.loaded = self._process.loaded.controllers
        self._needs_tokens = any(each.needs_tokens for each in self.loaded.values())
        self._new: dict[str, NewRequest] = {}
        """Requests of which no step was sent."""
        self._sent: dict[str, _Sent] = {}
        """All others."""
        self._told: _Told | None = None
        self._num_skipped = 0
        self._answers = _Answers(self._process, self.loaded)

    def attach(self, place: ToldPlace) -> bool:
        """Let the process read what forwards tell in a worker's memory; returns whether it can."""
        if not HAS_ORDER or place.num_slots > 2 * MAX_REQUESTS:
            return False
        self._process.send(Attach(place=place))
        answer = self._process.receive()
        if isinstance(answer, Attached) and answer.error is not None:
            logger.info("steering: controllers cannot read the worker's memory: %s", answer.error)
        return isinstance(answer, Attached) and answer.error is None

    def start(self, scores: Mapping[str, Mapping[str, int]]) -> None:
        """See `ControllerHost.start`."""
        self._process.send(Start(scores={name: dict(numbers) for name, numbers in scores.items()}))

    def add(self, req_id: str, num_prompt: int, acting: Sequence[str]) -> None:
        """See `ControllerHost.add`."""
        self._new[req_id] = NewRequest(req_id, num_prompt, tuple(acting))

    def end(self, req_id: str) -> None:
        """See `ControllerHost.end`."""
        with self._lock:
            self._new.pop(req_id, None)
            if (sent := self._sent.pop(req_id, None)) is not None and self._process.lost is None:
                self._settle_tokens()
                tokens = list(sent.tokens[sent.count :])
                self._process.send(End(behind=self._process.num_steps, req_id=req_id, tokens=tokens))

    def read(self, step: StepTable, discarded: Collection[str]) -> None:
        """See `ControllerHost.read`."""
        with self._lock:
            self._settle_tokens()
            self._told = None
            if self._process.lost is not None or self._process.num_behind >= MAX_BEHIND:
                self._num_skipped += 1
                return
            begins = [new for req_id in step.ids if (new := self._new.pop(req_id, None)) is not None]
            for new in begins:
                self._sent[new.req_id] = _Sent(self._tokens_of(new.req_id) or ())
            told = None
            if step.slots is not None:
                told = ToldRowsOfStep(step.slots, step.signals[:, self._count_columns].astype(np.int64))
                self._told = self._told_behind(step)
            message = Step(
                number=self._process.num_steps + 1,
                table=step._replace(signals=step.signals[:, self._score_columns].copy(), slots=None),
                discarded=frozenset(discarded),
                told=told,
                begins=begins,
                tokens=self._further_tokens(step.ids),
            )
            self._process.send(message)
            self._process.count_step()

    def read_quiet(self) -> None:
        """See `ControllerHost.read_quiet`."""
        with self._lock:
            told = self._told
            if self._process.lost is not None:
                self._num_skipped += 1
                return
            if told is None or self._process.num_behind > _MAX_TOLD_BEHIND:
                # What follows would be lost among the steps that are not counted.
                self._settle_tokens()
                self._told = None
                self._num_skipped += 1
                self._ask_aloud()
                return
            told.num_steps += 1
            self._process.count_step()

    def take(self) -> Answers:
        """See `ControllerHost.take`."""
        self._process.await_done()
        found = self._answers.take(self._sent)
        if self._needs_tokens and self._told is not None:
            self._tell_tokens(self._told)
        return found

    def figures(self) -> dict[str, ControllerFigures]:
        """See `ControllerHost.figures`."""
        found = self._answers.ask_figures()
        skipped, lost = self._num_skipped, self._process.lost
        return {
            name: replace(each, skipped=each.skipped + skipped, error=each.error or lost)
            for name, each in found.items()
        }

    def _told_behind(self, step: StepTable) -> _Told:
        positions = enumerate(zip(step.ids, step.firsts.tolist(), strict=True))
        found = [(at, first, sent) for at, (one, first) in positions if (sent := self._sent.get(one)) is not None]
        return _Told(found)

    def _settle_tokens(self) -> None:
        if self._told is not None and self._needs_tokens:
            self._told.settle()

    def _further_tokens(self, req_ids: Sequence[str]) -> dict[str, Sequence[int]]:
        """Return the tokens of requests that the process does not have; they count as sent."""
        found: dict[str, Sequence[int]] = {}
        for req_id in req_ids:
            sent = self._sent.get(req_id)
            if sent is not None and (more := list(sent.tokens[sent.count :])):
                found[req_id] = more
                sent.count += len(more)
        return found

    def _tell_tokens(self, told: _Told) -> None:
        """Tell the tokens of the rows of the next step, in case that it will be told by the forward."""
        behind = told.num_steps + 1
        row = self._process.board.tokens[(self._process.num_steps + 1) % TOKEN_STEPS]
        for at, first, sent in told.requests:
            tokens, position = sent.tokens, first + behind
            row[at] = tokens[position] if position < len(tokens) else -1


class _Answers:
    """Takes the answers of the process, in their order.

    Args:
        process: The process.
        names: Of its controllers.
    """

    def __init__(self, process: ControllerProcess, names: Collection[str]) -> None:
        self._process = process
        self._figures = {name: ControllerFigures() for name in names}
        self._taken = Answers()
        self._num_repeats = 0
        self._last_requests: tuple[str, ...] = ()
        self._last_one: tuple[str, str] = ("", "")
        """Controller and module of the last action for these."""
        self._has_lost = False

    def take(self, told_of: Collection[str]) -> Answers:
        """Return the answers that are there.

        Args:
            told_of: Requests that the process was told of.
        """
        if self._num_repeats < self._process.board.words[REPEATS]:
            self._take_repeats()
        while self._process.has_answers:
            self._take_one()
        if self._process.lost is not None and not self._has_lost:
            self._has_lost = True
            on = [name for name, figures in self._figures.items() if figures.error is None]
            self._taken.switched_off += [SwitchedOff(name, self._process.lost, tuple(told_of)) for name in on]
        found, self._taken = self._taken, Answers()
        return found

    def ask_figures(self) -> Mapping[str, ControllerFigures]:
        """Return the present figures; the last ones if the process does not answer soon."""
        if self._process.lost is None:
            self._process.send(AskFigures())
            before = self._figures
            while self._figures is before and self._process.await_answer(FIGURES_S):
                self._take_one()
        return self._figures

    def _take_one(self) -> None:
        answer = self._process.receive()
        if isinstance(answer, Figures):
            self._figures = dict(answer.figures)
        elif isinstance(answer, Answer):
            if answer.requests is not None:
                self._last_requests = answer.requests
            self._taken.actions += [(name, self._unpacked(name, action)) for name, action in answer.actions]
            self._taken.switched_off += answer.switched_off
            for off in answer.switched_off:
                self._figures[off.controller].error = off.error

    def _take_repeats(self) -> None:
        """Take the last action once more, with other scales, as often as it was said."""
        board = self._process.board
        while self._num_repeats < board.words[REPEATS]:
            row = (self._num_repeats + 1) % TOKEN_STEPS
            size, has_places, num_answers = board.repeats[row].tolist()
            while self._process.num_answers < num_answers:
                self._take_one()
            at = board.places[row, :size].copy() if has_places else None
            controller, module = self._last_one
            again = SetSteeringEach(self._last_requests, module, board.scales[row, :size].copy(), at)
            self._taken.actions.append((controller, again))
            self._num_repeats += 1

    def _unpacked(self, controller: str, action: Action | SameRequests) -> Action:
        if isinstance(action, SameRequests):
            self._last_one = controller, action.module
            return SetSteeringEach(self._last_requests, action.module, action.scales, action.at)
        return action
