"""Actions in a module's forward: where they run, in which order, and what they may change."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType

import pytest
import torch
from torch import nn

from headgate.capture.engine import graph
from headgate.capture.engine.install import _repays
from headgate.capture.engine.layout import LayerLayout
from headgate.capture.engine.seam import SiteAction
from headgate.capture.sites import HookPoint


class PairLayer(nn.Module):
    """Carries ``(hidden, residual)`` as vLLM's fused layers do."""

    def forward(self, positions, hidden_states, residual, **kwargs):
        if residual is None:
            return hidden_states * 2, hidden_states
        return hidden_states * 2, residual + hidden_states


class SingleLayer(nn.Module):
    """Carries the stream alone and returns it first of a tuple."""

    def forward(self, hidden_states, mask=None):
        return hidden_states * 3, "cache"


class Block(nn.Module):
    """A submodule called with ``(x, residual)``."""

    def forward(self, x, residual):
        return x + residual, residual


PAIR = LayerLayout(style="pair", hidden="hidden_states", residual="residual")
SINGLE = LayerLayout(style="single", hidden="hidden_states")


def record(seen, name="seen", add=0.0):
    """An action that notes the value and moves the carry."""

    def run(module, hook, site):
        total = site.value if site.addend is None else site.value + site.addend
        seen.append((name, hook, total.tolist()))
        return site.carry + add

    return run


def test_a_pair_layer_sees_the_sum_and_moves_the_residual():
    seen: list = []
    layer = PairLayer()
    runs = {hook: (record(seen, add=10.0),) for hook in (HookPoint.PRE_ATTN, HookPoint.POST_MLP)}
    graph.swap_class(layer, graph.layer_forward(PAIR, runs, ["positions", "hidden_states", "residual"]))

    hidden, residual = layer(None, torch.tensor([1.0]), residual=torch.tensor([2.0]))

    assert seen == [("seen", "pre_attn", [3.0]), ("seen", "post_mlp", [1.0 * 2 + (2.0 + 10 + 1)])]
    assert hidden.tolist() == [2.0], "a vector never goes onto the branch"
    assert residual.tolist() == [23.0]


def test_the_first_layer_of_a_pair_model_has_no_residual_yet():
    seen: list = []
    layer = PairLayer()
    runs = {HookPoint.PRE_ATTN: (record(seen, add=10.0),)}
    graph.swap_class(layer, graph.layer_forward(PAIR, runs, ["positions", "hidden_states", "residual"]))

    hidden, residual = layer(None, torch.tensor([1.0]), None)

    assert seen == [("seen", "pre_attn", [1.0])]
    assert (hidden.tolist(), residual.tolist()) == ([22.0], [11.0])


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_single_layer_keeps_the_rest_of_what_it_returns(by_keyword):
    seen: list = []
    layer = SingleLayer()
    runs = {hook: (record(seen, add=1.0),) for hook in (HookPoint.PRE_ATTN, HookPoint.POST_MLP)}
    graph.swap_class(layer, graph.layer_forward(SINGLE, runs, ["hidden_states", "mask"]))

    x = torch.tensor([1.0])
    out = layer(hidden_states=x) if by_keyword else layer(x)

    assert [entry[2] for entry in seen] == [[1.0], [6.0]]
    assert (out[0].tolist(), out[1]) == ([7.0], "cache")


def test_a_submodule_is_seen_at_its_arguments_and_at_its_result():
    seen: list = []
    block = Block()
    taken = [
        (HookPoint.ATTN_OUT, graph.Place(module="b", value=0, carry=1), (record(seen, "branch"),)),
        (HookPoint.POST_ATTN, graph.Place(module="b", value=0, addend=1, carry=1), (record(seen, "mid", add=1.0),)),
        (HookPoint.MLP_IN, graph.Place(module="b"), (record(seen, "normed"),)),
        (HookPoint.MLP_OUT, graph.Place(module="b", scale=0.5), (record(seen, "scaled"),)),
    ]
    graph.swap_class(block, graph.module_forward(taken))

    out, residual = block(torch.tensor([1.0]), torch.tensor([2.0]))

    assert seen == [
        ("branch", "attn_out", [1.0]),
        ("mid", "post_attn", [3.0]),
        ("normed", "mlp_in", [4.0]),
        ("scaled", "mlp_out", [2.0]),
    ]
    assert (out.tolist(), residual.tolist()) == ([4.0], [3.0])


