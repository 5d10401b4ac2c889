"""Fusions of vLLM's passes at sites that steer: of all-reduce with norm (TP), and of norm with quantisation (FP8).

The patterns are those of ``vllm/compilation/passes/fusion`` (``allreduce_rms_fusion``, ``rms_quant_fusion``), on
stand-ins for its operations. One that is not found leaves the operations apart: the numbers are right, without that
fusion's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm

from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS
from headgate.steering.worker.program_action import add_selected, program_deltas
from headgate.steering.worker.site_action import add_pooled


@torch.library.custom_op("headgate_tests::all_reduce", mutates_args=())
def all_reduce(value: Tensor) -> Tensor:
    return value.clone()


@torch.library.custom_op("headgate_tests::add_norm", mutates_args=())
def add_norm(value: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = value + residual
    return total / total.norm(dim=-1, keepdim=True), total


@torch.library.custom_op("headgate_tests::quantise", mutates_args=())
def quantise(value: Tensor) -> Tensor:
    return value.round()


@torch.library.custom_op("headgate_tests::fused", mutates_args=())
def fused(value: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return value.clone(), residual.clone()


for _operation in (all_reduce, quantise):
    _operation.register_fake(torch.empty_like)
for _pair in (add_norm, fused):
    _pair.register_fake(lambda value, residual: (torch.empty_like(value), torch.empty_like(residual)))

ROWS, WIDTH = 3, 8


def vectors(carry: Tensor, *_: Tensor | None) -> Tensor:
    """A site without operations."""
    return add_pooled(carry, torch.zeros(2, WIDTH), torch.zeros(ROWS, dtype=torch.int32), 1.0)


def programs(carry: Tensor, value: Tensor, addend: Tensor | None) -> Tensor:
    """An op site, as `headgate.steering.worker.program_action.run_traced` has it."""
    pool, rows = torch.zeros(2, WIDTH), torch.zeros(ROWS, dtype=torch.int32)
    codes, params = torch.zeros(2, 3, NUM_CODES, dtype=torch.int32), torch.zeros(2, 3, NUM_PARAMS)
    deltas = program_deltas(value, addend, pool, rows, rows, codes, params, None)
    return add_selected(carry, deltas, rows, pool, rows, 1.0)


def plain(carry: Tensor, *_: Tensor | None) -> Tensor:
    """No site."""
    return carry


Steer = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def found(pattern: Callable[..., Any], forward: Callable[..., Any]) -> int:
    """How often a pass finds `pattern` in the graph of `forward`; it must leave a graph that can run."""
    tqdm.monitor_interval = 0  # the compiler shows a bar now and then: no thread for it
    example = [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)]
    patterns = PatternMatcherPass(pass_name="headgate_tests")
    register_replacement(pattern, fused, example, fwd_only, patterns)  # type: ignore[arg-type]
    module = make_fx(forward, tracing_mode="fake")(*example)
    count = patterns.apply(module.graph)
    module.graph.lint()
    module.recompile()
    module(*example)
    return int(count)


@pytest.mark.parametrize(("steer", "expected"), [(plain, 1), (vectors, 1), (programs, 0)])
def test_all_reduce_stays_apart_from_the_norm_where_a_program_reads_its_result(steer: Steer, expected: int) -> None:
    def pattern(value: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm(all_reduce(value), residual)

    def forward(value: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        branch = all_reduce(value)
        return add_norm(branch, steer(residual, branch, residual))

    assert found(pattern, forward) == expected


def norm_and_quantise(value: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The pattern of a norm whose result is quantised."""
    normed, total = add_norm(value, residual)
    return quantise(normed), total


@pytest.mark.parametrize("steer", [plain, vectors, programs])
def test_norm_and_quantisation_are_fused_behind_every_site_of_the_stream(steer: Steer) -> None:
    def forward(value: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return norm_and_quantise(value, steer(residual, value, residual))

    assert found(norm_and_quantise, forward) == 1


@pytest.mark.parametrize("steer", [vectors, programs])
def test_they_stay_apart_where_the_norms_result_is_steered(steer: Steer) -> None:
    def forward(value: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = add_norm(value, residual)
        return quantise(steer(normed, normed, None)), total

    assert found(norm_and_quantise, forward) == 0
