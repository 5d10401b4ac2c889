"""A random LoRA adapter for a model folder, in PEFT's format, and the model that it makes when it is merged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RANK = 8
ALPHA = 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(model: Path, folder: Path, strength: float = 0.5) -> Path:
    """Write an adapter for every linear module of the decoder layers of `model`; returns `folder`.

    Args:
        model: A folder with weights in safetensors, with Llama's names.
        folder: Where the adapter goes.
        strength: How large the change of a module's weights is, relative to them.
    """
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for name, weight in _weights(model).items():
        if name.split(".")[-2] not in MODULES or not name.endswith(".weight"):
            continue
        base = f"base_model.model.{name.removesuffix('.weight')}"
        a = torch.randn(RANK, weight.shape[1], generator=generator)
        b = torch.randn(weight.shape[0], RANK, generator=generator)
        size = (b.norm() * a.norm() / RANK**0.5) * ALPHA / RANK
        tensors[f"{base}.lora_A.weight"] = a.to(weight.dtype)
        tensors[f"{base}.lora_B.weight"] = (b * strength * weight.float().norm() / size).to(weight.dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": MODULES}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """Write `model` with the weights of `adapter` added, as PEFT's merge_and_unload does; returns `folder`."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    merged: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    found = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name in [name for name in found if name.endswith("lora_A.weight")]:
            a, b = found[name].float(), found[name.replace("lora_A", "lora_B")].float()
            weight = merged.get_parameter(name.removeprefix("base_model.model.").replace(".lora_A", ""))
            weight.copy_(weight.float() + b @ a * (ALPHA / RANK))
    merged.save_pretrained(folder)
    return folder


def _weights(model: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(model.glob("*.safetensors")) for name, tensor in load_file(path).items()}
