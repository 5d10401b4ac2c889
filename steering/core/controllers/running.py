"""Controllers of an engine core that were started, each with its reader and its thread."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from headgate.capture.schema.errors import ConfigError
from headgate.steering.controllers.controller_thread import ControllerThread
from headgate.steering.controllers.loading import ControllerSpec, load_controller, read_probes
from headgate.steering.core.controllers.readers import Reader, make_reader
from headgate.steering.core.gates import GateContent
from headgate.steering.gates.rule import AppliesTo


class RunningController(NamedTuple):
    """A controller that was started.

    Attributes:
        spec: As configured.
        reader: Of its probes.
        thread: Calls it.
        needs_prompts: Whether every row of a prompt is to be read for it.
    """

    spec: ControllerSpec
    reader: Reader
    thread: ControllerThread
    needs_prompts: bool

    @property
    def name(self) -> str:
        """Its name in traces and metrics."""
        return self.reader.name

    def status(self) -> dict[str, Any]:
        """Return plain values about it."""
        figures = self.thread.figures
        return {
            "name": self.name,
            "entry_point": self.spec.name,
            "applies_to": self.spec.applies_to,
            "probes": [score.name for score in self.reader.source.layout.scores],
            "budget_ms": self.spec.budget_ms,
            "steps": figures.steps,
            "skipped": figures.skipped,
            "over_budget": figures.over_budget,
            "seconds": figures.seconds,
            "error": figures.error,
        }


def start_controllers(
    specs: Sequence[ControllerSpec], content: GateContent, modules: Collection[str], columns: Sequence[int]
) -> Iterator[RunningController]:
    """Start configured controllers, each with a thread.

    Args:
        specs: Of the configuration.
        content: Of the engine core.
        modules: Names of the registered modules.
        columns: For scores, which follow one another.

    Raises:
        ConfigError: If one cannot be made, reads what cannot be read, or needs a module that is not there.
    """
    free = list(columns)
    for spec in specs:
        controller = load_controller(spec)
        probes = read_probes(spec.instance, controller)
        reader = make_reader(spec.instance, AppliesTo(spec.applies_to), probes, content, free)
        del free[: len(probes)]
        for name in controller.modules():
            if name not in modules:
                known = ", ".join(sorted(modules)) or "none"
                raise ConfigError(
                    f"controller {spec.instance!r}: needs module {name!r}; registered at start (--steering-modules): "
                    f"{known}"
                )
        thread = ControllerThread(spec.instance, controller, spec.budget_ms / 1000)
        yield RunningController(spec, reader, thread, bool(controller.needs_prompts))
