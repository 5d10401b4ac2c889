"""Selectors of the positions of a request: parsed once in the front end (`parse_positions`), then only evaluated.

A position is the absolute token index in prompt + output, 0-based. The forward of the token at position p
gives row p; the last sampled token is never forwarded and has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import RequestError, read_flag, shown

MAX_POSITION = 2**31 - 1
NO_END = MAX_POSITION + 1
"""The stop of a range that goes on into the generated positions."""

MAX_LISTED = 1 << 15
"""Positions in one list. Reading so many takes the front end's event loop 2 to 4 ms, in whatever order they are."""

Wanted = range | Int64Array
"""Absolute positions, ascending, each once: evenly spaced ones as a range, with `NO_END` for those without an end."""


class Union(NamedTuple):
    """The union of several selections.

    Attributes:
        before: Positions with an end, none of them in `tail`; None if there are none.
        tail: A range without an end; None if there is none.
    """

    before: Wanted | None
    tail: range | None


def unite(chosen: Sequence[Wanted], field: str) -> Union:
    """Return the union of one or more selections.

    Args:
        chosen: At least one position each.
        field: Path of the selectors in the client's document, for errors.

    Raises:
        RequestError: If more than `MAX_LISTED` positions would have to be listed, or if no one range without an end
            says how it goes on.
    """
    tail, finite = _tail_of([each for each in chosen if isinstance(each, range) and each.stop == NO_END], field)
    finite += [each for each in chosen if not (isinstance(each, range) and each.stop == NO_END)]
    runs = _joined([each for each in finite if _is_run(each)])
    others = [each for each in finite if not _is_run(each)]
    if tail is not None and tail.step == 1:
        runs = [range(run.start, min(run.stop, tail.start)) for run in runs if run.start < tail.start]
    if not runs and not others:
        return Union(None, tail)
    is_one = len(runs) == 1 and not others and (tail is None or tail.step == 1)
    before = runs[0] if is_one else _without(_chosen([*runs, *others], field), tail)
    if tail is not None and isinstance(before, range) and _is_followed(before, tail):
        return Union(None, range(before.start, NO_END, tail.step))
    return Union(before, tail)


def evenly_spaced(values: Int64Array) -> range | None:
    """Return ascending positions, at least one, as a range; None if they are not evenly spaced."""
    first, last = int(values[0]), int(values[-1])
    step = int(values[1]) - first if len(values) > 1 else 1
    spaced = range(first, last + 1, step)
    is_spaced = len(spaced) == len(values) and spaced[-1] == last and bool((np.diff(values) == step).all())
    return spaced if is_spaced else None


def _is_run(chosen: Wanted) -> bool:
    return isinstance(chosen, range) and chosen.step == 1


def _is_followed(before: range, tail: range) -> bool:
    """Whether `tail` goes on as `before` ends; a single position has no distance of its own."""
    return before[-1] + tail.step == tail.start and (len(before) == 1 or before.step == tail.step)


def _tail_of(tails: Sequence[range], field: str) -> tuple[range | None, list[Any]]:
    """Return a range without an end, and what comes before it of others that have none."""
    distinct = sorted(set(tails), key=lambda tail: (tail.step, tail.start))
    if not distinct:
        return None, []
    first, *others = distinct
    if first.step > 1 and others:
        raise RequestError(field, "one of several selectors without an end must have step 1")
    earlier = [range(tail.start, first.start, tail.step) for tail in others]
    return first, [tail for tail in earlier if tail]


def _joined(runs: Sequence[Any]) -> list[range]:
    """Consecutive positions as few runs, ascending and apart from each other."""
    joined: list[range] = []
    for run in sorted(runs, key=lambda run: (run.start, run.stop)):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return joined


def _chosen(chosen: Sequence[Wanted], field: str) -> Int64Array:
    num_listed = sum(map(len, chosen))
    if num_listed > MAX_LISTED:
        raise RequestError(
            field, f"the selectors come to {num_listed} positions that are not in one run; at most {MAX_LISTED} can be"
        )
    return np.unique(np.concatenate([np.asarray(each, dtype=np.int64) for each in chosen]))


def _without(values: Int64Array, tail: range | None) -> Wanted | None:
    if tail is not None:
        values = values[(values < tail.start) | ((values - tail.start) % tail.step != 0)]
    if not len(values):
        return None
    spaced = evenly_spaced(values)
    return values if spaced is None else spaced


NAMED: Mapping[str, Callable[[Any], tuple[Any, Any]]] = {
    "last_prompt": lambda num_prompt: (num_prompt - 1, num_prompt),
    "all_prompt": lambda num_prompt: (0, num_prompt),
    "all_generated": lambda num_prompt: (num_prompt, NO_END),
    "all": lambda num_prompt: (0, NO_END),
}
"""Names of runs of positions: the first and the end *(exclusive)*, of a prompt's length or an array of them."""

