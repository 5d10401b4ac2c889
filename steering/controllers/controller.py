"""`Controller`, which plug-ins derive from, and the views of requests and steps that it is given. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.probe import Probe
from headgate.steering.controllers.actions import Action


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestView:
    """A request, as controllers see it.

    Attributes:
        request: Its id in the engine; samples of one prompt have ids of their own.
        num_prompt_tokens: Tokens of its prompt.
        token_ids: Its tokens so far, the prompt's first.
    """

    request: str
    num_prompt_tokens: int
    token_ids: Sequence[int]


class ReadRow(NamedTuple):
    """One row of a step.

    Attributes:
        request: Id of its request.
        position: In the request, counted from 0.
        phase: ``prefill`` for a row of the prompt, ``decode`` for a generated one.
        token_id: The token at that position, whose row it is.
        scores: By the names of `Controller.probes`.
    """

    request: str
    position: int
    phase: str
    token_id: int
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReadings:
    """The rows of one step on which the controller acts, one request after the other; each row comes once.

    Rows that were read from the prefix cache do not come, and neither do rows that are computed again. While the same
    requests generate, steps have the same `requests`, the same tuple object: arrays are faster than `rows` there.

    Attributes:
        requests: Id of the request of each row, ``[n]``.
        positions: int64 ``[n]``.
        is_prompt: bool ``[n]``: whether a row is the prompt's.
        scores: float32 ``[n]`` by the names of `Controller.probes`.
        tokens: The tokens of the request of each row, ``[n]``; they grow with it.
    """

    requests: tuple[str, ...]
    positions: npt.NDArray[np.int64]
    is_prompt: npt.NDArray[np.bool_]
    scores: Mapping[str, npt.NDArray[np.float32]]
    tokens: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The token at each position, int64 ``[n]``."""
        found = (tokens[at] for tokens, at in zip(self.tokens, self.positions.tolist(), strict=True))
        return np.fromiter(found, np.int64, len(self.requests))

    def rows(self) -> Iterator[ReadRow]:
        """Yield the rows."""
        return map(self._row, range(len(self.requests)))

    def last_rows(self) -> Iterator[ReadRow]:
        """Yield the last row of each request."""
        num_rows = len(self.requests)
        for at, request in enumerate(self.requests):
            if at + 1 == num_rows or self.requests[at + 1] != request:
                yield self._row(at)

    def _row(self, at: int) -> ReadRow:
        position = int(self.positions[at])
        return ReadRow(
            self.requests[at],
            position,
            "prefill" if self.is_prompt[at] else "decode",
            int(self.tokens[at][position]),
            {name: float(scores[at]) for name, scores in self.scores.items()},
        )


class Controller:
    """Derive from this. All methods but the constructor are called on one thread, the controller's own if it may wait.

    A controller that raises is switched off, and so is one that takes longer than its ``budget_ms`` in several steps
    in a row; the engine lives on.

    Attributes:
        needs_prompts: Whether every row of a prompt is to be read: then prompts of requests on which it acts are not
            read from the prefix cache.
        needs_tokens: Whether the tokens of rows are looked at. One that says False gets the tokens of prompts, and
            of answers at their end; that spares the engine a little in each step.
        never_waits: Whether its methods return at once, since they compute with a few arrays alone: they wait for no
            lock, file, socket or other process. Then the engine calls them itself, which spares two changes of thread
            in each step, 0.1 ms. From its first step over the budget on it has a thread of its own; but one that never
            returns stops the engine.
    """

    needs_prompts: bool = False
    needs_tokens: bool = True
    never_waits: bool = False

    def probes(self) -> Mapping[str, Probe]:
        """Return the probes to read, by names of the controller's own; asked once, at start.

        Probes have one class. Where some are MLPs, ``--max-probe-units`` has to make room for them.
        """
        raise NotImplementedError

    def modules(self) -> Iterable[str]:
        """Return names of modules that it will turn on, so that the engine refuses to start without them."""
        return ()

    def request_begins(self, request: RequestView) -> None:
        """Take note of a request before the first step of it is read."""

    def step(self, readings: StepReadings) -> Iterable[Action]:
        """Return what to do, given what was read in a step."""
        raise NotImplementedError

    def request_ends(self, request: RequestView) -> None:
        """Take note of a request that ended, however it did."""
