"""The names of other tools, as sites; those that mean another value in each tool are refused."""

from __future__ import annotations

import pytest

from headgate.steering.features.hook_names import site_of
from headgate.steering.features.tensors import FeatureFileError

SITES = {
    "blocks.12.hook_resid_pre": "12.pre_attn",
    "blocks.12.hook_resid_mid": "12.post_attn",
    "blocks.12.ln2.hook_in": "12.post_attn",
    "blocks.12.hook_resid_post": "12.post_mlp",
    "model.layers.12": "12.post_mlp",
    "model.layers.12.output": "12.post_mlp",
    "model.language_model.layers.12.output": "12.post_mlp",
    "blocks.12.hook_attn_out": "12.attn_out",
    "blocks.12.hook_mlp_out": "12.mlp_out",
    "model.layers.12.post_feedforward_layernorm.output": "12.mlp_out",
    "blocks.12.mlp.hook_in": "12.mlp_in",
    "model.layers.12.pre_feedforward_layernorm.output": "12.mlp_in",
    "blocks.12.attn.hook_z": "12.hook_z",
    "model.layers.12.self_attn.o_proj.input": "12.hook_z",
    "model.layers.12.input_layernorm.output": "12.attn_in",
    "layers.12": "12.post_mlp",
    "blocks.12.attn.hook_rot_q": "12.q",
    "model.layers.12.mlp.down_proj.input": "12.mlp_act",
    "layers.12.mlp": "12.mlp_out",
    "blocks.0.hook_embed": "0.pre_attn",
    "hook_embed": "0.pre_attn",
    "12.post_mlp": "12.post_mlp",
}
REFUSED = {
    "blocks.12.hook_mlp_in": "before the MLP's norm in TransformerLens and behind it in Gemma Scope 2",
    "blocks.12.ln2.hook_normalized": "the norm's output before its gain.* --model FOLDER",
    "blocks.12.ln1.hook_normalized": "the norm's output before its gain",
    "blocks.12.hook_attn_in": "before the attention's norm",
    "model.layers.12.post_attention_layernorm.output": "the attention's branch in Gemma and the MLP's input in Llama",
    "blocks.12.attn.hook_pattern": "no known place; name it: --site LAYER.HOOK",
    "transformer.h.12": "no known place",
    "": "no known place",
}


@pytest.mark.parametrize("hook", SITES)
def test_a_name_of_another_tool(hook: str) -> None:
    assert site_of(hook, "cfg.json").name == SITES[hook]


@pytest.mark.parametrize("hook", REFUSED)
def test_a_name_that_is_refused_with_the_reason(hook: str) -> None:
    with pytest.raises(FeatureFileError, match=f"^cfg.json: .*{REFUSED[hook]}"):
        site_of(hook, "cfg.json")
