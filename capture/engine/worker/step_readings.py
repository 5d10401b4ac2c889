"""Readings of a step, put on the output of that very step: at once, or when an output that comes later is there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from headgate.capture.engine.contracts.vllm_engine import AsyncRunnerOutput, RunnerOutput
from headgate.capture.engine.contracts.wire_format import READINGS_ATTRIBUTE
from headgate.capture.engine.contracts.worker_hooks import StepReadings

_PENDING = "_headgate_step"


def with_readings(output: Any, readings: Mapping[str, StepReadings]) -> Any:
    """Return the output of a step with what its parts read, under `READINGS_ATTRIBUTE`.

    Args:
        output: A ``ModelRunnerOutput``; an ``AsyncModelRunnerOutput``, whose ``get_output`` then completes what it
            returns, on whichever thread calls it; None of a step that failed.
        readings: Of that step, by part.
    """
    if output is None:
        return None
    if hasattr(output, "get_output"):
        setattr(output, _PENDING, readings)
        # A subclass, and no method of the object: that would lead back to it, and hold device memory in a circle.
        output.__class__ = _completing(output.__class__)
        return output
    return _complete(output, readings)


def _complete(output: RunnerOutput, readings: Mapping[str, StepReadings]) -> RunnerOutput:
    if not output.req_ids:
        # vLLM has one such output for all steps; what is put on it would come with every one of them.
        raise AssertionError(f"a step in which {', '.join(readings)} read something has an output without requests")
    setattr(output, READINGS_ATTRIBUTE, {part: found.collect() for part, found in readings.items()})
    return output


@cache
def _completing(kind: type[AsyncRunnerOutput]) -> type[AsyncRunnerOutput]:
    """Make the subclass of a class of outputs that come later."""

    class Completing(kind):  # type: ignore[misc, valid-type]
        """The output of a step that was read."""

        def get_output(self) -> RunnerOutput:
            """Wait for the output, and complete it."""
            output: RunnerOutput = super().get_output()
            return _complete(output, self.__dict__.pop(_PENDING))

    Completing.__name__, Completing.__qualname__ = kind.__name__, kind.__qualname__
    return Completing
