"""Selectors of the positions of a request: parsed once in the front end, then only evaluated.

A position is the absolute token index in prompt + output, 0-based. The forward of the token at position p
gives row p; the last sampled token is never forwarded and has no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import RequestError, shown

NAMED = ("last_prompt", "all_prompt", "all_generated", "all")
MAX_POSITION = 2**31 - 1
MAX_LISTED = 1 << 15
"""Positions in one list. Reading so many takes the front end's event loop 2 to 4 ms, in whatever order they are."""
MAX_DESCRIBED = 64
"""Positions of a list that are written out where a selector is described."""
_NO_END = MAX_POSITION + 1


class PositionSelector(Protocol):
    """A parsed selector. Selectors are frozen and hashable: equal ones share one plan."""

    def resolve(self, num_prompt: int, field: str) -> PositionSelector:
        """Return the selector with every position absolute, now that the prompt's length is known.

        Raises:
            RequestError: If it can select nothing of a prompt of that length.
        """
        ...

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        """Which of `positions` are wanted; `num_prompt` is the prompt length of each one's request.

        Only for resolved selectors.
        """
        ...

    def wanted(self, num_prompt: int) -> range | Int64Array:
        """Every wanted position in ascending order: a `range` if they are evenly spaced, else int64, read-only.

        One without an end, which goes on into the generated positions, stops above `MAX_POSITION`.
        Only for resolved selectors; it agrees with `mask`.
        """
        ...

    def needs_prompt(self, num_prompt: int) -> bool:
        """Whether a prompt position other than the last is wanted.

        Such rows must be computed, so the request cannot read them from the prefix cache.
        """
        ...

    def to_wire(self) -> object:
        """Plain values and bytes that `selector_from_wire` reads back."""
        ...

    def described(self) -> object:
        """JSON values for people: as the client wrote it, but without long lists."""
        ...


