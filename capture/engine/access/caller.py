"""The client behind the HTTP call at hand: its key, and what was counted for it."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.engine.access.usage import Usage


@dataclass(frozen=True, slots=True)
class Caller:
    """A client that has shown a key.

    Attributes:
        key: The key.
        usage: Counts what it captures.
    """

    key: AccessKey
    usage: Usage


_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("headgate_caller", default=None)


def current_caller() -> Caller | None:
    """The client whose call this task handles; None without keys, and where no client is: `LLM`, `AsyncLLM`."""
    return _caller.get()


def set_caller(caller: Caller | None) -> None:
    """Let this task handle a call of `caller`."""
    _caller.set(caller)
