"""Gemma Scope 1 and 2, with transcoders: weights, and the sites that folders tell."""

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
    agrees,
    only,
    places,
    put,
    read,
    rows,
    save,
    weights,
)


@pytest.mark.parametrize(
    ("repository", "site"),
    [
        ("gemma-scope-2b-pt-res", "20.post_mlp"),
        ("gemma-scope-9b-it-mlp", "20.mlp_out"),
        ("gemma-scope-2b-pt-att", "20.hook_z"),
    ],
)
def test_gemma_scope_1(repository: str, site: str, tmp_path: Path) -> None:
    folder = tmp_path / repository / "layer_20/width_16k/average_l0_71"
    folder.mkdir(parents=True)
    np.savez(folder / "params.npz", **only(*MATRICES, "threshold"))

    coder = read(folder)

    agrees(coder, Reference(CoderKind.JUMPRELU))
    assert (coder.read_site and coder.read_site.name, coder.declared) == (site, {"l0": 71.0})
    assert coder.model == {"2b": "google/gemma-2-2b", "9b": "google/gemma-2-9b-it"}[repository.split("-")[2]]


def test_gemma_scope_1_of_embeddings_was_trained_on_others_than_the_stream_has(tmp_path: Path) -> None:
    folder = tmp_path / "gemma-scope-2b-pt-res/embedding/width_4k/average_l0_6"
    folder.mkdir(parents=True)
    np.savez(folder / "params.npz", **only(*MATRICES, "threshold"))

    coder = read(folder)

    w, x, root = {n: v.astype(np.float64) for n, v in weights().items()}, rows(), np.sqrt(WIDTH)
    q = x @ (w["W_enc"] / root) + w["b_enc"]
    a = np.maximum(q, 0) * (q > w["threshold"])
    np.testing.assert_allclose(coder.encode(x, np.float64), a, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(coder.decode(a, x), a @ (w["W_dec"] * root) + w["b_dec"], atol=1e-6)
    assert [site.name for site in coder.write_sites] == ["0.pre_attn"]


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_gemma_scope_1_transcoders_read_before_the_norms_gain(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "gemma-scope-2b-pt-transcoders/layer_3/width_16k/average_l0_8"
    folder.mkdir(parents=True)
    np.savez(folder / "params.npz", **only(*MATRICES, "threshold"))
    stored = np.random.default_rng(2).uniform(0.5, 2, WIDTH).astype(np.float32)
    put(tmp_path / "model/config.json", {"model_type": kind})
    after = {"model.layers.3.post_attention_layernorm.weight": stored * 0 + 7 if kind == "gemma2" else stored}
    before = {f"model.layers.{3 if kind == 'gemma2' else 33}.pre_feedforward_layernorm.weight": stored}
    save(tmp_path / "model/model-00001-of-00002.safetensors", after)
    save(tmp_path / "model/model-00002-of-00002.safetensors", before)

    coder = read(folder, model=tmp_path / "model")

    normalized = rows()
    mlp_in = normalized * (1 + stored if kind == "gemma2" else stored)
    expected = [Reference(CoderKind.JUMPRELU).encode(row) for row in normalized]
    np.testing.assert_allclose(coder.encode(mlp_in, np.float64), expected, rtol=1e-6, atol=1e-6)
    assert places(coder) == ["3.mlp_in", "3.mlp_out"]

    for document, why in (({"model_type": "gpt2"}, "not known of 'gpt2'"), ({"model_type": "qwen3"}, None)):
        put(tmp_path / "other/config.json", document)
        with pytest.raises(FeatureFileError, match=why or "no safetensors file has the norm of layer 3's MLP"):
            read(folder, model=tmp_path / "other")
    save(tmp_path / "other/model.safetensors", {"layers.3.post_attention_layernorm.weight": stored * 0})
    with pytest.raises(FeatureFileError, match="a gain of 0 or NaN"):
        read(folder, model=tmp_path / "other")


def test_gemma_scope_1_refuses_transcoders_and_factors_on_features(tmp_path: Path) -> None:
    for repository, extra, why in (
        ("gemma-scope-2b-pt-transcoders", {}, "the norm's output before its gain"),
        ("gemma-scope-2b-pt-res", {"scaling_factor": np.full(FEATURES, 1.5)}, "fine-tuned with factors"),
    ):
        folder = tmp_path / repository / "layer_3/width_16k/average_l0_8"
        folder.mkdir(parents=True)
        np.savez(folder / "params.npz", **only(*MATRICES, "threshold"), **extra)  # type: ignore[arg-type]
        with pytest.raises(FeatureFileError, match=why):
            read(folder)


SECOND = only("b_enc", "b_dec", "threshold", w_enc="W_enc", w_dec="W_dec")
PLACES = {
    "resid_post/layer_17_width_16k_l0_medium": "17.post_mlp",
    "mlp_out_all/layer_3_width_16k_l0_small": "3.mlp_out",
}


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_gemma_scope_2(place: str, has_config: bool, tmp_path: Path) -> None:
    folder = tmp_path / "gemma-scope-2-4b-pt" / place
    save(folder / "params.safetensors", SECOND)
    if has_config:
        layer = PLACES[place].split(".")[0]
        hook = "output" if "resid" in place else "post_feedforward_layernorm.output"
        put(folder / "config.json", {"architecture": "jump_relu", "hf_hook_point_in": f"model.layers.{layer}.{hook}"})

    coder = read(folder)

    agrees(coder, Reference(CoderKind.JUMPRELU))
    assert [site.name for site in coder.write_sites] == [PLACES[place]]


def test_gemma_scope_2_transcoders_have_affine_skips(tmp_path: Path) -> None:
    folder = tmp_path / "transcoder_all/layer_5_width_16k_l0_small_affine"
    affine = np.random.default_rng(4).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    save(folder / "params.safetensors", {**SECOND, "affine_skip_connection": affine})

    coder = read(folder)

    x = rows()
    a = coder.encode(x, np.float64)
    np.testing.assert_allclose(a, [Reference(CoderKind.JUMPRELU).encode(row) for row in x], atol=1e-6)
    np.testing.assert_allclose(coder.decode(a, x), a @ SECOND["w_dec"] + SECOND["b_dec"] + x @ affine, atol=1e-5)
    assert places(coder) == ["5.mlp_in", "5.mlp_out"]

    save(tmp_path / "moved/params.safetensors", {**SECOND, "affine_skip_connection": affine})
    with pytest.raises(FeatureFileError, match=r"neither config.json nor the folders say where it writes"):
        read(tmp_path / "moved")
    save(folder / "params.safetensors", SECOND)
    with pytest.raises(FeatureFileError, match="affine_connection, but there is no affine_skip_connection"):
        read(folder)


def test_gemma_scope_2_cross_layer_transcoders_write_every_later_layer(tmp_path: Path) -> None:
    decoder = np.random.default_rng(4).standard_normal((FEATURES, 4, WIDTH)).astype(np.float32)
    folder = tmp_path / "clt/width_262k_l0_big"
    save(folder / "params_layer_2.safetensors", {**SECOND, "w_dec": decoder})

    with pytest.raises(FeatureFileError, match="a file for each layer; name one: --layer L"):
        read(folder)
    coder = read(folder, layer=2)

    a = coder.encode(rows(), np.float64)
    np.testing.assert_allclose(coder.decode(a, rows(), 0), a @ decoder[:, 2] + SECOND["b_dec"], atol=1e-5)
    np.testing.assert_allclose(coder.decode(a, rows(), 1), a @ decoder[:, 3], atol=1e-5)
    assert places(coder) == [
        "2.mlp_in",
        "2.mlp_out",
        "3.mlp_out",
    ]
