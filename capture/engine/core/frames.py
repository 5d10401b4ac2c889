"""Long bytes in messages between a front end and its engine cores: each travels in a frame of its own, uncopied.

vLLM's encoder does so with arrays whose place in a message has a type. Bytes it copies into the message, which would be
the event loop's work, and its decoder copies them out again, which holds up the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from pickle import PickleBuffer
from typing import Protocol, SupportsIndex

import msgspec
import numpy as np

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_engine import Function

LONG = 64 << 10
"""Shorter ones stay in the message: ZeroMQ's binding would copy a short frame, too."""
_EXTENSION = 0x68
"""Type of MessagePack extension that stands for a frame in a message: 4 bytes, its number. vLLM's own are 1 to 3."""


class _Coder(Protocol):
    """``MsgpackEncoder`` or ``MsgpackDecoder``: a message's frames."""

    aux_buffers: list[memoryview]


class Frame(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes, ``[n]`` of uint8, that travel in a frame of their own; and that came in one. Read-only."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        # On the way to worker processes: numpy itself copies the data of its subclasses once more.
        return frame_of, (PickleBuffer(self.data) if int(protocol) >= 5 else self.tobytes(),)


def frame_of(data: bytes | bytearray | memoryview) -> Frame:
    """Make a read-only view of a buffer."""
    view = np.frombuffer(data, np.uint8).view(Frame)
    view.flags.writeable = False
    return view


def lift(document: Document) -> dict[str, object]:
    """Copy nested dicts; long bytes become frames."""
    return {name: _lift(value) for name, value in document.items()}


def _lift(value: object) -> object:
    if isinstance(value, bytes):
        return frame_of(value) if len(value) >= LONG else value
    return lift(value) if isinstance(value, Mapping) else value


def enc_hook(original: Function) -> Function:
    """Wrap ``MsgpackEncoder.enc_hook``, which is asked about what MessagePack does not know: send frames as such."""

    @wraps(original)
    def wrapped(self: _Coder, obj: object) -> object:
        if not isinstance(obj, Frame):
            return original(self, obj)
        self.aux_buffers.append(obj.data)
        return msgspec.msgpack.Ext(_EXTENSION, (len(self.aux_buffers) - 1).to_bytes(4, "little"))

    return wrapped


def ext_hook(original: Function) -> Function:
    """Wrap ``MsgpackDecoder.ext_hook``: receive them."""

    @wraps(original)
    def wrapped(self: _Coder, code: int, data: memoryview) -> object:
        number = int.from_bytes(data, "little") if code == _EXTENSION else 0
        # A message of somebody else's may say anything; what is no frame of it is the original's to refuse.
        return frame_of(self.aux_buffers[number]) if 0 < number < len(self.aux_buffers) else original(self, code, data)

    return wrapped
