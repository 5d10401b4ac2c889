"""The capture process's side: takes what the worker sends, and delivers it as a worker's own threads would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from headgate.capture.delivery.delivery import Delivery
from headgate.capture.delivery.handoff import MemoryWanted, RequestBegins
from headgate.capture.planning.step_plan import PackGroup, SiteSet
from headgate.capture.process.connection import Connection
from headgate.capture.process.messages import (
    Begin,
    Close,
    Closed,
    End,
    Group,
    Ready,
    Staged,
    ToProcess,
    copy_part,
    decode_to_process,
    encode,
    new_request,
    numbers,
    pack_group,
    request_ends,
)
from headgate.capture.process.reports import Reports
from headgate.capture.process.request_numbers import NumberedRequests
from headgate.capture.process.stats_board import StatsBoard
from headgate.capture.request_origin import ResultWatcher
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.readouts.readout import ReadoutSite, by_consumer
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import SpecReader
from headgate.capture.staging.host_rows import Lease, StagedRows
from headgate.capture.staging.shared_memory import NumberedCopy, SharedRows

MAX_SITE_SETS = 1024
"""Sets of sites that are known again by their bytes, so that rows of the same sites can be put together."""

OpenDelivery = Callable[[ResultWatcher], Delivery]
"""Opens the consumers, whose results the watcher is told of; raises `ConfigError` if it cannot."""


class CaptureServer:
    """Serves one worker until it closes, or is gone.

    Args:
        sites: Those of the worker, in the order of the ring.
        bits: Of each consumer that is served here, by its instance: its bit in a row's mask.
        rows_AD: The staging memory, ``[A, D]``.
        rows: The same memory's leases and arrivals.
        connection: To the worker.
        board: Where counters are shown.
        readouts: Those that the worker computes.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        bits: Mapping[str, int],
        rows_AD: Tensor,
        rows: SharedRows,
        connection: Connection,
        board: StatsBoard,
        *,
        readouts: Sequence[ReadoutSite] = (),
    ) -> None:
        self._sites = (*sites, *(each.site for each in readouts))
        self._num_outputs = (*[0] * len(sites), *(each.facts.num_outputs for each in readouts))
        self._readouts = by_consumer(readouts)
        self._specs = SpecReader(sites)
        self._bits = dict(bits)
        self._rows_AD = rows_AD
        self._rows = rows
        self._connection = connection
        self._site_sets: dict[bytes, SiteSet] = {}
        self._requests = NumberedRequests()
        self._reports = Reports(connection, board)

    def serve(self, open_delivery: OpenDelivery, close_timeout_s: float) -> None:
        """Open the consumers, say so, and deliver what comes; returns when everything is closed.

        Args:
            open_delivery: Opens them.
            close_timeout_s: Seconds to close them in once the worker is gone; if it closes, it says how many.
        """
        try:
            delivery = open_delivery(self._reports)
        except ConfigError as error:
            self._connection.send(encode(Ready(str(error))))
            return
        self._reports.open(delivery.stats)
        self._connection.send(encode(Ready()))
        timeout_s = close_timeout_s
        while (data := self._connection.receive()) is not None:
            message = decode_to_process(data)
            if isinstance(message, Close):
                timeout_s = message.timeout_s
                break
            self._take(message, delivery)
        else:
            self._rows.is_over = True
        report = delivery.close(timeout_s)
        self._reports.close()
        self._connection.send(encode(Closed(report, delivery.stats())))

    def _take(self, message: ToProcess, delivery: Delivery) -> None:
        if isinstance(message, Staged):
            delivery.put(self._staged_rows(message))
        elif isinstance(message, Begin):
            self._requests.begin(message.number, message.req_id)
            delivery.put(self._request_begins(message))
        elif isinstance(message, End):
            self._requests.end(message.req_id)
            delivery.put(request_ends(message))
        else:
            delivery.put(MemoryWanted())

    def _request_begins(self, message: Begin) -> RequestBegins:
        wanted = {} if message.capture is None else message.capture["specs"]
        specs = {
            self._bits[instance]: self._specs.read(raw) for instance, raw in wanted.items() if instance in self._bits
        }
        return RequestBegins(new_request(message), specs, message.is_same_client, self._readouts)

    def _staged_rows(self, message: Staged) -> StagedRows:
        lease = Lease(message.start, message.num_leased, message.number)
        part = copy_part(message, [self._pack_group(group) for group in message.groups])
        copied = NumberedCopy(self._rows, message.number)
        return StagedRows(part, self._rows_AD, self._rows, lease, copied, message.since)

    def _pack_group(self, group: Group) -> PackGroup:
        site_set = self._site_sets.get(group.site_ids)
        if site_set is None:
            if len(self._site_sets) >= MAX_SITE_SETS:
                self._site_sets.clear()
            ids = numbers(group.site_ids)
            sites = tuple(self._sites[index] for index in ids)
            site_set = SiteSet(sites, ids, self._num_outputs[ids[0]])
            self._site_sets[group.site_ids] = site_set
        return pack_group(group, site_set, self._requests)
