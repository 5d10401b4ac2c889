"""The codes of a program: how operations at a site are written down for the forward pass. Standard library only.

A program is a list of entries. The forward runs it on one row of the stream: ``h`` is the row in fp32, and each entry
changes it in turn. Entries name rows of the vector pool: ``u`` is read, ``w`` is written. In the formulas,
``z = read_scale * (h . u)``, and ``g`` is `write_scale`.

* `ADD`: ``h += g * w``.
* `LINEAR`: ``h += g * (p0 * z + p1) * w``.
* `CLAMP`: ``h += g * p2 * (min(max(z, p0), p1) - z) * w``.
* `NORM_ADD`: ``h += g * p0 * norm(h) * w``.
* `ROTATE`: with ``y = g * (h . w)`` and ``r = sqrt(z * z + y * y)``,
  ``h += p2 * ((p0 * r - z) * read_scale * u + (p1 * r - y) * g * w)``.
* `REPLACE`: ``h += p0 * (g * w - m * h)``, where ``m`` is the row `u`, or 1 everywhere if the entry has none.
* `RECONSTRUCT`: leaves `h`, and marks the row: it becomes what the encoded SAE of the site decodes of `h`, plus ``d``
  (`headgate.steering.worker.reconstruction`). It stands after all other entries but features.
* `FEATURE`: ``d += g * gain * (t - a) * w``. After the last entry, ``h += d``: features do not see each other. They
  stand after all other entries.
* `READ_FEATURE` and `WRITE_FEATURE` are the halves of a feature that is read at one site and written at later ones:
  ``c[i] = g * gain * (t - a)`` at the first, and ``d += g * c[i] * w`` at the others, in the same forward. Each row of
  the stream has changes ``c`` of its own; `change_index` is i. They stand among the features.

A feature's activation ``a`` and its target ``t``:

* `LAYER_NORM`: ``z = read_scale * (h . u - mean(h) * p5) / (std(h) + 1e-5)``, where `std` divides by ``D - 1`` and
  ``p5`` is the sum of `u`; ``gain = std(h)``.
* `CONSTANT_NORM`: ``z`` is multiplied by ``c = sqrt(D) / norm(h)``; ``gain = 1 / c``. A row of zeros has ``z = 0``.
* `RELU`: ``a = max(z + p0, 0)``. `JUMP_RELU`: ``a = z + p0`` where that is above ``p1``, else 0.
* `GATED`: ``a = max(p3 * z + p4, 0)`` where ``z + p0 > 0``, else 0.
* `SELECTED`: the activation of feature p1, an index, if it is among the k largest that the encoded SAE of the site
  finds in `h`, else 0. Nothing is read (`headgate.steering.worker.reconstruction`).
* ``t`` by the edit: `SET` p2, `PLUS` a + p2, `TIMES` a * p2, `AT_LEAST` max(a, p2), `AT_MOST` min(a, p2). With
  `IF_ACTIVE`, ``t = a`` unless ``a > 0``.

Entries of gates stand before all others. An entry may have a gate: then what
it adds to ``h`` or ``d`` is multiplied by the gate's strength, and with `ATTENUATED` by ``f``.

`KEEP_NORM_FROM` remembers ``norm(h)`` before its entry; `KEEP_NORM_TO` scales `h` after its entry to have that norm
again (a row of zeros stays). Features have neither. An entry with a position group acts on the rows of that group
alone.

Entries of gates, which are conditions on rows of the stream and what they turn on, read a row as it came to the site.
They keep numbers for each row of the stream: signals ``s``, which later entries of the same forward read; and states
``m`` for each request, which its next row finds. The index of such an entry (`change_index`) is its first column, c.

* `SCORE`: ``s[c] = y + p0`` with ``y = read_scale * (h . u) + write_scale * (h . w)``; `w` is what rounding took from
  `u`, none where that is nothing. With `ScoreKind.COSINE` ``y / norm(h)``, and 0 for a row of zeros; with
  `ScoreKind.ACTIVATION` the activation of a feature, from the params of a feature. With `ScoreKind.UNIT` it writes
  nothing but adds ``p1 * f(y + p0)`` to a sum, where f is a `UnitFunction`; `UnitFunction.SUM` writes
  ``s[c] = sum + p0`` of the units before it, which are consecutive, and begins another sum.
* `LEAF`: compares the score ``s[p4]``, pooled over rows of the request (`ScorePooling`; p3 is the weight of `EMA`),
  with the threshold p0 and the hysteresis p1, by a `Mode` with its number p2. ``s[c]`` is the strength, ``s[c + 1]``
  whether it fires, ``s[c + 2]`` the pooled score. ``m[c]`` is whether it fired, ``m[c + 1]`` the pooled score,
  ``m[c + 2]`` over how many rows. With `Mode.PID` it has other numbers, and ``m[c]`` is the integral.
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
`headgate.steering.worker.gates.reference` is the definition.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

NUM_CODES = 4
"""int32 fields of an entry: code and flags, slot of `u`, slot of `w`, position group."""

CODE, READ, WRITE, GROUP = range(NUM_CODES)

NUM_PARAMS = 8
"""float32 fields of an entry: `read_scale`, `write_scale`, then p0 to p5."""

READ_SCALE, WRITE_SCALE, P0, P1, P2, P3, P4, P5 = range(NUM_PARAMS)

EVERYWHERE = 0
"""Position group of entries that act on every row of their phase; other groups are 1 to `MAX_GROUPS`."""

MAX_GROUPS = 63
"""Groups beside `EVERYWHERE`: a batch row has one bit for each, in an int64."""

MAX_CHANGE = 2.0**48
"""Magnitude to which the change of a row's values by a program is cut; what is not a number becomes 0.

