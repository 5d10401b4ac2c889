"""Capture in the process that owns requests: what they ask, what they receive, the consumers that live here."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from headgate.capture.engine.access.caller import current_client, owner_of_request
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.requests import call_context
from headgate.capture.engine.requests.call_context import HttpCall, current_call
from headgate.capture.engine.requests.capture_request import (
    CaptureRequestReader,
    add_messages,
    check_length,
    check_use,
    resolve,
)
from headgate.capture.engine.requests.chat_messages import ChatMessages
from headgate.capture.engine.requests.sampling_params import CAPTURE_MESSAGES, CaptureRequest
from headgate.capture.engine.vllm_types import Engine, RequestOutput, SamplingParams
from headgate.capture.links.driver import DriverHost, DriverStats
from headgate.capture.links.hub import HubStats, ResultHub
from headgate.capture.links.network import Listening
from headgate.capture.schema.config import CaptureConsumersConfig
from headgate.capture.schema.consumer import CaptureConsumer, ModelInfo, RequestLengths, by_consumer
from headgate.capture.schema.errors import RequestError, UnsupportedError
from headgate.capture.schema.limits import CaptureLimits, CaptureUse, use_of
from headgate.capture.schema.registry import load_readouts
from headgate.capture.schema.results import (
    CaptureResult,
    CaptureResults,
    KeptRequest,
    RowKeeper,
    join_key,
    with_messages,
)
from headgate.capture.schema.vocabulary import Vocabulary

logger = logging.getLogger("headgate")

LINGER_S = 10.0
"""Seconds for which a request that is over keeps its names, if its files may not have been written."""

FRONT_END = "_headgate_front_end"
"""Attribute of vLLM's `InputProcessor`, and of an `LLMEngine`'s client: its `FrontEnd`, or None without capture."""


class Claim:
    """Names that one request has for itself, as long as anything refers to this.

    Attributes:
        names: The names, each with the field that asks for it.
        call: Token of the HTTP call that it is of; None of any other request.
    """

    __slots__ = ("__weakref__", "call", "names")

    def __init__(self, names: Mapping[str, str], call: str | None) -> None:
        self.names = names
        self.call = call


class Claims:
    """Names that the requests of this process have for themselves. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
        self._lingering: deque[tuple[float, Claim]] = deque()

    def claim(self, names: Mapping[str, str], call: str | None) -> Claim | None:
        """Give a request its names; None if it needs none. They are free again when the claim is gone.

        Raises:
            RequestError: If another request has one of them.
        """
        if not names:
            return None
        with self._lock:
            while self._lingering and self._lingering[0][0] <= self._clock():
                self._lingering.popleft()
            for name, field in names.items():
                if (other := self._held.get(name)) is not None:
                    raise RequestError(f"{field}.request_id", _held_by(other, name, call))
            claim = Claim(names, call)
            self._held.update(dict.fromkeys(names, claim))
            return claim

    def linger(self, claim: object, results: CaptureResults) -> None:
        """Hold a finished request's names on if its results are not there yet: its files are still being written."""
        if isinstance(claim, Claim) and any(result.status == "pending" for result in results.merged.values()):
            with self._lock:
                self._lingering.append((self._clock() + LINGER_S, claim))


def _held_by(other: Claim, name: str, call: str | None) -> str:
    if call is not None and other.call == call:
        return (
            f"all prompts of this call would write {name}: send each prompt in a call of its own with a request_id of "
            "its own, or leave request_id out"
        )
    return f"{name} is being written for another request; give another request_id"


