"""A part's half in an engine core, `CorePart`, and the services that it is given there, `CoreServices`.

The hook ``headgate_core`` of a part returns its `CorePart`. Everything here is our own types; `core` translates from
vLLM. An engine core has two threads that a part meets: the input thread takes requests in and hashes their prompts,
and the engine thread does everything else, between two steps unless it is said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypedDict

from headgate.capture.schema.batch import Document, Int64Array
from headgate.capture.schema.consumer import ModelInfo, Submitted


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreFacts:
    """One engine core, after its workers loaded the model.

    Attributes:
        model: The whole model, as configured.
        engine: Its index among the engine cores of a server with data parallelism.
        num_stages: Pipeline stages that the model lies on.
        num_engines: Engine cores of the server with data parallelism.
        has_drafts: Whether it verifies drafts of speculative decoding: steps have rows that do not count.
        has_own_process: Whether it has a process of its own, beside that of its front end.
    """

    model: ModelInfo
    engine: int = 0
    num_stages: int = 1
    num_engines: int = 1
    has_drafts: bool = False
    has_own_process: bool = False


class BlockKeys(Protocol):
    """Whatever a request's KV blocks depend on beside their tokens. Immutable; equal ones make equal keys.

    Attributes:
        skips_reading: Whether every row is to be computed: no block is read from the cache.
    """

    @property
    def skips_reading(self) -> bool: ...

    def of_block(self, start: int, end: int, num_prompt: int) -> tuple[tuple[str, str], ...]:
        """Return pairs of a tag and a name that enter the hash of the block of tokens ``start : end``.

        Without any, the block has the hash that stock vLLM gives it.

        Args:
            start: Position of the block's first token.
            end: Position after its last.
            num_prompt: Length of the request's prompt.
        """
        ...


class RequestProgress(NamedTuple):
    """A request that runs, or waits.

    Attributes:
        position: The first one, after the prompt, whose row no launched step computes for the first time.
        token_ids: Its tokens so far, the prompt's first; a view that grows with the request.
    """

    position: int
    token_ids: Sequence[int]


class Actions(Protocol):
    """Actions of capture consumers, as they come."""

    @property
    def num_waiting(self) -> int:
        """The actions that have come and were not taken."""
        ...

    def take(self) -> Sequence[Submitted]:
        """Return the actions that have come since, in their order."""
        ...


class CoreServices(Protocol):
    """Services of an engine core to its part. Engine thread only.

    Attributes:
        actions: Of capture consumers, if the part takes them.
    """

    actions: Actions | None

    def call_workers(self, method: str, args: Document) -> list[object]:
        """Call ``headgate_call(part, method, args)`` in every worker, after the steps that were launched.

        Args:
            method: Of the same part in the worker.
            args: Plain values and bytes.

        Returns:
            The workers' answers.

        Raises:
            Exception: What a worker raised, or the executor in its name; other workers may have done it.
        """
        ...

    def prepare_change(self, field: str) -> None:
        """Take the tokens of the steps that were launched, before what acts on requests that run is changed.

        So no step is in flight when `restart_running` or `rekey_running` follow, and none of its tokens is lost.

        Args:
            field: The field that the client is given.

        Raises:
            Exception: What a step raised; the engine ends.
        """
        ...

    def restart_running(self) -> None:
        """Ask for the block keys of every request anew, and compute its KV anew under them.

        Requests keep the tokens they have generated; blocks that are cached under the new keys are used.
        `prepare_change` comes before.
        """
        ...

    def rekey_running(self) -> dict[str, int]:
        """Ask for the block keys of every request anew, for the blocks that later steps complete.

        Nothing is computed anew. `prepare_change` comes before.

        Where keys change while a request runs, its blocks from there on are found by no other request.

        Returns:
            The first position of each request whose row was not computed yet. Of a preempted one, that of the row of
            its last token: rows before it are computed again, but their tokens were sampled already.
        """
        ...

    def rekey(self, req_id: str, first: int) -> None:
        """Ask for the block keys of one request anew, for the blocks that end after a position.

        Args:
            req_id: Of a request that entered the scheduler, or waits.
            first: At least its `RequestProgress.position`.
        """
        ...

    def progress(self, req_id: str) -> RequestProgress | None:
        """Return how far a request is; None if it has ended, or is not known."""
        ...

    def positions(self, req_ids: tuple[str, ...]) -> Int64Array:
        """Return the position of the `progress` of each of some requests, int64 ``[n]``; -1 where there is none.

        Fast for the very tuple of the last call.
        """
        ...

    def fail(self, reason: str) -> None:
        """Let the engine end instead of taking another step: its workers no longer agree with the part."""
        ...


class CoreRefusal(TypedDict):
    """A `RequestError` or `ForbiddenError` of a part, written down.

    Attributes:
        field: Of the request or call; a `ForbiddenError` may have none.
        message: Without the field.
        is_forbidden: Which of both it is.
    """

    field: str | None
    message: str
    is_forbidden: bool


class CoreAnswer(TypedDict, total=False):
    """An engine core's answer to a call of a part's method: one of both.

    Attributes:
        ok: What the method returned: plain values and bytes.
        error: Its refusal.
    """

    ok: object
    error: CoreRefusal


class Decided(NamedTuple):
    """Decisions of a part about requests, after a step.

    Attributes:
        endings: Requests that end now, each with the ``stop_reason`` that its client receives.
        notes: As `CorePart.take_readings` returns them.
    """

    endings: Mapping[str, str]
    notes: Mapping[str, object]


class CorePart(Protocol):
    """A part in one engine core. On the engine thread unless said otherwise.

    Its half in the workers may read steps (`worker_hooks.WorkerHooks.headgate_step_readings`); it takes what they read,
    decides from that what later steps do, and describes to capture consumers how the rows of a request came about.
    """

    def accept(self, req_id: str, wire: Document | None, num_prompt: int) -> Document | None:
        """Take a request in. Input thread; `forget` or `release` follow exactly if this returns.

        Args:
            req_id: Of the engine. A further chunk of a streaming-input session has the id of its session.
            wire: The part's section of the `RequestWire`; None if the front end wrote none.
            num_prompt: Tokens of the prompt.

        Returns:
            The section that the workers get in place of `wire`.

        Raises:
            RequestError: If it cannot be served.
        """
        ...

    def block_keys(self, req_id: str) -> BlockKeys | None:
        """Return the block keys of an accepted request, as of now; None if its blocks are stock's. Any thread."""
        ...

    def forget(self, req_id: str) -> None:
        """Drop an accepted request that never reaches the scheduler, if it is known. Any thread."""
        ...

    def offer(self, req_id: str, *, priority: int, is_session: bool, is_offline: bool) -> bool:
        """Say whether a request enters the scheduler now; if not, it waits until `admit` names it.

        Args:
            req_id: Of a request that was accepted.
            priority: Lower values go first; 0 for all unless the scheduler goes by priorities.
            is_session: It is a streaming-input session: its prompt grows.
            is_offline: An `LLM` made it: a waiting request waits for requests of the same program.

        Raises:
            RequestError: If it can never be served; `release` follows.
            OverloadedError: If too many wait already; `release` follows.
        """
        ...

    def acts_on(self, req_id: str) -> bool:
        """Whether the part does anything to a request; a streaming-input session is ended as soon as it does."""
        ...

    def overdue(self) -> dict[str, str]:
        """Return requests that have waited too long, or wait in vain, each with the reason; `withdraw` follows."""
        ...

    def release(self, req_id: str) -> None:
        """Release whatever a request holds, if it is known: it was freed or refused. Also in the middle of a step."""
        ...

    def withdraw(self, req_ids: Collection[str] | None) -> list[str]:
        """Stop those of `req_ids` (None: all) that wait; return them in order. `release` follows for each."""
        ...

    def admit(self) -> list[str]:
        """Return the requests that need wait no longer, in order: they enter the scheduler. Also within a step."""
        ...

    def call(self, method: str, args: Document) -> object:
        """Serve a call of the front end. Plain values and bytes go in and come out.

        Raises:
            RequestError: If it cannot be done; nothing has changed.
        """
        ...

    def take_readings(
        self, readings: Document, discarded: Collection[str], ends: Mapping[str, int] | None = None
    ) -> Mapping[str, object]:
        """Take what one step read. Engine thread, in the order of the steps.

        That is before the step's tokens are looked at; where drafts are verified, after that, but before the `release`
        of requests that end with them.

        Args:
            readings: The part's own document of that step, as the worker collected it.
            discarded: Requests of the step for which it does not count: after it was launched they ended, or their
                prompts began again. Rows that are computed again, after a preemption or a change of global vectors,
                come a second time.
            ends: Where drafts are verified, the position of each request's last token: rows from there on are of
                drafts after a token with which the request ended, and count no more.

        Returns:
            A note for each request that the front end is to be sent something of: plain values and bytes, by id. They
            come with the request's next output, and reach its `request_part.PartRequestReader`; notes of requests whose
            `request_part.PartRequest` does not want them are dropped.
        """
        ...

    def begin_again(self, req_id: str) -> object | None:
        """Forget what was read of the rows of a request so far: its prompt begins again, under something else.

        No token was sampled after those rows. Those of steps in flight come with the request among ``discarded``.

        Returns:
            A note as those of `take_readings`; None if nothing was read.
        """
        return None

    def describe(self, req_id: str, num_prompt: int) -> None:
        """Follow a request that captures, after `accept`, whether or not it asks for notes. Input thread."""

    def description(self, req_id: str) -> Callable[[int], Document] | None:
        """Return what is to be reported of a request that is followed and ends now; None if it is not followed.

        The function is called when all readings were taken. It is given how many tokens were kept, prompt and output;
        the front end may still have to say that. It returns plain values, none if nothing was read or decided; a list
        in them whose length is that of their ``positions``, and which has numbers or None, is by row.
        """
        return None

    def decide(self) -> Decided | None:
        """Decide. Engine thread, once after each step, when its tokens were taken. None reports nothing."""
        return None

    def orders(self, scheduled: Mapping[str, int]) -> Document | None:
        """Return what the workers are to follow from a step on that was just scheduled; None if nothing.

        Args:
            scheduled: The requests of the step, with the number of rows of each. What is for others is kept for later.

        Returns:
            Plain values, bytes and numpy arrays that are not written to after that, for
            `worker_hooks.WorkerHooks.headgate_ordered` of the same part in every worker.
        """
        return None
