"""Every request gets its own vectors in each phase, whatever comes, goes and changes around it."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headgate.steering.vectors.sums import Vectors
from headgate.steering.worker.rows.row_table import RowTable, rows_needed
from headgate.steering.worker.rows.vector_pool import SlotPool
from tests.fakes.steering_tables import CONFIGS, HIDDEN, SITES, Device, expected, summed, table

MAX_NUM_SEQS = 4
NUM_SLOTS = 200
PARTS = st.lists(st.integers(0, len(CONFIGS) - 1), max_size=2).map(tuple)
SCALE = st.sampled_from([1.0, 1.0, -0.3])

Phases = tuple[Vectors | None, Vectors | None]


@st.composite
def phases(draw: st.DrawFn) -> Phases:
    """Vectors of a request or of the operator: often the same in both phases, often nothing in one."""
    prefill = summed(draw(PARTS), draw(SCALE))
    return prefill, prefill if draw(st.booleans()) else summed(draw(PARTS), draw(SCALE))


class RowMachine(RuleBasedStateMachine):
    """Two replicas and a device each, more requests than fit into a batch, preempted ones among them."""

    @initialize()
    def start(self) -> None:
        rows = rows_needed(MAX_NUM_SEQS)
        self.tables = [table(num_slots=NUM_SLOTS, num_rows=rows) for _ in range(2)]
        self.devices = [Device(table, num_slots=NUM_SLOTS) for table in self.tables]
        self.requests: dict[str, tuple[int, Phases]] = {}
        self.kept: set[str] = set()
        self.shared: Phases = (None, None)

    @rule(name=st.integers(0, 11), num_prompt=st.integers(1, 9), own=phases())
    def add(self, name: int, num_prompt: int, own: Phases) -> None:
        self.requests[f"r{name}"] = (num_prompt, own)
        for each in self.tables:
            each.add(f"r{name}", num_prompt, *own)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[gone]
        for each in self.tables:
            each.remove(gone)

    @rule(shared=phases())
    def change_global(self, shared: Phases) -> None:
        self.shared = shared
        for each in self.tables:
            each.set_global(*shared)

    @rule(name=st.integers(0, 2), own=phases())
    def keep_or_release_module(self, name: int, own: Phases) -> None:
        for each in self.tables:
            if f"m{name}" in self.kept:
                each.release_module(f"m{name}")
            else:
                each.keep_module(f"m{name}", *own)
        self.kept ^= {f"m{name}"}

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.requests)), max_size=MAX_NUM_SEQS, unique=True))
        first, second = [each.batch(chosen) for each in self.tables]
        for device in self.devices:
            device.update()
        acting = [expected(self.shared[phase], self.requests[r][1][phase]) for r in chosen for phase in (0, 1)]
        if first is None:
            assert second is None
            assert not any(values.any() for values in acting)
            return
        assert second is not None
        assert (first.rows == second.rows).all()
        assert first.num_prompt.tolist() == [self.requests[r][0] for r in chosen]
        for device in self.devices:
            for row, values in zip(first.rows.ravel().tolist(), acting, strict=True):
                assert (device.added_at(row) == values).all()
            assert not device.added_at(0).any()
        assert self.tables[0].checksum() == self.tables[1].checksum()
        assert (self.devices[0].map == self.tables[0].map).all()

    def teardown(self) -> None:
        for each in getattr(self, "tables", []):
            for req_id in self.requests:
                each.remove(req_id)
            for name in self.kept:
                each.release_module(name)
            each.set_global(None, None)
            each.apply_changes()
            assert each.is_idle
            assert each.num_live_slots == 0
            each._sums.drop_unused()
            assert each.num_slots_used == 0


TestRows = RowMachine.TestCase
TestRows.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def rows_in(table: RowTable, *req_ids: str) -> list[list[int]]:
    batch = table.batch(req_ids)
    assert batch is not None
    rows: list[list[int]] = batch.rows.tolist()
    return rows


def test_more_live_configs_than_rows_take_turns_without_touching_the_batch() -> None:
    steered = table(num_slots=NUM_SLOTS, num_rows=rows_needed(2))
    device = Device(steered, num_slots=NUM_SLOTS)
    own = {f"r{i}": (CONFIGS[i], CONFIGS[(i + 3) % len(CONFIGS)]) for i in range(len(CONFIGS))}
    for req_id, (prefill, decode) in own.items():
        steered.add(req_id, 3, summed((0,), 2.0), None)
        steered.add(req_id, 3, prefill, decode)

    for pair in [*permutations(own, 2), *permutations(reversed(own), 2)]:
        rows = rows_in(steered, *pair)
        device.update()
        for req_id, of_phases in zip(pair, rows, strict=True):
            for row, vectors in zip(of_phases, own[req_id], strict=True):
                assert (device.added_at(row) == expected(None, vectors)).all()


def test_a_config_that_is_the_same_in_both_phases_takes_one_row_and_its_slots_once() -> None:
    steered = table()
    steered.add("a", 5, CONFIGS[4], CONFIGS[4])
    steered.add("b", 5, CONFIGS[4], None)
    steered.add("c", 5, None, CONFIGS[4])
    steered.add("d", 5)

    assert rows_in(steered, "a", "b", "c", "d") == [[1, 1], [1, 0], [0, 1], [0, 0]]
    assert steered.num_live_slots == 6


def test_a_global_change_makes_all_that_lives_anew_in_one_set_of_writes() -> None:
    steered = table()
    device = Device(steered)
    steered.add("a", 5, CONFIGS[0], CONFIGS[0])
    steered.add("b", 5)
    assert steered.batch(("a", "b")) is not None
    device.update()

    steered.set_global(CONFIGS[3], None)

    prefill, decode = rows_in(steered, "a")[0]
    device.update()
    assert steered.take_writes() is None
    assert (device.added_at(prefill) == expected(CONFIGS[3], CONFIGS[0])).all()
    assert (device.added_at(decode) == expected(None, CONFIGS[0])).all()
    shared = rows_in(steered, "b")[0]
    device.update()
    assert (device.added_at(shared[0]) == expected(CONFIGS[3], None)).all()
    assert shared[1] == 0


def test_global_vectors_share_their_slots_with_the_requests_under_them() -> None:
    steered = table()
    steered.set_global(CONFIGS[4], CONFIGS[4])
    steered.add("a", 5, CONFIGS[0], CONFIGS[0])

    assert steered.batch(("a",)) is not None
    assert steered.num_live_slots == 6 + 1


def test_coming_again_costs_no_write() -> None:
    steered = table()
    steered.add("a", 5, CONFIGS[4], CONFIGS[4])
    row = rows_in(steered, "a")[0][0]
    assert steered.take_writes() is not None
    steered.remove("a")
    assert steered.num_live_slots == 0

    steered.add("b", 7, CONFIGS[4], CONFIGS[4])

    assert rows_in(steered, "b") == [[row, row]]
    assert steered.take_writes() is None


def test_what_came_back_into_use_does_not_make_room() -> None:
    steered = table(num_slots=8)
    device = Device(steered, num_slots=8)
    steered.add("a", 5, CONFIGS[4], CONFIGS[4])
    steered.remove("a")
    steered.add("b", 5, CONFIGS[4], CONFIGS[4])
    steered.add("c", 5, CONFIGS[0], CONFIGS[0])
    steered.remove("c")
    steered.add("d", 5, CONFIGS[5], CONFIGS[5])

    row = rows_in(steered, "b")[0][0]
    device.update()

    assert (device.added_at(row) == expected(None, CONFIGS[4])).all()


def test_the_table_is_idle_again_once_nobody_is_steered() -> None:
    steered = table()
    steered.add("a", 5, CONFIGS[4], None)
    steered.add("b", 5)
    assert not steered.is_idle

    steered.remove("a")

    assert steered.is_idle


def test_what_nobody_uses_makes_room() -> None:
    steered = table(num_slots=7)
    for round_, config in enumerate([CONFIGS[3], CONFIGS[4], CONFIGS[2]] * 3):
        steered.add(f"a{round_}", 5, config, config)
        assert rows_in(steered, f"a{round_}")
        steered.remove(f"a{round_}")

    steered._sums.drop_unused()
    assert steered.num_slots_used == 0


def test_a_module_that_is_kept_is_in_the_pool_before_a_request_names_it() -> None:
    steered = table(num_slots=10)
    steered.keep_module("module", CONFIGS[4], CONFIGS[4])
    steered.apply_changes()
    assert steered.take_writes() is not None
    for config in (CONFIGS[2], CONFIGS[1], CONFIGS[0]):
        steered.add("b", 5, config, config)
        steered.remove("b")
    steered.take_writes()

    steered.add("a", 5, CONFIGS[4], CONFIGS[4])

    assert steered.batch(("a",)) is not None
    writes = steered.take_writes()
    assert writes is not None
    assert writes.slots is None


def test_an_operators_change_waits_until_it_is_known_who_has_finished() -> None:
    """The engine core counts a finished request's slots as free one step before the worker is told."""
    steered = table(num_slots=7)
    steered.add("a", 5, CONFIGS[3], CONFIGS[3])
    assert rows_in(steered, "a")

    steered.set_global(CONFIGS[4], CONFIGS[4])
    steered.keep_module("module", CONFIGS[0], CONFIGS[0])
    steered.release_module("module")
    steered.remove("a")
    steered.add("b", 5)

    assert rows_in(steered, "b") == [[1, 1]]


def test_a_request_nobody_announced_is_noticed_rather_than_run_unsteered() -> None:
    steered = table()
    steered.set_global(CONFIGS[0], None)

    with pytest.raises(AssertionError, match="'x' is in a batch, but was never added"):
        steered.batch(("x",))


def test_vectors_beyond_the_pool_are_noticed() -> None:
    steered = table(num_slots=6)

    with pytest.raises(AssertionError, match="do not fit"):
        steered.add("a", 5, CONFIGS[4], None)


def test_ranks_of_other_stages_hold_their_own_sites_only() -> None:
    stage = RowTable(sites=SITES[3:], num_rows=7, pool=SlotPool(65, HIDDEN, "float32"))
    whole = table(dtype="float32")
    for each in (stage, whole):
        each.add("a", 5, CONFIGS[0], CONFIGS[4])
        each.add("b", 5, CONFIGS[1], CONFIGS[4])

    assert rows_in(stage, "a", "b") == rows_in(whole, "a", "b")
    assert stage.num_live_slots == 1 + 3
    assert stage.map.shape == (3, 7)