MAX_DESCRIBED = 64
"""Positions of a list that are written out where a selector is described."""


@runtime_checkable
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


class Named(msgspec.Struct, frozen=True, tag=True):
    """One run of positions by its name, a key of `NAMED`."""

    name: str

    def resolve(self, num_prompt: int, field: str) -> Named:
        return self

    def mask(self, positions: Int64Array, num_prompt: Int64Array) -> BoolArray:
        start, stop = NAMED[self.name](num_prompt)
        chosen: BoolArray = np.greater_equal(positions, start)
        return chosen if stop is NO_END else chosen & (positions < stop)

    def wanted(self, num_prompt: int) -> range:
        return range(*NAMED[self.name](num_prompt))

    def needs_prompt(self, num_prompt: int) -> bool:
        return self.wanted(num_prompt).start < num_prompt - 1

    def to_wire(self) -> str:
        return self.name

    def described(self) -> str:
        return self.name


class Indices(msgspec.Struct, frozen=True, tag=True):
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


class Span(msgspec.Struct, frozen=True, tag=True):
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


class Message(msgspec.Struct, frozen=True, tag=True):
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


class Several(msgspec.Struct, frozen=True, tag=True):
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


Selector = Named | Indices | Span | Message | Several
"""All that implement `PositionSelector`."""


def keys_before(queries: PositionSelector) -> PositionSelector:
    """Select every position up to the last that a selector, resolved or not, selects; of a message up to its end.

    Attention at the selected positions reads the keys of these. Messages of the prompt select all of the prompt.
    """
    if isinstance(queries, Several):
        return Several(tuple(map(keys_before, queries.parts)))
    if isinstance(queries, Named):
        return Named("all") if queries.wanted(1).stop == NO_END else Named("all_prompt")
    if isinstance(queries, Message):
        return Named("all") if queries.include_generated else Named("all_prompt")
    if isinstance(queries, Span):
        return Span(0, queries.stop)
    assert isinstance(queries, Indices)  # noqa: S101  (there is no other selector)
    values = queries.values
    ends = [int(part[-1]) for part in (values[values < 0], values[values >= 0]) if len(part)]
    spans = tuple(Named("all_prompt") if last == -1 else Span(0, last + 1) for last in ends)
    return spans[0] if len(spans) == 1 else Several(spans)


def parts_of(selector: PositionSelector) -> tuple[PositionSelector, ...]:
    """Return selectors that together select the same; of a resolved one, no position twice."""
    return selector.parts if isinstance(selector, Several) else (selector,)


def run_of(selector: PositionSelector, num_prompt: Int64Array) -> tuple[Int64Array, Int64Array] | None:
    """Return the one run that a selector, resolved or not, selects of prompts of several lengths.

    Args:
        selector: Of positions.
        num_prompt: int64 ``[n]``: the lengths.

    Returns:
        Its first positions and ends *(exclusive)*, int64 ``[n]`` each, `NO_END` where it goes on into the answer; the
        run is empty where they are equal or in reverse. None if what it selects is no single run.
    """
    if isinstance(selector, Named):
        bounds: Sequence[Any] = NAMED[selector.name](num_prompt)
    elif isinstance(selector, Span) and selector.step == 1:
        ends = (selector.start, NO_END if selector.stop is None else selector.stop)
        bounds = [np.maximum(bound + num_prompt, 0) if bound < 0 else bound for bound in ends]
    else:
        return None
    start, stop = (np.broadcast_to(np.asarray(bound, np.int64), num_prompt.shape) for bound in bounds)
    return start, stop


def check_known(selected: PositionSelector, num_prompt: int, field: str) -> None:
    """Refuse a resolved selector of some positions of the answer, where a row's position is known after its step.

    Raises:
        RequestError: If it neither stays in the prompt nor goes on through the whole answer.
    """
    for wanted in (part.wanted(num_prompt) for part in parts_of(selected)):
        goes_on = (
            isinstance(wanted, range) and wanted.step == 1 and wanted.start <= num_prompt and wanted.stop == NO_END
        )
        if not goes_on and int(wanted[-1]) >= num_prompt:
            raise RequestError(
                field,
                f"name some positions of the answer, from {num_prompt} on: this engine decodes speculatively, and a "
                "row's position is known only after its step; limit operations to positions of the prompt, or take "
                '"all_generated"',
            )


