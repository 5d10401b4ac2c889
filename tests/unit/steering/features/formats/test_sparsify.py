"""sparsify: top-k and groupmax, transcoders, and the widths that its configuration leaves out."""

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
    put,
    read,
    rows,
    save,
    transposed,
    weights,
)

SPARSIFY = transposed(only("W_dec", "b_dec", encoder__weight="W_enc", encoder__bias="b_enc"), "encoder.weight")


@pytest.mark.parametrize("activation", ["topk", "groupmax"])
def test_sparsify_whose_num_latents_is_0(activation: str, tmp_path: Path) -> None:
    factor = FEATURES // 8
    width = 8
    tensors = {name: weights(width=width)[name] for name in MATRICES}
    folder = tmp_path / "layers.5"
    config = {"d_in": width, "num_latents": 0, "expansion_factor": factor, "k": 5, "activation": activation}
    put(folder / "cfg.json", config)
    names = {"encoder.weight": tensors["W_enc"].T, "encoder.bias": tensors["b_enc"]}
    save(folder / "sae.safetensors", {**names, "W_dec": tensors["W_dec"], "b_dec": tensors["b_dec"]})

    coder = read(folder)

    reference = Reference(CoderKind.TOPK if activation == "topk" else CoderKind.GROUPMAX, subtracts=True)
    reference.w = {name: values.astype(np.float64) for name, values in tensors.items()}
    x = rows(width=width)
    np.testing.assert_allclose(coder.encode(x, np.float64), [reference.encode(row) for row in x], atol=1e-6)
    assert ([site.name for site in coder.write_sites], coder.declared) == (["5.post_mlp"], {"l0": 5})


def test_sparsify_transcoders_read_the_mlps_input_and_subtract_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "layers.5.mlp"
    config = {"d_in": WIDTH, "num_latents": FEATURES, "k": 5, "transcode": True, "skip_connection": True}
    put(folder / "cfg.json", config)
    skip = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    save(folder / "sae.safetensors", {**SPARSIFY, "W_skip": skip})

    coder = read(folder)

    x, reference = rows(), Reference(CoderKind.TOPK)
    a = np.stack([reference.encode(row) for row in x])
    np.testing.assert_allclose(coder.encode(x, np.float64), a, atol=1e-6)
    expected = np.stack([reference.decode(each, row) for each, row in zip(a, x, strict=True)]) + x @ skip.T
    np.testing.assert_allclose(coder.decode(a, x), expected, atol=1e-5)
    assert places(coder) == ["5.mlp_in", "5.mlp_out"]

    put(folder / "cfg.json", {**config, "skip_connection": False})
    with pytest.raises(FeatureFileError, match=r"sparsify does not load it .* it has the tensors W_skip beside"):
        read(folder)
    put(folder / "cfg.json", {**config, "signed": True})
    with pytest.raises(FeatureFileError, match="'topk', signed is not supported"):
        read(folder)


def test_sparsify_decoders_are_not_transposed(tmp_path: Path) -> None:
    folder = tmp_path / "layers.5"
    put(folder / "cfg.json", {"d_in": WIDTH, "num_latents": FEATURES, "k": 5})
    save(folder / "sae.safetensors", transposed(SPARSIFY, "W_dec"))

    with pytest.raises(FeatureFileError, match=r"'W_dec': expected the shape .*; it is the other way round"):
        read(folder)
