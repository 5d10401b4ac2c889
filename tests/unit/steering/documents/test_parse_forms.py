"""Equal vectors are equal, whatever form they come in; the worker gets exactly the values that were sent."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site, sort_sites
from headgate.steering.documents.request import BASE, DECODE, PREFILL, read_modules, read_steering
from headgate.steering.documents.vectors import read_tier, read_update
from headgate.steering.spec import ModuleRef, SteeringSpec, from_wire, to_wire
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.vector_forms import ALL_SITES, HIDDEN, Rows, bits_of, exact_rows, forms, model, nested

SITE = Site(1, HookPoint.POST_MLP)
ONES = np.ones(HIDDEN, np.float32)


def received(wire: object) -> SteeringSpec:
    return from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(wire)))


@given(case=exact_rows())
def test_every_form_gives_the_same_key_the_same_bytes_and_the_exact_values(case: tuple[Rows, str]) -> None:
    rows, dtype = case
    kept = sort_sites(site for site, row in rows.items() if row.any())

    read = {name: read_tier(form, model(), BASE) for name, form in forms(rows, dtype).items()}

    if not kept:
        assert set(read.values()) == {None}
        return
    expected = np.stack([rows[site] for site in kept])
    first = read["list"]
    assert first is not None
    for name, vectors in read.items():
        assert vectors is not None, name
        assert (vectors.sites, vectors.key, vectors.payload) == (kept, first.key, first.payload), name
        np.testing.assert_array_equal(vectors.float32().view(np.uint32), expected.view(np.uint32), err_msg=name)


@given(base=exact_rows(), prefill=exact_rows(), decode=exact_rows(), is_used=st.tuples(*[st.booleans()] * 3))
def test_tiers_add_up_in_float32_and_the_wire_keeps_every_bit(
    base: tuple[Rows, str], prefill: tuple[Rows, str], decode: tuple[Rows, str], is_used: tuple[bool, bool, bool]
) -> None:
    tiers = [tier if used else {} for (tier, _), used in zip((base, prefill, decode), is_used, strict=True)]
    fields = {name: nested(tier, np.array) for name, tier in zip((BASE, PREFILL, DECODE), tiers, strict=True) if tier}

    spec, _ = read_steering(fields, model())

    expected = [slow_sum(tiers[0], tiers[1]), slow_sum(tiers[0], tiers[2])]
    if spec is None:
        assert expected == [{}, {}]
        return
    arrived = received(to_wire(spec))
    assert arrived == spec
    assert arrived.num_vectors == spec.num_vectors
    for sent, got, values in zip((spec.prefill, spec.decode), (arrived.prefill, arrived.decode), expected, strict=True):
        assert got == sent
        assert as_rows(got) == values
        assert got is None or sent is None or got.payload == sent.payload


def slow_sum(one: Rows, other: Rows) -> dict[Site, list[float]]:
    """Each value by itself, in float64, rounded to float32 once; rows of zeros left out."""
    total = {}
    for site in {*one, *other}:
        values = [
            float(np.float32(float(one[site][i] if site in one else 0) + float(other[site][i] if site in other else 0)))
            for i in range(HIDDEN)
        ]
        if any(values):
            total[site] = values
    return total


def as_rows(vectors: PhaseVectors | None) -> dict[Site, list[float]]:
    return {} if vectors is None else dict(zip(vectors.sites, vectors.float32().tolist(), strict=True))


@given(case=exact_rows(), other=exact_rows())
def test_keys_are_equal_only_for_equal_vectors(case: tuple[Rows, str], other: tuple[Rows, str]) -> None:
    one, two = (PhaseVectors.from_rows(rows) for rows, _ in (case, other))

    is_same = as_rows(one) == as_rows(two)

    assert (getattr(one, "key", None) == getattr(two, "key", None)) is is_same


def test_the_same_values_at_another_site_or_in_another_order_have_another_key() -> None:
    rows = {SITE: ONES, Site(2, HookPoint.POST_MLP): 2 * ONES}
    moved = {Site(1, HookPoint.POST_ATTN): ONES, Site(2, HookPoint.POST_MLP): 2 * ONES}
    swapped = {SITE: 2 * ONES, Site(2, HookPoint.POST_MLP): ONES}

    keys = {vectors.key for case in (rows, moved, swapped) if (vectors := PhaseVectors.from_rows(case))}

    assert len(keys) == 3


def test_scales_are_multiplied_in_before_the_tiers_are_added() -> None:
    fields = {
        BASE: {"post_mlp": {1: {"vector": ONES, "scale": 2.0}}},
        PREFILL: {
            "post_block": {"dtype": "bfloat16", "shape": [1, HIDDEN], "layer_indices": [-3], "scales": [-0.5],
                           "data": bits_of(ONES).tobytes()}
        },
    }  # fmt: skip

    spec, _ = read_steering(fields, model())

    assert spec is not None
    assert as_rows(spec.prefill) == {SITE: [1.5] * HIDDEN}
    assert as_rows(spec.decode) == {SITE: [2.0] * HIDDEN}
    assert spec.num_vectors == 2
    arrived = received(to_wire(spec))
    assert [phase and phase.peak for phase in (arrived.prefill, arrived.decode)] == [1.5, 2.0]


def test_a_base_alone_travels_once_and_is_one_object_for_both_phases() -> None:
    spec, _ = read_steering({BASE: {"post_mlp": {1: ONES}}}, model())

    assert spec is not None
    assert spec.prefill is spec.decode
    wire = to_wire(spec)
    assert set(wire) == {"prefill", "is_shared"}
    arrived = received(wire)
    assert arrived.prefill is not None
    assert arrived.decode is not None
    assert arrived.prefill.key == arrived.decode.key
    assert arrived.num_vectors == 1


def test_decode_alone_has_no_prefill() -> None:
    spec, _ = read_steering({DECODE: {"post_mlp": {1: ONES}}}, model())

    assert spec is not None
    wire = to_wire(spec)
    arrived = received(wire)
    assert ("prefill" in wire, arrived.prefill) == (False, None)
    assert as_rows(arrived.decode) == {SITE: [1.0] * HIDDEN}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {BASE: None},
        {BASE: {"post_mlp": {0: {"vector": ONES, "scale": 0}}}},
        {BASE: {"post_mlp": {0: {"vector": 0 * ONES, "scale": 0}}}},
        {BASE: {"post_mlp": {0: ONES}}, PREFILL: {"post_mlp": {0: -ONES}}, DECODE: {"post_mlp": {0: -ONES}}},
    ],
    ids=["nothing", "null", "scale zero", "zeros times zero", "cancelled"],
)
def test_nothing_but_zeros_is_no_steering_at_all(fields: dict[str, object]) -> None:
    assert read_steering(fields, model()) == (None, None)


def test_packed_rows_of_zeros_stand_for_layers_that_are_left_alone() -> None:
    rows = np.stack([0 * ONES, ONES, -0.0 * ONES])
    block = {"dtype": "float32", "shape": [3, HIDDEN], "layer_indices": [0, 1, 2], "data": rows.tobytes()}

    spec, _ = read_steering({BASE: {"post-mlp": block}}, model())

    assert spec is not None
    assert as_rows(spec.prefill) == {SITE: [1.0] * HIDDEN}


def test_zeros_take_a_site_of_the_global_vectors_back() -> None:
    layers = {0: 0 * ONES, 1: ONES, 2: {"vector": ONES, "scale": 0}}

    update = read_update({"post_mlp": layers}, model(), "vectors")

    assert update is not None
    assert as_rows(update.vectors) == {SITE: [1.0] * HIDDEN}
    assert update.cleared == (Site(0, HookPoint.POST_MLP), Site(2, HookPoint.POST_MLP))


@pytest.mark.parametrize(
    ("name", "ref", "expected"),
    [
        ("calm", None, [("calm", 1.0)]),
        (["calm", "dry"], None, [("calm", 1.0), ("dry", 1.0)]),
        (None, ("calm", 2), [("calm", 2.0)]),
        (None, ["calm", -0.5], [("calm", -0.5)]),
        (None, [("calm", 2.0), ["dry", 0.5]], [("calm", 2.0), ("dry", 0.5)]),
        (None, ["calm", ["dry", 3]], [("calm", 1.0), ("dry", 3.0)]),
        (None, ["calm", "dry"], [("calm", 1.0), ("dry", 1.0)]),
        (None, {"name": "calm", "scale": 0}, [("calm", 0.0)]),
        (None, [{"name": "calm"}], [("calm", 1.0)]),
        ("calm", ("dry", 2.0), [("calm", 1.0), ("dry", 2.0)]),
    ],
)
def test_modules_are_named_in_several_ways(name: object, ref: object, expected: list[tuple[str, float]]) -> None:
    refs = read_modules(name, ref)

    assert refs == tuple(ModuleRef(*item) for item in expected)
    spec, _ = read_steering({"steering_name": name, "steering_module_ref": ref}, model())
    assert spec is not None
    assert received(to_wire(spec)).modules == refs


def test_vectors_that_were_read_can_be_given_again() -> None:
    vectors = PhaseVectors.from_rows({site: ONES * (rank + 1) for rank, site in enumerate(ALL_SITES)})

    again = read_tier(vectors, model(), BASE)

    assert again == vectors
    assert FINAL_NORM_SITE in (vectors.sites if vectors else ())


def test_the_caller_may_change_its_array_afterwards() -> None:
    array = ONES.copy()
    vectors = read_tier({"post_mlp": {1: array}}, model(), BASE)

    array[:] = 7

    assert as_rows(vectors) == {SITE: [1.0] * HIDDEN}


def test_reading_needs_no_torch() -> None:
    modules = ("config", "documents.request", "vectors.phase_vectors", "files.vector_files", "vectors.directions")
    program = "".join(f"import headgate.steering.{name}\n" for name in modules)
    program += "import sys; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr or "torch or vllm was imported"
