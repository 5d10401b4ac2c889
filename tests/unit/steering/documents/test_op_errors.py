"""A mistake in operations is one error that names its field."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import MAX_LISTED
from headgate.steering.documents.operations import read_ops
from headgate.steering.documents.request import open_reader
from headgate.steering.programs.codes import MAX_GROUPS
from tests.fakes.op_fields import (
    CLAMPS,
    DECODE,
    OPS,
    PREFILL,
    SITES,
    V,
    W,
    clamp,
    clamps,
    op,
    packed_clamps,
    read,
)
from tests.fakes.vector_forms import HIDDEN, model

NAN = float("nan")

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({OPS: []}, OPS, "non-empty list"),
    ({OPS: op()[OPS][0]}, OPS, "non-empty list"),
    ({OPS: "ablate"}, OPS, "non-empty list"),
    ({OPS: [V]}, f"{OPS}[0]", "expected an operation"),
    ({OPS: [*op()[OPS], {str(i): 1 for i in range(1000)}]}, f"{OPS}[1]", "expected an operation"),
    ({OPS: op()[OPS] * 41}, OPS, "has 41 operations, at most 40"),
    ({OPS: op()[OPS] * 9}, f"{OPS}[8]", "too many at 0.post_mlp: 8"),
    ({OPS: op()[OPS] * 5, PREFILL: op()[OPS] * 4}, f"{PREFILL}[3]", "--max-steering-ops-per-site"),
    (
        {OPS: op()[OPS] * 5, CLAMPS: clamps({"vector": V, "min": 1})[CLAMPS], DECODE: op()[OPS] * 3},
        f"{DECODE}[2]",
        "too",
    ),
    (op(at=None), f"{OPS}[0].at", "is missing"),
    (op(at="3.post_mlp"), f"{OPS}[0].at", "--steering-op-sites"),
    (op(at="3.post_mlp"), f"{OPS}[0].at", "'0.post_mlp'"),
    (op(at="0.attn_out"), f"{OPS}[0].at", "0.attn_out takes no operations"),
    (op(at="post_mlp"), f"{OPS}[0].at", "not a site"),
    (op(at="1" * 5000 + ".post_mlp"), f"{OPS}[0].at", "not a site"),
    (op(at=12), f"{OPS}[0].at", "expected a site"),
    (op(at=[]), f"{OPS}[0].at", "non-empty"),
    (op(at=["0.post_mlp", "x"]), f"{OPS}[0].at[1]", "not a site"),
    (op(at={"hook": "mid", "layers": [0]}), f"{OPS}[0].at.hook", "unknown hook point"),
    (op(at={"hook": "post_mlp"}), f"{OPS}[0].at.layers", "expected"),
    (op(at={"hook": "post_mlp", "layers": [7]}), f"{OPS}[0].at.layers", "from -4 to 3"),
    (op(at={"hook": "post_mlp", "layers": "all"}), f"{OPS}[0].at", "3.post_mlp takes no operations"),
    (op(at={"hook": "post_mlp", "layer": [1]}), f"{OPS}[0].at", "expected a site"),
    (op(at={"hook": "post_mlp", "layers": {"ranges": [[2, 1]]}}), f"{OPS}[0].at.layers.ranges[0]", "not below"),
    (op(method=None), f"{OPS}[0].method", "expected one of additive"),
    (op(method="erase"), f"{OPS}[0].method", "'erase'"),
    (op(method=["ablate"]), f"{OPS}[0].method", "expected one of"),
    (op(factor=1), f"{OPS}[0].factor", "unknown key; ablate has at, method"),
    (op(min=1.0), f"{OPS}[0].min", "unknown key"),
    (op(only_if_positive=True), f"{OPS}[0].only_if_positive", "unknown key"),
    (op(scale=1.0, strength=1.0), f"{OPS}[0].strength", "another name of scale"),
    (op(scale=NAN), f"{OPS}[0].scale", "finite number"),
    (op(scale="1"), f"{OPS}[0].scale", "finite number"),
    (op(scale=10**400), f"{OPS}[0].scale", "finite number"),
    (op(scale=True), f"{OPS}[0].scale", "finite number"),
    (op(preserve_norm=1), f"{OPS}[0].preserve_norm", "true or false"),
    (op(positions=[]), f"{OPS}[0].positions", "unknown selector"),
    (op(positions="first"), f"{OPS}[0].positions", "unknown selector"),
    (op(vector=None), f"{OPS}[0].vector", "is missing"),
    (op(vector=V[1:]), f"{OPS}[0].vector", "expected 6 numbers"),
    (op(vector=[*V[1:], NAN]), f"{OPS}[0].vector", "value 5 is not finite"),
    (op(vector=[0.0] * HIDDEN), f"{OPS}[0].vector", "has no direction"),
    (op(vector=5), f"{OPS}[0].vector", "a list of 6 numbers"),
    (op(vector={"data": b""}), f"{OPS}[0].vector", "packed with the keys"),
    (op(vector={"dtype": "int8", "shape": [HIDDEN], "data": b""}), f"{OPS}[0].vector.dtype", "float32"),
    (op(vector={"dtype": "float32", "shape": [1, HIDDEN], "data": b""}), f"{OPS}[0].vector.shape", "[6]"),
    (op(vector={"dtype": "float32", "shape": [HIDDEN], "data": b"1"}), f"{OPS}[0].vector.data", "24 bytes"),
    (op(vector=""), f"{OPS}[0].vector", "module's name"),
    (op(vector={"module": 3}), f"{OPS}[0].vector.module", "module's name"),
    (op(vector={"module": "a", "site": "b"}), f"{OPS}[0].vector.site", "not a site"),
    (op(vector={"module": "a", "scale": 2}), f"{OPS}[0].vector", "'module' and 'site'"),
    (op(method="additive", vector=[0.0] * HIDDEN), f"{OPS}[0].vector", "zero"),
    (op(method="additive", vector=[3e38] * HIDDEN, scale=2), f"{OPS}[0].vector", "change a row by up to"),
    (op(method="orthogonal"), f"{OPS}[0].scale", "is missing"),
    (op(method="clamp"), f"{OPS}[0]", "'min', 'max' or both"),
    (clamp(max=0.5), f"{OPS}[0].min", "1.0 is above max, 0.5"),
    (clamp(value=2.0), f"{OPS}[0].value", "excludes min"),
    (clamp(min=float("inf")), f"{OPS}[0].min", "finite number"),
    (clamp(strength=1.5), f"{OPS}[0].scale", "between 0 and 1"),
    (clamp(scale=-0.1), f"{OPS}[0].scale", "between 0 and 1"),
    (op(method="set"), f"{OPS}[0].value", "is missing"),
    (op(method="swap"), f"{OPS}[0].target", "is missing"),
    (op(method="swap", target=[0] * HIDDEN), f"{OPS}[0].target", "no direction"),
    (op(method="swap", target=[3 * value for value in V]), f"{OPS}[0].target", "nothing would change"),
    (op(method="affine"), f"{OPS}[0]", "'reference' or 'alpha'"),
    (op(method="affine", reference=W[1:]), f"{OPS}[0].reference", "expected 6 numbers"),
    (op(method="mean_ablate"), f"{OPS}[0].mean", "is missing"),
    (op(method="norm_scaled_add", max_ratio=0), f"{OPS}[0].max_ratio", "above 0"),
    (op(method="rotate", vector=None, degrees=5), f"{OPS}[0].plane", "is missing"),
    (op(method="rotate", vector=None, plane=[V, W]), f"{OPS}[0].degrees", "is missing"),
    (op(method="rotate", degrees=5, plane=[V, W]), f"{OPS}[0].vector", "unknown key"),
    (op(method="rotate", vector=None, degrees=5, plane=[V]), f"{OPS}[0].plane", "two vectors"),
    (op(method="rotate", vector=None, degrees=5, plane=[V, W[1:]]), f"{OPS}[0].plane[1]", "expected 6"),
    (op(method="rotate", vector=None, degrees=5, plane=[V, [0] * HIDDEN]), f"{OPS}[0].plane[1]", "no direction"),
    (op(method="rotate", vector=None, degrees=5, plane=[V, [-v for v in V]]), f"{OPS}[0].plane", "parallel"),
    (op(method="replace", vector=None), f"{OPS}[0].vector", "is missing"),
    (op(method="ablate", source={"request": "a"}), f"{OPS}[0].source", "unknown key"),
    (op(method="replace", source={"request": "a", "position": 0}), f"{OPS}[0].source", "excludes 'vector'"),
    (op(method="replace", alpha=2), f"{OPS}[0].alpha", "between 0 and 1"),
    (op(method="replace", alpha=1, scale=1), f"{OPS}[0].scale", "another name of alpha"),
    (op(method="replace", mask=[6]), f"{OPS}[0].mask[0]", "from 0 to 5"),
    (op(method="replace", mask=[1, -1]), f"{OPS}[0].mask[1]", "from 0 to 5"),
    (op(method="replace", mask=[True]), f"{OPS}[0].mask[0]", "index"),
    (op(method="replace", mask=[]), f"{OPS}[0].mask", "6 values of 0 and 1"),
    (op(method="replace", mask=[0] * HIDDEN), f"{OPS}[0].mask", "selects no value"),
    (op(method="replace", mask="0"), f"{OPS}[0].mask", "6 values"),
    ({CLAMPS: {}}, CLAMPS, "expected {hook"),
    ({CLAMPS: {"mid": {}}}, f"{CLAMPS}.mid", "unknown hook point"),
    ({CLAMPS: {"x" * 1000: {}}}, CLAMPS, "unknown hook point"),
    ({CLAMPS: {"post_mlp": []}}, f"{CLAMPS}.post_mlp", "expected {hook"),
    ({CLAMPS: {"post_mlp": {0: {"vector": V, "min": 1}}}}, f"{CLAMPS}.post_mlp.0", "list of clamps"),
    ({CLAMPS: {"post_mlp": {9: [{"vector": V, "min": 1}]}}}, f"{CLAMPS}.post_mlp.9", "from -4 to 3"),
    ({CLAMPS: {"post_mlp": {"all": [{"vector": V, "min": 1}]}}}, f"{CLAMPS}.post_mlp.all", "not an integer"),
    ({CLAMPS: {"post_mlp": {True: [{"vector": V, "min": 1}]}}}, f"{CLAMPS}.post_mlp.True", "not an integer"),
    ({CLAMPS: {"final_norm": {0: [{"vector": V, "min": 1}]}}}, f"{CLAMPS}.final_norm.0", "no layers"),
    ({CLAMPS: {"post_mlp": {3: [{"vector": V, "min": 1}]}}}, f"{CLAMPS}.post_mlp.3", "--steering-op-sites"),
    ({CLAMPS: {"post_mlp": {0: [{"vector": V, "min": 1}] * 9}}}, f"{CLAMPS}.post_mlp.0[8]", "one operation too many"),
    ({CLAMPS: {"post_mlp": {0: [{"vector": V, "min": 1}] * 99}}}, f"{CLAMPS}.post_mlp.0", "has 99 operations"),
    (clamps({"vector": V, "tau": 1}), f"{CLAMPS}.post_mlp.0[0]", "the keys"),
    (clamps({"vector": V, "scale": 1}), f"{CLAMPS}.post_mlp.0[0]", "the keys"),
    (clamps({"vector": V}), f"{CLAMPS}.post_mlp.0[0]", "'min', 'max' or both"),
    (clamps({"vector": V[1:], "min": 1}), f"{CLAMPS}.post_mlp.0[0].vector", "expected 6"),
    (clamps({"vector": V, "min": 1, "strength": 2}), f"{CLAMPS}.post_mlp.0[0].scale", "between 0 and 1"),
    (packed_clamps(bounds=None), f"{CLAMPS}.post_mlp", "lacks ['bounds']"),
    (packed_clamps(scales=[1, 1]), f"{CLAMPS}.post_mlp", "unknown keys ['scales']"),
    (packed_clamps(bounds=[[1, 2]]), f"{CLAMPS}.post_mlp.bounds", "a list of 2"),
    (packed_clamps(bounds=[[1, 2], [3]]), f"{CLAMPS}.post_mlp.bounds[1]", "a list of 2"),
    (packed_clamps(bounds=[[1, 2], [None, None]]), f"{CLAMPS}.post_mlp[1]", "'min', 'max' or both"),
    (packed_clamps(bounds=[[1, 2], [3, 2]]), f"{CLAMPS}.post_mlp[1].min", "above max"),
    (packed_clamps(strengths=[1]), f"{CLAMPS}.post_mlp.strengths", "a list of 2"),
    (packed_clamps(layer_indices=[0, 3]), f"{CLAMPS}.post_mlp.layer_indices[1]", "takes no operations"),
    (packed_clamps(layer_indices=[0] * 1000), f"{CLAMPS}.post_mlp.layer_indices", "has 1000 operations"),
    (packed_clamps(shape=[2, 7]), f"{CLAMPS}.post_mlp.shape", "[2, 6]"),
    (packed_clamps(data=b"1"), f"{CLAMPS}.post_mlp.data", "48 bytes"),
    (packed_clamps(dtype="int8"), f"{CLAMPS}.post_mlp.dtype", "float32"),
    (packed_clamps(data=np.zeros((2, HIDDEN), np.float32).tobytes()), f"{CLAMPS}.post_mlp[0].vector", "no direction"),
]


@pytest.mark.parametrize(("fields", "field", "message"), BAD)
def test_a_mistake_is_one_error_that_names_its_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(fields)

    assert caught.value.field == field
    assert message in str(caught.value)


def test_lists_of_positions_are_bounded_over_all_operations() -> None:
    half = op(positions=list(range(MAX_LISTED // 2 + 1)))[OPS]

    read({OPS: half})
    with pytest.raises(RequestError, match=r"steering_ops\[1\].positions"):
        read({OPS: half * 2})


@pytest.mark.parametrize("has_drafts", [False, True])
def test_with_drafts_front_ends_refuse_some_positions_of_the_answer(has_drafts: bool) -> None:
    served = ModelInfo(name="m", num_layers=3, hidden_size=HIDDEN, dtype="float32", sites=(), has_drafts=has_drafts)
    reader = open_reader({"op_sites": {"post_mlp": "all"}}, served)
    wanted = reader.read(op(at="0.post_mlp", positions=[0, 5]))
    assert wanted is not None

    wanted.check_positions(6)
    with (
        pytest.raises(RequestError, match=r"^steering_ops\[0\].positions: .*from 5 on") if has_drafts else nullcontext()
    ):
        wanted.check_positions(5)


def test_a_program_has_at_most_63_selectors_of_positions() -> None:
    many = [{**op()[OPS][0], "at": SITES[i % 5].name, "positions": [i]} for i in range(MAX_GROUPS + 1)]

    with pytest.raises(RequestError, match=r"steering_ops\[63\].positions: more than 63"):
        read_ops({OPS: many}, model(), SITES, 16)


def test_rows_are_limited_as_vectors_are() -> None:
    fields = {OPS: op()[OPS], DECODE: op(vector=W)[OPS]}

    with pytest.raises(RequestError, match=r"takes 3 rows .* at most 2"):
        read_ops(fields, model(max_vectors=2), SITES, 8)
    assert read_ops(fields, model(max_vectors=3), SITES, 8) is not None


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 40000.0), ("bfloat16", 3e8), ("float32", 3e8)])
def test_a_change_that_the_dtype_of_the_model_cannot_hold_is_refused(dtype: str, largest: float) -> None:
    for document in (
        op(method="additive", vector=[largest] * HIDDEN),
        op(method="replace", vector=[largest] * HIDDEN),
        op(method="set", vector=[1, 0, 0, 0, 0, 0], value=-largest),
    ):
        with pytest.raises(RequestError, match=f"changes for a model in {dtype} must stay below"):
            read(document, dtype=dtype)
