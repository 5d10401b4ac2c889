"""Everything of headgate's that travels in a `SamplingParams`: fields, then the checked request, then the wire form.

vLLM keeps only declared fields of a `SamplingParams` when it copies, pickles or sends one, so all three lie in its
``extra_args``, one after the other:

1. The fields that a user sets, such as `capture`, each under its name; the properties put in here read and write them.
2. The `HeadgateRequest` that they come to, under `REQUEST_KEY`, from the call that makes a request to where vLLM has
   made it (`attach`, `attached`). The raw fields are taken out: vLLM copies the parameters, and lists of numbers are
   slow to copy.
3. The `RequestWire`, under `WIRE_KEY`, from there to the engine (`fold`).

A request that arrives with either of those keys is refused, so clients set fields alone.

A field that is headgate's by its name and would act on nothing is refused, whatever wrote it. A name is headgate's if
it begins like its fields do, or is a field of an installed part. Values that say nothing (null, and the default of a
field) are as good as absent: some clients send every field that they know.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Any, NoReturn, TypeGuard

import msgspec

from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.contracts.request_part import PartRequest
from headgate.capture.engine.contracts.wire_format import CAPTURE, WIRE_KEY
from headgate.capture.engine.vllm_names import WORKS_WITH
from headgate.capture.engine.vllm_types import Function, MadeRequest, SamplingParams
from headgate.capture.schema.batch import WIRE_VERSION, CaptureWire, Document, RequestWire
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.results import MessageSpan
from headgate.capture.schema.spec import CaptureSpec

CAPTURE_WAIT = "capture_wait"
CAPTURE_MESSAGES = "capture_messages"
RETURN_HIDDEN_STATES = "return_hidden_states"
CAPTURE_FIELDS = (CAPTURE, CAPTURE_WAIT, CAPTURE_MESSAGES, RETURN_HIDDEN_STATES)

REQUEST_KEY = "headgate_request"
"""Key of the `HeadgateRequest` in ``extra_args``."""


@cache
def all_fields() -> tuple[str, ...]:
    """Capture's fields and those of every other part."""
    return *CAPTURE_FIELDS, *(name for part in request_parts().values() for name in part.fields)


@cache
def answer_fields() -> Mapping[str, str]:
    """Fields of parts that ask for something in the answer, each with its name there."""
    return {field: name for part in request_parts().values() for field, name in part.answer_fields.items()}


@cache
def nested_names() -> Mapping[str, Sequence[str]]:
    """Names that parts read within fields of theirs alone, each with those fields."""
    return {name: fields for part in request_parts().values() for name, fields in part.nested.items()}


def add_properties(sampling: Any, beam_search: type) -> None:
    """Give vLLM's ``SamplingParams`` our fields; ``BeamSearchParams``, which cannot have them, refuses them."""
    for name in all_fields():
        if name in sampling.__struct_fields__:
            raise TypeError(f"vLLM's SamplingParams has a field {name!r} of its own")
        setattr(sampling, name, _stored(name))
        refused = _refused(name, "beam search cannot be captured or steered; use SamplingParams")
        setattr(beam_search, name, refused)


def refuse_properties(sampling: type) -> None:
    """Refuse our fields in a vLLM that headgate was not made for, instead of letting them be ignored."""
    for name in all_fields():
        setattr(sampling, name, _refused(name, f"this vLLM is not supported; {WORKS_WITH}"))


def _stored(name: str) -> property:
    def read(self: SamplingParams) -> object:
        return read_field(self, name)

    def write(self: SamplingParams, value: object) -> None:
        vars(self).pop(name, None)
        extra = {key: kept for key, kept in (self.extra_args or {}).items() if key != name}
        if value is not None:
            extra[name] = value
        self.extra_args = extra or None

    return property(read, write, doc=f"headgate: see headgate.capture.SamplingParams ({name}).")


def _refused(name: str, why: str) -> property:
    def read(self: SamplingParams) -> None:
        return None

    def write(self: SamplingParams, value: object) -> None:
        if value is not None:
            raise RequestError(name, why)

    return property(read, write)


def read_field(params: SamplingParams, name: str) -> object:
    """The value of one of our fields, None if unset; also when it was set before the properties were there."""
    return _read(vars(params), params.extra_args or {}, name)


