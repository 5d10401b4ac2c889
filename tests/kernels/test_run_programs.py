"""The kernel of programs against its definition: under Triton's interpreter in CI, natively on a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headgate.steering.programs.codes import (
    MAX_GROUPS,
    NUM_CODES,
    NUM_PARAMS,
    Code,
    Edit,
    FeatureActivation,
    Flag,
    InputNorm,
)
from headgate.steering.worker.program_reference import program_deltas_reference

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

run_programs = pytest.importorskip("headgate.steering.kernels.run_programs")
add_rows = pytest.importorskip("headgate.steering.kernels.add_rows").add_rows
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS = 9
NUM_CHANGES = 5
KEEP_NORM = Flag.KEEP_NORM_FROM | Flag.KEEP_NORM_TO


@dataclass
class Entry:
    """An entry as a test writes it."""

    code: int
    read: int = 1
    write: int = 2
    params: Sequence[float] = (1.0, 1.0)
    group: int = 0


@dataclass
class Tables:
    """Arguments of `program_deltas` behind the stream's."""

    pool: Tensor
    rows: Tensor
    counts: Tensor
    codes: Tensor
    params: Tensor
    groups: Tensor | None = None
    changes: Tensor | None = None

    def arguments(self) -> list[Tensor | None]:
        """In their order; the changes are a copy."""
        changes = None if self.changes is None else self.changes.clone()
        return [self.pool, self.rows, self.counts, self.codes, self.params, self.groups, changes]


@dataclass
class Example:
    """Programs, row 0 of the table being idle, and the rows of the stream that run them."""

    programs: Sequence[Sequence[Entry]]
    rows: Sequence[int]
    width: int = 64
    dtype: torch.dtype = torch.float32
    groups: Sequence[int] | None = None
    has_addend: bool = False
    has_changes: bool = False
    tables: Tables = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        capacity = 1 + max(map(len, self.programs), default=0)
        codes = torch.full((len(self.programs) + 1, capacity, NUM_CODES), 2**30)  # would end the process if used
        params = torch.full((len(self.programs) + 1, capacity, NUM_PARAMS), torch.nan)
        for row, program in enumerate(self.programs, 1):
            for index, entry in enumerate(program):
                codes[row, index] = torch.tensor([entry.code, entry.read, entry.write, entry.group])
                params[row, index] = torch.tensor([*entry.params, *[0.0] * (NUM_PARAMS - len(entry.params))])
        pool = torch.randn(NUM_SLOTS, self.width, generator=generator) / self.width**0.5
        pool[0] = 0
        self.tables = Tables(
            pool.to(self.dtype).to(DEVICE),
            torch.tensor(self.rows, dtype=torch.int32, device=DEVICE),
            torch.tensor([[0, *map(len, self.programs)][row] for row in self.rows], dtype=torch.int32, device=DEVICE),
            codes.int().to(DEVICE),
            params.to(DEVICE),
            None if self.groups is None else torch.tensor(self.groups, dtype=torch.int64, device=DEVICE),
            torch.randn(len(self.rows), NUM_CHANGES, generator=generator).to(DEVICE) if self.has_changes else None,
        )
        self.value, self.addend = (self._stream(generator) for _ in range(2))

    def _stream(self, generator: torch.Generator) -> Tensor:
        """Rows whose sums are exact in bfloat16: Triton's interpreter truncates where GPUs round."""
        sixteenths = torch.randint(-64, 64, (len(self.rows), 2 * self.width), generator=generator) / 16
        return sixteenths.to(self.dtype).to(DEVICE)[:, : self.width]

    def run(self) -> Tensor:
        """What the kernel returns."""
        addend = self.addend if self.has_addend else None
        return run_programs.program_deltas(self.value, addend, *self.tables.arguments())

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """What the definition returns."""
        addend = self.addend if self.has_addend else None
        return program_deltas_reference(self.value, addend, *self.tables.arguments(), dtype=dtype)

    def after(self) -> Tensor:
        """The rows of the stream with what the kernel adds, in fp64."""
        return self.value.double() + self.run().double()

    def check(self) -> None:
        """Compare the rows that run a program; a difference of 1e-5 of the row's own size is rounding in fp32."""
        active = self.tables.counts > 0
        delta, expected = self.run()[active].double(), self.expected()[active]
        size = expected.abs().amax(-1, keepdim=True) + self.value[active].double().abs().amax(-1, keepdim=True)
        assert delta.shape == expected.shape
        assert torch.isfinite(expected).all()
        assert ((delta - expected).abs() <= 1e-5 * size).all(), ((delta - expected).abs() / size).max()


