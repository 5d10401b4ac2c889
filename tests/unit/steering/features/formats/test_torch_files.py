"""SAEs that are one file of PyTorch: Qwen-Scope, Goodfire, OpenAI and DeepSeek-R1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.steering.features.source_coder import CoderKind, Norm
from headgate.steering.features.tensors import FeatureFileError
from tests.fakes.sparse_coders import MATRICES, Reference, agrees, only, places, read, save, transposed, weights


def write(path: Path, tensors: dict[str, Any], dtype: torch.dtype | None = None, **others: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {name: torch.from_numpy(np.ascontiguousarray(values)).to(dtype) for name, values in tensors.items()}
    torch.save({**found, **others}, path)
    return path


QWEN = transposed(only(*MATRICES), "W_enc", "W_dec")


def test_qwen_scope_has_its_k_in_the_name_of_the_repository(tmp_path: Path) -> None:
    path = write(tmp_path / "layer7.sae.pt", QWEN)

    with pytest.raises(FeatureFileError, match="give it: --k K"):
        read(path)
    coder = read(path, k=5)
    agrees(coder, Reference(CoderKind.TOPK))
    assert (places(coder), coder.declared) == (["7.post_mlp", "7.post_mlp"], {"l0": 5})

    generator = np.random.default_rng(0)
    large = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in
             {"W_enc": (1024, 4), "W_dec": (4, 1024), "b_enc": (1024,), "b_dec": (4,)}.items()}  # fmt: skip
    coder = read(write(tmp_path / "SAE-Res-Qwen3-1.7B-Base-W1K-L0_50/layer7.sae.pt", large))
    assert (coder.k, coder.model) == (50, "Qwen/Qwen3-1.7B-Base")
    with pytest.raises(FeatureFileError, match="1024 features, but its folder is called SAE-Res-Q-W2K-L0_50"):
        read(write(tmp_path / "SAE-Res-Q-W2K-L0_50/layer7.sae.pt", large))


def test_goodfire_subtracts_no_bias(tmp_path: Path) -> None:
    names = {"encoder_linear__weight": "W_enc", "decoder_linear__weight": "W_dec"}
    tensors = transposed(only(**names), "encoder_linear.weight", "decoder_linear.weight")
    tensors |= only(encoder_linear__bias="b_enc", decoder_linear__bias="b_dec")

    coder = read(write(tmp_path / "Llama-3.1-8B-Instruct-SAE-l19.pth", tensors))

    agrees(coder, Reference(CoderKind.RELU))
    assert places(coder) == ["19.post_mlp", "19.post_mlp"]


OPENAI = transposed(
    only(encoder__weight="W_enc", decoder__weight="W_dec", pre_bias="b_dec", latent_bias="b_enc"),
    "encoder.weight",
    "decoder.weight",
)


def test_openai_relu_and_top_k_which_normalises_rows(tmp_path: Path) -> None:
    relu = read(write(tmp_path / "v4/autoencoders/resid_delta_attn/3.pt", OPENAI, activation="ReLU"))
    agrees(relu, Reference(CoderKind.RELU, subtracts=True))
    assert places(relu) == ["3.attn_out", "3.attn_out"]

    state = {"k": 5, "postact_fn": "ReLU"}
    path = tmp_path / "v5_32k/autoencoders/resid_post_mlp/8.pt"
    top_k = read(write(path, OPENAI, activation="TopK", activation_state_dict=state))
    agrees(top_k, Reference(CoderKind.TOPK, Norm.LAYER_NORM, subtracts=True))
    assert (places(top_k), top_k.k) == (["8.post_mlp", "8.post_mlp"], 5)

    with pytest.raises(FeatureFileError, match=r"activation 'TopK' \(Identity\) is not supported"):
        read(write(path, OPENAI, activation="TopK", activation_state_dict={"k": 5, "postact_fn": "Identity"}))


def test_deepseek_r1_in_bfloat16(tmp_path: Path) -> None:
    names = {"encoder__weight": "W_enc", "decoder__weight": "W_dec"}
    tensors = transposed(only(**names), "encoder.weight", "decoder.weight")
    tensors |= only(encoder__bias="b_enc", decoder__bias="b_dec")

    coder = read(write(tmp_path / "DeepSeek-R1-Distill-Llama-8B-SAE-l19.pt", tensors, torch.bfloat16))

    reference = Reference(CoderKind.RELU)
    for name in MATRICES:
        reference.w[name] = torch.from_numpy(weights()[name]).bfloat16().double().numpy()
    agrees(coder, reference)
    assert places(coder) == ["19.post_mlp", "19.post_mlp"]


def test_two_linear_layers_without_a_decoder_bias_are_a_relu_sae_or_with_k_a_top_k_one(tmp_path: Path) -> None:
    names = {"encoder__weight": "W_enc", "decoder__weight": "W_dec", "encoder__bias": "b_enc"}
    tensors = transposed(only(**names), "encoder.weight", "decoder.weight")
    path = save(tmp_path / "gemma4_sae_1m.safetensors", tensors)

    for kind, hints in ((CoderKind.RELU, {}), (CoderKind.TOPK, {"k": 5})):
        coder = read(path, **hints)
        agrees(coder, without_bias(kind))
        assert (coder.format, coder.k, places(coder)) == ("linear", hints.get("k"), [None])
    agrees(read(write(tmp_path / "x.pt", tensors)), without_bias(CoderKind.RELU))
    with pytest.raises(FeatureFileError, match="of dictionary_learning give the folder"):
        read(save(tmp_path / "y.safetensors", {**tensors, "b_dec": weights()["b_dec"]}))


def without_bias(kind: CoderKind) -> Reference:
    reference = Reference(kind)
    reference.w["b_dec"] = np.zeros_like(reference.w["b_dec"])
    return reference


def test_other_files_are_refused(tmp_path: Path) -> None:
    for tensors, why in (
        ({"probe": np.zeros(3)}, r"its tensors \(probe\) are those of no known SAE"),
        (transposed(QWEN, "W_enc"), "it is the other way round"),
    ):
        with pytest.raises(FeatureFileError, match=why):
            read(write(tmp_path / "x.pt", tensors), k=5)
