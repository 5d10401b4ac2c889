"""The kernels of gates against their definition: under Triton's interpreter in CI, natively on a GPU."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headgate.steering.programs.codes import (
    Code,
    Combine,
    Flag,
    GateFlag,
    GateScope,
    Mode,
    ScoreKind,
    ScorePooling,
    TokenFlag,
    UnitFunction,
    with_change,
)
from headgate.steering.worker.gates.reference import GateTensors
from headgate.steering.worker.program_reference import program_deltas_reference
from tests.kernels.gate_programs import (
    EARLY_COLUMN,
    NUM_COLUMNS,
    Request,
    Steps,
    attenuate,
    gate,
    gate_programs,
    gated,
    leaf,
    loop,
    node,
    score,
)
from tests.kernels.test_run_programs import (
    ACTIVATIONS,
    DEVICE,
    FEATURE_PARAMS,
    KEEP_NORM,
    NORMS,
    OPERATIONS,
    Entry,
    Example,
    features,
    run_programs,
)

scan_gates = pytest.importorskip("headgate.steering.kernels.scan_gates")


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Requests of a few rows need several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_gates, "_ROWS", 4)
        patch.setattr(scan_gates, "_TOKENS", 8)
        yield


def in_steps(program: Sequence[Entry], replayed: int = 0) -> None:
    """Run a request in steps of one row, of more rows than a block has, over its prompt's end, and of one row."""
    steps = Steps([program], [Request(1, 5, 8, 1, replayed)])
    for number in (1, 6, 1):
        steps.step([number])


def test_each_score_is_its_formula():
    codes = [ScoreKind.LINEAR, ScoreKind.COSINE]
    codes += [ScoreKind.ACTIVATION | a | n for a in ACTIVATIONS for n in NORMS]
    program = [score(at, code, 1 + at % 8, FEATURE_PARAMS) for at, code in enumerate(codes)]
    for entry in program[::2]:
        entry.write = 3

    steps = Steps([program], [Request(1, 2, 3, 0)])
    steps.rows[0][1] = 0
    steps.step([1])
    steps.step([2])


def mlp(column: int, kinds: Sequence[UnitFunction]) -> list[Entry]:
    """A small network: a unit of each kind, and their sum."""
    numbers = [(0.7, 0.3, 0.2 - at / 10, 1.5 - at / 2) for at in range(len(kinds))]
    units = [score(column, ScoreKind.UNIT | kind, 1 + at % 8, numbers[at]) for at, kind in enumerate(kinds)]
    for entry in units[::2]:
        entry.write = 3
    return [*units, score(column, ScoreKind.UNIT | UnitFunction.SUM, 0, (0.0, 0.0, 0.25))]


@pytest.mark.parametrize("before", [0, 1])
def test_units_make_scores_together_with_others_between(before):
    functions = [UnitFunction.RELU, UnitFunction.GELU, UnitFunction.SILU]
    program = [score(0)] * before  # so that sums have both places in a tile
    for column, kinds in enumerate((functions, functions[:1], functions * 2, [], functions[1:]), 1):
        program += [*mlp(column, kinds), *([score(20 + column, ScoreKind.COSINE)] if column % 2 else [])]
    program += [leaf(30, 3, Mode.SIGMOID), gate(33, 30)]

    in_steps([*program, gated(OPERATIONS["linear"], 33)])


@pytest.mark.parametrize("pool", list(ScorePooling), ids=lambda pool: pool.name)
def test_each_leaf_is_its_formula(pool):
    modes = [mode for mode in Mode if mode != Mode.PID]
    kinds = list(itertools.product(modes, [0, GateFlag.BELOW], [0.0, 0.4]))
    if pool != ScorePooling.TOKEN:
        kinds = [(Mode.BINARY, 0, 0.4), (Mode.PROPORTIONAL, GateFlag.BELOW, 0.4)]
    leaves = [
        leaf(1 + 3 * at, 0, pool | mode | below, (0.1, hysteresis, 1.7, 0.3))
        for at, (mode, below, hysteresis) in enumerate(kinds)
    ]
    in_steps([score(0, params=(2.0, 0, 0.05)), *leaves])


