"""Readouts in the staging ring: outputs arrive in place of rows, whatever else is wanted, with little room, too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headgate.capture.planning.planner import StepPlanner
from headgate.capture.planning.step_plan import PackGroup, StepPlan
from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.consumer import HeadReadout, HeadReduction, ModelHead, RowArguments
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.staging import readouts
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.readouts import BoundReadout, OutputBuffers, bind
from headgate.capture.staging.ring import StagingRing
from tests.fakes.pipeline import HIDDEN, ROW_BYTES, SITES, row_values
from tests.fakes.readouts import Declared, Failing, Multiples, bound, expected_rows, sites_of
from tests.fakes.staged import collected, groups_in

NUMBER = 7
DECLARED: list[Declared] = [(1, SITES[0], Multiples(1)), (1, SITES[2], Multiples(3)), (2, SITES[2], Multiples(9))]
"""The last one is wider than a row."""


def width_of(group: PackGroup) -> int:
    """The outputs of a readout; 0 of rows of the stream."""
    return group.shape.width if group.shape else 0


def make_ring(
    declared: Sequence[Declared] = DECLARED,
    *,
    staging_rows: int = 4096,
    dtype: torch.dtype = torch.float32,
    bound_readouts: Sequence[BoundReadout] | None = None,
) -> StagingRing:
    return StagingRing(
        sites=SITES,
        num_rows=64,
        max_tokens=64,
        hidden_size=HIDDEN,
        dtype=dtype,
        device=torch.device("cpu"),
        staging_bytes=staging_rows * HIDDEN * dtype.itemsize,
        readouts=bound(declared) if bound_readouts is None else bound_readouts,
    )


def plan_of(wanted: dict[int, tuple[Site, ...]], num_tokens: int, declared: Sequence[Declared] = DECLARED) -> StepPlan:
    """One request's first step, by the sites that each consumer wants of it."""
    planner = StepPlanner(SITES, sites_of(declared))
    specs = {bit: CaptureSpec(sites=sites, positions=Named("all")) for bit, sites in wanted.items()}
    planner.add("a", num_tokens, specs)
    plan = planner.plan(BatchView(("a",), np.array([0]), np.array([num_tokens]), np.array([0])))
    assert plan is not None
    return plan


def run(ring: StagingRing, plan: StepPlan, num_tokens: int) -> list[StagedRows]:
    ring.begin(plan, torch.arange(num_tokens, dtype=torch.int32))
    for index, buffer in enumerate(ring.site_rows):
        buffer.index_put_((ring.slots[:num_tokens],), row_values(NUMBER, np.arange(num_tokens), index))
    return collected(ring, plan)


def deliveries(parts: Sequence[StagedRows]) -> dict[tuple[int, Site, int], int]:
    """``{(consumer, site, position): how often}``, each row being checked to hold what it should."""
    found: dict[tuple[int, Site, int], int] = {}
    for part in parts:
        for group, rows in groups_in(part):
            assert part.token_ids(group).tolist() == group.positions.tolist()  # type: ignore[union-attr]
            for place, site in enumerate(group.sites):
                expected = expected_rows(group, DECLARED, NUMBER, group.positions, place=place)
                assert rows.dtype == (torch.float32 if group.shape else part.memory.dtype)
                assert torch.equal(rows[place].float(), expected)
                for position, mask in zip(group.positions.tolist(), group.masks.tolist(), strict=True):
                    for bit in (bit for bit in range(3) if mask >> bit & 1):
                        key = (bit, site, position)
                        found[key] = found.get(key, 0) + 1
        part.release()
    return found


WANTED = st.dictionaries(
    st.integers(0, 2), st.sets(st.sampled_from(SITES), min_size=1).map(lambda sites: tuple(sorted(sites))), min_size=1
)


