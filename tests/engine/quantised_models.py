"""A tiny random model in the formats of quantised checkpoints, and what Hugging Face computes of the same weights.

The weights are quantised here, by the formats' own rules, so that no quantiser is needed: `write` makes the checkpoint
that vLLM loads, and beside it one of the dequantised weights that Hugging Face loads in float32. Where a format
quantises activations too, the reference does so in front of every linear layer. One value that falls on the other side
of such a rounding moves a row by far more than bfloat16 does, so that `further` judges by how far the reference itself
moves when it rounds what its modules return to bfloat16, as vLLM's do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import torch
from torch import Tensor, nn

from headgate.capture.schema.sites import Site
from tests.engine.hf_reference import Reference, Request, _Taps, row_cosines
from tests.engine.inner_reference import InnerReference

HIDDEN, WIDE, LAYERS, VOCABULARY = 256, 512, 3, 512
GROUP, BLOCK = 128, 128
FP8 = torch.float8_e4m3fn
FP8_MAX, INT8_MAX = 448.0, 127.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of a four-bit float; the fourth bit is the sign."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MIN_COSINE = 0.999
"""Of a row in bfloat16, whatever the method."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Method:
    """One format.

    Attributes:
        config: ``quantization_config`` of the checkpoint; None for plain weights.
        weight: Makes of a weight ``[out, in]`` the checkpoint's tensors, by suffix, and the dequantised weight.
        activation: What becomes of a linear layer's input.
        engine: Other settings of the engine.
        rounds_cache: Whether queries, keys, values and the weights of attention are rounded to FP8, as vLLM's kernels
            for GPUs do with such a cache.
        family: Of `hf_reference.ANATOMIES`.
    """

    config: Mapping[str, Any] | None
    weight: Callable[[Tensor], tuple[Tensors, Tensor]] | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    rounds_cache: bool = False
    family: str = "llama"


