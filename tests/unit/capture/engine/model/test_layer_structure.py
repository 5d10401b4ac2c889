"""Hook points of a layer, read from its source: the ways to write a decoder layer, and the traps in them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headgate.capture.engine.model.layer_structure import LayerStructure, analyse_layer
from headgate.capture.schema.sites import INNER_HOOKS, HookPoint

ALL = frozenset(HookPoint) - INNER_HOOKS - {HookPoint.FINAL_NORM, HookPoint.HOOK_Z}
"""Of a class alone: `hook_z` and the inner ones are read from the modules of a layer."""
BEFORE_POST_NORMS = frozenset({HookPoint.ATTN_OUT_PRE, HookPoint.MLP_OUT_PRE})
BOUNDARIES = frozenset({HookPoint.PRE_ATTN, HookPoint.POST_MLP})


class Layer(nn.Module):
    """The submodules that the layers below call; none of them is ever run."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any


class Pair(Layer):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


def test_a_pair_of_branch_and_residual() -> None:
    assert analyse_layer(Pair) == LayerStructure(
        style="pair",
        hidden="hidden_states",
        residual="residual",
        mid="post_attention_layernorm",
        mid_input=0,
        mid_residual=1,
        mid_norm="post_attention_layernorm",
        first_norm="input_layernorm",
        attn="self_attn",
        attn_input="hidden_states",
        mlp="mlp",
        mlp_input=0,
        mlp_in_is_norm_output=True,
        hooks=ALL,
    )


class Sandwich(Layer):
    def forward(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.post_attention_layernorm(self.self_attn(hidden_states))
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual=residual)
        return self.post_feedforward_layernorm(self.mlp(x=hidden_states)), residual


def test_post_norms_belong_to_the_branch() -> None:
    structure = analyse_layer(Sandwich)

    assert (structure.mid, structure.mid_input, structure.mid_residual) == ("pre_feedforward_layernorm", 0, "residual")
    assert (structure.mlp, structure.mlp_input) == ("mlp", "x")
    assert structure.first_norm == "input_layernorm"
    assert structure.hooks == ALL | BEFORE_POST_NORMS


