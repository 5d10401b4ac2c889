"""Rows of finished requests that their clients asked to keep, for later requests of theirs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headgate.capture.schema.errors import ConsumerError, RequestError, shown
from headgate.consumers.captured_rows import CapturedRows

MAX_GONE = 1024
"""Names that are remembered with the reason why their rows are gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepLimits:
    """Limits of what is kept.

    Attributes:
        max_bytes: Bytes of rows, of all clients.
        max_key_bytes: Bytes of rows that one client's key may hold; all clients without a key count as one.
        max_age_s: Seconds after which rows are given up.
    """

    max_bytes: int
    max_key_bytes: int
    max_age_s: float


class KeptName(NamedTuple):
    """A name of one client's.

    Attributes:
        owner: Name of its key; None without one.
        name: As the request gave it.
    """

    owner: str | None
    name: str


class _Kept(NamedTuple):
    samples: dict[int, CapturedRows]
    call: str
    num_bytes: int
    gone_at: float


class KeptRequests:
    """The rows that requests have kept, by client and name. Any thread.

    Where there is no room, the rows that were not used for the longest time give way: those of the same client if it
    holds too much, else those of any. Rows that are too old are given up when anything is kept or looked for.

    Args:
        limits: How much is kept, and for how long.
        clock: Seconds, monotonic.
    """

    def __init__(self, limits: KeepLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[KeptName, _Kept] = OrderedDict()
        self._gone: OrderedDict[KeptName, str] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: KeptName, rows: CapturedRows, *, call: str, num_bytes: int) -> None:
        """Keep the rows of one sample. Samples of one call come together; another call's take the place of them.

        Raises:
            ConsumerError: If they are larger than all that one client may keep, or another prompt of the same call
                has kept its rows under the name.
        """
        limit = min(self._limits.max_bytes, self._limits.max_key_bytes)
        with self._lock:
            self._forget_old()
            earlier = self._kept.get(key)
            if earlier is not None and earlier.call != call:
                earlier = None
            if earlier is not None and rows.sample_index in earlier.samples:
                raise ConsumerError(
                    f"another prompt of this call has kept its rows as {key.name!r}: one name, one prompt"
                )
            samples = {**(earlier.samples if earlier else {}), rows.sample_index: rows}
            total = num_bytes + (earlier.num_bytes if earlier else 0)
            if total > limit:
                raise ConsumerError(
                    f"the rows to be kept as {key.name!r} take {total} bytes, and a client may keep {limit} "
                    "(parameters keep_bytes and keep_key_bytes); capture fewer sites or positions"
                )
            self._kept.pop(key, None)
            self._make_room(key, total)
            self._gone.pop(key, None)
            self._kept[key] = _Kept(samples, call, total, self._clock() + self._limits.max_age_s)

    def find(self, key: KeptName, sample_index: int, field: str) -> CapturedRows:
        """Return what is kept under a name.

        Raises:
            RequestError: Naming ``request`` or ``sample`` below `field`, if there is nothing (any more).
        """
        with self._lock:
            self._forget_old()
            found = self._kept.get(key)
            if found is None:
                raise RequestError(f"{field}.request", self._why_not(key))
            self._kept.move_to_end(key)
        if sample_index not in found.samples:
            raise RequestError(
                f"{field}.sample", f"{key.name!r} has the samples {sorted(found.samples)}, not {sample_index}"
            )
        return found.samples[sample_index]

    def clear(self) -> None:
        """Give everything up."""
        with self._lock:
            self._kept.clear()

    def _why_not(self, key: KeptName) -> str:
        if key in self._gone:
            return f"the rows kept as {shown(key.name)} are gone: {self._gone[key]}; capture them again"
        return (
            f"nothing is kept as {shown(key.name)} for this client; a request that captures with the consumer 'memory' "
            'keeps its rows, once it is answered, if its spec has "keep": NAME'
        )

    def _forget_old(self) -> None:
        now = self._clock()
        for key in [key for key, kept in self._kept.items() if kept.gone_at <= now]:
            self._give_up(key, f"they were kept for {self._limits.max_age_s:g} s (keep_s)")

    def _make_room(self, key: KeptName, num_bytes: int) -> None:
        own = [other for other in self._kept if other.owner == key.owner]
        while sum(self._kept[other].num_bytes for other in own) + num_bytes > self._limits.max_key_bytes:
            self._give_up(own.pop(0), f"this client keeps at most {self._limits.max_key_bytes} bytes (keep_key_bytes)")
        while sum(kept.num_bytes for kept in self._kept.values()) + num_bytes > self._limits.max_bytes:
            self._give_up(next(iter(self._kept)), f"at most {self._limits.max_bytes} bytes are kept here (keep_bytes)")

    def _give_up(self, key: KeptName, reason: str) -> None:
        del self._kept[key]
        self._gone[key] = reason
        self._gone.move_to_end(key)
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
