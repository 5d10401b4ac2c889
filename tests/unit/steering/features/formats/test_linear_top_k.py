"""Top-k SAEs of ``{hidden_dim, dict_size, k}`` and ``weights.safetensors``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headgate.steering.features.source_coder import CoderKind
from headgate.steering.features.tensors import FeatureFileError
from tests.fakes.sparse_coders import FEATURES, WIDTH, Reference, agrees, only, places, put, read, save, transposed

TENSORS = transposed(
    only(encoder__weight="W_enc", decoder__weight="W_dec", encoder__bias="b_enc", pre_bias="b_dec"),
    "encoder.weight",
    "decoder.weight",
)


def folder(path: Path, tensors: dict[str, Any] = TENSORS, **config: Any) -> Path:
    put(path / "config.json", {"hidden_dim": WIDTH, "dict_size": FEATURES, "k": 5} | config)
    save(path / "weights.safetensors", tensors)
    return path


def test_the_bias_is_subtracted_and_k_features_are_kept(tmp_path: Path) -> None:
    coder = read(folder(tmp_path / "sae_attn_mid"))

    agrees(coder, Reference(CoderKind.TOPK, subtracts=True))
    assert (coder.k, coder.declared, places(coder)) == (5, {"l0": 5}, [None])


@pytest.mark.parametrize(
    ("config", "tensors", "why"),
    [
        ({"k": None}, TENSORS, "k: expected int, got None"),
        ({"k": 0}, TENSORS, "expected k from 1 to 40, got 0"),
        ({"dict_size": FEATURES + 1}, TENSORS, r"dict_size, hidden_dim of config\.json"),
        ({}, {**TENSORS, "threshold": TENSORS["encoder.bias"]}, "it has the tensors threshold beside"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    config: dict[str, Any], tensors: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(FeatureFileError, match=why):
        read(folder(tmp_path, tensors, **config))
