"""Each method of operations, from a request to its program, does what its formula says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.documents.operations import read_ops
from headgate.steering.programs.operations import Method
from headgate.steering.programs.program import Program
from headgate.steering.vectors.dtypes import StoredType, widen
from headgate.steering.vectors.phase_vectors import Steerable
from headgate.steering.vectors.sums import round_to
from tests.fakes.programs import apply, run

HIDDEN = 40
SITE = Site(1, HookPoint.POST_MLP)
DTYPES: tuple[StoredType, ...] = ("float32", "float16", "bfloat16")
METHODS = [method.value for method in Method]


def model(dtype: StoredType = "float32") -> Steerable:
    return Steerable(num_layers=4, hidden_size=HIDDEN, dtype=dtype, sites=(SITE,), max_vectors=100)


def lowered(documents: list[dict[str, Any]], dtype: StoredType = "float32") -> Program | None:
    """The program of documents at `SITE`."""
    fields = {"steering_ops": [{"at": SITE.name, **document} for document in documents]}
    found = read_ops(fields, model(dtype), [SITE], 8)
    assert found is None or isinstance(found.prefill, Program | None)
    return found.prefill if found else None  # type: ignore[return-value]


def acted(documents: list[dict[str, Any]], row: np.ndarray, dtype: StoredType = "float32") -> np.ndarray:
    program = lowered(documents, dtype)
    return row.astype(np.float64) if program is None else run(program, SITE, row)


def vector(rng: np.random.Generator, dtype: StoredType = "float32") -> np.ndarray:
    """A vector of any size whose values `dtype` holds exactly."""
    values = rng.standard_normal(HIDDEN) * 10.0 ** rng.integers(-3, 3)
    return widen(round_to(values.astype(np.float32), dtype), dtype)


def operation(method: str, rng: np.random.Generator, dtype: StoredType = "float32") -> dict[str, Any]:
    """A document of a method with every number given."""
    one, other = vector(rng, dtype), vector(rng, dtype)
    low, high = sorted(rng.normal(0, 3, 2).tolist())
    part = float(rng.random())
    numbers: dict[str, dict[str, Any]] = {
        "additive": {"scale": float(rng.normal())},
        "ablate": {"scale": float(rng.normal())},
        "orthogonal": {"scale": float(rng.normal())},
        "clamp": {"min": low, "max": high, "strength": part},
        "set": {"value": low, "strength": part},
        "swap": {"target": other},
        "affine": {"reference": other, "alpha": float(rng.normal())},
        "mean_ablate": {"mean": other},
        "norm_scaled_add": {"scale": float(rng.normal()), "max_ratio": part},
        "replace": {"alpha": part, "mask": [int(bit) for bit in rng.integers(0, 2, HIDDEN - 1)] + [1]},
    }
    if method == "rotate":
        degrees = float(rng.uniform(-360, 360))
        return {"method": method, "plane": [one, other], "degrees": degrees, "only_if_positive": bool(part < 0.5)}
    return {"method": method, "vector": one, **numbers[method]}


def assert_close(found: np.ndarray, expected: np.ndarray, row: np.ndarray, tolerance: float) -> None:
    scale = max(np.linalg.norm(expected), np.linalg.norm(row))
    assert np.linalg.norm(found - expected) <= tolerance * scale


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 2**32 - 1), keeps=st.booleans())
def test_a_method_does_what_its_formula_says(method: str, seed: int, keeps: bool) -> None:
    rng = np.random.default_rng(seed)
    document = {**operation(method, rng), "preserve_norm": keeps}
    row = vector(rng)

    assert_close(acted([document], row), apply(document, row), row, 1e-5)


@given(seed=st.integers(0, 2**32 - 1), methods=st.lists(st.sampled_from(METHODS), min_size=1, max_size=8))
def test_operations_act_one_after_the_other_and_replacements_first(seed: int, methods: list[str]) -> None:
    rng = np.random.default_rng(seed)
    documents = [operation(method, rng) for method in methods]
    row = vector(rng)
    expected, largest = row.astype(np.float64), float(np.linalg.norm(row))
    for document in sorted(documents, key=lambda document: document["method"] != "replace"):
        expected = apply(document, expected)
        largest = max(largest, float(np.linalg.norm(expected)))

    found = acted(documents, row)

    assert np.linalg.norm(found - expected) <= 1e-5 * largest * len(documents)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 2**32 - 1))
def test_vectors_in_the_dtype_of_the_model_lose_nothing_but_what_is_computed_from_them(
    method: str, dtype: StoredType, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    document, row = operation(method, rng, dtype), vector(rng)
    is_computed = method in ("swap", "rotate")
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype] if is_computed else 0.0
    small = 2.0**-24 if dtype == "float16" else 0.0  # values far below a vector's largest become subnormal

    found, expected = acted([document], row, dtype), apply(document, row)

    if method == "rotate" and abs(row @ document["plane"][0]) < 1e-3 * np.linalg.norm(row):
        return  # whether the row is turned at all hangs on rounding
    assert_close(found, expected, row, 1e-5 + 3 * rounding + HIDDEN * small)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_ablated_is_gone_along_the_direction_as_it_is_stored(dtype: StoredType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    direction, row = vector(rng).astype(np.float64) * np.pi, vector(rng)
    program = lowered([{"method": "ablate", "vector": direction}], dtype)
    assert program is not None
    stored = widen(program.rows, dtype)[0].astype(np.float64)

    left = run(program, SITE, row) @ stored / np.linalg.norm(stored)

    assert program.num_rows == 1
    assert abs(left) <= 2.0**-23 * np.linalg.norm(row)
    assert stored @ direction >= (1 - 2.0**-14) * np.linalg.norm(stored) * np.linalg.norm(direction)
