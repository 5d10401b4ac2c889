"""From gathered rows to the files of each request.

On each `WriterThread` a `RequestWriter` copies the rows of its requests out of their blocks, collects them until a
request ends, and writes its files.

A decode step brings one row each of many requests. Cutting each out at once would cost a dozen Python calls per token.
So the consumer's thread keeps the blocks of a few steps in a `RowGatherer`, and each request's rows are copied out of
all of them together, by the thread that writes the request's files.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.probe import Probe
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import KIB
from headgate.capture.schema.consumer import ConsumerContext, FinishedRequest, RequestInfo, RowBlock
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem.condition import IF_PROBE, ProbeScores, scores_of
from headgate.consumers.filesystem.formats.layout import (
    Decision,
    Finished,
    Layout,
    LayoutName,
    sidecar_of,
    unstored_payload,
)
from headgate.consumers.filesystem.storage.local_store import bytes_of, write_all
from headgate.consumers.filesystem.storage.store import PendingSync, Published, Target, stem_of

if TYPE_CHECKING:
    from headgate.capture.delivery.row_packets import RowPool

Bytes3D = npt.NDArray[np.uint8]
Pieces = Mapping[Site, list[memoryview]]


@dataclass(slots=True)
class Chunk:
    """Some rows of one request, as bytes.

    Attributes:
        sites: ``S`` sites.
        positions: int64 ``[N]``.
        data: uint8 ``[S, N, row_bytes]``; None while it is in the spool's file.
        row_bytes: Bytes of a row of one site.
        offset: Where it starts in that file.
    """

    sites: tuple[Site, ...]
    positions: Int64Array
    data: Bytes3D | None
    row_bytes: int
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take; 0 while they are in the spool's file."""
        return 0 if self.data is None else self.data.nbytes


class Spool:
    """Rows of one request until it ends. Used by one thread.

    Attributes:
        held_bytes: Memory that its rows take.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._chunks: list[Chunk] = []
        self._path: Path | None = None
        self._file: int | None = None
        self._file_bytes = 0

    def append(self, chunk: Chunk) -> None:
        """Take rows; a site's rows come in ascending order of position."""
        self._chunks.append(chunk)
        self.held_bytes += chunk.num_bytes

    def spill(self, path: Path) -> None:
        """Move every row from memory to a file: a new one at `path`, or the one that an earlier call made.

        Raises:
            OSError: If the disk takes no more; the rows that did not fit are still in memory.
        """
        if self._file is None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._path = path
        for chunk in self._chunks:
            if chunk.data is not None:
                write_all(self._file, [bytes_of(np.ascontiguousarray(chunk.data))], self._file_bytes)
                chunk.offset = self._file_bytes
                self._file_bytes += chunk.num_bytes
                self.held_bytes -= chunk.num_bytes
                chunk.data = None

    def assemble(self, sites: Sequence[Site], *, num_rows: int, has_gaps: bool) -> tuple[Int64Array, Pieces]:
        """Put the rows in order, without copying them.

        Args:
            sites: The sites that were asked for.
            num_rows: Rows at positions from here on were computed in vain and are left out.
            has_gaps: Rows were lost on their way, so a site may lack some: only positions that all sites have are kept.

        Returns:
            Positions of the rows, ascending, and for each site the bytes of its rows.

        Raises:
            ConsumerError: If positions do not ascend, or differ between sites without `has_gaps`.
        """
        mapped = self._map()
        found: dict[Site, tuple[list[memoryview], list[Int64Array]]] = {site: ([], []) for site in sites}
        last: tuple[Site, ...] = ()
        places: list[tuple[list[memoryview], list[Int64Array]] | None] = []
        for chunk in self._chunks:
            keep = int(np.searchsorted(chunk.positions, num_rows))
            if not keep:
                continue
            if chunk.sites is not last:
                last, places = chunk.sites, [found.get(site) for site in chunk.sites]
            kept = chunk.positions[:keep]
            for place, rows in zip(places, _bytes_by_site(_data_of(chunk, mapped)[:, :keep]), strict=True):
                if place is not None:
                    place[0].append(rows)
                    place[1].append(kept)
        pieces = {site: views for site, (views, _) in found.items()}
        return _even(pieces, {site: spans for site, (_, spans) in found.items()}, has_gaps)

    def discard(self) -> None:
        """Give up memory and file. May be called again."""
        self._chunks.clear()
        self.held_bytes = 0
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def _map(self) -> npt.NDArray[np.uint8]:
        """The file's bytes, mapped; they stay readable after the file was closed and unlinked."""
        if self._file is None or self._file_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(mmap.mmap(self._file, self._file_bytes, access=mmap.ACCESS_READ), dtype=np.uint8)


