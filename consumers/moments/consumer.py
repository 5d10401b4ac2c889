"""The consumer that keeps moments of rows over all requests."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
)
from headgate.capture.schema.errors import CaptureFileError, ConfigError
from headgate.capture.schema.results import ReportContext
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.moments.entry import PHASES, MomentsEntry, MomentsKey, Phase
from headgate.consumers.moments.held_rows import HOLD_ROWS, RunningRequest, float32_of
from headgate.consumers.moments.params import parse_global, parse_params, parse_request
from headgate.consumers.moments.report import report
from headgate.consumers.moments.state_file import (
    Entries,
    OwnedFile,
    encode_state,
    read_settings,
    read_state,
    state_files,
)

logger = logging.getLogger(__name__)


class MomentsConsumer(StreamingConsumer):
    """Keeps running moments by site, phase and tag, and writes them to `root`; `MomentsParams` lists the parameters.

    A request asks with ``{"hooks", "positions", "tag"}``. Its payload counts its rows over all sites: ``{"tag",
    "num_rows", "num_skipped", "num_past_end", "problem"}``. `num_past_end` are rows that were computed past the
    request's end, further than `HOLD_ROWS`, and are counted all the same; `problem` says why the state could not be
    written of late, and is None while it can. Rows of a request that fails are counted as far as they came.

    It runs in each worker that captures, and each worker owns one file of the root (`state_file`); the moments are all
    files together, so nothing counts twice under pipeline or data parallelism, with several API servers, or after a
    restart.

    Threads: the consumer's own adds rows; another writes the state. What they share is guarded by a lock.

    Raises:
        ConfigError: If the root cannot be used, holds damaged files or moments that were made with other settings, or
            if the state could take more than `max_bytes`.
    """

    location = "worker"
    takes_tag = True
    linger_s = 0.25  # nobody looks at a row

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._params = parse_params(params)
        self._params.check_size(context.model)
        self._settings = self._params.settings(context.model)
        self._requests: dict[str, RunningRequest] = {}
        self._lock = threading.Lock()  # guards _entries and _is_dirty
        self._writing = threading.Lock()  # one writer of the file at a time
        self._is_dirty = False
        self._problem: str | None = None
        self._is_closed = threading.Event()
        self._file, self._entries = self._open()
        self._thread: threading.Thread | None = None
        if self._params.flush_s:
            name = f"headgate-{context.instance_name}-flush"
            self._thread = threading.Thread(target=self._flush_now_and_then, name=name, daemon=True)
            self._thread.start()

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec | None:
        return parse_global(context)

    @classmethod
    def report(cls, context: ReportContext) -> dict[str, Any]:
        return report(parse_params(context.params).folder, context)

    def begin(self, request: RequestInfo) -> None:
        self._requests[request.request_id] = RunningRequest(request)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            prompt: dict[str, list[Int64Array]] = defaultdict(list)  # by tag: which rows of the block
            for span in block.spans:
                running = self._requests[span.request.request_id]
                positions = block.positions[span.start : span.stop]
                first = int(np.searchsorted(positions, self._params.skip_positions))
                generated = max(first, int(np.searchsorted(positions, running.num_prompt)))
                self._skip(running, block.sites, positions[:first])
                if first < generated:
                    prompt[running.tag].append(np.arange(span.start + first, span.start + generated))
                    running.num_rows += (generated - first) * len(block.sites)
                if generated < len(positions):
                    running.hold(block.sites, positions[generated:], block.rows[:, span.start + generated : span.stop])
                    self._fold_held(running, keep=HOLD_ROWS)
            for tag, found in prompt.items():
                self._fold(tag, "prefill", block.sites, float32_of(block.rows)[:, np.concatenate(found)])

    def finish(self, finished: FinishedRequest) -> dict[str, Any] | None:
        running = self._requests.pop(finished.request.request_id)
        if not finished.request.spec.sites:
            return None  # all of its sites belong to other pipeline stages
        running.cut(finished.final.num_rows)
        self._fold_held(running, keep=0)
        if not self._params.flush_s:
            self._flush()
        return {
            "tag": running.tag,
            "num_rows": running.num_rows,
            "num_skipped": running.num_skipped,
            "num_past_end": running.num_past_end,
            "problem": self._problem,
        }

    def abandon(self, request: RequestInfo) -> None:
        self._requests.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        """Write what is not written yet and give the file up. Any thread; may be called again."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._flush()
        self._file.close()
        self._requests.clear()

    def _open(self) -> tuple[OwnedFile, Entries]:
        try:
            owned = OwnedFile(self._params.folder)
        except OSError as error:
            raise ConfigError(f"moments: root {self._params.root} cannot be used: {error}") from error
        try:
            for path in state_files(self._params.folder):
                self._settings.check_same(read_settings(path), str(path))
            return owned, read_state(owned.path).entries if owned.path.exists() else {}
        except (CaptureFileError, OSError) as error:
            owned.close()
            raise ConfigError(f"moments: {error}") from error
        except BaseException:
            owned.close()
            raise

    def _skip(self, running: RunningRequest, sites: Sequence[Site], positions: Int64Array) -> None:
        """Count rows at the beginning of a request that are left out."""
        if not len(positions):
            return
        num_prompt = int(np.searchsorted(positions, running.num_prompt))
        running.num_skipped += len(positions) * len(sites)
        with self._lock:
            self._is_dirty = True
            for phase, count in zip(PHASES, (num_prompt, len(positions) - num_prompt), strict=True):
                if count:
                    for site in sites:
                        self._entry(MomentsKey(running.tag, site.name, phase)).num_skipped += count

    def _fold_held(self, running: RunningRequest, *, keep: int) -> None:
        """Count generated rows that were held back, but for the last `keep`."""
        for sites, rows in running.release(keep):
            self._fold(running.tag, "decode", sites, rows)

    def _fold(self, tag: str, phase: Phase, sites: Sequence[Site], rows_SNW: npt.NDArray[np.float32]) -> None:
        with self._lock:
            self._is_dirty = True
            for site, rows in zip(sites, rows_SNW, strict=True):
                self._entry(MomentsKey(tag, site.name, phase)).add(rows)

    def _entry(self, key: MomentsKey) -> MomentsEntry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = MomentsEntry(self._settings, key.site)
        return entry

    def _flush_now_and_then(self) -> None:
        while not self._is_closed.wait(self._params.flush_s):
            self._flush()

    def _flush(self) -> None:
        """Write the state, if anything has changed. A disk that takes no more is logged, and tried again next time."""
        with self._writing:
            with self._lock:
                if not self._is_dirty:
                    return
                content, self._is_dirty = encode_state(self._settings, self._entries), False
            try:
                self._file.replace(content)
            except OSError as error:
                self._is_dirty = True
                self._problem = f"moments could not be written to {self._file.path}: {error}"
                logger.error("%s: %s", self.context.instance_name, self._problem)  # noqa: TRY400  (the text says all)
            else:
                self._problem = None
