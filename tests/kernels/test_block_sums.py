"""The kernel of lenses against its definition: under Triton's interpreter in CI, natively on a GPU."""

import os

import numpy as np
import pytest
import torch

from headgate.capture.schema.consumer import RowArguments
from headgate.consumers import lens

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

kernel = pytest.importorskip("headgate.consumers.kernels.block_sums")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(logits_NV):
    """Largest logits and sums of blocks, by their definition."""
    padding = -logits_NV.shape[1] % kernel.BLOCK
    blocks_NBX = torch.nn.functional.pad(logits_NV, (0, padding), value=-torch.inf).view(
        len(logits_NV), -1, kernel.BLOCK
    )
    maxima_NB = blocks_NBX.amax(dim=2)
    shift_NB1 = maxima_NB[:, :, None].masked_fill(maxima_NB[:, :, None] == -torch.inf, 0)
    return maxima_NB, (blocks_NBX - shift_NB1).exp().sum(dim=2)


@pytest.mark.parametrize("num_logits", [1, 128, 5000, 4096 * 3 + 7])
def test_sums_of_blocks_are_those_of_the_definition(num_logits):
    torch.manual_seed(0)
    logits = 9 * torch.randn(5, num_logits + 3, device=DEVICE)[:, :num_logits]
    logits[1, : num_logits // 2] = -torch.inf
    logits[2, num_logits // 2] = torch.nan

    maxima, sums = kernel.block_sums(logits)

    expected = reference(logits)
    has_nan = expected[0].isnan()
    assert torch.equal(sums.isnan(), has_nan)
    assert torch.equal(maxima[~has_nan], expected[0][~has_nan])
    torch.testing.assert_close(sums[~has_nan], expected[1][~has_nan], rtol=1e-5, atol=0)
    whole = maxima.amax(1) + (sums * (maxima - maxima.amax(1, keepdim=True)).exp()).sum(1).log()
    torch.testing.assert_close(whole[3:], logits[3:].logsumexp(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_logits", [5001, 8192, 300])
def test_the_strongest_logits_of_blocks_are_the_strongest(num_logits):
    torch.manual_seed(0)
    logits = torch.randn(6, num_logits, device=DEVICE)
    logits[1] = torch.arange(num_logits)  # the last, shorter block has the largest
    logits[2, 3:] = -torch.inf
    maxima, _ = kernel.block_sums(logits)

    values, ids = lens.strongest(logits, maxima, 7)

    expected = logits.topk(7)
    assert torch.equal(values, expected.values)
    is_there = values > -torch.inf
    assert torch.equal(ids[is_there], expected.indices[is_there])
    assert (ids < num_logits).all()


@pytest.mark.parametrize("has_words", [False, True])
def test_a_row_is_read_by_blocks_as_it_is_read_whole(has_words):
    """Ids, log-probabilities and ranks: of all tokens, and of words alone where a row asks for them."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 6000, device=DEVICE)
    host = np.array([[0, row % 2, 9, 5, -1 if row == 2 else 5999] for row in range(4)], np.int64)
    given = RowArguments(host, torch.from_numpy(host).to(DEVICE))
    words = torch.rand(6000, device=DEVICE) < 0.5 if has_words else None
    found = []
    for sums_of in (None, kernel.block_sums):
        outputs = torch.full((4, 2 * (9 + 2)), -torch.inf, device=DEVICE)
        lens._reduce(logits.clone(), given, words, lens._Outputs(9, 2), outputs, sums_of)
        found.append(outputs)

    assert torch.equal(found[0][:, :9], found[1][:, :9])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