def _data_of(chunk: Chunk, mapped: npt.NDArray[np.uint8]) -> Bytes3D:
    """A chunk's rows, uint8 ``[S, N, row_bytes]``, from memory or from the spool's file."""
    if chunk.data is not None:
        return chunk.data
    shape = (len(chunk.sites), len(chunk.positions), chunk.row_bytes)
    num_bytes = shape[0] * shape[1] * shape[2]
    return mapped[chunk.offset : chunk.offset + num_bytes].reshape(shape)


def _bytes_by_site(rows: Bytes3D) -> list[memoryview]:
    """The bytes of each site, of uint8 ``[S, N, row_bytes]``; a view of them all is cut faster than an array is."""
    if not rows.flags.c_contiguous:
        return [bytes_of(np.ascontiguousarray(of_site)) for of_site in rows]
    whole, size = bytes_of(rows), rows[0].nbytes
    return [whole[start : start + size] for start in range(0, rows.nbytes, size)]


def _even(pieces: Pieces, spans: Mapping[Site, list[Int64Array]], has_gaps: bool) -> tuple[Int64Array, Pieces]:
    """Check that every site has the same positions or, where rows were lost, cut all of them back to those."""
    by_blocks: dict[tuple[int, ...], Int64Array] = {}
    positions: dict[Site, Int64Array] = {}
    for site, chunks in spans.items():
        blocks = tuple(map(id, chunks))  # sites of the same blocks share their position arrays
        if blocks not in by_blocks:
            by_blocks[blocks] = _positions_of(chunks, site)
        positions[site] = by_blocks[blocks]
    common = reduce(partial(np.intersect1d, assume_unique=True), by_blocks.values())
    if all(len(each) == len(common) for each in by_blocks.values()):
        return common, pieces
    if not has_gaps:
        counts = ", ".join(f"{site.name}: {len(each)}" for site, each in positions.items())
        raise ConsumerError(f"the sites differ in their positions although no row was dropped: {counts}; none is kept")
    return common, {site: _only(pieces[site], np.isin(positions[site], common)) for site in pieces}


def _positions_of(chunks: Sequence[Int64Array], site: Site) -> Int64Array:
    positions = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int64)
    if (np.diff(positions) <= 0).any():
        raise ConsumerError(f"rows of site {site.name} came out of order or twice; none of them is kept")
    return positions


def _only(pieces: list[memoryview], keep: npt.NDArray[np.bool_]) -> list[memoryview]:
    rows = np.frombuffer(b"".join(pieces), np.uint8)
    return [bytes_of(rows.reshape(len(keep), -1)[keep])] if pieces else []


MAX_BLOCKS = 64
"""Blocks kept at most; more would save little."""
MIN_CHUNK_BYTES = 64 * KIB
"""Rows that take less are merged with others, although their block has none of another request: each chunk is a buffer
of its own for each site when they are written."""


class RequestSlice(NamedTuple):
    """Some rows of one request in a block.

    Attributes:
        block: Sites and positions.
        data: The block's rows, uint8 ``[S, N, row_bytes]``.
        start: The first row.
        stop: The one after the last.
    """

    block: RowBlock
    data: Bytes3D
    start: int
    stop: int

    @property
    def rows(self) -> Bytes3D:
        """The rows of the request, uint8 ``[S, stop - start, row_bytes]``: a view."""
        return self.data[:, self.start : self.stop]


