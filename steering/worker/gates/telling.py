"""Steps whose scores the forward tells by itself, to somebody who reads them in its memory. Step thread only."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.steering.controllers.hosting.told_words import ToldPlace
from headgate.steering.programs.gate_codes import TOLD_ROWS
from headgate.steering.worker.gates.requests import GatedBatch
from headgate.steering.worker.gates.told_memory import ToldMemory


class Telling:
    """Decides which steps are quiet: nothing of their rows is copied, since the forward has told all that is wanted.

    Such steps follow one whose readings said which slots its requests have. From there on each of them has one row in
    each step, so that the reader knows every word before it is written.

    Args:
        num_slots: Q: slots of requests.
        num_told: K: scores of each row that may be told; 0 for none.
        device: Where the forward runs.
        is_output_rank: Whether anybody reads what this worker tells.

    Attributes:
        words: int64 ``[Q, TOLD_ROWS, K]`` on the device: `GateTensors.told`.
        heard: int64 ``[Q, HEARD_WORDS + HEARD_ROWS]`` on the device: `GateTensors.heard`; without columns if nobody can
            write there.
        heard_here: The same as the host has it; None likewise.
        is_quiet: Whether the present step is.
    """

    def __init__(self, num_slots: int, num_told: int, device: torch.device, *, is_output_rank: bool) -> None:
        memory = ToldMemory(num_slots, num_told, device) if num_told and is_output_rank else None
        # Where nobody can read them, the forward writes the words to memory of the device.
        empty = partial(torch.zeros, dtype=torch.int64, device=device)
        self.words: Tensor = empty(num_slots, TOLD_ROWS, num_told)
        self.heard: Tensor = empty(num_slots, 0)
        self.heard_here: Int64Array | None = None
        self._memory: ToldMemory | None = None
        if memory is not None and memory.words is not None and memory.heard is not None:
            self._memory, self.words, self.heard = memory, memory.words, memory.heard
            self.heard_here = memory.heard_here
        self.is_quiet = False
        self._is_read = self._is_followed = False
        """Whether somebody reads the memory, and whether he knows the words of steps that go on."""

    @property
    def place(self) -> ToldPlace | None:
        """Where the words are; None if nobody can read them."""
        return None if self._memory is None else self._memory.place

    def allow(self) -> None:
        """Let steps be quiet from now on: somebody reads the memory."""
        self._is_read = self._memory is not None

    def break_off(self) -> None:
        """Let the next step not be quiet: the reader has lost count."""
        self._is_followed = False

    def follow(self, *, goes_on: bool) -> None:
        """Follow a step, before its forward; `goes_on` says whether it is the next one of the same requests."""
        self._is_followed = self._is_followed and goes_on
        self.is_quiet = self._is_followed

    def announce(self, batch: GatedBatch, *, is_decoding: bool) -> Int32Array | None:
        """Return the slots of a step's requests, int32, if steps that go on from it will be quiet; else None.

        Args:
            batch: Of the step, which is not quiet.
            is_decoding: Whether each request has one generated row.
        """
        self._is_followed = self._is_read and is_decoding and batch.is_quiet
        return batch.told_slots if self._is_followed else None