class Rescaled(Layer):
    def forward(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        residual *= self.scale
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Gated(Layer):
    def forward(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states) * self.gate(residual)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class AddedBefore(Layer):
    def forward(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        residual = hidden_states if residual is None else hidden_states + residual
        hidden_states = self.self_attn(self.input_layernorm(residual))
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


@pytest.mark.parametrize("cls", [Rescaled, Gated, AddedBefore])
def test_the_first_norm_is_told_only_if_it_hands_the_mid_norm_its_residual_unread(cls: type[nn.Module]) -> None:
    structure = analyse_layer(cls)

    assert (structure.mid, structure.mid_residual) == ("post_attention_layernorm", 1)
    assert structure.first_norm is None


class Single(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states)
        hidden_states = residual + hidden_states * self.residual_multiplier
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + self.residual_multiplier * hidden_states


def test_a_single_stream_with_a_multiplier() -> None:
    assert analyse_layer(Single) == LayerStructure(
        style="single",
        hidden="hidden_states",
        mid="post_attention_layernorm",
        mid_input=0,
        mid_norm="post_attention_layernorm",
        attn="self_attn",
        attn_input="hidden_states",
        mlp="mlp",
        mlp_input=0,
        mlp_in_is_norm_output=True,
        attn_branch="self_attn",
        mlp_branch="mlp",
        branch_scale="residual_multiplier",
        hooks=ALL,
    )


class ComputedMultiplier(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x)) * (self.depth / math.sqrt(self.num_layers))
        return x + self.mlp(self.post_attention_layernorm(x)) * (self.depth / math.sqrt(self.num_layers))


def test_branches_with_a_computed_multiplier_are_not_offered() -> None:
    structure = analyse_layer(ComputedMultiplier)

    assert (structure.attn_branch, structure.mlp_branch, structure.branch_scale) == (None, None, None)
    assert structure.hooks == ALL - {HookPoint.ATTN_OUT, HookPoint.MLP_OUT}


class PostNormOnly(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.post_attention_layernorm(self.self_attn(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))


def test_without_a_norm_the_mlp_reads_the_mid_stream() -> None:
    structure = analyse_layer(PostNormOnly)

    assert (structure.mid, structure.mid_norm) == ("mlp", None)
    assert (structure.mlp, structure.mlp_in_is_norm_output) == ("mlp", False)
    assert (structure.attn_branch, structure.mlp_branch) == ("post_attention_layernorm", "post_feedforward_layernorm")
    assert (structure.attn, structure.attn_input) == ("self_attn", 0)
    assert structure.hooks == ALL | BEFORE_POST_NORMS
    places = {hook.value: (place.module, place.value) for hook, place in structure.inner.items()}
    assert places == {
        "attn_out_pre": ("post_attention_layernorm", 0),
        "mlp_out_pre": ("post_feedforward_layernorm", 0),
    }


class Parallel(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        attn_outputs = self.resid_dropout(self.self_attn(hidden_states)[0])
        return attn_outputs + self.resid_dropout(self.mlp(hidden_states)) + residual


def test_parallel_attention_has_no_mid_stream() -> None:
    structure = analyse_layer(Parallel)

    assert (structure.mid, structure.attn_branch) == (None, "self_attn")
    assert (structure.mlp_branch, structure.mlp) == ("mlp", "mlp")
    assert (structure.attn, structure.attn_input) == ("self_attn", 0)
    assert structure.hooks == ALL - {HookPoint.POST_ATTN}


class InPlace(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        branch = self.self_attn(self.input_layernorm(hidden_states))
        branch *= self.scale
        residual += branch
        return torch.add(self.mlp(self.post_attention_layernorm(hidden_states)), hidden_states)


def test_in_place_addition_is_seen_through_every_name() -> None:
    structure = analyse_layer(InPlace)

    assert (structure.mid, structure.mid_norm) == ("post_attention_layernorm", "post_attention_layernorm")
    assert HookPoint.ATTN_OUT not in structure.hooks, "the module's output is scaled after it was returned"


class IgnoresResidual(Layer):
    """As Cohere, HyperCLOVAX, MiniCPM, Gemma 4: the pair is handed through, hidden is complete."""

    def forward(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        residual = hidden_states
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = residual + self.self_attn(hidden_states) + self.mlp(hidden_states)
        return hidden_states, residual


def test_a_residual_that_is_handed_through_is_no_pair() -> None:
    structure = analyse_layer(IgnoresResidual)

    assert (structure.style, structure.residual) == ("single", None)
    assert structure.hooks == ALL - {HookPoint.POST_ATTN}


class Conditional(Layer):
    """As OPT and Bloom: the instance says where the norms are."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        if self.do_layer_norm_before:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = residual + self.self_attn(hidden_states=hidden_states)
        if not self.do_layer_norm_before:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        residual = hidden_states
        if self.do_layer_norm_before:
            hidden_states = self.final_layer_norm(hidden_states)
        hidden_states, _ = self.fc1(hidden_states)
        hidden_states, _ = self.fc2(self.activation_fn(hidden_states))
        hidden_states = residual + hidden_states
        if not self.do_layer_norm_before:
            hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states


class Asking(Layer):
    """As GPTBigCode: asks itself by name whether it has more modules, and which."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        hidden_states = hidden_states + getattr(self, "self_attn")(self.input_layernorm(hidden_states))  # noqa: B009
        if encoder_hidden_states is not None:
            if not hasattr(self, "crossattention"):
                raise ValueError
            hidden_states = hidden_states + self.crossattention(hidden_states, encoder_hidden_states)
        if (extra := getattr(self, "extra_norm", None)) is not None:
            return extra(hidden_states)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize(
    ("layer", "all_hooks", "boundaries", "places"),
    [
        (
            Conditional,
            SimpleNamespace(do_layer_norm_before=True),
            [SimpleNamespace(do_layer_norm_before=False), None],
            ("final_layer_norm", "fc1", "self_attn", "fc2"),
        ),
        (
            Asking,
            SimpleNamespace(),
            [SimpleNamespace(crossattention=None)],
            ("post_attention_layernorm", "mlp", "self_attn", "mlp"),
        ),
    ],
)
def test_the_instance_decides_what_the_class_leaves_open(
    layer: type[Layer], all_hooks: Any, boundaries: list[Any], places: tuple[str, ...]
) -> None:
    found = analyse_layer(layer, all_hooks)

    assert (found.mid, found.mlp, found.attn_branch, found.mlp_branch) == places
    assert found.hooks == ALL
    assert all(analyse_layer(layer, instance).hooks == BOUNDARIES for instance in boundaries)


class Experts(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        normed = self.post_attention_layernorm(hidden_states)
        branch = self.feed_forward(normed)
        return hidden_states + branch

    def feed_forward(self, normed: Tensor, scale: float | None = None) -> Tensor:
        if scale is not None:
            normed = normed * scale
        return self.experts(normed.view(-1, 8), self.gate(normed))


def test_methods_of_the_layer_are_followed() -> None:
    structure = analyse_layer(Experts)

    assert (structure.mlp, structure.mlp_branch, structure.mlp_in_is_norm_output) == ("experts", "experts", True)
    assert structure.hooks == ALL


class TwoBranches(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed) * self.a + self.mamba(normed) * self.b
        normed = self.pre_ff_layernorm(hidden_states)
        return hidden_states + self.feed_forward(normed) + self.shared_expert(normed)


def test_a_branch_of_two_modules_has_no_one_output() -> None:
    structure = analyse_layer(TwoBranches)

    assert structure.mid == "pre_ff_layernorm"
    assert structure.hooks == ALL - {HookPoint.ATTN_IN, HookPoint.ATTN_OUT, HookPoint.MLP_OUT}


class TwoAttentions(Layer):
    """As LongCat-Flash."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.self_attn[0](self.input_layernorm[0](hidden_states))
        hidden_states = hidden_states + self.mlps[0](self.post_attention_layernorm[0](hidden_states))
        hidden_states = hidden_states + self.self_attn[1](self.input_layernorm[1](hidden_states))
        return hidden_states + self.mlps[1](self.post_attention_layernorm[1](hidden_states))


class MixerOnly(Layer):
    """As Mamba and Nemotron-H."""

    def forward(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
        else:
            hidden_states, residual = self.norm(hidden_states, residual)
        return self.mixer(hidden_states), residual


@pytest.mark.parametrize("layer", [TwoAttentions, MixerOnly])
def test_layers_of_another_make_offer_their_boundaries(layer: type[nn.Module]) -> None:
    structure = analyse_layer(layer)

    assert structure.hooks == BOUNDARIES
    assert structure.mid is None
