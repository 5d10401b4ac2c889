"""Programs with gates as tests write them, and requests that run them step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from headgate.steering.programs.codes import (
    NUM_PARAMS,
    Code,
    Combine,
    Flag,
    GateFlag,
    GateScope,
    Mode,
    ScoreKind,
    ScorePooling,
    TokenFlag,
    gate_field,
    with_change,
)
from headgate.steering.worker.gates.reference import GateTensors, evaluate_scored
from headgate.steering.worker.gates.step_gates import DraftedRows
from headgate.steering.worker.program_reference import program_deltas_reference
from tests.kernels.test_run_programs import (
    ACTIVATIONS,
    DEVICE,
    NORMS,
    OPERATIONS,
    Entry,
    Example,
    features,
    run_programs,
)

scan_scored = pytest.importorskip("headgate.steering.kernels.scan_gates").scan_scored

NUM_COLUMNS = 80
EARLY_COLUMN = NUM_COLUMNS - 3
"""Of a gate that is evaluated at a later site."""


@dataclass
class Request:
    """Rows of a request: positions 0 to `length`, of which the first `prompt` are its prompt."""

    program: int
    prompt: int
    length: int
    slot: int
    replayed: int = 0
    """Rows from position 0 on that are replayed."""


@dataclass
class Steps:
    """Runs the rows of requests as steps of a forward, and compares each step with the definition.

    Attributes:
        programs: Of the requests; number 0 is none.
        rows: The stream of each request, ``[length, D]``.
    """

    programs: Sequence[Sequence[Entry]]
    requests: Sequence[Request]
    width: int = 24
    done: list[int] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.programs))
        self.rows = [
            torch.randint(-32, 32, (request.length, self.width), generator=generator) / 16 for request in self.requests
        ]
        self.done = [0] * len(self.requests)
        slots = 1 + max(request.slot for request in self.requests)
        states = torch.randn(slots, NUM_COLUMNS, generator=generator)
        states[0, EARLY_COLUMN] = math.nan
        self.states = states.to(DEVICE)
        self.signals = [torch.randn(request.length, NUM_COLUMNS, generator=generator) for request in self.requests]

    def step(
        self, numbers: Sequence[int], *, scans: bool = True, rejected: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run so many further rows of each request; compare, and return deltas and signals of the rows.

        The last `rejected` rows of each request are of rejected drafts, and leave nothing behind.
        """
        at = [(r, p) for r, n in enumerate(numbers) for p in range(self.done[r], self.done[r] + n)]
        example = Example(self.programs, [self.requests[r].program for r, _ in at], self.width)
        example.value = torch.stack([self.rows[r][p] for r, p in at]).to(DEVICE)
        tokens = [[self.requests[r].slot, self._flags(r, p, numbers[r])] for r, p in at]
        signals = torch.stack([self.signals[r][p] for r, p in at]).to(DEVICE)
        flags = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
        made = GateTensors(signals, self.states, flags)
        known = GateTensors(*(tensor.clone() for tensor in made))
        arguments = example.tables.arguments()
        drafted = self._drafted(at, numbers, made, known) if any(rejected) else []
        delta = run_programs.program_deltas(example.value, None, *arguments, gates=made, scans=scans)
        expected = program_deltas_reference(example.value, None, *example.tables.arguments(), gates=known)
        active = example.tables.counts > 0
        torch.testing.assert_close(made.signals, known.signals, rtol=2e-4, atol=2e-4, equal_nan=True)
        torch.testing.assert_close(made.states, known.states, rtol=2e-4, atol=2e-4, equal_nan=True)
        size = expected.abs().amax(-1, keepdim=True) + example.value.double().abs().amax(-1, keepdim=True)
        assert ((delta.double() - expected).abs() <= 3e-4 * size)[active].all()
        for rows, gates in zip(drafted, (made, known), strict=False):
            again = rows.take_back(gates, torch.tensor(rejected, device=DEVICE))
            assert again is not None
            used = slice(len(again.tokens))
            tables = arguments[1][used], arguments[2][used], arguments[3], arguments[4]
            if gates is made:
                scan_scored(tables, again)
            else:
                row, count, codes, params = (table.cpu() for table in tables)
                on_host = GateTensors(*(tensor.cpu() for tensor in again))
                evaluate_scored((row, count, codes, params), on_host)
                known.states.copy_(on_host.states)
        torch.testing.assert_close(made.states, known.states, rtol=2e-4, atol=2e-4, equal_nan=True)
        stays = [number - gone for number, gone in zip(numbers, rejected or [0] * len(numbers), strict=True)]
        self.done = [done + number for done, number in zip(self.done, stays, strict=True)]
        return delta, signals

    def _drafted(self, at: Sequence[tuple[int, int]], numbers: Sequence[int], *gates: GateTensors) -> list[DraftedRows]:
        """The rows of requests with several in a step, for each of some tensors."""
        listed = [(token, r, self.done[r] + numbers[r] - 1 - p) for token, (r, p) in enumerate(at) if numbers[r] > 1]
        rows = np.array(listed, np.int64).reshape(-1, 3).T
        return [DraftedRows(rows, frozenset(), each) for each in gates]

    def _flags(self, request: int, position: int, number: int) -> int:
        given = self.requests[request]
        flags = TokenFlag.RESETS if position == 0 else TokenFlag(0)
        flags |= TokenFlag.ENDS_PROMPT if position == given.prompt - 1 else 0
        flags |= TokenFlag.IS_GENERATED if position >= given.prompt else 0
        flags |= TokenFlag.IS_REPLAYED if position < given.replayed else 0
        return int(flags | TokenFlag.IS_SCANNED) if number > 1 else int(flags)


