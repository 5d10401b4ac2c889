"""Gates on rows: the same however a prompt is cut, row after row as the guide says, and nobody else's rows move."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.gates.gate import (
    COUNT,
    Always,
    ConditionGroup,
    Gate,
    GatePhase,
    InlineProbe,
    Leaf,
    Negation,
    Pid,
    Then,
    columns_of,
)
from headgate.steering.gates.lowering import lower_gates
from headgate.steering.programs.codes import (
    Combine,
    GateScope,
    Mode,
    ScorePooling,
    TokenFlag,
)
from headgate.steering.programs.operations import Method, Operation
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.worker.gates.reference import GateTensors
from headgate.steering.worker.placed_programs import place
from headgate.steering.worker.program_reference import program_deltas_reference

HIDDEN = 4
EARLY, READ, LATE = (Site(layer, HookPoint.POST_MLP) for layer in (0, 1, 2))
SITES = (EARLY, READ, LATE)
NO_OWN = ((None, None), (None, None))
PROBE = np.array([1, 0, 0, 0], np.float32)
ADDED = np.array([0, 0, 0, 1], np.float32)


class NoNames:
    """`Content` without any registered name."""

    hidden_size = HIDDEN
    op_sites = SITES

    def width(self, site: Site) -> int:
        return HIDDEN

    def is_in_one_stage(self, sites) -> bool:
        return True

    def why_unread(self, site: Site) -> None:
        return None

    def vectors(self, phase: int):
        return lambda name, site: None


def leaf(threshold: float = 0.0, **settings) -> Leaf:
    return Leaf(reading=InlineProbe(site=READ, weight=PROBE), threshold=threshold, **settings)


def adding(*sites: Site) -> Then:
    vectors = {"vector": ADDED}
    return Then(
        operations=tuple(
            Operation(method=Method.ADDITIVE, site=site, vectors=vectors, numbers={"scale": 1.0}) for site in sites
        )
    )


def run(gates: Sequence[Gate], scores: Sequence[float], num_prompt: int, chunks: Sequence[int], own=NO_OWN):
    """What is added in the last column at each site, ``[3, rows]``; rows have the scores that the probe reads."""
    return run_and_count(gates, scores, num_prompt, chunks, own)[0]


def run_and_count(gates: Sequence[Gate], scores: Sequence[float], num_prompt: int, chunks: Sequence[int], own=NO_OWN):
    """The same, and how many rows each gate wrote at sites where it is evaluated, as its states count them."""
    made = lower_gates(gates, NoNames(), "float32", own, {})
    columns = columns_of(gates).num_columns
    added, states, start = [], torch.full((2, columns), math.nan), 0
    for count in chunks:
        positions = np.arange(start, start + count)
        rows = torch.zeros(count, HIDDEN)
        rows[:, 0] = torch.tensor(scores[start : start + count])
        tokens = torch.ones(count, 2, dtype=torch.int32)
        tokens[:, 1] = torch.from_numpy(
            TokenFlag.RESETS * (positions == 0)
            | TokenFlag.ENDS_PROMPT * (positions == num_prompt - 1)
            | TokenFlag.IS_GENERATED * (positions >= num_prompt)
        )
        signals = torch.full((count, columns), math.nan)
        tensors = GateTensors(signals, states, tokens)
        is_decode = torch.from_numpy(positions >= num_prompt).int()
        added.append(torch.stack([_at(site, made, rows, is_decode, tensors) for site in SITES]))
        start += count
    counts = [states[1, gate.column + COUNT].nan_to_num(0.0).item() for gate in columns_of(gates).gates]
    return torch.cat(added, dim=1), counts


def _at(site: Site, made, rows, is_decode, tensors) -> torch.Tensor:
    """What both phases' programs add at a site: table row 0 is the prompt's, 1 that of generated rows."""
    codes, params, counts, pool = [], [], [], [torch.zeros(1, HIDDEN)]
    for program in (made.prefill, made.decode):
        slots = np.arange(program.num_rows, dtype=np.int32) + sum(map(len, pool))
        pool.append(torch.from_numpy(program.rows.copy()))
        placed = place(program, slots, {site: 0})
        codes.append(placed.codes)
        params.append(placed.params)
        counts.append(len(placed.codes))
    longest = max(*counts, 1)
    codes_table = torch.zeros(2, longest, 4, dtype=torch.int32)
    params_table = torch.zeros(2, longest, 8)
    for phase in (0, 1):
        codes_table[phase, : counts[phase]] = torch.from_numpy(codes[phase].copy())
        params_table[phase, : counts[phase]] = torch.from_numpy(params[phase].copy())
    active = torch.tensor(counts, dtype=torch.int32)[is_decode.long()]
    tables = (torch.cat(pool), is_decode, active, codes_table, params_table, None, None, tensors)
    return program_deltas_reference(rows, None, *tables, dtype=torch.float32)[:, 3]


pools = st.sampled_from([*ScorePooling])
numbers = st.floats(-2, 2, width=16)
leaves = st.builds(
    leaf,
    numbers,
    is_below=st.booleans(),
    hysteresis=st.sampled_from([0.0, 0.5]),
    pooling=pools,
    alpha=st.just(0.25),
)
conditions = (
    leaves
    | st.builds(lambda one, other: ConditionGroup(Combine.ANY, (one, other)), leaves, leaves)
    | st.builds(lambda one, other: ConditionGroup(Combine.ALL, (one, Negation(other))), leaves, leaves)
    | st.builds(
        lambda phase, one: ConditionGroup(Combine.ALL, (Always(phase), one)), st.sampled_from(GatePhase), leaves
    )
)
modes = st.sampled_from([Mode.BINARY, Mode.PROPORTIONAL, Mode.SIGMOID])


@settings(max_examples=60, deadline=None)
@given(conditions, modes, st.sampled_from([*GateScope]), st.data())
def test_a_prompt_gives_the_same_however_it_is_cut(when, mode, scope, data):
    num_prompt, num_rows = data.draw(st.integers(1, 6)), 9
    scores = data.draw(st.lists(numbers, min_size=num_rows, max_size=num_rows))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_prompt), max_size=3)) - {num_prompt})
    chunks = np.diff([0, *cuts, num_prompt]).tolist()
    sites = (READ, LATE) if scope is GateScope.THIS else SITES
    gates = [Gate(name="g", when=when, then=adding(*sites), mode=mode, amount=2.0, scope=scope)]
    decode = [1] * (num_rows - num_prompt)

    whole, counts = run_and_count(gates, scores, num_prompt, [num_prompt, *decode])
    cut, counts_of_cut = run_and_count(gates, scores, num_prompt, [*chunks, *decode])

    torch.testing.assert_close(cut, whole, rtol=0, atol=0)
    assert counts == counts_of_cut == [whole[2].count_nonzero().item()]
    assert torch.equal(whole[1], whole[2])


loops = st.builds(
    lambda kp, ki, kd, pool: (Pid(0.5, kp, ki, kd, -0.75, 1.5), pool),
    *[st.sampled_from([0.0, 0.25, -1.0, 2.0])] * 3,
    st.sampled_from([ScorePooling.TOKEN, ScorePooling.EMA]),
)


@settings(max_examples=40, deadline=None)
@given(loops, st.sampled_from([GateScope.THIS, GateScope.NEXT]), st.data())
def test_a_loop_gives_the_same_however_its_prompt_is_cut(loop, scope, data):
    (pid, pool), num_prompt, num_rows = loop, data.draw(st.integers(1, 4)), 9
    scores = data.draw(st.lists(numbers, min_size=num_rows, max_size=num_rows))
    when = leaf(pooling=pool, alpha=0.25)
    gates = [Gate(name="g", when=when, then=adding(READ, LATE), mode=Mode.PID, pid=pid, scope=scope)]

    whole, _ = run_and_count(gates, scores, num_prompt, [num_rows])
    cut, _ = run_and_count(gates, scores, num_prompt, [1] * num_rows)

    torch.testing.assert_close(cut, whole, rtol=0, atol=0)


def test_a_loop_is_its_formula_from_the_last_row_of_the_prompt_on():
    scores = [9.0, 2.0, 0.0, -1.0, 2.0, 0.5]
    pid = Pid(setpoint=1.0, kp=0.5, ki=0.25, kd=0.125, least=-1.0, largest=1.5)
    gates = [Gate(name="g", when=leaf(), then=adding(READ), mode=Mode.PID, pid=pid)]

    added, (count,) = run_and_count(gates, scores, 2, [2, 1, 1, 1, 1])

    # Errors: -1, 1, 2, -1, 0.5. Changes: 0, 2, 1, -3, 1.5. Integrals: -1, 0, 2, -1, 0.5; those of the third row and of
    # the fourth are dropped, since their strengths, 1.625 and -1.125, lie beyond a limit.
    assert added[SITES.index(READ)].tolist() == [0.0, -0.75, 0.75, 1.5, -1.0, 0.5625]
    assert count == 5


SCORES = [-1.0, 2.0, -1.0, 3.0, -1.0, -1.0]
"""Rows 0 to 3 are the prompt, 4 and 5 are generated; the threshold is 0."""


@pytest.mark.parametrize(
    ("scope", "sites", "early", "late"),
    [
        (GateScope.THIS, (READ, LATE), [0] * 6, [0, 1, 0, 1, 0, 0]),
        (GateScope.NEXT, SITES, [0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0]),
        (GateScope.REST, SITES, [0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]),
    ],
)
def test_each_scope_acts_where_it_says(scope, sites, early, late):
    found = run([Gate(name="g", when=leaf(), then=adding(*sites), scope=scope)], SCORES, 4, [4, 1, 1])

    assert found.tolist() == [early, late, late]


@pytest.mark.parametrize(
    ("pooling", "scores", "late"),
    [
        (ScorePooling.LAST_PROMPT, [5.0, 1.0, -9.0], [0, 1, 1]),
        (ScorePooling.LAST_PROMPT, [5.0, -1.0, 9.0], [0, 0, 0]),
        (ScorePooling.PROMPT_MEAN, [5.0, -1.0, -9.0], [0, 1, 1]),
        (ScorePooling.PROMPT_MEAN, [1.0, -3.0, 9.0], [0, 0, 0]),
    ],
)
def test_a_pooled_prompt_decides_at_its_last_row(pooling, scores, late):
    gate = Gate(name="g", when=Negation(Negation(leaf(pooling=pooling))), then=adding(LATE))

    assert run([gate], scores, 2, [1, 1, 1])[2].tolist() == late


def test_hysteresis_holds_on_until_the_other_side():
    gate = Gate(name="g", when=leaf(1.0, hysteresis=0.5), then=adding(LATE))

    assert run([gate], [0.75, 1.25, 0.75, 0.5, 0.25, 0.75], 6, [6])[2].tolist() == [0, 1, 1, 1, 0, 0]


def test_attenuation_multiplies_what_the_request_adds_by_itself():
    vectors = PhaseVectors.from_rows({LATE: 2 * ADDED})
    gate = Gate(name="g", when=leaf(), then=Then(attenuate=0.25))

    found = run([gate], [-1.0, 1.0, 1.0], 2, [2, 1], own=((vectors, None), (vectors, None)))

    assert found[2].tolist() == [2, 0.5, 0.5]


def test_what_only_observes_adds_nothing_and_always_acts_on_every_row():
    observing = Gate(name="o", when=leaf(), then=Then(observes=True))
    acting = Gate(name="a", when=Always(), then=adding(EARLY, LATE))

    assert run([observing], [1.0, 1.0], 1, [1, 1]).abs().sum() == 0
    assert run([observing, acting], [1.0, 1.0], 1, [1, 1])[[0, 2]].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("scope", "prompt", "generated"),
    [
        (GateScope.THIS, [1, 1, 0, 0], [0, 0, 1, 0]),
        (GateScope.NEXT, [0, 1, 1, 0], [0, 0, 0, 1]),
        (GateScope.REST, [1, 1, 1, 1], [0, 0, 1, 1]),
    ],
)
def test_a_condition_of_a_phase_lets_a_gate_fire_there_alone(scope, prompt, generated):
    def when(phase):
        return ConditionGroup(Combine.ALL, (Always(phase), leaf()))

    for phase, expected in ((GatePhase.PROMPT, prompt), (GatePhase.GENERATED, generated)):
        gate = Gate(name="g", when=when(phase), then=adding(LATE), scope=scope)
        assert run([gate], [1.0, 1.0, 1.0, -1.0], 2, [2, 1, 1])[2].tolist() == expected


@pytest.mark.parametrize("is_first", [False, True])
def test_a_phase_does_not_bound_the_strength_of_other_conditions(is_first):
    for phase, expected in ((GatePhase.PROMPT, [3, 3, 0, 0]), (GatePhase.GENERATED, [0, 0, 3, 3])):
        parts = (Always(phase), leaf(hysteresis=1.0)) if is_first else (leaf(hysteresis=1.0), Always(phase))
        for combine, found in ((Combine.ALL, expected), (Combine.ANY, [3, 3, 3, 3])):
            when = ConditionGroup(combine, parts)
            gate = Gate(name="g", when=when, then=adding(LATE), mode=Mode.PROPORTIONAL, amount=3.0)

            assert run([gate], [2.0, 2.0, 2.0, 2.0], 2, [2, 1, 1])[2].tolist() == found
    when = ConditionGroup(Combine.ALL, (leaf(hysteresis=1.0), Negation(Always(GatePhase.PROMPT))))
    gate = Gate(name="g", when=when, then=adding(LATE), mode=Mode.PROPORTIONAL, amount=3.0)
    assert run([gate], [2.0, 2.0, 2.0, 2.0], 2, [2, 1, 1])[2].tolist() == [0, 0, 3, 3]
    both = ConditionGroup(Combine.ALL, (Always(GatePhase.PROMPT), Always(GatePhase.PROMPT)))
    assert run([Gate(name="g", when=both, then=adding(LATE))], [0.0] * 3, 2, [2, 1])[2].tolist() == [1, 1, 0]
