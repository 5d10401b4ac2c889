"""Samples of one prompt travel to an engine core one by one, but what they ask of a part travels there once.

The wire dict of the first sample that goes to an engine core is complete, and is kept there under a key; those of the
others have the key alone, and the engine core puts the kept one in their place before anything looks at it. When the
last sample is on its way, a mark in the list of requests to abort, which keeps the order with everything else, makes
the engine cores forget the key. From then on the samples themselves hold what they share.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from headgate.capture.engine import vllm_names
from headgate.capture.engine.contracts.wire_format import WIRE_KEY, wire_of
from headgate.capture.engine.core.request_ends import mark_sent
from headgate.capture.engine.vllm_types import EngineCoreRequest, Function, RequestType, SendingClient
from headgate.capture.schema.batch import WIRE_VERSION, RequestWire
from headgate.capture.schema.errors import RequestError


class FanOut:
    """The samples of one prompt, on their way to the engine cores of one client.

    Attributes:
        key: Names them in the engine cores.
        engines: Engine cores that have the wire dict; None for the only one.
    """

    def __init__(self) -> None:
        self.key = secrets.token_hex(16)
        self.engines: list[object] = []

    def message(self, request: EngineCoreRequest, engine: object) -> EngineCoreRequest:
        """Return the sample as it is to be sent to `engine`, which is asked for each sample once, in order."""
        params, wire = request.sampling_params, wire_of(request.sampling_params)
        if params is None or not wire or "parts" not in wire:
            return request
        is_first = engine not in self.engines
        if is_first:
            self.engines.append(engine)
        sent = copy.copy(request)
        sent.sampling_params = copy.copy(params)
        shared: RequestWire = {**wire} if is_first else {"v": WIRE_VERSION}
        shared["fan_out"] = (self.key, is_first)
        sent.sampling_params.extra_args = {**(params.extra_args or {}), WIRE_KEY: shared}
        return sent


_fan_out: ContextVar[FanOut | None] = ContextVar("headgate_fan_out", default=None)


def send_input(original: Function) -> Function:
    """Wrap ``_send_input`` of a client: further samples go without what the first one brought."""

    @wraps(original)
    def wrapped(self: object, request_type: RequestType, request: Any, *engine: object) -> object:
        samples = _fan_out.get()
        if samples is not None and request_type.name == "ADD":
            request = samples.message(request, engine[0] if engine else None)
        return original(self, request_type, request, *engine)

    return wrapped


@contextmanager
def fan_out(client: SendingClient, num_samples: int, sent: list[Any] | None = None) -> Iterator[None]:
    """Send what `num_samples` samples share once, until the block ends.

    Args:
        client: Of an `LLM`; one whose engine core is in this process sends nothing.
        num_samples: That the block adds, of one prompt.
        sent: Gets what the client returned for the last messages: those of an `AsyncLLM` are to be awaited.
    """
    if num_samples == 1:
        yield
        return
    samples = FanOut()
    token = _fan_out.set(samples)
    try:
        yield
    finally:
        _fan_out.reset(token)
        released = _release(client, samples)
        if sent is not None:
            sent += released


@asynccontextmanager
async def fan_out_async(client: SendingClient, num_samples: int) -> AsyncIterator[None]:
    """Do as `fan_out` for the client of an `AsyncLLM`."""
    sent: list[Awaitable[object]] = []
    try:
        with fan_out(client, num_samples, sent):
            yield
    finally:
        for each in sent:
            await each


def _release(client: SendingClient, samples: FanOut) -> list[object]:
    """Notify each engine core that all samples are sent; nothing if the engine is dead."""
    if not samples.engines or client.resources.engine_dead:
        return []
    EngineCoreRequestType = vllm_names.ENGINE_CORE_REQUEST_TYPE.get()

    abort = (EngineCoreRequestType.ABORT, [mark_sent(samples.key)])
    return [client._send_input(*abort, *(() if engine is None else (engine,))) for engine in samples.engines]


class SharedWires:
    """The wire dicts that one engine core keeps for samples still to come. Input thread, but for `forget`."""

    def __init__(self) -> None:
        self._kept: dict[str, RequestWire] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def restore(self, wire: RequestWire) -> RequestWire:
        """Return the complete wire dict of a request; that of a sample is one object for all of them.

        Raises:
            RequestError: If what the sample shares is not here.
        """
        if "fan_out" not in wire:
            return wire
        key, is_first = wire["fan_out"]
        if is_first:
            kept: RequestWire = {**wire}
            del kept["fan_out"]
            self._kept[key] = kept
        try:
            return self._kept[key]
        except KeyError:
            raise RequestError("n", "what this sample shares with the first one is lost; send it again") from None

    def forget(self, key: str) -> None:
        """Forget what samples shared, once all are here. Engine thread."""
        self._kept.pop(key, None)
