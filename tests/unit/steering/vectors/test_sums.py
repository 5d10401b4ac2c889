"""Sums of vectors are exact where they can be, and rounded once where they cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headgate.steering.vectors.dtypes import StoredType, widen
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import (
    BLOCK,
    LIMIT,
    WeightedSum,
    effective,
    is_zero,
    merge_over,
    peak,
    round_to,
    sum_of,
)
from tests.fakes.steering_tables import CONFIGS, HIDDEN, SITES, vectors

IDS = {site: index for index, site in enumerate(SITES)}
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16 if values.itemsize == 2 else np.uint32)


def by_torch(values: np.ndarray, dtype: StoredType) -> np.ndarray:
    """The same rounding by another implementation, as bits."""
    rounded = torch.from_numpy(values.copy()).to(TORCH[dtype])
    return rounded.view(torch.int32 if dtype == "float32" else torch.int16).numpy().view(f"u{rounded.itemsize}")


@DTYPES
@given(values=arrays(np.uint32, (3, 8)))
def test_every_finite_value_is_rounded_as_torch_rounds_it(dtype: StoredType, values: np.ndarray) -> None:
    floats = values.view(np.float32)
    floats = np.where(np.isfinite(floats) & (np.abs(floats) < LIMIT[dtype]), floats, np.float32(0))

    assert (bits(round_to(floats, dtype)) == by_torch(floats, dtype)).all()


@pytest.mark.parametrize("upper", [0x0000, 0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0001, 0x7F00, 0x807F])
@pytest.mark.parametrize("lower", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_ties_of_bfloat16_go_to_the_even_neighbour(upper: int, lower: int) -> None:
    value = np.array([[upper << 16 | lower]], dtype=np.uint32).view(np.float32)

    expected = upper + (lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1))

    assert round_to(value, "bfloat16").item() == expected


@DTYPES
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, np.finfo(np.float32).max])
def test_what_is_not_finite_is_never_stored(dtype: StoredType, value: float) -> None:
    values = np.full((1, 1), value, dtype=np.float32)
    if dtype == "float32" and np.isfinite(value):
        assert round_to(values, dtype).item() == values.item()
        return

    with pytest.raises(AssertionError, match="not finite"):
        round_to(values, dtype)


@DTYPES
def test_two_sides_within_the_limit_have_a_finite_sum(dtype: StoredType) -> None:
    below = np.full((1, 1), np.nextafter(np.float32(LIMIT[dtype]), np.float32(0)), dtype=np.float32)

    assert np.isfinite(widen(round_to(below + below, dtype), dtype)).all()


def test_zero_rows_are_found_whatever_their_sign() -> None:
    rows = np.array([[0.0, -0.0], [0.0, 1e-30], [-0.0, -0.0]], dtype=np.float32)

    for dtype in ("bfloat16", "float32"):
        assert is_zero(round_to(rows, dtype)).tolist() == [True, False, True]
    assert is_zero(round_to(rows, "float16")).tolist() == [True, True, True]


@DTYPES
@given(data=st.data())
def test_a_row_is_zero_only_if_its_last_value_is_too(dtype: StoredType, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    places = data.draw(st.lists(st.none() | st.integers(0, width - 1), min_size=1, max_size=6))
    rows = np.zeros((len(places), width), dtype=np.float32)
    for row, place in zip(rows, places, strict=True):
        row[place if place is not None else slice(0)] = -2.5

    assert is_zero(round_to(rows, dtype)).tolist() == [place is None for place in places]


def test_a_sum_is_rounded_once() -> None:
    """Three addends of half a bfloat16 step each: rounding each of them first would lose them all."""
    one, small = vectors({0: 1.0}), PhaseVectors.from_rows({SITES[0]: np.full(HIDDEN, 2.0**-9)})
    assert small is not None
    request = WeightedSum([(one, 1.0), (small, 1.5), (small, 0.5)])

    ids, rows = effective((small, request), IDS, "bfloat16")

    assert ids.tolist() == [0]
    assert widen(rows, "bfloat16")[0, 0] == 1.0 + 2.0**-7
    assert widen(round_to(np.full((1, 1), 1 + 2.0**-9, dtype=np.float32), "bfloat16"), "bfloat16").item() == 1.0


def test_the_global_and_the_requests_side_are_added_site_by_site() -> None:
    ids, rows = effective((vectors({0: 1.0, 3: 2.0}), vectors({3: 4.0, 5: 8.0})), IDS, "float32")

    assert ids.tolist() == [0, 3, 5]
    assert rows[:, 0].tolist() == [1.0, 6.0, 8.0]


@DTYPES
def test_vectors_in_the_models_dtype_are_taken_as_they_are(dtype: StoredType) -> None:
    values = round_to(np.linspace(-3, 3, 2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN), dtype)
    own = PhaseVectors(sites=SITES[:2], payload=values.tobytes(), dtype=dtype, hidden_size=HIDDEN, key=b"own", peak=3.0)

    ids, rows = effective((own, None), IDS, dtype)

    assert ids.tolist() == [0, 1]
    assert np.shares_memory(rows, own.rows)
    assert rows.tobytes() == round_to(own.float32(), dtype).tobytes()


def test_sites_of_other_workers_are_left_out() -> None:
    own = {site: index for index, site in enumerate(SITES[3:])}

    ids, rows = effective((vectors({0: 1.0, 4: 2.0}), None), own, "float32")

    assert ids.tolist() == [1]
    assert rows[:, 0].tolist() == [2.0]
    assert len(effective((vectors({0: 1.0}), None), own, "float32")[0]) == 0


def test_rows_follow_the_workers_order_of_sites() -> None:
    backwards = {site: 5 - index for index, site in enumerate(SITES)}

    ids, rows = effective((vectors({0: 1.0, 4: 2.0}),), backwards, "float32")

    assert ids.tolist() == [1, 5]
    assert rows[:, 0].tolist() == [2.0, 1.0]


@given(names=st.lists(st.tuples(st.integers(0, 7), st.sampled_from([-1.0, 0.1, 1.0, 3.3])), min_size=1, max_size=5))
def test_a_sum_has_the_same_bits_and_key_in_any_order(names: list[tuple[int, float]]) -> None:
    parts = [(CONFIGS[name], scale) for name, scale in names]
    forward, backward = WeightedSum(parts), WeightedSum(parts[::-1])

    assert (forward.key, forward.sites) == (backward.key, backward.sites)
    assert (bits(forward.float32()) == bits(backward.float32())).all()


def test_keys_are_whole_digests() -> None:
    """Cut to 128 bits, two contents of one key take 2^64 tries: a client could feed the one to users of the other."""
    config = CONFIGS[2]
    twice = sum_of([(config, 2.0)])

    assert twice is not None
    assert (len(config.key), len(twice.key)) == (32, 32)


def test_absent_parts_leave_no_trace_in_a_sum() -> None:
    config = CONFIGS[2]

    assert sum_of([(None, 1.0), (config, 1.0), (CONFIGS[1], 0.0)]) is config
    assert sum_of([(config, 0.0), (None, 2.0)]) is None
    twice = sum_of([(config, 2.0)])
    assert twice is not None
    assert twice.key != config.key
    assert (twice.float32() == 2 * config.float32()).all()


def test_an_overlay_takes_the_place_of_what_is_under_it() -> None:
    merged = merge_over(vectors({0: 1.0, 2: 2.0}), vectors({2: 5.0, 3: 6.0}))

    assert merged is not None
    assert merged.key == vectors({0: 1.0, 2: 5.0, 3: 6.0}).key
    assert merge_over(None, merged) is merged
    assert merge_over(merged, None) is merged


def test_the_peak_is_the_largest_magnitude() -> None:
    made = PhaseVectors.from_rows({SITES[0]: np.array([1.0, -7.5, 2, 0])})

    assert (peak(made), peak(None)) == (7.5, 0.0)


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 8])
def test_rows_beyond_a_block_are_rounded_and_checked_likewise(place: int) -> None:
    values = np.random.default_rng(0).normal(size=(3, BLOCK)).astype(np.float32)

    assert (bits(round_to(values, "bfloat16")) == by_torch(values, "bfloat16")).all()
    values.reshape(-1)[place] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        round_to(values, "bfloat16")
