"""The codes of gates: how conditions on rows of the stream, and what they turn on, are written down in a program.

Entries of gates read a row as it came to the site. They keep numbers for each row of the stream: signals ``s``, which
later entries of the same forward read; and states ``m`` for each request, which its next row finds. The index of such
an entry (`headgate.steering.programs.codes.change_index`) is its first column, c.

* `SCORE`: ``s[c] = y + p0`` with ``y = read_scale * (h . u) + write_scale * (h . w)``; `w` is what rounding took from
  `u`, none where that is nothing. With `ScoreKind.COSINE` ``y / norm(h)``, and 0 for a row of zeros; with
  `ScoreKind.ACTIVATION` the activation of a feature, from the params of a feature. With `ScoreKind.UNIT` it writes
  nothing but adds ``p1 * f(y + p0)`` to a sum, where f is a `UnitFunction`; `UnitFunction.SUM` writes
  ``s[c] = sum + p0`` of the units before it, which are consecutive, and begins another sum.
* `LEAF`: compares the score ``s[p4]``, pooled over rows of the request (`Pool`, `EMA` with the weight p3), with the
  threshold p0 and the hysteresis p1, by a `Mode` with its number p2. ``s[c]`` is the strength, ``s[c + 1]`` whether it
  fires, ``s[c + 2]`` the pooled score. ``m[c]`` is whether it fired, ``m[c + 1]`` the pooled score, ``m[c + 2]`` over
  how many rows. With `Mode.PID` it has other numbers, and ``m[c]`` is the integral.
* `NODE`: ``s[c]`` and ``s[c + 1]`` as of a leaf, from those at p4 and p5, by `Combine`.
* `GATE`: ``s[c]`` is the strength that acts on this row, ``s[c + 1]`` the one that a trace shows, from the condition at
  p4, by `GateScope`. ``m[c]`` is the strength that acts on the next row at earlier sites, and so is ``s[c + 2]``;
  ``m[c + 1]`` is the one that it has latched; NaN stands for none. ``m[c + 2]`` counts the rows that it wrote:
  on which ``s[c]`` was not 0, unless it is `GateFlag.UNWRITTEN`. p0 is a strength that is latched from the first
  generated row on, or NaN.
* `ATTENUATE`: ``f *= 1 + c * (p0 - 1)`` with the entry's own coefficient c; f is 1 at each site before the first.

An entry with a gate has a coefficient: the gate's ``s[c]``; or, if it acts before the gate is evaluated (`gate_field`),
``m[c]`` as it was before the forward on generated rows, and 0 on others. NaN counts as 0. On rows that are replayed,
``s[c]`` holds that strength before the forward. What an entry adds is multiplied by its coefficient, and by f if it is
`ATTENUATED`; of a feature in two halves, what the second adds.
`headgate.steering.worker.gates.reference` is the definition. Standard library only.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag


class ScoreKind(IntEnum):
    """How `Code.SCORE` reads a row: bits 16 and 17 of the code. Activations have theirs in the bits of a feature.

    `UNIT` is a hidden unit of a small network, or their sum.
    """

    LINEAR = 0 << 16
    COSINE = 1 << 16
    ACTIVATION = 2 << 16
    UNIT = 3 << 16


class UnitFunction(IntEnum):
    """The function of a `ScoreKind.UNIT`: bits 12 and 13 of the code."""

    RELU = 0 << 12
    GELU = 1 << 12
    """x * Phi(x), with the error function."""
    SILU = 2 << 12
    """x / (1 + exp(-x))."""
    SUM = 3 << 12
    """No unit: the score that the units before it make together."""


UNIT_MASK = 3 << 12
SCORE_KIND_MASK = 3 << 16


LEAST_HYSTERESIS = 1e-8
"""That a proportional strength divides by, at least."""


class GateFlag(IntFlag):
    """Bits of a code of gates."""

    BELOW = 1 << 8
    """For `Code.LEAF`: it fires below the threshold."""
    FROM_PROMPT_END = 1 << 9
    """For `Code.GATE`: it is 0 before the last row of the prompt."""
    OBSERVES = 1 << 10
    """For `Code.GATE`: ``s[c]`` is 0."""
    UNWRITTEN = 1 << 11
    """For `Code.GATE`: no entry of the program has its ``s[c]``, so that no row counts."""


class Mode(IntEnum):
    """How the strength of `Code.LEAF` follows from its pooled score v: bits 12 and 13 of the code.

    `BINARY`: 1 where it fires. `PROPORTIONAL`: ``p2 * clip((v - (t - h)) / max(h, 1e-8), 0, 1)``; below,
    ``p2 * clip(((t + h) - v) / max(h, 1e-8), 0, 1)``. `SIGMOID`: of ``p2 * (v - t)``; below, of ``p2 * (t - v)``.

    `PID`: a control loop, which pools by `Pool.TOKEN` or `Pool.EMA`. It begins with the last row of the prompt; on
    each row from there on, with the error ``e = p0 - v``, the integral ``i = m[c] + e``, and the change
    ``d = m[c + 1] - v`` since the row before, ``w = p1 * e + p2 * i + p5 * d``. The strength is `w`, cut to
    `read_scale` at least and `write_scale` at most. Where the cut takes away from `w` what ``p2 * e`` drove beyond
    the limit, ``m[c]`` stays; elsewhere it becomes `i`. On the first row ``m[c]`` counts as 0 and `d` is 0. It fires
    on each of these rows. On rows before, and where `v` is not finite, the strength is 0 and ``m[c]`` stays.
    """

    BINARY = 0 << 12
    PROPORTIONAL = 1 << 12
    SIGMOID = 2 << 12
    PID = 3 << 12


MODE_MASK = 3 << 12


class Pool(IntEnum):
    """Over which rows `Code.LEAF` pools scores: bits 14 and 15 of the code."""

    TOKEN = 0 << 14
    EMA = 1 << 14
    LAST_PROMPT = 2 << 14
    PROMPT_MEAN = 3 << 14


POOL_MASK = 3 << 14


class Combine(IntEnum):
    """How `Code.NODE` makes one of two conditions: bits 12 and 13. `NOT` takes the first alone, `ALWAYS` none."""

    ALWAYS = 0 << 12
    ANY = 1 << 12
    ALL = 2 << 12
    NOT = 3 << 12


class GateScope(IntEnum):
    """On which rows `Code.GATE` acts: bits 12 and 13.

    `THIS`: the row that was read. `NEXT`: the following one. `REST`: from the row that fires on, with the strength that
    it has there.
    """

    THIS = 0 << 12
    NEXT = 1 << 12
    REST = 2 << 12


COMBINE_MASK = SCOPE_MASK = 3 << 12

LEAF_COLUMNS, NODE_COLUMNS, GATE_COLUMNS, SCORE_COLUMNS = 3, 2, 3, 1

GROUP_MASK = 0xFF
"""For the field `GROUP`: the position group. Above it stands the gate."""
GATE_SHIFT = 8
GATE_COLUMN_MASK = (1 << 12) - 1
"""For `GROUP` without its position group: 1 + the first column of the entry's gate; 0 for none."""
EARLY = 1 << 20
"""For `GROUP`: the entry acts before its gate is evaluated."""


