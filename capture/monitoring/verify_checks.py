"""Recordings and checks of ``headgate verify``: plain values, without vLLM or torch.

The hook ``headgate_checks`` of a part returns its `CheckPart`. It says which requests to serve, as scenes; one process
per engine serves them and records the answers; the part then judges the recordings.
So judging is pure: it never sees an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.sites import Site

STOCK, IDLE, SERVED, EAGER = "stock", "idle", "served", "eager"
"""Kinds of engines: vLLM alone; headgate as it would be served; the same with run counters; the same, not compiled."""

PLAIN, PLAIN_AGAIN, PLAIN_AT_THE_END = "plain", "plain again", "plain at the end"
"""Scenes of every engine but the eager one: the prompts, asking nothing of headgate. The last is `SERVED`'s alone."""

USAGE_STATUS = 64
"""Exit status of an engine's process if vLLM does not take the arguments; the reason is the last line of its log."""

LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 2.0**-5, "bfloat16": 2.0**-2}
"""Change that another order of rounding may make in logprobs, by dtype of the model.

Two steps of a logit from 16 to 32, or 1e-3 where the rounding of the sums before it is larger.
"""

Float32Rows = npt.NDArray[np.float32]


class AnswerRows(msgspec.Struct, frozen=True, kw_only=True):
    """The captured rows of one request.

    Attributes:
        status: ``ok``, or how the capture failed.
        error: Why, if it did.
        dropped: Rows that were lost.
        positions: Of each row.
        token_ids: The token whose forward gave the row.
        hidden_size: Values of a row, unless `widths` has another.
        widths: By site's name.
        values: By site's name: float32, little-endian, one row after the other.
    """

    status: str
    error: str | None = None
    dropped: int = 0
    positions: list[int] = []
    token_ids: list[int] = []
    hidden_size: int = 1
    widths: dict[str, int] = {}
    values: dict[str, bytes] = {}

    def at(self, site: str) -> Float32Rows:
        """``[num_rows, width]``, read-only."""
        return np.frombuffer(self.values[site], np.float32).reshape(-1, self.widths.get(site, self.hidden_size))


