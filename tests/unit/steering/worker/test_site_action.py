"""Compiled for a CPU, steering leaves whatever is not steered as it is without steering, bit for bit.

The forward is a stack of norms over a stream that is carried as vLLM's fused layers carry it, branch and residual in
bfloat16. Norms are compared in float32, where the order of additions shows.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from tqdm import tqdm

from headgate.capture.engine.compiler.inductor_heuristics import register_exclusion
from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.model import forward_wrappers
from headgate.capture.engine.site_action import SiteAction, SiteValue
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import HookPoint
from headgate.steering.worker import site_action

HIDDEN = 576
NORMS = range(4)
NUM_TOKENS = 5
HOOK = HookPoint.POST_MLP
GAIN = 0.25
FACTS = WorkerFacts(
    model=ModelInfo(name="m", num_layers=len(NORMS), hidden_size=HIDDEN, dtype="bfloat16", sites=()),
    owned_layers=tuple(NORMS),
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    max_tokens=NUM_TOKENS,
    max_num_seqs=4,
    is_compiled=True,
)


class Stack(nn.Module):
    """Norms, each followed by a product that makes the next branch; `at` says which have a site."""

    def __init__(self, at: Sequence[int]) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.at, self.add = tuple(at), site_action.addition(FACTS).run
        self.table = torch.randn(NUM_TOKENS, HIDDEN, generator=made).bfloat16()
        self.products = [torch.randn(HIDDEN, HIDDEN, generator=made).bfloat16() / 24 for _ in NORMS]
        self.pool = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
        self.slots = torch.zeros(len(NORMS), NUM_TOKENS, dtype=torch.int32)
        self.sites = [nn.Module() for _ in NORMS]
        for site, slots in zip(self.sites, self.slots, strict=True):
            tensors = {site_action.POOL: self.pool, site_action.SLOTS: slots}
            forward_wrappers.attach(site, HOOK, [SiteAction(run=self.add, tensors=tensors, order=20)])

    def forward(self, tokens: Tensor) -> list[Tensor]:
        residual, branch, norms = self.table[tokens], None, []
        for number, product in enumerate(self.products):
            if number in self.at:
                residual = self.add(self.sites[number], HOOK.value, SiteValue(residual, branch, residual, GAIN))
            total = residual.float() if branch is None else branch.float() + residual.float()
            residual = total.bfloat16()
            norms.append(total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5))
            branch = norms[-1].bfloat16() @ product
        return norms


def norms_of(stack: Stack) -> Callable[[], list[Tensor]]:
    torch._dynamo.reset()
    forward = torch.compile(stack, dynamic=True, fullgraph=True)
    return torch.inference_mode()(lambda: forward(torch.arange(NUM_TOKENS)))


@pytest.fixture(scope="module", autouse=True)
def compiled_in_this_thread() -> Iterator[None]:
    tqdm.monitor_interval = 0  # inductor shows a bar now and then: no thread for it
    with inductor.patch(compile_threads=1):  # as vLLM does on a CPU
        yield


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    return norms_of(Stack(at=()))()


@pytest.mark.parametrize("at", [NORMS, [2]], ids=["every site", "one site"])
def test_compiled_norms_of_rows_that_nobody_steers_are_bit_for_bit_those_without_steering(plain, at):
    stack = Stack(at)
    run = norms_of(stack)

    idle = run()
    stack.pool[1] = torch.linspace(-1, 1, HIDDEN)
    stack.slots[at[0], 0] = 1
    steered = run()

    assert [torch.equal(*pair) for pair in zip(idle, plain, strict=True)] == [True] * len(NORMS)
    assert [torch.equal(a[1:], b[1:]) for a, b in zip(steered, plain, strict=True)] == [True] * len(NORMS)
    assert [torch.equal(a[0], b[0]) for a, b in zip(steered, plain, strict=True)] == [n < at[0] for n in NORMS]


def test_the_compiled_addition_adds_the_vector_to_the_value():
    stack = Stack(NORMS)
    run = norms_of(stack)

    stack.pool[1] = torch.linspace(-1, 1, HIDDEN)
    stack.slots[0, 3] = 1
    found = run()[0][3]

    total = stack.table[3].double() + stack.pool[1].double() / GAIN
    torch.testing.assert_close(found.double(), total / total.pow(2).mean().sqrt(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_addition_from_the_pool_adds_the_rows_that_the_slots_name(scale):
    site_action.register_add_pooled()
    made = torch.Generator().manual_seed(1)
    carry, pool = (torch.randn(rows, HIDDEN, generator=made) for rows in (NUM_TOKENS, 4))
    slots = torch.tensor([3, 0, 1, 1, 0, 2, 2], dtype=torch.int32)  # longer than the batch
    torch._dynamo.reset()

    def twice(*given: Tensor) -> Tensor:
        return site_action.add_pooled(*given, scale) * 2

    with torch.inference_mode():
        found = torch.compile(twice, dynamic=True, fullgraph=True)(carry, pool, slots)

    vectors = torch.where(slots[:NUM_TOKENS, None] == 0, 0, pool[slots[:NUM_TOKENS]])  # whatever the pool holds there
    torch.testing.assert_close(found, 2 * (carry + scale * vectors))


@pytest.fixture(scope="module")
def printed() -> str:
    """What `tests.benchmarks.codegen` prints, which needs no GPU, about the kernels of each way to add."""
    ways = ("stock", "ahead", "both", "ops_mid", "ops_end", "across")
    command = [sys.executable, "-m", "tests.benchmarks.codegen", "--counts", *ways]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.extended
@pytest.mark.parametrize("way", ["ops_mid", "ops_end", "across"])
def test_norms_around_an_op_site_stay_one_kernel_with_their_sums(printed: str, way: str) -> None:
    """A program reads a branch's norm; the sum of that norm must not become a kernel of its own for it."""
    for family in ("gemma", "llama"):
        stock, ours = kernels(printed, family, "stock"), kernels(printed, family, way)
        norms = [kernel for kernel in ours if kernel.counts[1] != "1"]
        assert [(kernel.counts, kernel.cut, kernel.num_late) for kernel in norms] == [
            (kernel.counts, kernel.cut, kernel.num_late) for kernel in stock
        ]
        num_sites = 2 if way == "across" else 1
        assert len(ours) - len(norms) == num_sites * (family == "gemma")  # the programs' own sums


