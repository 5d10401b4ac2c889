"""Scores that controllers read: a program for each controller."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headgate.capture.probe import Probe
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.controllers.host import ControllerFigures, LoadedController
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.core.gates import GateContent
from headgate.steering.gates.gate import AppliesTo, GateLayout, InlineProbe, ScoreColumn, Selection
from headgate.steering.gates.lowering import Score, check_site, probe_entries
from headgate.steering.gates.trace import GateSource, Writes
from headgate.steering.programs.program import Entry, Program

_NOTHING = Writes(frozenset(), frozenset())


class ControllerProbes(NamedTuple):
    """The probes of one controller.

    Attributes:
        name: The controller's.
        applies_to: Whose rows are read.
        scores: Their columns, by the controller's names.
        numbers: Which of all scores each is, by the same names.
        program: Computes them, in both phases.
        source: Their columns for traces, where they are called ``CONTROLLER.PROBE``.
    """

    name: str
    applies_to: AppliesTo
    scores: Mapping[str, int]
    numbers: Mapping[str, int]
    program: Program
    source: GateSource

    def acts(self, selection: Selection) -> bool:
        """Whether it reads the rows of a request with a selection of rules and controllers."""
        return self.applies_to.acts(self.name, selection)

    def to_worker(self) -> dict[str, Any]:
        """Return plain values for `headgate.steering.worker.placed_programs.ActingRule`."""
        wire, columns = self.program.to_wire(), sorted(self.scores.values())
        return {
            "name": self.name,
            "applies_to": self.applies_to.value,
            "columns": [columns[0], columns[-1] + 1],
            "prefill": wire,
            "decode": wire,
        }


class ScoreColumns(NamedTuple):
    """Columns for the scores of all controllers.

    Attributes:
        first: First column of the scores; score number k has the column ``first + k``.
        size: How many there are.
    """

    first: int
    size: int


def make_reader(
    name: str,
    applies_to: AppliesTo,
    probes: Mapping[str, Probe],
    content: GateContent,
    columns: ScoreColumns,
    first: int,
) -> ControllerProbes:
    """Make the reader of a controller.

    Args:
        name: The controller's.
        applies_to: Whose rows are read.
        probes: Checked (`headgate.steering.controllers.loading.read_probes`).
        content: Content of the engine core.
        columns: Columns of all controllers.
        first: The number of its first score; those before are taken.

    Raises:
        ConfigError: If there are too few columns, or a probe does not fit the model or reads at no op site.
    """
    if len(probes) > columns.size - first:
        raise ConfigError(
            f"controller {name!r}: {len(probes)} probes, but columns for {columns.size - first} more are left"
        )
    entries: list[Entry] = []
    scores: list[ScoreColumn] = []
    for number, (probe_name, probe) in enumerate(probes.items(), first):
        column = columns.first + number
        where = f"controller {name!r}: probe {probe_name!r}"
        if probe.hidden_size != content.hidden_size:
            raise ConfigError(f"{where}: has the width {probe.hidden_size}, the model {content.hidden_size}")
        try:
            check_site(probe.site, content.op_sites, where)
        except RequestError as error:
            raise ConfigError(str(error)) from error
        score = Score(probe_entries(probe, content.dtype), None)
        entries += score.at(column)
        # No name that a request's own probe may share.
        reading = InlineProbe(site=probe.site, weight=probe.weight[0], bias=0.0, is_cosine=False, where=where)
        scores.append(ScoreColumn(f"{name}.{probe_name}", reading, column))
    program = Program.from_entries(entries, content.dtype)
    source = GateSource(GateLayout(tuple(scores), (), len(scores)), _NOTHING, _NOTHING, program.key)
    named = dict(zip(probes, (score.column for score in scores), strict=True))
    numbers = dict(zip(probes, range(first, columns.size), strict=False))
    return ControllerProbes(name, applies_to, named, numbers, program, source)


class RunningController(NamedTuple):
    """A controller that was started.

    Attributes:
        spec: As configured.
        reader: Reader of its probes.
        needs_prompts: Whether every row of a prompt is to be read for it.
    """

    spec: ControllerSpec
    reader: ControllerProbes
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
        specs: Specs of the configuration.
        loaded: The controllers, by their names.
        content: Content of the engine core.
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