@pytest.mark.parametrize("pool", [ScorePooling.TOKEN, ScorePooling.EMA], ids=lambda pool: pool.name)
def test_each_control_loop_is_its_formula(pool):
    gains = [(0.5, 0.0, 0.0), (0.0, 0.4, 0.0), (0.0, 0.0, 0.7), (0.6, 0.3, -0.2), (-0.5, -0.3, 0.1)]
    program = [score(0, params=(2.0, 0, 0.05))]
    program += [loop(1 + 3 * at, 0, pool, each) for at, each in enumerate(gains)]
    program += [gate(16, 1), gate(19, 10, GateScope.NEXT), gate(22, 13)]

    in_steps([*program, *(gated(OPERATIONS["linear"], column) for column in (16, 19, 22))])


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_a_row_without_a_finite_score_does_not_move_a_loop(value):
    steps = Steps([[score(0, params=(100.0, 0.0, 0.1)), loop(1, 0), gate(4, 1)]], [Request(1, 1, 4, 0)])
    steps.rows[0][1, 0] = value

    signals = [steps.step([1])[1][0, 4].item() for _ in range(4)]

    assert signals[1] == 0
    assert all(0 < abs(each) < 1 for each in (signals[0], *signals[2:]))


@pytest.mark.parametrize("latched", [math.nan, 0.6], ids=["not-latched", "latched-later"])
def test_each_gate_is_its_formula(latched):
    kinds = [*itertools.product(GateScope, [0, GateFlag.FROM_PROMPT_END], [0]), (GateScope.REST, 0, GateFlag.OBSERVES)]
    program = [score(0), leaf(1, 0, Mode.SIGMOID, (0.6, 0, 2.0, 0))]
    program += [gate(4 + 3 * at, 1, sum(kind), latched) for at, kind in enumerate(kinds)]

    in_steps([*program, *(gated(OPERATIONS["add"], 4 + 3 * at) for at in (0, 2, 4))])


def test_each_node_is_its_formula():
    program = [score(0), score(1, read=3), leaf(2, 0, Mode.SIGMOID), leaf(5, 1, Mode.SIGMOID, (-0.1, 0, 3.0, 0))]
    program += [node(8, Combine.ANY, 2, 5), node(10, Combine.ALL, 2, 8), node(12, Combine.NOT, 10)]
    program += [node(14, Combine.ALWAYS, 0), node(16, Combine.ALL, 12, 14), gate(18, 16), gate(21, 14, GateScope.NEXT)]

    in_steps([*program, gated(OPERATIONS["linear"], 18)])


STRENGTH = [score(0), leaf(1, 0, Mode.SIGMOID, (0.1, 0, 2.0, 0)), gate(4, 1)]


@pytest.mark.parametrize("is_early", [False, True], ids=["late", "early"])
def test_each_entry_is_multiplied_by_its_coefficient(is_early):
    column = EARLY_COLUMN if is_early else 4
    program = [*STRENGTH, attenuate(0.3, column, is_early=is_early), attenuate(1.4, 4)]
    for at, entry in enumerate([*OPERATIONS.values(), *features(5)]):
        kept = replace(entry, code=entry.code | KEEP_NORM) if at % 3 == 0 and entry.code < Code.FEATURE else entry
        program.append(gated(kept, column, is_early=is_early, is_attenuated=at % 2 == 0))

    steps = Steps([program], [Request(1, 2, 4, 1, replayed=3)])
    for number in (1, 2, 1):
        steps.step([number])


def test_an_entry_without_a_gate_is_attenuated_too():
    program = [*STRENGTH, attenuate(0.0, 4), Entry(Code.ADD | Flag.ATTENUATED, 0, 2, (0, 1.5))]

    delta, signals = Steps([program], [Request(1, 2, 2, 0)]).step([1])

    assert 0.1 < signals[0, 4] < 0.95
    vector = Example([program], [1], 24).tables.pool[2]
    torch.testing.assert_close(delta[0], 1.5 * (1 - signals[0, 4]) * vector, rtol=1e-4, atol=1e-5)


def test_a_strength_that_is_no_number_is_0_and_its_vectors_are_not_read():
    program = [gated(OPERATIONS["linear"], EARLY_COLUMN, is_early=True), gated(features(1)[0], 3)]
    example = Example([program], [1, 1])
    example.tables.pool[:] = math.nan
    signals = torch.zeros(2, NUM_COLUMNS, device=DEVICE)
    signals[1, 3] = math.nan
    tokens = torch.tensor([[0, 0], [1, TokenFlag.IS_GENERATED]], dtype=torch.int32, device=DEVICE)
    gates = (signals, torch.full((2, NUM_COLUMNS), math.nan, device=DEVICE), tokens)

    delta = run_programs.program_deltas(example.value, None, *example.tables.arguments(), gates=gates)

    assert not delta.any()


