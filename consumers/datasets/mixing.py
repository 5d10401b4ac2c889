"""Rows in a random order of stated quality, in bounded memory.

Files are cut into blocks of rows, all blocks of the data set are shuffled, and a shuffle buffer is filled with them. A
batch is drawn uniformly from the buffer, which is filled up again before the next one. At every draw it holds at least
`min_rows` rows of at least `min_requests` requests, as long as the epoch has so many left.

What fills the buffer up next is read ahead on a thread of its own, to memory that the buffer has spare. It counts from
when the buffer lacks rows, so nothing depends on how far the thread is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from headgate.consumers.datasets.view import (
    Bytes,
    DatasetView,
    RowBatch,
    Slots,
    ascending,
    check_positive,
    fingerprint_of,
    typed,
)

Numbers = npt.NDArray[np.int64]


class ShuffleBuffer:
    """Rows of some sites, each with a number. Each lies in a slot; a row that is drawn leaves its slot to a later one.

    Attributes:
        count: Rows.

    Args:
        sites: Their names.
        row_bytes: Bytes of a row at one site.
        capacity: Rows that there is memory for; it grows where more are added.
    """

    def __init__(self, sites: Sequence[str], row_bytes: int, capacity: int) -> None:
        self._row_bytes = row_bytes
        self._numbers = np.empty(capacity, dtype=np.int64)  # by slot
        self._rows = {site: self._empty_rows(capacity) for site in sites}  # by slot
        # Slots of rows, in the order that draws refer to; then free ones; then reserved ones.
        self._slots = np.arange(capacity)
        self._num_reserved = 0
        self.count = 0

    @property
    def free(self) -> int:
        """Rows that can be added without taking more memory."""
        return len(self._slots) - self._num_reserved - self.count

    @property
    def numbers(self) -> Numbers:
        """The rows' numbers, in the order that draws refer to."""
        found: Numbers = self._numbers[self._slots[: self.count]]
        return found

    def clear(self) -> None:
        """Take all rows out; nothing is reserved any more."""
        self.count = self._num_reserved = 0
        self._slots.sort()

    def add(self, numbers: Numbers, data: Mapping[str, Bytes]) -> None:
        """Add rows: uint8 ``[rows, row_bytes]`` by site, which are copied."""
        for site, slots in self.reserve(len(numbers)).items():
            slots.put(data[site])
        self.commit(numbers)

    def reserve(self, count: int, *, spared: int = 0) -> dict[str, Slots]:
        """Memory for rows that the next `commit` adds, by site. Rows may be taken out meanwhile, but none be added.

        Args:
            count: Rows.
            spared: Rows taken out last, whose slots are not to be given yet, since `copies` needs them.
        """
        if self.free < count + spared:
            self._grow(max(self.count + count + spared, len(self._slots) * 5 // 4))
        self._num_reserved = count
        slots = self._slots[len(self._slots) - count :].copy()
        return {
            site: Slots(rows.view(np.uint8).reshape(-1, self._row_bytes), slots) for site, rows in self._rows.items()
        }

    def commit(self, numbers: Numbers) -> None:
        """Add rows, whose bytes are in the first of the slots that are reserved; the others are free again."""
        count = len(numbers)
        reserved = self._slots[len(self._slots) - self._num_reserved :].copy()
        displaced = self._slots[self.count : self.count + min(self.free, count)].copy()
        self._slots[self.count : self.count + count] = reserved[:count]
        free = np.concatenate([displaced, reserved[count:]])
        self._slots[len(self._slots) - len(free) :] = free
        self._numbers[reserved[:count]] = numbers
        self.count += count
        self._num_reserved = 0

    def draw(self, random: np.random.Generator, count: int) -> tuple[Numbers, dict[str, Bytes]]:
        """Take rows out at random, all if there are not more than `count`: their numbers and, by site, their bytes."""
        numbers, slots = self.take(random, count)
        return numbers, self.copies(slots)

    def take(self, random: np.random.Generator, count: int) -> tuple[Numbers, Numbers]:
        """Take rows out like `draw`, but return slots in place of bytes: `copies` reads them until rows are added."""
        before, count = self.count, min(count, self.count)
        chosen = random.choice(before, count, replace=False)
        slots = self._slots[chosen]
        left = before - count
        is_taken = np.zeros(count, dtype=np.bool_)
        is_taken[chosen[chosen >= left] - left] = True
        self._slots[chosen[chosen < left]] = self._slots[left:before][~is_taken]
        self._slots[left:before] = slots
        self.count = left
        return self._numbers[slots], slots

    def copies(self, slots: Numbers) -> dict[str, Bytes]:
        """Copies of what lies in slots: uint8 ``[slots, row_bytes]`` by site."""
        width = self._row_bytes
        return {site: rows.take(slots).view(np.uint8).reshape(-1, width) for site, rows in self._rows.items()}

    def _grow(self, size: int) -> None:
        old = len(self._slots)
        self._slots = np.concatenate([self._slots, np.arange(old, size)])
        self._numbers = np.concatenate([self._numbers, np.empty(size - old, dtype=np.int64)])
        for site, rows in self._rows.items():
            larger = self._empty_rows(size)
            larger[:old] = rows
            self._rows[site] = larger

    def _empty_rows(self, count: int) -> npt.NDArray[np.void]:
        return np.empty(count, dtype=np.dtype((np.void, self._row_bytes)))


MULTIPLE = 10.0
"""Times the median norm above which a row is a sink."""
_SAMPLES, _SAMPLE_ROWS = 256, 256


class SinkFilter:
    """Finds rows whose norm is above `MULTIPLE` times the median norm of their site.

    Attributes:
        thresholds: The largest norm that is kept, by site.

    Args:
        samples: Rows by site, uint8 ``[rows, row_bytes]``, whose norms the medians are of; in pieces.
        dtype: Of the rows: ``bfloat16``, ``float16`` or ``float32``.
    """

    def __init__(self, samples: Iterable[Mapping[str, Bytes]], dtype: str) -> None:
        self._dtype = dtype
        norms: dict[str, list[npt.NDArray[np.float32]]] = {}
        for sample in samples:
            for site, rows in sample.items():
                norms.setdefault(site, []).append(self._norms(rows))
        self.thresholds = {site: _threshold(np.concatenate(found)) for site, found in norms.items()}

    def keeps(self, data: Mapping[str, Bytes]) -> npt.NDArray[np.bool_]:
        """bool ``[rows]``: not a sink at any site. Rows with NaN are kept: they are errors, for the trainer to see."""
        is_sink = [self._norms(rows) > self.thresholds[site] for site, rows in data.items()]
        keeps: npt.NDArray[np.bool_] = ~np.logical_or.reduce(is_sink)
        return keeps

    def _norms(self, rows: Bytes) -> npt.NDArray[np.float32]:
        values = typed(rows, self._dtype).astype(np.float32, copy=False)
        norms: npt.NDArray[np.float32] = np.sqrt(np.einsum("nd,nd->n", values, values))
        return norms


def sinks_of(view: DatasetView, seed: int) -> SinkFilter:
    """A filter of the rows of a data set.

    The medians are of a sample: 256 places, drawn by `seed`, with 256 rows each; all rows of a smaller data set.
    """
    if len(view) <= _SAMPLES * _SAMPLE_ROWS:
        places = np.arange(0, len(view), _SAMPLE_ROWS)
    else:
        places = np.sort(np.random.default_rng(seed).integers(0, len(view) - _SAMPLE_ROWS, _SAMPLES))
    samples = (view.read(place, min(place + _SAMPLE_ROWS, len(view))) for place in places.tolist())
    return SinkFilter(samples, view.dtype)


def _threshold(norms: npt.NDArray[np.float32]) -> float:
    finite = norms[np.isfinite(norms)]
    return MULTIPLE * float(np.median(finite)) if len(finite) else float("inf")


T = TypeVar("T")


class Ahead(Generic[T]):
    """A call that runs from now on, on a thread of its own, and whose result is wanted later.

    The thread ends with the call, so there is nothing to close. A process that is forked meanwhile has no such thread,
    and calls again.

    Args:
        call: Called once, and in a forked copy again: it must not depend on how far the first call came.
        name: Of the thread.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._process = os.getpid()
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, name=name).start()

    def wait(self) -> None:
        """Wait for the end of the call, whatever comes of it."""
        if self._process == os.getpid():
            self._future.exception()

    def result(self) -> T:
        """Wait for the end of the call, and return what it returned or raise what it raised."""
        return self._future.result() if self._process == os.getpid() else self._call()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is for who wants the result to see)
            self._future.set_exception(error)


DEFAULT_ROWS = 1_000_000
DEFAULT_REQUESTS = 1000
STATE_VERSION = 1
_REFILL_BYTES = 32 << 20
"""Bytes that a shuffle buffer is filled up with at once, so that threads wait for each other seldom."""


class MixedBatches(Iterator[RowBatch]):
    """An iterator of batches that returns each row once per epoch, except for dropped sinks.

    The same arguments give the same batches on every machine.

    Attributes:
        epoch: The epoch of the next batch, from 0.
        num_sinks: Rows of this part that were dropped as sinks so far.

    Args:
        view: The rows.
        batch_size: Rows in a batch; the last one of an epoch may be smaller.
        seed: Seed of the order.
        min_rows: Rows in the buffer that batches are drawn from. It takes this many times the bytes of a row at all
            sites, and up to 64 MiB or two batches more.
        min_requests: Requests in the buffer, which grows until it has them where requests are long.
        epochs: Passes over the data, each in another order; None for no end.
        first_epoch: The number of the first epoch, which determines its order.
        drop_sinks: Omit rows whose norm is above 10 times the median at one of the sites; see `sinks_of`.
        part: ``(i, n)``: the i-th of n disjoint parts, whose union is all rows; for ranks and workers.
        reads_ahead: Read on a thread while the caller uses a batch; otherwise between two batches. The batches are
            equal.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        view: DatasetView,
        *,
        batch_size: int,
        seed: int = 0,
        min_rows: int = DEFAULT_ROWS,
        min_requests: int = DEFAULT_REQUESTS,
        epochs: int | None = 1,
        first_epoch: int = 0,
        drop_sinks: bool = False,
        part: tuple[int, int] = (0, 1),
        reads_ahead: bool = True,
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
        self._min_rows, self._min_requests, self._reads_ahead = min_rows, min_requests, reads_ahead
        self._block_rows = max(min_rows // (2 * min_requests), 1)
        self._filter = sinks_of(view, seed) if drop_sinks else None
        self._own_view = replace(view, files=view.files.copy())  # of the thread: the caller may use `view` meanwhile
        row_bytes = max(view.row_bytes * len(view.sites), 1)
        self._refill_rows = max(min(_REFILL_BYTES // row_bytes, min_rows // 8), batch_size)
        self._buffer = _ViewBuffer(view, min(min_rows + 2 * (self._refill_rows + self._block_rows), len(view)))
        self._ahead: Ahead[_Refill] | None = None
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
            if self._buffer.count:
                return self._draw()
            if not len(self.view):
                break
            self.epoch += 1
            self._begin()
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, for `load_state_dict`: plain values and one array of row numbers."""
        return {
            "version": STATE_VERSION,
            "rows": fingerprint_of(self.view),
            "settings": dict(self._settings),
            "epoch": self.epoch,
            "next_block": self._next_block,
            "random": self._random.bit_generator.state,
            "pool": self._buffer.numbers,
            "num_sinks": self.num_sinks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the same batches follow. The rows of the buffer are read again.

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
        self._buffer.add(numbers, self.view.gather(numbers))

    def _begin(self) -> None:
        """Begin the epoch: the order of its blocks, and a shuffle buffer without rows."""
        if self._ahead is not None:
            self._ahead.wait()  # it writes to the shuffle buffer
            self._ahead = None
        starts, stops = block_order(self.view, self._block_rows, np.random.default_rng([self._seed, self.epoch]))
        index, count = self._part
        self._starts, self._stops = starts[index::count], stops[index::count]
        self._next_block = 0
        self._random = np.random.default_rng([self._seed, self.epoch, index + 1, count])
        self._buffer.clear()

    def _draw(self) -> RowBatch:
        numbers, slots = self._buffer.take(self._random, self._batch_size)
        if self._reads_ahead and self._ahead is None and self._next_block < len(self._starts):
            self._ahead = Ahead(self._next_refill(spared=len(slots)), "headgate-mixing")
        return RowBatch(self.view, numbers, self._buffer.copies(slots))

    def _fill(self) -> None:
        buffer = self._buffer
        while self._next_block < len(self._starts):
            if buffer.count >= self._min_rows and buffer.num_requests >= self._min_requests:
                break
            if self._ahead is None:
                refill = self._next_refill()()
            else:
                self._ahead.wait()
                ahead, self._ahead = self._ahead, None  # if it failed, its blocks are read again by the next call
                refill = ahead.result()
            buffer.commit(refill.numbers)
            self._next_block = refill.next_block
            self.num_sinks += refill.num_sinks

    def _next_refill(self, *, spared: int = 0) -> Callable[[], _Refill]:
        """Reserve memory for the next blocks; a call of the result reads them to it."""
        first = self._next_block
        sizes = self._stops[first : first + self._refill_rows] - self._starts[first : first + self._refill_rows]
        stop = first + min(int(np.searchsorted(np.cumsum(sizes), self._refill_rows)) + 1, len(sizes))
        starts, stops = self._starts[first:stop], self._stops[first:stop]
        memory = self._buffer.reserve(int(sizes[: stop - first].sum()), spared=spared)
        view, sinks = self._own_view, self._filter

        def read() -> _Refill:
            numbers = ascending(starts, stops)
            if sinks is None:
                view.read_blocks(starts, stops, memory)
                return _Refill(stop, numbers, 0)
            data = {site: np.empty((len(numbers), view.row_bytes), dtype=np.uint8) for site in view.sites}
            view.read_blocks(starts, stops, data)
            kept = sinks.keeps(data)
            for site, slots in memory.items():
                Slots(slots.memory, slots.chosen[: np.count_nonzero(kept)]).put(data[site][kept])
            return _Refill(stop, numbers[kept], int(np.count_nonzero(~kept)))

        return read


class _Refill(NamedTuple):
    """Rows that were read to what the shuffle buffer had reserved for them.

    Attributes:
        next_block: The block after the last that was read.
        numbers: Of the rows.
        num_sinks: Rows that were left out.
    """

    next_block: int
    numbers: Numbers
    num_sinks: int


def block_order(view: DatasetView, block_rows: int, random: np.random.Generator) -> tuple[Numbers, Numbers]:
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


class _ViewBuffer:
    """Rows that are mixed at the moment, and the requests that they are of.

    Attributes:
        num_requests: Requests that they are of.
    """

    def __init__(self, view: DatasetView, capacity: int) -> None:
        self._view = view
        self._rows = ShuffleBuffer(view.sites, view.row_bytes, capacity)
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

    def reserve(self, count: int, *, spared: int = 0) -> dict[str, Slots]:
        """Memory for rows that `commit` adds; see `ShuffleBuffer.reserve`."""
        return self._rows.reserve(count, spared=spared)

    def commit(self, numbers: Numbers) -> None:
        """Add rows that were read to what was reserved."""
        self._rows.commit(numbers)
        self._count(numbers)

    def take(self, random: np.random.Generator, count: int) -> tuple[Numbers, Numbers]:
        """Take rows out at random, all if there are not more than `count`: their numbers and their slots."""
        numbers, slots = self._rows.take(random, count)
        requests, counts = np.unique(self._view.requests(numbers), return_counts=True)
        self._per_request[requests] -= counts.astype(np.int32)
        self.num_requests -= int(np.count_nonzero(self._per_request[requests] == 0))
        return numbers, slots

    def copies(self, slots: Numbers) -> dict[str, Bytes]:
        """Copies of the rows that lie in slots."""
        return self._rows.copies(slots)

    def _count(self, numbers: Numbers) -> None:
        requests, counts = np.unique(self._view.requests(numbers), return_counts=True)
        self.num_requests += int(np.count_nonzero(self._per_request[requests] == 0))
        self._per_request[requests] += counts.astype(np.int32)
