"""What is offered of every text-generation model of the installed vLLM, read from the classes alone.

``layouts_vllm_0.32.json`` holds the answers of vLLM 0.32, seen and judged; a change of the rule shows up as a
difference. ``python -m tests.engine.test_registry_layouts`` prints it anew.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from headgate.capture.engine.model.layer_structure import LayerStructure, analyse_layer
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import INNER_HOOKS, HookPoint

SNAPSHOT = Path(__file__).with_name("layouts_vllm_0.32.json")
ALL = frozenset(HookPoint) - INNER_HOOKS - {HookPoint.FINAL_NORM, HookPoint.HOOK_Z}
"""Of a class alone: `hook_z` and the inner ones are read from the modules of a layer."""
UNSHARDED = SimpleNamespace(use_sequence_parallel_moe=False, use_attn_reduce_scatter_for_moe=False)
"""Attributes that only an engine over many GPUs sets; without them rows stay where they are."""

VLLM = "vllm.model_executor.models"
HF = "transformers.models"
PRE_NORM = {
    "style": "pair",
    "mid": "post_attention_layernorm",
    "mid_norm": "post_attention_layernorm",
    "mid_residual": 1,
    "first_norm": "input_layernorm",
    "attn": "self_attn",
    "attn_input": "hidden_states",
    "mlp": "mlp",
    "mlp_in_is_norm_output": True,
}
SANDWICH = PRE_NORM | {"mid": "pre_feedforward_layernorm", "mid_norm": "pre_feedforward_layernorm"}
EXPLICIT = PRE_NORM | {"style": "single", "mid_residual": None, "first_norm": None, "mlp_branch": "mlp"}
PARALLEL = {
    "style": "single",
    "mid": None,
    "mid_norm": None,
    "attn_input": "hidden_states",
    "mlp": "mlp",
    "mlp_branch": "mlp",
}

FAMILIES: dict[str, dict[str, object]] = {
    f"{VLLM}.llama:LlamaDecoderLayer": PRE_NORM,
    f"{VLLM}.mistral:MistralDecoderLayer": PRE_NORM,
    f"{VLLM}.qwen2:Qwen2DecoderLayer": PRE_NORM,
    f"{VLLM}.qwen3:Qwen3DecoderLayer": PRE_NORM,
    f"{VLLM}.gemma:GemmaDecoderLayer": PRE_NORM,
    f"{VLLM}.gemma2:Gemma2DecoderLayer": SANDWICH,
    f"{VLLM}.gemma3:Gemma3DecoderLayer": SANDWICH,
    f"{VLLM}.mixtral:MixtralDecoderLayer": PRE_NORM | {"mlp": "block_sparse_moe"},
    f"{VLLM}.qwen3_moe:Qwen3MoeDecoderLayer": PRE_NORM,
    f"{VLLM}.deepseek_v2:DeepseekV2DecoderLayer": PRE_NORM
    | {"first_norm": None, "attn_input": 1},  # the layer decides: fp16 rescales
    f"{VLLM}.qwen3_next:Qwen3NextDecoderLayer": PRE_NORM,
    f"{VLLM}.granite:GraniteDecoderLayer": EXPLICIT
    | {"attn_branch": "self_attn", "branch_scale": "residual_multiplier"},
    f"{VLLM}.gpt2:GPT2Block": EXPLICIT | {"mid": "ln_2", "mid_norm": "ln_2", "attn": "attn", "attn_branch": "attn"},
    f"{VLLM}.opt:OPTDecoderLayer": EXPLICIT
    | {"mid": "final_layer_norm", "mid_norm": "final_layer_norm", "mlp": "fc1", "mlp_branch": "fc2"}
    | {"attn_branch": "self_attn"},
    f"{VLLM}.commandr:CohereDecoderLayer": PARALLEL | {"attn_branch": "self_attn"},
    f"{VLLM}.gpt_j:GPTJBlock": PARALLEL | {"attn_branch": "attn"},
    f"{HF}.olmo2.modeling_olmo2:Olmo2DecoderLayer": EXPLICIT
    | {"mid": "mlp", "mid_norm": None, "mlp_in_is_norm_output": False}
    | {"attn_branch": "post_attention_layernorm", "mlp_branch": "post_feedforward_layernorm"},
    f"{HF}.gpt_neox.modeling_gpt_neox:GPTNeoXLayer": PARALLEL
    | {"attn": "attention", "attn_input": 0, "attn_branch": "attention"},
    f"{HF}.phi.modeling_phi:PhiDecoderLayer": PARALLEL | {"attn_branch": "self_attn"},
}
INSTANCES = {
    "OPTDecoderLayer": SimpleNamespace(do_layer_norm_before=True),
    "GPTNeoXLayer": SimpleNamespace(use_parallel_residual=True),
    "CohereDecoderLayer": SimpleNamespace(tp_size=1),
    "Qwen3NextDecoderLayer": SimpleNamespace(**vars(UNSHARDED), layer_type="full_attention"),
    "MistralDecoderLayer": SimpleNamespace(ada_rms_norm_t_cond=None),
}


@pytest.mark.parametrize("path", FAMILIES)
def test_layout_of_the_main_families(path: str) -> None:
    module, _, name = path.partition(":")

    layout = analyse_layer(getattr(importlib.import_module(module), name), INSTANCES.get(name, UNSHARDED))

    expected = FAMILIES[path]
    assert {field: getattr(layout, field) for field in expected} == expected
    missing = {HookPoint.POST_ATTN: expected["mid"], HookPoint.ATTN_IN: expected["attn_input"]}
    assert layout.hooks & ALL == ALL - {hook for hook, place in missing.items() if place is None}


def model_modules() -> Iterator[ModuleType]:
    """Modules that define the models of the registry, as far as they can be imported here."""
    from vllm.model_executor.models import registry

    for name, architecture in sorted(set(registry._TEXT_GENERATION_MODELS.values())):
        try:
            module = importlib.import_module(name if name.startswith("vllm.") else f"{VLLM}.{name}")
            model = getattr(module, architecture)
        except ImportError:  # torchvision and others are not among our dependencies
            continue
        yield sys.modules[model.__module__]


def decoder_layers() -> Iterator[type[nn.Module]]:
    """Classes of decoder layers, by their names."""
    for module in dict.fromkeys(model_modules()):
        for cls in vars(module).values():
            if not (isinstance(cls, type) and cls.__module__ == module.__name__ and issubclass(cls, nn.Module)):
                continue
            if cls.__name__.endswith(("DecoderLayer", "ParallelHybrid")) or cls.__name__ in BLOCKS:
                yield cls


BLOCKS = {"BloomBlock", "DbrxBlock", "GLMBlock", "GPT2Block", "GPTJBlock"}


def in_short(cls: type[nn.Module]) -> str:
    """``pair: all``, ``single: but post_attn`` or ``refused: reason``."""
    try:
        layout = analyse_layer(cls, UNSHARDED)
    except UnsupportedError as error:
        return f"refused: {str(error).rpartition('followed: ')[2]}"
    return f"{layout.style}: {_offer(layout)}"


def _offer(layout: LayerStructure) -> str:
    missing = ALL - layout.hooks
    if len(missing) == len(ALL) - 2:
        return "boundaries"
    return f"all but {', '.join(sorted(missing))}" if missing else "all"


def scan() -> dict[str, str]:
    return {f"{cls.__module__.removeprefix(VLLM + '.')}:{cls.__name__}": in_short(cls) for cls in decoder_layers()}


def test_the_whole_registry_is_read_as_it_was_judged() -> None:
    import vllm

    if not vllm.__version__.startswith("0.32.") or torch.cuda.is_available():
        pytest.skip(f"the snapshot is of vLLM 0.32 on CPUs, this is {vllm.__version__}")
    expected = json.loads(SNAPSHOT.read_text())

    found = scan()

    assert {path: found.get(path, "gone") for path in expected} == expected
    kinds = Counter(text.partition(":")[0] for text in expected.values())
    assert kinds["pair"] + kinds["single"] > 75
    assert sum(text.endswith(": all") for text in expected.values()) > 40


if __name__ == "__main__":
    json.dump(scan(), sys.stdout, indent=1, sort_keys=True)
