"""Capture requests: read, checked and resolved in the front end; `sampling_params` says how they travel."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import msgspec

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.engine.access.caller import current_caller, owner_of_request
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.requests import call_context
from headgate.capture.engine.requests.call_context import current_call
from headgate.capture.engine.requests.chat_messages import ChatMessages
from headgate.capture.engine.requests.sampling_params import (
    CAPTURE_FIELDS,
    CAPTURE_MESSAGES,
    CAPTURE_WAIT,
    RETURN_HIDDEN_STATES,
    CaptureRequest,
    read_field,
    read_fields,
)
from headgate.capture.engine.vllm_types import SamplingParams
from headgate.capture.schema.config import HIDDEN_STATES, CaptureConsumersConfig
from headgate.capture.schema.consumer import CaptureConsumer, ModelInfo, ReadoutFacts, RequestLengths, SpecContext
from headgate.capture.schema.errors import ConsumerError, ForbiddenError, RequestError, shown
from headgate.capture.schema.limits import CaptureLimits, CaptureUse
from headgate.capture.schema.positions import Message, PositionSelector, Several, parts_of
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec, Memo
from headgate.capture.schema.vocabulary import Vocabulary


def capturing_key() -> AccessKey | None:
    """Return the key that lets the client at hand capture; None if it needs none, and where no client is."""
    caller = current_caller()
    return None if caller is None else caller.key_with(CAPTURE)


def check_consumer(instance: str, field: str) -> None:
    """Refuse a consumer that the client's key does not allow.

    Raises:
        ForbiddenError: For `field`.
    """
    key = capturing_key()
    if key is not None and not key.allows_consumer(instance):
        known = ", ".join(key.consumers or ()) or "none"
        raise ForbiddenError(f"the key {key.name!r} may not use this consumer; it may use {known}", field)


def with_tag(consumer: type[CaptureConsumer], wanted: object) -> object:
    """Add the tag of the client's key to a spec, as the client wrote it, that names none."""
    key = capturing_key()
    if key is None or key.default_tag is None or not consumer.takes_tag or not isinstance(wanted, Mapping):
        return wanted
    return wanted if "tag" in wanted else {**wanted, "tag": key.default_tag}


def check_spec(consumer: type[CaptureConsumer], spec: CaptureSpec, field: str) -> None:
    """Refuse sites, and a tag, that the client's key does not allow.

    Raises:
        ForbiddenError: Naming the field.
    """
    key = capturing_key()
    if key is None:
        return
    key.check_sites(spec.sites, field, spec.site_fields)
    tag = str(spec.options.get("tag"))
    if consumer.takes_tag and not key.allows_tag(tag):
        known = ", ".join(key.tags or ()) or "none"
        message = f"the key {key.name!r} may not write under the tag {tag!r}, but under {known}"
        raise ForbiddenError(message, f"{field}.tag")


def check_use(use: CaptureUse, answered: Collection[str]) -> None:
    """Refuse a call that could capture more than the client's key allows at once.

    Args:
        use: Of the call so far.
        answered: Consumers whose rows are part of the answer.

    Raises:
        RequestError: Naming the consumer.
    """
    key = capturing_key()
    if key is None:
        return
    limits = key.limits
    CaptureLimits(max_rows=limits.max_request_rows, max_bytes=limits.max_request_bytes).check(use)
    if limits.max_inline_bytes is not None:
        inline = {instance: count for instance, count in use.num_bytes.items() if instance in answered}
        CaptureLimits(max_bytes=limits.max_inline_bytes).check(CaptureUse(num_bytes=inline))


def check_length(max_tokens: int | None) -> None:
    """Refuse a request whose length is not known, and so not what it could capture, if its key has limits.

    Raises:
        RequestError: If it is so.
    """
    key = capturing_key()
    if key is not None and max_tokens is None and key.limits.are_set:
        raise RequestError("max_tokens", f"the key {key.name!r} has limits: say how much may be generated")


