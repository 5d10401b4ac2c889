"""Delivery by several readers of the same rows: capture processes, and threads of the worker.

Each serves some of the consumers. It gets their requests alone, and rows that one of them wants, with their bits only.
If a process is lost, the others go on; requests that it knew get nothing from the one in its place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from headgate.capture.delivery.consumer_thread import UnfinishedWork
from headgate.capture.delivery.delivery import (
    CloseReport,
    Delivery,
    DeliveryStats,
    Dispatched,
    RequestBegins,
    RequestEnds,
)
from headgate.capture.links.shared_memory import NumberedCopy, SharedRows, SharedStaging
from headgate.capture.local_delivery import WorkerPlace, open_local_delivery
from headgate.capture.planning.step_plan import PackGroup
from headgate.capture.process.capture_process import CaptureProcess, open_capture_process
from headgate.capture.schema.config import CaptureConsumersConfig
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.sites import Site
from headgate.capture.staging.host_rows import StagedRows, StagingMemory


class Served(NamedTuple):
    """Which consumers are served where, by their bits.

    Attributes:
        processes: Those of each capture process.
        threads: The consumers that threads of the worker serve.
    """

    processes: tuple[frozenset[int], ...]
    threads: frozenset[int]

    @property
    def num_readers(self) -> int:
        """Readers of shared staging memory; 0 if there is no process to share it with."""
        return len(self.processes) + bool(self.threads) if self.processes else 0


def deal_out(config: CaptureConsumersConfig) -> Served:
    """Deal the consumers out among the processes that are configured; those of the location ``engine`` stay here.

    Raises:
        ConfigError: If a consumer cannot be loaded.
    """
    beside = [bit for bit, spec in enumerate(config.consumers) if load_configured(spec).location != "engine"]
    count = min(config.processes, len(beside))
    processes = tuple(frozenset(beside[index::count]) for index in range(count))
    return Served(processes, frozenset(range(len(config.consumers))).difference(*processes))


class DeliveryTarget:
    """One delivery (capture process or worker threads) and the requests and leases it has. Step thread only.

    Args:
        delivery: Its own.
        bits: Of the consumers that it serves.
        index: Which reader of the staging memory it is.
        memory: The staging memory.
    """

    def __init__(self, delivery: Delivery, bits: frozenset[int], index: int, memory: SharedStaging) -> None:
        self.delivery = delivery
        self._bits = bits
        self._mask = sum(1 << bit for bit in bits)
        self._index = index
        self._memory = memory
        self._rows = SharedRows(memory.shared, index)
        self._known: set[str] = set()
        """Requests that it was given and that have not ended."""
        self._missed: set[str] = set()
        """Requests that run and that it did not get, or has lost: rows of theirs would mean nothing to it."""

    def recover(self) -> None:
        """Go on with new requests if what it had is lost."""
        if self.delivery.is_lost:
            self._missed |= self._known
            self._known.clear()
            self.delivery.recover()

    def begin(self, item: RequestBegins) -> bool:
        """Give it a request; False if it did not take it, or has nothing to do with it."""
        specs = {bit: spec for bit, spec in item.specs.items() if bit in self._bits}
        self._missed.discard(item.req_id)
        if not specs and item.req_id not in self._known:
            return False
        is_taken = self.delivery.put(replace(item, specs=specs))
        (self._known if is_taken else self._missed).add(item.req_id)
        return is_taken

    def end(self, item: RequestEnds) -> None:
        """Send it the end of a request that it was given."""
        self._missed.discard(item.req_id)
        if item.req_id in self._known:
            self._known.remove(item.req_id)
            self.delivery.put(item)

    def forget(self, req_id: str) -> None:
        """Forget a request that no delivery took: its end is not sent."""
        self._missed.discard(req_id)

    def put_rows(self, staged: StagedRows) -> None:
        """Give it those rows, or give them back for it."""
        lease, groups = staged.lease, [self._own(group) for group in staged.part.groups]
        if any(group.masks.any() for group in groups):
            part = staged.part._replace(groups=tuple(groups))
            copied = NumberedCopy(self._rows, lease.number)
            own = StagedRows(part, self._memory.rows_AD, self._rows, lease, copied, staged.since)
            if self.delivery.put(own):
                return
        self._memory.arena.release_for(lease, self._index)

    def _own(self, group: PackGroup) -> PackGroup:
        masks = group.masks & self._mask
        if self._missed:
            for req_id, start, stop in group.spans:
                if req_id in self._missed:
                    masks[start:stop] = 0
        return replace(group, masks=masks)


class SpreadDelivery:
    """Delivers by several readers. Implements `headgate.capture.delivery.delivery.Delivery`.

    Args:
        readers: They serve different consumers.
        instances: All consumers, in the order of the configuration.
    """

    is_lost = False

    def __init__(self, readers: Sequence[DeliveryTarget], instances: Sequence[str]) -> None:
        self._readers = tuple(readers)
        self._places = {instance: place for place, instance in enumerate(instances)}

    def recover(self) -> None:
        """See `Delivery.recover`; each reader recovers by itself."""

    def put(self, item: Dispatched) -> bool:
        """See `Delivery.put`."""
        for reader in self._readers:
            reader.recover()
        if isinstance(item, RequestBegins):
            are_taken = [reader.begin(item) for reader in self._readers]
            if not any(are_taken):
                self._forget(item.req_id)
            return any(are_taken)
        for reader in self._readers:
            if isinstance(item, StagedRows):
                reader.put_rows(item)
            elif isinstance(item, RequestEnds):
                reader.end(item)
            else:
                reader.delivery.put(item)
        return True

    def _forget(self, req_id: str) -> None:
        for reader in self._readers:
            reader.forget(req_id)

    def flush(self) -> None:
        """See `Delivery.flush`."""
        for reader in self._readers:
            reader.delivery.flush()

    def stats(self) -> DeliveryStats:
        """Counters of all."""
        found = [reader.delivery.stats() for reader in self._readers]
        consumers = [each for stats in found for each in stats.consumers]
        return DeliveryStats(
            dispatch_errors=sum(stats.dispatch_errors for stats in found),
            lost_results=sum(stats.lost_results for stats in found),
            lost_messages=sum(stats.lost_messages for stats in found),
            restarts=sum(stats.restarts for stats in found),
            consumers=tuple(sorted(consumers, key=lambda each: self._places[each.instance])),
        )

    def close(self, timeout_s: float) -> CloseReport:
        """See `Delivery.close`; all at the same time."""
        close_by = time.monotonic() + timeout_s
        for reader in self._readers:
            if isinstance(reader.delivery, CaptureProcess):
                reader.delivery.stop(timeout_s)  # no thread for each: at the end of Python none can be started
        reports = [reader.delivery.close(max(close_by - time.monotonic(), 0)) for reader in self._readers]
        left: Mapping[str, UnfinishedWork] = {name: work for each in reports for name, work in each.consumers.items()}
        return CloseReport(
            consumers={name: left[name] for name in self._places if name in left},
            is_dispatch_stuck=any(each.is_dispatch_stuck for each in reports),
            num_unsent=sum(each.num_unsent for each in reports),
            num_lost=sum(each.num_lost for each in reports),
        )


def open_delivery(place: WorkerPlace, sites: Sequence[Site], memory: StagingMemory) -> Delivery:
    """Open the configured consumers, in processes beside the worker and on threads of it.

    Args:
        place: The worker.
        sites: Of the worker, in the order of the ring.
        memory: The staging memory; with as many readers as `deal_out` says, if there are any.

    Raises:
        ConfigError: If one of them cannot be opened, or a process cannot be started; consumers opened before it are
            closed.
    """
    if not isinstance(memory, SharedStaging):
        return open_local_delivery(place)
    served = deal_out(place.config)
    assert memory.shared.num_readers == served.num_readers  # noqa: S101  (who made it has asked the same)
    places = [replace(place, bits=bits) for bits in (*served.processes, *filter(None, [served.threads]))]

    def open_one(index: int) -> Delivery:
        if index < len(served.processes):
            return open_capture_process(places[index], sites, memory, index)
        return open_local_delivery(places[index])

    if len(places) == 1:
        return open_one(0)
    with ThreadPoolExecutor(len(places)) as pool:
        opening = [pool.submit(open_one, index) for index in range(len(places))]
    if any(each.exception() for each in opening):
        for each in opening:
            if each.exception() is None:
                each.result().close(place.config.close_timeout_s)
    opened = [each.result() for each in opening]
    readers = [
        DeliveryTarget(opened[index], frozenset(own.served.values()), index, memory) for index, own in enumerate(places)
    ]
    return SpreadDelivery(readers, list(place.config.bits))
