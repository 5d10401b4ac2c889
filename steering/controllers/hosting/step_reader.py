"""The rows of a step as controllers get them: each row once, one request after the other. Numpy only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.steering.controllers.controller import StepReadings
from headgate.steering.gates.step_table import StepTable
from headgate.steering.vectors.dtypes import Float32Rows

TokensOf = Callable[[str], Sequence[int] | None]
"""Returns the tokens of a request, the prompt's first, which grow with it; None if it has ended."""


class ReadStep(NamedTuple):
    """The rows of one step that were not told before, one request after the other.

    Attributes:
        requests: Id of the request of each row, ``[n]``; the very tuple of the step before if it has the same.
        positions: int64 ``[n]``.
        is_prompt: bool ``[n]``.
        tokens: Of the request of each row, ``[n]``.
        signals: float32 ``[n, columns]``.
    """

    requests: tuple[str, ...]
    positions: Int64Array
    is_prompt: BoolArray
    tokens: Sequence[Sequence[int]]
    signals: Float32Rows

    def of(self, scores: Mapping[str, int]) -> StepReadings:
        """Return the rows for a controller, whose scores are in columns by their names."""
        return StepReadings(
            requests=self.requests,
            positions=self.positions,
            is_prompt=self.is_prompt,
            scores={name: self.signals[:, column].copy() for name, column in scores.items()},
            tokens=self.tokens,
        )

    def part(self, at: Sequence[int], requests: tuple[str, ...]) -> ReadStep:
        """Return some of the rows, by their indices, whose requests are given."""
        index = np.array(at, np.int64)
        tokens = [self.tokens[each] for each in at]
        return ReadStep(requests, self.positions[index], self.is_prompt[index], tokens, self.signals[index])


class ToldRows:
    """Rows of a request that were told: one that is computed again is not told again.

    Args:
        num_prompt: Tokens of its prompt.
    """

    __slots__ = ("end", "num_prompt", "tokens")

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.end = 0
        self.tokens: Sequence[int] = ()
        """All tokens of the request, which grow with it."""


@dataclass(slots=True)
class _Decoding:
    """A step of one generated row of each of some requests; steps of the same ones are likely to follow.

    Attributes:
        step: As it was told.
        told: The requests.
        has_ended: Whether one of them has ended since.
    """

    step: ReadStep
    told: list[ToldRows]
    has_ended: bool = False


class StepReader:
    """Finds the rows of steps that are new. One thread only, but for `forget`.

    Args:
        tokens_of: Gives the tokens of requests.
    """

    def __init__(self, tokens_of: TokensOf) -> None:
        self._tokens_of = tokens_of
        self._decoding: _Decoding | None = None

    def forget(self) -> None:
        """Follow the end of a request. Any thread."""
        if (known := self._decoding) is not None:
            known.has_ended = True

    def read(self, step: StepTable, discarded: Collection[str], requests: Mapping[str, ToldRows]) -> ReadStep | None:
        """Return the rows of a step that are new; None if there are none.

        Args:
            step: As workers read it.
            discarded: Requests of the step for which it does not count.
            requests: Those that are followed.
        """
        known = self._decoding
        if known is not None:
            requests_before, last, is_prompt, tokens, _ = known.step
            is_next = not (discarded or known.has_ended) and step.has_one_row_each and step.ids == requests_before
            if is_next and not np.count_nonzero(step.firsts <= last):
                known.step = ReadStep(requests_before, step.firsts, is_prompt, tokens, step.signals)
                return known.step
            for told, position in zip(known.told, last.tolist(), strict=True):
                told.end = position + 1
        self._decoding = None
        return self._read_rows(step, discarded, requests)

    def _read_rows(
        self, step: StepTable, discarded: Collection[str], requests: Mapping[str, ToldRows]
    ) -> ReadStep | None:
        found: list[tuple[str, ToldRows, range]] = []
        is_told = np.zeros(len(step.signals), np.bool_)
        start = 0
        for req_id, first, count in zip(step.ids, step.firsts.tolist(), step.counts.tolist(), strict=True):
            begin, start = start, start + count
            told = requests.get(req_id)
            if told is None or req_id in discarded:
                continue
            if not told.tokens:
                told.tokens = self._tokens_of(req_id) or ()
            new = max(first, told.end)
            told.end = max(told.end, first + count)
            if new < first + count:
                found.append((req_id, told, range(new, first + count)))
                is_told[begin + new - first : start] = True
        if not found:
            return None
        positions = np.fromiter(chain.from_iterable(rows for *_, rows in found), np.int64)
        lengths = np.repeat([told.num_prompt for _, told, _ in found], [len(rows) for *_, rows in found])
        names = tuple(chain.from_iterable(repeat(req_id, len(rows)) for req_id, _, rows in found))
        tokens = list(chain.from_iterable(repeat(told.tokens, len(rows)) for _, told, rows in found))
        is_prompt = positions < lengths
        read = ReadStep(names, positions, is_prompt, tokens, step.signals[is_told])
        if len(found) == len(step.ids) and step.has_one_row_each and not is_prompt.any():
            self._decoding = _Decoding(read, [told for _, told, _ in found])
        return read
