"""Actions as capture consumers send them: the name of the class, and its fields, in msgpack. Numpy only."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np

from headgate.steering.controllers.actions import Action, SetGlobal, SetScale, SetSteering, SetSteeringEach, Stop

_KINDS = {kind.__name__: kind for kind in (SetSteering, SetSteeringEach, SetGlobal, SetScale, Stop)}


def read_action(encoded: bytes) -> Action:
    """Return what `headgate.capture.schema.action_sink.encode_action` made of an action.

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
