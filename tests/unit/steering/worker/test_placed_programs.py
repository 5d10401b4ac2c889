"""Programs whose rows are in the pool: the order of entries that the kernel relies on, and what the device is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.programs.codes import CODE, CODE_MASK, WRITE, Code, is_of_gate
from headgate.steering.programs.program import Entry, Program, joined
from headgate.steering.worker.placed_programs import ProgramTable, acting, place

SITES = (Site(1, HookPoint.POST_MLP), Site(2, HookPoint.POST_MLP))
OP_SITES = {site: index for index, site in enumerate(SITES)}
RANK = {
    Code.REPLACE: 0,
    Code.RECONSTRUCT: 2,
    **dict.fromkeys((Code.FEATURE, Code.READ_FEATURE, Code.WRITE_FEATURE), 3),
}
"""Replacements, then the additive vectors and operations in their order, then features."""


def program(codes: list[tuple[Code, int]]) -> Program:
    """One entry for each code at one of `SITES`, its first param being its number."""
    row = np.ones(4, np.float32)
    entries = [Entry(SITES[site], code, row, row, (1.0, float(at))) for at, (code, site) in enumerate(codes)]
    return Program.from_entries(entries, "float32")


ACTING = [code for code in Code if not is_of_gate(code)]
written = st.lists(st.tuples(st.sampled_from(ACTING), st.sampled_from([0, 1])), min_size=1, max_size=6)


@given(programs=st.lists(written, min_size=1, max_size=3), vector_slot=st.sampled_from([0, 5]), is_joined=st.booleans())
def test_features_stand_behind_all_other_entries_and_replacements_before(programs, vector_slot, is_joined):
    made = [program(codes) for codes in programs]
    together = [joined(made)] if is_joined else made
    placed = [place(one, np.arange(1, one.num_rows + 1, dtype=np.int32), OP_SITES) for one in together]

    found = acting(placed, np.full(2, vector_slot, np.int32))

    assert found.sites.tolist() == sorted(found.sites.tolist())
    for index in OP_SITES.values():
        here = found.sites == index
        expected = [
            (RANK.get(code, 1), at, number)
            for at, codes in enumerate(programs)
            for number, (code, site) in enumerate(codes)
            if site == index
        ]
        if not expected:
            assert not here.any()
            continue
        codes = [Code(code & CODE_MASK) for code in found.codes[here, CODE].tolist()]
        numbers = [int(number) for number in found.params[here, 1].tolist()]
        if vector_slot:
            at = next(at for at, slot in enumerate(found.codes[here, WRITE].tolist()) if slot == vector_slot)
            assert codes.pop(at) is Code.ADD
            assert at == codes.count(Code.REPLACE)
            del numbers[at]
        assert numbers == [number for _, _, number in sorted(expected)]
        assert [RANK.get(code, 1) for code in codes] == [rank for rank, _, _ in sorted(expected)]


@given(
    programs=st.lists(st.lists(written, min_size=0, max_size=2), min_size=1, max_size=3),
    vector_slots=st.tuples(st.sampled_from([0, 5]), st.sampled_from([0, 5])),
)
def test_the_device_gets_each_rows_entries_in_their_order_with_features_last(programs, vector_slots):
    table = ProgramTable(num_sites=2, num_rows=4, max_entries=16)
    device = np.full((2, 4, 16, 2), -1.0)
    expected = {}
    for row, several in enumerate(programs, 1):
        made = [program(codes) for codes in several]
        placed = [place(one, np.arange(1, one.num_rows + 1, dtype=np.int32), OP_SITES) for one in made]
        slots = np.array(vector_slots, np.int32)
        table.bind(row, placed, slots)
        expected[row] = acting(placed, slots) if placed else None

    writes = table.writes(list(expected))

    assert table.acts[[*expected]].T.tolist() == (writes.counts > 0).tolist()
    assert not table.acts[0].any()
    entries = np.stack((writes.codes[:, CODE], writes.params[:, 1]), axis=1)
    device.reshape(-1, 2)[writes.places] = entries
    for at, (row, found) in enumerate(expected.items()):
        for index in OP_SITES.values():
            count = int(writes.counts[index, at])
            here = np.zeros(0, np.bool_) if found is None else found.sites == index
            assert count == here.sum()
            if not count or found is None:
                continue
            assert device[index, row, :count, 0].tolist() == found.codes[here, CODE].tolist()
            assert device[index, row, :count, 1].tolist() == found.params[here, 1].tolist()
            assert (device[index, row, count:] == -1).all()
            is_feature = ((found.codes[here, CODE] & CODE_MASK) >= Code.FEATURE).tolist()
            assert is_feature == sorted(is_feature)


def test_a_row_that_means_other_programs_acts_where_those_do():
    table = ProgramTable(num_sites=2, num_rows=4, max_entries=2)
    for site in (0, 1):
        made = program([(Code.ADD, site)])
        table.bind(1, [place(made, np.ones(1, np.int32), OP_SITES)], np.zeros(2, np.int32))
        assert table.acts.sum() == 1

    table.bind(1, [], np.zeros(2, np.int32))

    assert not table.acts.any()


def test_a_row_takes_no_more_entries_than_there_is_room_for():
    table = ProgramTable(num_sites=2, num_rows=4, max_entries=2)
    made = program([(Code.ADD, 0), (Code.LINEAR, 0), (Code.ADD, 1)])
    placed = place(made, np.arange(1, made.num_rows + 1, dtype=np.int32), OP_SITES)

    table.bind(1, [placed], np.zeros(2, np.int32))
    with pytest.raises(AssertionError, match="more than 2 entries"):
        table.bind(2, [placed], np.array([7, 0], np.int32))


def test_a_stage_without_op_sites_takes_programs_of_others():
    made = program([(Code.ADD, 0)])
    table = ProgramTable(num_sites=0, num_rows=4, max_entries=2)

    table.bind(1, [place(made, np.ones(1, np.int32), {})], np.zeros(0, np.int32))

    assert not len(table.writes([1]).places)
