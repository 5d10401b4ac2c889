"""Position selectors as clients write them, and as they travel to the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.positions import NAMED, Indices, Message, Named, PositionSelector, Several, Span
from headgate.capture.schema.selectors.union import MAX_LISTED, MAX_POSITION, NO_END

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
            ``{"role", "index", "start", "stop", "step", "include_generated"}`` for messages of a chat, of which the
            role or the index is required.
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
    """The entries of a list, most of which nothing but numpy looks at: it may be long."""
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
    role, index, generated = raw.get("role"), raw.get("index", -1), raw.get("include_generated", False)
    if role is not None and (not isinstance(role, str) or not role):
        raise RequestError(f"{field}.role", f"expected the role of a message, got {shown(role)}")
    if not isinstance(generated, bool):
        raise RequestError(f"{field}.include_generated", f"expected true or false, got {shown(generated)}")
    number = None if isinstance(index, str) and index == "all" else _integer(index, f"{field}.index")
    return Message(role, number, _parse_span(raw, field), include_generated=generated)


def _integer(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise RequestError(field, f"expected an integer, got {shown(value)}")
    if abs(int(value)) > MAX_POSITION:
        raise RequestError(field, f"{shown(value)} is beyond any context length")
    return int(value)
