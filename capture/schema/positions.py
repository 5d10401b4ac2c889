"""Selectors of the positions of a request: parsed once in the front end (`selectors.parsing`), then only evaluated.

A position is the absolute token index in prompt + output, 0-based. The forward of the token at position p
gives row p; the last sampled token is never forwarded and has no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.selectors.union import NO_END, evenly_spaced, unite

NAMED = ("last_prompt", "all_prompt", "all_generated", "all")
MAX_DESCRIBED = 64
"""Positions of a list that are written out where a selector is described."""


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
            return range(NO_END)
        if self.name == "all_prompt":
            return range(num_prompt)
        if self.name == "all_generated":
            return range(num_prompt, NO_END)
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
        if values[0] < 0:
            raise AssertionError(f"{self.described()} is not resolved")
        spaced = evenly_spaced(values)
        return values if spaced is None else spaced

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
        return range(self.start, NO_END if self.stop is None else self.stop, self.step)

    def needs_prompt(self, num_prompt: int) -> bool:
        return self.start < num_prompt - 1

    def to_wire(self) -> dict[str, int | None]:
        return {"start": self.start, "stop": self.stop, "step": self.step}

    def described(self) -> dict[str, int | None]:
        return self.to_wire()


@dataclass(frozen=True, slots=True)
class Message:
    """Tokens of one message of a chat, or of several; the front end replaces it before the request leaves.

    Attributes:
        role: Only messages of this role are counted; None counts all.
        index: Which of them, negative from the last; None for each of them.
        part: Which tokens of a message, as a slice of a sequence is taken.
        include_generated: The generated positions, too.
    """

    role: str | None
    index: int | None
    part: Span = Span()
    include_generated: bool = False

    def within(self, messages: Sequence[Span], field: str) -> PositionSelector:
        """Select of messages that begin and end at the absolute positions of `messages`.

        Raises:
            RequestError: If that selects nothing of any of them.
        """
        part = slice(self.part.start, self.part.stop, self.part.step)
        chosen = [range(span.start, NO_END if span.stop is None else span.stop)[part] for span in messages]
        spans = tuple(Span(found.start, found.stop, found.step) for found in chosen if found)
        if not spans:
            lengths = ", ".join(str(len(range(span.start, span.stop or NO_END))) for span in messages)
            raise RequestError(field, f"selects no position: the tokens of the messages that it means are {lengths}")
        if len(spans) == 1 and not self.include_generated:
            return spans[0]
        return Several((*spans, Named("all_generated")) if self.include_generated else spans)

    def resolve(self, num_prompt: int, field: str) -> PositionSelector:
        raise RequestError(field, "a message selector needs a chat request (LLM.chat or /v1/chat/completions)")

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        raise AssertionError("a message selector is resolved to a span in the front end")

    def wanted(self, num_prompt: int) -> range:
        raise AssertionError("a message selector is resolved to a span in the front end")

    def needs_prompt(self, num_prompt: int) -> bool:
        return True

    def to_wire(self) -> dict[str, Any]:
        part = {} if self.part == Span() else self.part.to_wire()
        generated = {"include_generated": True} if self.include_generated else {}
        return {"role": self.role, "index": "all" if self.index is None else self.index, **part, **generated}

    def described(self) -> dict[str, Any]:
        return self.to_wire()


@dataclass(frozen=True, slots=True)
class Several:
    """The positions that any of several selectors selects.

    Resolved, its parts have no position in common: one without an end, if there is any, and one before that.

    Attributes:
        parts: At least one.
    """

    parts: tuple[PositionSelector, ...]

    def resolve(self, num_prompt: int, field: str) -> PositionSelector:
        resolved = [part.resolve(num_prompt, f"{field}[{index}]") for index, part in enumerate(self.parts)]
        chosen = [part.wanted(num_prompt) for one in resolved for part in parts_of(one)]
        united = [each for each in unite(chosen, field) if each is not None]
        return _selector(united[0]) if len(united) == 1 else Several(tuple(map(_selector, united)))

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        chosen: BoolArray = np.any([part.mask(positions, num_prompt) for part in self.parts], axis=0)
        return chosen

    def wanted(self, num_prompt: int) -> range | Int64Array:
        raise AssertionError("ask each of parts_of(selector)")

    def needs_prompt(self, num_prompt: int) -> bool:
        return any(part.needs_prompt(num_prompt) for part in self.parts)

    def to_wire(self) -> list[object]:
        return [part.to_wire() for part in self.parts]

    def described(self) -> list[object]:
        return [part.described() for part in self.parts]


def parts_of(selector: PositionSelector) -> tuple[PositionSelector, ...]:
    """Return selectors that together select the same; of a resolved one, no position twice."""
    return selector.parts if isinstance(selector, Several) else (selector,)


def _selector(wanted: range | Int64Array) -> PositionSelector:
    if isinstance(wanted, range):
        return Span(wanted.start, None if wanted.stop == NO_END else wanted.stop, wanted.step)
    return Indices.of(wanted)