def _fp8(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def fp8_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    """One scale for a weight; the same for all, because vLLM makes one of those that it fuses."""
    scale = torch.tensor(0.25 / FP8_MAX)
    made = _fp8(weight, scale)
    return {"weight": made, "weight_scale": scale.reshape(1)}, made.float() * scale


def fp8_block(weight: Tensor) -> tuple[Tensors, Tensor]:
    """A scale for each block of 128 x 128, as DeepSeek-V3 has it."""
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX
    made = _fp8(blocks, scale)
    plain = (made.float() * scale).reshape(weight.shape)
    return {"weight": made.reshape(weight.shape), "weight_scale_inv": scale.squeeze(3).squeeze(1)}, plain


def fp8_channel(weight: Tensor) -> tuple[Tensors, Tensor]:
    """A scale for each output."""
    scale = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
    made = _fp8(weight, scale)
    return {"weight": made, "weight_scale": scale}, made.float() * scale


def int8_channel(weight: Tensor) -> tuple[Tensors, Tensor]:
    """A scale for each output, eight bits."""
    scale = weight.abs().amax(dim=1, keepdim=True) / INT8_MAX
    made = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": made, "weight_scale": scale}, made.float() * scale


def _in_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Four bits with zero at 8: values ``[out, in]`` in 0 to 15, scales ``[out, in / 128]``, the dequantised weight."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(dim=2, keepdim=True) / 7).bfloat16().float()
    values = (groups / scale).round().clamp(-8, 7)
    return (values + 8).flatten(1).int(), scale.squeeze(2), (values * scale).flatten(1)


def _packed(values: Tensor, dim: int, order: Sequence[int] = range(8)) -> Tensor:
    """Eight four-bit values along `dim` in an int32; the one at ``order[i]`` is at bit ``4 * i``."""
    parts = values.long().unflatten(dim, (-1, 8)).unbind(dim + 1)
    whole = sum(parts[at] << (4 * bit) for bit, at in enumerate(order))
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()  # type: ignore[arg-type, operator, return-value, union-attr]


def int4_packed(weight: Tensor) -> tuple[Tensors, Tensor]:
    """The format ``pack-quantized`` of compressed-tensors."""
    values, scale, plain = _in_groups(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _packed(values, 1), "weight_scale": scale.bfloat16(), "weight_shape": shape}, plain


def gptq(weight: Tensor) -> tuple[Tensors, Tensor]:
    """GPTQ's format, symmetric, in the order of the inputs."""
    values, scale, plain = _in_groups(weight)
    tensors = {
        "qweight": _packed(values.T, 0),
        "qzeros": _packed(torch.full(scale.T.shape, 7), 1),
        "scales": scale.T.half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return tensors, plain


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    """AWQ's format, with zeros of its own."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    values = (groups / scale + zero).round().clamp(0, 15)
    tensors = {
        "qweight": _packed(values.flatten(1).T, 1, AWQ_ORDER),
        "qzeros": _packed(zero.squeeze(2).T, 1, AWQ_ORDER),
        "scales": scale.squeeze(2).T.half(),
    }
    return tensors, ((values - zero) * scale).flatten(1)


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Experts ``[experts, out, in]`` in blocks of 32 four-bit floats with a power of two each, as gpt-oss has them."""
    blocks = weight.unflatten(-1, (-1, 32))
    power = torch.floor(torch.log2(blocks.abs().amax(dim=-1, keepdim=True))) - 2
    scaled = blocks / 2**power
    code = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    plain = torch.copysign(E2M1[code], scaled) * 2**power
    bits = (code + 8 * (scaled < 0)).to(torch.uint8)
    pairs = bits[..., 0::2] | (bits[..., 1::2] << 4)
    return {"blocks": pairs, "scales": (power.squeeze(-1) + 127).to(torch.uint8)}, plain.flatten(-2)


def _fp8_by_token(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / FP8_MAX
    return _fp8(rows, scale).float() * scale


def _fp8_by_group(rows: Tensor) -> Tensor:
    return _fp8_by_token(rows.unflatten(-1, (-1, BLOCK))).flatten(-2)


def _int8_by_token(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / INT8_MAX
    return (rows / scale).round().clamp(-128, 127) * scale


def _compressed(kind: str, bits: int, form: str, strategy: str, *, has_activations: bool) -> dict[str, Any]:
    numbers = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, "observer": "minmax"}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**numbers, "strategy": strategy}}
    if strategy == "group":
        group["weights"]["group_size"] = GROUP
    inputs = {**numbers, "strategy": "token", "dynamic": True, "observer": None}
    group |= {"input_activations": inputs if has_activations else None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}
TRITON = {"attention_config": {"backend": "TRITON_ATTN"}}
METHODS: Mapping[str, Method] = {
    "fp8": Method(FP8_CONFIG, fp8_tensor, _fp8_by_token),
    "fp8_block": Method({**FP8_CONFIG, "weight_block_size": [BLOCK, BLOCK]}, fp8_block, _fp8_by_group),
    "w8a8_fp8": Method(
        _compressed("float", 8, "float-quantized", "channel", has_activations=True), fp8_channel, _fp8_by_token
    ),
    "w8a8_int8": Method(
        _compressed("int", 8, "int-quantized", "channel", has_activations=True), int8_channel, _int8_by_token
    ),
    "w4a16": Method(_compressed("int", 4, "pack-quantized", "group", has_activations=False), int4_packed),
    "awq": Method({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": Method(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False}, gptq
    ),
    "mxfp4": Method({"quant_method": "mxfp4"}, mxfp4, family="gpt_oss"),
    "kv_fp8": Method(None, engine={"kv_cache_dtype": "fp8", **TRITON}, rounds_cache=True),
    "kv_fp8_default": Method(None, engine={"kv_cache_dtype": "fp8"}, rounds_cache=True),
}


def write(method: str, folder: Path) -> tuple[Path, Path]:
    """Write the tiny model in a format, and with the dequantised weights; the folders of both."""
    found = METHODS[method]
    quantised, plain = folder / method, folder / f"{method}-plain"
    model = _random_model(found.family)
    tensors, dequantised = {}, {}
    for name, value in model.state_dict().items():
        is_expert = found.family == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj"))
        is_linear = found.family != "gpt_oss" and name.split(".")[-2] in LINEAR
        if found.weight is None or not (is_expert or is_linear):
            tensors[name], dequantised[name] = value.bfloat16(), value.bfloat16().float()
            continue
        made, weight = found.weight(value.float().transpose(1, 2) if is_expert else value.float())
        tensors |= {f"{name}_{part}" if is_expert else f"{name[:-6]}{part}": one for part, one in made.items()}
        dequantised[name] = weight.transpose(1, 2).contiguous() if is_expert else weight
    model.load_state_dict(dequantised)
    model.float().save_pretrained(plain)
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    if found.config is not None:
        config["quantization_config"] = dict(found.config)
    _save(quantised, config, tensors)
    return quantised, plain


def _save(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def _random_model(family: str) -> Any:
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

    torch.manual_seed(0)
    if family == "gpt_oss":
        sizes = {"intermediate_size": HIDDEN, "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 16}
        config: Any = GptOssConfig(**{**SIZES, **sizes})
    else:
        config = LlamaConfig(**{**SIZES, "intermediate_size": WIDE})
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)
    return model


class QuantisedReference(InnerReference):
    """Hugging Face's model of dequantised weights, whose activations and cached keys are rounded as the method says.

    With `is_rounded`, every module's result is rounded to bfloat16.
    """

    def __init__(self, folder: Path, method: str, *, is_rounded: bool = False) -> None:
        self._method, self._is_rounded = METHODS[method], is_rounded
        super().__init__(folder, self._method.family)

    @contextmanager
    def _hooked(self, taps: _Taps) -> Iterator[None]:
        with ExitStack() as first, super()._hooked(taps), ExitStack() as stack:  # rows are not quantised yet
            layers = set(self.model.get_submodule(self.anatomy.layers))
            for part in self.model.modules() if self._is_rounded else ():
                if part in layers or not list(part.children()):
                    first.callback(part.register_forward_hook(_rounded).remove)
            activation = self._method.activation
            for name, part in self.model.named_modules() if activation else ():
                if name.split(".")[-1] in LINEAR:
                    stack.callback(part.register_forward_pre_hook(lambda _, args: (activation(args[0]),)).remove)
            yield

    def _watched(
        self, taps: _Taps, running: Sequence[int], function: Callable[..., Any], names: Sequence[str], first: int
    ) -> Callable[..., Any]:
        if self._method.rounds_cache and "v" in names:

            def rounded(*args: Any, **kwargs: Any) -> Any:
                whole = list(args)
                whole[1:4] = (args[at].to(FP8).float() for at in (1, 2, 3))  # module, query, key, value
                with patch.object(nn.functional, "softmax", _fp8_softmax):
                    return function(*whole, **kwargs)

            return super()._watched(taps, running, rounded, names, first)
        return super()._watched(taps, running, function, names, first)


def _rounded(_: nn.Module, __: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (output[0].bfloat16().float(), *output[1:])
    return output.bfloat16().float()


def _fp8_softmax(scores: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    weights = (scores - scores.amax(dim, keepdim=True)).to(dtype).exp()
    return weights.to(FP8).to(dtype) / weights.sum(dim, keepdim=True)


def quantised_rows(
    folder: Path, method: str, requests: Sequence[Request], *, is_rounded: bool = False
) -> list[Reference]:
    """As `hf_reference.reference_rows`, of the folder of dequantised weights."""
    torch.set_num_threads(2)
    model = QuantisedReference(folder, method, is_rounded=is_rounded)
    with patch.multiple(model, _check=DEFAULT, _check_hidden_states=DEFAULT):  # rounding is not of the stream's sums
        return [model.run(*request) for request in requests]


Cosines = dict[tuple[str, str], Tensor]


def cosines(rows: Sequence[tuple[str, Mapping[Site, Tensor]]], expected: Sequence[Reference]) -> Cosines:
    """The cosine of every row with the reference's, by kind of request and hook point."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for (kind, sites), reference in zip(rows, expected, strict=True):
        for site, each in sites.items():
            found.setdefault((kind, site.hook.value), []).append(row_cosines(each, reference.rows[site]))
    return {key: torch.cat(parts) for key, parts in found.items()}


def further(found: Cosines, usual: Cosines) -> dict[tuple[str, str], str]:
    """Kinds and hook points whose rows are further from the reference than rounding explains.

    The worst row, and the median one, may be twice as far (1 - cosine) as those of the reference that rounds to
    bfloat16 (`usual`), and 0.001 in any case.
    """
    wrong = {}
    for key, rows in found.items():
        for name, got, own in (("worst", rows.min(), usual[key].min()), ("median", rows.median(), usual[key].median())):
            limit = min(MIN_COSINE, 1 - 2 * (1 - float(own)))
            if not float(got) >= limit:
                wrong[key] = f"{name} {float(got):.5f}, at least {limit:.5f} expected"
    return wrong
