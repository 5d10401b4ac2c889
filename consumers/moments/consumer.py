"""The consumer that keeps moments of rows over all requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
)
from headgate.capture.schema.results import ReportContext
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.moments.entry import PHASES
from headgate.consumers.moments.held_rows import HOLD_ROWS, RunningRequest, float32_of
from headgate.consumers.moments.live_state import LiveState
from headgate.consumers.moments.params import parse_global, parse_params, parse_request
from headgate.consumers.moments.report import report


class MomentsConsumer(StreamingConsumer):
    """Keeps running moments by site, phase and tag, and writes them to `root`; `MomentsParams` lists the parameters.

    A request asks with ``{"hooks", "positions", "tag"}``. Its payload counts its rows over all sites: ``{"tag",
    "num_rows", "num_skipped", "num_past_end", "problem"}``. `num_past_end` are rows that were computed past the
    request's end, further than `HOLD_ROWS`, and are counted all the same; `problem` says why the state could not be
    written of late, and is None while it can. Rows of a request that fails are counted as far as they came.

    It runs in each worker that captures, and each worker owns one file of the root (`state_file`); the moments are all
    files together, so nothing counts twice under pipeline or data parallelism, with several API servers, or after a
    restart.

    Threads: the consumer's own adds rows; another writes the state now and then.

    Raises:
        ConfigError: If the root cannot be used, holds damaged files or moments that were made with other settings, or
            if the state could take more than `max_bytes`.
    """

    location = "worker"
    takes_tag = True
    global_spec_param = "hooks"
    linger_s = 0.25  # nobody looks at a row

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._params = parse_params(params)
        self._params.check_size(context.model)
        self._requests: dict[str, RunningRequest] = {}
        self._state = LiveState(
            self._params.folder,
            self._params.settings(context.model, context.instance_name),
            flush_s=self._params.flush_s,
            name=f"headgate-{context.instance_name}-flush",
        )

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
                    self._add_held(running, keep=HOLD_ROWS)
            for tag, found in prompt.items():
                self._state.add(tag, "prefill", block.sites, float32_of(block.rows)[:, np.concatenate(found)])

    def finish(self, finished: FinishedRequest) -> dict[str, Any] | None:
        running = self._requests.pop(finished.request.request_id)
        if not finished.request.spec.sites:
            return None  # all of its sites belong to other pipeline stages
        running.cut(finished.final.num_rows)
        self._add_held(running, keep=0)
        if not self._params.flush_s:
            self._state.flush()
        return {
            "tag": running.tag,
            "num_rows": running.num_rows,
            "num_skipped": running.num_skipped,
            "num_past_end": running.num_past_end,
            "problem": self._state.problem,
        }

    def abandon(self, request: RequestInfo) -> None:
        self._requests.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        self._state.close(timeout_s)
        self._requests.clear()

    def _skip(self, running: RunningRequest, sites: Sequence[Site], positions: Int64Array) -> None:
        """Count rows at the beginning of a request that are left out."""
        num_prompt = int(np.searchsorted(positions, running.num_prompt))
        running.num_skipped += len(positions) * len(sites)
        for phase, count in zip(PHASES, (num_prompt, len(positions) - num_prompt), strict=True):
            if count:
                self._state.skip(running.tag, phase, sites, count)

    def _add_held(self, running: RunningRequest, *, keep: int) -> None:
        """Count generated rows that were held back, but for the last `keep`."""
        for sites, rows in running.release(keep):
            self._state.add(running.tag, "decode", sites, rows)
