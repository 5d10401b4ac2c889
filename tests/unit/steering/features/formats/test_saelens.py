"""SAELens 6 and older: weights, norms, sites, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.steering.features.source_coder import CoderKind, Norm
from headgate.steering.features.tensors import FeatureFileError
from tests.fakes.sparse_coders import (
    FEATURES,
    MATRICES,
    WIDTH,
    Array,
    Reference,
    agrees,
    only,
    places,
    put,
    read,
    rows,
    save,
    transposed,
    weights,
)

METADATA = {"hook_name": "blocks.3.hook_resid_post", "model_name": "gpt2"}


def saelens(folder: Path, tensors: dict[str, Array], **config: Any) -> Path:
    """A folder of SAELens 6."""
    defaults = {"d_in": WIDTH, "d_sae": FEATURES, "apply_b_dec_to_input": True, "normalize_activations": "none"}
    put(folder / "cfg.json", {**defaults, "metadata": METADATA, **config})
    save(folder / "sae_weights.safetensors", tensors)
    return folder


GATED = ("W_enc", "W_dec", "b_gate", "b_mag", "r_mag", "b_dec")
KINDS = {
    "standard": (CoderKind.RELU, only(*MATRICES)),
    "jumprelu": (CoderKind.JUMPRELU, only(*MATRICES, "threshold")),
    "gated": (CoderKind.GATED, only(*GATED)),
    "topk": (CoderKind.TOPK, only(*MATRICES)),
}


@pytest.mark.parametrize("subtracts", [False, True])
@pytest.mark.parametrize("norm", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("architecture", KINDS)
def test_saelens(architecture: str, norm: str, subtracts: bool, tmp_path: Path) -> None:
    kind, tensors = KINDS[architecture]
    extra = {"architecture": architecture, "normalize_activations": norm, "apply_b_dec_to_input": subtracts}
    coder = read(saelens(tmp_path, tensors, **extra, **({"k": 5} if kind is CoderKind.TOPK else {})))

    agrees(coder, Reference(kind, Norm(norm), subtracts=subtracts))
    assert (coder.format, coder.read_site and coder.read_site.name, coder.model) == ("saelens", "3.post_mlp", "gpt2")


def test_saelens_before_version_6_is_one_flat_object(tmp_path: Path) -> None:
    put(
        tmp_path / "cfg.json",
        {"d_in": WIDTH, "d_sae": FEATURES, "hook_point": "blocks.2.hook_mlp_out", "model_name": "gpt2",
         "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 5}, "normalize_activations": False},
    )  # fmt: skip
    save(tmp_path / "sae_weights.safetensors", only(*MATRICES))

    coder = read(tmp_path)

    agrees(coder, Reference(CoderKind.TOPK, subtracts=True))
    assert (coder.k, coder.read_site and coder.read_site.name, coder.model) == (5, "2.mlp_out", "gpt2")


def test_saelens_top_k_whose_activations_have_the_lengths_of_decoder_rows(tmp_path: Path) -> None:
    config = {"architecture": "topk", "k": 5, "rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": False}
    coder = read(saelens(tmp_path, only(*MATRICES), **config))

    w, x = {name: values.astype(np.float64) for name, values in weights().items()}, rows()
    a = np.maximum((x @ w["W_enc"] + w["b_enc"]) * np.linalg.norm(w["W_dec"], axis=1), 0)
    a[np.argsort(np.argsort(-a, axis=1), axis=1) >= 5] = 0
    np.testing.assert_allclose(coder.encode(x, np.float64), a, rtol=1e-6, atol=1e-9)


def test_saelens_whose_rows_were_scaled_demands_the_factor(tmp_path: Path) -> None:
    config = {"architecture": "jumprelu", "normalize_activations": "expected_average_only_in"}
    folder = saelens(tmp_path, only(*MATRICES, "threshold"), **config)

    with pytest.raises(FeatureFileError, match="whose factor the files do not have; give it: --scale X"):
        read(folder)
    agrees(read(folder, scale=0.6), Reference(CoderKind.JUMPRELU, subtracts=True), scale=0.6)


def test_saelens_transcoders_write_elsewhere(tmp_path: Path) -> None:
    out = 8
    tensors = {name: weights(out=out)[name] for name in MATRICES}
    tensors["W_skip"] = np.random.default_rng(3).standard_normal((out, WIDTH)).astype(np.float32)
    names = {"hook_name": "blocks.3.mlp.hook_in", "hook_name_out": "blocks.3.hook_mlp_out"}
    config = {"architecture": "skip_transcoder", "d_out": out, "apply_b_dec_to_input": False, "metadata": names}
    coder = read(saelens(tmp_path, tensors, **config))

    x = rows()
    a = np.maximum(x @ tensors["W_enc"].astype(np.float64) + tensors["b_enc"], 0)
    np.testing.assert_allclose(coder.encode(x, np.float64), a, atol=1e-6)
    expected = a @ tensors["W_dec"] + tensors["b_dec"] + x @ tensors["W_skip"].T
    np.testing.assert_allclose(coder.decode(a, x), expected, atol=1e-5)
    assert places(coder) == ["3.mlp_in", "3.mlp_out"]
    assert coder.is_transcoder


REFUSED = {
    "covariance_whitening": (
        {"normalize_activations": "covariance_whitening"},
        "'covariance_whitening' is not supported",
    ),
    "temporal": ({"architecture": "temporal"}, "its features depend on earlier tokens"),
    "matching_pursuit": ({"architecture": "matching_pursuit"}, "its features are found one after the other"),
    "tanh": ({"activation_fn": "tanh-relu"}, "activation_fn 'tanh-relu' is not supported"),
    "finetuned": ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor is not supported"),
    "one head": ({"hook_head_index": 3}, "an SAE of one attention head"),
    "hook_mlp_in": ({"metadata": {"hook_name": "blocks.3.hook_mlp_in"}}, "before the MLP's norm in TransformerLens"),
    "ln2": ({"metadata": {"hook_name": "blocks.3.ln2.hook_normalized"}}, "the norm's output before its gain"),
    "unknown": ({"metadata": {"hook_name": "blocks.3.attn.hook_pattern"}}, "no known place; name it: --site"),
    "k": ({"architecture": "topk", "k": 2.5}, "k: expected a whole number, got 2.5"),
    "large k": ({"architecture": "topk", "k": FEATURES + 1}, f"expected k from 1 to {FEATURES}"),
    "d_sae": ({"d_sae": FEATURES + 1}, "d_in, d_sae of cfg.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_saelens_refuses_by_name(name: str, tmp_path: Path) -> None:
    config, why = REFUSED[name]

    with pytest.raises(FeatureFileError, match=why):
        read(saelens(tmp_path, only(*MATRICES), **{"architecture": "standard", **config}))


def test_what_saelens_itself_refuses_is_refused(tmp_path: Path) -> None:
    tensors = only(*MATRICES)
    ones, other = np.ones(FEATURES, np.float32), np.full(FEATURES, 2, np.float32)

    agrees(
        read(saelens(tmp_path / "a", {**tensors, "scaling_factor": ones})), Reference(CoderKind.RELU, subtracts=True)
    )
    with pytest.raises(FeatureFileError, match="'scaling_factor': not all 1, but finetuning_scaling_factor is off"):
        read(saelens(tmp_path / "b", {**tensors, "scaling_factor": other}))
    with pytest.raises(FeatureFileError, match=r"SAELens does not load it .* it has the tensors threshold beside"):
        read(saelens(tmp_path / "c", {**tensors, "threshold": ones}, architecture="standard"))


def test_a_matrix_that_lies_the_other_way_round_is_refused(tmp_path: Path) -> None:
    for name in ("W_enc", "W_dec"):
        folder = saelens(tmp_path / name, transposed(only(*MATRICES), name), architecture="standard")
        with pytest.raises(FeatureFileError, match=rf"'{name}': expected the shape .*; it is the other way round"):
            read(folder)


def test_attention_saes_read_the_input_of_the_output_projection(tmp_path: Path) -> None:
    folder = saelens(tmp_path, only(*MATRICES), metadata={"hook_name": "blocks.3.attn.hook_z"}, architecture="standard")

    assert places(read(folder)) == ["3.hook_z", "3.hook_z"]