@given(
    wanted=WANTED,
    num_tokens=st.integers(1, 64),
    staging_rows=st.sampled_from([64, 96, 4096]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_consumer_gets_rows_or_their_outputs_and_only_those_are_copied(
    wanted: dict[int, tuple[Site, ...]], num_tokens: int, staging_rows: int, dtype: torch.dtype
) -> None:
    ring = make_ring(staging_rows=staging_rows, dtype=dtype)
    found: dict[tuple[int, Site, int], int] = {}
    plan = plan_of(wanted, num_tokens)

    ring.begin(plan, torch.arange(num_tokens, dtype=torch.int32))
    for index, buffer in enumerate(ring.site_rows):
        buffer.index_put_((ring.slots[:num_tokens],), row_values(NUMBER, np.arange(num_tokens), index).to(dtype))
    ring.keep(plan)
    ring.collect(lambda part: found.update(deliveries([part])), patience_s=0)

    assert found == {(bit, site, p): 1 for bit, sites in wanted.items() for site in sites for p in range(num_tokens)}
    outputs = {(bit, site): readout.num_outputs for bit, site, readout in DECLARED}
    read_out = sum(4 * outputs[bit, site] for bit, sites in wanted.items() for site in sites if (bit, site) in outputs)
    rows = {site for bit, sites in wanted.items() for site in sites if (bit, site) not in outputs}
    assert ring.counters.bytes == num_tokens * (read_out + HIDDEN * dtype.itemsize * len(rows))
    assert (ring.counters.rows, ring.counters.dropped_rows) == (num_tokens, 0)


def test_where_outputs_alone_are_wanted_no_row_leaves_the_device() -> None:
    ring = make_ring()

    (part,) = run(ring, plan_of({1: (SITES[0],)}, 8), 8)

    assert part.num_copies == 0
    assert part.num_leased * ROW_BYTES == 8 * 4 + 8 * 4  # tokens and outputs
    assert ring.counters.bytes == 8 * 4


def test_outputs_of_many_chunks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readouts, "CHUNK_BYTES", 5 * 8 * HIDDEN)
    ring = make_ring()

    found = deliveries(run(ring, plan_of({1: SITES, 2: SITES}, 64), 64))

    assert len(found) == 2 * 3 * 64


class Reduction(HeadReduction):
    """A row with its first argument added; counts the rows of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def with_head(self, device: torch.device, head: ModelHead | None) -> Callable[..., Tensor]:
        def reduce(rows: Tensor, arguments: RowArguments) -> Tensor:
            self.calls.append(len(rows))
            assert arguments.host.tolist() == arguments.device.tolist()
            return rows + arguments.device

        return reduce


class Moved(HeadReadout):
    """A row times `factor`, ahead of the shared reduction; a factor of 1 returns the rows that it gets."""

    num_outputs, num_arguments, key = HIDDEN, 1, "moved"

    def __init__(self, factor: float, reduction: Reduction) -> None:
        self._factor, self._reduction = factor, reduction

    @property
    def reduction(self) -> Reduction:
        return self._reduction

    def transport(self, device: torch.device) -> Callable[..., Tensor]:
        def transport(rows: Tensor, arguments: RowArguments) -> Tensor:
            assert len(arguments.host) == len(arguments.device) == len(rows)
            return rows if self._factor == 1 else rows * self._factor

        return transport


@pytest.mark.parametrize(("chunk_rows", "calls"), [(1000, [192]), (40, [40, 40, 40, 40, 32])])
def test_rows_of_all_sites_are_reduced_together_after_the_transport_of_each(
    chunk_rows: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readouts, "CHUNK_BYTES", chunk_rows * 8 * HIDDEN)
    reduction = Reduction()
    reduce = cache(lambda shared: shared.with_head(torch.device("cpu"), None))
    moved = [Moved(factor, reduction) for factor in (1, 3, 5)]
    parts = [
        bind(each, place, width=HIDDEN, device=torch.device("cpu"), name="m", bit=1, reduce=reduce)
        for place, each in enumerate(moved)
    ]
    declared: list[Declared] = [(1, site, Multiples(HIDDEN)) for site in SITES]
    ring = make_ring(declared, bound_readouts=parts)
    ring.readouts.arguments["a", 1] = (11,)
    reduction.calls.clear()

    (part,) = run(ring, plan_of({1: SITES}, 64, declared), 64)

    assert reduction.calls == calls
    ((group, rows),) = groups_in(part)
    assert group.sites == SITES
    for place, factor in enumerate((1, 3, 5)):
        assert torch.equal(rows[place], row_values(NUMBER, np.arange(64), place) * factor + 11)
    part.release()


class Sized(HeadReadout):
    """Sums of a row, so many as it declares, plus its arguments; it fails if its site is told to."""

    num_outputs, num_arguments, key = 0, 0, "sized"

    def __init__(self, num_outputs: int, num_arguments: int, reduction: HeadReduction, fails: bool = False) -> None:
        self.num_outputs, self.num_arguments = num_outputs, num_arguments
        self._reduction, self.fails = reduction, fails

    @property
    def reduction(self) -> HeadReduction:
        return self._reduction

    def transport(self, device: torch.device) -> Callable[..., Tensor]:
        def transport(rows: Tensor, arguments: RowArguments | None = None) -> Tensor:
            if self.fails:
                raise RuntimeError("no such weight")
            return rows * self.num_outputs

        return transport


class Sums(HeadReduction):
    """One output for each argument, or one."""

    def with_head(self, device: torch.device, head: ModelHead | None) -> Callable[..., Tensor]:
        def reduce(rows: Tensor, arguments: RowArguments | None = None) -> Tensor:
            sums = rows.sum(1, keepdim=True)
            return sums if arguments is None else sums + arguments.device

        return reduce


def outputs_of(sized: Sequence[Sized], wanted: dict[int, tuple[Site, ...]], fails: int = -1) -> dict[int, Any]:
    """Outputs of 4 rows by consumer, of readouts of one site each that share a reduction; no key if they are lost."""
    reduce = cache(lambda shared: shared.with_head(torch.device("cpu"), None))
    bound = [
        bind(each, place, width=HIDDEN, device=torch.device("cpu"), name="m", bit=place + 1, reduce=reduce)
        for place, each in enumerate(sized)
    ]
    declared: list[Declared] = [
        (place + 1, SITES[place], Multiples(each.num_outputs)) for place, each in enumerate(sized)
    ]
    ring = make_ring(declared, bound_readouts=bound)
    for place, each in enumerate(sized):
        each.fails = place == fails
        ring.readouts.arguments["a", place + 1] = tuple(range(10, 10 + each.num_arguments))
    (part,) = run(ring, plan_of(wanted, 4, declared), 4)
    found = {int(group.masks[0]).bit_length() - 1: rows[0].clone() for group, rows in groups_in(part) if group.masks[0]}
    part.release()
    return found


def test_readouts_that_share_a_reduction_may_differ_in_outputs_and_arguments() -> None:
    sized = [Sized(*sizes, reduction) for reduction in [Sums()] for sizes in ((1, 0), (2, 2), (3, 3))]

    found = outputs_of(sized, {place + 1: (SITES[place],) for place in range(3)})

    assert set(found) == {1, 2, 3}
    for place, each in enumerate(sized):
        sums = row_values(NUMBER, np.arange(4), place).double().sum(1, keepdim=True) * each.num_outputs
        assert torch.equal(found[place + 1], sums + torch.tensor(range(10, 10 + each.num_arguments) or [0]))


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_site_that_fails_leaves_the_others_of_its_call_their_outputs(fails: int) -> None:
    """Each site is wanted by a request of its own."""
    reduction = Sums()

    found = outputs_of([Sized(1, 0, reduction) for _ in SITES[:3]], {at + 1: (SITES[at],) for at in range(3)}, fails)

    assert set(found) == {1, 2, 3} - {fails + 1}
    for bit, rows in found.items():
        assert torch.equal(rows, row_values(NUMBER, np.arange(4), bit - 1).double().sum(1, keepdim=True))


def test_a_readout_that_fails_costs_its_own_consumer_the_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    declared: list[Declared] = [(1, SITES[0], Failing(1)), (2, SITES[0], Multiples(2))]
    ring = make_ring(declared)
    plan = plan_of({0: SITES[:1], 1: SITES[:1], 2: SITES[:1]}, 4, declared)

    with caplog.at_level(logging.ERROR, "headgate"):
        (part,) = run(ring, plan, 4)

    masks = {width_of(group): group.masks.tolist() for group in part.groups}
    assert masks == {0: [1] * 4, 1: [0] * 4, 2: [4] * 4}
    rows = {width_of(group): rows for group, rows in groups_in(part)}
    assert torch.equal(rows[0][0], row_values(NUMBER, np.arange(4), 0))
    assert torch.equal(rows[2][0], Multiples(2).expected(rows[0][0]))
    assert "a readout failed" in caplog.text
    assert "no such weight" in caplog.text


class Wrong(Multiples):
    """Makes something else than it says."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(2)
        self._function = function

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        return self._function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rows: rows, r"float64 \[3, 4\] on cpu of 3 rows; expected floats \[3, 2\]"),
        (lambda rows: rows[0, :2], r"\[2\] on cpu"),
        (lambda rows: rows[:, :2].long(), r"int64 \[3, 2\]"),
        (lambda rows: rows @ rows, r"the readout fails on cpu: RuntimeError"),
    ],
    ids=["too many", "no rows", "integers", "fails"],
)
def test_a_readout_is_tried_before_it_serves(function: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=f"consumer 'c': 0.post_mlp: .*{message}"):
        bind(Wrong(function), 0, width=HIDDEN, device=torch.device("cpu"), name="consumer 'c': 0.post_mlp")


