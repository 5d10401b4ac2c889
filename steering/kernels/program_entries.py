"""How kernels read programs: rows of the stream and of the pool, fields and numbers of entries.

Formulas: `headgate.steering.programs.codes`. `gates` are a row's (`headgate.steering.kernels.gate_coefficients`), or
None. Arguments that are named in the singular may also be blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headgate.steering.kernels.gate_coefficients import GROUP_MASK, code_that_acts, numbers_with_coefficient
from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code

_CODE_MASK = tl.constexpr(program_codes.CODE_MASK)
_NUM_CODES = tl.constexpr(NUM_CODES)
_NUM_PARAMS = tl.constexpr(NUM_PARAMS)
_READ = tl.constexpr(program_codes.READ)
_WRITE = tl.constexpr(program_codes.WRITE)
_GROUP = tl.constexpr(program_codes.GROUP)
_READ_SCALE = tl.constexpr(program_codes.READ_SCALE)
_WRITE_SCALE = tl.constexpr(program_codes.WRITE_SCALE)
_P0 = tl.constexpr(program_codes.P0)
_FEATURE = tl.constexpr(int(Code.FEATURE))
_MAX_CHANGE = tl.constexpr(program_codes.MAX_CHANGE)
_MAX_CHANGE_FLOAT16 = tl.constexpr(program_codes.MAX_CHANGE_FLOAT16)


@triton.jit
def stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, mask):
    """Return one row of the stream."""
    x = tl.load(value_ptr + token * value_stride + columns, mask=mask, other=0.0)
    if addend_ptr is not None:
        addend = tl.load(addend_ptr + token * addend_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + addend.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def cut_change(change, value_ptr):
    """Return changes of a row of the stream, which `value_ptr` points to, cut to `MAX_CHANGE` of its dtype."""
    largest = _MAX_CHANGE
    if value_ptr.dtype.element_ty == tl.float16:
        largest = _MAX_CHANGE_FLOAT16
    change = tl.where(change == change, change, 0.0)
    return tl.where(change > largest, largest, tl.where(change < -largest, -largest, change))


@triton.jit
def row_of_entry(pool_ptr, pool_stride, code, slot, columns, D):
    """Return a row of the pool as it is stored; zeros for slot 0, of features, and of entries that do not act."""
    op = code & _CODE_MASK
    width = tl.where(op == 0, 0, tl.where(op >= _FEATURE, 0, tl.where(slot == 0, 0, D)))
    return tl.load(pool_ptr + slot * pool_stride + columns, mask=columns < width, other=0.0)


@triton.jit
def rows_of_entries(pool_ptr, pool_stride, slots, columns, D):
    """Return a row of the pool for each of `slots`, as it is stored; zeros for slot 0."""
    row_ptrs = pool_ptr + slots[:, None] * pool_stride
    mask = tl.where(slots[:, None] == 0, False, columns[None, :] < D)
    return tl.load(row_ptrs + columns[None, :], mask=mask, other=0.0)


@triton.jit
def fields_of_entry(codes, index, count, groups, gates):
    """Return code, 0 if it does not act, and slots of an entry."""
    fields = codes + index * _NUM_CODES
    code = tl.load(fields, mask=index < count, other=0)
    read = tl.load(fields + _READ, mask=index < count, other=0).to(tl.int64)
    write = tl.load(fields + _WRITE, mask=index < count, other=0).to(tl.int64)
    group = tl.load(fields + _GROUP, mask=index < count, other=0)
    if gates is not None:
        code = code_that_acts(code, group, gates)
        group = group & GROUP_MASK
    bit = groups >> (tl.maximum(group, 1) - 1).to(tl.int64) & 1
    return tl.where(group == 0, code, tl.where(bit == 0, 0, code)), read, write


@triton.jit
def numbers_of_operation(codes, params, index, code, gates):
    """Return `read_scale`, `write_scale` and p0 to p2 of an entry, with its coefficient; zeros if it does not act."""
    params += index * _NUM_PARAMS
    acts = code != 0
    numbers = (
        tl.load(params + _READ_SCALE, mask=acts, other=0.0),
        tl.load(params + _WRITE_SCALE, mask=acts, other=0.0),
        tl.load(params + _P0, mask=acts, other=0.0),
        tl.load(params + _P0 + 1, mask=acts, other=0.0),
        tl.load(params + _P0 + 2, mask=acts, other=0.0),
    )
    if gates is not None:
        numbers = numbers_with_coefficient(numbers, code, codes + index * _NUM_CODES, gates)
    return numbers


@triton.jit
def numbers_of_features(codes, params, index, code, gates):
    """Return the params of a block of features, with their coefficients; zeros of features that do not act."""
    read_scale, write_scale, p0, p1, p2 = numbers_of_operation(codes, params, index, code, gates)
    params += index * _NUM_PARAMS
    acts = code != 0
    p3 = tl.load(params + _P0 + 3, mask=acts, other=0.0)
    p4 = tl.load(params + _P0 + 4, mask=acts, other=0.0)
    p5 = tl.load(params + _P0 + 5, mask=acts, other=0.0)
    return read_scale, write_scale, p0, p1, p2, p3, p4, p5
