"""The steering kernel against its definition: under Triton's interpreter in CI, natively on a GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

add = pytest.importorskip("headgate.steering.kernels.add_rows")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden_size"),
    [(0, 64), (1, 64), (7, 100), (63, 576), (5, 5376)],
    ids=["empty", "decode", "width-not-a-power-of-2", "smollm2", "width-above-one-block"],
)
@pytest.mark.parametrize("scale", [1.0, 4.5], ids=["plain", "scaled"])
def test_each_row_gets_the_vector_of_its_slot(num_tokens, hidden_size, dtype, scale):
    torch.manual_seed(0)
    pool = torch.randn(9, hidden_size).to(dtype).to(DEVICE)
    pool[0] = 0
    carry = torch.randn(num_tokens, 2 * hidden_size).to(dtype).to(DEVICE)[:, :hidden_size]
    slots = torch.randint(9, (num_tokens,), dtype=torch.int32, device=DEVICE)
    slots[::3] = 0
    expected = add.add_rows_reference(carry, pool, slots, scale)

    steered = add.add_rows(carry, pool, slots, scale)

    # One rounding of the output dtype: Triton's interpreter truncates fp32 to bf16 where GPUs round.
    torch.testing.assert_close(steered, expected, rtol=torch.finfo(dtype).eps, atol=2**-20)
    assert torch.equal(steered[slots == 0], carry[slots == 0])


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_active_rows_get_their_deltas_which_may_be_columns_of_wider_rows(num_tokens):
    """A tensor-parallel rank has columns of whole rows; of one row, torch calls them contiguous whatever the stride."""
    torch.manual_seed(0)
    carry, wide = torch.randn(num_tokens, 48, device=DEVICE), torch.randn(num_tokens + 2, 96, device=DEVICE)
    pool, deltas = torch.randn(3, 48, device=DEVICE), wide[:, 48:]
    slots = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE) % 3
    active = (torch.arange(num_tokens + 2, device=DEVICE) % 2 == 0).int()

    steered = add.add_rows(carry, pool, slots, 2.0, deltas, active)

    expected = carry + 2 * torch.where(active[:num_tokens, None] != 0, deltas[:num_tokens], pool[slots.long()])
    unchanged = (active[:num_tokens] == 0) & (slots == 0)
    assert bool(active[0])
    torch.testing.assert_close(steered[~unchanged], expected[~unchanged], rtol=1e-6, atol=1e-6)
    assert torch.equal(steered[unchanged], carry[unchanged])


def test_rows_that_nobody_steers_keep_every_bit():
    carry = torch.tensor([[-0.0, torch.inf, torch.nan, 1e-45]], device=DEVICE)
    pool = torch.full((2, 4), torch.nan, device=DEVICE)

    steered = add.add_rows(carry, pool, torch.zeros(1, dtype=torch.int32, device=DEVICE))

    assert steered.view(torch.int32).tolist() == carry.view(torch.int32).tolist()


def test_shapes_that_do_not_fit_are_refused():
    slots = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="slots"):
        add.add_rows(torch.zeros(2, 8), torch.zeros(2, 8), slots)
    with pytest.raises(ValueError, match="wide"):
        add.add_rows(torch.zeros(3, 8), torch.zeros(2, 9), slots)
    for deltas in (torch.zeros(2, 8), torch.zeros(3, 9), torch.zeros(8, 3).T):
        with pytest.raises(ValueError, match="deltas"):
            add.add_rows(torch.zeros(3, 8), torch.zeros(2, 8), slots, 1.0, deltas, slots)
