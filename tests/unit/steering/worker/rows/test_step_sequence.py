"""Steps that go on from the one before: the same requests in the same rows, one each, at the positions behind."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.capture.schema.batch import BatchView
from headgate.steering.worker.rows.step_rows import StepSequence


def view(*requests: tuple[str, int, int], first_row: int = 0) -> BatchView:
    counts = np.array([count for *_, count in requests], np.int64)
    computed = np.array([position for _, position, _ in requests], np.int64)
    return BatchView(tuple(name for name, *_ in requests), first_row + np.cumsum(counts) - counts, counts, computed)


BEFORE = view(("a", 7, 1), ("b", 3, 1))


def test_a_step_at_the_positions_behind_goes_on() -> None:
    sequence = StepSequence()

    steps = [view(("a", 7 + step, 1), ("b", 3 + step, 1)) for step in range(3)]

    assert [sequence.goes_on(step) for step in steps] == [False, True, True]


@pytest.mark.parametrize(
    "step",
    [
        view(("a", 8, 1)),
        view(("b", 4, 1), ("a", 8, 1)),
        view(("a", 8, 1), ("c", 4, 1)),
        view(("a", 8, 1), ("b", 4, 2)),
        view(("a", 8, 1), ("b", 3, 1)),
        view(("a", 9, 1), ("b", 5, 1)),
        view(("a", 8, 1), ("b", 4, 1), first_row=1),
        view(),
    ],
    ids=["fewer", "order", "another", "two rows", "again", "a gap", "elsewhere", "nobody"],
)
def test_any_other_step_does_not(step: BatchView) -> None:
    sequence = StepSequence()
    sequence.goes_on(BEFORE)

    assert not sequence.goes_on(step)


def test_a_dummy_step_interrupts() -> None:
    sequence = StepSequence()
    sequence.goes_on(BEFORE)
    sequence.goes_on(None)

    assert not sequence.goes_on(view(("a", 8, 1), ("b", 4, 1)))


def test_what_is_laid_out_later_does_not_change_what_was() -> None:
    sequence, computed = StepSequence(), np.array([7, 3])
    step = BatchView(BEFORE.req_ids, BEFORE.starts, BEFORE.num_scheduled, computed)
    sequence.goes_on(step)
    computed += 1  # by the runner, in its own memory

    assert sequence.goes_on(step)


def test_steps_of_two_rows_each_never_go_on() -> None:
    sequence = StepSequence()

    assert not any(sequence.goes_on(view(("a", 7 + 2 * step, 2))) for step in range(3))