class ConsumerReading(msgspec.Struct, frozen=True):
    """The result of a consumer that the user configured.

    Attributes:
        consumer: Its entry point's name.
        status: ``ok`` if nothing is missing.
        error: The reason, if something is.
        payload: As an `LLM` returns it.
    """

    consumer: str
    status: str
    error: str | None
    payload: Any


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request.

    Attributes:
        label: The request's.
        prompt: Its token ids.
        tokens: What was generated, greedily.
        logprobs: For each generated token, the logprobs of the most probable ones by token id.
        rows: What was captured, if anything was asked for.
        readings: What other consumers found, by instance.
    """

    label: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[dict[int, float]]
    rows: AnswerRows | None = None
    readings: dict[str, ConsumerReading] = {}


class VerifyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An engine and where it ran.

    Attributes:
        architecture: Of the model.
        dtype: Of the model.
        num_layers: Decoder layers.
        hidden_size: Width of the stream.
        num_experts: Of a mixture of experts; 0 for a dense model.
        graph_mode: vLLM's ``cudagraph_mode``; ``NONE`` if steps are never replayed from graphs.
        device: Name of the hardware.
        num_workers: Processes that compute.
        versions: Of headgate, vLLM and torch.
        start_s: Seconds until it was ready.
        load_format: vLLM's ``load_format``; ``dummy`` if no weights were read.
        compiler: The switch for rewriting inductor's kernels, and the counts; empty without headgate.
    """

    architecture: str
    dtype: str
    num_layers: int
    hidden_size: int
    num_experts: int = 0
    graph_mode: str = "NONE"
    device: str = ""
    num_workers: int = 1
    versions: dict[str, str] = {}
    start_s: float = 0.0
    load_format: str = "auto"
    compiler: str = ""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one engine.

    Attributes:
        kind: Of the engine.
        facts: About it.
        scenes: The answers by scene, in the order of the requests.
        unchecked: `Scene.unchecked` of all scenes.
        run_counts: By scene, for each worker: how often each site ran, by part and site's name.
        replays: By scene, for each worker: CUDA graphs that were replayed.
        step_ms: By number of requests in flight: the median time of a decode step of each round, in milliseconds.
    """

    kind: str
    facts: VerifyFacts
    scenes: dict[str, list[RequestAnswer]] = {}
    unchecked: dict[str, str] = {}
    run_counts: dict[str, list[dict[str, dict[str, int]]]] = {}
    replays: dict[str, list[int]] = {}
    step_ms: dict[int, list[float]] = {}


Runs = Mapping[str, Sequence[Recording]]
"""The recordings by kind of engine, in the order of the runs; a kind without runs is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneRequest:
    """One request of a scene; greedy, and never ended by a stop token.

    Attributes:
        label: Says what the judge compares it with.
        prompt: Token ids.
        max_tokens: How many it generates.
        fields: Fields of `SamplingParams` to set.
        captures: Whether it captures every position at every site that is open for it.
    """

    label: str
    prompt: Sequence[int]
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    captures: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Requests that are served together, all there before the first step, on an empty prefix cache.

    Two scenes whose requests have the same lengths are batched alike, so their numbers compare bit for bit.

    Attributes:
        name: Of its answers in the recording.
        requests: What is served.
        unchecked: Checks that it should have been for, each with the reason why it is not.
    """

    name: str
    requests: Sequence[SceneRequest]
    unchecked: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """An engine that is ready, as parts see it.

    Attributes:
        kind: Of the engine.
        llm: vLLM's `LLM`, with the handles of parts such as ``llm.steering``.
        plain: The requests of the scene `PLAIN`.
        sites: Those open for capture.
        width: Returns the numbers of a row at a site of the model.
        earlier: What `SERVED` recorded, for `EAGER`.
        consumers: Those of the user that are checked.
    """

    kind: str
    llm: Any
    plain: Sequence[SceneRequest]
    sites: Sequence[Site]
    width: Callable[[Site], int]
    earlier: Recording | None = None
    consumers: Sequence[CaptureConsumerSpec] = ()


class Status(str, Enum):
    """How a check ended."""

    PASSED = "passed"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


class Verdict(msgspec.Struct, frozen=True):
    """The end of one check.

    Attributes:
        check: What was checked, as a statement that should hold.
        status: Whether it does.
        figure: What was found, with its number.
    """

    check: str
    status: Status
    figure: str


class CheckPart(Protocol):
    """The scenes and checks of one part of headgate.

    Attributes:
        consumers: Names of the consumers that it checks: the engine `SERVED` has those of them that the user
            configures.
    """

    @property
    def consumers(self) -> Sequence[str]: ...

    def section(self, given: Mapping[str, Any], *, counts: bool) -> Mapping[str, Any]:
        """The part's section of ``additional_config["headgate"]``.

        Args:
            given: The section that the user gave, if any.
            counts: Whether sites are to count how often they run.
        """
        ...

    def scenes(self, stage: Stage) -> Iterable[Scene]:
        """Make the scenes that the engines `SERVED` and `EAGER` serve."""
        ...

    def judge(self, runs: Runs) -> Iterable[Verdict]:
        """Every check of the part, of complete runs."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How answers of two scenes differ.

    Attributes:
        num_tokens: That were compared.
        num_other: Requests that got other tokens.
        largest: Largest difference of logprobs given the same tokens before; for tokens that differ, half of what the
            two tokens are apart, which is the least that the logprobs must have moved. 0 if all is equal bit for bit.
    """

    num_tokens: int
    num_other: int
    largest: float

    @property
    def is_none(self) -> bool:
        """Whether all is equal bit for bit."""
        return self.num_other == 0 and self.largest == 0


def difference(expected: Sequence[RequestAnswer], found: Sequence[RequestAnswer]) -> Difference:
    """Compare answers to requests with the same prompts.

    Raises:
        ValueError: If they are answers to other requests.
    """
    if [answer.prompt for answer in expected] != [answer.prompt for answer in found]:
        raise ValueError("cannot compare answers to different prompts")
    largest = max((_moved(*pair) for pair in zip(expected, found, strict=True)), default=0.0)
    others = sum(a.tokens != b.tokens for a, b in zip(expected, found, strict=True))
    return Difference(num_tokens=sum(len(answer.tokens) for answer in expected), num_other=others, largest=largest)


def _moved(expected: RequestAnswer, found: RequestAnswer) -> float:
    if len(expected.tokens) != len(found.tokens) or len(expected.logprobs) != len(found.logprobs):
        return math.inf
    largest = 0.0
    steps = zip(expected.tokens, found.tokens, expected.logprobs, found.logprobs, strict=True)
    for token, other, logprobs, others in steps:
        largest = max(largest, step_difference(logprobs, others))
        if token != other:
            apart = logprobs[token] - logprobs[other] if other in logprobs and token in logprobs else math.inf
            return max(largest, abs(apart) / 2)
    return largest


def step_difference(expected: Mapping[int, float], found: Mapping[int, float]) -> float:
    """Largest difference of the logprobs of one step; infinite if a value is nan on one side only.

    A token that only one side lists was at most as probable as the last one listed on the other.
    """
    if not expected or not found:
        return 0.0 if not expected and not found else math.inf
    floors = (min(expected.values()), min(found.values()))
    largest = 0.0
    for token in {*expected, *found}:
        a, b = expected.get(token, floors[0]), found.get(token, floors[1])
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        largest = max(largest, math.inf if math.isnan(a) or math.isnan(b) else abs(a - b))
    return largest


def equality(check: str, found: Difference, *, noise: float, rounding: float = 0.0) -> Verdict:
    """The verdict on answers that should be equal.

    Args:
        check: The statement.
        found: What they differ by.
        noise: What logprobs differ by when nothing changes; 0 where engines repeat themselves bit for bit.
        rounding: What logprobs may differ by, with a warning, if the two ran different compiled code. Other tokens are
            a failure all the same: that is what users see.
    """
    if found.is_none:
        return Verdict(check, Status.PASSED, f"{found.num_tokens} tokens and their logprobs equal, bit for bit")
    text = f"other tokens in {found.num_other} requests, logprobs differ by up to {found.largest:.2g}"
    if noise and found.largest <= 2 * noise:
        return Verdict(check, Status.PASSED, f"{text}; without any change by {noise:.2g}")
    if found.num_other == 0 and found.largest <= rounding:
        return Verdict(check, Status.WARNING, f"{text}; other rounding may change {rounding:.2g}")
    return Verdict(check, Status.FAILED, text)


def noise_of(recordings: Iterable[Recording]) -> float:
    """Return the difference of logprobs from run to run of engines of one kind, within an engine and between them."""
    runs = [scene for one in recordings for name in (PLAIN, PLAIN_AGAIN) if (scene := one.scenes.get(name))]
    return max((difference(runs[0], other).largest for other in runs[1:]), default=0.0)
