"""Edits of transcoders' features, from a request to a program: read at one site, written at later ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site, sort_sites
from headgate.steering.core.saes import SaeRegistry, open_sae
from headgate.steering.documents.features import REQUEST_FEATURES, read_features
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.importing import read_source
from headgate.steering.features.source_coder import CoderKind, Hints
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.programs.codes import CODE, CODE_MASK, MAX_CHANGES, Code, change_index, with_change
from headgate.steering.programs.feature_edits import SaeFacts, check_edits
from headgate.steering.programs.program import Program, joined
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import Steerable
from headgate.steering.worker.program_reference import program_deltas_reference
from tests.fakes.programs import run
from tests.fakes.saes import TinySae
from tests.fakes.transcoders import TinyTranscoder

WIDTH = 32
FIELD = REQUEST_FEATURES.features[0]
SITES = tuple(Site(layer, hook) for layer in range(4) for hook in (HookPoint.MLP_IN, HookPoint.MLP_OUT))
EDITS: list[dict[str, Any]] = [
    {"feature": 0, "set": 3.5},
    {"feature": 1, "add": -0.75},
    {"feature": 2, "scale": 2.5},
    {"feature": 3, "min": 0.8},
    {"feature": 4, "max": 0.3},
    {"feature": 6, "add": 1.5, "only_if_active": True},
]
KINDS = [TinyTranscoder(num_layers=num, has_threshold=kind) for num in (1, 3) for kind in (False, True)]
IDS = ["relu", "jumprelu", "cross-layer relu", "cross-layer jumprelu"]


def steerable(op_sites: tuple[Site, ...] = SITES, width: int = WIDTH, max_changes: int = 16) -> Steerable:
    return Steerable(
        num_layers=4,
        hidden_size=width,
        dtype="float32",
        sites=SITES,
        max_vectors=100,
        op_sites=op_sites,
        max_ops_per_site=8,
        max_sae_features=16,
        max_changes=max_changes,
    )


def registry(folder: Path, dtype: StoredType = "float32", max_features: int = 16, **coders: Any) -> SaeRegistry:
    found = SaeRegistry(dtype, max_features)
    for name, coder in coders.items():
        site = SITES[2] if isinstance(coder, TinySae) else None
        found.put(open_sae(name, coder.save(folder / name), site, steerable()))
    return found


def lowered(saes: SaeRegistry, **edits: list[dict[str, Any]]) -> Program:
    fields = {FIELD: [{"sae": name, **edit} for name, each in edits.items() for edit in each]}
    program = saes.program(read_features(fields, steerable()).prefill)
    assert program is not None
    return program


def stream(seed: int = 3, num_rows: int = 40) -> dict[Site, Any]:
    random = np.random.default_rng(seed)
    return {site: random.standard_normal((num_rows, WIDTH)) * 1.5 + 0.2 for site in SITES}


def forward(program: Program, rows: dict[Site, Any]) -> dict[Site, Any]:
    """By how much a program moves each row, at each site one after the other."""
    moved = {site: np.zeros_like(values) for site, values in rows.items()}
    for index in range(len(rows[SITES[0]])):
        changes: dict[int, float] = {}
        for site in SITES:
            moved[site][index] = run(program, site, rows[site][index], changes=changes) - rows[site][index]
    return moved


def check(program: Program, *expected: tuple[TinyTranscoder, list[dict[str, Any]]], atol: float = 2e-6) -> None:
    rows = stream()
    moved = forward(program, rows)
    total = {site: np.zeros_like(values) for site, values in rows.items()}
    for coder, edits in expected:
        for site, values in coder.written(rows[coder.read_site], edits).items():
            total[site] += values
    for site in SITES:
        np.testing.assert_allclose(moved[site], total[site], rtol=0, atol=atol, err_msg=site.name)


@pytest.mark.parametrize("coder", KINDS, ids=IDS)
def test_a_change_of_an_activation_is_written_where_the_transcoder_writes(
    tmp_path: Path, coder: TinyTranscoder
) -> None:
    active = coder.encode(stream()[coder.read_site])[:, [edit["feature"] for edit in EDITS]] > 0
    assert active.any(axis=0).all()
    assert not active.all(axis=0).any()

    check(lowered(registry(tmp_path, t=coder), t=EDITS), (coder, EDITS))


@pytest.mark.parametrize("coder", KINDS, ids=IDS)
def test_an_imported_transcoder_is_the_same(tmp_path: Path, coder: TinyTranscoder) -> None:
    path = coder.save(tmp_path / "t")
    write_coder(tmp_path / "t.safetensors", read_source(path, Hints()), name="t", path=str(path))
    saes = SaeRegistry("float32", 16)
    saes.put(open_sae("t", tmp_path / "t.safetensors", None, steerable()))

    assert lowered(saes, t=EDITS).key == lowered(registry(tmp_path / "again", t=coder), t=EDITS).key


@pytest.mark.parametrize("coder", KINDS, ids=IDS)
def test_the_reference_of_the_kernel_agrees_with_the_transcoder(tmp_path: Path, coder: TinyTranscoder) -> None:
    program = lowered(registry(tmp_path, t=coder), t=EDITS)
    rows = stream()
    pool = torch.cat([torch.zeros(1, WIDTH), torch.from_numpy(program.rows.copy())])
    changes = torch.full((40, program.num_changes), torch.nan)
    expected = coder.written(rows[coder.read_site], EDITS)

    for site in sort_sites(program.sites):
        place = [at for at, other in enumerate(program.sites) if other == site]
        counts = torch.full((40,), len(place), dtype=torch.int32)
        codes, params = (torch.from_numpy(table[place].copy())[None] for table in (program.codes, program.params))
        value = torch.from_numpy(rows[site])
        row_of = torch.zeros(40, dtype=torch.int32)
        moved = program_deltas_reference(value, None, pool, row_of, counts, codes, params, changes_TK=changes)
        np.testing.assert_allclose(moved.numpy(), expected.get(site, 0 * rows[site]), rtol=0, atol=4e-6)


def test_a_value_that_is_added_needs_no_activation(tmp_path: Path) -> None:
    coder = KINDS[2]
    edits = [{"feature": 3, "add": 2.0}]
    program = lowered(registry(tmp_path, t=coder), t=edits)

    check(program, (coder, edits))
    assert set(program.sites) == set(coder.write_sites)
    assert (program.num_rows, program.num_changes) == (3, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_are_rounded_once_to_the_dtype_of_the_model(tmp_path: Path, dtype: StoredType) -> None:
    coder, rows = KINDS[2], stream()
    program = lowered(registry(tmp_path, dtype, t=coder), t=EDITS)

    moved = forward(program, rows)

    for site, expected in coder.written(rows[coder.read_site], EDITS).items():
        error = np.linalg.norm(moved[site] - expected) / np.linalg.norm(expected)
        assert 0 < error < {"float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype]


def test_several_coders_of_one_request_keep_their_changes_apart(tmp_path: Path) -> None:
    across, other, within = KINDS[3], TinyTranscoder(layer=2), TinySae(width=WIDTH)
    saes = registry(tmp_path, across=across, other=other, within=within)
    edits, rows = {"across": EDITS, "other": EDITS[2:], "within": [{"feature": 5, "set": 2.0}]}, stream()

    moved = forward(lowered(saes, **edits), rows)

    at = across.read_site
    expected = {site: np.zeros_like(values) for site, values in rows.items()}
    expected[at] = within.edited(rows[at], edits["within"]) - rows[at]  # which the transcoder does not see
    for coder, name in ((across, "across"), (other, "other")):
        for site, values in coder.written(rows[coder.read_site], edits[name]).items():
            expected[site] += values
    for site in SITES:
        np.testing.assert_allclose(moved[site], expected[site], rtol=0, atol=2e-6, err_msg=site.name)


def test_joined_programs_keep_their_changes_apart_and_a_scale_multiplies_what_is_written(tmp_path: Path) -> None:
    first, second = KINDS[0], KINDS[2]
    saes = registry(tmp_path, first=first, second=second)
    programs = [lowered(saes, first=EDITS), lowered(saes, second=EDITS)]

    both = joined(programs)

    check(both, (first, EDITS), (second, EDITS))
    assert both.num_changes == sum(program.num_changes for program in programs)
    assert programs[1].scaled(2.0) is not None
    rows = stream()
    once, twice = (forward(program, rows) for program in (programs[1], programs[1].scaled(2.0) or programs[1]))
    for site in SITES:
        np.testing.assert_allclose(twice[site], 2 * once[site], rtol=0, atol=1e-12)


def test_equal_edits_have_equal_programs_and_others_have_not(tmp_path: Path) -> None:
    saes = registry(tmp_path, t=KINDS[2], u=KINDS[2], v=KINDS[0])

    first = lowered(saes, t=EDITS)

    assert first.key == lowered(saes, t=EDITS[::-1]).key == lowered(saes, u=EDITS).key
    assert first.key != lowered(saes, t=[*EDITS[:-1], {**EDITS[-1], "add": 1.25}]).key
    assert first.key != lowered(saes, v=EDITS).key
    assert Program.from_wire(first.to_wire()).num_changes == first.num_changes == len(EDITS) - 1
    halves = [code for code in first.codes[:, CODE].tolist() if code & CODE_MASK == Code.READ_FEATURE]
    assert sorted(map(change_index, halves)) == list(range(len(EDITS) - 1))


def test_the_index_of_a_change_fits_beside_everything_else_of_a_code() -> None:
    code = Code.READ_FEATURE | 0x7FF00

    for index in (0, 1, MAX_CHANGES - 1):
        assert change_index(with_change(code, index)) == index
        assert with_change(with_change(code, 5), index) & 0x7FFFF == code
        assert with_change(code, index) < 2**31
    with pytest.raises(AssertionError, match="at most 2048 fit"):
        with_change(code, MAX_CHANGES)


@pytest.mark.parametrize(
    ("op_sites", "width", "message"),
    [
        (SITES[:2], WIDTH, r"no operations at 1.mlp_in, 1.mlp_out, .*--steering-op-sites"),
        (SITES[:5], WIDTH, r"no operations at 2.mlp_out, 3.mlp_out, where"),
        (SITES, WIDTH + 8, f"an SAE of width {WIDTH}; rows of 1.mlp_in have {WIDTH + 8}"),
    ],
)
def test_a_transcoder_that_does_not_fit_is_refused(
    tmp_path: Path, op_sites: tuple[Site, ...], width: int, message: str
) -> None:
    path = KINDS[2].save(tmp_path / "t")

    with pytest.raises(FeatureFileError, match=message):
        open_sae("t", path, None, steerable(op_sites, width=width))


@pytest.mark.parametrize(
    ("reads", "writes", "why"),
    [
        ("hook_mlp_out", "mlp.hook_in", "reads at 1.mlp_out and writes at 1.mlp_in cannot be used: it must write at"),
        ("hook_attn_out", "hook_mlp_out", "not from a layer's attention into the MLP beside it"),
    ],
)
def test_a_transcoder_that_writes_where_the_forward_has_been_is_refused(
    tmp_path: Path, reads: str, writes: str, why: str
) -> None:
    path = KINDS[0].save(tmp_path / "t")
    config = path.with_name("config.yaml")
    text = config.read_text().replace("mlp.hook_in", "R").replace("hook_mlp_out", "W")
    config.write_text(text.replace("R", reads).replace("W", writes))

    with pytest.raises(FeatureFileError, match=why):
        open_sae("t", path, None, steerable((*SITES, Site(1, HookPoint.ATTN_OUT))))


def test_a_transcoder_is_refused_where_no_room_was_made_for_what_features_change(tmp_path: Path) -> None:
    with pytest.raises(FeatureFileError, match=r"made no room when it started; it does with --sae-root"):
        open_sae("t", KINDS[0].save(tmp_path / "t"), None, steerable(max_changes=0))


def test_a_transcoder_has_no_other_site_than_its_own(tmp_path: Path) -> None:
    with pytest.raises(FeatureFileError, match="whose sites the source must tell"):
        open_sae("t", KINDS[0].save(tmp_path / "t"), SITES[0], steerable())


def test_features_count_at_each_site_that_they_read_or_write_and_those_that_are_read_altogether() -> None:
    def facts(layer: int, num_layers: int = 1) -> SaeFacts:
        coder = TinyTranscoder(layer=layer, num_layers=num_layers)
        return SaeFacts((coder.read_site, *coder.write_sites), 12, "exact", False)

    known = {"across": facts(0, 3), "last": facts(2)}
    reads, adds = {"set": 1.0}, {"add": 1.0}

    def checked(limit: int, *edits: tuple[str, dict[str, Any]]) -> None:
        numbers = count()
        fields = {FIELD: [{"sae": name, "feature": next(numbers), **edit} for name, edit in edits]}
        check_edits(read_features(fields, steerable()).prefill, lambda edit: known[edit.sae], limit)

    checked(2, ("across", adds), ("last", reads))
    with pytest.raises(RequestError, match=r"\[2\]: is one feature too many at 2.mlp_out: 2 of one phase"):
        checked(2, ("across", adds), ("across", reads), ("last", adds))
    known["last"] = facts(3)
    with pytest.raises(RequestError, match=r"\[1\]: is one transcoder's feature too many: 1 can be changed in one pha"):
        checked(1, ("across", reads), ("last", reads))
    clamps = {"mlp_out": {"3": [{"feature_idx": 1, "kind": "absolute", "value": 2}]}}
    fields = {"sae_clamp_specs": [{"module_name": "last", "clamps": clamps}]}
    edits = read_features(fields, steerable()).prefill
    with pytest.raises(RequestError, match=r"SAE 'last' reads at 3.mlp_in, not at 3.mlp_out"):
        check_edits(edits, lambda edit: known[edit.sae], 4)


def test_the_description_tells_both_kinds_of_sites(tmp_path: Path) -> None:
    saes = registry(tmp_path, t=KINDS[2], sae=TinySae(width=WIDTH))
    sae, transcoder = saes.all()

    assert transcoder.described()["site"] == "1.mlp_in"
    assert transcoder.described()["write_sites"] == ["1.mlp_out", "2.mlp_out", "3.mlp_out"]
    assert sae.described()["write_sites"] == [sae.described()["site"]]
    for each in (sae, transcoder):
        assert SaeFacts.from_plain(each.described()) == each.facts


def test_a_top_k_transcoder_without_a_threshold_serves_what_needs_no_activation(tmp_path: Path) -> None:
    path = KINDS[2].save(tmp_path / "t")
    chosen = replace(read_source(path, Hints()), kind=CoderKind.TOPK, k=3, threshold=None)
    write_coder(tmp_path / "t.safetensors", chosen, name="t", path=str(path))
    saes = SaeRegistry("float32", 16)
    saes.put(open_sae("t", tmp_path / "t.safetensors", None, steerable()))

    check(lowered(saes, t=[{"feature": 3, "add": 2.0}]), (KINDS[2], [{"feature": 3, "add": 2.0}]))
    for edit in ({"set": 1.0}, {"add": 1.0, "only_if_active": True}):
        with pytest.raises(RequestError, match=r"steering_features\[0\].sae: .*top-k.* has no threshold"):
            lowered(saes, t=[{"feature": 3, **edit}])
