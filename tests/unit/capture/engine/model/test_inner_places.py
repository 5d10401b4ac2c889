"""Places within attention, of modules that stand for vLLM's: which there are, why others are not, and what is seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.model.inner_places import inner_places
from headgate.capture.engine.site_action import SiteAction, SiteValue
from headgate.capture.engine.worker.install import install_actions
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import MIXER_HOOKS, HookPoint, Site

HEADS, KV_HEADS, SIZE = 4, 2, 3


class Kernel(nn.Module):
    """As vLLM's attention layer; each token looks at itself alone."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = HEADS, KV_HEADS, SIZE
        vars(self).update(attributes)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = query.view(-1, HEADS, SIZE), key.view(-1, KV_HEADS, SIZE), value.view(-1, KV_HEADS, SIZE)
        return (q * (k + v).repeat_interleave(HEADS // KV_HEADS, dim=1)).flatten(1)


class Latent(Kernel):
    def __init__(self) -> None:
        super().__init__(qk_nope_head_dim=4, qk_rope_head_dim=2, kv_lora_rank=5)


class Rotary(nn.Module):
    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * query, 3 * key


class Attention(nn.Module):
    def __init__(self, kernel: nn.Module, rotary: nn.Module | None, *, has_names: bool = False) -> None:
        super().__init__()
        self.attn, self.rotary_emb, self.has_names = kernel, rotary, has_names
        self.o_proj = nn.Linear(HEADS * SIZE, HEADS * SIZE)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = hidden_states, hidden_states[:, : KV_HEADS * SIZE], hidden_states[:, KV_HEADS * SIZE :]
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(None, q, k)
        if self.has_names:
            return self.o_proj(self.attn(query=q.view(-1, HEADS, SIZE), key=k, value=v))
        return self.o_proj(self.attn(q.view(-1, HEADS, SIZE), k, v))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.input_norm, self.mid_norm = nn.LayerNorm(HEADS * SIZE), nn.LayerNorm(HEADS * SIZE)
        self.self_attn, self.mlp = attention, nn.Linear(HEADS * SIZE, HEADS * SIZE)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_norm(hidden_states))
        return hidden_states + self.mlp(self.mid_norm(hidden_states))


@pytest.fixture(autouse=True)
def standing_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cls in (
        ("ATTENTION", Kernel),
        ("LATENT_ATTENTION", Latent),
        ("ROTARY_EMBEDDING", Rotary),
        ("EXPERTS", Experts),
        ("MIXER", Mixer),
        ("ROW_PARALLEL_LAYER", Down),
    ):
        monkeypatch.setattr(vllm_names, name, vllm_names.Name(f"{__name__}:{cls.__name__}", is_required=False))


def absent(attention: nn.Module) -> dict[str, str]:
    return {hook.value: why for hook, why in inner_places(Layer(attention), "self_attn", 0).absent.items()}


def test_heads_have_the_widths_of_the_attention_layer() -> None:
    found = inner_places(Layer(Attention(Kernel(head_size_v=5), Rotary())), "self_attn", 0).places

    widths = {"q_pre": 12, "k_pre": 6, "q": 12, "k": 6, "v": 10, "hook_z": 12}
    assert {hook.value: place.width for hook, place in found.items()} == widths
    assert {place.module for place in found.values()} == {
        "self_attn.rotary_emb", "self_attn.attn", "self_attn.o_proj",
    }  # fmt: skip


def test_latent_attention_has_no_keys_and_values_and_says_so() -> None:
    attention = Attention(Latent(), Rotary())
    found = inner_places(Layer(attention), "self_attn", 0).places

    assert {hook.value: place.width for hook, place in found.items()} == {"q": 24, "kv_latent": 5, "hook_z": 12}
    assert {name for name, why in absent(attention).items() if "latent attention" in why} == {
        "q_pre", "k_pre", "k", "v",
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"no hook point k: latent attention \(MLA\) makes no keys"):
        seen(attention, {HookPoint.K: 0.0})


def test_keys_that_another_layer_makes_are_none_of_this_one() -> None:
    found = absent(Attention(Kernel(kv_sharing_target_layer_name="layers.3.attn"), None))

    assert found["k"] == found["v"] == "it reads the keys and values of layers.3.attn"
    assert "0 rotary embeddings" in found["q_pre"]
    assert "q" not in found


@pytest.mark.parametrize("kernels", [0, 2])
def test_one_attention_layer_alone_is_understood(kernels: int) -> None:
    attention = Attention(nn.Identity(), None)
    for index in range(kernels):
        attention.add_module(f"kernel{index}", Kernel())

    assert absent(attention)["q"] == f"{kernels} of vLLM's attention layers are in it, not one"


def test_attention_over_other_tokens_is_not_taken_for_the_models_own() -> None:
    assert absent(Attention(Kernel(attn_type="encoder_decoder"), None))["k"] == (
        "its attention is of the type encoder_decoder"
    )


Seen = dict[HookPoint, Tensor]


def seen(attention: nn.Module, added: dict[HookPoint, float], stream: Tensor | None = None) -> tuple[Seen, Tensor]:
    """Run a layer with a number added at some hook points; return what was seen there, and the layer's output."""
    rows: Seen = {}

    def run(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        rows[HookPoint(hook)] = site.value.clone()
        return site.carry + added[HookPoint(hook)]

    layer = Layer(attention)
    torch.manual_seed(0)
    with torch.inference_mode():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
        actions = {Site(0, hook): [SiteAction(run=run, order=0)] for hook in added}
        install_actions(nn.Module(), "layers", [(0, layer)], actions)
        return rows, layer(torch.randn(7, HEADS * SIZE) if stream is None else stream)


@pytest.mark.parametrize("has_names", [False, True])
def test_rows_are_those_of_whole_heads_and_what_is_added_goes_on(has_names: bool) -> None:
    hooks = dict.fromkeys((HookPoint.Q_PRE, HookPoint.K_PRE, HookPoint.Q, HookPoint.K, HookPoint.V), 0.0)
    shared = Rotary()
    plain, before = seen(Attention(Kernel(), shared, has_names=has_names), hooks)
    rows, after = seen(
        Attention(Kernel(), shared, has_names=has_names), hooks | {HookPoint.Q_PRE: 1.0, HookPoint.V: 2.0}
    )

    assert {hook.value: row.shape[1] for hook, row in plain.items()} == {
        "q_pre": 12,
        "k_pre": 6,
        "q": 12,
        "k": 6,
        "v": 6,
    }
    torch.testing.assert_close(plain[HookPoint.Q], 2 * plain[HookPoint.Q_PRE])
    torch.testing.assert_close(rows[HookPoint.Q], plain[HookPoint.Q] + 2.0)
    assert torch.equal(rows[HookPoint.V], plain[HookPoint.V])
    assert not torch.allclose(before, after)
    assert type(shared) is Rotary  # other layers have it too


def test_a_row_of_another_width_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"self_attn.attn gets rows of 6 values for k, expected 8"):
        seen(Attention(Kernel(head_size=4), None), {HookPoint.K: 0.0})


class Router:
    def _compute_routing(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(router_logits.softmax(dim=1), k=2, dim=1)


class Experts(nn.Module):
    """As vLLM's layer of experts: expert i multiplies by i."""

    def __init__(self, gate: nn.Module | None = None, *, is_monolithic: bool = False, dp_size: int = 1) -> None:
        super().__init__()
        parallel = SimpleNamespace(dp_size=dp_size)
        self.moe_config = SimpleNamespace(num_logical_experts=4, experts_per_token=2, moe_parallel_config=parallel)
        self.router, self.gate, self.is_monolithic = Router(), gate, is_monolithic

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        logits = router_logits if self.gate is None else self.gate(hidden_states)
        weights, experts = self.router._compute_routing(hidden_states, router_logits=logits)
        return hidden_states * (weights * experts).sum(dim=1, keepdim=True)


class Routed(nn.Module):
    """The MLP of a layer with experts, and a shared one if it has neurons."""

    def __init__(self, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = nn.Linear(HEADS * SIZE, 4, bias=False), experts, shared

    def forward(self, hidden_states: Tensor) -> Tensor:
        found = self.experts(hidden_states=hidden_states, router_logits=self.gate(hidden_states))
        return found if self.shared is None else found + self.shared(hidden_states)


class Down(nn.Linear):
    """As vLLM's layer whose inputs are spread over ranks."""

    input_size, input_size_per_partition = HEADS * SIZE, HEADS * SIZE


def routed_layer(mlp: nn.Module) -> Layer:
    layer = Layer(Attention(Kernel(), None))
    layer.mlp = mlp
    return layer


@pytest.mark.parametrize("gate", [None, nn.Linear(HEADS * SIZE, 4, bias=False)], ids=["outside", "within"])
def test_scores_of_experts_are_seen_and_change_what_is_chosen(gate: nn.Module | None) -> None:
    rows: Seen = {}

    def run(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        rows[HookPoint(hook)] = site.value.clone()
        return site.carry + torch.tensor([-100.0, 0.0, 0.0, 0.0]) if hook == "router_logits" else site.carry

    layer = routed_layer(Routed(Experts(gate)))
    hooks = (HookPoint.ROUTER_LOGITS, HookPoint.EXPERTS, HookPoint.EXPERT_WEIGHTS)
    stream = torch.randn(50, HEADS * SIZE)
    with torch.inference_mode():
        before = layer(stream)
        install_actions(
            nn.Module(), "layers", [(0, layer)], {Site(0, hook): [SiteAction(run=run, order=0)] for hook in hooks}
        )
        after = layer(stream)

    scores = rows[HookPoint.ROUTER_LOGITS]
    weights, experts = torch.topk((scores + torch.tensor([-100.0, 0, 0, 0])).softmax(dim=1), k=2, dim=1)
    assert torch.equal(rows[HookPoint.EXPERTS], experts)
    assert torch.equal(rows[HookPoint.EXPERT_WEIGHTS], weights)
    assert not (experts == 0).any()
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        (Experts(is_monolithic=True), "its kernel chooses the experts itself"),
        (Experts(dp_size=2), "its router gets tokens of other ranks too"),
    ],
)
def test_a_choice_that_is_not_seen_is_no_site_and_scores_are(experts: Experts, why: str) -> None:
    found = inner_places(routed_layer(Routed(experts)), "self_attn", 0)

    assert HookPoint.ROUTER_LOGITS in found.places
    assert found.absent[HookPoint.EXPERTS].startswith(why)
    assert found.absent[HookPoint.EXPERT_WEIGHTS].startswith(why)


def test_neurons_are_those_of_the_one_down_projection_behind_attention() -> None:
    shared = nn.Sequential(nn.ReLU(), Down(HEADS * SIZE, HEADS * SIZE))
    alone, beside = (inner_places(routed_layer(Routed(Experts(), each)), "self_attn", 0) for each in (None, shared))

    assert alone.absent[HookPoint.MLP_ACT].startswith("0 projections are in it behind attention, not one: routed")
    assert beside.places[HookPoint.MLP_ACT].module == "mlp.shared.1"


class Mixer(nn.Module):
    """As vLLM's state-space models, which return their result."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = Down(HEADS * SIZE, HEADS * SIZE)

    def forward(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
        found: Tensor = self.out_proj(hidden_states)
        return found


class WritingMixer(Mixer):
    """As those of vLLM's that write into a tensor of their caller."""

    def forward(self, hidden_states: Tensor, output: Tensor) -> None:  # type: ignore[override]
        output[:] = self.out_proj(hidden_states)


class MixerLayer(nn.Module):
    """A layer that has a mixer alone, as Mamba's."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(HEADS * SIZE), mixer

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.norm(hidden_states)
        if not isinstance(self.mixer, WritingMixer):
            return hidden_states + self.mixer(hidden_states=normed)
        output = torch.empty_like(normed)
        self.mixer(normed, output=output)
        return hidden_states + output


@pytest.mark.parametrize("kind", [Mixer, WritingMixer])
@pytest.mark.parametrize("is_steered", [False, True])
def test_what_a_mixer_reads_and_gives_is_seen_and_what_is_added_goes_on(kind: type[Mixer], is_steered: bool) -> None:
    rows: Seen = {}

    def run(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        rows[HookPoint(hook)] = site.value.clone()
        return site.carry + (1.0 if hook == "mixer_in" else 2.0) if is_steered else site.carry

    layer, stream = MixerLayer(kind()), torch.randn(7, HEADS * SIZE)
    with torch.inference_mode():
        normed = layer.norm(stream)
        given = layer.mixer.out_proj(normed + 1.0 if is_steered else normed)
        actions = {Site(0, hook): [SiteAction(run=run, order=0)] for hook in MIXER_HOOKS}
        install_actions(nn.Module(), "layers", [(0, layer)], actions)
        after = layer(stream)

    torch.testing.assert_close(rows[HookPoint.MIXER_IN], normed)
    torch.testing.assert_close(rows[HookPoint.MIXER_OUT], given)
    torch.testing.assert_close(after, stream + given + (2.0 if is_steered else 0.0))


def test_a_layer_without_a_mixer_says_so_and_which_layers_have_one() -> None:
    actions = {Site(1, HookPoint.MIXER_IN): [SiteAction(run=lambda module, hook, site: site.carry, order=0)]}
    layers = [(0, MixerLayer(Mixer())), (1, Layer(Attention(Kernel(), None))), (2, MixerLayer(Mixer()))]

    with pytest.raises(UnsupportedError, match=r"no hook point mixer_in: 0 state-space.*with mixer_in: \[0, 2\]\."):
        install_actions(nn.Module(), "layers", layers, actions)


def test_projections_of_attention_and_mixers_are_no_neurons() -> None:
    attention = Attention(Kernel(), None)
    attention.o_proj = Down(HEADS * SIZE, HEADS * SIZE)
    layer = Layer(attention)

    for each in (layer, MixerLayer(Mixer())):
        assert inner_places(each, None, None).absent[HookPoint.MLP_ACT].startswith("0 projections")
    layer.mlp = Down(HEADS * SIZE, HEADS * SIZE)
    assert inner_places(layer, None, None).places[HookPoint.MLP_ACT].module == "mlp"