OPERATIONS = {
    "add": Entry(Code.ADD, 0, 2, (0, 1.5)),
    "linear": Entry(Code.LINEAR, 1, 2, (1.3, 0.7, -1.0, 0.25)),
    "linear-same-row": Entry(Code.LINEAR, 1, 1, (1.3, 1.3, -1.0)),
    "linear-nothing-read": Entry(Code.LINEAR, 0, 2, (1.0, 1.0, 5.0, 0.5)),
    "clamp-both": Entry(Code.CLAMP, 1, 2, (1.1, 0.9, -0.2, 0.3, 1.0)),
    "clamp-min": Entry(Code.CLAMP, 1, 2, (1.1, 0.9, 1.0, math.inf, 0.5)),
    "clamp-max": Entry(Code.CLAMP, 1, 2, (1.1, 0.9, -math.inf, -1.0, 1.0)),
    "norm-add": Entry(Code.NORM_ADD, 0, 2, (0, 1.2, -0.3)),
    "rotate": Entry(Code.ROTATE, 1, 2, (1.1, 0.9, 0.5, 0.8660254, 1.0)),
    "rotate-if-positive": Entry(Code.ROTATE | Flag.IF_POSITIVE, 1, 2, (1.1, 0.9, -1.0, 0.0, 0.7)),
    "replace": Entry(Code.REPLACE, 0, 2, (1.0, 3.0, 0.75)),
    "replace-masked": Entry(Code.REPLACE, 3, 2, (1.0, 1.0, 1.0)),
}
FEATURE_PARAMS = (1.2, 1.5, 0.1, 0.3, 0.8, 0.7, -0.05, 0.02)
ACTIVATIONS = list(FeatureActivation)
NORMS = list(InputNorm)
EDITS = list(Edit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("flags", [0, KEEP_NORM], ids=["plain", "norm-kept"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_its_formula(operation, flags, dtype):
    entry = OPERATIONS[operation]
    program = [Entry(entry.code | flags, entry.read, entry.write, entry.params)]

    Example([program], [1, 0, 1, 1], width=100, dtype=dtype).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_adding_by_a_program_is_adding_as_vectors_are_added(dtype):
    example = Example([[OPERATIONS["add"]]], [1, 0, 1], width=100, dtype=dtype)
    pool, slots = example.tables.pool, 2 * example.tables.rows  # the row of its vector, where the program acts

    as_vectors = add_rows(example.value, pool, slots, OPERATIONS["add"].params[1])
    no_slots = torch.zeros_like(slots)
    by_program = add_rows(example.value, pool, no_slots, 1.0, example.run(), example.tables.counts)

    torch.testing.assert_close(by_program, as_vectors, rtol=torch.finfo(dtype).eps, atol=2**-20)
    assert not torch.equal(as_vectors, example.value)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.name)
@pytest.mark.parametrize("flag", [0, Flag.IF_ACTIVE], ids=["always", "if-active"])
def test_each_feature_is_its_formula(activation, norm, edit, flag):
    program = [Entry(Code.FEATURE | activation | norm | edit | flag, 1, 2, FEATURE_PARAMS)]

    Example([program], [1] * 8, width=72).check()


@pytest.mark.parametrize(
    ("num_tokens", "width"),
    [(0, 64), (1, 64), (7, 100), (63, 576), (3, 5376), (2, 16384)],
    ids=["empty", "decode", "width-not-a-power-of-2", "smollm2", "gemma", "wide"],
)
@pytest.mark.parametrize("has_addend", [False, True], ids=["value", "sum"])
def test_rows_run_their_own_programs(num_tokens, width, has_addend):
    programs = [[OPERATIONS["linear"]], [*OPERATIONS.values(), *features(5)], features(2)]

    example = Example(programs, [token % 4 for token in range(num_tokens)], width, torch.bfloat16, None, has_addend)

    example.check()


def features(count: int, code: int = FeatureActivation.JUMP_RELU | Edit.SET) -> list[Entry]:
    """Different ones, on rows of their own as far as there are any."""
    return [
        Entry(Code.FEATURE | code, 1 + index % 8, 1 + (3 * index + 1) % 8, (1.0, 1.0, 0.1 * index, 0.2, 1.0 + index))
        for index in range(count)
    ]


@st.composite
def programs(draw: st.DrawFn) -> list[Entry]:
    """Operations in any order, then features: what requests put together."""
    number, slot = st.floats(-2, 2, width=32), st.integers(0, NUM_SLOTS - 1)
    groups, drawn = st.integers(0, 3), []
    for operation in draw(st.lists(st.sampled_from([*OPERATIONS]), max_size=6)):
        code = OPERATIONS[operation].code | draw(st.sampled_from([0, KEEP_NORM]))
        bounds = draw(st.sampled_from([(-0.5, 0.5), (0.1, math.inf), (-math.inf, -0.1)]))
        params = (*draw(st.tuples(number, number)), *bounds, draw(number))
        if code & 0xFF != Code.CLAMP:
            params = draw(st.tuples(*[number] * 5))
        drawn.append(Entry(code, draw(slot), draw(slot), params, draw(groups)))
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(NORMS)) | draw(st.sampled_from(ACTIVATIONS)) | draw(st.sampled_from(EDITS))
        params = draw(st.tuples(*[number] * NUM_PARAMS))
        drawn.append(Entry(Code.FEATURE | kind, draw(slot), draw(slot), params, draw(groups)))
    return drawn


@settings(max_examples=30)
@given(composed=st.lists(programs(), min_size=1, max_size=3), has_groups=st.booleans(), data=st.data())
def test_programs_put_together_run_entry_by_entry(composed, has_groups, data):
    rows = data.draw(st.lists(st.integers(0, len(composed)), min_size=1, max_size=6))
    groups = data.draw(st.lists(st.integers(0, 7), min_size=len(rows), max_size=len(rows)))
    if not has_groups:
        for entry in (entry for program in composed for entry in program):
            entry.group = 0

    example = Example(composed, rows, width=40, groups=groups if has_groups else None)

    assert_close_where_steps_agree(example)


def assert_close_where_steps_agree(example: Example) -> None:
    """Compare as `Example.check` does, where fp32 and fp64 take the same side of every threshold."""
    active = example.tables.counts > 0
    exact, single = example.expected()[active], example.expected(torch.float32)[active].double()
    size = exact.abs().amax(-1) + example.value[active].double().abs().amax(-1)
    agrees = ((exact - single).abs().amax(-1) <= 1e-4 * size) & torch.isfinite(exact).all(-1)
    delta = example.run()[active].double()
    assert ((delta - exact).abs().amax(-1) <= 3e-4 * size)[agrees].all()


def test_groups_choose_their_rows_of_the_batch():
    program = [
        Entry(Code.ADD, 0, 1, (0, 1.0), group=1),
        Entry(Code.ADD, 0, 2, (0, 1.0), group=MAX_GROUPS),
        Entry(Code.ADD | KEEP_NORM, 0, 3, (0, 1.0), group=2),
    ]
    highest = 1 << MAX_GROUPS - 1

    example = Example([program], [1] * 5, groups=[0, 1, highest, highest + 1, 2])

    example.check()
    assert not example.run()[0].any()
    torch.testing.assert_close(example.run()[1], example.tables.pool[1], rtol=0, atol=1e-5)


def test_the_sum_of_the_stream_is_rounded_once():
    if DEVICE == "cpu":
        pytest.skip("Triton's interpreter truncates where GPUs round")
    example = Example([[OPERATIONS["linear"], *features(3)]], [1] * 9, 100, torch.bfloat16, has_addend=True)
    example.value, example.addend = (torch.randn(9, 100, device=DEVICE).bfloat16() for _ in range(2))

    example.check()


def test_rows_without_a_program_are_neither_read_nor_written(monkeypatch):
    example = Example([[OPERATIONS["linear"]]], [0, 1, 0], has_addend=True)
    example.value[[0, 2]] = torch.nan
    example.tables.rows[[0, 2]] = 2**30  # would end the process if used
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(7.0))

    delta = example.run()

    assert (delta[[0, 2]] == 7).all()
    assert not (delta[1] == 7).any()