def gate_field(group: int, column: int, *, is_early: bool) -> int:
    """Return the field `GROUP` of an entry that a gate multiplies.

    Args:
        group: Position group, or `EVERYWHERE`.
        column: First column of the gate.
        is_early: Whether the entry acts before the gate is evaluated in the forward.

    Raises:
        AssertionError: If a gate has no such column.
    """
    if not 0 <= column < GATE_COLUMN_MASK:
        raise AssertionError(f"column {column} of a gate, at most {GATE_COLUMN_MASK} fit")
    return group | column + 1 << GATE_SHIFT | (EARLY if is_early else 0)


def gate_column(field: int) -> int:
    """Return the first column of the gate that multiplies an entry; -1 if there is none."""
    return (field >> GATE_SHIFT & GATE_COLUMN_MASK) - 1


class TokenFlag(IntFlag):
    """Where a batch row lies in its request, for gates."""

    RESETS = 1
    """The first row that the request has here: its states are forgotten before."""
    ENDS_PROMPT = 2
    """Position P - 1 of a prompt of P tokens."""
    IS_GENERATED = 4
    """Position P or above."""
    IS_REPLAYED = 8
    """Strengths of entries that are early are those of an earlier computation of the row."""
    IS_SCANNED = 16
    """The request has several rows in the step, which are consecutive and all have this flag."""
