"""``threshold``: turns a module on while the moving average of a score is above a threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from headgate.steering.controllers.actions import Action, SetGlobal, SetSteering
from headgate.steering.controllers.controller import Controller, ReadRow, RequestView, StepReadings
from headgate.steering.probes.files import load
from headgate.steering.probes.probe import Probe, ProbeError


@dataclass(slots=True)
class _Followed:
    """A request: the average of its scores, None before the first; whether it is engaged; the scale that it has."""

    average: float | None = None
    is_engaged: bool = False
    scale: float = 0.0


class ThresholdController(Controller):
    """Engages when the average reaches `threshold`, and disengages when it falls below ``threshold - hysteresis``.

    Args:
        probe: Path of the probe's file.
        module: Name of the registered module to turn on.
        threshold: Of the average; the probe's own if None.
        hysteresis: Not negative.
        ema_alpha: Weight of each row in the average, in (0, 1]; the first row seeds it.
        gain: Scale of the module while engaged; 0 only watches (shadow mode).
        gain_mode: ``binary``: `gain` while engaged. ``proportional``: ``gain * clip((average - (threshold -
            hysteresis)) / max(hysteresis, 1e-8), 0, 1)`` while engaged.
        actuation: ``per_request``: each request by its own scores. ``global``: all requests, while any is engaged.
        min_emit_delta: The scale changes by so much at least, unless it becomes 0.
        prime: The rows of the prompt count, too; then prompts are not read from the prefix cache.

    Raises:
        ValueError: If an argument is out of range.
        ProbeError: If the probe cannot be read.
    """

    def __init__(
        self,
        *,
        probe: str,
        module: str,
        threshold: float | None = None,
        hysteresis: float = 0.0,
        ema_alpha: float = 0.25,
        gain: float = 1.0,
        gain_mode: Literal["binary", "proportional"] = "binary",
        actuation: Literal["per_request", "global"] = "per_request",
        min_emit_delta: float = 0.05,
        prime: bool = True,
    ) -> None:
        self._probe = load(probe)
        found = self._probe.threshold if threshold is None else threshold
        if found is None:
            raise ProbeError(f"{probe}: the probe has no threshold of its own; give threshold=...")
        _check("hysteresis", hysteresis, hysteresis >= 0, "not negative")
        _check("ema_alpha", ema_alpha, 0 < ema_alpha <= 1, "above 0 and at most 1")
        _check("gain_mode", gain_mode, gain_mode in ("binary", "proportional"), "binary or proportional")
        _check("actuation", actuation, actuation in ("per_request", "global"), "per_request or global")
        self._module, self._threshold, self._hysteresis = module, float(found), float(hysteresis)
        self._alpha, self._gain, self._is_proportional = ema_alpha, float(gain), gain_mode == "proportional"
        self._is_global, self._min_delta = actuation == "global", min_emit_delta
        self.needs_prompts = prime
        self._followed: dict[str, _Followed] = {}
        self._global_scale = 0.0

    def probes(self) -> Mapping[str, Probe]:
        """Return the one probe."""
        return {"score": self._probe}

    def modules(self) -> tuple[str]:
        """Return the module."""
        return (self._module,)

    def request_begins(self, request: RequestView) -> None:
        """Follow a request."""
        self._followed[request.request] = _Followed()

    def request_ends(self, request: RequestView) -> None:
        """Forget a request."""
        self._followed.pop(request.request, None)

    def step(self, readings: StepReadings) -> Iterator[Action]:
        """Update the averages, and change the scales that follow from them."""
        for row in readings.rows():
            if (followed := self._followed.get(row.request)) is not None:
                self._read(followed, row)
        if self._is_global:
            yield from self._act_on_all()
            return
        for request in dict.fromkeys(readings.requests):
            followed = self._followed.get(request)
            if followed is not None and self._is_new(scale := self._scale(followed), followed.scale):
                followed.scale = scale
                yield SetSteering(request, module=self._module, scale=scale)

    def _act_on_all(self) -> Iterator[Action]:
        scale = max((self._scale(each) for each in self._followed.values()), key=abs, default=0.0)
        if self._is_new(scale, self._global_scale):
            self._global_scale = scale
            yield SetGlobal(module=self._module, scale=scale)

    def _read(self, followed: _Followed, row: ReadRow) -> None:
        if row.phase == "prefill" and not self.needs_prompts:
            return
        score, before = row.scores["score"], followed.average
        followed.average = score if before is None else (1 - self._alpha) * before + self._alpha * score
        least = self._threshold - (self._hysteresis if followed.is_engaged else 0.0)
        followed.is_engaged = followed.average >= least

    def _scale(self, followed: _Followed) -> float:
        if not followed.is_engaged or followed.average is None:
            return 0.0
        if not self._is_proportional:
            return self._gain
        over = followed.average - (self._threshold - self._hysteresis)
        return self._gain * min(max(over / max(self._hysteresis, 1e-8), 0.0), 1.0)

    def _is_new(self, scale: float, before: float) -> bool:
        return scale != before and (scale == 0 or abs(scale - before) >= self._min_delta)


def _check(name: str, value: object, is_right: bool, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