def test_slot_0_is_not_read():
    example = Example([[Entry(Code.LINEAR, 0, 2, (1, 1, 1, 1)), Entry(Code.LINEAR, 1, 0, (1, 1, 1, 1))]], [1])
    expected = example.expected()

    example.tables.pool[0] = torch.nan

    torch.testing.assert_close(example.run().double(), expected, rtol=0, atol=1e-5)


def test_an_ablated_direction_is_gone():
    example = Example([[Entry(Code.LINEAR, 1, 1)]], [1] * 16, width=576)
    direction = example.tables.pool[1].double()
    example.tables.params[1, 0, :3] = torch.tensor([1, 1 / direction.square().sum(), -1.0])

    left = example.after() @ direction / direction.norm()

    assert (left.abs() <= 4 * torch.finfo(torch.float32).eps * example.value.double().norm(dim=-1)).all()


def test_a_cap_is_kept_and_does_nothing_the_second_time():
    example = Example([[Entry(Code.CLAMP, 1, 1)]], [1] * 16)
    direction = example.tables.pool[1].double()
    length = float(direction.norm())
    example.tables.params[1, 0, :5] = torch.tensor([1 / length, 1 / length, -0.25, 0.5, 1.0])

    example.value = example.after().float()
    once = example.value.double() @ direction / length

    assert ((once >= -0.25 - 1e-5) & (once <= 0.5 + 1e-5)).all()
    assert (example.run().abs() <= 1e-5).all()


