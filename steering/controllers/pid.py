"""``pid``: holds the score of a probe at a set point by the scale of a module."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headgate.steering.controllers.actions import Action, SetSteeringEach
from headgate.steering.controllers.controller import StepReadings
from headgate.steering.controllers.one_module import OneModuleController


class PidController(OneModuleController):
    """On each generated row: ``scale = kp * e + ki * sum of e + kd * change of e`` with ``e = setpoint - score``.

    The scale is limited to `min_scale` and `max_scale`; the sum does not grow while it is at a limit and would only be
    driven further beyond it.

    Args:
        probe: Path of the probe's file.
        module: Name of the registered module whose scale is set; positive scales are to raise the score.
        setpoint: The score to hold.
        kp: Proportional gain.
        ki: Integral gain, for each generated row.
        kd: Differential gain, for each generated row.
        min_scale: Least scale.
        max_scale: Largest scale.
        ema_alpha: Weight of each row in the average that stands for the score, in (0, 1]; 1 takes each row by itself.
        min_emit_delta: The scale changes by so much at least.

    Raises:
        ValueError: If an argument is out of range.
        ProbeError: If the probe cannot be read.
    """

    def __init__(
        self,
        *,
        probe: str,
        module: str,
        setpoint: float,
        kp: float = 0.5,
        ki: float = 0.1,
        kd: float = 0.0,
        min_scale: float = -4.0,
        max_scale: float = 4.0,
        ema_alpha: float = 1.0,
        min_emit_delta: float = 0.05,
    ) -> None:
        super().__init__(probe, module, integral=0.0, average=math.nan, scale=0.0)
        if not min_scale <= 0 <= max_scale:
            raise ValueError(f"min_scale, max_scale: expected limits around 0, got {min_scale} and {max_scale}")
        if not 0 < ema_alpha <= 1:
            raise ValueError(f"ema_alpha: expected above 0 and at most 1, got {ema_alpha!r}")
        numbers = {"setpoint": setpoint, "kp": kp, "ki": ki, "kd": kd}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise ValueError(f"{name}: expected a finite number, got {value!r}")
        self._setpoint = setpoint
        self._gains, self._limits = (kp, ki, kd), (min_scale, max_scale)
        self._alpha, self._min_delta = ema_alpha, min_emit_delta

    def step(self, readings: StepReadings) -> Iterator[Action]:
        """Set the scales of the requests that generated a row, one each."""
        scores, slots = readings.scores["score"].astype(np.float64), self._requests.of(readings.requests)
        at = np.flatnonzero(~readings.is_prompt & np.isfinite(scores) & (slots >= 0))
        slots = slots[at]
        scales, known = self._next(slots, scores[at]), self._requests["scale"]
        changed = np.abs(scales - known[slots]) > self._min_delta
        known[slots[changed]] = scales[changed]
        if changed.any():
            requests = [readings.requests[index] for index in at[changed].tolist()]
            yield SetSteeringEach(requests, self._module, scales[changed])

    def _next(self, slots: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scales of loops that read new scores."""
        before = self._requests["average"][slots]
        average = np.where(np.isnan(before), scores, (1 - self._alpha) * before + self._alpha * scores)
        self._requests["average"][slots] = average
        error, integral = self._setpoint - average, self._requests["integral"][slots]
        change = np.where(np.isnan(before), 0.0, before - average)
        (kp, ki, kd), (least, largest) = self._gains, self._limits
        wanted = kp * error + ki * (integral + error) + kd * change
        scales = np.clip(wanted, least, largest)
        is_free = (scales == wanted) | ((wanted - scales) * error * ki < 0)
        self._requests["integral"][slots] = np.where(is_free, integral + error, integral)
        return scales
