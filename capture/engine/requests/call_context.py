"""The state of one HTTP call, from its body to its answer.

It is held in context variables: the engine is called from inside the handler, which is where they are read.

``return_hidden_states`` answers each choice with the last row of the final norm: the state from which the last token
was sampled, ``[hidden]`` in the model's dtype. It is HF's ``hidden_states[-1]`` at the last token but one, since the
last sampled token is never forwarded. A consumer keeps it (the entry point `HIDDEN_STATES`); the field stands for a
spec that clients could not write themselves.
"""

from __future__ import annotations

import base64
import binascii
import contextvars
import operator
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from headgate.capture.engine.contracts.request_part import PartRequest
from headgate.capture.engine.requests.chat_messages import ChatMessages, KnownChat, Tokens
from headgate.capture.engine.requests.sampling_params import RETURN_HIDDEN_STATES
from headgate.capture.links.messages import DTYPES
from headgate.capture.schema.batch import Document
from headgate.capture.schema.config import HIDDEN_STATES
from headgate.capture.schema.errors import OverloadedError, RequestError
from headgate.capture.schema.limits import CaptureUse
from headgate.capture.schema.positions import Span
from headgate.capture.schema.results import CaptureResult, CaptureResults
from headgate.capture.schema.sites import FINAL_NORM_SITE
from headgate.capture.schema.spec import CaptureSpec, Memo


@dataclass(slots=True)
class Notes:
    """Notes that one output of a sample brings.

    Attributes:
        by_part: In order, by the name of their part.
        end: Tokens of the prompt and of the output that were kept, if the output is the sample's last; else None.
    """

    by_part: dict[str, list[object]] = field(default_factory=dict)
    end: int | None = None

    def add(self, by_part: Mapping[str, list[object]]) -> None:
        """Take later notes in."""
        for part, notes in by_part.items():
            self.by_part.setdefault(part, []).extend(notes)


class UnsentNotes:
    """Notes about the samples of one engine request that its HTTP answer has not reported yet.

    Args:
        read: Makes values of them, by name.
    """

    def __init__(self, read: Callable[[Notes], Document]) -> None:
        self._read = read
        self._by_sample: dict[int, Notes] = {}

    def put(self, index: int, notes: Notes, *, is_piece: bool) -> None:
        """Take the notes of an output of sample `index`: those since its last output, or all of them."""
        held = self._by_sample.get(index)
        if held is None or not is_piece:
            self._by_sample[index] = notes
        else:
            held.add(notes.by_part)
            held.end = notes.end

    def take(self, index: int) -> Document:
        """Return the values of whatever is untold of sample `index`; of nothing, if there is nothing."""
        return self._read(self._by_sample.pop(index, Notes()))

    def samples(self) -> list[int]:
        """Return the samples that have something untold, in order."""
        return sorted(index for index, notes in self._by_sample.items() if notes.by_part)


ATTRIBUTE = HIDDEN_STATES
"""Attribute of a `CompletionOutput`, and key of a choice in an HTTP answer."""

Form = Literal["list", "base64"]

SPEC = CaptureSpec(sites=(FINAL_NORM_SITE,), positions=Span(-1))
"""From the last token of the prompt on: if one token is generated, its row is the one that is wanted."""


def read_form(value: object) -> Form | None:
    """How an HTTP answer writes the state; None if it is not wanted.

    Raises:
        RequestError: If `value` is neither true, false, ``"list"`` nor ``"base64"``.
    """
    if value is None or value is False:
        return None
    if value is True or value == "list":
        return "list"
    if value == "base64":
        return "base64"
    raise RequestError(RETURN_HIDDEN_STATES, f'expected true, false, "list" or "base64", got {value!r}')


def tensor_of(result: CaptureResult | None) -> Tensor | None:
    """The state in one sample's result, ``[hidden]`` in the model's dtype; None if there is none."""
    payload = None if result is None else result.payload
    if not isinstance(payload, Mapping):
        return None
    try:
        data = bytearray(base64.b64decode(payload["data"], validate=True))
        return torch.frombuffer(data, dtype=DTYPES[payload["dtype"]])
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None


def plain_state(result: CaptureResult | None, form: Form) -> object:
    """The state in one sample's result as JSON: a list of numbers, or ``{"dtype", "shape", "data"}``; None if none."""
    if form == "base64":
        return None if result is None or tensor_of(result) is None else result.payload
    state = tensor_of(result)
    return None if state is None else state.tolist()