def test_a_feature_in_two_halves_is_multiplied_where_it_is_written():
    read = with_change(Code.READ_FEATURE, 1)
    program = [gated(Entry(read, 1, 0, FEATURE_PARAMS), EARLY_COLUMN), gated(Entry(Code.WRITE_FEATURE, 0, 2), 3)]
    example = Example([program], [1], has_changes=True)
    signals = torch.zeros(1, NUM_COLUMNS, device=DEVICE)
    signals[0, 3] = 0.4
    tokens = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    gates = (signals, torch.zeros(1, NUM_COLUMNS, device=DEVICE), tokens)
    made, known = example.tables.arguments(), example.tables.arguments()

    delta = run_programs.program_deltas(example.value, None, *made, gates=gates)

    expected = program_deltas_reference(example.value, None, *known, gates=GateTensors(*gates))
    assert expected.any()
    torch.testing.assert_close(delta.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(made[-1], known[-1])
    assert not torch.equal(made[-1], example.tables.changes)


GIVEN = given(composed=st.lists(gate_programs(), min_size=1, max_size=2), data=st.data())


@settings(max_examples=4)
@GIVEN
def test_requests_with_gates_run_in_steps_of_any_size(composed, data):
    run_requests(composed, data)


@pytest.mark.extended
@settings(max_examples=50)
@GIVEN
def test_more_requests_with_gates_run_in_steps_of_any_size(composed, data):
    run_requests(composed, data)


def run_requests(composed: list[list[Entry]], data: st.DataObject) -> None:
    """Run three requests, some with one of the programs, until all rows are done."""
    programs = [*composed, [OPERATIONS["linear"], *features(2)]]
    requests = []
    for slot in data.draw(st.permutations(range(3))):
        length = data.draw(st.integers(1, 7))
        program, prompt = data.draw(st.integers(0, len(programs))), data.draw(st.integers(1, length))
        requests.append(Request(program, prompt, length, slot, data.draw(st.sampled_from([0, 0, length]))))
    steps = Steps(programs, requests)

    while left := [request.length - done for request, done in zip(requests, steps.done, strict=True)]:
        if not any(left):
            break
        numbers = [data.draw(st.integers(0, rest)) for rest in left]
        steps.step(numbers if any(numbers) else left)


@settings(max_examples=3)
@GIVEN
def test_rejected_drafts_leave_the_states_of_the_last_row_that_counts(composed, data):
    requests = [Request(data.draw(st.integers(1, len(composed))), 2, 9, slot) for slot in (2, 0, 1)]
    drafting, plain = Steps(composed, requests), Steps(composed, requests)
    for steps in (drafting, plain):
        steps.step([2, 2, 2])
    while max(drafting.done) < 5:
        accepted = [data.draw(st.integers(1, 3)) for _ in requests]
        rejected = [data.draw(st.integers(0, 2)) for _ in requests]
        drafting.step([one + other for one, other in zip(accepted, rejected, strict=True)], rejected=rejected)
        plain.step(accepted)

        torch.testing.assert_close(drafting.states, plain.states, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_are_the_same_however_a_prompt_is_cut():
    program = [score(0), *(leaf(1 + 3 * at, 0, pool, (0.1, 0.3, 1, 0.2)) for at, pool in enumerate(ScorePooling))]
    program += [gate(13 + 3 * at, 1 + 3 * at, scope) for at, scope in enumerate([*GateScope, GateScope.REST])]
    program += [loop(25, 0), loop(28, 0, ScorePooling.EMA), gate(31, 25), gate(34, 28, GateScope.NEXT)]
    program += [gated(OPERATIONS["linear"], column) for column in (13, 16, 19, 22, 31, 34)]
    request = Request(1, 3, 7, 1)

    found = []
    for cut in ([1] * 7, [7], [1, 4, 2]):
        steps = Steps([program], [request])
        made = [steps.step([number]) for number in cut]
        found.append([torch.cat([each[at][:, :37] for each in made]) for at in (0, 1)] + [steps.states])

    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_without_gates_have_the_bits_that_they_have_without_any_gate():
    plain = [[OPERATIONS["rotate"], OPERATIONS["clamp-both"], *features(3)], features(2)]
    program = [*STRENGTH, gated(OPERATIONS["linear"], 4)]
    requests = [Request(at, 1, 3, slot) for slot, at in enumerate([1, 3, 2, 3, 0, 1])]
    steps = Steps([*plain, program], requests)
    example = Example([*plain, program], [1, 2, 1], 24)
    example.value = torch.stack([steps.rows[request][0] for request in (0, 2, 5)]).to(DEVICE)

    delta, _ = steps.step([1, 3, 1, 1, 1, 1])

    assert torch.equal(delta[[0, 4, 7]], example.run())


def test_rows_without_a_program_and_other_requests_keep_what_they_have():
    requests = [Request(0, 1, 2, 0), Request(1, 1, 2, 2), Request(0, 1, 2, 3)]
    steps = Steps([STRENGTH], requests)
    states, signals = steps.states.clone(), [each.clone().to(DEVICE) for each in steps.signals]

    _, made = steps.step([2, 2, 2])

    assert torch.equal(made[[0, 1, 4, 5]], torch.cat([signals[0], signals[2]]))
    others = torch.ones(NUM_COLUMNS, dtype=torch.bool)
    others[1:7] = False
    assert torch.equal(made[2:4, others][:, 1:], signals[1][:, others][:, 1:])
    torch.testing.assert_close(steps.states[:2], states[:2], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(steps.states[2, others], states[2, others], rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(steps.states[2, 1:4], states[2, 1:4])


def test_a_step_of_one_row_each_needs_one_launch(monkeypatch):
    program = [*STRENGTH, gated(OPERATIONS["linear"], 4)]
    steps = Steps([program], [Request(1, 1, 2, 0), Request(1, 1, 2, 1)])
    steps.step([1, 1])

    monkeypatch.setattr(run_programs, "scan_gates", None)

    steps.step([1, 1], scans=False)


def test_a_program_may_change_within_the_rows_of_a_request():
    programs = [
        [*STRENGTH, gated(OPERATIONS["add"], 4)],
        [score(0), leaf(1, 0, ScorePooling.EMA), gate(4, 1, GateScope.REST)],
    ]
    rows, flags = [1, 1, 2, 2, 0, 2], int(TokenFlag.IS_SCANNED)
    example = Example(programs, rows, 24)
    states = torch.randn(1, NUM_COLUMNS, device=DEVICE)
    tokens = torch.tensor([[0, flags]] * 6, dtype=torch.int32, device=DEVICE)
    made, known = (GateTensors(torch.zeros(6, NUM_COLUMNS).to(DEVICE), states.clone(), tokens) for _ in range(2))

    run_programs.program_deltas(example.value, None, *example.tables.arguments(), gates=made)

    program_deltas_reference(example.value, None, *example.tables.arguments(), gates=known)
    torch.testing.assert_close(made.signals, known.signals, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(made.states, known.states, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_gates_that_do_not_fit_are_refused():
    example = Example([[OPERATIONS["linear"]]], [1, 0])
    signals, states = torch.zeros(2, 4, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    tokens = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)

    def run(*gates: Tensor) -> None:
        run_programs.program_deltas(example.value, None, *example.tables.arguments(), gates=gates)

    right = GateTensors(signals, states, tokens)
    run(*right)
    for wrong in (
        right._replace(signals=signals[:1]),
        right._replace(states=states[:, :3].contiguous()),
        right._replace(tokens=tokens[:, :1].contiguous()),
        right._replace(tokens=tokens.long()),
        right._replace(signals=signals.half()),
    ):
        with pytest.raises(ValueError, match=r"expected float32 signals \[2, C\]"):
            run(*wrong)
    with pytest.raises(ValueError, match="gates must be contiguous"):
        run(*right._replace(signals=signals.T.contiguous().T))


def test_the_kernels_can_be_compiled_for_a_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)

    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_gates"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    of_saes = ["_norm_kernel", "encode_kernel", "decode_kernel", "_delta_kernel"]
    of_top_k = ["_norm_kernel", "encode_kernel", "_select_kernel", "_decode_kernel", "_delta_kernel", "_edit_kernel"]
    assert names == [
        "_scores_kernel",
        "_scan_kernel",
        "_program_deltas_kernel",
        *of_saes,
        *of_top_k,
        "_block_sums_kernel",
    ]
