"""Coefficients that a replayed graph hears: written while the step before runs, they act on the row they are for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headgate.steering.controllers.hosting.told_words import ToldWords
from headgate.steering.programs.gate_codes import HEARD_ROWS, HEARD_WORDS, TokenFlag
from headgate.steering.worker.gates.told_memory import ToldMemory
from tests.kernels.gate_programs import NUM_COLUMNS, gated, hear
from tests.kernels.test_run_programs import OPERATIONS, Example, run_programs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

NUM_ROWS, NUM_SLOTS, WIDTH = 64, 129, 2560
NUM_STEPS, FIRST, EPOCH, COLUMN = 600, 700, 5, 4
SILENCE = 0.3
"""Share of the rows for which nothing is said."""


class Graph:
    """A recorded forward of one row of each of `NUM_ROWS` requests, which hear; their slots and what acts on them."""

    def __init__(self, device: torch.device) -> None:
        example = Example(
            [[hear(COLUMN, 0), gated(OPERATIONS["linear"], COLUMN, is_early=True)]], [1] * NUM_ROWS, WIDTH
        )
        self.memory = memory = ToldMemory(NUM_SLOTS, 1, device)
        assert memory.words is not None
        assert memory.heard is not None
        self.slots = torch.randperm(NUM_SLOTS - 1)[:NUM_ROWS].int() + 1
        self.index = self.slots.long().to(device)
        tokens = torch.stack([self.slots, torch.full_like(self.slots, int(TokenFlag.IS_GENERATED))], 1).to(device)
        self.states = torch.zeros(NUM_SLOTS, NUM_COLUMNS, device=device)
        self.hearing = torch.zeros(NUM_SLOTS, 1, 2, dtype=torch.int32, device=device)
        counts = torch.zeros(NUM_SLOTS, 1, dtype=torch.int32, device=device)
        signals = torch.zeros(NUM_ROWS, NUM_COLUMNS, device=device)
        gates = signals, self.states, tokens, memory.words, counts, memory.heard, self.hearing
        arguments = example.tables.arguments()

        def forward() -> None:
            run_programs.program_deltas(example.value, None, *arguments, gates=gates, scans=False)

        forward()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            forward()
        self._kept = example, gates

    def acting(self) -> torch.Tensor:
        return self.states[self.index, COLUMN]


def test_each_row_hears_what_was_written_before_its_step_was_launched() -> None:
    device = torch.device("cuda", 0)
    made, rng = Graph(device), np.random.default_rng(1)
    made.hearing[made.index, 0] = torch.tensor([EPOCH, FIRST], dtype=torch.int32, device=device)
    words, slots = ToldWords(made.memory.place), made.slots.numpy()
    said = rng.normal(size=(NUM_STEPS, NUM_ROWS)).astype(np.float32)
    is_said = rng.random((NUM_STEPS, NUM_ROWS)) > SILENCE
    acted, ended = torch.zeros(NUM_STEPS, NUM_ROWS, device=device), [torch.cuda.Event() for _ in range(NUM_STEPS)]
    for step in range(NUM_STEPS):
        (rows,) = np.nonzero(is_said[step])
        words.write(slots[rows], EPOCH, np.full(len(rows), FIRST + step), said[step, rows])
        made.graph.replay()
        acted[step].copy_(made.acting())
        ended[step].record()
        if step:
            ended[step - 1].synchronize()  # the next words are written while this step may run
    torch.cuda.synchronize()

    expected = np.zeros((NUM_STEPS, NUM_ROWS), np.float32)
    for step in range(NUM_STEPS):
        expected[step] = np.where(is_said[step], said[step], expected[step - 1])
    np.testing.assert_array_equal(acted.cpu().numpy(), expected)
    positions = FIRST + np.arange(NUM_STEPS)
    noted = made.memory.heard_here[slots][:, HEARD_WORDS + positions % HEARD_ROWS].T
    np.testing.assert_array_equal(noted >> 32, np.broadcast_to(positions[:, None], noted.shape))
    np.testing.assert_array_equal((noted & 0xFFFFFFFF).astype(np.uint32).view(np.float32), expected)
    assert made.hearing[made.index, 0].tolist() == [[EPOCH, FIRST + NUM_STEPS]] * NUM_ROWS