_call: contextvars.ContextVar[HttpCall | None] = contextvars.ContextVar("headgate_http_call", default=None)


@dataclass(slots=True)
class Slot:
    """One engine request of a call.

    Attributes:
        results: Of its captures; None until it has finished.
        notes: About its samples; None if none are wanted.
        take_new: Returns what consumers that stream have of a sample since the last call, by instance; None if there is
            no such consumer.
        num_rows: By sample, positions that belong to tokens which the client has, or gets now.
    """

    results: CaptureResults | None = None
    notes: UnsentNotes | None = None
    take_new: Callable[[int, int], Mapping[str, object]] | None = None
    num_rows: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class HttpCall:
    """One HTTP call.

    Attributes:
        form: How the answer writes hidden states; None if they are not wanted.
        states: The consumer that keeps them.
        num_samples: Choices of each prompt.
        chat: The conversation, with the messages that selectors of this call mean; None if it is none.
        slots: One for each prompt, in the order of the body; of /v1/responses, one for each turn with a tool.
        use: What its prompts so far could capture at most.
        memo: What was parsed of its body.
        has_turns: Its requests follow one another, and all of them are for one prompt: those of /v1/responses.
        token: Random; begins the keys of its requests, so that consumers know which belong together.
    """

    form: Form | None = None
    states: str | None = None
    num_samples: int = 1
    chat: KnownChat | None = None
    slots: list[Slot] = field(default_factory=list)
    use: CaptureUse = field(default_factory=CaptureUse)
    memo: Memo = field(default_factory=Memo)
    has_turns: bool = False
    token: str = field(default_factory=partial(secrets.token_hex, 8))

    def expect(self) -> Slot:
        """A slot for one more prompt."""
        self.slots.append(Slot())
        return self.slots[-1]

    def messages(self, tokens: Tokens) -> ChatMessages | None:
        """Return the messages of its chat in the prompt of these tokens; None if it is none."""
        return None if self.chat is None else self.chat.messages(tokens)


def current_call() -> HttpCall | None:
    """The HTTP call being handled, if any."""
    return _call.get()


def enter(call: HttpCall) -> None:
    """Make `call` the one that this task handles."""
    _call.set(call)


Refusal = RequestError | OverloadedError
_refusals: contextvars.ContextVar[list[Refusal] | None] = contextvars.ContextVar("headgate_refusals", default=None)


def watch_refusals() -> list[Refusal]:
    """Begin a list for this HTTP call: `noting_refusals` fills it, from this task and the tasks that it starts."""
    found: list[Refusal] = []
    _refusals.set(found)
    return found


def refusals() -> list[Refusal]:
    """Return why the engine refused requests of this HTTP call so far."""
    return _refusals.get() or []


@contextmanager
def noting_refusals() -> Iterator[None]:
    """Note what is raised here because a request is refused or sent away, if it belongs to an HTTP call."""
    try:
        yield
    except (RequestError, OverloadedError) as error:
        if (found := _refusals.get()) is not None:
            found.append(error)
        raise


@dataclass(frozen=True, slots=True)
class ExtractedFields:
    """Fields of parts that were taken out of a body, and read, before the server saw the rest.

    Attributes:
        fields: The values.
        wanted: What those of each part came to, by section.
    """

    fields: Document = field(default_factory=dict)
    wanted: Mapping[str, PartRequest | None] = field(default_factory=dict)

    def has(self, part: str, values: Document) -> bool:
        """Whether `wanted` says what these very values of a part came to."""
        return part in self.wanted and all(map(operator.is_, map(self.fields.get, values), values.values()))


NOTHING = ExtractedFields()
_taken: contextvars.ContextVar[ExtractedFields] = contextvars.ContextVar("headgate_taken", default=NOTHING)


def taken() -> ExtractedFields:
    """Return the fields extracted from the body of the HTTP call at hand."""
    return _taken.get()


def hold(found: ExtractedFields) -> contextvars.Token[ExtractedFields]:
    """Make `found` what was taken out of the body, for what this task calls until `release`."""
    return _taken.set(found)


def release(token: contextvars.Token[ExtractedFields]) -> None:
    """Restore the state from before `hold`."""
    _taken.reset(token)
