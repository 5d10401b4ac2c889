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


def test_each_row_hears_what_was_written_before_its_step_was_launched() -> None:
    device = torch.device("cuda", 0)
    example = Example([[hear(COLUMN, 0), gated(OPERATIONS["linear"], COLUMN, is_early=True)]], [1] * NUM_ROWS, WIDTH)
    memory = ToldMemory(NUM_SLOTS, 1, device)
    assert memory.words is not None
    assert memory.heard is not None
    slots = torch.randperm(NUM_SLOTS - 1)[:NUM_ROWS].int() + 1
    index = slots.long().to(device)
    tokens = torch.stack([slots, torch.full_like(slots, int(TokenFlag.IS_GENERATED))], 1).to(device)
    states = torch.zeros(NUM_SLOTS, NUM_COLUMNS, device=device)
    hearing = torch.zeros(NUM_SLOTS, 1, 2, dtype=torch.int32, device=device)
    counts = torch.zeros(NUM_SLOTS, 1, dtype=torch.int32, device=device)
    signals = torch.zeros(NUM_ROWS, NUM_COLUMNS, device=device)
    gates = signals, states, tokens, memory.words, counts, memory.heard, hearing

    def forward() -> torch.Tensor:
        return run_programs.program_deltas(example.value, None, *example.tables.arguments(), gates=gates, scans=False)

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    hearing[index, 0] = torch.tensor([EPOCH, FIRST], dtype=torch.int32, device=device)
    words, rng = ToldWords(memory.place), np.random.default_rng(1)
    said = rng.normal(size=(NUM_STEPS, NUM_ROWS)).astype(np.float32)
    is_said = rng.random((NUM_STEPS, NUM_ROWS)) > SILENCE
    acted, ended = torch.zeros(NUM_STEPS, NUM_ROWS, device=device), [torch.cuda.Event() for _ in range(NUM_STEPS)]
    for step in range(NUM_STEPS):
        (rows,) = np.nonzero(is_said[step])
        positions = np.full(len(rows), FIRST + step)
        words.write(slots.numpy()[rows], EPOCH, positions, said[step, rows])
        graph.replay()
        acted[step].copy_(states[index, COLUMN])
        ended[step].record()
        if step:
            ended[step - 1].synchronize()  # the next words are written while this step may run
    torch.cuda.synchronize()

    expected = np.zeros((NUM_STEPS, NUM_ROWS), np.float32)
    for step in range(NUM_STEPS):
        expected[step] = np.where(is_said[step], said[step], expected[step - 1])
    np.testing.assert_array_equal(acted.cpu().numpy(), expected)
    at = HEARD_WORDS + (FIRST + np.arange(NUM_STEPS)) % HEARD_ROWS
    noted = memory.heard_here[slots.numpy()][:, at].T
    np.testing.assert_array_equal(noted >> 32, np.broadcast_to(FIRST + np.arange(NUM_STEPS)[:, None], noted.shape))
    np.testing.assert_array_equal((noted & 0xFFFFFFFF).astype(np.uint32).view(np.float32), expected)
    assert hearing[index, 0].tolist() == [[EPOCH, FIRST + NUM_STEPS]] * NUM_ROWS
