"""Every request that runs has its slots; waiting requests get them in order, and none waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headgate.capture.schema.errors import RequestError
from headgate.steering.core.admission import Demand, Load, Reservations
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.worker.rows.row_table import rows_needed
from tests.fakes.steering_tables import CONFIGS, Device, expected, table

CAPACITY = 20

CONFIG = st.none() | st.sampled_from(CONFIGS)


@st.composite
def phases(draw: st.DrawFn) -> tuple[PhaseVectors | None, PhaseVectors | None]:
    prefill = draw(CONFIG)
    return prefill, prefill if draw(st.booleans()) else draw(CONFIG)


def load(config: PhaseVectors | None) -> Load | None:
    return None if config is None else Load(config.key, len(config.sites))


def demand(prefill: PhaseVectors | None, decode: PhaseVectors | None) -> Demand:
    return Demand(load(prefill), load(decode))


class AdmissionMachine(RuleBasedStateMachine):
    """An engine core that admits, and the table of a worker that it is told of, one step late."""

    @initialize()
    def start(self) -> None:
        self.reservations: Reservations[str] = Reservations(CAPACITY)
        self.table = table(num_slots=CAPACITY + 1, num_rows=rows_needed(100))
        self.device = Device(self.table, num_slots=CAPACITY + 1)
        self.vectors: dict[str, tuple[PhaseVectors | None, PhaseVectors | None]] = {}
        self.running: list[str] = []
        self.waiting: list[tuple[int, int, str]] = []
        self.finished: list[str] = []
        self.new: list[str] = []
        self.kept: set[str] = set()
        self.shared: tuple[PhaseVectors | None, PhaseVectors | None] = (None, None)
        self.count = 0

    @rule(own=phases(), priority=st.sampled_from([0, 0, 0, -1, 1]))
    def arrive(self, own: tuple[PhaseVectors | None, PhaseVectors | None], priority: int) -> None:
        self.count += 1
        req_id = f"r{self.count}"
        try:
            goes = self.reservations.offer(req_id, demand(*own), req_id, priority=priority)
        except RequestError:
            assert self.reservations.num_waiting == len(self.waiting)
            return
        self.vectors[req_id] = own
        if goes:
            assert own == (None, None) or not [held for held in self.waiting if held[0] <= priority]
            self.run(req_id)
        else:
            self.waiting = sorted([*self.waiting, (priority, self.count, req_id)])
            assert self.reservations.num_waiting == len(self.waiting)

    def run(self, req_id: str) -> None:
        self.running.append(req_id)
        self.new.append(req_id)

    def pump(self) -> None:
        admitted = self.reservations.admit()
        assert admitted == [req_id for _, _, req_id in self.waiting[: len(admitted)]]
        del self.waiting[: len(admitted)]
        for req_id in admitted:
            self.run(req_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(self.running))
        self.running.remove(req_id)
        if req_id in self.new:
            self.new.remove(req_id)
        else:
            self.finished.append(req_id)
        self.reservations.release(req_id)
        self.pump()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from([held[2] for held in self.waiting]), min_size=1))
        left = self.reservations.withdraw(gone | {"unknown"})
        assert left == [held[2] for held in self.waiting if held[2] in gone]
        self.waiting = [held for held in self.waiting if held[2] not in gone]
        self.pump()

    @rule(shared=phases())
    def change_global(self, shared: tuple[PhaseVectors | None, PhaseVectors | None]) -> None:
        before = self.reservations.num_reserved
        try:
            self.reservations.set_global(demand(*shared), "global")
        except RequestError:
            assert self.reservations.num_reserved == before
            return
        self.shared = shared
        self.table.set_global(*shared)
        self.send_away()
        self.pump()

    @rule(name=st.integers(0, 1), own=phases())
    def keep_or_release_module(self, name: int, own: tuple[PhaseVectors | None, PhaseVectors | None]) -> None:
        if f"m{name}" in self.kept:
            self.reservations.release_module(f"m{name}")
            self.table.release_module(f"m{name}")
            self.kept.remove(f"m{name}")
        else:
            try:
                self.reservations.keep_module(f"m{name}", demand(*own), "module")
            except RequestError:
                return
            self.table.keep_module(f"m{name}", *own)
            self.kept.add(f"m{name}")
        self.send_away()
        self.pump()

    def send_away(self) -> None:
        """Those that wait in vain."""
        gone = self.reservations.take_stranded()
        assert self.reservations.withdraw(gone) == gone
        self.waiting = [held for held in self.waiting if held[2] not in gone]

    @rule()
    def step(self) -> None:
        """The worker hears who finished and who is new, and runs everybody."""
        for req_id in sorted(self.finished):
            self.table.remove(req_id)
        for req_id in self.new:
            self.table.add(req_id, 3, *self.vectors[req_id])
        self.finished, self.new = [], []
        batch = self.table.batch(self.running)
        self.device.update()
        for at, req_id in enumerate(self.running):
            for phase in (0, 1):
                row = 0 if batch is None else int(batch.rows[at, phase])
                wanted = expected(self.shared[phase], self.vectors[req_id][phase])
                assert np.array_equal(self.device.added_at(row), wanted)

    @invariant()
    def never_over_capacity_and_nobody_waits_in_vain(self) -> None:
        if not hasattr(self, "reservations"):
            return
        assert self.reservations.num_reserved <= CAPACITY
        assert self.reservations.num_waiting == len(self.waiting)
        steered = [req_id for req_id in self.running if self.vectors[req_id] != (None, None)]
        assert steered or not self.waiting

    def teardown(self) -> None:
        if not hasattr(self, "reservations"):
            return
        for name in self.kept:
            self.reservations.release_module(name)
        self.reservations.set_global(Demand(), "global")
        self.pump()
        while self.running:
            self.reservations.release(self.running.pop())
            self.pump()
        assert (self.reservations.num_reserved, self.reservations.num_waiting, self.waiting) == (0, 0, [])


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def one(key: bytes, num_vectors: int) -> Demand:
    return Demand(Load(key, num_vectors), Load(key, num_vectors))


def test_a_small_request_does_not_overtake_a_large_one_that_came_first() -> None:
    reservations: Reservations[str] = Reservations(10)
    assert reservations.offer("first", one(b"a", 6), "first")
    assert not reservations.offer("large", one(b"b", 8), "large")
    assert not reservations.offer("small", one(b"c", 1), "small")
    assert not reservations.offer("shares", one(b"a", 6), "shares")

    reservations.release("first")

    assert reservations.admit() == ["large", "small"]
    reservations.release("large")
    assert reservations.admit() == ["shares"]


def test_a_more_urgent_request_goes_first() -> None:
    reservations: Reservations[str] = Reservations(10)
    assert reservations.offer("first", one(b"a", 6), "first")
    assert not reservations.offer("large", one(b"b", 8), "large")

    assert reservations.offer("urgent", one(b"c", 2), "urgent", priority=-1)
    assert not reservations.offer("urgent too", one(b"d", 8), "urgent too", priority=-1)

    reservations.release("first")
    assert reservations.admit() == ["urgent too"]


def test_unsteered_requests_pass_whoever_waits() -> None:
    reservations: Reservations[str] = Reservations(2)
    assert reservations.offer("a", one(b"a", 2), "a")
    assert not reservations.offer("b", one(b"b", 2), "b")

    assert reservations.offer("plain", Demand(), "plain")
    reservations.release("plain")
    assert reservations.num_waiting == 1


def test_equal_configs_take_their_slots_once() -> None:
    reservations: Reservations[str] = Reservations(10)

    assert all(reservations.offer(f"r{i}", one(b"a", 7), f"r{i}") for i in range(5))

    assert reservations.num_reserved == 7
    for i in range(5):
        reservations.release(f"r{i}")
    assert reservations.num_reserved == 0


def test_phases_of_global_vectors_that_differ_make_two_sums_of_one_config() -> None:
    reservations: Reservations[str] = Reservations(20)
    reservations.set_global(Demand(Load(b"g", 3), None), "global")

    assert reservations.offer("a", one(b"a", 4), "a")

    assert reservations.num_reserved == 3 + 2 * 4
    reservations.set_global(Demand(Load(b"g", 3), Load(b"g", 3)), "global")
    assert reservations.num_reserved == 3 + 4


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    reservations: Reservations[str] = Reservations(10)
    reservations.keep_module("module", one(b"m", 3), "module")
    reservations.set_global(one(b"g", 2), "global")

    with pytest.raises(RequestError, match="steering: needs 6 vector slots, but only 5 of 10 can be free") as e:
        reservations.offer("a", one(b"a", 6), "a")

    assert e.value.field == "steering"
    assert (reservations.num_waiting, reservations.num_reserved) == (0, 5)
    assert reservations.offer("a", one(b"a", 5), "a")
    assert reservations.offer("b", one(b"m", 3), "b")


def test_a_change_that_would_strand_somebody_is_refused() -> None:
    reservations: Reservations[str] = Reservations(10)
    assert reservations.offer("a", one(b"a", 3), "a")
    assert not reservations.offer("b", one(b"b", 8), "b")

    with pytest.raises(RequestError, match="together with running requests"):
        reservations.set_global(one(b"g", 8), "global")
    assert reservations.take_stranded() == []
    reservations.keep_module("small", one(b"s", 2), "module")
    assert reservations.take_stranded() == []
    reservations.keep_module("module", one(b"m", 3), "module")
    assert reservations.take_stranded() == ["b"]
    assert reservations.take_stranded() == []

    assert reservations.withdraw(["b"]) == ["b"]
    assert reservations.num_reserved == 3 + 2 + 3


def test_operators_have_slots_that_requests_never_take_and_rules_have_some_of_their_own() -> None:
    reservations: Reservations[str] = Reservations(10, 4)
    assert reservations.offer("a", one(b"a", 10), "a")
    assert not reservations.offer("b", one(b"b", 1), "b")

    reservations.set_global(one(b"g", 2), "global")
    for change in (
        lambda: reservations.set_global(one(b"g", 3), "global"),
        lambda: reservations.keep_module("module", one(b"m", 1), "module"),
    ):
        with pytest.raises(RequestError, match=r"would need 13 vector slots together .* there are 12"):
            change()
    reservations.keep_module("rule", one(b"r", 2), "then", is_rule=True)
    with pytest.raises(RequestError, match=r"would need 15 vector slots together .* there are 14"):
        reservations.keep_module("more", one(b"n", 1), "then", is_rule=True)

    reservations.release("a")
    assert reservations.admit() == ["b"]
    assert not reservations.offer("c", one(b"c", 6), "c")


def test_all_who_wait_can_be_aborted_at_once() -> None:
    reservations: Reservations[str] = Reservations(2)
    assert reservations.offer("a", one(b"a", 2), "a")
    for name in "bcd":
        assert not reservations.offer(name, one(name.encode(), 2), name)

    assert reservations.withdraw(None) == ["b", "c", "d"]
    assert (reservations.num_waiting, reservations.admit()) == (0, [])


def test_those_who_stay_keep_their_order_when_others_are_aborted() -> None:
    reservations: Reservations[str] = Reservations(2)
    assert reservations.offer("first", one(b"first", 2), "first")
    priorities = {"a": 0, "b": 5, "c": 1, "d": 6, "e": 7, "f": 2, "g": 3}
    for name, priority in priorities.items():
        assert not reservations.offer(name, one(name.encode(), 2), name, priority=priority)
    assert reservations.withdraw({"a"}) == ["a"]

    order, running = [], "first"
    while reservations.num_waiting:
        reservations.release(running)
        (running,) = reservations.admit()
        order.append(running)

    assert order == ["c", "f", "g", "b", "d", "e"]


def test_one_id_cannot_be_taken_twice() -> None:
    reservations: Reservations[str] = Reservations(2)
    assert reservations.offer("a", one(b"a", 2), "a")

    with pytest.raises(AssertionError, match="'a' is here already"):
        reservations.offer("a", one(b"a", 2), "a")