class RowGatherer:
    """Collects blocks. Used by one thread.

    Args:
        max_bytes: Blocks are kept up to this size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_blocks = 0
        self._num_bytes = 0
        self._pieces: dict[str, list[RequestSlice]] = {}

    @property
    def is_full(self) -> bool:
        """Whether it is time to `pop_all`."""
        return self._num_blocks >= MAX_BLOCKS or self._num_bytes >= self._max_bytes

    def add(self, block: RowBlock, data: Bytes3D) -> None:
        """Keep a block; `data` is its rows as uint8 ``[S, N, row_bytes]``."""
        self._num_blocks += 1
        self._num_bytes += data.nbytes
        pieces = self._pieces
        for span in block.spans:
            request_id = span.request.request_id
            piece = RequestSlice(block, data, span.start, span.stop)
            if request_id in pieces:
                pieces[request_id].append(piece)
            else:
                pieces[request_id] = [piece]

    def pop(self, request_id: str) -> list[RequestSlice]:
        """Remove and return the rows of one request, in their order."""
        return self._pieces.pop(request_id, [])

    def pop_all(self) -> dict[str, list[RequestSlice]]:
        """Remove and return the rows of every request."""
        taken, self._pieces = self._pieces, {}
        self._num_blocks = self._num_bytes = 0
        return taken


def chunks_of(pieces: Sequence[RequestSlice], pool: RowPool) -> list[Chunk]:
    """Merge pieces of a request into few chunks.

    A piece that has its block for itself is a chunk, without a copy. Others are copies: a view would keep the rows of
    all other requests of a block in memory until this one ends. Those of the same sites become one chunk, if no site
    is in two different sets.

    Args:
        pieces: In the order of their positions.
        pool: Memory for the copies.
    """
    by_sites: dict[tuple[Site, ...], list[RequestSlice]] = {}
    for piece in pieces:
        by_sites.setdefault(piece.block.sites, []).append(piece)
    if sum(map(len, by_sites)) != len(set().union(*by_sites)):
        # Merged chunks would bring a site's rows out of order.
        return [_merge([piece], pool) for piece in pieces]
    return [_merge(run, pool) for of_sites in by_sites.values() for run in _runs(of_sites)]


def _runs(pieces: Sequence[RequestSlice]) -> Iterator[list[RequestSlice]]:
    """Pieces that become one chunk, in their order."""
    run: list[RequestSlice] = []
    for piece in pieces:
        if len(piece.block.spans) == 1 and piece.data.nbytes >= MIN_CHUNK_BYTES:
            if run:
                yield run
            yield [piece]
            run = []
        else:
            run.append(piece)
    if run:
        yield run


def _merge(pieces: Sequence[RequestSlice], pool: RowPool) -> Chunk:
    first = pieces[0]
    sites, rows = first.block.sites, first.rows
    if len(pieces) == 1 and 2 * rows.shape[1] >= first.data.shape[1]:
        return Chunk(sites, first.block.positions[first.start : first.stop], rows, rows.shape[2])
    positions = np.concatenate([piece.block.positions[piece.start : piece.stop] for piece in pieces])
    merged = pool.empty_bytes((rows.shape[0], len(positions), rows.shape[2]))
    np.concatenate([piece.rows for piece in pieces], axis=1, out=merged)
    return Chunk(sites, positions, merged, rows.shape[2])


logger = logging.getLogger(__name__)
Outcome = Future[dict[str, Any]]
Task = Callable[[], None]
_TASK_BYTES = 1024  # counted for a task beside the rows it carries
_MAX_BATCH = 128  # tasks between two calls of `after_batch` while the queue never runs empty


class WritersOfRequests:
    """Which of some writers has each open request: always the same, which had the fewest when it began.

    Args:
        num_writers: Writers, by their indices.
    """

    def __init__(self, num_writers: int) -> None:
        self._num_open = [0] * num_writers
        self._writers: dict[str, int] = {}

    def __getitem__(self, request_id: str) -> int:
        """Return the writer of an open request."""
        return self._writers[request_id]

    def begin(self, request_id: str) -> int:
        """Return the writer of a request that begins."""
        index = self._writers[request_id] = self._num_open.index(min(self._num_open))
        self._num_open[index] += 1
        return index

    def end(self, request_id: str) -> int:
        """Return the writer of a request that gets no more rows; any, which does not know it, if it was never begun."""
        index = self._writers.pop(request_id, None)
        if index is None:
            return 0
        self._num_open[index] -= 1
        return index


class WriterThread:
    """A thread that runs tasks in order, from a queue bounded by the bytes that its tasks hold.

    `submit` and `close` may be called from any thread. Tasks and `after_batch` run on this thread, without the lock.

    Args:
        name: Of the thread.
        queue_bytes: Memory that waiting tasks may hold; a larger one is taken when nothing else waits.
        after_batch: Called after a batch of tasks: when the queue runs empty, and now and then while it does not.
        ended: Called at the very end.
    """

    def __init__(self, name: str, *, queue_bytes: int, after_batch: Task, ended: Task) -> None:
        self._queue_bytes = queue_bytes
        self._after_batch = after_batch
        self._ended = ended
        self._tasks: deque[tuple[Task, int]] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._changed = threading.Condition()  # guards the three above
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task, num_bytes: int = 0, *, is_urgent: bool = True) -> None:
        """Queue a task that holds `num_bytes` of rows; wait while the queue is full.

        Args:
            task: What is to be done.
            num_bytes: Memory that it holds.
            is_urgent: False: it may wait until an urgent task comes.

        Raises:
            ConsumerError: If the writer is closed, also while waiting.
        """
        num_bytes += _TASK_BYTES
        with self._changed:
            if not self._has_room(num_bytes):
                self._changed.notify_all()  # room may be taken by tasks that the thread was not woken for
            self._changed.wait_for(lambda: self._closed or self._has_room(num_bytes))
            if self._closed:
                raise ConsumerError("the consumer is closed")
            self._tasks.append((task, num_bytes))
            self._queued_bytes += num_bytes
            if is_urgent:
                self._changed.notify_all()

    def close(self) -> None:
        """Take no more tasks; the thread ends after the waiting ones. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False when time ran out."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _has_room(self, num_bytes: int) -> bool:
        return not self._tasks or self._queued_bytes + num_bytes <= self._queue_bytes

    def _run(self) -> None:
        in_batch = 0
        while (task := self._next(wait=in_batch == 0)) is not None or in_batch:
            if task is not None:
                _run_safely(task)
                in_batch += 1
            if task is None or in_batch >= _MAX_BATCH:
                _run_safely(self._after_batch)
                in_batch = 0
        _run_safely(self._ended)

    def _next(self, *, wait: bool) -> Task | None:
        """The next task; None if there is none now or, having waited, ever."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._tasks or self._closed)
            if not self._tasks:
                return None
            task, num_bytes = self._tasks.popleft()
            self._queued_bytes -= num_bytes
            self._changed.notify_all()
            return task


def _run_safely(task: Task) -> None:
    """Run a task. Tasks report their own failures; what still gets here is a bug, and must not end the thread."""
    try:
        task()
    except Exception:
        logger.exception("a task of %s failed", threading.current_thread().name)


@dataclass(slots=True)
class _Running:
    """A request that has not ended; with `error`, its further rows are thrown away.

    Attributes:
        request: The request.
        spool: Its rows so far.
        error: Why it failed; None so far.
        scores: Scores of its rows, if it has a condition.
    """

    request: RequestInfo
    spool: Spool = field(default_factory=Spool)
    error: ConsumerError | None = None
    scores: ProbeScores | None = None


class RequestWriter:
    """Collects rows per request, spills them when they are many, stores them when the request ends.

    Used by one writer thread. What goes wrong with a request ends that request, in its outcome, and nothing else.

    Args:
        context: Of the consumer.
        layouts: The layouts that requests may name; for this thread alone.
        temp_path: Gives paths for temporary files.
        pool: Memory for rows; for this thread alone.
        max_request_bytes: Rows of one request held in memory.
        memory_bytes: Rows of all requests held in memory.
        probes: Those of conditions, by name.
    """

    def __init__(
        self,
        context: ConsumerContext,
        layouts: Mapping[LayoutName, Layout],
        temp_path: Callable[[], Path],
        pool: RowPool,
        *,
        max_request_bytes: int,
        memory_bytes: int,
        probes: Mapping[str, Probe],
    ) -> None:
        self._context = context
        self._probes = probes
        self._layouts = layouts
        self._temp_path = temp_path
        self._pool = pool
        self._max_request_bytes = max_request_bytes
        self._memory_bytes = memory_bytes
        self._running: dict[str, _Running] = {}
        self._held_bytes = 0
        self._stored: list[tuple[dict[str, Any], Published, Outcome]] = []

    def begin(self, request: RequestInfo) -> None:
        """Begin a request whose rows come to this thread; one whose name is taken fails here, before it has rows."""
        running = self._running[request.request_id] = _Running(request)
        try:
            self._layout(request).check_free(self._target(request))
            if IF_PROBE in request.spec.options:
                running.scores = scores_of(request, self._context.model, self._probes)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's outcome)
            self._fail(running, error)

    def append(self, rows: Mapping[str, Sequence[RequestSlice]]) -> None:
        """Add rows, by the ids of their requests."""
        for request_id, pieces in rows.items():
            running = self._running.get(request_id)
            if running is None or running.error is not None:
                continue  # failed before; its outcome says so
            for chunk in chunks_of(pieces, self._pool):
                self._take(running, chunk)
            if running.spool.held_bytes > self._max_request_bytes:
                self._spill(running)
        if self._held_bytes > self._memory_bytes:
            self._make_room()

    def _take(self, running: _Running, chunk: Chunk) -> None:
        if running.error is not None:
            return
        self._held_bytes += chunk.num_bytes
        running.spool.append(chunk)
        if running.scores is not None and chunk.data is not None:
            try:
                running.scores.add(chunk.sites, chunk.positions, chunk.data)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's outcome)
                self._held_bytes -= running.spool.held_bytes
                self._fail(running, error)

    def finish(self, finished: FinishedRequest, pieces: Sequence[RequestSlice], outcome: Outcome) -> None:
        """Write a request that ended with `pieces`; `outcome` completes in `sync_stored`, or here if writing fails."""
        self.append({finished.request.request_id: pieces})
        running = self._running.pop(finished.request.request_id, None)
        if running is None:
            _complete(outcome, ConsumerError(f"request {finished.request.request_id} was never begun"))
        elif running.error is not None:
            _complete(outcome, running.error)
        else:
            self._held_bytes -= running.spool.held_bytes
            try:
                self._settle(finished, running, outcome)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's outcome)
                _complete(outcome, _failure(finished.request, error))
            finally:
                running.spool.discard()

    def abandon(self, request: RequestInfo) -> None:
        """Discard the rows of a request that will never be finished."""
        running = self._running.pop(request.request_id, None)
        if running is not None:
            self._held_bytes -= running.spool.held_bytes
            running.spool.discard()

    def sync_stored(self) -> None:
        """Put the files written since the last call on the disk, then complete the outcomes of their requests."""
        waiting: dict[PendingSync, list[tuple[dict[str, Any], Published, Outcome]]] = {}
        for stored in self._stored:
            waiting.setdefault(stored[1].pending_sync, []).append(stored)
        self._stored.clear()
        for pending, group in waiting.items():
            try:
                pending.sync()
            except Exception as error:  # noqa: BLE001  (whatever it is, it is these requests' outcome)
                for payload, published, outcome in group:
                    _complete(outcome, _not_synced(payload["paths"], published.undo, error))
            else:
                for payload, _, outcome in group:
                    _complete(outcome, payload)

    def close(self) -> None:
        """Throw away the rows of requests that never ended, and close the layouts."""
        for running in self._running.values():
            logger.warning("request %s had not ended; its rows are thrown away", running.request.request_id)
            running.spool.discard()
        self._running.clear()
        for layout in self._layouts.values():
            layout.close()

    def _layout(self, request: RequestInfo) -> Layout:
        return self._layouts[request.spec.options["layout"]]

    def _target(self, request: RequestInfo) -> Target:
        stage = (self._context.pp_rank, self._context.pp_size)
        options = request.spec.options
        stem = stem_of(options["name"], sample=(request.sample_index, request.num_samples), stage=stage)
        return Target((options["tag"],), stem)

    def _settle(self, finished: FinishedRequest, running: _Running, outcome: Outcome) -> None:
        """Store a request's rows, unless its condition does not hold; the outcome says so at once."""
        request, final = finished.request, finished.final
        positions, pieces = running.spool.assemble(
            request.spec.sites,
            num_rows=final.num_rows,
            has_gaps=finished.dropped_rows > 0,
        )
        scores = running.scores
        decision = None if scores is None else scores.decide(positions, final.num_prompt_tokens)
        if decision is not None and not decision.num_fired:
            running.spool.discard()
            _complete(outcome, unstored_payload(request.spec.options["layout"], decision))
        else:
            whole = self._whole(finished, positions, pieces, decision)
            self._stored.append((*self._layout(request).store(whole), outcome))

    def _whole(
        self, finished: FinishedRequest, positions: Int64Array, pieces: Pieces, decision: Decision | None
    ) -> Finished:
        request, final = finished.request, finished.final
        sidecar = sidecar_of(
            finished,
            self._context,
            positions=positions,
            num_prefill_rows=int(np.searchsorted(positions, final.num_prompt_tokens)),
            name=stem_of(
                request.spec.options["name"], sample=(request.sample_index, request.num_samples), stage=(0, 1)
            ),
            decision=decision,
        )
        return Finished(
            target=self._target(request),
            sidecar=sidecar,
            positions=positions,
            pieces=pieces,
            token_ids=final.token_ids[positions],
        )

    def _make_room(self) -> None:
        """Spill the largest requests until half of the memory is free: few large writes, not many small ones."""
        by_size = sorted(self._running.values(), key=lambda running: running.spool.held_bytes, reverse=True)
        for running in by_size:
            if self._held_bytes <= self._memory_bytes // 2:
                break
            self._spill(running)

    def _spill(self, running: _Running) -> None:
        before = running.spool.held_bytes
        try:
            running.spool.spill(self._temp_path())
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's outcome)
            self._fail(running, error)
        self._held_bytes -= before - running.spool.held_bytes

    def _fail(self, running: _Running, error: Exception) -> None:
        running.error = _failure(running.request, error)
        running.spool.discard()


def _failure(request: RequestInfo, error: Exception) -> ConsumerError:
    if isinstance(error, ConsumerError):
        return error
    failure = ConsumerError(f"cannot write the capture of request {request.client_request_id}: {error}")
    failure.__cause__ = error
    return failure


def _not_synced(paths: Sequence[str], undo: Callable[[], None] | None, error: Exception) -> ConsumerError:
    """Take files back whose result is an error: a second attempt would find their names taken."""
    try:
        if undo is not None:
            undo()
    except (OSError, ConsumerError) as second:
        return ConsumerError(
            f"cannot write {paths}: {error}. They are there, but may not survive a power cut: {second}"
        )
    return ConsumerError(f"cannot write {paths}: {error}. Nothing of them is left; the request can be sent again")


def _complete(outcome: Outcome, result: dict[str, Any] | ConsumerError) -> None:
    try:
        if isinstance(result, ConsumerError):
            outcome.set_exception(result)
        else:
            outcome.set_result(result)
    except InvalidStateError:
        logger.warning("written after closing gave it up: %s", result)
