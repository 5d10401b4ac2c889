"""Bad input is one clear error that names the field."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.documents.request import BASE, DECODE, NAME, PREFILL, read_module, read_steering
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.vector_forms import HIDDEN, model

ONES = [1.0] * HIDDEN
DATA = np.ones((1, HIDDEN), np.float32).tobytes()
REF = "steering_module_ref"


def base(vectors: object, hook: str = "post_mlp") -> dict[str, Any]:
    return {BASE: {hook: vectors}}


def one(vector: object) -> dict[str, Any]:
    return base({1: vector})


def pack(**changes: object) -> dict[str, Any]:
    """A correct packed hook, with `changes`; what is changed to None is left out."""
    given = {"dtype": "float32", "shape": [1, HIDDEN], "layer_indices": [1], "data": DATA, **changes}
    return base({key: value for key, value in given.items() if value is not None})


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({BASE: {}}, BASE, "non-empty object"),
    ({BASE: [ONES]}, BASE, "non-empty object"),
    ({BASE: "post_mlp"}, BASE, "non-empty object"),
    (base(ONES, "mid_mlp"), f"{BASE}.mid_mlp", "unknown hook point"),
    ({BASE: {3: ONES}}, f"{BASE}.3", "unknown hook point"),
    (base(ONES, "x" * 100_000), BASE, "unknown hook point"),
    (base({}), f"{BASE}.post_mlp", "expected {layer: vector}"),
    (base(ONES), f"{BASE}.post_mlp", "expected {layer: vector}"),
    (base(None), f"{BASE}.post_mlp", "expected {layer: vector}"),
    (base({4: ONES}), f"{BASE}.post_mlp", "from -4 to 3"),
    (base({-5: ONES}), f"{BASE}.post_mlp", "from -4 to 3"),
    (base({"9" * 40: ONES}), f"{BASE}.post_mlp", "not an integer"),
    (base({"first": ONES}), f"{BASE}.post_mlp", "not an integer"),
    (base({"all": ONES}), f"{BASE}.post_mlp", "not an integer"),
    (base({True: ONES}), f"{BASE}.post_mlp", "not an integer"),
    (base({1.0: ONES}), f"{BASE}.post_mlp", "not an integer"),
    (base({1: ONES}, "attn_out"), f"{BASE}.attn_out.1", "cannot be steered"),
    (base({0: ONES}, "final_norm"), f"{BASE}.final_norm", "no layers"),
    (one(ONES[1:]), f"{BASE}.post_mlp.1", f"expected {HIDDEN} numbers"),
    (one([0.5] * 1_000_000), f"{BASE}.post_mlp.1", "got 1000000"),
    (one([]), f"{BASE}.post_mlp.1", "got 0"),
    (one([*ONES[1:], "1"]), f"{BASE}.post_mlp.1", "value 5 is not a number"),
    (one([*ONES[1:], None]), f"{BASE}.post_mlp.1", "value 5 is not a number"),
    (one([*ONES[1:], True]), f"{BASE}.post_mlp.1", "value 5 is not a number"),
    (one([ONES, *ONES[1:]]), f"{BASE}.post_mlp.1", "value 0 is not a number"),
    (one([*ONES[1:], float("nan")]), f"{BASE}.post_mlp.1", "value 5 is not finite"),
    (one([float("-inf"), *ONES[1:]]), f"{BASE}.post_mlp.1", "value 0 is not finite"),
    (one([1e39, *ONES[1:]]), f"{BASE}.post_mlp.1", "not finite in float32"),
    (one([10**400, *ONES[1:]]), f"{BASE}.post_mlp.1", "does not fit float32"),
    (one("AAAA"), f"{BASE}.post_mlp.1", "a list of 6 numbers"),
    (one(None), f"{BASE}.post_mlp.1", "a list of 6 numbers"),
    (one(np.ones((1, HIDDEN))), f"{BASE}.post_mlp.1", "shape [1, 6]"),
    (one(np.ones(HIDDEN, np.int64)), f"{BASE}.post_mlp.1", "array of int64"),
    (one(np.array([*ONES[1:], None])), f"{BASE}.post_mlp.1", "array of object"),
    (one(np.ma.masked_equal(ONES, 1.0)), f"{BASE}.post_mlp.1", "masked"),  # type: ignore[no-untyped-call]
    (one(np.full(HIDDEN, np.nan, np.float16)), f"{BASE}.post_mlp.1", "value 0 is not finite"),
    (one(torch.ones(HIDDEN, dtype=torch.int32)), f"{BASE}.post_mlp.1", "tensor of int32"),
    (one(torch.ones(2, HIDDEN)), f"{BASE}.post_mlp.1", "shape [2, 6]"),
    (one(torch.ones(HIDDEN, device="meta")), f"{BASE}.post_mlp.1", "dense tensor with data"),
    (one(torch.full((HIDDEN,), torch.inf, dtype=torch.bfloat16)), f"{BASE}.post_mlp.1", "value 0 is not finite"),
    (one({"scale": 2.0}), f"{BASE}.post_mlp.1", "the keys 'vector' and 'scale'"),
    (one({"vector": ONES, "strength": 1}), f"{BASE}.post_mlp.1", "the keys 'vector' and 'scale'"),
    (one({"vector": ONES, "scale": "2"}), f"{BASE}.post_mlp.1.scale", "finite number"),
    (one({"vector": ONES, "scale": None}), f"{BASE}.post_mlp.1.scale", "finite number"),
    (one({"vector": ONES, "scale": True}), f"{BASE}.post_mlp.1.scale", "finite number"),
    (one({"vector": ONES, "scale": float("nan")}), f"{BASE}.post_mlp.1.scale", "finite number"),
    (one({"vector": ONES, "scale": 1e39}), f"{BASE}.post_mlp.1.scale", "finite number"),
    (one({"vector": [1e30] * HIDDEN, "scale": 1e30}), f"{BASE}.post_mlp.1", "once multiplied by its scale"),
    (one({"vector": [float("inf")] * HIDDEN, "scale": 0}), f"{BASE}.post_mlp.1", "not finite"),
    (one([0.0] * HIDDEN), f"{BASE}.post_mlp.1", "is zero in float32"),
    (one([-0.0] * HIDDEN), f"{BASE}.post_mlp.1", "is zero in float32"),
    (one(np.full(HIDDEN, 1e-60)), f"{BASE}.post_mlp.1", "is zero in float32"),
    (one({"vector": [1e-30] * HIDDEN, "scale": 1e-30}), f"{BASE}.post_mlp.1", "is zero in float32"),
    ({BASE: {"post_mlp": {0: ONES, 1: [0.0] * HIDDEN}}}, f"{BASE}.post_mlp.1", "is zero in float32"),
    (pack(data=bytes(len(DATA))), f"{BASE}.post_mlp.1", "is zero in float32"),
    ({BASE: {"post_mlp": {1: ONES}, "post_block": {1: ONES}}}, f"{BASE}.post_block.1", "given twice"),
    ({BASE: {**pack()[BASE], "post-mlp": {1: ONES}}}, f"{BASE}.post-mlp.1", f"also as {BASE}.post_mlp.1"),
    (pack(**{"2": ONES}), f"{BASE}.post_mlp", f"both {BASE}.post_mlp.data and {BASE}.post_mlp.2 are given"),
    (base({1: ONES, "1": ONES}), f"{BASE}.post_mlp.1", "given twice"),
    (base({1: ONES, -3: ONES}), f"{BASE}.post_mlp.-3", "given twice"),
    (pack(dtype=None), f"{BASE}.post_mlp", "lacks ['dtype']"),
    (pack(order="C"), f"{BASE}.post_mlp", "unknown keys ['order']"),
    (pack(dtype="float8"), f"{BASE}.post_mlp.dtype", "expected one of bfloat16"),
    (pack(dtype=["float32"]), f"{BASE}.post_mlp.dtype", "expected one of bfloat16"),
    (pack(dtype="float16"), f"{BASE}.post_mlp.data", "expected 12 bytes"),
    (pack(shape=[HIDDEN]), f"{BASE}.post_mlp.shape", "expected [1, 6]"),
    (pack(shape=[1, 10**12]), f"{BASE}.post_mlp.shape", "expected [1, 6]"),
    (pack(shape="1x6"), f"{BASE}.post_mlp.shape", "expected a list"),
    (pack(layer_indices=[]), f"{BASE}.post_mlp.layer_indices", "1 to 4 layers"),
    (pack(layer_indices=[0] * 5), f"{BASE}.post_mlp.layer_indices", "1 to 4 layers"),
    (pack(layer_indices=1), f"{BASE}.post_mlp.layer_indices", "expected a list"),
    (pack(layer_indices=[4]), f"{BASE}.post_mlp.layer_indices", "from -4 to 3"),
    (pack(layer_indices=[0.5]), f"{BASE}.post_mlp.layer_indices", "not an integer"),
    (pack(layer_indices=[1, 1], shape=[2, HIDDEN], data=2 * DATA), f"{BASE}.post_mlp.1", "given twice"),
    (pack(data=DATA[:-1]), f"{BASE}.post_mlp.data", "expected 24 bytes (1 x 6 of 4); got 23"),
    (pack(data=[1.0]), f"{BASE}.post_mlp.data", "base64 text or bytes"),
    (pack(data="A" * 10_000_000), f"{BASE}.post_mlp.data", "got 10000000"),
    (pack(data="*" * 32), f"{BASE}.post_mlp.data", "not base64"),
    (pack(data="é" * 32), f"{BASE}.post_mlp.data", "not base64"),
    (pack(data=b64encode(DATA).decode()[:-4] + "===="), f"{BASE}.post_mlp.data", "not base64"),
    (pack(data=b64encode(DATA[:-2]).decode()), f"{BASE}.post_mlp.data", "got 22"),
    (pack(data=np.full((1, HIDDEN), np.inf, np.float32).tobytes()), f"{BASE}.post_mlp.1", "value 0 is not finite"),
    (pack(scales=[1.0, 2.0]), f"{BASE}.post_mlp.scales", "expected 1 numbers"),
    (pack(scales=2.0), f"{BASE}.post_mlp.scales", "expected a list"),
    (pack(scales=[float("inf")]), f"{BASE}.post_mlp.scales[0]", "finite number"),
    ({BASE: {"post_mlp": {1: [3e38] * HIDDEN}}, PREFILL: {"post_mlp": {1: [3e38] * HIDDEN}}}, PREFILL, "not finite"),
    ({DECODE: {"post_mlp": {1: [7e4] * HIDDEN}}}, DECODE, "too large for the model's float16"),
    ({DECODE: {"post_mlp": {0: [2e4] * HIDDEN, 1: [-2e4] * HIDDEN}}}, DECODE, "add up to 4e+04: in a float16 model"),
    ({PREFILL: {"post_mlp": {1: [1.0]}}}, f"{PREFILL}.post_mlp.1", f"expected {HIDDEN} numbers"),
    ({NAME: ""}, NAME, "module's name"),
    ({NAME: 3}, NAME, "a module or a non-empty list"),
    ({NAME: []}, NAME, "a module or a non-empty list"),
    ({NAME: ["a", 3]}, NAME, "module's name"),
    ({NAME: "n" * 300}, NAME, "1 to 256 characters"),
    ({NAME: "a\nb"}, NAME, "printable"),
    ({NAME: ["a", "a"]}, NAME, "more than once"),
    ({NAME: "a", REF: ["a", 2.0]}, REF, "more than once"),
    ({NAME: [f"m{i}" for i in range(65)]}, NAME, "at most 64"),
    ({REF: ["a", float("nan")]}, f"{REF}.scale", "finite number"),
    ({REF: ["a", None]}, f"{REF}.scale", "finite number"),
    ({REF: [["a", "b"]]}, f"{REF}.scale", "finite number"),
    ({REF: ["a", 1.0, 2.0]}, REF, "expected (name, scale)"),
    ({REF: {"scale": 1.0}}, REF, "the keys 'name' and 'scale'"),
    ({REF: 3}, REF, "a module or a non-empty list"),
]

STREAM = tuple(Site(layer, hook) for layer in range(4) for hook in (HookPoint.PRE_ATTN, HookPoint.POST_MLP))


@pytest.mark.parametrize(
    ("fields", "field", "message"), CASES, ids=[f"{i}-{case[1]}"[:40] for i, case in enumerate(CASES)]
)
def test_bad_input_is_refused_with_the_field_named(fields: dict[str, Any], field: str, message: str) -> None:
    steerable = model("float16" if "float16" in message else "float32", STREAM)

    with pytest.raises(RequestError) as refused:
        read_steering(fields, steerable)

    assert refused.value.field == field
    assert message in str(refused.value)
    assert len(str(refused.value)) < 500


def test_more_vectors_than_allowed_are_refused_with_the_numbers() -> None:
    fields = {BASE: {"post_mlp": {0: ONES, 1: ONES}}, DECODE: {"pre_attn": {0: ONES}}}

    with pytest.raises(RequestError, match=r"takes 5 vectors .* at most 4 are allowed") as refused:
        read_steering(fields, model(max_vectors=4))

    assert refused.value.field == BASE
    assert read_steering(fields, model(max_vectors=5))[0] is not None


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 32759.0), ("bfloat16", 2.6e8), ("float32", 2.6e8)])
def test_the_largest_values_are_taken(dtype: str, largest: float) -> None:
    assert read_steering(one([largest] * HIDDEN), model(dtype))[0] is not None


@pytest.mark.parametrize(("dtype", "value"), [("float16", 32760.0), ("bfloat16", 2.7e8), ("float32", 2.7e8)])
def test_larger_values_are_refused(dtype: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"too large for the model's {dtype}"):
        read_steering(one([value] * HIDDEN), model(dtype))


def test_vectors_of_another_model_are_refused() -> None:
    wide = PhaseVectors.from_rows({Site(1, HookPoint.POST_MLP): np.ones(HIDDEN + 1)})
    deep = PhaseVectors.from_rows({Site(9, HookPoint.POST_MLP): np.ones(HIDDEN)})

    with pytest.raises(RequestError, match=r"steering_vectors\.post_mlp\.shape"):
        read_steering({BASE: wide}, model())
    with pytest.raises(RequestError, match="layer 9"):
        read_steering({BASE: deep}, model())


def test_a_module_without_vectors_is_refused() -> None:
    with pytest.raises(RequestError, match=r"vectors\.post_mlp\.1: is zero"):
        read_module({"vectors": {"post_mlp": {1: [0.0] * HIDDEN}}}, model())
    with pytest.raises(RequestError, match="no vector other than zero"):
        read_module({"vectors": {"post_mlp": {1: {"vector": ONES, "scale": 0}}}}, model())
    with pytest.raises(RequestError, match="no vector other than zero"):
        read_module({}, model())
