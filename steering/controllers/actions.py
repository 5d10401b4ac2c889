"""Actions of controllers, and how they are read from msgpack, in which capture consumers send them. Numpy only.

All act on generated positions only, from the first one whose step was not launched yet. What one controller sets on a
request stays until the same controller sets something else there; what several controllers set adds up. Sites that an
action writes at are op sites (``--steering-op-sites``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

GLOBAL = "global"
"""Stands for the operator's global vectors in `SetScale`."""


class _Acting:
    """An action that turns something on: at most one of `module`, `vectors`, `ops` and `features`, times `scale`."""

    __slots__ = ()

    module: str | None
    vectors: Mapping[str, Any] | None
    ops: Sequence[Mapping[str, Any]] | None
    features: Sequence[Mapping[str, Any]] | None
    scale: float

    @property
    def given(self) -> dict[str, Any]:
        """The fields of content that are given."""
        fields = {"module": self.module, "vectors": self.vectors, "ops": self.ops, "features": self.features}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def described(self) -> dict[str, Any]:
        """Plain values for traces, without vectors."""
        named = {"module": self.module} if self.module is not None else dict.fromkeys(self.given)
        return {**named, "scale": float(self.scale)}


@dataclass(frozen=True, slots=True)
class SetSteering(_Acting):
    """Steer one request, in place of what this controller set there before; without content, no more.

    Attributes:
        request: Its id.
        module: Name of a registered module; when its scale alone changes, a number alone travels to the workers.
        vectors: ``{hook: {layer: vector}}``, or packed.
        ops: A list of operations, as `headgate.steering.ops` makes them, none limited to positions.
        features: A list of edits of features of registered SAEs.
        scale: Times the effect of that content.
        compose: Add to the steering that the request has by itself (vectors and modules); if False, act in its place.
    """

    request: str
    module: str | None = None
    vectors: Mapping[str, Any] | None = None
    ops: Sequence[Mapping[str, Any]] | None = None
    features: Sequence[Mapping[str, Any]] | None = None
    scale: float = 1.0
    compose: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class SetSteeringEach:
    """`SetSteering` with one module on several requests, each with a scale of its own: fast where many requests run.

    Attributes:
        requests: Ids; the tuple object of `StepReadings.requests` is the fastest.
        module: Name of a registered module.
        scales: A number for each request, ``[n]``.
        at: The places of these requests among `requests`, int64 ``[n]``, ascending; None for all of them.
    """

    requests: Sequence[str]
    module: str
    scales: npt.NDArray[np.float64]
    at: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.requests if self.at is None else self.at)

    @property
    def named(self) -> Sequence[str]:
        """The request of each scale, ``[n]``."""
        return self.requests if self.at is None else [self.requests[place] for place in self.at.tolist()]

    def each(self) -> Iterator[SetSteering]:
        """Yield the same as actions of one request."""
        for request, scale in zip(self.named, np.asarray(self.scales, np.float64).tolist(), strict=True):
            yield SetSteering(request, module=self.module, scale=scale)


def are_places(at: npt.NDArray[np.int64], num_requests: int) -> bool:
    """Return whether `SetSteeringEach.at`, int64 ``[n]``, are ascending places among so many requests."""
    return not len(at) or bool(at[0] >= 0 and at[-1] < num_requests and not np.count_nonzero(at[1:] <= at[:-1]))


@dataclass(frozen=True, slots=True)
class SetGlobal(_Acting):
    """Steer all requests, later ones too, in place of what this controller set for all; without content, no more.

    Attributes:
        module: As in `SetSteering`, like the next four.
        vectors: Likewise.
        ops: Likewise.
        features: Likewise.
        scale: Likewise.
        phase: ``decode``: actions act on generated positions only.
    """

    module: str | None = None
    vectors: Mapping[str, Any] | None = None
    ops: Sequence[Mapping[str, Any]] | None = None
    features: Sequence[Mapping[str, Any]] | None = None
    scale: float = 1.0
    phase: str = "decode"


@dataclass(frozen=True, slots=True)
class SetScale:
    """Multiply steering that is there without this controller.

    Attributes:
        target: Id of a request: its own vectors and modules. Name of a registered module: wherever requests name it,
            later ones too. `GLOBAL`: the operator's global vectors.
        scale: 1 leaves them as they are, 0 takes them away.
    """

    target: str
    scale: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End a request: its answer has the finish reason ``stop``, and `reason` as its ``stop_reason``."""

    request: str
    reason: str


SingleAction = SetSteering | SetGlobal | SetScale | Stop
Action = SingleAction | SetSteeringEach


def singles(actions: Iterable[Action]) -> Iterator[SingleAction]:
    """Yield actions one by one: those for several requests as what they stand for."""
    for action in actions:
        if isinstance(action, SetSteeringEach):
            yield from action.each()
        else:
            yield action


def described(action: SingleAction) -> dict[str, Any]:
    """Return an action as plain values, as traces have it."""
    if isinstance(action, SetSteering):
        return {"set_steering": action.described, "compose": action.compose}
    if isinstance(action, SetGlobal):
        return {"set_global": action.described}
    if isinstance(action, SetScale):
        return {"set_scale": action.target, "scale": float(action.scale)}
    return {"stop": action.reason}


_KINDS = {kind.__name__: kind for kind in (SetSteering, SetSteeringEach, SetGlobal, SetScale, Stop)}


def read_action(encoded: bytes) -> Action:
    """Return what `headgate.capture.schema.consumer.encode_action` made of an action.

    Raises:
        ValueError: If it is none.
    """
    try:
        name, fields = msgspec.msgpack.decode(encoded, type=tuple[str, dict[str, Any]], strict=False)
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected an action: {error}") from error
    if name not in _KINDS:
        raise ValueError(f"expected one of {', '.join(_KINDS)}, got {name!r}")
    try:
        if name == SetSteeringEach.__name__:
            return _read_each(fields)
        action = cast(Action, msgspec.convert(fields, _KINDS[name]))
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    return action


def _read_each(fields: dict[str, Any]) -> SetSteeringEach:
    requests = msgspec.convert(fields["requests"], list[str])
    at = None if fields.get("at") is None else np.array(fields["at"], np.int64)
    scales = np.array(fields["scales"], np.float64)
    return SetSteeringEach(requests, msgspec.convert(fields["module"], str), scales, at)
