"""Scores that controllers read: a program for each controller, and the rows of a step as each gets them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.engine.contracts.core_part import CoreServices
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.controllers.controller import StepReadings
from headgate.steering.core.gates import GateContent
from headgate.steering.gates.gate import InlineProbe
from headgate.steering.gates.layout import Layout, ScoreColumn
from headgate.steering.gates.readings import read_score
from headgate.steering.gates.rule import AppliesTo, Selection
from headgate.steering.gates.trace import GateSource, Writes
from headgate.steering.probes.probe import Probe, ProbeKind
from headgate.steering.programs.codes import with_change
from headgate.steering.programs.program import Program

_NOTHING = Writes(frozenset(), frozenset())


class Reader(NamedTuple):
    """The probes of one controller.

    Attributes:
        name: The controller's.
        applies_to: Whose rows are read.
        scores: Their columns, by the controller's names.
        program: Computes them, in both phases.
        source: Their columns for traces, where they are called ``CONTROLLER.PROBE``.
    """

    name: str
    applies_to: AppliesTo
    scores: Mapping[str, int]
    program: Program
    source: GateSource

    def acts(self, selection: Selection) -> bool:
        """Whether it reads the rows of a request with a selection of rules and controllers."""
        return self.applies_to.acts(self.name, selection)

    def to_worker(self) -> dict[str, Any]:
        """Return plain values for `headgate.steering.worker.rows.rule_programs.ActingRule`."""
        wire, columns = self.program.to_wire(), sorted(self.scores.values())
        return {
            "name": self.name,
            "applies_to": self.applies_to.value,
            "columns": [columns[0], columns[-1] + 1],
            "prefill": wire,
            "decode": wire,
        }


def make_reader(
    name: str, applies_to: AppliesTo, probes: Mapping[str, Probe], content: GateContent, columns: Sequence[int]
) -> Reader:
    """Make the reader of a controller.

    Args:
        name: The controller's.
        applies_to: Whose rows are read.
        probes: Checked (`headgate.steering.controllers.loading.read_probes`).
        content: Of the engine core.
        columns: Free ones, which follow one another.

    Raises:
        ConfigError: If there are too few columns, or a probe does not fit the model or reads at no op site.
    """
    if len(probes) > len(columns):
        raise ConfigError(f"controller {name!r}: {len(probes)} probes, but columns for {len(columns)} more are left")
    entries, scores = [], []
    for column, (probe_name, probe) in zip(columns, probes.items(), strict=False):
        where = f"controller {name!r}: probe {probe_name!r}"
        if probe.weight.shape[1] != content.hidden_size:
            raise ConfigError(f"{where}: has the width {probe.weight.shape[1]}, the model {content.hidden_size}")
        reading = InlineProbe(
            site=probe.site,
            weight=probe.weight[0],
            bias=float(probe.biases[0]),
            is_cosine=probe.kind is ProbeKind.COSINE,
            where=where,
        )
        try:
            entry = read_score(reading, content, content.dtype).entry
        except RequestError as error:
            raise ConfigError(str(error)) from error
        entries.append(entry._replace(code=with_change(entry.code, column)))
        scores.append(ScoreColumn(f"{name}.{probe_name}", reading, column))
    program = Program.from_entries(entries, content.dtype)
    source = GateSource(Layout(tuple(scores), (), len(scores)), _NOTHING, _NOTHING, program.key)
    named = dict(zip(probes, (score.column for score in scores), strict=True))
    return Reader(name, applies_to, named, program, source)


class ReadStep(NamedTuple):
    """The rows of one step that were not told before, one request after the other.

    Attributes:
        requests: Id of the request of each row, ``[n]``.
        positions: int64 ``[n]``.
        is_prompt: bool ``[n]``.
        token_ids: int64 ``[n]``.
        signals: float32 ``[n, columns]``.
    """

    requests: Sequence[str]
    positions: np.ndarray[Any, np.dtype[np.int64]]
    is_prompt: np.ndarray[Any, np.dtype[np.bool_]]
    token_ids: np.ndarray[Any, np.dtype[np.int64]]
    signals: np.ndarray[Any, np.dtype[np.float32]]

    def of(self, reader: Reader, members: Collection[str] | None) -> StepReadings:
        """Return the rows for a controller: of some requests, or of all if None."""
        if members is None:
            scores = {name: self.signals[:, column].copy() for name, column in reader.scores.items()}
            return StepReadings(
                requests=self.requests,
                positions=self.positions,
                is_prompt=self.is_prompt,
                token_ids=self.token_ids,
                scores=scores,
            )
        at = [index for index, req_id in enumerate(self.requests) if req_id in members]
        return ReadStep(
            [self.requests[index] for index in at],
            self.positions[at],
            self.is_prompt[at],
            self.token_ids[at],
            self.signals[at],
        ).of(reader, None)


class ToldRows:
    """Which rows of a request were told: a row that is computed again is not told again.

    Args:
        num_prompt: Tokens of its prompt.
    """

    __slots__ = ("end", "num_prompt", "tokens")

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.end = 0
        self.tokens: Sequence[int] = ()
        """All tokens of the request, which grow with it."""


def read_step(
    readings: Mapping[str, Any],
    discarded: Collection[str],
    requests: Mapping[str, ToldRows],
    services: CoreServices,
) -> ReadStep | None:
    """Return the rows of a step that are new; None if there are none.

    Args:
        readings: As `headgate.steering.worker.gates.readings.SignalReadings.collect` made them.
        discarded: Requests of the step for which it does not count.
        requests: Those that are followed; it is noted in them what was told.
        services: Gives their tokens.
    """
    firsts, counts = (np.frombuffer(readings[name], np.int64).tolist() for name in ("firsts", "counts"))
    signals = np.frombuffer(readings["values"], np.float32).reshape(-1, readings["columns"])
    ids: list[str] = []
    positions: list[int] = []
    tokens: list[int] = []
    prompts: list[bool] = []
    rows: list[int] = []
    start = 0
    for req_id, first, count in zip(readings["ids"], firsts, counts, strict=True):
        begin, start = start, start + count
        told = requests.get(req_id)
        if told is None or req_id in discarded:
            continue
        new, end = max(first, told.end), first + count
        if new >= end:
            continue
        if not told.tokens and (progress := services.progress(req_id)) is not None:
            told.tokens = progress.token_ids
        told.end = end
        ids += [req_id] * (end - new)
        positions += range(new, end)
        prompts += [position < told.num_prompt for position in range(new, end)]
        tokens += told.tokens[new:end]
        rows += range(begin + new - first, start)
    if not ids:
        return None
    values = signals if len(rows) == len(signals) else signals[rows]
    return ReadStep(tuple(ids), np.array(positions, np.int64), np.array(prompts), np.array(tokens, np.int64), values)
