"""From the operator's configuration to controllers: entry points of the group `GROUP`, and their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import msgspec

from headgate.capture.probe import Probe, ProbeError
from headgate.capture.schema.config import parse_pairs
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.controllers.controller import Controller
from headgate.steering.gates.gate import AppliesTo
from headgate.steering.vectors.phase_vectors import check_name

GROUP = "headgate.controllers"
MAX_BUDGET_MS = 1000.0


class ControllerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configured controller.

    Attributes:
        name: Its entry point's name in the group `GROUP`.
        instance_name: Name in traces, metrics and ``steering_rules``; `name` if None. Needed to start one twice.
        applies_to: Whom it reads and may act on, as of a rule: ``all``, or ``opt_in``: requests that name it in
            ``steering_rules``, or ``opt_out``.
        budget_ms: Milliseconds that a step waits for its actions.
        params: Passed to the class.
    """

    name: str
    instance_name: str | None = None
    applies_to: str = AppliesTo.ALL.value
    budget_ms: float = 5.0
    params: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def instance(self) -> str:
        """The name in traces and metrics."""
        return self.instance_name or self.name


_OWN_KEYS = ("instance_name", "applies_to", "budget_ms")


def parse_shorthand(text: str) -> ControllerSpec:
    """Read ``name:key=val,key=val``, as capture's consumers are written; `_OWN_KEYS` are no arguments of the class.

    Raises:
        ConfigError: If it is not of that form.
    """
    name, given = parse_pairs(text, "controller")
    own = {key: given.pop(key) for key in _OWN_KEYS if key in given}
    try:
        spec = msgspec.convert({"name": name, "params": given, **own}, ControllerSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"controller {text!r}: {error}") from error
    check_specs([spec])
    return spec


def check_specs(specs: list[ControllerSpec]) -> None:
    """Check configured controllers, together.

    Raises:
        ConfigError: Naming the one that is wrong.
    """
    known = [each.value for each in AppliesTo]
    for spec in specs:
        try:
            check_name(spec.instance, "name", "a controller")
        except RequestError as error:
            raise ConfigError(f"controller {spec.name!r}: {error}") from error
        if spec.applies_to not in known:
            raise ConfigError(
                f"controller {spec.instance!r}: applies_to: expected one of {', '.join(known)}; got {spec.applies_to!r}"
            )
        if not 0 < spec.budget_ms <= MAX_BUDGET_MS:
            raise ConfigError(
                f"controller {spec.instance!r}: budget_ms: must be above 0 and at most {MAX_BUDGET_MS:g}, got "
                f"{spec.budget_ms}"
            )
    names = [spec.instance for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"controllers: {', '.join(twice)} configured more than once; give each an instance_name")


def load_controller(spec: ControllerSpec) -> Controller:
    """Make a configured controller.

    Raises:
        ConfigError: If there is none of that name, or it cannot be made with these arguments.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if spec.name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigError(
            f"controller {spec.name!r}: no entry point of that name in the group {GROUP!r}; installed: {known}"
        )
    try:
        made = found[spec.name].load()(**spec.params)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in spec.params.items())
        raise ConfigError(
            f"controller {spec.instance!r}: {found[spec.name].value}({given}) failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Controller):
        raise ConfigError(
            f"controller {spec.instance!r}: {found[spec.name].value} made {made!r}, which does not derive from "
            "headgate.steering.controllers.Controller"
        )
    return made


def read_probes(name: str, controller: Controller) -> dict[str, Probe]:
    """Return the probes of a controller, checked.

    Raises:
        ConfigError: If it has none, or one that cannot be read in the forward.
    """
    try:
        found: Mapping[str, Probe] = controller.probes()
    except (OSError, ProbeError, NotImplementedError) as error:
        raise ConfigError(f"controller {name!r}: probes(): {type(error).__name__}: {error}") from error
    if not found:
        raise ConfigError(f"controller {name!r}: probes() returned none; a controller acts on what is read")
    for probe_name, probe in found.items():
        where = f"controller {name!r}: probe {probe_name!r}"
        if not isinstance(probe, Probe):
            raise ConfigError(f"{where}: expected a headgate.steering.controllers.Probe, got {type(probe).__name__}")
        if len(probe.classes) > 1:
            raise ConfigError(f"{where}: a controller reads probes of one class, this has {len(probe.classes)}")
    return dict(found)
