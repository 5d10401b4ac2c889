"""Places within attention, of modules that stand for vLLM's: which there are, why others are not, and what is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.model.inner_places import inner_places
from headgate.capture.engine.site_action import SiteAction, SiteValue
from headgate.capture.engine.worker.install import install_actions
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import HookPoint, Site

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
    for name, cls in (("ATTENTION", Kernel), ("LATENT_ATTENTION", Latent), ("ROTARY_EMBEDDING", Rotary)):
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