def test_actions_of_a_site_run_in_their_order_on_the_pristine_value():
    seen: list = []
    layer = SingleLayer()
    actions = [
        SiteAction(run=record(seen, "steer", add=5.0), order=20),
        SiteAction(run=record(seen, "capture"), order=0, tensors={"rows": torch.zeros(1)}),
        SiteAction(run=record(seen, "project", add=7.0), order=30),
    ]
    runs = {HookPoint.PRE_ATTN: graph.attach(layer, HookPoint.PRE_ATTN, actions)}
    graph.swap_class(layer, graph.layer_forward(SINGLE, runs, ["hidden_states", "mask"]))

    out, _ = layer(torch.tensor([1.0]))

    assert [(name, value) for name, _, value in seen] == [("capture", [1.0]), ("steer", [1.0]), ("project", [1.0])]
    assert out.tolist() == [(1.0 + 5.0 + 7.0) * 3]
    assert "_headgate_rows_pre_attn" in vars(layer)
    assert not layer.state_dict(), "static tensors are no buffers: sleep mode would restore stale rows"


def test_only_the_instance_changes():
    layer, other = SingleLayer(), SingleLayer()

    graph.swap_class(layer, graph.layer_forward(SINGLE, {}, ["hidden_states", "mask"]))

    assert isinstance(layer, SingleLayer)
    assert type(other) is SingleLayer


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_forward_of_the_instances_own_runs_under_the_hooks(is_bound):
    """VLLM gives some modules one: those whose projections it fuses, those whose weights it offloads."""
    seen: list = []
    layer = SingleLayer()

    def bound(self, hidden_states, mask=None):
        return hidden_states * 5, "own"

    layer.forward = (
        MethodType(bound, layer) if is_bound else lambda hidden_states, mask=None: (hidden_states * 5, "own")
    )
    runs = {hook: (record(seen, add=1.0),) for hook in (HookPoint.PRE_ATTN, HookPoint.POST_MLP)}

    graph.swap_class(layer, graph.layer_forward(SINGLE, runs, ["hidden_states", "mask"]))
    out = layer(torch.tensor([1.0]))

    assert [entry[2] for entry in seen] == [[1.0], [10.0]]
    assert (out[0].tolist(), out[1]) == ([11.0], "own")


class Normed(nn.Module):
    """Carries the stream alone; its MLP reads a norm of the mid stream, which the stream does not pass through."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, hidden_states):
        mid = hidden_states + 1.0
        return mid + 2.0 * self.norm(mid)


def test_what_only_the_mlp_would_see_is_repaid_to_the_stream_before_the_layer_hands_it_on():
    seen: list = []
    layer = Normed()

    def add(module, hook, site):
        return site.carry + getattr(module, f"_headgate_vector_{hook}")

    action = SiteAction(run=add, order=20, tensors={"vector": torch.tensor([10.0])}, repay=add)
    norm = layer.norm
    runs = graph.attach(norm, HookPoint.POST_ATTN, [action])
    graph.swap_class(norm, graph.module_forward([(HookPoint.POST_ATTN, graph.Place(module="norm", value=0), runs)]))
    repays = _repays(replace(SINGLE, mid="norm", mid_input=0), layer, [action])
    post = {HookPoint.POST_MLP: (record(seen),)}
    graph.swap_class(layer, graph.layer_forward(SINGLE, post, ["hidden_states"], repays))

    out = layer(torch.tensor([1.0]))

    mid = 1.0 + 1.0 + 10.0
    assert out.tolist() == [mid + 2.0 * mid]
    assert seen == [("seen", "post_mlp", out.tolist())], "capture after it sees it"


def test_nothing_is_repaid_where_the_stream_passes_through_the_norm():
    action = SiteAction(run=record([]), order=20, repay=record([], add=1.0))

    assert _repays(replace(PAIR, mid="norm", mid_input=0, mid_residual=1), nn.Identity(), [action]) == ()


def test_an_action_at_a_scaled_branch_is_told_the_scale():
    block, gains = Block(), []

    def run(module, hook, site):
        gains.append(site.gain)
        return site.carry

    graph.swap_class(block, graph.module_forward([(HookPoint.MLP_OUT, graph.Place(module="b", scale=0.5), (run, run))]))
    block(torch.tensor([1.0]), torch.tensor([2.0]))

    assert gains == [0.5, 0.5]
