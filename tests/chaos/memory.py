"""Whether the memory of a server's processes grows with the requests that it has served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.chaos.fleet import Process

WARM_UP = 6000
"""Requests until caches, pools and the arenas of the allocator have their size, and half of all, if those are more: the
worker's took 6000 requests, on a busy machine 13000, and ended lower. What a server keeps of requests never levels off.
"""
LEAST = 6000
"""Requests after the warm-up that show growth: fewer say nothing."""
BASE_MIB, GROWTH_KIB = 20.0, 0.25
"""Growth allowed after the warm-up: what an allocator's pages may move by (10 MiB, in an hour), and so much for each
request. The smallest thing that a server could keep of a request here, one row of one site, is as large.
"""


class Memory:
    """Resident memory of a server's processes, each time that nothing runs."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, dict[tuple[int, str], float]]] = []

    def look(self, num_requests: int, processes: Iterable[Process]) -> None:
        """Note the memory of the `processes`, after so many requests."""
        self._seen.append((num_requests, {(one.pid, one.name): one.rss_mib for one in processes}))

    def growth(self) -> Iterator[str]:
        """Texts about the processes that grow."""
        num_all = self._seen[-1][0] if self._seen else 0
        warm = [seen for seen in self._seen if seen[0] >= max(WARM_UP, num_all / 2)]
        if not warm or warm[-1][0] - warm[0][0] < LEAST:
            return
        (first, before), (last, after) = warm[0], warm[-1]
        allowed = BASE_MIB + GROWTH_KIB * (last - first) / 1024
        for process in before.keys() & after.keys():
            grown = after[process] - before[process]
            if grown > allowed:
                yield f"{process} grew by {grown:.0f} MiB in {last - first} requests, allowed are {allowed:.0f}: {self}"

    def __str__(self) -> str:
        names = self._seen[0][1] if self._seen else {}
        found = {f"{name} {pid}": [round(seen.get((pid, name), 0)) for _, seen in self._seen] for pid, name in names}
        return f"MiB after {[requests for requests, _ in self._seen]} requests: {found}"
