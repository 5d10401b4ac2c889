"""The actions that capture write the rounded sum of each row to its slot of the ring, as written and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from tqdm import tqdm

from headgate.capture.engine.compiler.inductor_heuristics import register_exclusion
from headgate.capture.engine.compiler.unfused_copy import register_unfused_copy
from headgate.capture.engine.model import forward_wrappers
from headgate.capture.engine.site_action import SiteAction, SiteValue
from headgate.capture.engine.worker import capture_part
from headgate.capture.schema.sites import HookPoint

HIDDEN, RING, MAX_TOKENS = 24, 12, 8
HOOK = HookPoint.POST_MLP


@pytest.fixture(scope="module", autouse=True)
def compiled_in_this_thread() -> Iterator[None]:
    tqdm.monitor_interval = 0  # inductor shows a bar now and then: no thread for it
    with inductor.patch(compile_threads=1):
        yield


class Site(nn.Module):
    """A norm behind a site; captures the sum that it normalises."""

    def __init__(self, run: Callable[[nn.Module, str, SiteValue], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.ring = torch.full((RING, HIDDEN), -1.0, dtype=torch.bfloat16)
        self.slots = torch.arange(MAX_TOKENS, dtype=torch.int32)
        tensors = {capture_part.ROWS: self.ring, capture_part.SLOTS: self.slots}
        forward_wrappers.attach(self, HOOK, [SiteAction(run=run, tensors=tensors, order=0)])

    def forward(self, branch: Tensor, stream: Tensor) -> Tensor:
        stream = self.run(self, HOOK.value, SiteValue(branch, stream, stream))
        total = branch.float() + stream.float()
        return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize(
    ("run", "register"),
    [
        (capture_part.capture_plain, None),
        (capture_part.capture_traced, register_exclusion),
        pytest.param(capture_part.capture_unfused, register_unfused_copy, marks=pytest.mark.extended),
    ],
    ids=["plain", "traced", "apart"],
)
def test_rows_go_to_their_slots_and_nothing_else_changes(run, register):
    torch._dynamo.reset()
    site = Site(run)
    if register is not None:
        register()
    forward = site if register is None else torch.compile(site, dynamic=True, fullgraph=True)
    made = torch.Generator().manual_seed(0)

    for num_tokens, slots in ((3, [5, 0, 7]), (5, [11, 2, 3, 9, 1])):
        branch, stream = (torch.randn(num_tokens, HIDDEN, generator=made).bfloat16() for _ in range(2))
        site.ring.fill_(-1)
        site.slots[:num_tokens] = torch.tensor(slots, dtype=torch.int32)
        with torch.inference_mode():
            normed = forward(branch, stream)

        total = branch.float() + stream.float()
        assert torch.equal(site.ring[slots], total.bfloat16())
        others = [slot for slot in range(RING) if slot not in slots]
        assert (site.ring[others] == -1).all()
        expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5)
        torch.testing.assert_close(normed, expected)
