"""Llama Scope, its R1 distillation and llamascopium: factors on rows, thresholds, norms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headgate.steering.features.source_coder import CoderKind
from headgate.steering.features.tensors import FeatureFileError
from tests.fakes.sparse_coders import (
    FEATURES,
    WIDTH,
    Reference,
    agrees,
    only,
    put,
    read,
    rows,
    save,
    transposed,
    weights,
)

LINEAR = transposed(
    only(encoder__weight="W_enc", decoder__weight="W_dec", encoder__bias="b_enc", decoder__bias="b_dec"),
    "encoder.weight",
    "decoder.weight",
)
LLAMA_SCOPE = {"d_model": WIDTH, "d_sae": FEATURES, "hook_point_in": "blocks.3.hook_resid_post", "act_fn": "jumprelu"}


def scalar_threshold(value: float) -> Reference:
    """The formulas with one threshold."""
    reference = Reference(CoderKind.JUMPRELU)
    reference.w["threshold"] = np.full(FEATURES, value)
    return reference


def test_llama_scope_scales_rows_and_threshold(tmp_path: Path) -> None:
    norms = {"in": 17.0, "out": 17.0}
    config = {**LLAMA_SCOPE, "jump_relu_threshold": 0.5, "dataset_average_activation_norm": norms, "top_k": 50}
    put(tmp_path / "hyperparams.json", config)
    save(tmp_path / "checkpoints/final.safetensors", LINEAR)

    coder = read(tmp_path)

    scale = np.sqrt(WIDTH) / 17
    agrees(coder, scalar_threshold(0.5 * scale), scale)
    assert [site.name for site in coder.write_sites] == ["3.post_mlp"]
    assert coder.declared == {"l0": 50}


def test_r1_distill_has_the_logarithm_of_its_threshold_and_demands_the_factor(tmp_path: Path) -> None:
    put(tmp_path / "config.json", {**LLAMA_SCOPE, "expansion_factor": 8})
    save(tmp_path / "sae_weights.safetensors", {**LINEAR, "log_jumprelu_threshold": np.log(weights()["threshold"])})

    with pytest.raises(FeatureFileError, match=r"dataset_average_activation_norm.in is None: give the factor"):
        read(tmp_path)
    agrees(read(tmp_path, scale=0.4), Reference(CoderKind.JUMPRELU), 0.4)


def test_llamascopium(tmp_path: Path) -> None:
    config = {**LLAMA_SCOPE, "norm_activation": "token-wise", "sparsity_include_decoder_norm": True, "sae_type": "sae"}
    put(tmp_path / "config.json", config)
    tensors = only(W_E="W_enc", W_D="W_dec", b_E="b_enc", b_D="b_dec")
    save(tmp_path / "sae_weights.safetensors", {**tensors, "log_jumprelu_threshold": np.log(weights()["threshold"])})

    coder = read(tmp_path)

    w, lengths = weights(), np.linalg.norm(weights()["W_dec"].astype(np.float64), axis=1)
    x = rows()
    gain = np.linalg.norm(x, axis=1, keepdims=True) / np.sqrt(WIDTH)
    q = ((x / gain) @ w["W_enc"] + w["b_enc"]) * lengths
    a = np.maximum(q, 0) * (q > w["threshold"])
    np.testing.assert_allclose(coder.encode(x, np.float64), a, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(coder.decode(a, x), ((a / lengths) @ w["W_dec"] + w["b_dec"]) * gain, atol=1e-5)


OPENMOSS_REFUSED = {
    "batch-wise": ({"norm_activation": "batch-wise"}, "it depends on the other rows"),
    "glu": ({"use_glu_encoder": True}, "its encoder has two matrices"),
    "transcoder": ({"hook_point_out": "blocks.3.hook_mlp_out"}, "SAEs alone are supported"),
    "activation": ({"act_fn": "batchtopk"}, "act_fn 'batchtopk' is not supported"),
    "threshold": ({}, "no log_jumprelu_threshold, and jump_relu_threshold is None"),
}


@pytest.mark.parametrize("name", OPENMOSS_REFUSED)
def test_openmoss_refuses_by_name(name: str, tmp_path: Path) -> None:
    config, why = OPENMOSS_REFUSED[name]
    put(tmp_path / "config.json", {**LLAMA_SCOPE, "dataset_average_activation_norm": {"in": 3.0}, **config})
    save(tmp_path / "sae_weights.safetensors", LINEAR)

    with pytest.raises(FeatureFileError, match=why):
        read(tmp_path)
