"""``threshold``: turns a module on while the moving average of a score is above a threshold."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from headgate.capture.probe import ProbeError
from headgate.steering.controllers.actions import Action, SetGlobal
from headgate.steering.controllers.controller import StepReadings
from headgate.steering.controllers.one_module import OneModuleController, ReadRows, check_finite


class ThresholdController(OneModuleController):
    """Engages when the average reaches `threshold`, and disengages when it falls below ``threshold - hysteresis``.

    Args:
        probe: Path of the probe's file.
        module: Name of the registered module to turn on.
        threshold: Threshold of the average; the probe's own if None.
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
        super().__init__(probe, module, average=math.nan, is_engaged=0.0, scale=0.0)
        found = self._probe.threshold if threshold is None else threshold
        if found is None:
            raise ProbeError(f"{probe}: the probe has no threshold of its own; give threshold=...")
        check_finite(threshold=found, hysteresis=hysteresis, gain=gain)
        _check("hysteresis", hysteresis, hysteresis >= 0, "not negative")
        _check("ema_alpha", ema_alpha, 0 < ema_alpha <= 1, "above 0 and at most 1")
        _check("gain_mode", gain_mode, gain_mode in ("binary", "proportional"), "binary or proportional")
        _check("actuation", actuation, actuation in ("per_request", "global"), "per_request or global")
        self._threshold, self._hysteresis = float(found), float(hysteresis)
        self._alpha, self._gain, self._is_proportional = ema_alpha, float(gain), gain_mode == "proportional"
        self._is_global, self._min_delta = actuation == "global", min_emit_delta
        self.needs_prompts = prime
        self._global_scale = 0.0

    def step(self, readings: StepReadings) -> list[Action]:
        """Update the averages, and change the scales that follow from them."""
        rows = self._rows(readings)
        if (ends := rows.ends) is None:
            self._read(rows.slots, rows.scores)
        else:
            for slot, scores in zip(rows.slots[ends].tolist(), np.split(rows.scores, ends[:-1] + 1), strict=True):
                self._read_rows(slot, scores)
            rows = ReadRows(rows.at[ends], rows.slots[ends], rows.scores[ends], ends)
        if self._is_global:
            return self._act_on_all()
        return self._act_on_each(readings, rows) if self._gain else []

    def _act_on_each(self, readings: StepReadings, rows: ReadRows) -> list[Action]:
        """Change the scales of requests, by the last row of each."""
        scales, before = self._scales(rows.slots), self._requests["scale"][rows.slots]
        changed = scales != before
        if np.count_nonzero(changed):
            changed &= (scales == 0) | (np.abs(scales - before) >= self._min_delta)
        return self._set_scales(readings, rows, scales, changed)

    def _act_on_all(self) -> list[Action]:
        scales = self._scales(self._requests.all())
        scale = float(scales[np.abs(scales).argmax()]) if len(scales) else 0.0
        if not self._is_new(scale, self._global_scale):
            return []
        self._global_scale = scale
        return [SetGlobal(module=self._module, scale=scale)]

    def _read(self, slots: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]) -> None:
        """Take a score of each of some requests."""
        average, engaged = self._requests["average"], self._requests["is_engaged"]
        before = average[slots]
        after = np.where(np.isnan(before), scores, (1 - self._alpha) * before + self._alpha * scores)
        average[slots] = after
        engaged[slots] = after >= self._threshold - self._hysteresis * engaged[slots]

    def _read_rows(self, slot: int, scores: npt.NDArray[np.float64]) -> None:
        """Take several scores of one request, in their order."""
        average, averages = float(self._requests["average"][slot]), []
        for score in scores.tolist():
            average = score if math.isnan(average) else (1 - self._alpha) * average + self._alpha * score
            averages.append(average)
        self._requests["average"][slot] = average
        found = np.array(averages)
        (decisive,) = np.nonzero((found >= self._threshold) | (found < self._threshold - self._hysteresis))
        if len(decisive):
            self._requests["is_engaged"][slot] = found[decisive[-1]] >= self._threshold

    def _scales(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the scales that follow for some requests."""
        engaged = self._requests["is_engaged"][slots]
        if not self._is_proportional:
            return self._gain * engaged
        over = self._requests["average"][slots] - (self._threshold - self._hysteresis)
        part = np.clip(np.nan_to_num(over) / max(self._hysteresis, 1e-8), 0.0, 1.0)
        return self._gain * engaged * part

    def _is_new(self, scale: float, before: float) -> bool:
        return scale != before and (scale == 0 or abs(scale - before) >= self._min_delta)


def _check(name: str, value: object, is_right: bool, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
