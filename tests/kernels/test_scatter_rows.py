"""The capture kernel against its definition: under Triton's interpreter in CI, natively on a GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

scatter = pytest.importorskip("headgate.capture.kernels.scatter_rows")
NUM_TRASH_ROWS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden_size"),
    [(0, 64), (1, 64), (7, 100), (63, 576), (5, 5376)],
    ids=["empty", "decode", "width-not-a-power-of-2", "smollm2", "width-above-one-block"],
)
@pytest.mark.parametrize("has_addend", [False, True], ids=["value", "sum"])
def test_wanted_rows_land_in_their_slots_and_nothing_else_changes(num_tokens, hidden_size, dtype, has_addend):
    torch.manual_seed(0)
    num_rows = num_tokens + 3
    value = torch.randn(num_tokens, hidden_size).to(dtype).to(DEVICE)
    addend = torch.randn(num_tokens, hidden_size).to(dtype).to(DEVICE) if has_addend else None
    ring = torch.randn(num_rows + NUM_TRASH_ROWS, hidden_size).to(dtype).to(DEVICE)
    slots = torch.randperm(num_rows)[:num_tokens].to(DEVICE)
    slots[::3] = num_rows + torch.arange(len(slots[::3]), device=DEVICE) % NUM_TRASH_ROWS
    before = ring.clone()
    expected = scatter.scatter_rows_reference(value, addend, slots, ring, num_trash_rows=NUM_TRASH_ROWS)

    scatter.scatter_rows(value, addend, slots, ring, num_trash_rows=NUM_TRASH_ROWS)

    # One rounding of the output dtype: Triton's interpreter truncates fp32 to bf16 where GPUs round.
    torch.testing.assert_close(ring, expected, rtol=torch.finfo(dtype).eps, atol=2**-20)
    untouched = torch.ones(len(ring), dtype=torch.bool)
    untouched[slots.cpu()] = False
    untouched[num_rows:] = True
    assert torch.equal(ring.cpu()[untouched], before.cpu()[untouched])


def test_rows_of_trash_slots_are_never_read():
    value = torch.full((4, 32), torch.nan, device=DEVICE)
    ring = torch.zeros(4, 32, device=DEVICE)

    scatter.scatter_rows(value, None, torch.tensor([2, 3, 2, 3], device=DEVICE), ring, num_trash_rows=2)

    assert torch.equal(ring, torch.zeros_like(ring))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="slots"):
        scatter.scatter_rows(
            torch.zeros(2, 8), None, torch.zeros(3, dtype=torch.int64), torch.zeros(2, 8), num_trash_rows=1
        )
    with pytest.raises(ValueError, match="wide"):
        scatter.scatter_rows(
            torch.zeros(2, 8), None, torch.zeros(2, dtype=torch.int64), torch.zeros(2, 9), num_trash_rows=1
        )