def score(column: int, code: int = ScoreKind.LINEAR, read: int = 1, params: Sequence[float] = (1.1, 0.0, 0.1)) -> Entry:
    """An entry that reads a row."""
    return Entry(with_change(Code.SCORE | code, column), read, 0, params)


def leaf(column: int, reads: int, code: int = Mode.BINARY, numbers: Sequence[float] = (0.05, 0.0, 1.0, 0.3)) -> Entry:
    """A leaf; `numbers` are threshold, hysteresis, amount and weight."""
    return Entry(with_change(Code.LEAF | code, column), 0, 0, (0.0, 0.0, *numbers, reads))


def loop(
    column: int, reads: int, pool: ScorePooling = ScorePooling.TOKEN, gains: Sequence[float] = (0.5, 0.25, 0.3)
) -> Entry:
    """A control loop around 0.2, between -0.6 and 0.9; `gains` are kp, ki and kd."""
    kp, ki, kd = gains
    return Entry(with_change(Code.LEAF | Mode.PID | pool, column), 0, 0, (-0.6, 0.9, 0.2, kp, ki, 0.3, reads, kd))


def node(column: int, combine: Combine, one: int, other: int = 0) -> Entry:
    """A node of two conditions."""
    return Entry(with_change(Code.NODE | combine, column), 0, 0, (0.0, 0.0, 0, 0, 0, 0, one, other))


def gate(column: int, root: int, code: int = GateScope.THIS, latched: float = math.nan) -> Entry:
    """A gate of a condition."""
    return Entry(with_change(Code.GATE | code, column), 0, 0, (0.0, 0.0, latched, 0, 0, 0, root))


def attenuate(factor: float, column: int, *, is_early: bool = False) -> Entry:
    """An entry that multiplies others by a factor where a gate acts."""
    return Entry(Code.ATTENUATE, 0, 0, (0.0, 0.0, factor), gate_field(0, column, is_early=is_early))


def gated(entry: Entry, column: int, *, is_early: bool = False, is_attenuated: bool = False) -> Entry:
    """The same entry with a gate."""
    code = entry.code | (Flag.ATTENUATED if is_attenuated else 0)
    return replace(entry, code=code, group=gate_field(entry.group, column, is_early=is_early))


Number = Callable[[float, float], float]


@st.composite
def gate_programs(draw: st.DrawFn) -> list[Entry]:
    """Gates of one site, and entries that they act on; no number is round, so that nothing lies on a threshold."""

    def number(low: float, high: float) -> float:
        return low + (high - low) * (draw(st.integers(0, 996)) + 0.437) / 997

    entries, conditions, at = draw_conditions(draw, number)
    gates = [(EARLY_COLUMN, True)]
    for _ in range(draw(st.integers(1, 3))):
        flags = draw(st.sampled_from([0, GateFlag.FROM_PROMPT_END])) | draw(
            st.sampled_from([0, 0, GateFlag.OBSERVES, GateFlag.UNWRITTEN])
        )
        latched = draw(st.sampled_from([math.nan, math.nan, 0.71]))
        entries.append(gate(at, draw(st.sampled_from(conditions)), draw(st.sampled_from(GateScope)) | flags, latched))
        gates.append((at, False))
        at += 3
    for _ in range(draw(st.integers(0, 2))):
        column, is_early = draw(st.sampled_from(gates))
        entries.append(attenuate(number(0, 2), column, is_early=is_early))
    operations = draw(st.lists(st.sampled_from([*OPERATIONS.values()]), max_size=3))
    for entry in [*operations, *features(draw(st.integers(0, 3)), draw(st.sampled_from(NORMS)))]:
        (column, is_early), is_attenuated = draw(st.sampled_from(gates)), draw(st.booleans())
        with_gate = gated(entry, column, is_early=is_early, is_attenuated=is_attenuated)
        entries.append(draw(st.sampled_from([entry, with_gate])))
    return entries


def draw_conditions(draw: st.DrawFn, number: Number) -> tuple[list[Entry], list[int], int]:
    """Draw scores, leaves and nodes.

    Returns:
        The entries, the columns of conditions, and the first free column.
    """
    entries: list[Entry] = []
    scores, conditions, at = [], [], 0
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(ScoreKind)) | draw(st.sampled_from(ACTIVATIONS)) | draw(st.sampled_from(NORMS))
        entries.append(score(at, kind, draw(st.integers(1, 8)), [number(-1, 2) for _ in range(NUM_PARAMS)]))
        entries[-1].write = draw(st.sampled_from([0, 3]))
        scores.append(at)
        at += 1
    for _ in range(draw(st.integers(1, 3))):
        mode = draw(st.sampled_from(Mode))
        if mode == Mode.PID:
            gains = number(-1, 1), number(-1, 1), number(-1, 1)
            entries.append(
                loop(
                    at,
                    draw(st.sampled_from(scores)),
                    draw(st.sampled_from([ScorePooling.TOKEN, ScorePooling.EMA])),
                    gains,
                )
            )
            conditions.append(at)
            at += 3
            continue
        code = mode | draw(st.sampled_from(ScorePooling)) | draw(st.sampled_from([0, GateFlag.BELOW]))
        numbers = number(-1, 1), draw(st.sampled_from([0.0, 0.3173])), number(0.3, 3), number(0.05, 1)
        entries.append(leaf(at, draw(st.sampled_from(scores)), code, numbers))
        conditions.append(at)
        at += 3
    for _ in range(draw(st.integers(0, 2))):
        combined = [draw(st.sampled_from(conditions)) for _ in range(2)]
        entries.append(node(at, draw(st.sampled_from(Combine)), *combined))
        conditions.append(at)
        at += 2
    return entries, conditions, at
