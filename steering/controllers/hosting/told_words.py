"""The memory in which forwards tell scores and hear coefficients, as another process has it. Numpy only.

`Code.TELL` writes words there: a score, and a count that says which row of the slot it is of. `Code.HEAR` reads others:
a coefficient, and from which row of the slot on it acts (`headgate.steering.programs.gate_codes`).

Letters in shape comments: Q slots of requests, K told numbers, G requests of a step.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int32Array, Int64Array
from headgate.steering.programs.gate_codes import (
    HEARD_POSITION_BITS,
    HEARD_ROWS,
    HEARD_WORDS,
    TOLD_COUNT_MASK,
    TOLD_ROWS,
)
from headgate.steering.vectors.dtypes import Float32Rows

_HEADER_BYTES = mmap.PAGESIZE
"""In front of the words; the first eight are the number of `ToldPlace`."""
_COUNT_SHIFT = 32
_SCORE_MASK = (1 << _COUNT_SHIFT) - 1


class ToldPlace(NamedTuple):
    """Where a worker's memory is found.

    Attributes:
        path: Of a file of the worker's process that other processes of this user may open.
        number: Random; it stands in the memory, too.
        num_slots: Q.
        num_told: K.
    """

    path: str
    number: int
    num_slots: int
    num_told: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self._heard_offset + 8 * self.num_slots * (HEARD_WORDS + HEARD_ROWS)

    def parts(self, mapped: mmap.mmap) -> tuple[Int64Array, Int64Array]:
        """Return the words that are told, ``[Q, TOLD_ROWS, K]``, and those that are heard; each begins a page."""
        shape = self.num_slots, TOLD_ROWS, self.num_told
        told: Int64Array = np.frombuffer(mapped, np.int64, math.prod(shape), _HEADER_BYTES).reshape(shape)
        heard: Int64Array = np.frombuffer(mapped, np.int64, offset=self._heard_offset).reshape(self.num_slots, -1)
        return told, heard

    @property
    def _heard_offset(self) -> int:
        told_bytes = 8 * self.num_slots * TOLD_ROWS * self.num_told
        return _HEADER_BYTES + -(-told_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class ToldRowsOfStep(NamedTuple):
    """Which words a step writes.

    Attributes:
        slots: int32 ``[G]``.
        counts: int64 ``[G, K]``: with which each number is told; of those that are not, whatever.
    """

    slots: Int32Array
    counts: Int64Array

    def behind(self, num_steps: int) -> ToldRowsOfStep:
        """Return those of a step so many later, of the same requests with one row each in every step between."""
        return ToldRowsOfStep(self.slots, (self.counts + num_steps) & TOLD_COUNT_MASK)


class ToldWords:
    """Reads and writes the memory of a worker.

    Args:
        place: Where it is.

    Raises:
        OSError: If it cannot be opened here.
        ValueError: If it is other memory.
    """

    def __init__(self, place: ToldPlace) -> None:
        with Path(place.path).open("r+b") as file:
            if os.fstat(file.fileno()).st_size != place.num_bytes:
                raise ValueError(f"{place.path} has another size than {place.num_bytes} bytes")
            self._mapped = mmap.mmap(file.fileno(), place.num_bytes)
        if int(np.frombuffer(self._mapped, np.int64, 1)[0]) != place.number:
            raise ValueError(f"{place.path} is not the worker's memory")
        self._words, self._heard = place.parts(self._mapped)
        self._numbers = np.arange(place.num_told)
        self._next: Int64Array = np.zeros(place.num_slots, np.int64)
        """Of the words that each slot hears, the one that was written the longest time ago."""

    def read(self, rows: ToldRowsOfStep) -> tuple[Float32Rows, BoolArray]:
        """Return the scores of a step, float32 ``[G, K]``, and which of them are its: others were overwritten."""
        words = self._words[rows.slots[:, None], rows.counts % TOLD_ROWS, self._numbers]
        scores: Float32Rows = (words & _SCORE_MASK).astype(np.uint32).view(np.float32)
        is_known: BoolArray = words >> _COUNT_SHIFT == rows.counts
        return scores, is_known

    def clear(self, slots: Int32Array) -> None:
        """Take back what some slots were to hear, so that it is not heard in another epoch of the same number."""
        self._heard[slots, :HEARD_WORDS] = 0

    def write(self, slots: Int32Array, epoch: int, positions: Int64Array, values: Float32Rows) -> None:
        """Let slots hear coefficients.

        Args:
            slots: int32 ``[n]``, all different.
            epoch: Of those who are to listen, 1 to `MAX_EPOCH`.
            positions: int64 ``[n]``: the first row of each on which its value is to act, below
                ``1 << HEARD_POSITION_BITS``.
            values: float32 ``[n]``.
        """
        tags = epoch << HEARD_POSITION_BITS | positions
        words = tags << _COUNT_SHIFT | np.ascontiguousarray(values).view(np.uint32)
        # The last ones stay: forwards that are under way may be behind, and must find what was to act before.
        self._heard[slots, self._next[slots]] = words
        self._next[slots] = (self._next[slots] + 1) % HEARD_WORDS