def _selector(wanted: range | Int64Array) -> PositionSelector:
    if isinstance(wanted, range):
        return Span(wanted.start, None if wanted.stop == NO_END else wanted.stop, wanted.step)
    return Indices.of(wanted)


MAX_SEVERAL = 64
"""Selectors in one list."""

_SPAN = frozenset(("start", "stop", "step"))
_MESSAGE = frozenset((*_SPAN, "role", "index", "include_generated"))


def parse_positions(
    raw: object, field: str, context_length: int = NO_END, *, takes_several: bool = False
) -> PositionSelector:
    """Read a client's position selector.

    Args:
        raw: One of `NAMED`; a non-empty list of at most `MAX_LISTED` ints; ``{"start", "stop", "step"}``; or
            ``{"role", "index", "start", "stop", "step", "include_generated"}`` for messages of a chat; the role or the
            index is required.
        field: Path of `raw` in the client's document, for errors.
        context_length: Of the model; a list may name no position at or beyond it.
        takes_several: A list of at most `MAX_SEVERAL` of the others is read, too: what any of them selects.

    Raises:
        RequestError: If it is none of these.
    """
    if isinstance(raw, str) and raw in NAMED:
        return Named(raw)
    if isinstance(raw, Mapping):
        keys = set(raw) if len(raw) <= len(_MESSAGE) else set()  # a client may send any number
        if keys and keys <= _SPAN:
            return _parse_span(raw, field)
        if keys <= _MESSAGE and not keys.isdisjoint(("role", "index")):
            return _parse_message(raw, field)
    elif isinstance(raw, Sequence) and not isinstance(raw, str | bytes | bytearray) and raw:
        if takes_several and isinstance(raw[0], str | Mapping | Sequence):
            return _parse_several(raw, field, context_length)
        return _parse_list(raw, field, context_length)
    several = ", or a list of these" if takes_several else ""
    raise RequestError(
        field,
        f"unknown selector {shown(raw)}; expected one of {', '.join(NAMED)}, a non-empty list of integers, "
        f'{{"start", "stop", "step"}} or {{"role", "index"}}{several}',
    )


def selector_from_wire(wire: object) -> PositionSelector:
    """Read what `PositionSelector.to_wire` wrote; long lists are neither copied nor checked again."""
    if isinstance(wire, bytes):
        return Indices(wire)
    if isinstance(wire, Sequence) and not isinstance(wire, str):
        return Several(tuple(map(selector_from_wire, wire)))
    return parse_positions(wire, "positions")


def _parse_several(raw: Sequence[object], field: str, context_length: int) -> Several:
    if len(raw) > MAX_SEVERAL:
        raise RequestError(field, f"lists {len(raw)} selectors, at most {MAX_SEVERAL} can be")
    return Several(tuple(parse_positions(one, f"{field}[{n}]", context_length) for n, one in enumerate(raw)))


def _parse_list(raw: Sequence[object], field: str, context_length: int) -> Indices:
    if len(raw) > MAX_LISTED:
        raise RequestError(
            field,
            f"lists {len(raw)} positions, at most {MAX_LISTED} can be; select evenly spaced ones with "
            '{"start", "stop", "step"}',
        )
    values = _int64(raw, field)
    is_wrong = (values <= -NO_END) | (values >= context_length)
    if is_wrong.any():
        _listed(raw, int(is_wrong.argmax()), field, context_length)
    return Indices.of(values)


def _int64(raw: Sequence[object], field: str) -> Int64Array:
    """The entries of a list, mostly looked at by numpy alone: it may be long."""
    if set(map(type, raw)) != {int}:
        raw = [value if type(value) is int else _listed(raw, index, field) for index, value in enumerate(raw)]
    try:
        return np.array(raw, dtype=np.int64)
    except OverflowError:
        for index in range(len(raw)):
            _listed(raw, index, field)
        raise


def _listed(raw: Sequence[object], index: int, field: str, context_length: int = NO_END) -> int:
    """One entry of a list; the text of its field is made for an error alone."""
    value = raw[index]
    if type(value) is not int or not -NO_END < value < context_length:
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
    generated = read_flag(raw.get("include_generated", False), f"{field}.include_generated")
    if role is not None and (not isinstance(role, str) or not role):
        raise RequestError(f"{field}.role", f"expected the role of a message, got {shown(role)}")
    number = None if isinstance(index, str) and index == "all" else _integer(index, f"{field}.index")
    return Message(role, number, _parse_span(raw, field), include_generated=generated)


def _integer(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise RequestError(field, f"expected an integer, got {shown(value)}")
    if abs(int(value)) > MAX_POSITION:
        raise RequestError(field, f"{shown(value)} is beyond any context length")
    return int(value)
