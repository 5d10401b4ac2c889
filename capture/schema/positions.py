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

    def wanted(self, num_prompt: int) -> range | tuple[int, ...]:
        """Every wanted position in ascending order: a `range` if they are evenly spaced.

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
        """Plain values that `selector_from_wire` reads back."""
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


@dataclass(frozen=True, slots=True)
class Indices:
    """A list of positions; negative ones count from the end of the prompt until resolved."""

    values: tuple[int, ...]

    def resolve(self, num_prompt: int, field: str) -> Indices:
        low = [value for value in self.values if value < -num_prompt]
        if low:
            raise RequestError(field, f"position {low[0]} lies before the prompt, which has {num_prompt} tokens")
        return Indices(tuple(sorted({v if v >= 0 else v + num_prompt for v in self.values})))

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        return np.isin(positions, np.asarray(self.values, dtype=np.int64))

    def wanted(self, num_prompt: int) -> range | tuple[int, ...]:
        first, last = self.values[0], self.values[-1]
        if first < 0:
            raise AssertionError(f"{self} is not resolved")
        step = self.values[1] - first if len(self.values) > 1 else 1
        spaced = range(first, last + 1, step)
        return spaced if len(spaced) == len(self.values) and tuple(spaced) == self.values else self.values

    def needs_prompt(self, num_prompt: int) -> bool:
        return any(value < num_prompt - 1 for value in self.values)

    def to_wire(self) -> list[int]:
        return list(self.values)


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


def parse_positions(raw: object, field: str) -> PositionSelector:
    """Read a client's position selector.

    Args:
        raw: One of `NAMED`; a non-empty list of ints; ``{"start", "stop", "step"}``; or
            ``{"role": ..., "index": ...}`` for one message of a chat.
        field: Path of `raw` in the client's document, for errors.

    Raises:
        RequestError: If it is none of these.
    """
    if isinstance(raw, str) and raw in NAMED:
        return Named(raw)
    if isinstance(raw, Mapping):
        keys = set(raw)
        if keys and keys <= {"start", "stop", "step"}:
            return _parse_span(raw, field)
        if keys and keys <= {"role", "index"}:
            return _parse_message(raw, field)
    elif isinstance(raw, Sequence) and not isinstance(raw, str | bytes | bytearray) and raw:
        return Indices(tuple(sorted({_integer(value, f"{field}[{i}]") for i, value in enumerate(raw)})))
    raise RequestError(
        field,
        f"unknown selector {shown(raw)}; expected one of {', '.join(NAMED)}, a non-empty list of integers, "
        '{"start", "stop", "step"} or {"role", "index"}',
    )


def selector_from_wire(wire: object) -> PositionSelector:
    """Read what `PositionSelector.to_wire` wrote."""
    return parse_positions(wire, "positions")


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
