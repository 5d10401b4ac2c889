"""Actions in a module's forward: where they run, in which order, and what they may change."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType

import pytest
import torch
from torch import nn

from headgate.capture.engine.model import forward_wrappers
from headgate.capture.engine.model.layer_structure import LayerStructure
from headgate.capture.engine.site_action import SiteAction
from headgate.capture.engine.worker.install import install_actions, reapplied_runs
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import HookPoint, Site


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


PAIR = LayerStructure(style="pair", hidden="hidden_states", residual="residual")
SINGLE = LayerStructure(style="single", hidden="hidden_states")


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
    forward_wrappers.swap_class(
        layer, forward_wrappers.layer_forward(PAIR, runs, ["positions", "hidden_states", "residual"])
    )

    hidden, residual = layer(None, torch.tensor([1.0]), residual=torch.tensor([2.0]))

    assert seen == [("seen", "pre_attn", [3.0]), ("seen", "post_mlp", [1.0 * 2 + (2.0 + 10 + 1)])]
    assert hidden.tolist() == [2.0], "a vector never goes onto the branch"
    assert residual.tolist() == [23.0]


def test_the_first_layer_of_a_pair_model_has_no_residual_yet():
    seen: list = []
    layer = PairLayer()
    runs = {HookPoint.PRE_ATTN: (record(seen, add=10.0),)}
    forward_wrappers.swap_class(
        layer, forward_wrappers.layer_forward(PAIR, runs, ["positions", "hidden_states", "residual"])
    )

    hidden, residual = layer(None, torch.tensor([1.0]), None)

    assert seen == [("seen", "pre_attn", [1.0])]
    assert (hidden.tolist(), residual.tolist()) == ([22.0], [11.0])


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_single_layer_keeps_the_rest_of_what_it_returns(by_keyword):
    seen: list = []
    layer = SingleLayer()
    runs = {hook: (record(seen, add=1.0),) for hook in (HookPoint.PRE_ATTN, HookPoint.POST_MLP)}
    forward_wrappers.swap_class(layer, forward_wrappers.layer_forward(SINGLE, runs, ["hidden_states", "mask"]))

    x = torch.tensor([1.0])
    out = layer(hidden_states=x) if by_keyword else layer(x)

    assert [entry[2] for entry in seen] == [[1.0], [6.0]]
    assert (out[0].tolist(), out[1]) == ([7.0], "cache")


def test_a_submodule_is_seen_at_its_arguments_and_at_its_result():
    seen: list = []
    block = Block()
    taken = [
        (HookPoint.ATTN_OUT, forward_wrappers.HookPlace(module="b", value=0, carry=1), (record(seen, "branch"),)),
        (
            HookPoint.POST_ATTN,
            forward_wrappers.HookPlace(module="b", value=0, addend=1, carry=1),
            (record(seen, "mid", add=1.0),),
        ),
        (HookPoint.MLP_IN, forward_wrappers.HookPlace(module="b"), (record(seen, "normed"),)),
        (HookPoint.MLP_OUT, forward_wrappers.HookPlace(module="b", scale=0.5), (record(seen, "scaled"),)),
    ]
    forward_wrappers.swap_class(block, forward_wrappers.module_forward(taken))

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
    runs = {HookPoint.PRE_ATTN: forward_wrappers.attach(layer, HookPoint.PRE_ATTN, actions)}
    forward_wrappers.swap_class(layer, forward_wrappers.layer_forward(SINGLE, runs, ["hidden_states", "mask"]))

    out, _ = layer(torch.tensor([1.0]))

    assert [(name, value) for name, _, value in seen] == [("capture", [1.0]), ("steer", [1.0]), ("project", [1.0])]
    assert out.tolist() == [(1.0 + 5.0 + 7.0) * 3]
    assert "_headgate_rows_pre_attn" in vars(layer)
    assert not layer.state_dict(), "static tensors are no buffers: sleep mode would restore stale rows"


def test_only_the_instance_changes():
    layer, other = SingleLayer(), SingleLayer()

    forward_wrappers.swap_class(layer, forward_wrappers.layer_forward(SINGLE, {}, ["hidden_states", "mask"]))

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

    forward_wrappers.swap_class(layer, forward_wrappers.layer_forward(SINGLE, runs, ["hidden_states", "mask"]))
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

    action = SiteAction(run=add, order=20, tensors={"vector": torch.tensor([10.0])}, reapply_to_residual=add)
    norm = layer.norm
    runs = forward_wrappers.attach(norm, HookPoint.POST_ATTN, [action])
    forward_wrappers.swap_class(
        norm,
        forward_wrappers.module_forward(
            [(HookPoint.POST_ATTN, forward_wrappers.HookPlace(module="norm", value=0), runs)]
        ),
    )
    repays = reapplied_runs(replace(SINGLE, mid="norm", mid_input=0), layer, [action])
    post = {HookPoint.POST_MLP: (record(seen),)}
    forward_wrappers.swap_class(layer, forward_wrappers.layer_forward(SINGLE, post, ["hidden_states"], repays))

    out = layer(torch.tensor([1.0]))

    mid = 1.0 + 1.0 + 10.0
    assert out.tolist() == [mid + 2.0 * mid]
    assert seen == [("seen", "post_mlp", out.tolist())], "capture after it sees it"


def test_nothing_is_repaid_where_the_stream_passes_through_the_norm():
    action = SiteAction(run=record([]), order=20, reapply_to_residual=record([], add=1.0))

    assert reapplied_runs(replace(PAIR, mid="norm", mid_input=0, mid_residual=1), nn.Identity(), [action]) == ()


def test_an_action_at_a_scaled_branch_is_told_the_scale():
    block, gains = Block(), []

    def run(module, hook, site):
        gains.append(site.gain)
        return site.carry

    forward_wrappers.swap_class(
        block,
        forward_wrappers.module_forward(
            [(HookPoint.MLP_OUT, forward_wrappers.HookPlace(module="b", scale=0.5), (run, run))]
        ),
    )
    block(torch.tensor([1.0]), torch.tensor([2.0]))

    assert gains == [0.5, 0.5]


class FusedNorm(nn.Module):
    """Adds what it is given to the residual; to show where a value has passed, it doubles instead of norming."""

    def forward(self, x, residual=None):
        return 2 * x if residual is None else (2 * (x + residual), x + residual)


class FusedLayer(nn.Module):
    """As vLLM writes its layers; attention and MLP are the identity."""

    def __init__(self):
        super().__init__()
        self.input_norm, self.mid_norm, self.attn, self.mlp = FusedNorm(), FusedNorm(), nn.Linear(1, 1), nn.Linear(1, 1)
        for same in (self.attn, self.mlp):
            nn.init.ones_(same.weight), nn.init.zeros_(same.bias)

    def forward(self, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_norm(hidden_states)
        else:
            hidden_states, residual = self.input_norm(hidden_states, residual)
        hidden_states = self.attn(hidden_states)
        hidden_states, residual = self.mid_norm(hidden_states, residual)
        return self.mlp(hidden_states), residual


def steered(layer_index, hook, *others):
    """What a layer of `layer_index` returns of 1 and 2 with 10 added at `hook`, and what was run with which carry."""
    ran, layer = [], FusedLayer()

    def way(name):
        def run(module, at, site):
            ran.append((name, at, site.carry.tolist()))
            return site.carry + 10.0

        return run

    action = SiteAction(run=way("run"), before_attention=way("ahead"), unfused=way("apart"), order=20)
    install_actions(nn.Module(), "layers", [(layer_index, layer)], {Site(layer_index, hook): [action, *others]})
    residual = None if layer_index == 0 else torch.tensor([2.0])
    with torch.inference_mode():
        return [part.tolist() for part in layer(torch.tensor([1.0]), residual)], ran


@pytest.mark.parametrize("hook", [HookPoint.ATTN_OUT, HookPoint.POST_ATTN])
def test_what_only_adds_to_the_mid_stream_runs_where_the_first_norm_hands_the_residual_on(hook):
    answer, ran = steered(1, hook)

    assert ran == [("ahead", hook.value, [1.0 + 2.0])]
    mid = 2 * (1.0 + 2.0) + (1.0 + 2.0 + 10.0)  # attention saw the stream without the vector
    assert answer == [[2 * mid], [mid]]


@pytest.mark.parametrize("hook", [HookPoint.ATTN_OUT, HookPoint.POST_ATTN])
def test_beside_an_action_that_sees_the_value_it_runs_at_the_mid_norm_apart(hook):
    seen: list = []

    answer, ran = steered(1, hook, SiteAction(run=record(seen), order=0))

    branch = 2 * (1.0 + 2.0)
    assert seen == [("seen", hook.value, [branch if hook is HookPoint.ATTN_OUT else branch + 3.0])]
    assert ran == [("apart", hook.value, [3.0])]
    assert answer == [[2 * (branch + 13.0)], [branch + 13.0]]


def test_in_the_first_layer_which_has_no_residual_before_attention_it_runs_apart():
    answer, ran = steered(0, HookPoint.POST_ATTN)

    assert ran == [("apart", "post_attn", [1.0])]
    assert answer == [[2 * (2.0 + 11.0)], [2.0 + 11.0]]


@pytest.mark.parametrize("layer", [0, 1])
def test_what_adds_to_attentions_input_runs_apart_and_leaves_the_stream_alone(layer):
    answer, ran = steered(layer, HookPoint.ATTN_IN)

    stream = 1.0 if layer == 0 else 1.0 + 2.0
    assert ran == [("apart", "attn_in", [2 * stream])]
    mid = (2 * stream + 10.0) + stream
    assert answer == [[2 * mid], [mid]]


def test_a_value_that_passes_elsewhere_is_not_run_ahead():
    _, ran = steered(1, HookPoint.PRE_ATTN)

    assert ran == [("run", "pre_attn", [2.0])]


def test_a_first_norm_that_is_called_without_a_residual_after_all_ends_the_forward():
    block = FusedNorm()
    place = forward_wrappers.HookPlace(module="input_norm", result=1)
    forward_wrappers.swap_class(block, forward_wrappers.module_forward([(HookPoint.POST_ATTN, place, (record([]),))]))

    with pytest.raises(UnsupportedError, match="FusedNorm of input_norm returned no result 1 for post_attn"):
        block(torch.tensor([1.0]))
