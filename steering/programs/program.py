"""A program: operations at sites, lowered to the entries of `headgate.steering.programs.codes`. Numpy only.

A request's operations are lowered once, in the front end or, where they name modules, in the engine core; workers only
write them to the device. Rows are rounded to the model's dtype when the program is made, and the scales of its entries
make up for it: an ablated direction is removed exactly as it is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import BoolArray, Int32Array
from headgate.capture.schema.positions import PositionSelector, selector_from_wire
from headgate.capture.schema.sites import HookPoint, Site, sort_sites
from headgate.steering.programs.codes import (
    CODE,
    CODE_MASK,
    EVERYWHERE,
    GROUP_MASK,
    MAX_GROUPS,
    NO_ROW,
    NUM_CODES,
    NUM_PARAMS,
    P0,
    P1,
    P2,
    READ,
    WRITE,
    WRITE_SCALE,
    Code,
    GateFlag,
    change_index,
    is_of_feature,
    with_change,
)
from headgate.steering.vectors.dtypes import STORAGE, Float32Rows, Rows, StoredType
from headgate.steering.vectors.sums import round_to

_NO_PARAMS = (0.0,) * NUM_PARAMS
_PREFIX = b"headgate program\n"
"""Keeps the keys of programs apart from those of vectors and sums."""

_WEIGHTS: dict[int, tuple[int, ...]] = {
    Code.ADD: (WRITE_SCALE,),
    Code.LINEAR: (P0, P1),
    Code.CLAMP: (P2,),
    Code.NORM_ADD: (P0,),
    Code.ROTATE: (P2,),
    Code.REPLACE: (P0,),
    Code.FEATURE: (WRITE_SCALE,),
    Code.READ_FEATURE: (),
    Code.WRITE_FEATURE: (WRITE_SCALE,),
    Code.RECONSTRUCT: (),
    **dict.fromkeys((Code.SCORE, Code.LEAF, Code.NODE, Code.GATE, Code.ATTENUATE), ()),
}
"""Params of each code that its effect is proportional to."""

_FEATURE, _READ_FEATURE, _WRITE_FEATURE = int(Code.FEATURE), int(Code.READ_FEATURE), int(Code.WRITE_FEATURE)
_HEAD = 16
"""Values of a row that are compared with zero first; in nearly every row that is not zero, one of them is not."""
_FEATURES = {_FEATURE, _READ_FEATURE, _WRITE_FEATURE}
_GATE, _RECONSTRUCT, _FROM_PROMPT_END = int(Code.GATE), int(Code.RECONSTRUCT), int(GateFlag.FROM_PROMPT_END)
"""Numpy compares arrays with members of an enumeration three times as slowly as with numbers."""

NUM_PASSES = 7
_PASSES: dict[int, int] = {
    **{Code.SCORE: 0, Code.LEAF: 1, Code.NODE: 1, Code.GATE: 1, Code.ATTENUATE: 2},
    **{Code.REPLACE: 3, Code.RECONSTRUCT: 5},
}
"""Gates are evaluated first. Replacements act before the additive vectors, SAEs after all operations; others between,
in their order."""


def pass_of(code: int) -> int:
    """Return when an entry acts: 0 to 3 before the additive vectors, 4 after them, 5 and 6 after all operations."""
    return 6 if is_of_feature(code) else _PASSES.get(code & CODE_MASK, 4)


_PASS_OF = tuple(pass_of(code) for code in range(max(Code) + 1))
"""By the low byte of a code."""


class Entry(NamedTuple):
    """One entry as it is made; see `headgate.steering.programs.codes`.

    Attributes:
        site: Where it acts.
        code: A `Code` with its flags.
        read: ``[width]`` of the site, a row of `Program.rows` as it is stored, or widened to float32, maybe followed by
            zeros; None if none is read.
        write: The same for the row that is written.
        params: Up to `NUM_PARAMS` numbers, `read_scale` and `write_scale` first; the others are 0.
        group: Index of a selector, counted from 1, or `EVERYWHERE`; with the entry's gate, if it has one
            (`headgate.steering.programs.codes.gate_field`).
    """

    site: Site
    code: int
    read: npt.NDArray[Any] | None
    write: npt.NDArray[Any] | None
    params: Sequence[float]
    group: int = EVERYWHERE


Runs = tuple[tuple[Site, int], ...]
"""Sites, and the number of entries at each."""


class ProgramWire(TypedDict):
    """A `Program` as plain values; arrays are their raw bytes, and each site stands beside its number of entries."""

    sites: list[tuple[int, str, int]]
    codes: bytes
    params: bytes
    rows: bytes
    dtype: StoredType
    groups: list[object]
    key: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Operations at sites; immutable, never empty. Make it with `from_entries`, `joined` or `from_wire`.

    Attributes:
        sites: Site of each entry, ``[n]``: in the order of the forward pass, and at one site in the order in which
            they act.
        codes: int32 ``[n, NUM_CODES]``, read-only; rows are counted from 1, `NO_ROW` is none.
        params: float32 ``[n, NUM_PARAMS]``, read-only.
        rows: ``[m, width]`` in the model's dtype, each once, as wide as the widest site's; others end with zeros.
        dtype: The model's.
        groups: The selectors of the position groups 1, 2, ...; they are resolved with the length of the prompt.
        key: The content key, 32 bytes; equal if and only if everything else is.
        runs: The sites, each once, and the number of entries at each.
    """

    sites: tuple[Site, ...]
    codes: Int32Array = field(compare=False)
    params: Float32Rows = field(compare=False)
    rows: Rows = field(repr=False, compare=False)
    dtype: StoredType
    groups: tuple[PositionSelector, ...] = ()
    key: bytes = field(repr=False)
    runs: Runs = field(repr=False, compare=False)
    kinds: frozenset[int] = field(init=False, repr=False, compare=False)
    """The `Code` of any entry, without flags."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", frozenset([code & CODE_MASK for code in self.codes[:, CODE].tolist()]))

    @classmethod
    def from_entries(
        cls, entries: Iterable[Entry], dtype: StoredType, groups: Sequence[PositionSelector] = ()
    ) -> Program:
        """Put entries into the order in which they act, each row once.

        Args:
            entries: At least one; those of one site in the order of the request.
            dtype: The model's. Rows that are not stored in it yet must be exact in it.
            groups: Selectors of the position groups.

        Raises:
            AssertionError: If there is no entry, a row is not finite, or there are more than `MAX_GROUPS` groups.
        """
        listed = list(entries)
        if not listed or len(groups) > MAX_GROUPS:
            raise AssertionError(f"a program of {len(listed)} entries and {len(groups)} position groups")
        ranks = {site: rank for rank, site in enumerate(sort_sites({entry.site for entry in listed}))}
        listed.sort(key=lambda entry: (ranks[entry.site], _PASS_OF[entry.code & CODE_MASK]))
        given = {id(row): row for entry in listed for row in (entry.read, entry.write) if row is not None}
        size = max(map(len, given.values()), default=0) * STORAGE[dtype].itemsize
        found: dict[bytes, int] = {}
        numbers = {
            key: found.setdefault(_as_stored(row, dtype).tobytes().ljust(size, b"\0"), len(found) + 1)
            for key, row in given.items()
        }
        numbers[id(None)] = NO_ROW
        codes = [(one.code, numbers[id(one.read)], numbers[id(one.write)], one.group) for one in listed]
        params = [(*one.params, *_NO_PARAMS[len(one.params) :]) for one in listed]
        rows = np.frombuffer(b"".join(found), STORAGE[dtype]).reshape(len(found), -1)
        sites = tuple([entry.site for entry in listed])
        return _make(sites, np.array(codes, np.int32), np.array(params, np.float32), rows, dtype, tuple(groups))

    @property
    def num_changes(self) -> int:
        """Changes of features that are read at one site and written at others; their indices are below it."""
        if _READ_FEATURE not in self.kinds:
            return 0
        codes = self.codes[:, CODE]
        read = codes[codes & CODE_MASK == _READ_FEATURE].tolist()
        return max(map(change_index, read), default=-1) + 1

    @property
    def has_gates(self) -> bool:
        """Whether gates are evaluated."""
        return _GATE in self.kinds

    @property
    def is_decided_at_prompt_end(self) -> bool:
        """Whether a gate is 0 on rows before the last one of the prompt."""
        return _GATE in self.kinds and any(
            code & CODE_MASK == _GATE and code & _FROM_PROMPT_END for code in self.codes[:, CODE].tolist()
        )

    @property
    def num_rows(self) -> int:
        """Slots of the vector pool that the program needs."""
        return len(self.rows)

    @property
    def reconstructs(self) -> bool:
        """Whether rows become reconstructions of an SAE; that has no scale."""
        return _RECONSTRUCT in self.kinds

    @property
    def written_features(self) -> dict[int, tuple[Site, bytes]]:
        """Site and row of each entry of a feature that writes a row other than zero, by the index of the entry.

        They identify the feature: a feature is not written twice at a site.
        """
        return {index: (site, self.rows[row].tobytes()) for index, (site, row) in self.written_rows.items()}

    @property
    def written_rows(self) -> dict[int, tuple[Site, int]]:
        """Site and row's index of each entry of a feature that writes a row other than zero, by the entry's index."""
        if not self.changes_features:
            return {}
        kinds = self.codes[:, CODE] & CODE_MASK
        (found,) = np.nonzero((kinds >= _FEATURE) & (kinds <= _WRITE_FEATURE) & (self.codes[:, WRITE] != NO_ROW))
        rows = self.codes[found, WRITE] - 1
        is_zero: BoolArray = np.logical_not(self.rows[rows, :_HEAD].any(axis=1))
        is_zero[is_zero] = np.logical_not(self.rows[rows[is_zero]].any(axis=1))
        pairs = zip(found.tolist(), rows.tolist(), is_zero.tolist(), strict=True)
        return {index: (self.sites[index], row) for index, row, is_nothing in pairs if not is_nothing}

    @property
    def changes_features(self) -> bool:
        """Whether features of SAEs are changed."""
        return bool(self.kinds & _FEATURES)

    def scaled(self, scale: float) -> Program | None:
        """Return the program with `scale` times its effect; None for 0.

        An operation that keeps the norm is scaled before the norm is restored. A reconstruction has no scale: programs
        with one are refused any but 0 and 1 before.
        """
        if scale == 1:
            return self
        if scale == 0:
            return None
        params = self.params.copy()
        for index, code in enumerate((self.codes[:, CODE] & CODE_MASK).tolist()):
            params[index, list(_WEIGHTS[code])] *= np.float32(scale)
        return _make(self.sites, self.codes, params, self.rows, self.dtype, self.groups)

    def to_wire(self) -> ProgramWire:
        """Return plain values that `from_wire` reads back; arrays are raw bytes."""
        return {
            "sites": [(site.layer, site.hook.value, count) for site, count in self.runs],
            "codes": self.codes.tobytes(),
            "params": self.params.tobytes(),
            "rows": self.rows.tobytes(),
            "dtype": self.dtype,
            "groups": [group.to_wire() for group in self.groups],
            "key": self.key,
        }

    @classmethod
    def from_wire(cls, wire: ProgramWire) -> Program:
        """Return the program that `to_wire` wrote; its arrays are views of the received bytes."""
        codes = np.frombuffer(wire["codes"], np.int32).reshape(-1, NUM_CODES)
        num_rows = int(codes[:, READ : WRITE + 1].max())
        sites, runs = _sites_of(tuple([tuple(run) for run in wire["sites"]]))
        return cls(
            sites=sites,
            runs=runs,
            codes=codes,
            params=np.frombuffer(wire["params"], np.float32).reshape(-1, NUM_PARAMS),
            rows=np.frombuffer(wire["rows"], STORAGE[wire["dtype"]]).reshape(num_rows, -1),
            dtype=wire["dtype"],
            groups=tuple(selector_from_wire(group) for group in wire["groups"]),
            key=wire["key"],
        )


@lru_cache(maxsize=256)
def _sites_of(named: tuple[tuple[int, str, int], ...]) -> tuple[tuple[Site, ...], Runs]:
    """Return the site of each entry, and the runs; cached, since most requests of a load steer the same ones."""
    runs = tuple((Site(layer, HookPoint(hook)), count) for layer, hook, count in named)
    return tuple(chain.from_iterable((site,) * count for site, count in runs)), runs


def joined(programs: Sequence[Program]) -> Program:
    """Return one program that does what `programs`, at least one, do one after the other.

    All replacements act first, and all features last.

    Raises:
        AssertionError: If their dtypes differ, or if they have more than `MAX_GROUPS` position groups.
    """
    first = programs[0]
    if len(programs) == 1:
        return first
    entries: list[Entry] = []
    groups: list[PositionSelector] = []
    num_changes = 0
    for program in programs:
        if program.dtype != first.dtype:
            raise AssertionError(f"programs of {program.dtype} and {first.dtype}")
        entries.extend(moved(entries_of(program), len(groups), num_changes))
        groups.extend(program.groups)
        num_changes += program.num_changes
    return Program.from_entries(entries, first.dtype, groups)


def entries_of(program: Program) -> list[Entry]:
    """Return the entries of a program."""
    rows = [None, *program.rows]
    return [
        Entry(site, code, rows[read], rows[write], params, group)
        for site, (code, read, write, group), params in zip(
            program.sites, program.codes.tolist(), program.params.tolist(), strict=True
        )
    ]


def moved(entries: Sequence[Entry], first_group: int, first_change: int) -> Sequence[Entry]:
    """Return entries with their groups and changes counted after `first_group` and `first_change` others."""
    if not first_group and not first_change:
        return entries
    return [
        entry._replace(
            code=_moved(entry.code, first_change),
            group=entry.group + first_group if entry.group & GROUP_MASK else entry.group,
        )
        for entry in entries
    ]


def _as_stored(row: npt.NDArray[Any], dtype: StoredType) -> Rows:
    """Return a row of an entry as it is stored."""
    return row if row.dtype == STORAGE[dtype] and dtype != "float32" else round_to(row, dtype)


def _moved(code: int, first_change: int) -> int:
    """Return an entry's code with its change, if it has one, counted after `first_change` others."""
    if code & CODE_MASK in (Code.READ_FEATURE, Code.WRITE_FEATURE):
        return with_change(code, change_index(code) + first_change)
    return code


def _make(
    sites: tuple[Site, ...],
    codes: Int32Array,
    params: Float32Rows,
    rows: Rows,
    dtype: StoredType,
    groups: tuple[PositionSelector, ...],
) -> Program:
    runs = tuple([(site, len(list(entries))) for site, entries in groupby(sites)])
    names = " ".join([" ".join([site.name] * count) for site, count in runs])
    about = f"{dtype} {rows.shape} {names} {[group.to_wire() for group in groups]}\n"
    for array in (codes, params, rows):
        array.flags.writeable = False
    digest = hashlib.sha256(b"".join((_PREFIX, about.encode(), codes.data, params.data)))
    digest.update(rows.data)
    key = digest.digest()
    return Program(sites=sites, codes=codes, params=params, rows=rows, dtype=dtype, groups=groups, key=key, runs=runs)


MAX_KEPT_BYTES = 64 << 20
"""Programs of one kind that an engine core keeps: some 400 of 16 features of a model of width 2560."""


def bytes_of(*programs: Program) -> int:
    """Return the bytes of programs; one that comes twice counts once."""
    each = {id(program): program for program in programs}.values()
    return sum(array.nbytes for program in each for array in (program.rows, program.codes, program.params))