@dataclass(frozen=True, slots=True)
class Named:
    """``last_prompt``, ``all_prompt``, ``all_generated`` or ``all``."""

    name: str

    def resolve(self, num_prompt: int, field: str) -> Named:
        return self

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        if self.name == "all":
            return np.ones(len(positions), dtype=np.bool_)
        if self.name == "all_prompt":
            return positions < num_prompt
        if self.name == "all_generated":
            return positions >= num_prompt
        return np.equal(positions, num_prompt - 1)

    def wanted(self, num_prompt: int) -> range:
        if self.name == "all":
            return range(_NO_END)
        if self.name == "all_prompt":
            return range(num_prompt)
        if self.name == "all_generated":
            return range(num_prompt, _NO_END)
        return range(num_prompt - 1, num_prompt)

    def needs_prompt(self, num_prompt: int) -> bool:
        return self.name in ("all", "all_prompt") and num_prompt > 1

    def to_wire(self) -> str:
        return self.name

    def described(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Indices:
    """A list of positions; negative ones count from the end of the prompt until resolved.

    Attributes:
        data: int64 in the machine's order, ascending, each once; at least one. Bytes, since a list may be long: nothing
            but numpy walks through it, and it travels as it is.
    """

    data: bytes

    @classmethod
    def of(cls, values: Int64Array | Sequence[int]) -> Indices:
        """Make a selector of positions in any order."""
        ordered = np.asarray(values, dtype=np.int64)
        if not (ordered[1:] > ordered[:-1]).all():
            ordered = np.sort(ordered)
            ordered = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
        return cls(ordered.tobytes())

    @property
    def values(self) -> Int64Array:
        """The positions: int64, ascending, read-only."""
        return np.frombuffer(self.data, dtype=np.int64)

    def resolve(self, num_prompt: int, field: str) -> Indices:
        values = self.values
        if values[0] >= 0:
            return self
        if values[0] < -num_prompt:
            raise RequestError(field, f"position {values[0]} lies before the prompt, which has {num_prompt} tokens")
        absolute = np.where(values < 0, values + num_prompt, values)
        return Indices.of(np.sort(absolute, kind="stable"))  # two ascending parts, which it merges

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        values = self.values
        found: BoolArray = values[np.minimum(np.searchsorted(values, positions), len(values) - 1)] == positions
        return found

    def wanted(self, num_prompt: int) -> range | Int64Array:
        values = self.values
        first, last = int(values[0]), int(values[-1])
        if first < 0:
            raise AssertionError(f"{self.described()} is not resolved")
        step = int(values[1]) - first if len(values) > 1 else 1
        spaced = range(first, last + 1, step)
        is_spaced = len(spaced) == len(values) and spaced[-1] == last and bool((np.diff(values) == step).all())
        return spaced if is_spaced else values

    def needs_prompt(self, num_prompt: int) -> bool:
        return int(self.values[0]) < num_prompt - 1

    def to_wire(self) -> bytes:
        return self.data

    def described(self) -> list[int] | dict[str, int]:
        values = self.values
        if len(values) <= MAX_DESCRIBED:
            return [int(value) for value in values]
        return {"num_listed": len(values), "first": int(values[0]), "last": int(values[-1])}


@dataclass(frozen=True, slots=True)
class Span:
    """``start``, ``start + step``, ... below ``stop``; negative bounds count from the end of the prompt.

    Attributes:
        start: First position *(inclusive)*.
        stop: End *(exclusive)*; None for no end, generated positions included.
        step: Distance, at least 1.
    """

    start: int = 0
    stop: int | None = None
    step: int = 1

    def resolve(self, num_prompt: int, field: str) -> Span:
        if self.start >= 0 and (self.stop is None or self.stop > self.start):
            return self
        start = self.start if self.start >= 0 else max(self.start + num_prompt, 0)
        stop = self.stop
        if stop is not None and stop < 0:
            stop = max(stop + num_prompt, 0)
        if stop is not None and start >= stop:
            raise RequestError(
                field, f"selects no position: start {start} is not below stop {stop} (prompt: {num_prompt})"
            )
        return Span(start, stop, self.step)

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        chosen: BoolArray = (positions >= self.start) & ((positions - self.start) % self.step == 0)
        return chosen if self.stop is None else chosen & (positions < self.stop)

    def wanted(self, num_prompt: int) -> range:
        if self.start < 0 or (self.stop is not None and self.stop < 0):
            raise AssertionError(f"{self} is not resolved")
        return range(self.start, _NO_END if self.stop is None else self.stop, self.step)

    def needs_prompt(self, num_prompt: int) -> bool:
        return self.start < num_prompt - 1

    def to_wire(self) -> dict[str, int | None]:
        return {"start": self.start, "stop": self.stop, "step": self.step}

    def described(self) -> dict[str, int | None]:
        return self.to_wire()


@dataclass(frozen=True, slots=True)
class Message:
    """All tokens of one message of a chat; the front end replaces it by a `Span` before the request leaves.

    Attributes:
        role: Only messages of this role are counted; None counts all.
        index: Which of them, negative from the last.
    """

    role: str | None
    index: int

    def resolve(self, num_prompt: int, field: str) -> PositionSelector:
        raise RequestError(field, "a message selector needs a chat request (LLM.chat or /v1/chat/completions)")

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        raise AssertionError("a message selector is resolved to a span in the front end")

    def wanted(self, num_prompt: int) -> range:
        raise AssertionError("a message selector is resolved to a span in the front end")

    def needs_prompt(self, num_prompt: int) -> bool:
        return True

    def to_wire(self) -> dict[str, str | int | None]:
        return {"role": self.role, "index": self.index}

    def described(self) -> dict[str, str | int | None]:
        return self.to_wire()


def parse_positions(raw: object, field: str, context_length: int = _NO_END) -> PositionSelector:
    """Read a client's position selector.

    Args:
        raw: One of `NAMED`; a non-empty list of at most `MAX_LISTED` ints; ``{"start", "stop", "step"}``; or
            ``{"role": ..., "index": ...}`` for one message of a chat.
        field: Path of `raw` in the client's document, for errors.
        context_length: Of the model; a list may name no position at or beyond it.

    Raises:
        RequestError: If it is none of these.
    """
    if isinstance(raw, str) and raw in NAMED:
        return Named(raw)
    if isinstance(raw, Mapping):
        keys = set(raw) if len(raw) <= 3 else set()  # a client may send any number
        if keys and keys <= {"start", "stop", "step"}:
            return _parse_span(raw, field)
        if keys and keys <= {"role", "index"}:
            return _parse_message(raw, field)
    elif isinstance(raw, Sequence) and not isinstance(raw, str | bytes | bytearray) and raw:
        return _parse_list(raw, field, context_length)
    raise RequestError(
        field,
        f"unknown selector {shown(raw)}; expected one of {', '.join(NAMED)}, a non-empty list of integers, "
        '{"start", "stop", "step"} or {"role", "index"}',
    )


def selector_from_wire(wire: object) -> PositionSelector:
    """Read what `PositionSelector.to_wire` wrote; long lists are neither copied nor checked again."""
    return Indices(wire) if isinstance(wire, bytes) else parse_positions(wire, "positions")


def _parse_list(raw: Sequence[object], field: str, context_length: int) -> Indices:
    if len(raw) > MAX_LISTED:
        raise RequestError(
            field,
            f"lists {len(raw)} positions, at most {MAX_LISTED} can be; select evenly spaced ones with "
            '{"start", "stop", "step"}',
        )
    values = _int64(raw, field)
    is_wrong = (values <= -_NO_END) | (values >= context_length)
    if is_wrong.any():
        _listed(raw, int(is_wrong.argmax()), field, context_length)
    return Indices.of(values)


def _int64(raw: Sequence[object], field: str) -> Int64Array:
    """The entries of a list, most of which nothing but numpy looks at: it may be long."""
    if set(map(type, raw)) != {int}:
        raw = [value if type(value) is int else _listed(raw, index, field) for index, value in enumerate(raw)]
    try:
        return np.array(raw, dtype=np.int64)
    except OverflowError:
        for index in range(len(raw)):
            _listed(raw, index, field)
        raise


def _listed(raw: Sequence[object], index: int, field: str, context_length: int = _NO_END) -> int:
    """One entry of a list; the text of its field is made for an error alone."""
    value = raw[index]
    if type(value) is not int or not -_NO_END < value < context_length:
        value = _integer(value, f"{field}[{index}]")
        if value >= context_length:
            raise RequestError(f"{field}[{index}]", f"{value} is beyond the context of {context_length} tokens")
    return value


def _parse_span(raw: Mapping[str, Any], field: str) -> Span:
    start, stop, step = raw.get("start"), raw.get("stop"), raw.get("step")
    span = Span(
        0 if start is None else _integer(start, f"{field}.start"),
        None if stop is None else _integer(stop, f"{field}.stop"),
        1 if step is None else _integer(step, f"{field}.step"),
    )
    if span.step < 1:
        raise RequestError(f"{field}.step", f"must be at least 1, got {span.step}")
    if span.stop is not None and (span.start < 0) == (span.stop < 0) and span.start >= span.stop:
        raise RequestError(field, f"selects no position: start {span.start} is not below stop {span.stop}")
    return span


def _parse_message(raw: Mapping[str, Any], field: str) -> Message:
    role, index = raw.get("role"), raw.get("index", -1)
    if role is not None and (not isinstance(role, str) or not role):
        raise RequestError(f"{field}.role", f"expected the role of a message, got {shown(role)}")
    return Message(role, _integer(index, f"{field}.index"))


def _integer(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise RequestError(field, f"expected an integer, got {shown(value)}")
    if abs(int(value)) > MAX_POSITION:
        raise RequestError(field, f"{shown(value)} is beyond any context length")
    return int(value)
