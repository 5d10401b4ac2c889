"""A step's batch and its requests, as the planner sees them. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.request_wire import RequestWire

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
_INT64 = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class BatchView:
    """One step's batch, laid out as the runner really laid it out. A snapshot: nothing in it changes.

    Request i occupies the batch rows ``starts[i] : starts[i] + num_scheduled[i]`` of the flat token axis and
    computes its positions ``num_computed[i] : num_computed[i] + num_scheduled[i]``.

    Attributes:
        req_ids: Internal request ids, one per request of the step.
        starts: First batch row of each request, int64 ``[num_requests]``.
        num_scheduled: Tokens of each request in this step, int64 ``[num_requests]``.
        num_computed: Tokens of each request computed before this step, int64 ``[num_requests]``.
    """

    req_ids: tuple[str, ...]
    starts: Int64Array
    num_scheduled: Int64Array
    num_computed: Int64Array

    def __post_init__(self) -> None:
        shape = (len(self.req_ids),)
        arrays = (self.starts, self.num_scheduled, self.num_computed)
        for name, array in zip(("starts", "num_scheduled", "num_computed"), arrays, strict=True):
            # A longer array, such as vLLM's query_start_loc with its closing entry, would broadcast over one request.
            if array.shape != shape or array.dtype != _INT64:
                raise AssertionError(f"{name}: {array.dtype} {array.shape}, expected int64 {shape}")

    @property
    def num_tokens(self) -> int:
        """Batch rows of the step, padding excluded."""
        return int(self.num_scheduled.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequest:
    """A request the worker sees for the first time, or again with new content under the same id.

    Attributes:
        req_id: Internal id: unique among running requests.
        prompt_token_ids: ``num_prompt_tokens`` integers, a copy of the engine's.
        wire: The dict that the front end wrote for it; None if the request asks for nothing.
    """

    req_id: str
    prompt_token_ids: Sequence[int] | Int64Array
    wire: RequestWire | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; positions below it are prefill."""
        return len(self.prompt_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalState:
    """How a request ended, as the scheduler knows it.

    Attributes:
        num_prompt_tokens: Length of the prompt.
        token_ids: All tokens, prompt and output, int64 ``[num_tokens]``. The last output token was sampled but
            never forwarded, so valid rows of the output have positions below ``num_tokens - 1``.
        status: ``stop``, ``length``, ``abort``, ``error`` ...: the finish reason.
    """

    num_prompt_tokens: int
    token_ids: Int64Array = field(repr=False)
    status: str

    @property
    def num_rows(self) -> int:
        """Rows that a capture of everything holds: one for each token but the last sampled one.

        The whole prompt counts also when nothing was sampled (an abort), whether or not all of it was forwarded.
        """
        return max(len(self.token_ids) - 1, self.num_prompt_tokens)
