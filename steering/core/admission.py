"""Admission: which requests may run, given the slots of the vector pool, reserved for the whole life of each.

A request in the scheduler owns every slot it will ever need, also while it is preempted; a request that waits owns
nothing. So every request that runs can run to its end, and no request waits for ever.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from headgate.capture.schema.errors import OverloadedError, RequestError

R = TypeVar("R")


class Load(NamedTuple):
    """Vectors that share a content key, and so their slots."""

    key: bytes
    num_vectors: int


@dataclass(frozen=True, slots=True)
class Demand:
    """The vectors that one request, one named module, or the global vectors need in each phase; None for nothing."""

    prefill: Load | None = None
    decode: Load | None = None


SlotGroup = tuple[str, bytes]
"""One set of slots: its use (requests and modules of both phases or of one, or the global vectors) and content key."""

_GLOBAL = "global"


class SlotGroups:
    """The sets of slots in use, each counted once for all its users.

    A request's own vectors take their slots once if the global vectors are the same in both phases; otherwise a
    config that is the same in both phases has two sums. The sites of the global vectors alone share the global slots.

    Args:
        shared: The global vectors.

    Attributes:
        num_used: Slots in use.
    """

    def __init__(self, shared: Demand) -> None:
        self.shared = shared
        self.num_used = 0
        self._sizes: dict[SlotGroup, int] = {}
        self._users: dict[SlotGroup, int] = {}
        for group, size in self._global_groups().items():
            self._add(group, size)

    @property
    def num_groups(self) -> int:
        """Distinct sets of vectors that share those slots."""
        return len(self._users)

    def add(self, demand: Demand) -> None:
        """Count a user of its sets of slots."""
        for group, size in self._own_groups(demand).items():
            self._add(group, size)

    def remove(self, demand: Demand) -> None:
        """Undo `add`."""
        for group in self._own_groups(demand):
            self._users[group] -= 1
            if not self._users[group]:
                del self._users[group]
                self.num_used -= self._sizes.pop(group)

    def missing(self, demand: Demand) -> int:
        """Return the slots that `add` would take."""
        return sum(size for group, size in self._own_groups(demand).items() if group not in self._users)

    def needed(self, demands: Iterable[Demand]) -> dict[SlotGroup, int]:
        """Return the sets of slots of the global vectors and `demands`, and their sizes, whatever is in use."""
        groups = self._global_groups()
        for demand in demands:
            groups.update(self._own_groups(demand))
        return groups

    def _global_groups(self) -> dict[SlotGroup, int]:
        loads = (self.shared.prefill, self.shared.decode)
        return {(_GLOBAL, load.key): load.num_vectors for load in loads if load is not None}

    def _own_groups(self, demand: Demand) -> dict[SlotGroup, int]:
        is_split = _key(self.shared.prefill) != _key(self.shared.decode)
        loads = {"prefill": demand.prefill, "decode": demand.decode}
        return {
            (phase if is_split else "both", load.key): load.num_vectors
            for phase, load in loads.items()
            if load is not None
        }

    def _add(self, group: SlotGroup, size: int) -> None:
        if group not in self._users:
            self._users[group], self._sizes[group] = 0, size
            self.num_used += size
        self._users[group] += 1


class _Waiting(NamedTuple):
    priority: int
    arrival: int
    req_id: str
    demand: Demand


class Reservations(Generic[R]):
    """Slots of one engine core's pool, and the requests that wait for them. One thread: the engine core's.

    Args:
        capacity: Slots that requests, and what acts on all of them, may take.
        num_reserved_more: Slots beyond that, which requests never take: half of them for the operator's changes of
            global vectors and modules while all others are taken, and all for rules. With `capacity`, this is
            `headgate.steering.worker.rows.vector_pool.SlotPool.capacity` of the workers.
    """

    def __init__(self, capacity: int, num_reserved_more: int = 0) -> None:
        self.capacity = capacity
        self._num_more = num_reserved_more
        self._groups = SlotGroups(Demand())
        self._modules: dict[str, Demand] = {}
        self._admitted: dict[str, Demand] = {}
        self._heap: list[_Waiting] = []
        self._waiting: dict[str, R] = {}
        self._num_arrived = 0
        self._may_strand = False

    @property
    def num_reserved(self) -> int:
        """Slots that are taken: by global vectors, modules and admitted requests."""
        return self._groups.num_used

    @property
    def num_configs(self) -> int:
        """Distinct sets of vectors that share those slots."""
        return self._groups.num_groups

    @property
    def num_admitted(self) -> int:
        """Requests that have their slots."""
        return len(self._admitted)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for slots, outside the scheduler."""
        return len(self._waiting)

    def check(self, demand: Demand, field: str) -> None:
        """Refuse a demand that cannot fit even when no other request runs.

        Raises:
            RequestError: With the numbers; `field` is the name that the client gets.
        """
        fixed = self._groups.needed(self._modules.values())
        needed = _size({**fixed, **self._groups.needed([demand])})
        if needed > self.capacity:
            taken = _size(fixed)
            raise RequestError(
                field,
                f"needs {needed - taken} vector slots, but only {self.capacity - taken} of {self.capacity} can be free "
                f"({taken} hold global vectors and named modules); steer fewer sites, unregister modules, or raise "
                "max_steering_slots",
            )

    def offer(
        self, req_id: str, demand: Demand, request: R, *, priority: int = 0, max_waiting: float = math.inf
    ) -> bool:
        """Offer a request. True: it has its slots, or needs none, and goes to the scheduler; False: it waits.

        Requests with a lower `priority` value go first, and among equals the earlier ones. Those whose vectors another
        one waits for, such as further samples of a prompt, wait beside it whatever `max_waiting` is.

        Raises:
            RequestError: If it can never fit.
            OverloadedError: If `max_waiting` others wait already.
        """
        if demand == Demand():
            return True
        if req_id in self._admitted or req_id in self._waiting:
            raise AssertionError(f"request {req_id!r} is here already")
        self.check(demand, "steering")
        is_late = len(self._waiting) >= max_waiting and all(one.demand != demand for one in self._heap)
        self._num_arrived += 1
        heapq.heappush(self._heap, _Waiting(priority, self._num_arrived, req_id, demand))
        self._waiting[req_id] = request
        # The one that was first before did not fit, and does not now; so this is the newcomer or no request.
        may_enter = bool(self.admit())
        if is_late and not may_enter:
            self.withdraw([req_id])
            raise OverloadedError(
                f"{len(self._waiting)} steered requests wait for vector slots, the most that may "
                f"(steering.max_waiting); {self.num_reserved} of {self.capacity} slots are taken. Try again later"
            )
        return may_enter

    def release(self, req_id: str) -> None:
        """Free the slots of a request, if it had any. `admit` is to be called next."""
        demand = self._admitted.pop(req_id, None)
        if demand is not None:
            self._groups.remove(demand)

    def admit(self) -> list[R]:
        """Reserve slots for waiting requests, in order, while they suffice; return the ones that can run now."""
        admitted = []
        while self._heap and self._groups.missing(self._heap[0].demand) <= self.capacity - self._groups.num_used:
            first = heapq.heappop(self._heap)
            self._groups.add(first.demand)
            self._admitted[first.req_id] = first.demand
            admitted.append(self._waiting.pop(first.req_id))
        return admitted

    def withdraw(self, req_ids: Collection[str] | None) -> list[R]:
        """Remove the waiting requests among `req_ids` (None: all) and return them in order. `admit` is to be next."""
        leaving = sorted(one for one in self._heap if req_ids is None or one.req_id in req_ids)
        if leaving:
            gone = {one.req_id for one in leaving}
            self._heap = [one for one in self._heap if one.req_id not in gone]
            heapq.heapify(self._heap)
        return [self._waiting.pop(one.req_id) for one in leaving]

    def keep_module(self, name: str, demand: Demand, field: str, *, is_rule: bool = False) -> None:
        """Reserve the slots of a named module, or a rule, until `release_module`; in place of an earlier one.

        Requests that wait and could never run then are those of `take_stranded`.

        Raises:
            RequestError: If they are not free. Nothing has changed.
        """
        self._change_fixed(self._groups.shared, {**self._modules, name: demand}, field, is_rule=is_rule)

    def release_module(self, name: str) -> None:
        """Undo `keep_module`. `admit` is to be called next."""
        self._groups.remove(self._modules.pop(name))

    def set_global(self, demand: Demand, field: str) -> None:
        """Reserve the slots of the global vectors in place of the earlier ones. `admit` is to be called next.

        Raises:
            RequestError: As `keep_module`.
        """
        self._change_fixed(demand, self._modules, field)

    def take_stranded(self) -> list[str]:
        """Return waiting requests that cannot run even alone beside the present global vectors, modules and rules.

        The search happens once after each change of these.
        """
        if not self._may_strand:
            return []
        self._may_strand = False
        fixed = self._groups.needed(self._modules.values())
        return [
            waiting.req_id
            for waiting in sorted(self._heap)
            if _size({**fixed, **self._groups.needed([waiting.demand])}) > self.capacity
        ]

    def _change_fixed(self, shared: Demand, modules: dict[str, Demand], field: str, *, is_rule: bool = False) -> None:
        """Change the global vectors and modules, if every request that has its slots still fits."""
        groups = SlotGroups(shared)
        for demand in [*modules.values(), *self._admitted.values()]:
            groups.add(demand)
        capacity = self.capacity + (self._num_more if is_rule else self._num_more // 2)
        if groups.num_used > capacity:
            raise RequestError(
                field,
                f"would need {groups.num_used} vector slots together with running requests, but there are "
                f"{capacity} ({self._groups.num_used} are taken now, {len(self._admitted)} requests run); "
                "try again when fewer requests run, steer fewer sites, or raise max_steering_slots",
            )
        self._groups, self._modules = groups, dict(modules)
        self._may_strand = bool(self._heap)


def _key(load: Load | None) -> bytes:
    return b"" if load is None else load.key


def _size(groups: dict[SlotGroup, int]) -> int:
    return sum(groups.values())
