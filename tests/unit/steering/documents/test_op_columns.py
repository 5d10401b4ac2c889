"""Operations and vectors at sites of other widths than the stream, and on some columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Columns, HookPoint, Site, SiteShape, parse_columns
from headgate.steering import ops
from headgate.steering.core.gates import GateContent
from headgate.steering.core.probes import ProbeRegistry
from headgate.steering.core.saes import SaeRegistry
from headgate.steering.documents.gates import ConditionReader, read_predecessor
from headgate.steering.documents.operations import KeptRows, VectorReader, read_ops
from headgate.steering.documents.request import MODULE_FIELDS, read_tier
from headgate.steering.gates.gate import InlineProbe
from headgate.steering.gates.lowering import read_score
from headgate.steering.programs.lowering import StoredVectors, lower
from headgate.steering.programs.operations import Operation
from headgate.steering.programs.program import Program, joined
from headgate.steering.programs.wire import content_from_wire, content_to_wire
from headgate.steering.vectors.phase_vectors import Steerable
from tests.fakes.programs import apply, run

HEADS, ROUTER, STREAM = Site(1, HookPoint.HOOK_Z), Site(1, HookPoint.ROUTER_LOGITS), Site(1, HookPoint.POST_MLP)
SITES = (HEADS, ROUTER, STREAM)
SHAPES = {HEADS: SiteShape(8, "float32", head_size=2), ROUTER: SiteShape(3, "float32")}
MODEL = Steerable(
    num_layers=2,
    hidden_size=4,
    dtype="float32",
    sites=SITES,
    max_vectors=100,
    op_sites=SITES,
    max_ops_per_site=8,
    max_gates=8,
    shapes=SHAPES,
)
SPLIT = replace(MODEL, shapes={HEADS: SHAPES[HEADS]._replace(shard="columns"), ROUTER: SHAPES[ROUTER]})
"""The same model, whose heads lie on several ranks."""
GATHERED = replace(SPLIT, gathered=frozenset({HEADS}))
ROW = np.array([3.0, 1.0, -2.0, 0.5, 4.0, -1.0, 2.0, 0.25])


def program(*operations: dict[str, Any], model: Steerable = MODEL) -> Program:
    found = read_ops({"steering_ops": list(operations)}, model, model.op_sites, model.max_ops_per_site)
    assert found is not None
    assert isinstance(found.prefill, Program)
    return found.prefill


def refused(operation: dict[str, Any], model: Steerable = MODEL) -> str:
    with pytest.raises(RequestError) as caught:
        program(operation, model=model)
    return str(caught.value)


@pytest.mark.parametrize("model", [MODEL, SPLIT], ids=["alone", "split"])
def test_heads_are_replaced_by_zeros_or_a_mean(model: Steerable) -> None:
    zeroed = run(program(ops.ablate_heads("1.hook_z", [0, 3]), model=model), HEADS, ROW)
    meant = run(program(ops.ablate_heads("1.hook_z", [1], mean=[7.0, 8.0], alpha=0.5), model=model), HEADS, ROW)

    np.testing.assert_array_equal(zeroed, [0, 0, -2, 0.5, 4, -1, 0, 0])
    np.testing.assert_array_equal(meant, [3, 1, 2.5, 4.25, 4, -1, 2, 0.25])


def test_a_vector_may_be_as_long_as_its_heads_or_as_a_row() -> None:
    short, long = [1.0, -2.0], [9.0, 9.0, 9.0, 9.0, 1.0, -2.0, 9.0, 9.0]
    expected = apply({"method": "ablate", "vector": [0, 0, 0, 0, 1, -2, 0, 0], "scale": 1.0}, ROW)

    for vector in (short, long):
        made = program(ops.within(ops.ablate(vector, "1.hook_z"), heads=[2]))
        np.testing.assert_allclose(run(made, HEADS, ROW), expected, rtol=1e-6)
    cut = program(ops.within(ops.ablate(short, "1.hook_z"), columns=[4, 6]))
    assert cut == program(ops.within(ops.ablate(short, "1.hook_z"), heads=[2]))


class Kept:
    """A request that kept some columns of the row `ROW`."""

    prompt_token_ids = np.arange(8)

    def __init__(self, *columns: tuple[int, int]) -> None:
        self.columns: Mapping[Site, Columns] = {HEADS: columns} if columns else {}

    def find(self, name: str, sample: int, field: str) -> Kept:
        return self

    def row(self, site: Site, position: int, field: str) -> Tensor:
        held = self.columns.get(site, ((0, 8),))
        return torch.from_numpy(np.concatenate([ROW[start:stop] for start, stop in held]))


def patched(kept: Kept, heads: list[int] | None) -> list[float]:
    operation = {"at": "1.hook_z", "method": "replace", "source": {"request": "clean", "position": 1}, "heads": heads}
    found = read_ops({"steering_ops": [operation]}, MODEL, SITES, 8, find=kept.find)
    assert found is not None
    assert isinstance(found.prefill, Program)
    patch: list[float] = run(found.prefill, HEADS, np.zeros(8)).tolist()
    return patch


@pytest.mark.parametrize("kept", [Kept(), Kept((4, 6)), Kept((0, 2), (4, 6)), Kept((3, 7))], ids=["all", "1", "2", "3"])
def test_a_kept_row_gives_each_head_its_own_columns(kept: Kept) -> None:
    assert patched(kept, [2]) == [0, 0, 0, 0, 4, -1, 0, 0]


@pytest.mark.parametrize("heads", [[1], [0, 2], None], ids=str)
def test_columns_that_were_not_kept_are_refused(heads: list[int] | None) -> None:
    with pytest.raises(RequestError, match=r"steering_ops\[0\].source: of the row the columns \[\[4, 6\]\] were kept"):
        patched(Kept((4, 6)), heads)


def test_experts_are_banned_and_forced() -> None:
    found = program(ops.ban_experts("1.router_logits", [0]), ops.force_experts("1.router_logits", [2]))

    np.testing.assert_array_equal(run(found, ROUTER, np.array([5.0, 1.0, -3.0])), [-10000, 1, 10000])


def test_programs_of_sites_of_several_widths_are_one() -> None:
    wide, narrow = ops.ablate(list(ROW), "1.hook_z"), ops.clamp([1.0, 2.0, 0.0, 1.0], "1.post_mlp", max=0.5)
    both, rows = program(wide, narrow), {HEADS: ROW, STREAM: ROW[:4]}

    for made in (both, joined([program(wide), program(narrow)]), Program.from_wire(both.to_wire())):
        for site, operation in ((HEADS, wide), (STREAM, narrow)):
            alone = run(program(operation), site, rows[site])
            np.testing.assert_array_equal(run(made, site, rows[site]), alone)


def test_modules_vectors_are_cut_to_the_columns_and_must_fit_the_site() -> None:
    document = ops.within(ops.additive({"module": "m", "site": "1.hook_z"}, "1.hook_z"), heads=[1])
    found = read_ops({"steering_ops": [document]}, MODEL, SITES, 8)
    assert found is not None
    assert isinstance(found.prefill, tuple)
    travelled = content_from_wire(tuple[Operation, ...], content_to_wire(found.prefill))
    made = lower(travelled, "float32", lambda module, site: np.arange(1, 9, dtype=np.float32))
    assert made is not None
    np.testing.assert_array_equal(run(made, HEADS, ROW) - ROW, [0, 0, 3, 4, 0, 0, 0, 0])

    with pytest.raises(RequestError, match=r"'m' at 1.hook_z has 4 values, rows of 1.hook_z have 8"):
        lower(travelled, "float32", lambda module, site: np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (ops.ablate([1.0] * 4, "1.hook_z"), "steering_ops[0].vector: expected 8 numbers"),
        (ops.ablate([1.0] * 4, ["1.hook_z", "1.post_mlp"]), "steering_ops[0].at: rows of 1.hook_z have 8 values"),
        (ops.ablate_heads("1.hook_z", [4]), "steering_ops[0].heads: expected ascending numbers from 0 to 3"),
        (ops.ablate_heads("1.hook_z", [1, 0]), "steering_ops[0].heads: expected ascending"),
        (ops.ablate_heads("1.hook_z", [True]), "steering_ops[0].heads: expected ascending"),
        (ops.ablate_heads("1.post_mlp", [0]), "steering_ops[0].heads: rows of 1.post_mlp are not made of heads"),
        (ops.ban_experts("1.hook_z", [0]), "steering_ops[0].experts: rows of 1.hook_z are not made of experts"),
        (
            ops.within(ops.ablate([1.0], "1.hook_z"), columns=[7, 9]),
            "steering_ops[0].columns: rows of 1.hook_z have the columns 0 to 7",
        ),
        (
            ops.within(ops.ablate([1.0], "1.hook_z"), columns=[7, 8], heads=[3]),
            "steering_ops[0].columns: excludes 'heads'",
        ),
        (
            ops.within(ops.replace([1.0] * 8, "1.hook_z", mask=[0]), heads=[3]),
            "steering_ops[0].mask: excludes heads",
        ),
        ({"at": "1.hook_z", "method": "replace", "value": 0, "vector": [1.0] * 8}, "excludes 'value'"),
    ],
    ids=str,
)
def test_columns_that_are_not_there_are_refused(operation: dict[str, Any], why: str) -> None:
    assert why in refused(operation)


def test_on_several_ranks_a_direction_lies_within_one_head() -> None:
    within = ops.within(ops.clamp([1.0, 2.0], "1.hook_z", max=0.5), heads=[3])

    assert program(within, model=SPLIT) == program(within)
    assert program(ops.additive(list(ROW), "1.hook_z"), model=SPLIT) == program(ops.additive(list(ROW), "1.hook_z"))
    wide = "clamp projects rows on a direction, but 1.hook_z has its columns on several tensor-parallel ranks"
    assert wide in refused(ops.clamp(list(ROW), "1.hook_z", max=0.5), SPLIT)
    assert "steering_ops[0].preserve_norm" in refused({**within, "preserve_norm": True}, SPLIT)
    assert "steering_ops[0].method" in refused(ops.norm_scaled_add(list(ROW), "1.hook_z"), SPLIT)
    assert program(within, model=GATHERED) == program(within)
    for operation in (ops.clamp(list(ROW), "1.hook_z", max=0.5), ops.norm_scaled_add(list(ROW), "1.hook_z")):
        assert program(operation, model=GATHERED) == program(operation)
    assert "swap projects" in refused(ops.swap([1.0] + [0.0] * 7, [0.0] * 7 + [1.0], "1.hook_z"), SPLIT)


def test_gates_read_rows_of_any_width_but_of_whole_rows_alone() -> None:
    condition = {"cosine": list(ROW), "at": "1.hook_z", "above": 0.5}

    leaf = ConditionReader(MODEL, VectorReader(KeptRows())).read(condition, "when")

    np.testing.assert_array_equal(leaf.reading.weight, ROW.astype(np.float32))  # type: ignore[union-attr]
    with pytest.raises(RequestError, match=r"when.at: 1.hook_z has its columns on several tensor-parallel ranks"):
        ConditionReader(SPLIT, VectorReader(KeptRows())).read(condition, "when")
    again = ConditionReader(GATHERED, VectorReader(KeptRows())).read(condition, "when")
    np.testing.assert_array_equal(again.reading.weight, ROW.astype(np.float32))  # type: ignore[union-attr]


def test_gates_of_the_field_steering_read_whole_rows_alone() -> None:
    packed = {"dtype": "float32", "shape": [1, 8], "layer_indices": [1], "data": ROW.astype(np.float32).tobytes()}
    when = {"kind": "probe", "probe": {"kind": "inline", "packed": {"hook_z": packed}}, "threshold": 0.5}
    gate = {"when": when, "scope": "this_token", "apply": {"kind": "attenuate", "strength": 0.25}}

    with pytest.raises(RequestError, match=r"packed: 1.hook_z has its columns on several tensor-parallel ranks"):
        read_predecessor([gate], SPLIT)
    (found,) = read_predecessor([gate], GATHERED)

    np.testing.assert_array_equal(found.leaves[0].reading.weight, ROW.astype(np.float32))  # type: ignore[union-attr]


def test_the_engine_core_reads_whole_rows_alone_whoever_asks() -> None:
    weight = ROW.astype(np.float32)
    reading, stored = InlineProbe(site=HEADS, weight=weight, where="when.at"), StoredVectors([weight], "float32")

    with pytest.raises(RequestError, match=r"when.at: 1.hook_z has its columns on several tensor-parallel ranks"):
        read_score(reading, content_of(SPLIT), stored)
    assert read_score(reading, content_of(GATHERED), stored).site == HEADS


def content_of(model: Steerable) -> GateContent:
    """What names stand for in an engine core that has none."""
    return GateContent(model, ProbeRegistry(), SaeRegistry("float32", 16), {})


def test_a_steering_vector_may_be_of_some_heads_alone() -> None:
    document = {"hook_z": {"1": {"vector": [5.0, 6.0], "scale": 2.0, "heads": [1]}}}

    tier = read_tier(document, MODEL, MODULE_FIELDS[0])

    assert tier is not None
    np.testing.assert_array_equal(tier.float32()[0], [0, 0, 10, 12, 0, 0, 0, 0])
    with pytest.raises(RequestError, match=r"\.1: expected 8 numbers, the hidden size; got 3"):
        read_tier({"hook_z": {"1": {"vector": [5.0, 6.0, 1.0], "heads": [1]}}}, MODEL, MODULE_FIELDS[0])


def test_heads_ascend_and_columns_are_a_range() -> None:
    shape = SHAPES[HEADS]

    assert parse_columns({"heads": [0, 2]}, HEADS, shape, "f") == ((0, 2), (4, 6))
    assert parse_columns({"heads": 3}, HEADS, shape, "f") == ((6, 8),)
    assert parse_columns({"columns": [1, 5]}, HEADS, shape, "f") == ((1, 5),)
    assert parse_columns({"layers": [1]}, HEADS, shape, "f") == ()
