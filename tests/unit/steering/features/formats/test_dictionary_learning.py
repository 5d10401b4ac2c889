"""dictionary_learning: each class, its thresholds and subtractions, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.steering.features.source_coder import CoderKind
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
    transposed,
    weights,
)

TRAINER = {"activation_dim": WIDTH, "dict_size": FEATURES, "k": 5, "layer": 8, "lm_name": "google/gemma-2-2b"}
LINEAR = transposed(only("b_dec", encoder__weight="W_enc", decoder__weight="W_dec"), "encoder.weight", "decoder.weight")


def write(folder: Path, name: str, tensors: dict[str, Array], *, nested: bool = False, **trainer: Any) -> Path:
    """A folder as ``trainSAE`` leaves it."""
    put(folder / "config.json", {"trainer": {**TRAINER, "dict_class": name, **trainer}, "buffer": {"ctx_len": 128}})
    found = {key: torch.from_numpy(np.ascontiguousarray(values)) for key, values in tensors.items()}
    torch.save({"ae": found, "step": 3} if nested else found, folder / "ae.pt")
    return folder


def scalar(value: float) -> Array:
    return np.asarray(value, np.float32)


WITH_BIAS = {**LINEAR, "encoder.bias": weights()["b_enc"]}
GATED = {
    **{name: LINEAR[name] for name in ("encoder.weight", "decoder.weight")},
    **only("r_mag", gate_bias="b_gate", mag_bias="b_mag", decoder_bias="b_dec"),
}
NEW = {**{name: WITH_BIAS[name] for name in WITH_BIAS if name != "b_dec"}, "decoder.bias": weights()["b_dec"]}
CLASSES: dict[str, tuple[dict[str, Array], Reference]] = {
    "AutoEncoderNew": (NEW, Reference(CoderKind.RELU)),
    "AutoEncoderTopK": (
        {**WITH_BIAS, "k": scalar(5), "threshold": scalar(-1)},
        Reference(CoderKind.TOPK, subtracts=True),
    ),
    "GatedAutoEncoder": (GATED, Reference(CoderKind.GATED, subtracts=True)),
    "JumpReluAutoEncoder": (only(*MATRICES, "threshold"), Reference(CoderKind.JUMPRELU)),
}


@pytest.mark.parametrize("nested", [False, True], ids=["final", "in mid-training"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class(name: str, nested: bool, tmp_path: Path) -> None:
    tensors, reference = CLASSES[name]

    coder = read(write(tmp_path / "resid_post_layer_8/trainer_0", name, tensors, nested=nested))

    agrees(coder, reference)
    assert (places(coder), coder.model) == (["8.post_mlp", "8.post_mlp"], "google/gemma-2-2b")
    assert coder.decision == ("none" if name == "AutoEncoderTopK" else "exact")


@pytest.mark.parametrize("name", ["BatchTopKSAE", "MatryoshkaBatchTopKSAE"])
def test_classes_that_select_by_batch_have_one_threshold(name: str, tmp_path: Path) -> None:
    tensors = dict(WITH_BIAS) if name == "BatchTopKSAE" else only(*MATRICES)
    if name == "MatryoshkaBatchTopKSAE":
        tensors["group_sizes"] = np.asarray([8, FEATURES - 8])
    reference = Reference(CoderKind.JUMPRELU, subtracts=True)
    reference.w["threshold"] = np.full(FEATURES, 0.5)

    coder = read(write(tmp_path / "a", name, {**tensors, "k": scalar(5), "threshold": scalar(0.5)}))

    agrees(coder, reference)
    assert coder.declared == {"l0": 5}
    with pytest.raises(FeatureFileError, match="its threshold is -1, which stands for none"):
        read(write(tmp_path / "b", name, {**tensors, "k": scalar(5), "threshold": scalar(-1)}))


def test_activations_of_autoencoder_are_in_units_of_its_decoder_rows(tmp_path: Path) -> None:
    tensors = {**WITH_BIAS, "bias": weights()["b_dec"]}
    del tensors["b_dec"]

    coder = read(write(tmp_path, "AutoEncoder", tensors))

    w, x = {name: values.astype(np.float64) for name, values in weights().items()}, rows()
    lengths = np.linalg.norm(w["W_dec"], axis=1)
    a = np.maximum((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"], 0)
    np.testing.assert_allclose(coder.encode(x, np.float64), a * lengths, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(coder.decode(a * lengths, x), a @ w["W_dec"] + w["b_dec"], rtol=1e-6, atol=1e-6)


def test_top_k_encodes_by_row_although_it_stores_a_threshold(tmp_path: Path) -> None:
    coder = read(write(tmp_path, "AutoEncoderTopK", {**WITH_BIAS, "k": scalar(5), "threshold": scalar(0.25)}))

    agrees(coder, Reference(CoderKind.TOPK, subtracts=True))
    assert coder.decision == "threshold"
    assert coder.rows([0]).threshold == pytest.approx([0.25])


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"submodule_name": "attn_out_layer_8"}, "8.attn_out"),
        ({"submodule_name": "resid_pre_layer_8"}, "8.pre_attn"),
        ({"layer": 9}, None),
        ({"layer": None}, None),
    ],
)
def test_the_site_is_in_the_names(trainer: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    coder = read(write(tmp_path / "resid_post_layer_8/trainer_0", "AutoEncoderNew", NEW, **trainer))

    assert places(coder) == ([None] if expected is None else [expected, expected])


def test_refused_by_name(tmp_path: Path) -> None:
    jumprelu = only(*MATRICES, "threshold")
    for name, tensors, trainer, why in (
        ("CrossCoder", jumprelu, {}, "dict_class 'CrossCoder' is not supported"),
        ("JumpReluAutoEncoder", jumprelu, {"dict_size": 41}, "dict_size, activation_dim of config.json"),
        ("JumpReluAutoEncoder", transposed(jumprelu, "W_enc"), {}, "it is the other way round"),
        ("AutoEncoderTopK", {**WITH_BIAS, "k": scalar(6)}, {}, "trainer.k is 5, but the weights have k 6"),
        ("AutoEncoderTopK", WITH_BIAS, {"k": None}, "k: expected int, got None"),
        ("AutoEncoderNew", LINEAR, {}, "expected a tensor 'encoder.bias', found"),
    ):
        with pytest.raises(FeatureFileError, match=why):
            read(write(tmp_path, name, tensors, **trainer))
