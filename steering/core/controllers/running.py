"""Controllers of an engine core that were started, each with its reader."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headgate.capture.schema.errors import ConfigError
from headgate.steering.controllers.controller_thread import ControllerFigures
from headgate.steering.controllers.hosting.host import LoadedController
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.core.controllers.readers import Reader, ScoreColumns, make_reader
from headgate.steering.core.gates import GateContent
from headgate.steering.gates.rule import AppliesTo


class RunningController(NamedTuple):
    """A controller that was started.

    Attributes:
        spec: As configured.
        reader: Of its probes.
        needs_prompts: Whether every row of a prompt is to be read for it.
    """

    spec: ControllerSpec
    reader: Reader
    needs_prompts: bool

    @property
    def name(self) -> str:
        """Its name in traces and metrics."""
        return self.reader.name

    def status(self, figures: ControllerFigures) -> dict[str, Any]:
        """Return plain values about it."""
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


def running_controllers(
    specs: Sequence[ControllerSpec],
    loaded: Mapping[str, LoadedController],
    content: GateContent,
    modules: Collection[str],
    columns: ScoreColumns,
) -> Iterator[RunningController]:
    """Make the readers of controllers that were loaded.

    Args:
        specs: Of the configuration.
        loaded: The controllers, by their names.
        content: Of the engine core.
        modules: Names of the registered modules.
        columns: For scores.

    Raises:
        ConfigError: If one reads what cannot be read, or needs a module that is not there.
    """
    first = 0
    for spec in specs:
        made = loaded[spec.instance]
        reader = make_reader(spec.instance, AppliesTo(spec.applies_to), made.probes, content, columns, first)
        first += len(made.probes)
        for name in made.modules:
            if name not in modules:
                known = ", ".join(sorted(modules)) or "none"
                raise ConfigError(
                    f"controller {spec.instance!r}: needs module {name!r}; registered at start (--steering-modules): "
                    f"{known}"
                )
        yield RunningController(spec, reader, made.needs_prompts)
