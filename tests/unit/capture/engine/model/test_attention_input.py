"""The input of attention, read from a layer's source: one argument that all ways to its branch pass, or none."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from headgate.capture.engine.model.layer_structure import analyse_layer
from headgate.capture.schema.sites import HookPoint


class Layer(nn.Module):
    """The submodules that the layers below call; none of them is ever run."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any


class WithinTheLayer(Layer):
    """As Jamba: the layer is its own attention."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.attention(self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    def attention(self, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        output, _ = self.o_proj(self.attn(self.q_norm(q), self.k_norm(k), v))
        return output


def test_attention_begins_where_all_ways_to_its_branch_pass() -> None:
    structure = analyse_layer(WithinTheLayer)

    assert (structure.attn, structure.attn_input) == ("qkv_proj", 0)
    assert HookPoint.ATTN_IN in structure.hooks


class SplitInput(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        attended = self.attn(self.q_proj(normed), self.k_proj(normed), self.v_proj(normed))
        hidden_states = hidden_states + self.o_proj(attended)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class GatedByTheStream(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended * self.gate(hidden_states)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class ReadsBoth(Layer):
    """As PLaMo 3."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, residual=hidden_states)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class NormedTwice(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.second_norm(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + self.self_attn(normed)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Converted(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.widen(self.input_layernorm(hidden_states).to(self.dtype)))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize("layer", [SplitInput, GatedByTheStream, ReadsBoth, NormedTwice, Converted])
def test_attention_that_reads_the_stream_in_no_one_argument_has_no_input_of_its_own(layer: type[nn.Module]) -> None:
    structure = analyse_layer(layer)

    assert (structure.attn, structure.attn_input) == (None, None)
    assert HookPoint.ATTN_IN not in structure.hooks
    assert structure.hooks >= {HookPoint.POST_ATTN, HookPoint.MLP_IN}
