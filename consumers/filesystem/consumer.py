"""The consumer that writes captured rows to files."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.stats import Figure
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
)
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.formats.layout import Layout, LayoutName
from headgate.consumers.filesystem.formats.raw_layout import RawLayout
from headgate.consumers.filesystem.formats.request_layout import RequestLayout
from headgate.consumers.filesystem.formats.shard_layout import ShardLayout
from headgate.consumers.filesystem.params import FilesystemParams, own_paths, parse_global, parse_params, parse_request
from headgate.consumers.filesystem.storage.local_store import LocalStore
from headgate.consumers.filesystem.storage.quota import FILE_BYTES, DiskQuota
from headgate.consumers.filesystem.uploading.remote_root import RemoteRoot
from headgate.consumers.filesystem.writing.gathering import Piece, RowGatherer
from headgate.consumers.filesystem.writing.request_writer import (
    Outcome,
    RequestWriter,
    WritersOfRequests,
    WriterThread,
)

if TYPE_CHECKING:
    from headgate.consumers.reader import StoredCapture

logger = logging.getLogger(__name__)

CUT_OFF = ("abort", "error")
"""Statuses of requests that ended before they had all their rows."""

MAX_GATHERED_BYTES = 32 << 20
"""Rows kept for a few steps, so that they can be cut out of their blocks together."""

MAX_SHARD_AGE_S = 600.0
"""Time for which a shard grows before it is uploaded, if it does not become full."""


class FilesystemConsumer(StreamingConsumer):
    """Writes each request's rows to files; `FilesystemParams` lists the parameters.

    A request asks with ``{"hooks", "positions", "tag", "request_id", "layout"}``; only ``hooks`` is required. Its
    result's payload lists the files (see `payload_of`) and comes once they are in place and, with fsync on, on the
    disk.

    Threads: the consumer's own thread cuts rows per request and hands them to `threads` writer threads, always the same
    one for a request; each of those keeps its requests to itself. When the disk does not keep up, the queues before
    the writers fill and `write` waits, so that the consumer's overload policy decides.

    A root in an object store is written to the spool of this machine in the same way, and uploaded from there.

    Raises:
        ConfigError: If the root cannot be written to.
    """

    location = "worker"
    takes_messages = True
    takes_tag = True
    global_spec_param = "hooks"
    linger_s = 0.25  # files are complete when a request has ended, not before

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        import torch  # not at the top: reading captures loads this module and needs no torch

        super().__init__(params, context)
        self._settings = parse_params(params)
        self._dtype = getattr(torch, context.model.dtype)
        settings = self._settings
        self._remote = RemoteRoot(settings.root, settings.spool_root) if settings.is_remote else None
        self._quota = _quota(settings, self._remote)
        self._store = LocalStore(
            self._remote.path if self._remote else settings.local_root,
            fsync=settings.fsync,
            numbering=settings.if_exists == "number",
        )
        self._quota.open()
        if self._remote is not None:
            self._remote.start(
                f"headgate-{context.instance_name}",
                threads=settings.upload_threads,
                wait_s=settings.upload_wait_s,
                numbering=settings.if_exists == "number",
                removed=self._quota.removed,
            )
        self._gatherer = RowGatherer(min(settings.memory // 8, MAX_GATHERED_BYTES))
        self._writers = WritersOfRequests(settings.threads)
        self._outstanding: set[Outcome] = set()
        self._outstanding_lock = threading.Lock()  # guards _outstanding, which writer threads take from
        self._request_writers = [self._new_request_writer() for _ in range(settings.threads)]
        queue_bytes = settings.memory // 4 // settings.threads
        self._threads = [
            WriterThread(
                f"headgate-{context.instance_name}-{index}",
                queue_bytes=queue_bytes,
                after_batch=writer.sync_stored,
                ended=writer.close,
            )
            for index, writer in enumerate(self._request_writers)
        ]

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def own_names(cls, spec: CaptureSpec, context: SpecContext, num_samples: int) -> Sequence[str]:
        return own_paths(spec, context, num_samples)

    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec | None:
        return parse_global(context)

    @classmethod
    def fetch_rows(cls, payload: Any) -> StoredCapture:
        """See `headgate.capture.schema.results.RowFetcher`."""
        from headgate.consumers.reader import open_stored  # which imports this package

        return open_stored(payload)

    def begin(self, request: RequestInfo) -> None:
        if request.spec.sites:
            index = self._writers.begin(request.request_id)
            # Nobody wakes up for it: the first rows bring the writer to it.
            self._threads[index].submit(partial(self._request_writers[index].begin, request), is_urgent=False)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            data = _rows_of(block, self._dtype, self.context.model.hidden_size)
            self._gatherer.add(self._quota.within(block, data), data)
        if self._gatherer.is_full:
            self._hand_over(self._gatherer.pop_all())

    def finish(self, finished: FinishedRequest) -> Any:
        if not finished.request.spec.sites:
            return None  # all of its sites belong to other pipeline stages
        if not self._settings.keep_aborted and finished.final.status in CUT_OFF:
            self.abandon(finished.request)
            raise ConsumerError(
                f"the request ended with {finished.final.status!r}, and its rows are not written (keep_aborted=false)"
            )
        ticket = self._book(finished.request)
        pieces = self._gatherer.pop(finished.request.request_id)
        outcome: Outcome = Future()
        with self._outstanding_lock:
            self._outstanding.add(outcome)
        outcome.add_done_callback(partial(self._stored, ticket, _num_files(finished.request)))
        index = self._writers.end(finished.request.request_id)
        self._threads[index].submit(
            partial(self._request_writers[index].finish, finished, pieces, outcome),
            sum(piece.rows.nbytes for piece in pieces),
        )
        return outcome if self._remote is None else self._remote.after(outcome)

    def abandon(self, request: RequestInfo) -> None:
        self._quota.release(request.request_id)
        self._gatherer.pop(request.request_id)
        index = self._writers.end(request.request_id)
        self._threads[index].submit(partial(self._request_writers[index].abandon, request))

    def figures(self) -> Sequence[Figure]:
        """Return what waits in the spool and was uploaded, of a root in an object store."""
        return () if self._remote is None else self._remote.figures()

    def close(self, timeout_s: float) -> None:
        """Write all queued rows within `timeout_s` seconds; requests left over end with an error. Any thread."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.close()
        ended = [thread.join(max(deadline - time.monotonic(), 0.0)) for thread in self._threads]
        with self._outstanding_lock:
            left = list(self._outstanding)
        for outcome in left:
            _give_up(outcome, timeout_s)
        if all(ended):
            self._store.close()
        else:  # the hanging threads may still write there; the next start removes the folder
            logger.error("%d writer threads did not end within %.1f s", ended.count(False), timeout_s)
        if self._remote is not None:
            self._remote.close(max(deadline - time.monotonic(), 0.0))

    def _new_request_writer(self) -> RequestWriter:
        from headgate.capture.delivery.buffer_pool import RowPool  # which imports torch

        settings = self._settings
        return RequestWriter(
            self.context,
            _layouts(self._store, settings, self._remote),
            self._store.temp_path,
            RowPool(settings.memory // 4 // settings.threads),
            max_request_bytes=settings.request_memory,
            memory_bytes=settings.memory * 5 // 8 // settings.threads,
        )

    def _hand_over(self, gathered: Mapping[str, list[Piece]]) -> None:
        """Queue rows for the writers of their requests; wait for room."""
        by_writer: dict[int, dict[str, list[Piece]]] = defaultdict(dict)
        for request_id, pieces in gathered.items():
            by_writer[self._writers[request_id]][request_id] = pieces
        for index, of_writer in by_writer.items():
            num_bytes = sum(piece.rows.nbytes for pieces in of_writer.values() for piece in pieces)
            self._threads[index].submit(partial(self._request_writers[index].append, of_writer), num_bytes)

    def _book(self, request: RequestInfo) -> int:
        """Count the files that an ended request will have; return the ticket of `DiskQuota.store`.

        Raises:
            ConsumerError: If they, or the request's rows, do not fit.
        """
        self._quota.add(request.request_id, str(request.spec.options["tag"]), _num_files(request) * FILE_BYTES)
        try:
            return self._quota.store(request.request_id)
        except ConsumerError:
            self.abandon(request)
            raise

    def _stored(self, ticket: int, num_files: int, outcome: Outcome) -> None:
        with self._outstanding_lock:
            self._outstanding.discard(outcome)
        is_stored = outcome.exception() is None
        self._quota.settle(ticket, outcome.result()["num_bytes"] + num_files * FILE_BYTES if is_stored else 0)


def _rows_of(block: RowBlock, dtype: Any, hidden_size: int) -> npt.NDArray[np.uint8]:
    """The rows of a block as uint8 ``[S, N, row_bytes]``."""
    import torch

    if block.rows.dtype != dtype or block.rows.shape[2] != hidden_size:
        given = f"{block.rows.dtype} and width {block.rows.shape[2]}"
        raise ConsumerError(f"rows of {given}; the model has {dtype} and width {hidden_size}")
    return block.rows.contiguous().view(torch.uint8).numpy()


def _quota(settings: FilesystemParams, remote: RemoteRoot | None) -> DiskQuota:
    if remote is None:
        return DiskQuota(settings.max_tag_bytes, settings.max_root_bytes, settings.local_root)

    def no_room(tag: str, limit: int) -> str:
        return (
            f"no room for this request in {remote.spool}, where files wait for {settings.root}: spool_bytes is "
            f"{limit}; see in the log why they are not uploaded, or raise it"
        )

    return DiskQuota(None, settings.spool_bytes, remote.spool, no_room=no_room)


def _layouts(store: LocalStore, settings: FilesystemParams, remote: RemoteRoot | None) -> dict[LayoutName, Layout]:
    return {
        "request": RequestLayout(store, durable=settings.fsync),
        "raw": RawLayout(store, durable=settings.fsync),
        "shards": ShardLayout(
            store,
            shard_bytes=settings.shard_bytes,
            max_age_s=MAX_SHARD_AGE_S if remote else None,
            left=remote.upload_folder if remote else None,
        ),
    }


def _num_files(request: RequestInfo) -> int:
    """Files that a request has for itself, by its layout; those of shards are shared."""
    files = {"request": 1, "raw": 2 * len(request.spec.sites), "shards": 0}
    return files[request.spec.options["layout"]]


def _give_up(outcome: Outcome, timeout_s: float) -> None:
    try:
        outcome.set_exception(ConsumerError(f"not written within the {timeout_s:.1f} s that closing may take"))
    except InvalidStateError:
        return  # written in the last moment
