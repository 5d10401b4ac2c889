"""Controllers that read one probe, and turn one module on for each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.probe import Probe, load
from headgate.capture.schema.errors import finite, shown
from headgate.steering.controllers.actions import Action, SetSteeringEach
from headgate.steering.controllers.controller import Controller, RequestView, StepReadings

_AT_FIRST = 64


def check_finite(**numbers: object) -> None:
    """Refuse parameters of a controller that are no finite numbers.

    Raises:
        ValueError: Naming the parameter.
    """
    for name, value in numbers.items():
        if finite(value) is None:
            raise ValueError(f"{name}: expected a finite number, got {shown(value)}")


class RequestSlots:
    """A slot for each request, and arrays with a number in each.

    Args:
        initial: Names of the arrays, with the number of a request that begins.

    Attributes:
        version: Another number whenever a request has got a slot, or lost it.
    """

    def __init__(self, **initial: float) -> None:
        self._initial = initial
        self._arrays = {name: np.full(_AT_FIRST, value) for name, value in initial.items()}
        self._slots: dict[str, int] = {}
        self._free = list(range(_AT_FIRST - 1, -1, -1))
        self.version = 0

    def __getitem__(self, name: str) -> npt.NDArray[np.float64]:
        """Return an array, float64 by slot."""
        return self._arrays[name]

    def add(self, request: str) -> None:
        """Give a request a slot."""
        if not self._free:
            size = len(next(iter(self._arrays.values())))
            self._free = list(range(2 * size - 1, size - 1, -1))
            for name, value in self._initial.items():
                self._arrays[name] = np.concatenate([self._arrays[name], np.full(size, value)])
        slot = self._slots[request] = self._free.pop()
        for name, value in self._initial.items():
            self._arrays[name][slot] = value
        self.version += 1

    def remove(self, request: str) -> None:
        """Take its slot back, if it has one."""
        if (slot := self._slots.pop(request, None)) is not None:
            self._free.append(slot)
            self.version += 1

    def all(self) -> npt.NDArray[np.int64]:
        """Return the slots of all requests, int64."""
        return np.array(list(self._slots.values()), np.int64)

    def of(self, requests: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """Return the slot of each request, int64 ``[n]``; -1 for those without."""
        return np.array([self._slots.get(each, -1) for each in requests], np.int64)


class ReadRows(NamedTuple):
    """The rows of a step that count: of requests that are followed, with scores that are numbers.

    Attributes:
        at: int64 ``[n]``: their places in the step.
        slots: int64 ``[n]``: of their requests.
        scores: float64 ``[n]``.
        ends: int64: the indices of the last row of each request; None if each has one row.
    """

    at: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    ends: npt.NDArray[np.int64] | None


class _Shape(NamedTuple):
    """Which rows of a step count by their requests; steps of the same requests have the same."""

    requests: tuple[str, ...]
    is_prompt: npt.NDArray[np.bool_]
    version: int
    at: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64] | None


class OneModuleController(Controller):
    """Derive from this: it follows the requests.

    Args:
        probe: Path of the probe's file; its scores are called ``score``.
        module: Name of the registered module.
        initial: Numbers of each request, as `RequestSlots` takes them.

    Raises:
        ProbeError: If the probe cannot be read.
    """

    never_waits = True
    needs_tokens = False

    def __init__(self, probe: str, module: str, **initial: float) -> None:
        self._probe = load(probe)
        self._module = module
        self._requests = RequestSlots(**initial)
        self._shape: _Shape | None = None

    def probes(self) -> Mapping[str, Probe]:
        """Return the one probe."""
        return {"score": self._probe}

    def modules(self) -> tuple[str]:
        """Return the module."""
        return (self._module,)

    def request_begins(self, request: RequestView) -> None:
        """Follow a request."""
        self._requests.add(request.request)

    def request_ends(self, request: RequestView) -> None:
        """Forget a request."""
        self._requests.remove(request.request)

    def _rows(self, readings: StepReadings) -> ReadRows:
        """Return the rows of a step that count; those of prompts if `needs_prompts`."""
        shape = self._shape
        is_known = shape is not None and shape.requests is readings.requests and shape.is_prompt is readings.is_prompt
        if shape is None or not is_known or shape.version != self._requests.version:
            slots = self._requests.of(readings.requests)
            (at,) = ((slots >= 0) & (self.needs_prompts | ~readings.is_prompt)).nonzero()
            version, slots = self._requests.version, slots[at]
            shape = self._shape = _Shape(readings.requests, readings.is_prompt, version, at, slots, _ends(slots))
        _, _, _, at, slots, ends = shape
        scores = readings.scores["score"].astype(np.float64)
        if len(at) < len(scores):
            scores = scores[at]
        is_number = np.isfinite(scores)
        if np.count_nonzero(is_number) < len(scores):
            at, slots, scores = at[is_number], slots[is_number], scores[is_number]
            ends = _ends(slots)
        return ReadRows(at, slots, scores, ends)

    def _set_scales(
        self, readings: StepReadings, rows: ReadRows, scales: npt.NDArray[np.float64], changed: npt.NDArray[np.bool_]
    ) -> list[Action]:
        """Keep the scales that changed, and return what sets them: at most one action.

        Args:
            readings: Readings of the step.
            rows: Rows of the step, one for each request.
            scales: float64 ``[n]``.
            changed: Which of them are new, ``[n]``.
        """
        num_changed = np.count_nonzero(changed)
        if not num_changed:
            return []
        at, slots = rows.at, rows.slots
        if num_changed < len(changed):
            at, slots, scales = at[changed], slots[changed], scales[changed]
        self._requests["scale"][slots] = scales
        if rows.ends is None:
            return [SetSteeringEach(readings.requests, self._module, scales, at)]
        return [SetSteeringEach(tuple(readings.requests[each] for each in at.tolist()), self._module, scales)]


def _ends(slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return the indices of the last of each run of equal slots, int64; None if there is no run."""
    ends = np.append(np.flatnonzero(np.diff(slots)), len(slots) - 1)[: len(slots)]
    return None if len(ends) == len(slots) else ends
