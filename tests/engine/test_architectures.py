"""Every model type that can be built tiny is captured and steered as Hugging Face computes it, or refused.

``architectures_vllm_0.32.json`` holds the results of vLLM 0.32 on a CPU, seen and judged: a type that behaves otherwise
shows up as a difference. ``architectures_vllm_0.26_gpu.json`` holds those of a call on a GPU (``gpu_call models``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.architectures import Trials, coverage, judged, summary, table

RESULTS, ON_A_GPU = judged()
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


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
