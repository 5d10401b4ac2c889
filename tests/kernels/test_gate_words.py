"""Numbers that gates hand to the host, and take from it: kernels do what the definition says."""

from __future__ import annotations

import math

import torch

from headgate.steering.programs.gate_codes import (
    HEARD_POSITION_BITS,
    HEARD_ROWS,
    HEARD_WORDS,
    TOLD_COUNT_MASK,
    TOLD_ROWS,
)
from tests.kernels.gate_programs import Request, Steps, gated, hear, score, tell
from tests.kernels.test_gates import STRENGTH
from tests.kernels.test_run_programs import DEVICE, OPERATIONS

TELLING = [*STRENGTH[:1], score(8, read=3), tell(9, 8, 0), *STRENGTH[1:], tell(7, 0, 1), gated(OPERATIONS["linear"], 4)]


def test_each_row_tells_its_scores_in_the_next_word():
    steps = Steps([TELLING, STRENGTH], [Request(1, 2, 7, 1), Request(2, 2, 7, 0)])
    steps.told_counts[1] = torch.tensor([TOLD_COUNT_MASK - 1, 10], device=DEVICE)

    signals = torch.stack([steps.step([1, 1], scans=False)[1][0] for _ in range(7)])

    assert (steps.told[1] >> 32).T.tolist() == [[4, 5, 2, 3], [16, 17, 14, 15]]
    assert signals[:, [9, 7]].T.tolist() == [[TOLD_COUNT_MASK, *range(6)], [*range(11, 18)]]
    scores = (steps.told[1] & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    assert torch.equal(scores, signals[[5, 6, 3, 4]][:, [8, 0]])
    assert steps.told_counts.tolist() == [[0, 0], [5, 17]]
    assert not steps.told[0].any()


def test_rows_that_are_scanned_count_and_tell_nothing():
    steps = Steps([TELLING], [Request(1, 9, 13, 2)])
    steps.step([1])
    told = steps.told.clone()

    _, signals = steps.step([10])

    assert signals[:, [9, 7]].T.tolist() == [[*range(2, 12)]] * 2
    assert torch.equal(steps.told, told)
    for number in (12, 13):
        steps.step([1])
        assert (steps.told[2, number % TOLD_ROWS] >> 32).tolist() == [number] * 2
    assert (steps.told != told)[2, :2].all()
    assert torch.equal(steps.told[2, 2:], told[2, 2:])


def test_neither_a_reset_nor_another_request_lets_a_slot_count_anew():
    steps = Steps([TELLING, TELLING[:3]], [Request(1, 1, 3, 1), Request(2, 2, 7, 1)])
    found = []

    for numbers in ([1, 0], [2, 0], [0, 1], [0, 5], [0, 1]):
        steps.step(numbers)
        found.append(steps.told_counts[1].tolist())

    assert found == [[1, 1], [3, 3], [4, 3], [9, 3], [10, 3]]
    assert (steps.told[1, :, 0] >> 32).tolist() == [4, 1, 10, 0]


HEARING = [hear(4, 1), score(0), gated(OPERATIONS["linear"], 4, is_early=True)]


def word(epoch: int, position: int, value: float) -> int:
    """What the host writes for a row."""
    bits = int(torch.tensor(value).view(torch.int32)) % (1 << 32)
    return (epoch << HEARD_POSITION_BITS | position) << 32 | bits


def noted(steps: Steps, slot: int, position: int) -> float:
    """What acted on a row, as the forward notes it."""
    found = int(steps.heard[slot, HEARD_WORDS + position % HEARD_ROWS])
    assert found >> 32 == position
    return float(torch.tensor(found & 0xFFFFFFFF).to(torch.int32).view(torch.float32))


def test_each_row_hears_the_latest_word_that_is_due():
    steps = Steps([HEARING], [Request(1, 2, 9, 1), Request(1, 2, 9, 0)])
    steps.step([2, 2])
    steps.states[:, 4] = torch.tensor([0.5, math.nan], device=DEVICE)
    steps.hearing[1, 1] = torch.tensor([1023, 2], device=DEVICE)
    words = [(1023, 4, -2.5), (1023, 6, 1.5), (1023, 5, 0.25), (1022, 2, 9.0)]
    steps.heard[1, :HEARD_WORDS] = torch.tensor([word(*each) for each in words], device=DEVICE)

    for _ in range(4):
        steps.step([1, 1], scans=False)
    steps.heard[1, 0] = word(1023, 7, 3.0)
    steps.heard[1, 1] = word(1023, 9, 4.0)
    for _ in range(2):
        steps.step([1, 1])

    assert [noted(steps, 1, position) for position in range(2, 8)] == [0.0, 0.0, -2.5, 0.25, 0.25, 3.0]
    assert steps.states[1, 4] == 3.0
    assert steps.hearing.tolist() == [[[0, 0]] * 2, [[0, 0], [1023, 8]]]
    assert steps.states[0, 4] == 0.5
    assert not steps.heard[0].any()


def test_rows_that_are_scanned_hear_nothing():
    steps = Steps([HEARING], [Request(1, 2, 9, 1)])
    steps.hearing[1, 1] = torch.tensor([1, 0], device=DEVICE)
    steps.heard[1, 0] = word(1, 0, 2.0)
    heard = steps.heard.clone()

    steps.step([6])

    assert torch.equal(steps.heard, heard)
    assert steps.hearing[1].tolist() == [[0, 0], [1, 0]]
