"""circuit-tracer's transcoders, per layer and cross-layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headgate.steering.features.source_coder import CoderKind
from headgate.steering.features.tensors import FeatureFileError
from tests.fakes.sparse_coders import (
    FEATURES,
    MATRICES,
    WIDTH,
    Reference,
    only,
    places,
    read,
    rows,
    save,
    transposed,
    weights,
)


def yaml(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


SET = "model_kind: transcoder_set\nmodel_name: m\nfeature_input_hook: mlp.hook_in\nfeature_output_hook: hook_mlp_out\n"


@pytest.mark.parametrize("config", ["config.yaml", "wandb-config.yaml", "wanb-config.yaml"])
@pytest.mark.parametrize("kind", [CoderKind.RELU, CoderKind.JUMPRELU])
def test_circuit_tracer_has_one_file_for_each_layer(kind: CoderKind, config: str, tmp_path: Path) -> None:
    (tmp_path / config).write_text(SET if config == "config.yaml" else "d_model: {value: 12}\n", encoding="utf-8")
    tensors = transposed(only(*MATRICES), "W_enc")
    if kind is CoderKind.JUMPRELU:
        tensors["activation_function.threshold"] = weights()["threshold"]
    skip = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    path = save(tmp_path / "layer_7.safetensors", {**tensors, "W_skip": skip})

    with pytest.raises(FeatureFileError, match="one transcoder for each layer; name one: --layer L"):
        read(tmp_path)
    for coder in (read(tmp_path, layer=7), read(path)):
        x, reference = rows(), Reference(kind)
        a = coder.encode(x, np.float64)
        np.testing.assert_allclose(a, [reference.encode(row) for row in x], atol=1e-6)
        expected = np.stack([reference.decode(each, row) for each, row in zip(a, x, strict=True)]) + x @ skip.T
        np.testing.assert_allclose(coder.decode(a, x), expected, atol=1e-5)
        assert places(coder) == ["7.mlp_in", "7.mlp_out"]


def test_circuit_tracer_cross_layer_transcoders(tmp_path: Path) -> None:
    yaml(
        tmp_path,
        "model_kind: cross_layer_transcoder\nfeature_input_hook: hook_resid_mid\nfeature_output_hook: hook_mlp_out\n",
    )
    decoder = np.random.default_rng(4).standard_normal((FEATURES, 3, WIDTH)).astype(np.float32)
    skip = np.random.default_rng(5).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    w = weights()
    reads = {"W_enc_1": w["W_enc"].T, "b_enc_1": w["b_enc"], "b_dec_1": w["b_dec"], "threshold_1": w["threshold"][None]}
    path = save(tmp_path / "W_enc_1.safetensors", {**reads, "W_skip_1": skip})
    save(tmp_path / "W_dec_1.safetensors", {"W_dec_1": decoder})

    coder = read(path)

    x = rows()
    a = coder.encode(x, np.float64)
    np.testing.assert_allclose(a, [Reference(CoderKind.JUMPRELU).encode(row) for row in x], atol=1e-6)
    np.testing.assert_allclose(coder.decode(a, x, 0), a @ decoder[:, 0] + w["b_dec"] + x @ skip, atol=1e-5)
    np.testing.assert_allclose(coder.decode(a, x, 2), a @ decoder[:, 2], atol=1e-5)
    assert places(coder) == [
        "1.post_attn",
        "1.mlp_out",
        "2.mlp_out",
        "3.mlp_out",
    ]


def test_circuit_tracer_refuses_by_name(tmp_path: Path) -> None:
    tensors = transposed(only(*MATRICES), "W_enc")
    save(tmp_path / "layer_0.safetensors", tensors)
    for text, why in (
        (SET.replace("mlp.hook_in", "ln2.hook_normalized"), "the norm's output before its gain"),
        (SET.replace("transcoder_set", "lorsa"), "model_kind 'lorsa' is not supported"),
        (SET.replace("feature_output_hook: hook_mlp_out", ""), "feature_output_hook: expected a hook"),
        ("- 1", "expected an object of YAML, got list"),
        ("{", "expected an object of YAML"),
    ):
        yaml(tmp_path, text)
        with pytest.raises(FeatureFileError, match=why):
            read(tmp_path, layer=0)
    yaml(tmp_path, SET)
    save(tmp_path / "layer_0.safetensors", {**tensors, "activation_function.threshold": -weights()["threshold"]})
    with pytest.raises(FeatureFileError, match="a threshold below 0"):
        read(tmp_path, layer=0)
    yaml(tmp_path, SET + "transcoders: ['hf://a/b/c.npz']\n")
    with pytest.raises(FeatureFileError, match=r"elsewhere \('hf://a/b/c.npz', ...\)"):
        read(tmp_path, layer=1)
