"""Full reconstruction against its definition: under Triton's interpreter in CI, natively on a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headgate.steering.programs.codes import (
    NUM_CODES,
    NUM_PARAMS,
    NUM_SUMS,
    SUM_LENGTHS,
    SUM_ROWS,
    Code,
    Edit,
    FeatureActivation,
    InputNorm,
)
from headgate.steering.worker.program_reference import program_deltas_reference
from headgate.steering.worker.reconstruction import reconstructed_deltas_reference, reconstruction_deltas_reference

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

reconstruct_rows = pytest.importorskip("headgate.steering.kernels.reconstruct_rows")
run_programs = pytest.importorskip("headgate.steering.kernels.run_programs")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMS = list(InputNorm)
KINDS = ("relu", "jumprelu", "gated")


@dataclass
class Example:
    """A coder with random rows, and the rows of the stream that it reconstructs."""

    listed: list[int]
    num_tokens: int = 5
    width: int = 96
    features: int = 200
    kind: str = "jumprelu"
    norm: InputNorm = InputNorm.NONE
    dtype: torch.dtype = torch.float32
    capacity: int = 8
    has_addend: bool = False
    has_shift: bool = False
    counted: int | None = None
    made: int | None = None
    k: int = 0
    stream: list[Any] = field(init=False)
    coder: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        # sums of sixteenths are exact in bfloat16: Triton's interpreter truncates where GPUs round
        value, addend = ((random(self.num_tokens, self.width) * 16).round().clamp(-60, 60) / 16 for _ in range(2))
        shift = random(self.num_tokens, self.width) / 8
        tokens = torch.full((self.capacity,), 2**30, dtype=torch.int32, device=DEVICE)  # would end the process if used
        tokens[: len(self.listed)] = torch.tensor(self.listed, dtype=torch.int32, device=DEVICE)
        counted = len(self.listed) if self.counted is None else self.counted
        made = len(self.listed) if self.made is None else self.made
        count = torch.tensor([len(self.listed), counted, made], dtype=torch.int32, device=DEVICE)
        self.stream = [
            value.to(self.dtype),
            addend.to(self.dtype) if self.has_addend else None,
            shift if self.has_shift else None,
            tokens,
            count,
        ]
        numbers = torch.zeros(4, self.features, device=DEVICE)
        numbers[0], numbers[2] = random(self.features) / 8, 1
        numbers[3] = numbers[0]
        if self.kind == "jumprelu":
            numbers[1] = random(self.features).abs() / 4
        if self.kind == "gated":
            numbers[2], numbers[3] = random(self.features).exp() / 2, random(self.features) / 8
        rows = [(random(self.features, self.width) / self.width**0.5).to(self.dtype) for _ in range(2)]
        self.sums = torch.zeros(NUM_SUMS + self.width, dtype=torch.float64, device=DEVICE)
        self.coder = [*rows, numbers, random(self.width) / 4, self.sums, self.norm]

    def run(self) -> Tensor:
        """What the kernels return."""
        delta: Tensor = reconstruct_rows.reconstruction_deltas(*self.stream, *self.coder, k=self.k)
        return delta

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """What the definition returns."""
        return reconstruction_deltas_reference(*self.stream, *self.with_sums(), self.k, dtype=dtype)

    def with_sums(self, sums: Tensor | None = None) -> list[Any]:
        """The coder with other sums than those that `run` adds to."""
        return [*self.coder[:4], torch.zeros_like(self.sums) if sums is None else sums, self.norm]

    def check(self) -> None:
        """Compare the listed rows, where fp32 and fp64 agree which features are active."""
        delta, exact = self.run()[self.listed].double(), self.expected()[self.listed]
        single = self.expected(torch.float32)[self.listed].double()
        assert delta.shape == exact.shape
        size = exact.abs().amax(-1)
        agrees = (exact - single).abs().amax(-1) <= 1e-4 * size
        assert agrees.sum() >= len(self.listed) - 1
        error = (delta - exact).abs().amax(-1) / size
        assert (error[agrees] <= 1e-4).all(), error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_become_what_the_coder_decodes_of_them(kind, norm, dtype):
    Example([3, 0, 4], kind=kind, norm=norm, dtype=dtype, has_addend=True, has_shift=True).check()


@pytest.mark.parametrize(
    ("num_tokens", "width", "features"),
    [(1, 64, 64), (70, 100, 130), (3, 576, 1000), (2, 2560, 300)],
    ids=["one", "two-tiles", "smollm2", "gemma"],
)
def test_sizes_need_not_fit_the_tiles(num_tokens, width, features):
    Example([*range(num_tokens)], num_tokens, width, features, dtype=torch.bfloat16, capacity=80).check()


@pytest.mark.parametrize("count", [0, 3, 5])
def test_more_rows_than_a_chunk_are_done_in_chunks(count, monkeypatch):
    monkeypatch.setattr(reconstruct_rows, "CHUNK", 2)

    example = Example([4, 2, 0, 1, 3][:count], norm=InputNorm.LAYER_NORM, has_shift=True)

    example.check()


def test_rows_that_are_not_listed_are_neither_read_nor_written(poisoned_empty):
    example = Example([2], num_tokens=4, has_addend=True, has_shift=True)
    for tensor in example.stream[:3]:
        tensor[[0, 1, 3]] = torch.inf

    delta = example.run()

    assert delta[[0, 1, 3]].isnan().all()
    assert delta[2].isfinite().all()
    assert (delta[2].double() - example.expected()[2]).abs().max() <= 1e-4


@pytest.fixture
def dot_by_element(monkeypatch):
    """Make the interpreter's ``tl.dot`` add up each element alike, as tensor cores do.

    It is numpy's matmul, and BLAS has micro-kernels for some processors that add in another order where a tile ends.
    """

    def matmul(a, b, dtype=None):
        return np.einsum("ik,kj->ij", a, b, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)


def test_a_row_gets_the_same_bits_wherever_it_is_listed(dot_by_element):
    listed = [7, 3, 69, 12, *(row for row in range(70) if row not in (3, 7, 12, 69))]
    many = Example(listed, num_tokens=70, dtype=torch.bfloat16, capacity=70)
    one = Example([3], num_tokens=70, dtype=torch.bfloat16, capacity=70)
    moved = Example(listed[::-1], num_tokens=70, dtype=torch.bfloat16, capacity=70)

    assert torch.equal(many.run()[3], one.run()[3])
    assert torch.equal(many.run(), moved.run())


@given(
    listed=st.lists(st.integers(0, 6), unique=True, max_size=7),
    kind=st.sampled_from(KINDS),
    norm=st.sampled_from(NORMS),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=12)
def test_any_list_of_rows(listed, kind, norm, flags):
    is_bfloat16, has_addend, has_shift = flags
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32

    Example(
        listed, 7, 40, 70, kind, norm, dtype, capacity=7 + len(listed), has_addend=has_addend, has_shift=has_shift
    ).check()


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_edits_in_a_program_add_to_the_reconstruction_what_they_change_of_it(norm):
    """``decode(edited)`` is the reconstruction plus the delta of the edited features, which reads the same row."""
    example = Example([0, 1], num_tokens=2, norm=norm)
    value, (encoder, decoder, numbers, bias, *_) = example.stream[0].double(), example.coder
    codes, params = torch.zeros(1, 1, NUM_CODES, dtype=torch.int32), torch.zeros(1, 1, NUM_PARAMS)
    codes[0, 0, :3] = torch.tensor([Code.FEATURE | FeatureActivation.JUMP_RELU | Edit.SET | norm, 1, 2])
    params[0, 0] = torch.tensor([1, 1, numbers[0, 9], numbers[1, 9], 5.0, 0, 0, encoder[9].sum()])
    pool = torch.stack([torch.zeros_like(encoder[9]), encoder[9], decoder[9]])
    rows, counts = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.ones(2, dtype=torch.int32, device=DEVICE)

    edit = program_deltas_reference(value, None, pool, rows, counts, codes.to(DEVICE), params.to(DEVICE))

    normed, gain, mean = value, torch.ones(2, 1, device=DEVICE, dtype=torch.float64), 0
    if norm == InputNorm.LAYER_NORM:
        gain, mean = value.std(-1, keepdim=True), value.mean(-1, keepdim=True)
        normed = (value - mean) / (gain + 1e-5)
    if norm == InputNorm.CONSTANT_NORM:
        gain = value.norm(dim=-1, keepdim=True) / value.shape[1] ** 0.5
        normed = value / gain
    q = normed @ encoder.double().T + numbers[0].double()
    a = torch.where(q > numbers[1], q.clamp(min=0), 0)
    a[:, 9] = 5.0
    edited = (a @ decoder.double() + bias.double()) * gain + mean
    torch.testing.assert_close(value + example.run().double() + edit, edited, rtol=0, atol=2e-4)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_programs_become_what_their_edited_activations_decode_to(norm, dtype, poisoned_empty):
    """Programs add, mark the row and set a feature; a row that is not listed is moved by its program alone."""
    example = Example([2, 0], num_tokens=4, norm=norm, dtype=dtype, has_addend=True)
    value, addend, _, tokens, count = example.stream
    encoder, decoder, numbers, bias, sums, _ = example.coder
    codes, params = torch.zeros(3, 3, NUM_CODES, dtype=torch.int32), torch.zeros(3, 3, NUM_PARAMS)
    codes[1, :, :3] = torch.tensor(
        [
            [Code.ADD, 0, 3],
            [Code.RECONSTRUCT, 0, 0],
            [Code.FEATURE | FeatureActivation.JUMP_RELU | Edit.SET | norm, 1, 2],
        ]
    )
    codes[2] = codes[1, [0, 2, 0]]
    scales = [1, 1, numbers[0, 9], numbers[1, 9], 5.0, 0, 0, encoder[9].float().sum()]
    params[1, 0, 1], params[1, 2] = 0.5, torch.tensor(scales)
    params[2] = params[1, [0, 2, 0]]
    pool = torch.stack([torch.zeros_like(encoder[9]), encoder[9], decoder[9], torch.ones_like(encoder[9])])
    rows, counts = torch.tensor([[1, 2, 1, 0], [3, 2, 3, 0]], dtype=torch.int32, device=DEVICE)
    tables = (pool, rows, counts, codes.to(DEVICE), params.to(DEVICE), None)
    sae = (tokens, count, encoder, decoder, numbers, bias, sums)

    shift = torch.empty(value.shape, device=DEVICE)
    delta = run_programs.program_deltas(value, addend, *tables, shift_TD=shift)
    delta = reconstruct_rows.reconstruction_deltas(value, addend, shift, *sae, norm, delta)

    expected_sums = torch.zeros_like(sums)
    exact = reconstructed_deltas_reference(value, addend, tables, (*sae[:-1], expected_sums), norm)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-4)
    assert (delta[:3] - exact[:3]).abs().max() <= 1e-4 * exact.abs().max()
    assert delta[3].isnan().all()
    with pytest.raises(ValueError, match="told by the shift"):
        reconstruct_rows.reconstruction_deltas(value, addend, None, *sae, norm, delta)


def test_arguments_that_do_not_fit_are_refused():
    example = Example([0])
    value, _, _, tokens, count = example.stream
    encoder, decoder, numbers, bias, sums, norm = example.coder
    run = reconstruct_rows.reconstruction_deltas

    with pytest.raises(ValueError, match="expected contiguous rows"):
        run(value, value.half(), None, tokens, count, *example.coder)
    with pytest.raises(ValueError, match="contiguous float32 changes"):
        run(value, None, value.half(), tokens, count, *example.coder)
    with pytest.raises(ValueError, match="contiguous decoder"):
        run(value, None, None, tokens, count, encoder, decoder[:9], numbers, bias, sums, norm)
    with pytest.raises(ValueError, match="coder in bfloat16 or float32"):
        run(value, None, None, tokens, count, encoder.half(), decoder.half(), numbers, bias, sums, norm)
    with pytest.raises(ValueError, match="expected numbers"):
        run(value, None, None, tokens, count, encoder, decoder, numbers[:, :9], bias, sums, norm)
    with pytest.raises(ValueError, match="contiguous float32"):
        run(value, None, None, tokens, count, encoder, decoder, numbers.double(), bias, sums, norm)
    with pytest.raises(ValueError, match="float64 sums"):
        run(value, None, None, tokens, count, encoder, decoder, numbers, bias, sums.float(), norm)
    with pytest.raises(ValueError, match="three int32 counts"):
        run(value, None, None, tokens, count[:1], *example.coder)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("has_shift", [False, True], ids=["stream", "shifted"])
def test_figures_are_of_counted_rows_that_are_not_very_long(norm, has_shift, monkeypatch):
    monkeypatch.setattr(reconstruct_rows, "CHUNK", 3)
    example = Example([*range(7), 8, 7], 9, norm=norm, has_shift=has_shift, counted=8, capacity=12)
    value, shift = example.stream[0], example.stream[2]
    value[2] *= 50  # very long
    value[4], value[6] = 0.0, torch.inf
    if has_shift:
        shift[4] = 0.0
    expected = torch.zeros_like(example.sums)

    for _ in range(2):
        example.run()
        reconstruction_deltas_reference(*example.stream, *example.with_sums(expected))

    assert expected[SUM_ROWS] == 2 * 5
    assert expected[SUM_LENGTHS] == 2 * 6
    torch.testing.assert_close(example.sums, expected, rtol=1e-4, atol=1e-4)


def test_without_rows_there_are_no_figures():
    example = Example([1, 2], counted=0)

    example.check()

    assert not example.sums.any()


TOP_K = [(1, 40, 0), (5, 200, 1), (40, 40, 1), (32, 4096, 0), (64, 8200, 1)]


@pytest.mark.parametrize(("k", "features", "is_bfloat16"), TOP_K, ids=str)
def test_rows_become_what_the_k_largest_activations_decode_to(k, features, is_bfloat16):
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    norm = InputNorm.LAYER_NORM if features == 200 else InputNorm.NONE
    example = Example([3, 0, 4], 5, 64, features, "relu", norm, dtype, has_addend=True, has_shift=True, k=k)

    example.check()


def test_selected_features_are_torchs():
    select_features = pytest.importorskip("headgate.steering.kernels.select_features")
    generator = torch.Generator().manual_seed(0)
    for features, k in ((4096, 32), (1000, 100), (256, 3), (81_920, 100)):  # up to Qwen-Scope's largest
        a = (torch.randn(6, features, generator=generator) - 1).clamp(min=0).to(DEVICE)
        a[0] = a[0] * (torch.arange(features, device=DEVICE) < 40)  # fewer than k are active
        a[1] = 0.0
        a[2, : 2 * k : 2] = 3.0  # k of them, and more: of equal ones the first
        a[3, ::5] = torch.inf
        maxima = torch.nn.functional.pad(a, (0, -features % 128)).view(6, -1, 128).amax(2)
        count = torch.tensor([6, 6, 6], dtype=torch.int32, device=DEVICE)

        found = select_features.select(a, maxima, 0, count, k, 128)

        order = a.sort(dim=1, descending=True, stable=True).indices[:, :k]
        for row in range(6):
            expected = {one for one in order[row].tolist() if a[row, one] > 0}
            num = int(found.bounds[row, 0])
            assert set(found.ids[row, :num].tolist()) == expected
            assert torch.equal(found.values[row, :num], a[row, found.ids[row, :num].long()])


def program_of_edits(example, features, edits, extra=()):
    """A table row that adds a vector, then edits selected features, with the entries of `extra` between."""
    entries = [([Code.ADD, 0, 1, 0], [0, 0.5]), *extra]
    for place, (feature, edit) in enumerate(zip(features, edits, strict=True)):
        code = Code.FEATURE | FeatureActivation.SELECTED | example.norm | edit
        entries.append(([code, 0, 2 + place, 0], [0, 1.0, 0, feature, 1.5]))
    codes, params = torch.zeros(2, 8, NUM_CODES, dtype=torch.int32), torch.zeros(2, 8, NUM_PARAMS)
    for place, (fields, numbers) in enumerate(entries):
        codes[1, place] = torch.tensor(fields)
        params[1, place, : len(numbers)] = torch.tensor(numbers)
    return codes.to(DEVICE), params.to(DEVICE), len(entries)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("made", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edits_of_selected_features_keep_the_error_or_add_to_the_reconstruction(norm, made, dtype, poisoned_empty):
    """Row 2 and 0 are listed, and the first `made` of them are reconstructed; row 1 has no program."""
    example = Example([2, 0], 3, 64, 300, "relu", norm, dtype, has_addend=True, made=made, k=7)
    value, addend, _, tokens, count = example.stream
    encoder, decoder, numbers, bias, sums, _ = example.coder
    features = [11, 250, 30, 2]
    edits = [Edit.SET, Edit.TIMES, Edit.PLUS | 1 << 11, Edit.AT_LEAST]  # the third only where it is active
    mark = [([Code.RECONSTRUCT, 0, 0, 0], [])] if made == 2 else []
    codes, params, num_entries = program_of_edits(example, features, edits, mark)
    pool = torch.stack([torch.zeros_like(encoder[0]), torch.ones_like(encoder[0]), *decoder[features]])
    rows, counts = torch.tensor([[1, 0, 1], [num_entries, 0, num_entries]], dtype=torch.int32, device=DEVICE)
    tables = (pool, rows, counts, codes, params, None)
    sae = (tokens, count, encoder, decoder, numbers, bias, sums)

    shift = torch.empty(value.shape, device=DEVICE)
    delta = run_programs.program_deltas(value, addend, *tables, shift_TD=shift)
    edited = (tables, None)
    delta = reconstruct_rows.reconstruction_deltas(value, addend, shift, *sae, norm, delta, k=7, edits=edited)

    exact = reconstructed_deltas_reference(value, addend, (*tables, None, None), (*sae[:-1], sums.clone()), norm, 7)
    assert (delta[[0, 2]] - exact[[0, 2]]).abs().max() <= 1e-4 * exact.abs().max()
    assert delta[1].isnan().all()
    check_by_formula(example, exact, features, norm, dtype, made)


def check_by_formula(example, exact, features, norm, dtype, made):
    """The definition's changes are ``decode(edited top-k) + error - row``, written out, as fp64."""
    value, addend = example.stream[:2]
    encoder, decoder, numbers, bias = (each.double() for each in example.coder[:4])
    x = (value.float() + addend.float()).to(dtype).double()
    h = x + 0.5
    gain, mean = torch.ones(3, 1, device=DEVICE, dtype=torch.float64), 0
    normed = h
    if norm == InputNorm.LAYER_NORM:
        gain, mean = h.std(-1, keepdim=True), h.mean(-1, keepdim=True)
        normed = (h - mean) / (gain + 1e-5)
    if norm == InputNorm.CONSTANT_NORM:
        gain = h.norm(dim=-1, keepdim=True) / h.shape[1] ** 0.5
        normed = h / gain
    q = torch.relu(normed @ encoder.T + numbers[0])
    top = q.topk(7, dim=1)
    a = torch.zeros_like(q).scatter(1, top.indices, top.values)
    edited = a.clone()
    one, two, three, four = features
    edited[:, one] = 1.5
    edited[:, two] *= 1.5
    edited[:, three] += 1.5 * (a[:, three] > 0)
    edited[:, four] = edited[:, four].clamp(min=1.5)
    error = h - ((a @ decoder + bias) * gain + mean)
    for place, row in enumerate(example.listed):
        kept = error[row] if place >= made else 0
        expected = (edited[row] @ decoder + bias) * gain[row] + mean_of(mean, row) + kept - x[row]
        torch.testing.assert_close(exact[row].double(), expected, rtol=0, atol=1e-6)


def mean_of(mean, row):
    return mean if isinstance(mean, int) else mean[row]


def test_a_row_gets_the_same_bits_from_a_selection_wherever_it_is_listed(dot_by_element):
    listed = [7, 3, 69, 12, *(row for row in range(70) if row not in (3, 7, 12, 69))]
    many = Example(listed, 70, features=300, dtype=torch.bfloat16, capacity=70, k=9)
    one = Example([3], 70, features=300, dtype=torch.bfloat16, capacity=70, k=9)

    assert torch.equal(many.run()[3], one.run()[3])
