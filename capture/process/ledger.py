"""Requests that a capture process was given and has not ended yet: if it dies, they get their errors from here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from headgate.capture.delivery.handoff import RequestBegins
from headgate.capture.local_delivery import Place
from headgate.capture.request_origin import ResultReporter
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.results import CaptureResult
from headgate.capture.transport.result_sender import ResultSender


@dataclass(slots=True)
class _Open:
    """A request, and how many results each consumer owes it."""

    begins: RequestBegins
    owed: Counter[str] = field(default_factory=Counter)


class Ledger:
    """Keeps book of open requests. Threads: any.

    Args:
        place: The worker that they run on.
        bits: Of each consumer, by its instance: its bit in a row's mask.
        far: Consumers that are located in the driver.
        make_sender: Makes what errors are sent with, when the first has to be sent.
    """

    def __init__(
        self,
        place: Place,
        bits: Mapping[str, int],
        far: Iterable[CaptureConsumerSpec],
        make_sender: Callable[[], ResultSender],
    ) -> None:
        self._place = place
        self._instances = {bit: instance for instance, bit in bits.items()}
        self._far = {spec.instance for spec in far}
        self._make_sender = make_sender
        self._sender: ResultSender | None = None
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], _Open] = {}

    def begin(self, begins: RequestBegins) -> None:
        """A request is given to the process."""
        if (key := _key_of(begins)) is None:
            return
        with self._lock:
            found = self._open.setdefault((begins.req_id, key), _Open(begins))
            found.begins = begins
            found.owed.update(self._instances[bit] for bit in begins.specs)

    def end(self, ended: Iterable[tuple[str, str, str]]) -> None:
        """Consumers have ended requests; see `ResultWatcher.done`."""
        with self._lock:
            for instance, req_id, key in ended:
                found = self._open.get((req_id, key))
                if found is not None:
                    found.owed[instance] -= 1
                    if found.owed[instance] <= 0:
                        del found.owed[instance]
                    if not found.owed:
                        del self._open[req_id, key]

    def fail_all(self, reason: str) -> Counter[str]:
        """Send an error for whatever is open; return how many of each consumer."""
        with self._lock:
            found, self._open = list(self._open.values()), {}
        failed = Counter[str]()
        for each in found:
            failed += self._fail(each.begins, set(each.owed), reason)
        return failed

    def fail(self, begins: RequestBegins, reason: str) -> Counter[str]:
        """Send an error for a request that the process did not get; return how many of each consumer."""
        if (key := _key_of(begins)) is None:
            return Counter()
        with self._lock:
            self._open.pop((begins.req_id, key), None)
        return self._fail(begins, set(self._instances.values()), reason)

    def _fail(self, begins: RequestBegins, instances: set[str], reason: str) -> Counter[str]:
        sender = self._sender = self._sender or self._make_sender()
        reporter = ResultReporter(sender, self._place.pp_rank, self._place.pp_size)
        failed = Counter[str]()
        for bit, request in begins.requests().items():
            instance = self._instances[bit]
            if instance not in instances:
                continue
            is_far = instance in self._far
            if not request.info.spec.sites and not is_far:
                reporter.report(instance, request.info, CaptureResult(status="ok"))  # another stage has its rows
                continue
            failed[instance] += 1
            if is_far:
                sender.send_abandon(request.info, instance=instance, stage=self._place.pp_rank)
            reporter.report(instance, request.info, CaptureResult(status="error", error=f"{instance}: {reason}"))
        return failed


def _key_of(begins: RequestBegins) -> str | None:
    """The key of a request; None if it captures nothing."""
    capture = None if begins.new.wire is None else begins.new.wire.get("capture")
    return None if capture is None else capture["key"]