@pytest.mark.extended
def test_kernels_for_a_gpu_are_cut_into_blocks_as_they_are_without_us(printed: str) -> None:
    for family in ("gemma", "llama"):
        stock, ahead, both = (kernels(printed, family, way) for way in ("stock", "ahead", "both"))
        assert len(stock) == 2
        for found, stores in ((ahead, 0), (both, 1)):
            assert [(kernel.counts, kernel.cut) for kernel in found] == [
                (kernel.counts, kernel.cut) for kernel in stock
            ]
            assert [kernel.fate for kernel in found] == ["scaled", "kept"]
            assert [kernel.num_late for kernel in found] == [kernel.num_late for kernel in stock]
            assert found[1].stores == stock[1].stores + stores  # the ring's
        norms = {"gemma": 3, "llama": 1}[family]  # of which the later passes read the weights
        assert [kernel.num_fetched for kernel in (*stock, *ahead, *both)] == [0, 0, 0, norms, 0, norms]


class Kernel(NamedTuple):
    counts: list[str]
    stores: int
    cut: str
    fate: str
    num_late: int
    num_fetched: int


def kernels(printed: str, family: str, way: str) -> list[Kernel]:
    lines = [line.split() for line in printed.splitlines()]
    found = [line[2:] for line in lines if line[:2] == [family, way]]
    return [Kernel(line[:4], int(line[5].rstrip(":")), line[6], line[7], int(line[9]), int(line[11])) for line in found]


@pytest.mark.parametrize(
    ("register", "missing"),
    [
        (site_action.register_add_excluded, "ops_handler.OpCounterCSE"),
        (site_action.register_add_pooled, "ops_handler.OpCounterCSE"),
        (site_action.register_add_pooled, "codegen.common.CSEProxy"),
        (site_action.register_add_pooled, "codegen.simd_kernel_features.MemoryEstimator"),
        (site_action.register_add_pooled, "codegen.triton.TritonKernel"),
        (register_exclusion, "codegen.common.CSEProxy"),
        (register_exclusion, "codegen.simd_kernel_features.MemoryEstimator"),
    ],
)
def test_an_inductor_of_another_build_is_refused_with_what_to_do(monkeypatch, register, missing):
    monkeypatch.delattr(f"torch._inductor.{missing}")
    expected = r"needs the inductor of torch 2\.11 to 2\.14, found torch .*--enforce-eager"

    with pytest.raises(UnsupportedError, match=expected):
        register()
