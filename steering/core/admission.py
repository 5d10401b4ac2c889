"""Who may run: slots of the vector pool, reserved for the whole life of each request.

A request in the scheduler owns every slot it will ever need, also while it is preempted; one that waits owns nothing.
So whoever runs can run to its end, and nothing can wait for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from headgate.capture.schema.errors import RequestError

R = TypeVar("R")


class Load(NamedTuple):
    """Vectors that share a key, and so their slots."""

    key: bytes
    num_vectors: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request, one named module, or the global vectors need in each phase; None: nothing."""

    prefill: Load | None = None
    decode: Load | None = None


_Group = tuple[str, bytes]
"""One set of slots: for what (requests and modules of both phases or of one, or the global vectors), and its key."""

_GLOBAL = "global"


class _Held(NamedTuple):
    priority: int
    arrival: int
    req_id: str
    demand: Demand


class Reservations(Generic[R]):
    """Slots of one engine core's pool. One thread: the engine core's.

    A request's own vectors take their slots once if the global vectors are the same in both phases; otherwise a
    config that is the same in both phases has two sums. The sites of the global vectors alone share the global slots.

    Args:
        capacity: `headgate.steering.worker.slot_pool.SlotPool.capacity` of the workers.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._global = Demand()
        self._kept: dict[str, Demand] = {}
        self._admitted: dict[str, Demand] = {}
        self._sizes: dict[_Group, int] = {}
        self._users: dict[_Group, int] = {}
        self._used = 0
        self._heap: list[_Held] = []
        self._waiting: dict[str, R] = {}
        self._num_arrived = 0

    @property
    def num_reserved(self) -> int:
        """Slots that are taken: by global vectors, modules and admitted requests."""
        return self._used

    @property
    def num_configs(self) -> int:
        """Distinct sets of vectors that share those slots."""
        return len(self._users)

    @property
    def num_admitted(self) -> int:
        """Requests that have their slots."""
        return len(self._admitted)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for slots, outside the scheduler."""
        return len(self._waiting)

    def is_waiting(self, req_id: str) -> bool:
        """Whether a request waits for slots."""
        return req_id in self._waiting

    def check(self, demand: Demand, field: str) -> None:
        """Refuse what cannot fit even when no other request runs.

        Raises:
            RequestError: With the numbers; `field` is what the client is told.
        """
        fixed = self._groups(self._global, self._kept.values())
        needed = _size({**fixed, **self._groups(self._global, [demand])})
        if needed > self.capacity:
            taken = _size(fixed)
            raise RequestError(
                field,
                f"needs {needed - taken} vector slots, but only {self.capacity - taken} of {self.capacity} can be free "
                f"({taken} hold global vectors and named modules); steer fewer sites, unregister modules, or raise "
                "max_steering_slots",
            )

    def offer(self, req_id: str, demand: Demand, request: R, *, priority: int = 0, field: str = "steering") -> bool:
        """Take a request. True: it has its slots, or needs none, and goes to the scheduler; False: it waits.

        Those with a lower `priority` value go first, and among equals those that came first.

        Raises:
            RequestError: If it can never fit.
        """
        if demand == Demand():
            return True
        if req_id in self._admitted or req_id in self._waiting:
            raise AssertionError(f"request {req_id!r} is here already")
        self.check(demand, field)
        self._num_arrived += 1
        heapq.heappush(self._heap, _Held(priority, self._num_arrived, req_id, demand))
        self._waiting[req_id] = request
        # The one that was first before did not fit, and does not now; so this is the newcomer or nobody.
        return bool(self.admit())

    def release(self, req_id: str) -> None:
        """A request was freed; nothing happens if it had no slots. `admit` is to be called next."""
        demand = self._admitted.pop(req_id, None)
        if demand is not None:
            self._give_back(demand)

    def admit(self) -> list[R]:
        """Give slots to those who wait, in order, as far as they reach; returns who goes to the scheduler now."""
        admitted = []
        while self._heap and self._missing(self._heap[0].demand) <= self.capacity - self._used:
            held = heapq.heappop(self._heap)
            self._take(held.demand)
            self._admitted[held.req_id] = held.demand
            admitted.append(self._waiting.pop(held.req_id))
        return admitted

    def withdraw(self, req_ids: Collection[str] | None) -> list[R]:
        """Those of `req_ids` (None: all) who wait stop waiting; they are returned in order. Then comes `admit`."""
        leaving = sorted(held for held in self._heap if req_ids is None or held.req_id in req_ids)
        if leaving:
            gone = {held.req_id for held in leaving}
            self._heap = [held for held in self._heap if held.req_id not in gone]
            heapq.heapify(self._heap)
        return [self._waiting.pop(held.req_id) for held in leaving]

    def keep(self, name: str, demand: Demand, field: str) -> None:
        """Reserve the slots of a named module until `let_go`; in place of those of an earlier one of that name.

        Raises:
            RequestError: If they are not free, or if somebody who waits could never run then. Nothing has changed.
        """
        self._settle(self._global, {**self._kept, name: demand}, field)

    def let_go(self, name: str) -> None:
        """Undo `keep`. `admit` is to be called next."""
        self._give_back(self._kept.pop(name))

    def set_global(self, demand: Demand, field: str) -> None:
        """Reserve the slots of the global vectors in place of the earlier ones. `admit` is to be called next.

        Raises:
            RequestError: As `keep`.
        """
        self._settle(demand, self._kept, field)

    def _settle(self, shared: Demand, kept: dict[str, Demand], field: str) -> None:
        """Change what does not come from requests, if everybody else still fits."""
        needed = _size(self._groups(shared, [*kept.values(), *self._admitted.values()]))
        if needed > self.capacity:
            raise RequestError(
                field,
                f"would need {needed} vector slots together with running requests, but there are {self.capacity} "
                f"({self._used} are taken now, {len(self._admitted)} requests run); try again when fewer requests "
                "run, steer fewer sites, or raise max_steering_slots",
            )
        fixed = self._groups(shared, kept.values())
        for held in self._heap:
            if (alone := _size({**fixed, **self._groups(shared, [held.demand])})) > self.capacity:
                raise RequestError(
                    field,
                    f"request {held.req_id}, which waits, could never run: together they need {alone} vector slots, "
                    f"but there are {self.capacity}",
                )
        self._global, self._kept = shared, dict(kept)
        self._sizes, self._users, self._used = {}, {}, 0
        for group, size in self._groups(shared, []).items():
            self._take_group(group, size)
        for demand in [*kept.values(), *self._admitted.values()]:
            self._take(demand)

    def _groups(self, shared: Demand, demands: Iterable[Demand]) -> dict[_Group, int]:
        """The slots of `demands` under the global vectors `shared`, and those of `shared`."""
        found = {(_GLOBAL, load.key): load.num_vectors for load in (shared.prefill, shared.decode) if load}
        is_split = _key(shared.prefill) != _key(shared.decode)
        for demand in demands:
            for phase, load in (("prefill", demand.prefill), ("decode", demand.decode)):
                if load is not None:
                    found[phase if is_split else "both", load.key] = load.num_vectors
        return found

    def _own_groups(self, demand: Demand) -> dict[_Group, int]:
        return {group: size for group, size in self._groups(self._global, [demand]).items() if group[0] != _GLOBAL}

    def _missing(self, demand: Demand) -> int:
        return sum(size for group, size in self._own_groups(demand).items() if group not in self._users)

    def _take(self, demand: Demand) -> None:
        for group, size in self._own_groups(demand).items():
            self._take_group(group, size)

    def _take_group(self, group: _Group, size: int) -> None:
        if group not in self._users:
            self._users[group], self._sizes[group] = 0, size
            self._used += size
        self._users[group] += 1

    def _give_back(self, demand: Demand) -> None:
        for group in self._own_groups(demand):
            self._users[group] -= 1
            if not self._users[group]:
                del self._users[group]
                self._used -= self._sizes.pop(group)


def _key(load: Load | None) -> bytes:
    return b"" if load is None else load.key


def _size(groups: dict[_Group, int]) -> int:
    return sum(groups.values())