@pytest.mark.parametrize("degrees", [0, 45, 180, 300])
def test_a_rotation_keeps_the_norm_and_sets_the_angle(degrees):
    angle = math.radians(degrees)
    entry = Entry(Code.ROTATE, 1, 2, (1.0, 1.0, math.cos(angle), math.sin(angle), 1.0))
    example = Example([[entry]], [1] * 16)
    example.tables.pool[1:3] = torch.linalg.qr(example.tables.pool[1:3].T)[0].T
    plane = example.tables.pool[1:3].double()

    after = example.after()

    torch.testing.assert_close(after.norm(dim=-1), example.value.double().norm(dim=-1), rtol=1e-5, atol=0)
    radius = (example.value.double() @ plane.T).norm(dim=-1, keepdim=True)
    expected = radius * torch.tensor([math.cos(angle), math.sin(angle)], device=DEVICE, dtype=torch.float64)
    torch.testing.assert_close(after @ plane.T, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("operation", ["add", "linear", "clamp-both", "norm-add", "replace"])
def test_a_kept_norm_is_kept_and_rows_of_zeros_stay(operation):
    entry = OPERATIONS[operation]
    example = Example([[Entry(entry.code | KEEP_NORM, entry.read, entry.write, entry.params)]], [1] * 8)
    example.value[0] = 0

    after = example.after()

    torch.testing.assert_close(after.norm(dim=-1), example.value.double().norm(dim=-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [InputNorm.CONSTANT_NORM, InputNorm.LAYER_NORM], ids=lambda norm: norm.name)
def test_a_row_of_zeros_has_features_without_effect(norm):
    example = Example([features(3, norm)], [1])
    example.value[:] = 0

    assert not example.run().any()


def test_features_do_not_see_each_other():
    both, first, second = ([features(2)], [features(2)[:1]], [features(2)[1:]])

    total = Example(both, [1] * 4).run()

    torch.testing.assert_close(total, Example(first, [1] * 4).run() + Example(second, [1] * 4).run())


def test_a_row_gets_the_same_bits_whatever_else_is_in_the_batch():
    programs = [[*OPERATIONS.values(), *features(7)], features(3)]
    many = Example(programs, [1, 2, 0, 1, 1, 2] * 5, width=576, dtype=torch.bfloat16)
    one = Example(programs, [1], width=576, dtype=torch.bfloat16)
    one.value = many.value[3:4]

    assert torch.equal(one.run()[0], many.run()[3])


@pytest.mark.parametrize("width", [4, 48, 576], ids="width{}".format)
def test_rows_may_be_some_columns_of_a_pool_of_a_narrower_dtype(width):
    """As at sites that are not as wide as the widest, on ranks that have a part, and of a router's float32 scores."""
    operations = [one for one in OPERATIONS.values() if one.read or one.write]
    example = Example([operations, [OPERATIONS["linear"]]], [1, 0, 2, 1], width=width)
    pool = torch.randn(NUM_SLOTS, 3 * width, generator=torch.Generator().manual_seed(1)) / width**0.5
    pool[0] = 0
    example.tables.pool = pool.bfloat16().to(DEVICE)[:, width : 2 * width]

    example.check()


def test_arguments_that_do_not_fit_are_refused():
    example = Example([[OPERATIONS["linear"]]], [1, 0])
    tables = example.tables
    program_deltas = run_programs.program_deltas

    with pytest.raises(ValueError, match="contiguous and 64 wide"):
        program_deltas(example.value.T.contiguous().T, None, *tables.arguments())
    with pytest.raises(ValueError, match="64 wide"):
        program_deltas(example.value, example.value[:, :9], *tables.arguments())
    with pytest.raises(ValueError, match="expected rows of torch"):
        program_deltas(example.value, example.value.half(), *tables.arguments())
    with pytest.raises(ValueError, match="expected rows of 3 tokens"):
        program_deltas(torch.zeros(3, 64, device=DEVICE), None, *tables.arguments())
    with pytest.raises(ValueError, match="expected counts of 2 tokens"):
        program_deltas(example.value, None, tables.pool, tables.rows, tables.counts[:1], tables.codes, tables.params)
    with pytest.raises(ValueError, match=r"expected \[R, E, 4\]"):
        program_deltas(example.value, None, *tables.arguments()[:4], tables.params[:1], None)
    with pytest.raises(ValueError, match="expected changes of 2 tokens"):
        program_deltas(example.value, None, *tables.arguments()[:-1], torch.zeros(3, 4, device=DEVICE))
    with pytest.raises(ValueError, match="changes must be contiguous, in float32"):
        program_deltas(example.value, None, *tables.arguments()[:-1], torch.zeros(2, 4, device=DEVICE).half())
    with pytest.raises(ValueError, match="tables must be contiguous"):
        program_deltas(example.value, None, *tables.arguments()[:3], tables.codes[:, ::2], tables.params[:, ::2], None)
