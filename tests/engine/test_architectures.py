"""Every model type that can be built tiny is captured and steered as Hugging Face computes it, or refused.

``architectures_vllm_0.32.json`` holds the results of vLLM 0.32 on a CPU, seen and judged: a type that behaves otherwise
shows up as a difference. ``architectures_vllm_0.26_gpu.json`` holds those of a call on a GPU (``gpu_call models``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headgate.capture.schema.sites import HookPoint, Site
from tests.engine.architecture_reference import STEERED_LAYER, Rows, vector
from tests.engine.architecture_runs import BOUNDS_IN_BFLOAT16, check_sums, compare_with_modules, serve_alone
from tests.engine.architectures import (
    HIDDEN,
    LAYERS,
    LIKE_OWN_MODULES,
    PAGE,
    Trials,
    coverage,
    judged,
    make_model,
    summary,
    table,
)
from tests.engine.hf_reference import own_process
from tests.engine.own_modules import different_rows, watched

RESULTS, ON_A_GPU = judged()


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as trials:
        yield trials


@pytest.mark.extended
@pytest.mark.parametrize("model_type", RESULTS)
def test_a_type_is_as_it_was_judged(model_type: str, trials: Trials) -> None:
    found = trials.try_type(model_type)

    expected = RESULTS[model_type]
    assert (found["result"], found.get("hooks")) == (expected["result"], expected.get("hooks")), found


def test_nothing_that_was_served_is_wrong() -> None:
    results = [found["result"] for found in RESULTS.values()]

    assert {*results, *(found["result"] for found in ON_A_GPU.values())} <= {
        *("equal", "as vLLM", LIKE_OWN_MODULES, "refused", "not built")
    }
    assert results.count("equal") > 30


def test_the_page_shows_the_results() -> None:
    page = PAGE.read_text()

    assert table(RESULTS) in page
    assert table(ON_A_GPU) in page
    assert summary(RESULTS) in page.replace("\n", " ")


def test_the_page_says_how_much_of_vllm_was_tried() -> None:
    assert coverage(RESULTS, ON_A_GPU) in PAGE.read_text().replace("\n", " ")


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_vllms_own_modules(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_TEST_ENGINE", json.dumps({"dtype": dtype}))
    folder = tmp_path / "qwen3_moe"
    with own_process() as helpers:
        helpers.submit(make_model, folder.name, folder).result()

    found = compare_with_modules(folder, serve_alone(folder))

    assert found["result"] == LIKE_OWN_MODULES, found


class Stream(nn.Module):
    """A norm as vLLM's: with the stream so far, it returns the sum beside its rows."""

    def forward(self, rows: torch.Tensor, stream: torch.Tensor | None = None) -> Any:
        return rows / 2 if stream is None else ((rows + stream) / 2, rows + stream)


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Stream(), Stream()
        self.self_attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, stream: torch.Tensor | None) -> Any:
        stream, rows = (
            (rows, self.input_layernorm(rows)) if stream is None else self.input_layernorm(rows, stream)[::-1]
        )
        rows, stream = self.post_attention_layernorm(self.self_attn(rows), stream)
        return self.mlp(rows), stream


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([TinyLayer(), TinyLayer()]), Stream()

    @torch.no_grad()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        stream = None
        for layer in self.layers:
            rows, stream = layer(rows, stream)
        return self.norm(rows, stream)[0]


def test_hooks_see_the_stream_before_a_vector_is_added() -> None:
    model, given, added = TinyModel(), torch.randn(5, 4), torch.ones(4)

    with watched(model, 2, {}) as plain:
        for step in given.split(3):
            model(step)
    with watched(model, 2, {0: added}) as steered:
        for step in given.split(3):
            model(step)

    rows = {site: torch.cat(parts) for site, parts in plain.items()}
    after, following = Site(0, HookPoint.POST_MLP), Site(1, HookPoint.PRE_ATTN)
    assert torch.equal(rows[Site(0, HookPoint.PRE_ATTN)], given)
    assert torch.equal(rows[after], rows[Site(0, HookPoint.POST_ATTN)] + rows[Site(0, HookPoint.MLP_OUT)])
    assert torch.equal(rows[after], rows[following])
    assert torch.allclose(torch.cat(steered[following]), rows[after] + added)
    assert different_rows({after: rows[after]}, steered) == {}
    assert different_rows({after: rows[after].roll(1, 0)}, steered) == {"0.post_mlp": 5}


BOUNDARIES = (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.MLP_OUT, HookPoint.POST_MLP)


def streams_in_bfloat16() -> Rows:
    """What a steered run in bfloat16 leaves: every sum is rounded, the vector is added to the branch."""
    generator = torch.Generator().manual_seed(5)
    stream = torch.randn(40, HIDDEN, generator=generator).bfloat16()
    rows: Rows = {}
    for index in range(LAYERS):
        attention, branch = (torch.randn(40, HIDDEN, generator=generator).bfloat16() for _ in range(2))
        between = stream + attention
        left = between + branch
        rows |= {Site(index, hook): row for hook, row in zip(BOUNDARIES, (stream, between, branch, left), strict=True)}
        stream = between + (branch + vector()).bfloat16() if index == STEERED_LAYER else left
    return rows


def test_rounding_to_bfloat16_is_no_other_stream() -> None:
    check_sums(streams_in_bfloat16(), BOUNDARIES, is_steered=True, bounds=BOUNDS_IN_BFLOAT16)


@pytest.mark.parametrize(("layer", "hook"), [(1, HookPoint.PRE_ATTN), (2, HookPoint.POST_ATTN), (2, HookPoint.MLP_OUT)])
def test_another_layers_stream_is_found_in_bfloat16(layer: int, hook: HookPoint) -> None:
    rows = streams_in_bfloat16()
    rows[Site(layer, HookPoint.PRE_ATTN)] = rows[Site(layer - 1, hook)]

    with pytest.raises(AssertionError, match=f"layer {layer} gets another stream"):
        check_sums(rows, BOUNDARIES, is_steered=True, bounds=BOUNDS_IN_BFLOAT16)


def test_a_vector_that_was_not_added_is_found_in_bfloat16() -> None:
    rows = streams_in_bfloat16()
    rows[Site(STEERED_LAYER + 1, HookPoint.PRE_ATTN)] = rows[Site(STEERED_LAYER, HookPoint.POST_MLP)]

    with pytest.raises(AssertionError, match=f"layer {STEERED_LAYER + 1} gets another stream"):
        check_sums(rows, BOUNDARIES, is_steered=True, bounds=BOUNDS_IN_BFLOAT16)