class FrontEnd:
    """One engine's front end, as far as capture is concerned.

    The consumers that are located here, and with them the hub's socket and thread, are opened by `open`; where there
    are none, the hub is by the first request that captures. Any thread; the waits are the caller's own.

    Args:
        config: The operator's configuration.
        model: The model being served.
        consumers: The class of each configured consumer, by instance name.
        num_stages: Pipeline stages of the engine.
        open_drivers: Opens the consumers that are located here, for a hub.
        num_front_ends: API processes of the server; each has consumers of its own.
        listening: Where workers on other hosts send results; None if there are none.
        vocabulary: The model's tokens.
    """

    def __init__(
        self,
        config: CaptureConsumersConfig,
        model: ModelInfo,
        consumers: Mapping[str, type[CaptureConsumer]],
        *,
        num_stages: int,
        open_drivers: Callable[[ResultHub], DriverHost],
        num_front_ends: int = 1,
        listening: Listening | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.consumers = consumers
        self._limits = CaptureLimits(max_rows=config.max_request_rows, max_bytes=config.max_request_bytes)
        classes = [consumers[spec.instance] for spec in config.consumers]
        readouts = by_consumer(each for each, _ in load_readouts(config, classes, model, model.sites))
        self._readouts = {config.consumers[bit].instance: facts for bit, facts in readouts.items()}
        self.capture_reader = CaptureRequestReader(config, model, consumers, num_front_ends, self._readouts, vocabulary)
        self._drivers = frozenset(name for name, consumer in consumers.items() if consumer.location == "driver")
        self._partial = {name: consumer.join_parts for name, consumer in consumers.items() if consumer.sends_parts}
        self._answered = frozenset(name for name, consumer in consumers.items() if consumer.is_awaited)
        self._linger_s = {
            name: consumer.linger_s if config.linger_s is None else config.linger_s
            for name, consumer in consumers.items()
        }
        self._claims = Claims()
        self._awaited: dict[str, float] = {}
        """By the keys of the requests whose results are collected: seconds that their rows may wait in the worker."""
        self._num_stages = num_stages
        self._listening = listening
        self._num_front_ends = num_front_ends
        self._open_drivers = open_drivers
        self._lock = threading.Lock()
        self._hub: ResultHub | None = None
        self._is_closed = False
        self._drivers_here: DriverHost | None = None

    def read(self, params: SamplingParams, request_id: str, *, is_offline: bool) -> CaptureRequest | None:
        """Read a capture request, with the address that its answers go to; see `CaptureRequestReader.read`.

        Online, a request that did not ask for anything must not wait for the global consumers that look at it: it is
        answered only if one of them is located here, and gets its rows that way.
        """
        ask = self.capture_reader.read(params, request_id)
        if ask is None or not (is_offline or ask.is_explicit or ask.wait or self._drivers & set(ask.specs)):
            return ask
        call = current_call()
        key = ask.key if call is None else join_key(call.token, ask.key)
        claim = self._claims.claim(ask.own_names, None if call is None else call.token)
        has_parts = not self._partial.keys().isdisjoint(ask.specs)
        # Streams of events, whose calls have turns, have no chunks that take anything.
        is_streamed = has_parts and call is not None and not call.has_turns and params.output_kind.name == "DELTA"
        return replace(ask, reply=self.hub.address, key=key, claim=claim, is_streamed=is_streamed)

    def resolve(
        self,
        ask: CaptureRequest,
        num_prompt: int,
        params: SamplingParams,
        messages: ChatMessages | None,
        call: HttpCall | None = None,
    ) -> CaptureRequest:
        """Make every position absolute, and check how much that may come to; see `requests.resolve`.

        Args:
            ask: What is asked. One that was resolved and checked is returned as it is.
            num_prompt: Tokens of the prompt.
            params: The request's; while ``max_tokens`` is not known, nothing is limited.
            messages: See `requests.resolve`. Where results are to name them, they are put into ``ask.messages``.
            call: The HTTP call that the prompt counts for; None if it is of none, or was counted before.

        Raises:
            RequestError: If a selector can select nothing of this prompt, if it could be too much, or if the chat
                template does not show where a message lies.
        """
        if ask.is_resolved:
            return ask
        resolved = resolve(ask, num_prompt, messages)
        if ask.messages is not None and not ask.messages:
            if messages is None:
                raise RequestError(CAPTURE_MESSAGES, "needs a chat request (LLM.chat or /v1/chat/completions)")
            ask.messages.extend(messages.spans(CAPTURE_MESSAGES))
        if ask.messages:
            resolved = add_messages(resolved, self.consumers)
        check_length(params.max_tokens)
        if params.max_tokens is None:
            return resolved
        lengths = RequestLengths(num_prompt=num_prompt, max_tokens=params.max_tokens, num_samples=params.n)
        self.capture_reader.check_lengths(resolved, lengths)
        use = self.use_of(resolved, num_prompt, params.max_tokens, params.n)
        if call is not None:
            use = call.use = call.use + use
        self._limits.check(use)
        check_use(use, self._answered)
        return replace(resolved, is_resolved=True)

    def use_of(self, ask: CaptureRequest, num_prompt: int, max_tokens: int, num_samples: int) -> CaptureUse:
        """Count what the client asks of a prompt; see `headgate.capture.schema.limits.use_of`."""
        named = {instance: spec for instance, spec in ask.specs.items() if instance in ask.named}
        return use_of(
            named,
            num_prompt=num_prompt,
            max_tokens=max_tokens,
            num_samples=num_samples,
            model=self.model,
            readouts=self._readouts,
        )

    def streamed(self, ask: CaptureRequest) -> Callable[[int, int], Mapping[str, object]] | None:
        """Return what takes new parts of a running request's results, by sample and rows; None if nothing streams."""
        if not ask.is_streamed:
            return None
        joining = {name: join for name, join in self._partial.items() if name in ask.specs}

        def take_new(sample_index: int, num_rows: int) -> Mapping[str, object]:
            new = {name: self.hub.take_parts(ask.key, name, sample_index, num_rows) for name in joining}
            return {
                name: {"payload": parts[0] if len(parts) == 1 else joining[name](parts)}
                for name, parts in new.items()
                if parts
            }

        return take_new

    def find_kept(self, name: str, sample_index: int, field: str) -> KeptRequest:
        """Find the rows that a request of the client at hand has kept; see `FindKept`.

        Raises:
            RequestError: Naming ``request`` or ``sample`` below `field`; also if nothing is kept here.
            fastapi.HTTPException: With status 403, if an HTTP client may not capture.
        """
        client = current_client()
        if client is not None:
            client.require_role(CAPTURE)
        drivers = self._drivers_here.consumers.values() if self._drivers_here is not None else ()
        keepers = [consumer for consumer in drivers if isinstance(consumer, RowKeeper)]
        if not keepers:
            raise RequestError(f"{field}.request", "this server keeps no rows: start it with the consumer 'memory'")
        if self._num_front_ends > 1:
            raise RequestError(
                f"{field}.request",
                f"this server has {self._num_front_ends} API processes, and each would know the rows of its own "
                "requests alone; start it with --api-server-count 1",
            )
        owner = owner_of_request(f"{field}.request")
        for keeper in keepers[:-1]:
            with contextlib.suppress(RequestError):
                return keeper.find_kept(owner, name, sample_index, field)
        return keepers[-1].find_kept(owner, name, sample_index, field)

    @property
    def hub(self) -> ResultHub:
        """Collects results; the first use opens the consumers that are located here.

        Raises:
            ConfigError: If one of them cannot be opened.
            UnsupportedError: If the hub cannot listen, or if nothing was opened before it was closed.
        """
        with self._lock:
            if self._hub is None:
                if self._is_closed:
                    raise UnsupportedError("capture: this engine was shut down; start another")
                hub = ResultHub(listening=self._listening)
                if self._drivers:
                    self._drivers_here = self._open_drivers(hub)
                self._hub = hub
            return self._hub

    def open(self) -> None:
        """Open the consumers that are located here, and the ports for other hosts, before requests come.

        Raises:
            ConfigError: If one of them cannot be opened.
            UnsupportedError: If the hub cannot listen.
        """
        if self._drivers or self._listening is not None:
            _ = self.hub

    @property
    def problem(self) -> str | None:
        """The reason why requests of this process get no results any more; None while they do."""
        return None if self._hub is None else self._hub.stats().problem

    def stats(self) -> tuple[HubStats, DriverStats]:
        """Counters of the hub and of the consumers that are located here; zeros before they were opened."""
        hub, drivers = self._hub, self._drivers_here
        return HubStats() if hub is None else hub.stats(), DriverStats() if drivers is None else drivers.stats()

    def expect(self, ask: CaptureRequest, num_samples: int) -> None:
        """Collect results from now on, if the request is answered."""
        if ask.reply is not None:
            self._awaited[ask.key] = min((self._linger_s[instance] for instance in ask.specs), default=0.0)
            self.hub.expect(ask.key, instances=tuple(ask.specs), num_samples=num_samples, num_stages=self._num_stages)

    def forget(self, ask: CaptureRequest) -> None:
        """The caller does not wait for `ask` any more; idempotent."""
        self._awaited.pop(ask.key, None)
        if self._hub is not None:
            self._hub.close(ask.key)

    def wait(self, ask: CaptureRequest, *, deadline: float) -> CaptureResults:
        """Results of a finished request, waited for until `deadline` (monotonic clock)."""
        try:
            results = self.hub.wait(ask.key, max(deadline - time.monotonic(), 0))
            self._claims.linger(ask.claim, results)
            return with_messages(results, ask.messages)
        finally:
            self.forget(ask)

    def patience_s(self) -> float:
        """Seconds that a finished request which did not ask to wait is worth waiting for.

        While others run, workers leave its last rows where they are for as long as the consumers of all of them allow
        (`BatchingWindow`). Where that is longer than a client would be kept waiting, the wait would be in vain.
        """
        awaited = list(self._awaited.values())
        is_late = len(awaited) > 1 and min(awaited) > self.config.result_wait_s
        return 0.0 if is_late else self.config.result_wait_s

    async def wait_async(self, ask: CaptureRequest, *, is_aborted: bool) -> CaptureResults:
        """Results of a finished request, waited for as long as it asked for.

        An aborted request may never have reached a worker that could answer, so it does not wait long.
        """
        is_patient = ask.wait and not is_aborted
        timeout_s = self.config.result_timeout_s if is_patient else self.patience_s()
        try:
            results = await self.hub.wait_async(ask.key, timeout_s)
            self._claims.linger(ask.claim, results)
            return with_messages(results, ask.messages)
        finally:
            self.forget(ask)

    def close(self) -> None:
        """Close the hub and the consumers that are located here, for good; idempotent. Ends the waits for results."""
        with self._lock:
            hub, self._is_closed = self._hub, True
        if hub is not None and not hub.shutdown(self.config.close_timeout_s):
            logger.warning(
                "capture: consumers in this process did not close within %.0f s (capture.close_timeout_s)",
                self.config.close_timeout_s,
            )


NO_RESULTS: Mapping[str, CaptureResult] = MappingProxyType({})
"""Results of an output whose request captured nothing."""


def add_results(*outputs: Any) -> None:
    """Give every object of vLLM's classes of outputs results, empty until `attach_results` puts some on it."""
    for kind in outputs:
        if getattr(kind, "capture_results", NO_RESULTS) is not NO_RESULTS:
            raise TypeError(f"vLLM's {kind.__name__} has an attribute 'capture_results' of its own")
        kind.capture_results = NO_RESULTS


def attach_results(output: RequestOutput, results: CaptureResults, states: str | None = None) -> None:
    """Put results on a `RequestOutput`, and each sample's on its `CompletionOutput`.

    Args:
        output: Of a finished request.
        results: Of the same request.
        states: The consumer that answers ``return_hidden_states``, if there is one.
    """
    output.capture_results = results.merged
    for completion in output.outputs:
        found = completion.capture_results = results.per_sample[completion.index]
        if states in found:
            setattr(completion, call_context.ATTRIBUTE, call_context.tensor_of(found[states]))


def front_end_of(engine: Engine) -> FrontEnd | None:
    """The front end of an `LLMEngine` or `AsyncLLM`; None when capture is not configured."""
    return vars(engine.input_processor).get(FRONT_END)