def _read(early: Mapping[str, object], extra: Mapping[str, object], name: str) -> object:
    value = early.get(name)
    return none_if_default(name, value if value is not None else extra.get(name))


def none_if_default(name: str, value: object) -> object:
    """`value`, or None if it says nothing: some clients send every field that they know with its default."""
    is_switch = name in (RETURN_HIDDEN_STATES, CAPTURE_MESSAGES) or name in answer_fields()
    return None if value is False and is_switch else value


def read_fields(params: SamplingParams, names: Iterable[str]) -> dict[str, object]:
    """Our fields that are set, by name."""
    if is_plain(params):
        return {}  # most requests: they shall not pay for ours
    early, extra, found = vars(params), params.extra_args or {}, {}
    for name in names:
        if (name in extra or name in early) and (value := _read(early, extra, name)) is not None:
            found[name] = value
    return found


def is_plain(params: SamplingParams) -> bool:
    """Whether a `SamplingParams` can hold nothing of ours: it has neither ``extra_args`` nor attributes of its own."""
    return not params.extra_args and not vars(params)


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The checked capture request of one engine request. Immutable.

    A `Struct`, which is cheap to copy with changes, as is done for every request that captures.

    Attributes:
        specs: By consumer instance.
        wait: The client waits for results as long as it takes: ``capture_wait``, or a consumer that is awaited.
        is_explicit: The client named a consumer itself; otherwise only global consumers look at the request.
        named: Consumers that the client named: how much it may ask of these is limited.
        messages: Where the messages of its chat lie, once its prompt is known: empty before. None if its results do not
            name them.
        is_resolved: Every position is absolute, and how much it may come to was checked.
        key: Random; results for the request must carry it.
        reply: Address of the result hub; None if no caller waits.
        is_streamed: See `headgate.capture.schema.results.Origin`.
        own_names: What no other request may have while it runs, each with the field that asks for it; see
            `CaptureConsumer.own_names`.
        claim: Holds those names as long as anything refers to it; None if there are none.
    """

    specs: Mapping[str, CaptureSpec]
    wait: bool
    is_explicit: bool
    key: str
    reply: str | None = None
    is_streamed: bool = False
    named: frozenset[str] = frozenset()
    messages: list[MessageSpan] | None = None
    is_resolved: bool = False
    own_names: Mapping[str, str] = {}
    claim: object = None

    def to_wire(self, num_samples: int, request_id: str) -> CaptureWire:
        """Return the form on the wire; positions must be resolved."""
        wire: CaptureWire = {
            "id": request_id,
            "n": num_samples,
            "key": self.key,
            "reply": self.reply,
            "wait": self.wait,
            "specs": {instance: spec.to_wire() for instance, spec in self.specs.items()},
        }
        return {**wire, "streamed": True} if self.is_streamed else wire

    def needs_prompt(self, num_prompt: int) -> bool:
        """Whether prompt rows other than the last are wanted, which a hit in the prefix cache would skip."""
        selectors = (selector for spec in self.specs.values() for selector in spec.selectors)
        return any(selector.needs_prompt(num_prompt) for selector in selectors)


class HeadgateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The checked headgate fields of one request. Immutable.

    Attributes:
        capture: Of capture; None if nothing.
        parts: Of the other parts, by section. Both may be empty: then the request's fields came to nothing.
        is_offline: An `LLM` makes it.
    """

    capture: CaptureRequest | None = None
    parts: Mapping[str, PartRequest] = {}
    is_offline: bool = False

    def __deepcopy__(self, memo: object) -> HeadgateRequest:
        """Itself: parameters are copied deeply on their way, payloads must not be."""
        return self

    @property
    def field(self) -> str:
        """A field that the request set, for errors that concern all of it."""
        if self.capture is not None:
            return f"{CAPTURE}.{next(iter(self.capture.specs))}"
        return next((wanted.field for wanted in self.parts.values()), CAPTURE)

    @property
    def wants_notes(self) -> bool:
        """Whether notes of a part come with its outputs."""
        return any(wanted.wants_notes for wanted in self.parts.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked."""
        return self.capture is None and not self.parts


def refuse_forged(params: SamplingParams) -> None:
    """Refuse a request that brings along what headgate alone puts into ``extra_args``.

    Raises:
        RequestError: If it does.
    """
    for key in (WIRE_KEY, REQUEST_KEY):
        if params.extra_args and key in params.extra_args:
            raise RequestError(
                f"extra_args.{key}", "this key is headgate's own; set 'capture' or 'steering_vectors' instead"
            )


def attach(params: SamplingParams, headgate_request: HeadgateRequest) -> SamplingParams:
    """A copy of `params` that carries `headgate_request` in place of the raw fields; the caller's stays as it is."""
    carrier = copy.copy(params)
    carrier.extra_args = {**_others(params), REQUEST_KEY: headgate_request}
    return carrier


def attached(params: SamplingParams) -> HeadgateRequest | None:
    """Return the request that `attach` put into `params`; None if there is none. No client can send such an object."""
    carried = (params.extra_args or {}).get(REQUEST_KEY)
    return carried if isinstance(carried, HeadgateRequest) else None


def fold(request: MadeRequest, headgate_request: HeadgateRequest, request_id: str) -> None:
    """Write the `RequestWire` into an `EngineCoreRequest`, whose parameters are the front end's own copy.

    Raises:
        RequestError: If requests of this kind cannot be captured or steered.
    """
    params = request.sampling_params
    params.extra_args = _others(params) or None
    if headgate_request.is_empty:
        return
    num_prompt = len(prompt_tokens(request, headgate_request))
    wire: RequestWire = {"v": WIRE_VERSION}
    if (ask := headgate_request.capture) is not None:
        wire["capture"] = ask.to_wire(params.n, request_id)
        if ask.needs_prompt(num_prompt):
            params.skip_reading_prefix_cache = True
    if headgate_request.parts:
        # Copies, since requests may share what is wanted, and the engine adds to its own.
        wire["parts"] = {section: dict(wanted.wire) for section, wanted in headgate_request.parts.items()}
        if any(wanted.reads_every_row for wanted in headgate_request.parts.values()):
            params.skip_reading_prefix_cache = True
    if headgate_request.wants_notes:
        wire["notes"] = True
    if headgate_request.is_offline:
        wire["offline"] = True
    params.extra_args = {**(params.extra_args or {}), WIRE_KEY: wire}


def _others(params: SamplingParams) -> dict[str, object]:
    ours = (WIRE_KEY, REQUEST_KEY, *all_fields())
    return {key: value for key, value in (params.extra_args or {}).items() if key not in ours}


def prompt_tokens(request: MadeRequest, headgate_request: HeadgateRequest) -> Sequence[int]:
    """Return the tokens of a request's prompt; kinds of requests whose rows cannot be distinguished are refused.

    Raises:
        RequestError: Naming a field that was set.
    """
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        raise RequestError(
            headgate_request.field,
            "a prompt given as embeddings cannot be captured or steered: its rows belong to no token; give its tokens",
        )
    if request.resumable:
        refuse_streamed_input(headgate_request)
    return request.prompt_token_ids


def refuse_streamed_input(headgate_request: HeadgateRequest) -> NoReturn:
    """Refuse a session whose input arrives in parts.

    Raises:
        RequestError: Always.
    """
    raise RequestError(
        headgate_request.field,
        "a session with streamed input cannot be captured or steered: its prompt is not known yet",
    )


def is_made(prompt: object) -> TypeGuard[MadeRequest]:
    """Whether a prompt is an `EngineCoreRequest`, which vLLM takes as it is."""
    return hasattr(prompt, "sampling_params")


def refuse_made(request: MadeRequest, params: SamplingParams) -> None:
    """Refuse an `EngineCoreRequest` that asks for something which was not folded into it: it would be ignored.

    Args:
        request: What the caller gave as the prompt.
        params: The parameters beside it, which vLLM ignores in this case.

    Raises:
        RequestError: Naming the field.
    """
    made = request.sampling_params
    given = [name for name in all_fields() for source in (made, params) if _is_set(source, name)]
    if given and (_is_set(made, given[0]) or WIRE_KEY not in (made.extra_args or {})):
        raise RequestError(
            given[0], "an EngineCoreRequest is taken as it is; pass the prompt itself, with the sampling parameters"
        )


def _is_set(params: SamplingParams | None, name: str) -> bool:
    return params is not None and (name in vars(params) or name in (params.extra_args or {}))


def short_repr(original: Function) -> Function:
    """Wrap ``SamplingParams.__repr__``: request logs and crash dumps must not print whole requests, nor vectors."""

    @wraps(original)
    def __repr__(self: SamplingParams) -> str:
        extra = self.extra_args or {}
        elided = {name: _Elided(extra[name]) for name in (WIRE_KEY, REQUEST_KEY, *_long_fields()) if name in extra}
        if not elided:
            return str(original(self))
        shown = copy.copy(self)
        shown.extra_args = {**extra, **elided}
        return str(original(shown))

    return __repr__


def _long_fields() -> Iterator[str]:
    return (name for part in request_parts().values() for name in part.fields)


class _Elided:
    """Stands for a value where it is printed: texts are printed, others are not."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value) if isinstance(self._value, str) else "<...>"


PREFIXES = (
    *("steering", "prefill_steering", "decode_steering", "sae_", "prefill_sae_", "decode_sae_"),
    *(CAPTURE, RETURN_HIDDEN_STATES, "return_steering"),
)
EXTRA_ARGS, SAMPLING_PARAMS, VLLM_XARGS = "extra_args", "sampling_params", "vllm_xargs"
_CONTAINERS = (VLLM_XARGS, EXTRA_ARGS, SAMPLING_PARAMS)


def is_ours(name: object) -> bool:
    """Whether a field of this name can only be meant for headgate."""
    return isinstance(name, str) and (name.startswith(PREFIXES) or name in all_fields())


def is_of_interest(name: object) -> bool:
    """Whether `find_ignored` looks at the value of a field of this name."""
    return name in _CONTAINERS or is_ours(name)


def find_ignored(document: Document, where: str = "", *, reads_extra_args: bool = False) -> str | None:
    """Return the path of the first field of headgate's in a body that a route would ignore; None if there is none.

    Args:
        document: The body, or the part of it that its route does not know.
        where: What the path begins with.
        reads_extra_args: The route passes ``sampling_params.extra_args`` on to the engine, which reads them.
    """
    for name, value in document.items():
        if name in _CONTAINERS:
            inner = {} if reads_extra_args and where and name == EXTRA_ARGS else _object_of(value)
            found = find_ignored(inner, f"{where}{name}.", reads_extra_args=reads_extra_args)
            if found is not None:
                return found
        elif is_ours(name) and none_if_default(name, value) is not None:
            return f"{where}{name}"
    return None


def _object_of(value: object) -> Document:
    """The value of a field as an object: forms hold one as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}


