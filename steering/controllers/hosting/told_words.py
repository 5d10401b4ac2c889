"""The memory in which forwards tell scores, as another process reads it. Numpy only.

`Code.TELL` writes words there: a score, and a count that says which row of the slot it is of
(`headgate.steering.programs.gate_codes`).

Letters in shape comments: Q slots of requests, K told numbers, G requests of a step.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int32Array, Int64Array
from headgate.steering.programs.gate_codes import TOLD_COUNT_MASK, TOLD_ROWS
from headgate.steering.vectors.dtypes import Float32Rows

HEADER_BYTES = mmap.PAGESIZE
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
        return HEADER_BYTES + 8 * self.num_slots * TOLD_ROWS * self.num_told


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
    """Reads the memory of a worker.

    Args:
        place: Where it is.

    Raises:
        OSError: If it cannot be opened here.
        ValueError: If it is other memory.
    """

    def __init__(self, place: ToldPlace) -> None:
        with Path(place.path).open("rb") as file:
            if os.fstat(file.fileno()).st_size != place.num_bytes:
                raise ValueError(f"{place.path} has another size than {place.num_bytes} bytes")
            self._mapped = mmap.mmap(file.fileno(), place.num_bytes, prot=mmap.PROT_READ)
        if int(np.frombuffer(self._mapped, np.int64, 1)[0]) != place.number:
            raise ValueError(f"{place.path} is not the worker's memory")
        shape = place.num_slots, TOLD_ROWS, place.num_told
        self._words: Int64Array = np.frombuffer(self._mapped, np.int64, offset=HEADER_BYTES).reshape(shape)
        self._numbers = np.arange(place.num_told)

    def read(self, rows: ToldRowsOfStep) -> tuple[Float32Rows, BoolArray]:
        """Return the scores of a step, float32 ``[G, K]``, and which of them are its: others were overwritten."""
        words = self._words[rows.slots[:, None], rows.counts % TOLD_ROWS, self._numbers]
        scores: Float32Rows = (words & _SCORE_MASK).astype(np.uint32).view(np.float32)
        is_known: BoolArray = words >> _COUNT_SHIFT == rows.counts
        return scores, is_known
