"""Calls of the engine cores about probes: register, forget and list them. No transport."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headgate.capture.engine.contracts.request_part import CoreCall, Operation
from headgate.capture.probes.probe import Probe, ProbeError
from headgate.capture.schema.errors import RequestError, shown
from headgate.steering.control.operations import agreed, with_actor
from headgate.steering.core.audit import OPERATOR, Actor
from headgate.steering.core.probes import check_fits, open_probe
from headgate.steering.probes.wire import to_wire
from headgate.steering.requests.probe_fields import read_probe
from headgate.steering.vectors.phase_vectors import Steerable, check_name

ProbeSource = Probe | str | os.PathLike[str] | Mapping[str, Any]
"""A probe, a file of one, or a document of its fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeStatus:
    """A registered probe.

    Attributes:
        name: Its name in gates.
        at: The site that it reads.
        kind: ``linear``, ``cosine`` or ``mlp``.
        classes: A name for each of its scores.
        hidden_size: Values of a row.
        threshold: Of its score, if one was chosen.
        pooling: The rows that it was made for: ``token``, ``last_prompt`` or ``prompt_mean``.
        model: That it was made for, if known.
        metadata: About how it was made.
        sha256: Hex, of its content.
    """

    name: str
    at: str
    kind: str
    classes: tuple[str, ...]
    hidden_size: int
    threshold: float | None
    pooling: str
    model: str | None
    metadata: Mapping[str, str]
    sha256: str

    @classmethod
    def from_plain(cls, described: Mapping[str, Any]) -> ProbeStatus:
        """Make it from an engine core's description, which may say more."""
        values = {field.name: described[field.name] for field in fields(cls)}
        return cls(**{**values, "classes": tuple(described["classes"])})


def register_probe(
    name: str, source: ProbeSource, steerable: Steerable, num_engines: int, by: Actor = OPERATOR
) -> Operation[ProbeStatus]:
    """Register a probe; an earlier one of the name is replaced."""
    check_name(name, "name", "a probe")
    wire = to_wire(_read(source, steerable))

    def attempt() -> Operation[ProbeStatus]:
        undo: tuple[str, Mapping[str, Any]] = ("unregister_probe", with_actor(by.undo(None), name=name))
        if num_engines > 1 and (again := (yield from _restoring(name, by))) is not None:
            undo = again
        answers = yield CoreCall(method="register_probe", args=with_actor(by, name=name, probe=wire), undo=undo)
        return ProbeStatus.from_plain(answers[0])

    return (yield from agreed(attempt, num_engines))


def unregister_probe(name: str, num_engines: int, by: Actor = OPERATOR) -> Operation[ProbeStatus]:
    """Forget a probe."""
    check_name(name, "name", "a probe")
    undo = (yield from _restoring(name, by)) if num_engines > 1 else None
    answers = yield CoreCall(method="unregister_probe", args=with_actor(by, name=name), undo=undo)
    return ProbeStatus.from_plain(answers[0])


def probes() -> Operation[dict[str, ProbeStatus]]:
    """Ask for the registered probes, by name."""
    answers: Sequence[Sequence[Mapping[str, Any]]] = yield CoreCall(method="probes", args={})
    return {found["name"]: ProbeStatus.from_plain(found) for found in answers[0]}


def _restoring(name: str, by: Actor) -> Operation[tuple[str, Mapping[str, Any]] | None]:
    """Make the call that registers a probe again as it is now, for its client; None if there is none."""
    (earlier, *_) = yield CoreCall(method="export_probe", args={"name": name})
    if earlier is None:
        return None
    (owner, *_) = yield CoreCall(method="owner", args={"name": name, "of": "probe"})
    return "register_probe", with_actor(by.undo(owner), name=name, probe=earlier)


def _read(source: ProbeSource, steerable: Steerable) -> Probe:
    if isinstance(source, str | os.PathLike):
        try:
            return open_probe(Path(source), steerable)
        except (ProbeError, OSError) as error:
            raise RequestError("path", str(error)) from error
    if not isinstance(source, Probe | Mapping):
        raise RequestError("probe", f"expected a Probe, a path or an object of its fields, got {shown(source)}")
    probe = source if isinstance(source, Probe) else read_probe(source, steerable.hidden_size)
    try:
        check_fits(probe, steerable)
    except ProbeError as error:
        raise RequestError(error.field or "probe", error.message) from error
    return probe