@given(data=st.data())
def test_outputs_gather_in_buffers_that_are_not_written_to_under_a_copy(data: st.DataObject) -> None:
    """Puts of any size, with gaps between; a fake copy takes place when its buffer is used again, or at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readouts, "BUFFER_OUTPUTS", 32)
        under_way: dict[int, tuple[Tensor, int]] = {}
        target = torch.full((4096,), torch.nan)

        def arrive(buffer: int) -> None:
            if buffer in under_way:
                outputs, first = under_way.pop(buffer)
                target[first : first + len(outputs)] = outputs

        def copy(buffer: int, outputs: Tensor, first: int) -> None:
            assert buffer not in under_way
            under_way[buffer] = outputs, first

        buffers = OutputBuffers(torch.device("cpu"), before_use=arrive, copy=copy)
        expected, at = {}, 0
        for number in range(data.draw(st.integers(1, 40))):
            at += data.draw(st.integers(0, 3))
            num_rows, num_outputs = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
            buffers.put(at, torch.full((num_rows, num_outputs), number, dtype=torch.float64))
            expected |= dict.fromkeys(range(at, at + num_rows * num_outputs), number)
            at += num_rows * num_outputs
        buffers.flush()
        buffers.flush()
        for buffer in list(under_way):
            arrive(buffer)

    assert {place: target[place].item() for place in expected} == expected


def test_a_ring_that_cannot_hold_a_row_of_every_readout_is_refused() -> None:
    with pytest.raises(ConfigError, match="staging_bytes"):
        make_ring([(1, SITES[0], Multiples(HIDDEN * 60))], staging_rows=96)


def test_groups_of_one_width_share_a_set_of_sites() -> None:
    declared: list[Declared] = [(1, site, Multiples(2)) for site in SITES]

    def groups(wanted: dict[int, tuple[Site, ...]]) -> list[PackGroup]:
        return list(plan_of(wanted, 4, declared).groups)

    (group,) = groups({1: SITES})
    assert (group.sites, group.site_ids.tolist(), width_of(group)) == (SITES, [3, 4, 5], 2)
    first, second = groups({0: SITES[:2], 1: SITES})
    assert (first.site_ids.tolist(), width_of(first), set(first.masks)) == ([0, 1], 0, {1})
    assert (second.site_ids.tolist(), width_of(second), set(second.masks)) == ([3, 4, 5], 2, {2})
