"""Every model type that can be built tiny is captured and steered as Hugging Face computes it, or refused.

``architectures_vllm_0.32.json`` holds the results of vLLM 0.32 on a CPU, seen and judged: a type that behaves otherwise
shows up as a difference. ``architectures_vllm_0.26_gpu.json`` holds those of a call on a GPU (``gpu_call models``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headgate.capture.schema.sites import HookPoint, Site
from tests.engine.architecture_reference import STEERED_LAYER, Rows, vector
from tests.engine.architecture_runs import BOUNDS_IN_BFLOAT16, check_sums
from tests.engine.architectures import HIDDEN, LAYERS, PAGE, Trials, coverage, judged, summary, table

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

    assert {*results, *(found["result"] for found in ON_A_GPU.values())} <= {"equal", "as vLLM", "refused", "not built"}
    assert results.count("equal") > 30


def test_the_page_shows_the_results() -> None:
    page = PAGE.read_text()

    assert table(RESULTS) in page
    assert table(ON_A_GPU) in page
    assert summary(RESULTS) in page.replace("\n", " ")


def test_the_page_says_how_much_of_vllm_was_tried() -> None:
    assert coverage(RESULTS, ON_A_GPU) in PAGE.read_text().replace("\n", " ")


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
