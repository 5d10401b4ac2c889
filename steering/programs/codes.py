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
* ``t`` by the edit: `SET` p2, `PLUS` a + p2, `TIMES` a * p2, `AT_LEAST` max(a, p2), `AT_MOST` min(a, p2). With
  `IF_ACTIVE`, ``t = a`` unless ``a > 0``.

Entries of gates stand before all others (`headgate.steering.programs.gate_codes`). An entry may have a gate: then what
it adds to ``h`` or ``d`` is multiplied by the gate's strength, and with `ATTENUATED` by ``f``.

`KEEP_NORM_FROM` remembers ``norm(h)`` before its entry; `KEEP_NORM_TO` scales `h` after its entry to have that norm
again (a row of zeros stays). Features have neither. An entry with a position group acts on the rows of that group
alone.
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
