"""Figures of the rows that are reconstructed, added up by the kernels that do so.

The sums are those of `headgate.steering.programs.codes.NUM_SUMS`. Rows are added by atomic additions in fp64, so the
last bits of a sum depend on their order; nothing but figures is made of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headgate.steering.features.check import LARGEST_NORM
from headgate.steering.kernels.feature_values import norm_of_row
from headgate.steering.programs import codes as program_codes

_NUM_SUMS = tl.constexpr(program_codes.NUM_SUMS)
_ROWS = tl.constexpr(program_codes.SUM_ROWS)
_ERRORS = tl.constexpr(program_codes.SUM_ERRORS)
_SQUARES = tl.constexpr(program_codes.SUM_SQUARES)
_LOGS = tl.constexpr(program_codes.SUM_LOGS)
_LENGTHS = tl.constexpr(program_codes.SUM_LENGTHS)
_LARGEST_NORM = tl.constexpr(LARGEST_NORM)


@triton.jit
def add_length(sums_ptr, h):
    """Add a row's length to the sums that decide which rows are very long; rows of zeros and non-finite rows add
    nothing.

    To be called for all rows of a step before `add_figures` is for any.
    """
    length = norm_of_row(h)
    if (length > 0) & (length < float("inf")):
        tl.atomic_add(sums_ptr + _LOGS, tl.log(length).to(tl.float64), sem="relaxed")
        tl.atomic_add(sums_ptr + _LENGTHS, 1.0, sem="relaxed")


@triton.jit
def add_figures(sums_ptr, h, error, columns, mask):
    """Add a row and the error of its reconstruction, unless it is very long, zero or not finite."""
    log = tl.load(sums_ptr + _LOGS) / tl.load(sums_ptr + _LENGTHS)
    limit = (tl.exp(log.to(tl.float32)) * _LARGEST_NORM).to(tl.float64)
    wide = tl.where(mask, h, 0.0).to(tl.float64)
    square = tl.sum(wide * wide)
    off = tl.where(mask, error, 0.0).to(tl.float64)
    residual = tl.sum(off * off)
    if (square > 0) & (square <= limit * limit) & (residual < float("inf")):
        tl.atomic_add(sums_ptr + _ROWS, 1.0, sem="relaxed")
        tl.atomic_add(sums_ptr + _ERRORS, residual, sem="relaxed")
        tl.atomic_add(sums_ptr + _SQUARES, square, sem="relaxed")
        tl.atomic_add(sums_ptr + _NUM_SUMS + columns, wide, mask=mask, sem="relaxed")
