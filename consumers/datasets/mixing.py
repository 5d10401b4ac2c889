"""Rows in a random order of stated quality, in bounded memory.

Files are cut into blocks of rows, all blocks of the data set are shuffled, and a pool is filled with them. A batch is
drawn uniformly from the pool, which is filled up again before the next one. So at every draw the pool holds at least
`min_rows` rows of at least `min_requests` requests, as long as the epoch has so many left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.consumers.datasets.batches import RowBatch, check_positive
from headgate.consumers.datasets.pool import RowPool
from headgate.consumers.datasets.reading import Bytes, Slots
from headgate.consumers.datasets.sinks import SinkFilter
from headgate.consumers.datasets.view import RowView, fingerprint_of

DEFAULT_ROWS = 1_000_000
DEFAULT_REQUESTS = 1000
STATE_VERSION = 1

Numbers = npt.NDArray[np.int64]


class MixedBatches(Iterator[RowBatch]):
    """An iterator of batches. No row comes twice in an epoch; each comes once, but for dropped sinks.

    The same arguments give the same batches on every machine.

    Attributes:
        epoch: The epoch of the next batch, from 0.
        num_sinks: Rows of this part that were dropped as sinks so far.

    Args:
        view: The rows.
        batch_size: Rows in a batch; the last one of an epoch may be smaller.
        seed: Of the order.
        min_rows: Rows that are mixed: the pool takes so many times the bytes of a row at all sites.
        min_requests: Requests that are mixed. Where requests are few and long, the pool grows until it has them.
        epochs: How often the data are gone through, each time in another order; None for ever.
        first_epoch: The number of the first of them, which its order follows from.
        drop_sinks: Leave out rows whose norm is above 10 times the median at one of the sites; see `SinkFilter`.
        part: ``(i, n)``: the i-th of n disjoint parts, whose union is all rows; for ranks and workers.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        view: RowView,
        *,
        batch_size: int,
        seed: int = 0,
        min_rows: int = DEFAULT_ROWS,
        min_requests: int = DEFAULT_REQUESTS,
        epochs: int | None = 1,
        first_epoch: int = 0,
        drop_sinks: bool = False,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        for field, value in (("batch_size", batch_size), ("min_rows", min_rows), ("min_requests", min_requests)):
            check_positive(value, field)
        if not 0 <= part[0] < part[1]:
            raise ValueError(f"part: expected (i, n) with 0 <= i < n, got {part}")
        self.view = view
        self.epoch = first_epoch
        self.num_sinks = 0
        self._settings = {
            "batch_size": batch_size,
            "seed": seed,
            "min_rows": min_rows,
            "min_requests": min_requests,
            "drop_sinks": drop_sinks,
            "part": list(part),
        }
        self._batch_size, self._seed, self._part = batch_size, seed, part
        self._last_epoch = None if epochs is None else first_epoch + epochs
        self._min_rows, self._min_requests = min_rows, min_requests
        self._block_rows = max(min_rows // (2 * min_requests), 1)
        self._filter = SinkFilter(view, seed) if drop_sinks else None
        self._pool = _Pool(view, min(min_rows, len(view)) + self._block_rows)
        self._begin()

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that each batch has rows of."""
        return self.view.sites

    def __iter__(self) -> MixedBatches:
        return self

    def __next__(self) -> RowBatch:
        while self._last_epoch is None or self.epoch < self._last_epoch:
            self._fill()
            if self._pool.count:
                return self._pool.draw(self._random, self._batch_size)
            if not len(self.view):
                break
            self.epoch += 1
            self._begin()
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, to go on from with `load_state_dict`: plain values and one array of row numbers."""
        return {
            "version": STATE_VERSION,
            "rows": fingerprint_of(self.view),
            "settings": dict(self._settings),
            "epoch": self.epoch,
            "next_block": self._next_block,
            "random": self._random.bit_generator.state,
            "pool": self._pool.numbers,
            "num_sinks": self.num_sinks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the same batches follow. The rows of the pool are read again.

        Raises:
            ValueError: If the state is of other rows or other arguments; the message says which.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"state of version {state.get('version')!r}; this headgate reads version {STATE_VERSION}")
        if state["settings"] != self._settings:
            given, own = state["settings"], self._settings
            wrong = ", ".join(
                f"{key} {given.get(key)!r} (here {own[key]!r})" for key in own if given.get(key) != own[key]
            )
            raise ValueError(f"the state was saved with other arguments: {wrong}")
        if state["rows"] != fingerprint_of(self.view):
            raise ValueError("the state was saved with other rows: files came or went, or others are selected")
        self.epoch = state["epoch"]
        self._begin()
        self._next_block = state["next_block"]
        self._random.bit_generator.state = state["random"]
        self.num_sinks = state["num_sinks"]
        numbers = np.asarray(state["pool"], dtype=np.int64)
        self._pool.add(numbers, self.view.gather(numbers))

    def _begin(self) -> None:
        """Begin the epoch: the order of its blocks, and a pool without rows."""
        starts, stops = block_order(self.view, self._block_rows, np.random.default_rng([self._seed, self.epoch]))
        index, count = self._part
        self._starts, self._stops = starts[index::count], stops[index::count]
        self._next_block = 0
        self._random = np.random.default_rng([self._seed, self.epoch, index + 1, count])
        self._pool.clear()

    def _fill(self) -> None:
        pool = self._pool
        while self._next_block < len(self._starts):
            lacking = self._min_rows - pool.count
            if lacking <= 0 and pool.num_requests >= self._min_requests:
                break
            if self._filter is None:
                self._next_block = pool.read(self._starts, self._stops, self._next_block, lacking)
            else:
                self._add_filtered(self._filter)

    def _add_filtered(self, sinks: SinkFilter) -> None:
        start, stop = int(self._starts[self._next_block]), int(self._stops[self._next_block])
        self._next_block += 1
        data = self.view.read(start, stop)
        kept = sinks.keeps(data)
        self.num_sinks += int(np.count_nonzero(~kept))
        numbers = np.arange(start, stop, dtype=np.int64)[kept]
        self._pool.add(numbers, {site: rows[kept] for site, rows in data.items()})


def block_order(view: RowView, block_rows: int, random: np.random.Generator) -> tuple[Numbers, Numbers]:
    """First rows and ends of all blocks of a view, shuffled.

    A block lies in one file. The blocks of one request are spread over the whole order: two neighbours in it are of
    one request only if there are few requests.
    """
    if not len(view):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    files = view.file_starts()
    sizes = np.diff(files, append=len(view))
    per_file = -(-sizes // block_rows)
    within = np.arange(per_file.sum()) - np.repeat(np.cumsum(per_file) - per_file, per_file)
    starts = np.repeat(files, per_file) + within * block_rows
    stops = np.minimum(starts + block_rows, np.repeat(files + sizes, per_file))
    requests = view.requests(starts)
    shuffled = np.lexsort((random.random(len(starts)), requests))
    of_request = requests[shuffled]
    first = np.flatnonzero(np.diff(of_request, prepend=-1))
    counts = np.diff(first, append=len(of_request))
    rank = np.arange(len(of_request)) - np.repeat(first, counts)
    when = (rank + random.random(len(of_request))) / np.repeat(counts, counts)
    order = shuffled[np.argsort(when, kind="stable")]
    return starts[order], stops[order]


class _Pool:
    """Rows that are mixed at the moment, and the requests that they are of.

    Attributes:
        num_requests: Requests that they are of.
    """

    def __init__(self, view: RowView, capacity: int) -> None:
        self._view = view
        self._rows = RowPool(view.sites, view.row_bytes, capacity)
        self._per_request = np.zeros(len(view.files.table), dtype=np.int32)
        self.num_requests = 0

    @property
    def count(self) -> int:
        """Rows."""
        return self._rows.count

    @property
    def numbers(self) -> Numbers:
        """The rows' numbers in the view, in the order that draws refer to."""
        return self._rows.numbers

    def clear(self) -> None:
        """Take all rows out."""
        self._rows.clear()
        self.num_requests = 0
        self._per_request[:] = 0

    def add(self, numbers: Numbers, data: dict[str, Bytes]) -> None:
        """Add rows."""
        self._rows.add(numbers, data)
        self._count(numbers)

    def read(self, starts: Numbers, stops: Numbers, first: int, num_rows: int) -> int:
        """Add the rows of blocks, from block `first` on: of one, and further ones up to `num_rows` rows.

        Returns:
            The block behind the last.
        """
        ends = np.cumsum(stops[first : first + max(num_rows, 1)] - starts[first : first + max(num_rows, 1)])
        count = min(int(np.searchsorted(ends, num_rows)) + 1, len(ends))
        blocks = list(zip(starts[first : first + count].tolist(), stops[first : first + count].tolist(), strict=True))
        numbers = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in blocks])

        def fill(memory: Mapping[str, Slots]) -> None:
            done = 0
            for start, stop in blocks:
                rows = slice(done, done + stop - start)
                self._view.read_into(start, stop, {site: Slots(m, slots[rows]) for site, (m, slots) in memory.items()})
                done = rows.stop

        self._rows.read(numbers, fill)
        self._count(numbers)
        return first + count

    def _count(self, numbers: Numbers) -> None:
        requests, counts = np.unique(self._view.requests(numbers), return_counts=True)
        self.num_requests += int(np.count_nonzero(self._per_request[requests] == 0))
        self._per_request[requests] += counts.astype(np.int32)

    def draw(self, random: np.random.Generator, count: int) -> RowBatch:
        """Take rows out at random, all if there are not more than `count`."""
        numbers, data = self._rows.draw(random, count)
        requests, counts = np.unique(self._view.requests(numbers), return_counts=True)
        self._per_request[requests] -= counts.astype(np.int32)
        self.num_requests -= int(np.count_nonzero(self._per_request[requests] == 0))
        return RowBatch(self._view, numbers, data)
