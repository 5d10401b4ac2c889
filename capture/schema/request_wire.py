"""The form in which a request travels from the front end that checked and resolved it to engine core and workers.

Plain values and bytes only. Long bytes are `headgate.capture.engine.core.frames.Frame`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

WIRE_VERSION = 1
"""Of the `RequestWire`."""


class SpecWire(TypedDict):
    """A `CaptureSpec` as plain values.

    Attributes:
        sites: ``{hook: [layers]}``.
        positions: The selector, as clients write it.
        options: The consumer's own.
    """

    sites: dict[str, list[int]]
    positions: object
    options: dict[str, Any]


class CaptureWire(TypedDict):
    """Specs of a request that captures, and the way back for its results.

    Attributes:
        id: The client's request id.
        n: Samples of the prompt.
        key: Random; results carry it.
        reply: Address of the front end's result hub; None if nobody waits.
        wait: Whether the client waits for its results.
        specs: By consumer instance.
    """

    id: str
    n: int
    key: str
    reply: str | None
    wait: bool
    specs: dict[str, SpecWire]


class RequestWire(TypedDict, total=False):
    """A request's fields, checked and resolved, as the engine gets them.

    Attributes:
        v: `WIRE_VERSION`; always there.
        capture: If it captures.
        parts: Of every other part that it asks something of, by its section.
    """

    v: int
    capture: CaptureWire
    parts: dict[str, Mapping[str, Any]]
