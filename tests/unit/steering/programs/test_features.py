"""Edits of SAE features, from a request to a program, are what the SAE itself says: decode(edited) + error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.core.saes import SaeRegistry, open_sae
from headgate.steering.documents.features import REQUEST_FEATURES, read_features
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.importing import read_source
from headgate.steering.features.source_coder import Hints
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.programs.codes import CODE, READ
from headgate.steering.programs.feature_edits import FeatureEdit
from headgate.steering.programs.program import Program
from headgate.steering.programs.wire import content_from_wire, content_to_wire
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import Steerable
from headgate.steering.worker.program_reference import program_deltas_reference
from tests.fakes.programs import run
from tests.fakes.saes import FEATURES, KINDS, NORMS, TinySae

WIDTH = 32
SITE = Site(1, HookPoint.POST_MLP)
FIELD, PREFILL, DECODE = REQUEST_FEATURES.features
EDITS: list[dict[str, Any]] = [
    {"feature": 0, "set": 3.5},
    {"feature": 1, "add": -0.75},
    {"feature": 2, "scale": 2.5},
    {"feature": 3, "min": 0.8},
    {"feature": 4, "max": 0.3},
    {"feature": 5, "set": 0.0},
    {"feature": 6, "add": 1.5, "only_if_active": True},
    {"feature": 7, "min": 1.0, "only_if_active": True},
    {"feature": 11, "set": -2.0, "only_if_active": True},
]


def steerable(dtype: StoredType = "float32", max_features: int = 16) -> Steerable:
    return Steerable(
        num_layers=4,
        hidden_size=WIDTH,
        dtype=dtype,
        sites=(SITE,),
        max_vectors=100,
        op_sites=(SITE,),
        max_ops_per_site=8,
        max_sae_features=max_features,
    )


def registry(folder: Path, sae: TinySae, dtype: StoredType = "float32", max_features: int = 16) -> SaeRegistry:
    found = SaeRegistry(dtype, max_features)
    found.put(open_sae("sae", sae.save(folder / "sae"), SITE, steerable(dtype)))
    return found


def lowered(saes: SaeRegistry, edits: list[dict[str, Any]], dtype: StoredType = "float32") -> Program:
    fields = {FIELD: [{"sae": "sae", **edit} for edit in edits]}
    program = saes.program(read_features(fields, steerable(dtype)).prefill)
    assert program is not None
    return program


def rows(seed: int = 3, count: int = 40) -> Any:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)) * 1.5 + 0.2


@pytest.mark.parametrize("subtracts_bias", [True, False], ids=["b_dec-to-input", "plain-input"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ["standard", "jumprelu", "gated"])
def test_edits_of_features_are_decode_of_the_edited_plus_the_error(
    tmp_path: Path, kind: str, norm: str, subtracts_bias: bool
) -> None:
    sae = TinySae(architecture=kind, norm=norm, subtracts_bias=subtracts_bias, width=WIDTH)
    stream = rows()
    program = lowered(registry(tmp_path, sae), EDITS)
    active = sae.encode(stream)[:, [edit["feature"] for edit in EDITS]] > 0
    assert active.any(axis=0).all()
    assert not active.all(axis=0).any()

    found = np.stack([run(program, SITE, row) for row in stream])

    np.testing.assert_allclose(found, sae.edited(stream, EDITS), rtol=0, atol=2e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ["standard", "jumprelu", "gated"])
def test_the_reference_of_the_kernel_agrees_with_the_sae(tmp_path: Path, kind: str, norm: str) -> None:
    sae = TinySae(architecture=kind, norm=norm, width=WIDTH)
    program = lowered(registry(tmp_path, sae), EDITS)
    stream = torch.from_numpy(rows())
    pool = torch.cat([torch.zeros(1, WIDTH), torch.from_numpy(program.rows.copy())])
    row_of = torch.zeros(len(stream), dtype=torch.int32)
    counts = torch.full((len(stream),), len(program.codes), dtype=torch.int32)
    codes = torch.from_numpy(program.codes.copy())[None]

    params = torch.from_numpy(program.params.copy())[None]
    delta = program_deltas_reference(stream, None, pool, row_of, counts, codes, params)

    expected = sae.edited(stream.numpy(), EDITS) - stream.numpy()
    np.testing.assert_allclose(delta.numpy(), expected, rtol=0, atol=2e-6)


def test_adding_needs_no_encoder_row_and_is_exact_for_top_k(tmp_path: Path) -> None:
    sae = TinySae(architecture="topk", width=WIDTH)
    edits = [{"feature": 3, "add": 2.0}, {"feature": 8, "nudge": -1.0}]
    program = lowered(registry(tmp_path, sae), edits)
    stream = rows()

    found = np.stack([run(program, SITE, row) for row in stream])

    expected = stream + 2.0 * sae.weights["W_dec"][3] - sae.weights["W_dec"][8]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert program.num_rows == 2
    assert program.codes[:, READ].tolist() == [0, 0]


@pytest.mark.parametrize("edit", [{"set": 1.0}, {"scale": 0.0}, {"min": 1.0}, {"add": 1.0, "only_if_active": True}])
def test_top_k_without_a_threshold_is_refused_where_the_activation_matters(
    tmp_path: Path, edit: dict[str, Any]
) -> None:
    saes = registry(tmp_path, TinySae(architecture="topk", width=WIDTH))

    with pytest.raises(RequestError, match=r"steering_features\[0\].sae: .*top-k.* has no threshold"):
        lowered(saes, [{"feature": 3, **edit}])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["standard", "gated"])
def test_rows_are_rounded_once_to_the_dtype_of_the_model(tmp_path: Path, kind: str, dtype: StoredType) -> None:
    sae = TinySae(architecture=kind, width=WIDTH)
    program = lowered(registry(tmp_path, sae, dtype), EDITS, dtype)
    stream = rows()

    found = np.stack([run(program, SITE, row) for row in stream])

    error = np.linalg.norm(found - sae.edited(stream, EDITS)) / np.linalg.norm(found - stream)
    assert error < {"float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype]


def test_equal_edits_have_equal_programs_whatever_their_order_and_the_name_of_the_sae(tmp_path: Path) -> None:
    sae = TinySae(width=WIDTH)
    saes = registry(tmp_path, sae)
    saes.put(open_sae("other", tmp_path / "sae", SITE, steerable()))
    fields = {FIELD: [{"sae": "other", **edit} for edit in EDITS]}

    first, again, turned = lowered(saes, EDITS), lowered(saes, EDITS), lowered(saes, EDITS[::-1])
    other = saes.program(read_features(fields, steerable()).prefill)

    assert again is first
    assert other is not None
    assert first.key == turned.key == other.key
    assert lowered(saes, EDITS[1:]).key != first.key
    assert first.codes[:, CODE].all()


def test_an_sae_that_is_registered_anew_makes_new_programs(tmp_path: Path) -> None:
    saes = registry(tmp_path, TinySae(width=WIDTH))
    first = lowered(saes, EDITS)
    saes.put(open_sae("sae", TinySae(width=WIDTH, seed=1).save(tmp_path / "new"), SITE, steerable()))

    assert lowered(saes, EDITS).key != first.key


def test_edits_come_through_the_wire(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        FIELD: [{"sae": "sae", **edit} for edit in EDITS],
        "sae_clamp_specs": [
            {
                "module_name": "sae",
                "clamps": {"post_block": {"1": [{"feature_idx": 9, "kind": "absolute", "value": 2}]}},
                "phase": "decode",
            }
        ],
    }
    found = read_features(fields, steerable())

    assert len(found.prefill) == len(EDITS)
    assert len(found.decode) == len(EDITS) + 1
    assert content_from_wire(tuple[FeatureEdit, ...], content_to_wire(found.decode)) == found.decode
    assert registry(tmp_path, TinySae(width=WIDTH)).program(found.decode) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_an_sae_says_what_it_is(tmp_path: Path, kind: str) -> None:
    (sae,) = registry(tmp_path, TinySae(architecture=kind, width=WIDTH)).all()

    about = sae.described()

    assert about["site"] == "1.post_mlp"
    assert (about["width"], about["num_features"]) == (WIDTH, FEATURES)
    assert about["decision"] == ("none" if kind == "topk" else "exact")
    assert len(str(about["sha256"])) == 64


@pytest.mark.parametrize(
    ("width", "site", "message"),
    [
        (WIDTH + 8, SITE, f"an SAE of width {WIDTH + 8}; rows of {SITE.name} have {WIDTH}"),
        (WIDTH, Site(2, HookPoint.POST_MLP), "no operations at 2.post_mlp.*--steering-op-sites"),
        (WIDTH, None, "has no site"),
    ],
)
def test_an_sae_that_does_not_fit_is_refused(tmp_path: Path, width: int, site: Site | None, message: str) -> None:
    path = TinySae(width=width).save(tmp_path / "sae")

    with pytest.raises(FeatureFileError, match=message):
        open_sae("sae", path, site, steerable())


def test_a_threshold_stands_for_the_selection_of_top_k(tmp_path: Path) -> None:
    sae = TinySae(architecture="topk", width=WIDTH)
    hints = Hints(site=SITE, threshold=0.4)
    source = read_source(sae.save(tmp_path / "topk"), hints)
    write_coder(tmp_path / "sae.safetensors", source, name="sae", path="topk")
    saes = SaeRegistry("float32", 16)
    saes.put(open_sae("sae", tmp_path / "sae.safetensors", None, steerable()))
    alike = TinySae(architecture="jumprelu", width=WIDTH)
    object.__setattr__(alike, "weights", {**sae.weights, "threshold": np.full(FEATURES, 0.4)})
    stream = rows()

    found = np.stack([run(lowered(saes, EDITS), SITE, row) for row in stream])

    assert saes.all()[0].described()["decision"] == "threshold"
    np.testing.assert_allclose(found, alike.edited(stream, EDITS), rtol=0, atol=2e-6)


def test_values_may_be_in_units_of_the_largest_activation_that_the_sae_declares(tmp_path: Path) -> None:
    source = read_source(TinySae(width=WIDTH).save(tmp_path / "tiny"), Hints(site=SITE))
    largest = np.arange(FEATURES, dtype=np.float64)
    path = tmp_path / "sae.safetensors"
    write_coder(path, replace(source, max_activations=largest), name="sae", path="tiny")
    saes = SaeRegistry("float32", 16)
    saes.put(open_sae("sae", path, None, steerable()))

    relative = lowered(saes, [{"feature": 6, "set": 0.5, "unit": "max_act"}, {"feature": 7, "add": 1.0}])

    assert relative.key == lowered(saes, [{"feature": 6, "set": 3.0}, {"feature": 7, "add": 1.0}]).key
    with pytest.raises(RequestError, match=r"steering_features\[0\].unit: .* of feature 0 is 0.0"):
        lowered(saes, [{"feature": 0, "set": 0.5, "unit": "max_act"}])
