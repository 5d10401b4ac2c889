"""The output projection of attention, read from the module's source, and what keeps its input from being a site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

from headgate.capture.engine.model.inner_places import OutputProjection, find_output_projection
from headgate.capture.engine.model.layer_structure import analyse_layer
from headgate.capture.engine.site_action import SiteAction
from headgate.capture.engine.worker.install import install_actions
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import HookPoint, Site, SiteShape

HIDDEN = 4


class Heads(nn.Module):
    """As vLLM writes attention; the heads' results are `width` wide."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.width = width
        self.qkv_proj = nn.Linear(HIDDEN, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Any:
        q, k, v = self.qkv_proj(hidden_states).split([self.width, self.width, self.width], dim=-1)
        return self.o_proj(attend(self, q, k, v))


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Hugging Face's attention functions, which are handed the module."""
    return q * k + v


class WithWeights(Heads):
    """As Hugging Face returns the result."""

    def forward(self, hidden_states: Tensor) -> Any:
        output, weights = self.interface(self, self.qkv_proj(hidden_states), scale=self.width)
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        output = self.o_proj(output)
        return output, weights


class GatedBefore(Heads):
    def forward(self, hidden_states: Tensor) -> Tensor:
        heads = self.attn(self.qkv_proj(hidden_states)) * torch.sigmoid(self.gate(hidden_states))
        output, _ = self.o_proj(heads)
        return output


class ScaledBehind(Heads):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(hidden_states))) * self.scale


class Delegating(Heads):
    """As DeepSeek: another module does it all."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Any:
        return self.mla_attn(positions, hidden_states)


class Undecided(Heads):
    def forward(self, hidden_states: Tensor) -> Tensor:
        heads = self.attn(self.qkv_proj(hidden_states))
        return self.o_proj(heads) if hidden_states.shape[0] > 1 else self.other_proj(heads)


class Twice(Heads):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.o_proj(self.o_proj(self.qkv_proj(hidden_states)))


FOUND = OutputProjection("o_proj", 0, HIDDEN, HIDDEN)


@pytest.mark.parametrize(
    ("cls", "argument"), [(Heads, "hidden_states"), (Heads, 1), (WithWeights, 0), (GatedBefore, 0)]
)
def test_the_linear_layer_that_makes_the_result_is_found(cls: type[Heads], argument: int | str) -> None:
    assert find_output_projection(cls(), argument) == FOUND


@pytest.mark.parametrize("cls", [ScaledBehind, Delegating, Undecided, Twice])
def test_where_the_result_is_made_otherwise_none_is_found(cls: type[Heads]) -> None:
    assert find_output_projection(cls(), "hidden_states") is None


def test_a_forward_of_the_instances_own_is_not_read() -> None:
    attention = Heads()
    attention.forward = lambda positions, hidden_states: hidden_states  # type: ignore[method-assign]

    assert find_output_projection(attention, "hidden_states") is None
    assert analyse_layer(Layer, Layer(attention)).absent[HookPoint.HOOK_Z] == "vLLM replaced the forward of this Heads"


class Sharded(LinearBase):
    """Half of a linear layer, as tensor parallelism leaves it to a rank."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.input_size, self.input_size_per_partition, self.output_size = HIDDEN, HIDDEN // 2, HIDDEN


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.mid_norm, self.mlp = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.input_layernorm, self.self_attn = nn.LayerNorm(HIDDEN), attention

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(positions=None, hidden_states=normed)
        return hidden_states + self.mlp(self.mid_norm(hidden_states))


def halved() -> Heads:
    heads = Heads(HIDDEN // 2)
    heads.o_proj = Sharded()  # type: ignore[assignment]
    return heads


def refusal_of(attention: nn.Module, shape: SiteShape) -> str:
    site = Site(0, HookPoint.HOOK_Z)
    actions = {site: [SiteAction(run=lambda module, hook, site: site.carry, order=0)]}
    model = ModelInfo(name="m", num_layers=1, hidden_size=HIDDEN, dtype="float32", sites=(), shapes={site: shape})
    num_ranks = 2 if shape.shard == "columns" else 1
    with pytest.raises(UnsupportedError) as refusal:
        install_actions(nn.Module(), "layers", [(0, Layer(attention))], actions, model, num_ranks)
    return str(refusal.value)


def test_heads_without_a_projection_are_refused_with_the_reason() -> None:
    refusal = refusal_of(Delegating(), SiteShape(HIDDEN, "float32"))

    assert "hook_z: the source of Delegating shows no linear layer that makes its result" in refusal
    assert "attn_in" in refusal.partition("it has ")[2]


@pytest.mark.parametrize(
    ("attention", "shape", "why"),
    [
        (Heads(6), SiteShape(4, "float32"), "6 values, all of them on each rank; the model's configuration says 4"),
        (halved(), SiteShape(4, "float32"), "4 values, 2 of them on each tensor-parallel rank"),
        (Heads(4), SiteShape(4, "float32", "columns", 2), "says 4 (columns)"),
    ],
    ids=["wide", "sharded", "whole"],
)
def test_heads_of_another_shape_than_the_configuration_says_are_refused(
    attention: nn.Module, shape: SiteShape, why: str
) -> None:
    assert why in refusal_of(attention, shape)


@pytest.mark.parametrize(
    ("attention", "shape"),
    [(Heads(6), SiteShape(6, "float32")), (halved(), SiteShape(4, "float32", "columns", 2))],
    ids=["wide", "sharded"],
)
def test_heads_of_any_width_are_a_site(attention: nn.Module, shape: SiteShape) -> None:
    structure = analyse_layer(Layer, Layer(attention))

    assert HookPoint.HOOK_Z in structure.hooks
    place = structure.inner[HookPoint.HOOK_Z]
    assert (place.width, place.whole_width) == (shape.part_width(2), shape.width)


def test_what_the_projection_reads_is_seen_and_steered_alone() -> None:
    layer, seen = Layer(Heads()), []
    structure = analyse_layer(Layer, layer)
    stream = torch.randn(3, HIDDEN)

    def run(module: nn.Module, hook: str, site: Any) -> Tensor:
        seen.append((hook, site.value))
        return site.carry + 1.0

    with torch.inference_mode():
        heads = layer.self_attn
        q, k, v = heads.qkv_proj(layer.input_layernorm(stream)).chunk(3, dim=-1)
        mid = stream + heads.o_proj(attend(heads, q, k, v) + 1.0)
        expected = mid + layer.mlp(layer.mid_norm(mid))
        install_actions(
            nn.Module(), "layers", [(0, layer)], {Site(0, HookPoint.HOOK_Z): [SiteAction(run=run, order=0)]}
        )
        answer = layer(stream)

    place = structure.inner[HookPoint.HOOK_Z]
    assert (place.module, place.value) == ("self_attn.o_proj", 0)
    assert [hook for hook, _ in seen] == ["hook_z"]
    torch.testing.assert_close(seen[0][1], q * k + v)
    torch.testing.assert_close(answer, expected)