def refuse_unknown(values: Document, where: str = "") -> None:
    """Refuse names that begin like headgate's fields and are none, where its fields are read.

    A name that is read within a field of headgate's is refused beside that field.

    Args:
        values: The values by name; other names are left alone.
        where: What the path of a field begins with.

    Raises:
        RequestError: Naming the first of them.
    """
    for name, value in values.items():
        if value is not None and isinstance(name, str) and name.startswith(PREFIXES) and name not in all_fields():
            raise RequestError(f"{where}{name}", f"headgate has no such field; it has {', '.join(all_fields())}")
    _refuse_beside(values, where)


def _refuse_beside(values: Document, where: str = "") -> None:
    """Refuse names that stand beside the field within which they are read."""
    for name, fields in nested_names().items():
        if values.get(name) is None:
            continue
        for field in fields:
            if values.get(field) is not None:
                raise RequestError(f"{where}{name}", f"is read within {field} alone: give it there")


def refuse_unknown_in(params: SamplingParams | None) -> None:
    """Do so for ``extra_args`` and the attributes of a `SamplingParams`.

    Raises:
        RequestError: Naming the first of them.
    """
    if params is not None and not is_plain(params):
        refuse_unknown(params.extra_args or {}, f"{EXTRA_ARGS}.")
        refuse_unknown(vars(params))
        _refuse_beside({**vars(params), **(params.extra_args or {})})


def refuse_ignored(document: Document, why: str) -> None:
    """Refuse every field of headgate's.

    Raises:
        RequestError: Naming the first of them, with the reason.
    """
    field = find_ignored(document)
    if field is not None:
        raise RequestError(field, why)