Later sites and layers keep such rows finite, also where they are squared. What is not finite would stay in blocks of
the KV cache, where attention may multiply it by 0 for requests that have these blocks next.
"""

MAX_CHANGE_FLOAT16 = 32752.0
"""`MAX_CHANGE` in models of float16: half of the largest float16."""

NO_ROW = 0
"""Slot of an entry that reads or writes no row: the zero vector's."""


class Code(IntEnum):
    """The low byte of an entry's code."""

    ADD = 1
    LINEAR = 2
    CLAMP = 3
    NORM_ADD = 4
    ROTATE = 5
    REPLACE = 6
    RECONSTRUCT = 7
    FEATURE = 8
    READ_FEATURE = 9
    WRITE_FEATURE = 10
    """This and the two before are the codes of features."""
    SCORE = 11
    """This and the following are the codes of gates: no code is above."""
    LEAF = 12
    NODE = 13
    GATE = 14
    ATTENUATE = 15


CODE_MASK = 0xFF


def is_of_feature(code: int) -> bool:
    """Whether an entry is a feature, or a half of one."""
    return Code.FEATURE <= code & CODE_MASK <= Code.WRITE_FEATURE


def is_selected(code: int) -> bool:
    """Whether an entry is a feature whose activation the encoded SAE of the site selects among all."""
    return code & (CODE_MASK | ACTIVATION_MASK) == Code.FEATURE | FeatureActivation.SELECTED


def is_of_gate(code: int) -> bool:
    """Whether an entry evaluates a gate, or multiplies others by one."""
    return code & CODE_MASK >= Code.SCORE


class Flag(IntFlag):
    """The other bits of an entry's code."""

    KEEP_NORM_FROM = 1 << 8
    KEEP_NORM_TO = 1 << 9
    IF_POSITIVE = 1 << 10
    """For `Code.ROTATE`: only rows with ``z > 0``."""
    IF_ACTIVE = 1 << 11
    """For a feature that is read: only rows with ``a > 0``."""
    ATTENUATED = 1 << 30
    """For every code but those of gates: its effect is multiplied by f."""


class FeatureActivation(IntEnum):
    """A feature's activation function: bits 12 and 13 of the code."""

    RELU = 0 << 12
    JUMP_RELU = 1 << 12
    GATED = 2 << 12
    SELECTED = 3 << 12


ACTIVATION_MASK = 3 << 12


class InputNorm(IntEnum):
    """Normalisation of a row before an SAE encodes it: bits 14 and 15 of the code."""

    NONE = 0 << 14
    LAYER_NORM = 1 << 14
    CONSTANT_NORM = 2 << 14


INPUT_NORM_MASK = 3 << 14


class Edit(IntEnum):
    """How a feature's target follows from its activation: bits 16 to 18 of the code."""

    SET = 0 << 16
    PLUS = 1 << 16
    TIMES = 2 << 16
    AT_LEAST = 3 << 16
    AT_MOST = 4 << 16


EDIT_MASK = 7 << 16

NUM_NUMBERS = 4
"""Numbers of a feature of an encoded SAE: bias, threshold, magnitude scale, magnitude bias."""

NUM_SUMS = 5
"""Sums of an encoded SAE over the rows that it reconstructs, float64, then the sum of the rows themselves."""

SUM_ROWS, SUM_ERRORS, SUM_SQUARES, SUM_LOGS, SUM_LENGTHS = range(NUM_SUMS)
"""Number of rows, their squared errors, and their squares; natural logarithms of lengths, and their number."""

CHANGE_SHIFT = 19
"""Bits 19 to 29 of the code: which of a row's changes `Code.READ_FEATURE` makes, or `Code.WRITE_FEATURE` adds."""
MAX_CHANGES = 1 << 11
CHANGE_MASK = MAX_CHANGES - 1


def change_index(code: int) -> int:
    """Return which change an entry of `Code.READ_FEATURE` or `Code.WRITE_FEATURE` makes or adds; a gate's column."""
    return code >> CHANGE_SHIFT & CHANGE_MASK


def with_change(code: int, index: int) -> int:
    """Return the code of an entry with another index of its change, or another first column.

    Raises:
        AssertionError: If it is not below `MAX_CHANGES`.
    """
    if not 0 <= index < MAX_CHANGES:
        raise AssertionError(f"change {index} of a row, at most {MAX_CHANGES} fit")
    return (code & ~(CHANGE_MASK << CHANGE_SHIFT)) | index << CHANGE_SHIFT


LAYER_NORM_EPS = 1e-5
"""Added to the standard deviation by SAEs that normalise a row as SAELens's ``layer_norm`` does."""


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

    `PID`: a control loop, which pools by `ScorePooling.TOKEN` or `EMA`. It begins with the last row of the prompt; on
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


class ScorePooling(IntEnum):
    """Over which rows `Code.LEAF` pools scores: bits 14 to 17 of the code; 4 to 15 are free for others."""

    TOKEN = 0 << 14
    EMA = 1 << 14
    LAST_PROMPT = 2 << 14
    PROMPT_MEAN = 3 << 14


POOLING_MASK = 15 << 14


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