NO_CAPTURE = "this engine was started without capture."
HOW_TO_CAPTURE = (
    "Start it with --capture-consumers NAME:key=val, with headgate.capture.LLM(..., capture_consumers=[...]), or with "
    "additional_config={'headgate': {'capture': {'consumers': [...]}}}"
)
HOW_HIDDEN_STATES = (
    "Start it with --enable-return-hidden-states, or with the consumer 'hidden_states' among capture's consumers"
)


class CaptureRequestReader:
    """Checks what requests ask for, against the configured consumers. Any thread.

    Args:
        config: The operator's configuration.
        model: The model being served.
        consumers: The class of each configured consumer, by instance name.
        num_front_ends: API processes of the server.
        readouts: Of each consumer that has any, by site.
        vocabulary: The model's tokens.
    """

    def __init__(
        self,
        config: CaptureConsumersConfig,
        model: ModelInfo,
        consumers: Mapping[str, type[CaptureConsumer]],
        num_front_ends: int = 1,
        readouts: Mapping[str, Mapping[Site, ReadoutFacts]] | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._readouts = readouts or {}
        self._num_front_ends = num_front_ends
        self._consumers = consumers
        self._params = {spec.instance: spec.params for spec in config.consumers}
        self._lasting = Memo()
        self._unasked = [name for name, consumer in consumers.items() if _is_global(consumer, self._params[name])]
        self.hidden_states = next((spec.instance for spec in config.consumers if spec.name == HIDDEN_STATES), None)

    @property
    def has_unasked(self) -> bool:
        """Whether a consumer may capture of requests that do not ask."""
        return bool(self._unasked)

    def read(self, params: SamplingParams, request_id: str) -> CaptureRequest | None:
        """Check the fields of a `SamplingParams`; None if nothing is to be captured.

        Raises:
            RequestError: Naming the field that is wrong.
            ConsumerError: If a consumer's own check failed.
        """
        raw = read_field(params, CAPTURE)
        wait = read_field(params, CAPTURE_WAIT)
        if wait is not None and not isinstance(wait, bool):
            raise RequestError(CAPTURE_WAIT, f"expected true or false, got {shown(wait)}")
        specs = {} if raw is None else self._client_specs(raw, request_id)
        named = frozenset(specs)
        wants_messages = _wants_messages(params, named)
        if call_context.read_form(read_field(params, RETURN_HIDDEN_STATES)) is not None:
            specs[self._hidden_states()] = call_context.SPEC
        is_explicit = bool(specs)
        if wait is None:
            wait = any(self._consumers[instance].awaits(spec) for instance, spec in specs.items())
        for instance in self._unasked:
            if instance not in specs and (spec := self._global_spec(instance, request_id)) is not None:
                _check_arguments(instance, spec, self._readouts.get(instance, {}))
                specs[instance] = spec
        if not specs:
            return None
        key = secrets.token_hex(16)
        return CaptureRequest(
            own_names=self._own_names(specs, named, request_id, getattr(params, "n", None) or 1),
            specs=specs,
            wait=bool(wait),
            is_explicit=is_explicit,
            named=named,
            messages=[] if wants_messages else None,
            key=key,
        )

    def check_lengths(self, ask: CaptureRequest, lengths: RequestLengths) -> None:
        """Let the consumers that a request names check it again; its positions are resolved.

        Raises:
            RequestError: Naming the field.
        """
        for instance in ask.named:
            self._consumers[instance].check_lengths(ask.specs[instance], self._context(instance, "", None), lengths)

    def _own_names(
        self, specs: Mapping[str, CaptureSpec], named: frozenset[str], request_id: str, num_samples: int
    ) -> dict[str, str]:
        call = current_call()
        if call is not None and call.has_turns and call.slots:
            return {}  # a later turn: the first one has the names, and the client an answer
        found: dict[str, str] = {}
        for instance in named:
            context = self._context(instance, request_id, owner_of_request(f"{CAPTURE}.{instance}"))
            names = self._consumers[instance].own_names(specs[instance], context, num_samples)
            found |= dict.fromkeys(names, context.field)
        return found

    def _hidden_states(self) -> str:
        if self.hidden_states is None:
            raise RequestError(RETURN_HIDDEN_STATES, f"this engine does not return them. {HOW_HIDDEN_STATES}")
        check_consumer(self.hidden_states, RETURN_HIDDEN_STATES)
        check_spec(self._consumers[self.hidden_states], call_context.SPEC, RETURN_HIDDEN_STATES)
        return self.hidden_states

    def _client_specs(self, raw: object, request_id: str) -> dict[str, CaptureSpec]:
        if not isinstance(raw, Mapping) or not raw:
            raise RequestError(CAPTURE, f"expected a non-empty object of consumer name to spec, got {shown(raw)}")
        specs = {}
        for instance, wanted in raw.items():
            consumer = self._consumers.get(instance)
            if consumer is None:
                raise RequestError(f"{CAPTURE}.{instance}", f"no such consumer; configured: {self._names()}")
            check_consumer(instance, f"{CAPTURE}.{instance}")
            if instance == self.hidden_states:
                raise RequestError(f"{CAPTURE}.{instance}", f"set {RETURN_HIDDEN_STATES}: true instead")
            if not consumer.reads_client_spec:
                raise RequestError(
                    f"{CAPTURE}.{instance}", "requests cannot choose what this consumer gets; leave it out"
                )
            wanted = with_tag(consumer, wanted)
            context = self._context(instance, request_id, owner_of_request(f"{CAPTURE}.{instance}"))
            specs[instance] = _checked(consumer.validate_client_spec, wanted, context)
            _check_arguments(instance, specs[instance], self._readouts.get(instance, {}))
            check_spec(consumer, specs[instance], f"{CAPTURE}.{instance}")
        return specs

    def _global_spec(self, instance: str, request_id: str) -> CaptureSpec | None:
        caller = current_caller()
        context = self._context(instance, request_id, None if caller is None else caller.name)
        return self._consumers[instance].global_capture_spec(context)

    def _context(self, instance: str, request_id: str, owner: str | None) -> SpecContext:
        call = current_call()
        return SpecContext(
            instance_name=instance,
            model=self._model,
            params=self._params[instance],
            client_request_id=request_id,
            memo=Memo() if call is None else call.memo,
            owner=owner,
            num_front_ends=self._num_front_ends,
            lasting=self._lasting,
            vocabulary=self._vocabulary,
            takes_columns=self._consumers[instance].takes_columns,
        )

    def _names(self) -> str:
        return ", ".join(sorted(name for name, consumer in self._consumers.items() if consumer.reads_client_spec))


def _checked(validate: Callable[[object, SpecContext], CaptureSpec], raw: object, context: SpecContext) -> CaptureSpec:
    try:
        spec = validate(raw, context)
    except RequestError:
        raise
    except Exception as error:
        raise ConsumerError(f"consumer {context.instance_name!r} failed to check {context.field}: {error!r}") from error
    try:
        msgspec.msgpack.encode(spec.to_wire())
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(context.field, f"only JSON values can be given here: {error}") from error
    return spec


def _check_arguments(instance: str, spec: CaptureSpec, readouts: Mapping[Site, ReadoutFacts]) -> None:
    """Refuse arguments that a readout does not take.

    Raises:
        ConsumerError: The consumer is wrong.
    """
    if not spec.arguments:
        return
    most = min((readouts[site].num_arguments if site in readouts else 0 for site in spec.sites), default=0)
    if len(spec.arguments) > most:
        raise ConsumerError(
            f"consumer {instance!r} gave {len(spec.arguments)} arguments to readouts that take {most} at most"
        )


def _is_global(consumer: type[CaptureConsumer], params: Mapping[str, object]) -> bool:
    """Whether ``global_capture_spec`` may return a spec."""
    if consumer.global_spec_param is not None:
        return params.get(consumer.global_spec_param) is not None
    return consumer.global_capture_spec.__func__ is not CaptureConsumer.global_capture_spec.__func__  # type: ignore[attr-defined]


def _wants_messages(params: SamplingParams, named: frozenset[str]) -> bool:
    value = read_field(params, CAPTURE_MESSAGES)
    if value is not None and value is not True:
        raise RequestError(CAPTURE_MESSAGES, f"expected true or false, got {shown(value)}")
    if value and not named:
        raise RequestError(CAPTURE_MESSAGES, f"results tell of them, and there are none: set {CAPTURE!r}, too")
    return bool(value)


def refuse_unconfigured(params: SamplingParams) -> None:
    """Refuse what a request asks of an engine without capture.

    Raises:
        RequestError: If it asks for anything.
    """
    for field, value in read_fields(params, CAPTURE_FIELDS).items():
        if field == RETURN_HIDDEN_STATES and call_context.read_form(value) is not None:
            raise RequestError(field, f"{NO_CAPTURE} {HOW_HIDDEN_STATES}")
        raise RequestError(field, f"{NO_CAPTURE} {HOW_TO_CAPTURE}")


def resolve(ask: CaptureRequest, num_prompt: int, messages: ChatMessages | None) -> CaptureRequest:
    """Make every position absolute, now that the prompt is known.

    Args:
        ask: As `CaptureRequestReader.read` returned it; resolving it again changes nothing.
        num_prompt: Tokens of the prompt.
        messages: Those of a chat request; None of others, and where message selectors are resolved.

    Raises:
        RequestError: If a selector can select nothing of this prompt.
    """
    specs = {name: _resolve(name, spec, num_prompt, messages) for name, spec in ask.specs.items()}
    is_same = all(specs[name] is spec for name, spec in ask.specs.items())
    return ask if is_same else msgspec.structs.replace(ask, specs=specs)


def _resolve(instance: str, spec: CaptureSpec, num_prompt: int, messages: ChatMessages | None) -> CaptureSpec:
    field = f"{CAPTURE}.{instance}.{spec.positions_field}"

    def resolved(selector: PositionSelector) -> PositionSelector:
        found = selector if messages is None else _with_messages_found(selector, messages, field)
        return found.resolve(num_prompt, field)

    return spec.with_positions(resolved)


def _with_messages_found(selector: PositionSelector, messages: ChatMessages, field: str) -> PositionSelector:
    if isinstance(selector, Message):
        return messages.select(selector, field)
    if isinstance(selector, Several) and any(isinstance(part, Message) for part in selector.parts):
        parts = [_with_messages_found(part, messages, f"{field}[{n}]") for n, part in enumerate(selector.parts)]
        return Several(tuple(parts))
    return selector


def add_messages(ask: CaptureRequest, consumers: Mapping[str, type[CaptureConsumer]]) -> CaptureRequest:
    """Put the boundaries in ``ask.messages`` into the specs of the consumers that keep them."""
    reported = [{"role": one.role, "start": one.start, "stop": one.stop} for one in ask.messages or ()]
    specs = {
        name: replace(spec, options={**spec.options, "messages": reported}) if consumers[name].takes_messages else spec
        for name, spec in ask.specs.items()
    }
    return msgspec.structs.replace(ask, specs=specs)


def messages_of(ask: CaptureRequest) -> dict[Message, str]:
    """The message selectors of a request that are not yet resolved, each with its field."""
    found: dict[Message, str] = {}
    for instance, spec in ask.specs.items():
        field = f"{CAPTURE}.{instance}.{spec.positions_field}"
        for selector in spec.selectors:
            is_several = isinstance(selector, Several)
            for number, part in enumerate(parts_of(selector)):
                if isinstance(part, Message):
                    found.setdefault(part, f"{field}[{number}]" if is_several else field)
    return found
