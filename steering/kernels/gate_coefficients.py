"""Factors that gates have for the effects of a row's entries: `headgate.steering.programs.gate_codes`.

`gates` are those of one row: pointers to its signals and to its request's states, its flags, and f; None where nothing
has a gate. Arguments that are named in the singular may also be blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headgate.steering.programs import codes as program_codes
from headgate.steering.programs import gate_codes
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code, Flag
from headgate.steering.programs.gate_codes import TokenFlag

_NUM_CODES = tl.constexpr(NUM_CODES)
_NUM_PARAMS = tl.constexpr(NUM_PARAMS)
_GROUP = tl.constexpr(program_codes.GROUP)
_P0 = tl.constexpr(program_codes.P0)
_CODE_MASK = tl.constexpr(program_codes.CODE_MASK)
_ROTATE = tl.constexpr(int(Code.ROTATE))
_REPLACE = tl.constexpr(int(Code.REPLACE))
_READ_FEATURE = tl.constexpr(int(Code.READ_FEATURE))
_ATTENUATE = tl.constexpr(int(Code.ATTENUATE))
_KEEP_NORM = tl.constexpr(int(Flag.KEEP_NORM_FROM | Flag.KEEP_NORM_TO))
_ATTENUATED = tl.constexpr(int(Flag.ATTENUATED))
_GATE_SHIFT = tl.constexpr(gate_codes.GATE_SHIFT)
_GATE_COLUMN_MASK = tl.constexpr(gate_codes.GATE_COLUMN_MASK)
_EARLY = tl.constexpr(gate_codes.EARLY)
_IS_GENERATED = tl.constexpr(int(TokenFlag.IS_GENERATED))
_IS_REPLAYED = tl.constexpr(int(TokenFlag.IS_REPLAYED))

GROUP_MASK = tl.constexpr(gate_codes.GROUP_MASK)


@triton.jit
def code_that_acts(code, group, gates):
    """Return `code`; 0 if the entry's coefficient is 0 and nothing else of it matters: its rows are not read then."""
    op = code & _CODE_MASK
    is_idle = (_coefficient(code, group, gates) == 0) & (code & _KEEP_NORM == 0) & (op != _READ_FEATURE)
    return tl.where(is_idle, 0, code)


@triton.jit
def numbers_with_coefficient(numbers, code, fields, gates):
    """Return `numbers`, with the entry's coefficient in that one in which its effect is linear.

    Args:
        numbers: `read_scale`, `write_scale`, p0 to p2.
        code: 0 if the entry does not act.
        fields: Pointer to the fields of the entry.
        gates: Not None.
    """
    read_scale, write_scale, p0, p1, p2 = numbers
    op = code & _CODE_MASK
    c = _coefficient(code, tl.load(fields + _GROUP, mask=code != 0, other=0), gates)
    is_of_other = (op == _ROTATE) | (op == _REPLACE) | (op == _READ_FEATURE)
    write_scale = tl.where(is_of_other, write_scale, write_scale * c)
    return read_scale, write_scale, tl.where(op == _REPLACE, p0 * c, p0), p1, tl.where(op == _ROTATE, p2 * c, p2)


@triton.jit
def _coefficient(code, group, gates):
    signals, states, flags, attenuation = gates
    c = _strength(group, signals, states, flags)
    return tl.where(code & _ATTENUATED != 0, c * attenuation, c)


@triton.jit
def _strength(group, signals, states, flags):
    """Return the strength of the gate that an entry's field `GROUP` names; 1 if it names none."""
    flags |= group & 0  # of its shape: Triton's interpreter makes no masks of scalars and blocks
    column = (group >> _GATE_SHIFT & _GATE_COLUMN_MASK) - 1
    is_of_row = (group & _EARLY == 0) | (flags & _IS_REPLAYED != 0)
    is_known = (column >= 0) & (is_of_row | (flags & _IS_GENERATED != 0))
    found = tl.load(tl.where(is_of_row, signals, states) + column, mask=is_known, other=0.0)
    return tl.where(column < 0, 1.0, tl.where(found == found, found, 0.0))


@triton.jit
def attenuation(codes, params, entries, is_of_gate, signals, states, flags):
    """Return f of a row: what entries `ATTENUATE` among a block of a program's make of 1."""
    code = tl.load(codes + entries * _NUM_CODES, mask=is_of_gate, other=0)
    attenuates = code & _CODE_MASK == _ATTENUATE
    group = tl.load(codes + entries * _NUM_CODES + _GROUP, mask=attenuates, other=0)
    p0 = tl.load(params + entries * _NUM_PARAMS + _P0, mask=attenuates, other=1.0)
    return tl.reduce(1 + _strength(group, signals, states, flags) * (p0 - 1), 0, _product)


@triton.jit
def _product(one, other):
    return one * other
