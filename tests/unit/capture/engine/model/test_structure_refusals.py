"""Layers whose stream cannot be told are refused, with a message that names the class and what is in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headgate.capture.engine.model.layer_structure import analyse_layer
from headgate.capture.schema.errors import UnsupportedError


def fused_allreduce_norm(norm: Any, branch: Tensor, residual: Tensor) -> Any:
    raise NotImplementedError


def reduce_scatter(branch: Tensor) -> Tensor:
    raise NotImplementedError


class Deferred(nn.Module):
    """The all-reduce is left to a helper that does the norm's work: the norm's hooks would not run."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Any:
        hidden_states, residual = fused_allreduce_norm(self.input_layernorm, hidden_states, residual)
        return self.mlp(self.self_attn(hidden_states)), residual


class Specialised(nn.Module):
    def forward(self, hidden_states: Tensor) -> Any:
        return hidden_states + decode(self, hidden_states)


def decode(layer: nn.Module, hidden_states: Tensor) -> Tensor:
    raise NotImplementedError


class Sharded(nn.Module):
    def forward(self, hidden_states: Tensor) -> Any:
        hidden_states = hidden_states + reduce_scatter(self.self_attn(self.norm(hidden_states)))
        return hidden_states + self.mlp(self.mid_norm(hidden_states))


class Streams(nn.Module):
    def forward(self, hidden_states: Tensor, residual: Tensor, post_mix: Tensor) -> Any:
        return hidden_states, residual, post_mix


class HyperConnected(nn.Module):
    def forward(self, x: Tensor) -> Any:
        branch, weights = self.hc_pre(x)
        return self.hc_post(self.self_attn(branch), x, weights)


class Mixed(nn.Module):
    def forward(self, hidden_states: Tensor) -> Any:
        return torch.lerp(hidden_states, self.mlp(hidden_states), 0.5)


class Twice(nn.Module):
    def forward(self, hidden_states: Tensor) -> Any:
        return hidden_states + self.mlp(hidden_states) + hidden_states


class Dropped(nn.Module):
    def forward(self, hidden_states: Tensor, residual: Tensor) -> Any:
        return hidden_states + residual + self.mlp(hidden_states)


class Nameless(nn.Module):
    def forward(self, tokens: Tensor) -> Any:
        return tokens


class Looped(nn.Module):
    def forward(self, hidden_states: Tensor) -> Any:
        for block in self.blocks:
            hidden_states = hidden_states + block(hidden_states)
        return hidden_states


class Whiled(nn.Module):
    def forward(self, hidden_states: Tensor) -> Any:
        while self.more(hidden_states):
            hidden_states = hidden_states + self.mlp(hidden_states)
        return hidden_states


class Raising(nn.Module):
    def forward(self, hidden_states: Tensor) -> Any:
        raise NotImplementedError


class Undecided(nn.Module):
    """A pair on one path, a single stream on another."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Any:
        if self.fused:
            hidden_states, residual = self.norm(hidden_states, residual)
            return self.mlp(hidden_states), residual
        return hidden_states + self.mlp(hidden_states), None


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Deferred, r"fused_allreduce_norm\(\.\.\.\) is handed input_layernorm and may bypass it"),
        (Specialised, r"decode\(\.\.\.\) is handed the layer and may bypass it"),
        (Sharded, r"reduce_scatter\(\.\.\.\) spreads the rows of the batch over ranks"),
        (Streams, "forward returns 3 values"),
        (HyperConnected, "forward returns hc_post without its input stream"),
        (Mixed, r"forward returns torch\.lerp\(\.\.\.\) without its input stream"),
        (Twice, "or with it twice"),
        (Dropped, "residual is added to what forward returns, but is not carried on"),
        (Nameless, r"none of forward's parameters is known to be the stream: \['tokens'\]"),
        (Looped, r"a loop over self\.blocks"),
        (Whiled, r"a loop: while self\.more\(hidden_states\)"),
        (Raising, "no path through forward returns"),
        (Undecided, "in one way on one path, otherwise on another"),
    ],
)
def test_refused_by_name(layer: type[nn.Module], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"test_structure_refusals\.{layer.__name__}: .*{reason}"):
        analyse_layer(layer)


def test_source_that_cannot_be_read_is_refused() -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Generated(nn.Module):\n    def forward(self, hidden_states): return hidden_states", namespace)

    with pytest.raises(UnsupportedError, match=r"cannot read the source of Generated\.forward"):
        analyse_layer(namespace["Generated"])


def test_an_instance_with_another_forward_is_refused() -> None:
    layer = Sharded()
    layer.forward = lambda hidden_states: hidden_states  # type: ignore[method-assign]

    with pytest.raises(UnsupportedError, match=r"Sharded: the forward of this instance was replaced"):
        analyse_layer(Sharded, layer)


class Many(nn.Module):
    def forward(self, hidden_states: Tensor, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        if a or b or c or d or e or f:
            hidden_states = hidden_states + self.mlp(hidden_states)
        if (a and 1) or (b and 2) or (c and 3) or (d and 4) or (e and 5) or (f and 6):
            hidden_states = hidden_states + self.self_attn(hidden_states)
        if a > 1 or b > 1 or c > 1 or d > 1 or e > 1 or f > 1:
            hidden_states = hidden_states + self.conv(hidden_states)
        if a > 2 or b > 2 or c > 2 or d > 2 or e > 2 or f > 2:
            hidden_states = hidden_states + self.moe(hidden_states)
        if a > 3 or b > 3 or c > 3 or d > 3 or e > 3 or f > 3:
            return hidden_states
        return hidden_states


def test_a_maze_of_conditions_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="more than 1024 paths"):
        analyse_layer(Many)
