"""The reference itself: it must stand before anything is compared with it. No vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.engine.hf_reference import ANATOMIES, Anatomy, HFReference, Reference, Steering, relative_error, row_cosines
from tests.engine.tiny_models import FAMILIES, HIDDEN, LAYERS, MIXERS, tiny_model

PROMPT = [1, *range(7, 60, 3)]
OUTPUT = [11, 12, 13, 14]
ORDER = [
    HookPoint.PRE_ATTN,
    HookPoint.ATTN_IN,
    HookPoint.HOOK_Z,
    HookPoint.ATTN_OUT,
    HookPoint.POST_ATTN,
    HookPoint.MLP_IN,
    HookPoint.MLP_OUT,
    HookPoint.POST_MLP,
]
ATTENTION = (HookPoint.ATTN_IN, HookPoint.HOOK_Z, HookPoint.ATTN_OUT)
ALIKE = {
    "olmo2": [{HookPoint.PRE_ATTN, HookPoint.ATTN_IN}, {HookPoint.POST_ATTN, HookPoint.MLP_IN}],
    "phi": [{HookPoint.ATTN_IN, HookPoint.MLP_IN}],
}
"""Equal by definition: OLMo2's branches read the stream itself, Phi's read it through one norm."""
VECTOR = torch.linspace(-1.0, 2.0, HIDDEN).sin()


def width(reference: HFReference, hook: HookPoint) -> int:
    """Elements of a row: the heads of some families are together wider than the stream."""
    if hook is not HookPoint.HOOK_Z:
        return HIDDEN
    config = reference.model.config.get_text_config()
    heads: int = config.num_attention_heads
    return heads * (getattr(config, "head_dim", None) or HIDDEN // heads)


def test_every_family_has_a_model_and_an_anatomy() -> None:
    assert set(ANATOMIES) == {*FAMILIES, "gpt_oss", *MIXERS}  # `quantised_models` makes those of gpt_oss


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_hook_point_agree_with_each_other(family: str) -> None:
    reference = HFReference(tiny_model(family), family)

    found = reference.run(PROMPT, OUTPUT)

    hooks = reference.hooks - {HookPoint.FINAL_NORM}
    assert set(found.rows) == {Site(layer, hook) for layer in range(LAYERS) for hook in hooks} | {FINAL_NORM_SITE}
    num_tokens = len(PROMPT) + len(OUTPUT) - 1
    assert all(rows.shape == (num_tokens, width(reference, site.hook)) for site, rows in found.rows.items())
    assert found.next_tokens.shape == (num_tokens,)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_hook_points_of_a_layer_are_alike(family: str) -> None:
    """Otherwise a site taken at the wrong place could pass."""
    reference = HFReference(tiny_model(family), family)

    rows = reference.run(PROMPT, OUTPUT).rows

    hooks = [hook for hook in sorted(reference.hooks) if hook is not HookPoint.FINAL_NORM]
    for layer in range(LAYERS):
        for at, first in enumerate(hooks):
            for second in hooks[at + 1 :]:
                if width(reference, first) != width(reference, second):
                    continue
                error = relative_error(rows[Site(layer, first)], rows[Site(layer, second)])
                assert (error < 1e-2) == ({first, second} in ALIKE.get(family, [])), (layer, first, second, error)


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


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest) -> HFReference:
    return HFReference(tiny_model(request.param), request.param)


def steered(reference: HFReference, site: Site, vector: torch.Tensor | None = None) -> Reference:
    vector = torch.linspace(-1.0, 2.0, width(reference, site.hook)).sin() if vector is None else vector
    return reference.run(PROMPT, OUTPUT, Steering({site: vector}, {site: vector}))


def test_a_vector_acts_on_what_comes_after_its_site_alone(reference: HFReference) -> None:
    plain = reference.run(PROMPT, OUTPUT)

    for at, hook in enumerate(ORDER):
        if hook not in reference.hooks:
            continue
        found = steered(reference, Site(1, hook))
        before = {Site(0, other) for other in reference.hooks - {HookPoint.FINAL_NORM}}
        before |= {Site(1, other) for other in ORDER[: at + 1] if other in reference.hooks}
        if reference.anatomy.mid is None and hook in ATTENTION:
            before |= {Site(1, HookPoint.MLP_IN), Site(1, HookPoint.MLP_OUT)}  # they read the stream as it entered
        if hook is HookPoint.MLP_OUT:
            before |= {Site(1, HookPoint.MLP_IN)}
        same = {site for site, rows in found.rows.items() if torch.equal(rows, plain.rows[site])}
        assert same == before, hook
        assert relative_error(found.logits, plain.logits) > 1e-2, hook


def test_a_vector_before_the_head_acts_on_logits_alone(reference: HFReference) -> None:
    plain = reference.run(PROMPT, OUTPUT)

    found = steered(reference, FINAL_NORM_SITE)

    assert all(torch.equal(rows, plain.rows[site]) for site, rows in found.rows.items())
    assert relative_error(found.logits, plain.logits) > 1e-2


def test_places_that_mean_the_same_act_alike_and_others_do_not(reference: HFReference) -> None:
    added_last = {Site(1, HookPoint.MLP_OUT), Site(1, HookPoint.POST_MLP)}
    alike = [{Site(0, HookPoint.MLP_OUT), Site(0, HookPoint.POST_MLP), Site(1, HookPoint.PRE_ATTN)}]
    if HookPoint.POST_ATTN in reference.hooks:
        alike += [added_last, {Site(1, HookPoint.ATTN_OUT), Site(1, HookPoint.POST_ATTN)}]
    else:
        alike.append(added_last | {Site(1, HookPoint.ATTN_OUT)})
    sites = [Site(0, HookPoint.MLP_OUT), Site(0, HookPoint.POST_MLP), Site(-1, HookPoint.FINAL_NORM)]
    sites += [Site(1, hook) for hook in ORDER if hook in reference.hooks]
    logits = {site: steered(reference, site).logits for site in sites}

    for at, first in enumerate(sites):
        for second in sites[at + 1 :]:
            error = relative_error(logits[first], logits[second])
            if any({first, second} <= group for group in alike):
                assert error < 1e-5, (first, second, error)
            else:
                assert error > 1e-3, (first, second, error)


def test_phases_are_positions(reference: HFReference) -> None:
    site, plain = Site(0, HookPoint.POST_MLP), reference.run(PROMPT, OUTPUT)

    prefill = reference.run(PROMPT, OUTPUT, Steering(prefill={site: VECTOR}))
    decode = reference.run(PROMPT, OUTPUT, Steering(decode={site: VECTOR}))

    num_prompt = len(PROMPT)
    both = steered(reference, site)
    assert relative_error(prefill.logits[:num_prompt], both.logits[:num_prompt]) < 1e-6
    assert relative_error(decode.logits[:num_prompt], plain.logits[:num_prompt]) < 1e-6
    after = [found.logits[num_prompt:] for found in (plain, prefill, decode, both)]
    assert all(relative_error(one, other) > 1e-3 for i, one in enumerate(after) for other in after[:i])


def test_a_vector_of_zeros_is_nothing_and_signs_count(reference: HFReference) -> None:
    site, plain = Site(1, HookPoint.ATTN_OUT), reference.run(PROMPT, OUTPUT)

    zero, positive, negative = (steered(reference, site, scale * VECTOR) for scale in (0.0, 1.0, -1.0))

    assert torch.equal(zero.logits, plain.logits)
    stream = Site(1, HookPoint.POST_MLP if reference.anatomy.mid is None else HookPoint.POST_ATTN)
    for sign, found in ((1, positive), (-1, negative)):
        expected = plain.rows[stream] + sign * VECTOR
        assert relative_error(found.rows[stream], expected) < 1e-5


def test_a_site_that_the_model_lacks_is_no_place_for_a_vector() -> None:
    reference = HFReference(tiny_model("phi"), "phi")

    with pytest.raises(AssertionError, match="no such sites"):
        steered(reference, Site(0, HookPoint.POST_ATTN))


def test_a_tiny_model_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first, second = (load_file(tiny_model("mixtral", tmp_path / name) / "model.safetensors") for name in "ab")

    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_measures() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 2.0]])

    assert relative_error(expected + torch.tensor([0.0, 1.0]), expected) == 0.25
    assert row_cosines(torch.tensor([[6.0, 8.0], [2.0, 0.0]]), expected).tolist() == pytest.approx([1.0, 0.0])
