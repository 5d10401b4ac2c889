"""Where consumers submit actions, which steer running requests; what they are is the business of the part that acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from headgate.capture.schema.errors import ConsumerError


class ActionSink(Protocol):
    """Takes the actions of one consumer. Any thread."""

    def submit(self, action: object) -> bool:
        """Have the engine do something to a request that runs, soon; see `headgate.steering.controllers.actions`.

        Nothing is waited for. At most `MAX_SUBMITTED` actions of a consumer are on their way; one that comes beyond
        that is dropped, and counted.

        Returns:
            Whether it was taken. The request's trace and ``/metrics`` show the outcome.

        Raises:
            ConsumerError: If this engine takes no actions, or `action` is none.
        """
        ...


MAX_SUBMITTED = 1024
MAX_BYTES = 16 << 20
"""The largest encoded size of one action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionTarget:
    """Where the actions of an engine's consumers go.

    Attributes:
        address: Of the inbox of its engine core; None if it takes none.
        refusal: Why it takes none; raised when one is submitted.
    """

    address: str | None = None
    refusal: str = "no engine is behind this consumer"


NOWHERE = ActionTarget()


class NoActions:
    """An `ActionSink` that refuses.

    Args:
        refusal: The reason.
    """

    def __init__(self, refusal: str = NOWHERE.refusal) -> None:
        self._refusal = refusal

    def submit(self, action: object) -> bool:
        """See `ActionSink`."""
        raise ConsumerError(f"steering.submit: {self._refusal}")


class Submitted(NamedTuple):
    """An action that came to an engine core.

    Attributes:
        consumer: Instance name of the consumer.
        action: As `encode_action` made it.
        num_dropped: Actions of that consumer that were dropped before it.
    """

    consumer: str
    action: bytes
    num_dropped: int


MakeSink = Callable[[str], ActionSink]
"""Makes the sink of a consumer, by its instance name."""


def encode_action(action: object) -> bytes:
    """Return an action as msgpack: the name of its class, and its fields.

    Arrays and tensors become lists of numbers.

    Raises:
        ConsumerError: If it is no action, or has something in it that cannot be sent, or is too large.
    """
    if not dataclasses.is_dataclass(action) or isinstance(action, type):
        raise ConsumerError(
            f"steering.submit: expected an action of headgate.steering.controllers, got {type(action).__name__}"
        )
    fields = {field.name: getattr(action, field.name) for field in dataclasses.fields(action)}
    try:
        encoded = msgspec.msgpack.encode([type(action).__name__, fields], enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConsumerError(f"steering.submit: {type(action).__name__} cannot be sent: {error}") from error
    if len(encoded) > MAX_BYTES:
        raise ConsumerError(
            f"steering.submit: {type(action).__name__} takes {len(encoded)} bytes, at most {MAX_BYTES} may; register "
            "its vectors as a module, and name that"
        )
    return encoded


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor, on whatever device
        value = value.detach()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is neither plain nor an array")
