"""Where the step thread hands over what was captured, whichever process takes it from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headgate.capture.delivery.consumer_queue import UnfinishedWork
from headgate.capture.monitoring.stats import ConsumerStats
from headgate.capture.schema.batch import Begin, End, MemoryWanted
from headgate.capture.staging.host_rows import StagedRows

Dispatched = Begin | StagedRows | End | MemoryWanted


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseReport:
    """Work that was unfinished when capture was closed.

    Attributes:
        consumers: Unfinished work of each consumer, by instance.
        is_dispatch_stuck: Rows were still being dispatched when time was up.
        num_unsent: Results and messages that their front end did not acknowledge.
        num_lost: Requests whose capture process ended with their rows, and which got an error.
    """

    consumers: Mapping[str, UnfinishedWork] = field(default_factory=dict)
    is_dispatch_stuck: bool = False
    num_unsent: int = 0
    num_lost: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether everything was delivered."""
        is_left = self.is_dispatch_stuck or self.num_unsent or self.num_lost
        return not is_left and set(self.consumers.values()) <= {UnfinishedWork()}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveryStats:
    """Counters of a delivery; see `CaptureStats`, whose fields these are."""

    dispatch_errors: int = 0
    lost_results: int = 0
    lost_messages: int = 0
    restarts: int = 0
    consumers: tuple[ConsumerStats, ...] = ()


class Delivery(Protocol):
    """Takes rows and requests from the step thread, in order, and has consumers called and results sent.

    `put`, `flush`, `is_lost` and `recover` are for the step thread, `stats` and `close` for any.
    """

    @property
    def is_lost(self) -> bool:
        """Whether all that was handed over is gone, its requests having got an error; nothing is taken meanwhile."""
        ...

    def recover(self) -> None:
        """Say that every request and row of before is forgotten: what is put from now on is new."""
        ...

    def put(self, item: Dispatched) -> bool:
        """Take `item`, without waiting; False if it was not taken. A request that is not taken has got its error.

        What was taken may lie until `flush`, or until more is put.
        """
        ...

    def flush(self) -> None:
        """See to it that everything that was put is on its way."""
        ...

    def stats(self) -> DeliveryStats:
        """Counters as of now."""
        ...

    def close(self, timeout_s: float) -> CloseReport:
        """Take nothing more, deliver what is there, close the consumers, and end every thread."""
        ...
