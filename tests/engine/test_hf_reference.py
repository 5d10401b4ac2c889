"""The reference itself: it must stand before anything is compared with it. No vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headgate.capture.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.engine.hf_reference import ANATOMIES, Anatomy, HFReference, relative_error, row_cosines
from tests.engine.tiny_models import FAMILIES, HIDDEN, LAYERS, tiny_model

PROMPT = [1, *range(7, 60, 3)]
OUTPUT = [11, 12, 13, 14]


def test_every_family_has_a_model_and_an_anatomy() -> None:
    assert set(ANATOMIES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_hook_point_agree_with_each_other(family: str) -> None:
    reference = HFReference(tiny_model(family), family)

    found = reference.run(PROMPT, OUTPUT)

    hooks = reference.hooks - {HookPoint.FINAL_NORM}
    assert set(found.rows) == {Site(layer, hook) for layer in range(LAYERS) for hook in hooks} | {FINAL_NORM_SITE}
    num_tokens = len(PROMPT) + len(OUTPUT) - 1
    assert {rows.shape for rows in found.rows.values()} == {(num_tokens, HIDDEN)}
    assert found.next_tokens.shape == (num_tokens,)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_hook_points_of_a_layer_are_alike(family: str) -> None:
    """Otherwise a site taken at the wrong place could pass; OLMo2's MLP reads the stream itself."""
    reference = HFReference(tiny_model(family), family)

    rows = reference.run(PROMPT, OUTPUT).rows

    equal_by_definition = {HookPoint.POST_ATTN, HookPoint.MLP_IN} if family == "olmo2" else set()
    hooks = [hook for hook in sorted(reference.hooks) if hook is not HookPoint.FINAL_NORM]
    for layer in range(LAYERS):
        for at, first in enumerate(hooks):
            for second in hooks[at + 1 :]:
                error = relative_error(rows[Site(layer, first)], rows[Site(layer, second)])
                assert (error < 1e-2) == ({first, second} == equal_by_definition), (layer, first, second, error)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("gemma3", Anatomy()),
        ("granite", Anatomy()),
        ("olmo2", Anatomy(mid="mlp")),
        ("llama", Anatomy(mid="input_layernorm")),
    ],
)
def test_a_wrong_anatomy_is_found_out(family: str, wrong: Anatomy) -> None:
    reference = HFReference(tiny_model(family), family)
    reference.anatomy = wrong

    with pytest.raises(AssertionError, match="relative error"):
        reference.run(PROMPT, OUTPUT)


def test_a_tiny_model_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first, second = (load_file(tiny_model("mixtral", tmp_path / name) / "model.safetensors") for name in "ab")

    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_measures() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 2.0]])

    assert relative_error(expected + torch.tensor([0.0, 1.0]), expected) == 0.25
    assert row_cosines(torch.tensor([[6.0, 8.0], [2.0, 0.0]]), expected).tolist() == pytest.approx([1.0, 0.0])
