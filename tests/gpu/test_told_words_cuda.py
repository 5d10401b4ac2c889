"""Scores that a replayed graph tells by itself, as a process of the host reads them when the replay has ended."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headgate.steering.controllers.hosting.told_words import ToldRowsOfStep, ToldWords
from headgate.steering.programs.gate_codes import TOLD_COUNT_MASK, TokenFlag
from headgate.steering.worker.gates.told_memory import ToldMemory
from tests.fakes.gate_tensors import nothing_heard
from tests.kernels.gate_programs import NUM_COLUMNS, score, tell
from tests.kernels.test_run_programs import Example, run_programs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

NUM_ROWS, NUM_SLOTS, NUM_TOLD, WIDTH = 64, 129, 2, 2560
NUM_STEPS = 400


@pytest.mark.parametrize("ahead", [1, 2], ids=["one step", "a step ahead"])
def test_words_are_there_when_their_step_has_ended(ahead: int) -> None:
    """The GPU may have begun with the step behind when the host reads those of a step."""
    device = torch.device("cuda", 0)
    program = [score(0, read=1), score(1, read=2), tell(40, 0, 0), tell(41, 1, 1)]
    example = Example([program], [1] * NUM_ROWS, WIDTH, torch.bfloat16)
    memory = ToldMemory(NUM_SLOTS, NUM_TOLD, device)
    slots = torch.randperm(NUM_SLOTS - 1)[:NUM_ROWS].int() + 1
    tokens = torch.stack([slots, torch.full_like(slots, int(TokenFlag.IS_GENERATED))], 1).to(device)
    signals = torch.zeros(NUM_ROWS, NUM_COLUMNS, device=device)
    counts = torch.full((NUM_SLOTS, NUM_TOLD), TOLD_COUNT_MASK - 9, dtype=torch.int32, device=device)
    states = torch.full((NUM_SLOTS, NUM_COLUMNS), torch.nan, device=device)
    gates = signals, states, tokens, memory.words, counts, *nothing_heard(NUM_SLOTS, "cuda")
    streams = [torch.randn(NUM_ROWS, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(8)]

    def forward() -> None:
        run_programs.program_deltas(example.value, None, *example.tables.arguments(), gates=gates, scans=False)

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    known = ToldRowsOfStep(slots.numpy(), counts[slots.long().to(device)].cpu().numpy().astype(np.int64))
    words, ended, log = ToldWords(memory.place), [], torch.zeros(NUM_STEPS, NUM_ROWS, NUM_TOLD).pin_memory()
    expected = torch.zeros(NUM_STEPS, NUM_ROWS, NUM_TOLD, device=device)
    for step in range(NUM_STEPS):
        example.value.copy_(streams[step % len(streams)])
        graph.replay()
        expected[step].copy_(signals[:, :NUM_TOLD])
        ended.append(torch.cuda.Event())
        ended[-1].record()
        if (seen := step + 1 - ahead) >= 0:
            ended[seen].synchronize()
            scores, is_known = words.read(known.behind(seen + 1))
            assert is_known.all(), f"step {seen}: {np.count_nonzero(~is_known)} words are missing"
            log[seen] = torch.from_numpy(scores)
    torch.cuda.synchronize()
    done = NUM_STEPS - ahead
    torch.testing.assert_close(log[:done], expected[:done].cpu(), rtol=0, atol=0)
    assert expected.unique().numel() > NUM_ROWS
