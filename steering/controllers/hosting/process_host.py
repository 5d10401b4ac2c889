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

from headgate.capture.engine.contracts.core_part import Progress
from headgate.steering.controllers.controller_thread import ControllerFigures
from headgate.steering.controllers.hosting.answer_reader import AnswerReader
from headgate.steering.controllers.hosting.controller_process import ControllerProcess
from headgate.steering.controllers.hosting.host import Answers, HeardAnswers
from headgate.steering.controllers.hosting.messages import (
    HAS_ORDER,
    MAX_REQUESTS,
    TOKEN_STEPS,
    Attach,
    Attached,
    End,
    NewRequest,
    Start,
    Step,
)
from headgate.steering.controllers.hosting.told_words import ToldPlace, ToldRowsOfStep
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.gates.step_table import StepTable

logger = logging.getLogger("headgate")

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
        progress: Tells how far requests are; None for one that has ended.
        scores: The columns of all scores in the signals of steps.
        counts: Those of the counts with which they are told.
        ask_aloud: Has the workers send the next step's scores, whatever they tell otherwise.

    Raises:
        ConfigError: If a controller cannot be made, or the process does not start.
    """

    def __init__(
        self,
        specs: Sequence[ControllerSpec],
        progress: Callable[[str], Progress | None],
        scores: slice,
        counts: slice,
        ask_aloud: Callable[[], object],
    ) -> None:
        self._progress = progress
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
        self._ahead = 0
        """How many rows further on a decision behind a step of which the forward tells acts."""
        self._answers = AnswerReader(self._process, self.loaded, self._acts_from)
        self.heard: HeardAnswers | None = None

    def attach(self, place: ToldPlace, *, is_alone: bool) -> bool:
        """Let the process read what forwards tell in a worker's memory; returns whether it can.

        Args:
            place: Of the memory.
            is_alone: Whether no other worker has to follow what this one hears.
        """
        if not HAS_ORDER or place.num_slots > 2 * MAX_REQUESTS:
            return False
        self._process.send(Attach(place=place))
        answer = self._process.receive()
        if isinstance(answer, Attached) and answer.error is not None:
            logger.info("steering: controllers cannot read the worker's memory: %s", answer.error)
        is_attached = isinstance(answer, Attached) and answer.error is None
        if is_attached and is_alone:
            self.heard = self._answers
        return is_attached

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
                progress = self._progress(new.req_id)
                self._sent[new.req_id] = _Sent(() if progress is None else progress.token_ids)
            told, self._ahead = None, 0
            if step.slots is not None:
                told = ToldRowsOfStep(step.slots, step.signals[:, self._count_columns].astype(np.int64))
                self._told = self._told_behind(step)
                if self.heard is not None and (progress := self._progress(step.ids[0])) is not None:
                    self._ahead = progress.position - int(step.firsts[0])
            message = Step(
                number=self._process.num_steps + 1,
                table=step._replace(signals=step.signals[:, self._score_columns].copy(), slots=None),
                discarded=frozenset(discarded),
                told=told,
                begins=begins,
                tokens=self._further_tokens(step.ids),
                ahead=self._ahead,
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

    def _acts_from(self, req_id: str) -> int | None:
        """See `HeardAnswers.acts_from`."""
        told = self._told
        if told is None or not self._ahead:
            return None
        found = (first for _, first, sent in told.requests if sent is self._sent.get(req_id))
        first = next(found, None)
        return None if first is None else first + told.num_steps + self._ahead

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
