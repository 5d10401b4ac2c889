"""``pid``: holds the score of a probe at a set point by the scale of a module."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headgate.steering.controllers.actions import Action
from headgate.steering.controllers.controller import StepReadings
from headgate.steering.controllers.one_module import OneModuleController, check_finite


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
        check_finite(setpoint=setpoint, kp=kp, ki=ki, kd=kd, min_scale=min_scale, max_scale=max_scale)
        self._setpoint = setpoint
        self._gains, self._limits = (kp, ki, kd), (min_scale, max_scale)
        self._alpha, self._min_delta = ema_alpha, min_emit_delta

    def step(self, readings: StepReadings) -> list[Action]:
        """Set the scales of the requests that generated a row, one each."""
        rows = self._rows(readings)
        scales = self._next(rows.slots, rows.scores)
        changed = np.abs(scales - self._requests["scale"][rows.slots]) > self._min_delta
        return self._set_scales(readings, rows, scales, changed)

    def _next(self, slots: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scales of loops that read new scores."""
        (kp, ki, kd), (least, largest) = self._gains, self._limits
        average, change = self._averaged(slots, scores)
        error = self._setpoint - average
        before_integral = self._requests["integral"][slots]
        integral = before_integral + error
        wanted = kp * error + ki * integral
        if change is not None:
            wanted += kd * change
        scales: npt.NDArray[np.float64] = np.minimum(np.maximum(wanted, least), largest)
        beyond = wanted - scales
        if np.count_nonzero(beyond):
            integral = np.where(beyond * (error * ki) > 0, before_integral, integral)
        self._requests["integral"][slots] = integral
        return scales

    def _averaged(
        self, slots: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]:
        """Return what stands for the scores, and how far it fell, 0 at first; None if no use is made of that."""
        kd = self._gains[2]
        if self._alpha == 1 and not kd:
            return scores, None  # nothing of before is needed
        before = self._requests["average"][slots]
        is_first = np.isnan(before)
        average = scores if self._alpha == 1 else (1 - self._alpha) * before + self._alpha * scores
        average = np.where(is_first, scores, average)
        self._requests["average"][slots] = average
        return average, np.where(is_first, 0.0, before - average) if kd else None
