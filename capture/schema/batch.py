"""A step's batch and its requests, as the planner sees them. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

Document = Mapping[str, object]
"""None, numbers, texts, bytes, and lists and dicts of these, by name. Its reader checks it."""


BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]
_INT64 = np.dtype(np.int64)

WIRE_VERSION = 1
"""Version of `RequestWire`, in which a request travels from the front end that resolved it: plain values and bytes."""


class StepOutcome(Protocol):
    """Which rows of a step count, with speculative decoding: known once the step's tokens were sampled."""

    def is_known(self) -> bool:
        """Whether `view` returns without waiting."""
        ...

    def view(self) -> BatchView:
        """Wait until the step was sampled, and return the rows that count.

        Each request has the batch rows from its ``starts`` on, without those of rejected drafts, and ``num_computed``
        is exact. A step that was never sampled has no rows of requests with drafts.
        """
        ...

    def num_rejected(self) -> Any:
        """Return how many of each request's rows, the last ones, do not count: a tensor int64 ``[num_requests]``.

        It is on the device, and this does not wait for it; None if the step was not sampled.
        """
        ...


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
        outcome: None if every row counts. With speculative decoding, rows of rejected drafts do not, and
            ``num_computed`` is an upper limit beyond the prompt: the drafts of steps in flight may be rejected.
    """

    req_ids: tuple[str, ...]
    starts: Int64Array
    num_scheduled: Int64Array
    num_computed: Int64Array
    outcome: StepOutcome | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # A longer array, such as vLLM's query_start_loc with its closing entry, would broadcast over one request.
        shape, starts, scheduled, computed = (len(self.req_ids),), self.starts, self.num_scheduled, self.num_computed
        has_shapes = starts.shape == scheduled.shape == computed.shape == shape
        if not (has_shapes and starts.dtype == scheduled.dtype == computed.dtype == _INT64):
            found = ", ".join(f"{each.dtype} {each.shape}" for each in (starts, scheduled, computed))
            raise AssertionError(f"starts, num_scheduled, num_computed: {found}, expected int64 {shape} each")

    def is_laid_out_as(self, other: BatchView) -> bool:
        """Whether another step has the same requests in the same batch rows; mostly they have the very arrays."""
        if self.req_ids is other.req_ids and self.starts is other.starts and self.num_scheduled is other.num_scheduled:
            return True
        # Bytes are compared several times as fast as arrays of this size.
        return (
            self.req_ids == other.req_ids
            and self.num_scheduled.tobytes() == other.num_scheduled.tobytes()
            and self.starts.tobytes() == other.starts.tobytes()
        )

    @property
    def num_tokens(self) -> int:
        """Batch rows of the step, padding excluded."""
        return int(self.num_scheduled.sum())


class _OptionalSpecWire(TypedDict, total=False):
    arguments: list[int]
    hook_positions: dict[str, object]
    columns: dict[str, list[list[int]]]


class SpecWire(_OptionalSpecWire):
    """A `CaptureSpec` as plain values.

    Attributes:
        sites: ``{hook: [layers]}``.
        positions: The selector, as `PositionSelector.to_wire` writes it.
        options: The consumer's own.
        arguments: Of its readouts; absent if there are none.
        hook_positions: Other selectors, by hook point; absent if there are none.
        columns: The columns of sites that are wanted, by the site's name; absent if all are.
    """

    sites: dict[str, list[int]]
    positions: object
    options: dict[str, Any]


class _StreamedWire(TypedDict, total=False):
    streamed: bool


class CaptureWire(_StreamedWire):
    """Specs of a request that captures, and the way back for its results.

    Attributes:
        id: The client's request id.
        n: Samples of the prompt.
        key: Random; results carry it.
        reply: Address of the front end's result hub; None if no caller waits.
        wait: Whether the client waits for its results.
        specs: By consumer instance.
        streamed: See `Origin.is_streamed`; absent for false.
    """

    id: str
    n: int
    key: str
    reply: str | None
    wait: bool
    specs: dict[str, SpecWire]


class RequestWire(TypedDict, total=False):
    """A request's fields, checked and resolved, as engine core and workers get them.

    Long bytes are `headgate.capture.engine.contracts.core_calls.Frame`.

    Attributes:
        v: `WIRE_VERSION`; always there.
        capture: If it captures.
        parts: Of every other part that it asks something of, by its section.
        offline: True if an `LLM` makes it; else absent.
        notes: True if a part's notes about its steps come with its outputs; else absent.
        fan_out: Only on the way of a sample to an engine core: the key of what the samples of its prompt share, and
            whether it is here. If not, nothing else is.
    """

    v: int
    offline: bool
    notes: bool
    fan_out: tuple[str, bool]
    capture: CaptureWire
    parts: dict[str, Mapping[str, Any]]


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
        notes: By part, what it noted of the request's rows: steering its trace, if the request wants one. In a note
            with ``positions``, each list of numbers or None of that length is by row.
        num_outdated: Rows at the beginning of the prompt that were computed before what acts on the model changed, and
            again after it: what was captured of them is not of the forward that answered.
    """

    num_prompt_tokens: int
    token_ids: Int64Array = field(repr=False)
    status: str
    notes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    num_outdated: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that a capture of everything holds: one for each token but the last sampled one.

        The whole prompt counts also when nothing was sampled (an abort), whether or not all of it was forwarded.
        """
        return max(len(self.token_ids) - 1, self.num_prompt_tokens)


class Begin(msgspec.Struct, tag="begin", array_like=True, frozen=True):
    """The begin of a captured request: in one process, between processes, and between hosts.

    A request's `Begin` comes before its rows, and its `End` after them.

    Attributes:
        req_id: Internal id. A request that is known under it is given up for this one.
        prompt_token_ids: int64 ``[num_prompt_tokens]``.
        capture: What consumers get of it; None if it captures nothing, and only takes the place of another.
        is_same_client: The results of a request that is given up go where this one's go: one result stands for both.
        readouts: By the name of a site, `ReadoutFacts` if its rows are outputs of one; only on the way to the driver.
        stage: Pipeline stage that sends it; likewise.
        num_stages: How many stages send it; likewise.
    """

    req_id: str
    prompt_token_ids: Int64Array
    capture: CaptureWire | None = None
    is_same_client: bool = False
    readouts: dict[str, tuple[int, str, int]] = {}
    stage: int = 0
    num_stages: int = 1


class End(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """The end of a captured request, after its last rows.

    Attributes:
        req_id: Internal id.
        final: How it ended; None if that is unknown, or if it failed on its way: its result, an error, says why.
        key: Of the request; only on the way to the driver.
        stage: Pipeline stage that sends it; likewise.
        dropped_rows: Rows that were lost on that way.
    """

    req_id: str
    final: FinalState | None
    key: str = ""
    stage: int = 0
    dropped_rows: int = 0


class MemoryWanted(msgspec.Struct, tag="memory", array_like=True, frozen=True):
    """The step thread is about to wait for staging memory: the holders of rows release them."""
