"""Where the messages of a chat lie in its prompt.

A chat template says nothing about boundaries, so they are found by rendering beginnings of the conversation with the
same template: message i begins where the conversation before it ends. What was rendered must then be a prefix of the
real prompt, token by token; where a template does not keep messages apart, a selector is refused, never guessed.

A template may put something before the first message that belongs to none (a default system message, a list of
tools). What the first message itself looks like is seen by rendering it again as a later turn. Before a system
message that comes first, templates put nothing but the token that begins every text.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import HeadgateError, RequestError
from headgate.capture.schema.positions import Message, PositionSelector, Span
from headgate.capture.schema.results import MessageSpan

Chat = Sequence[Document]
Tokens = Sequence[int]
Rendering = Generator[Chat, Tokens | None, "RenderedMessage"]
"""Yields conversations to render without a generation prompt; is sent their tokens, or None where that failed."""


@dataclass(frozen=True, slots=True)
class RenderedMessage:
    """One message as it was rendered.

    Attributes:
        start: Its first position.
        tokens: The conversation up to and including it.
        is_open: The prompt continues it, so it ends where the prompt ends.
    """

    start: int
    tokens: tuple[int, ...]
    is_open: bool = False

    def span(self, prompt: Tokens, field: str) -> Span:
        """The positions of the message in `prompt`.

        Raises:
            RequestError: If the prompt does not begin as the conversation was rendered.
        """
        if not _begins_with(prompt, self.tokens):
            raise RequestError(field, f"{_UNCLEAR}: with the messages after it, the text before it changes")
        return Span(self.start, len(prompt) if self.is_open else len(self.tokens))


_UNCLEAR = "this model's chat template does not show where the message lies; select positions by number"


def pick(selector: Message, roles: Sequence[str | None], field: str) -> tuple[int, ...]:
    """Numbers of the messages that `selector` means, in a chat with messages of these roles.

    Raises:
        RequestError: If there is none.
    """
    matching = [i for i, role in enumerate(roles) if selector.role in (None, role)]
    try:
        found = tuple(matching) if selector.index is None else (matching[selector.index],)
    except IndexError:
        found = ()
    if not found:
        wanted = "message" if selector.index is None else f"message {selector.index}"
        wanted += f" of role {selector.role!r}" if selector.role else ""
        raise RequestError(field, f"there is no {wanted}; the chat has: {', '.join(map(str, roles))}")
    return found


Locate = Callable[[int, str], RenderedMessage]
"""Finds a message by its number in the chat; the text is the field that asks, for errors."""


class ChatMessages:
    """The messages of a chat in its prompt.

    Args:
        roles: Of each message.
        locate: Finds one as it was rendered.
        prompt: The tokens of the prompt.
    """

    def __init__(self, roles: Sequence[str | None], locate: Locate, prompt: Tokens) -> None:
        self._roles = roles
        self._locate = locate
        self._prompt = prompt

    def select(self, selector: Message, field: str) -> PositionSelector:
        """Resolve a selector.

        Raises:
            RequestError: If there is no such message, or the template does not show it.
        """
        spans = [self._locate(index, field).span(self._prompt, field) for index in pick(selector, self._roles, field)]
        return selector.within(spans, field)

    def find(self, role: str | None, index: int, field: str) -> MessageSpan:
        """Return one message; counted as `Message` counts.

        Raises:
            RequestError: As `select` does.
        """
        (number,) = pick(Message(role, index), self._roles, field)
        return self._span(number, field)

    def spans(self, field: str) -> tuple[MessageSpan, ...]:
        """Return every message, in order.

        Raises:
            RequestError: If the template does not show one of them.
        """
        return tuple(self._span(number, f"{field}[{number}]") for number in range(len(self._roles)))

    def _span(self, number: int, field: str) -> MessageSpan:
        span = self._locate(number, field).span(self._prompt, field)
        stop = len(self._prompt) if span.stop is None else span.stop
        tokens = [int(token) for token in self._prompt[span.start : stop]]
        return MessageSpan(role=str(self._roles[number]), start=span.start, stop=stop, token_ids=tokens)


class KnownChat(Protocol):
    """A conversation of a request."""

    def messages(self, prompt: Tokens) -> ChatMessages:
        """Return its messages in the prompt of these tokens."""
        ...


class LocatedChat:
    """A conversation whose messages that a request asks for were found before; implements `KnownChat`.

    Args:
        roles: Of each message.
        found: Those messages, by their numbers.
    """

    def __init__(self, roles: Sequence[str | None], found: Mapping[int, RenderedMessage]) -> None:
        self._roles = roles
        self._found = found

    def messages(self, prompt: Tokens) -> ChatMessages:
        return ChatMessages(self._roles, lambda number, _: self._found[number], prompt)


def roles_of(chat: Chat) -> list[str | None]:
    """The role of each message of a chat; None for one without."""
    return [None if (role := message.get("role")) is None else str(role) for message in chat]


def is_beginning(part: Chat, chat: Chat) -> bool:
    """Whether `part` consists of the first messages of `chat`, the very objects."""
    return len(part) <= len(chat) and all(map(operator.is_, part, chat))


def locate(chat: Chat, index: int, *, is_continued: bool, bos: int | None, field: str) -> Rendering:
    """Find message `index` of `chat`. A generator: its driver renders, blocking or not.

    Args:
        chat: The conversation.
        index: Which message.
        is_continued: The prompt leaves the last message open for the model to continue.
        bos: The token that begins every text, if the tokenizer has one.
        field: The selector's path, for errors.

    Raises:
        RequestError: If the template does not show it.
    """
    is_open = is_continued and index == len(chat) - 1
    through = yield chat[: index + 1]
    if through is None:
        raise RequestError(field, f"{_UNCLEAR}: it cannot render the chat up to that message")
    if index == 0:
        start = yield from _first_turn(chat[0], through, bos, field)
    else:
        before = yield chat[:index]
        if before is None or not _begins_with(through, before) or len(before) == len(through):
            raise RequestError(field, f"{_UNCLEAR}: it mixes the message with those before it")
        start = len(before)
    return RenderedMessage(start, tuple(through[:start] if is_open else through), is_open)


def _first_turn(message: Document, alone: Tokens, bos: int | None, field: str) -> Generator[Chat, Tokens | None, int]:
    """First position of a chat's first message, after what the template puts before it."""
    for earlier in _contexts(message):
        before = yield earlier
        with_it = yield [*earlier, message]
        if before is None or with_it is None or not _begins_with(with_it, before):
            continue
        turn = tuple(with_it[len(before) :])
        if 0 < len(turn) <= len(alone) and tuple(alone[-len(turn) :]) == turn:
            return len(alone) - len(turn)
    if message.get("role") in ("system", "developer"):
        return 1 if alone and alone[0] == bos else 0
    raise RequestError(field, f"{_UNCLEAR}: it does not render the first message as it renders later ones")


def _contexts(message: Document) -> list[Chat]:
    """Chats that a template may accept before `message`: many insist on user and assistant taking turns."""
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}
    system = {"role": "system", "content": "Hi"}
    return [[message], [system], [user, assistant], [user]]


def _begins_with(tokens: Tokens, prefix: Tokens) -> bool:
    return tuple(tokens[: len(prefix)]) == tuple(prefix)


def drive(rendering: Rendering, render: Callable[[Chat], Tokens | None]) -> RenderedMessage:
    """Run `locate` with a function that renders."""
    try:
        chat = next(rendering)
        while True:
            chat = rendering.send(render(chat))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class LLMChat:
    """A conversation that `LLM.chat` is about to add as a request; implements `KnownChat`.

    Args:
        prompt: What it was rendered to; identifies the request.
        chat: The conversation.
        render: Renders a conversation as this one was, without a generation prompt.
        is_continued: The prompt leaves the last message open for the model to continue.
        bos: The token that begins every text, if the tokenizer has one.
    """

    def __init__(
        self,
        prompt: object,
        chat: Chat,
        render: Callable[[Chat], Tokens],
        *,
        is_continued: bool,
        bos: int | None,
    ) -> None:
        self.prompt = prompt
        self._chat = chat
        self._render = render
        self._is_continued = is_continued
        self._bos = bos
        self._rendered: dict[int, RenderedMessage] = {}
        self._beginnings: dict[int, Tokens | None] = {}

    def messages(self, prompt: Tokens) -> ChatMessages:
        return ChatMessages(roles_of(self._chat), self._locate, prompt)

    def _locate(self, number: int, field: str) -> RenderedMessage:
        if number not in self._rendered:
            rendering = locate(self._chat, number, is_continued=self._is_continued, bos=self._bos, field=field)
            self._rendered[number] = drive(rendering, self._try_render)
        return self._rendered[number]

    def _try_render(self, chat: Chat) -> Tokens | None:
        number = len(chat)
        if not is_beginning(chat, self._chat):
            return self._render_once(chat)
        if number not in self._beginnings:
            self._beginnings[number] = self._render_once(chat)
        return self._beginnings[number]

    def _render_once(self, chat: Chat) -> Tokens | None:
        try:
            return self._render(chat)
        except EngineGoneError:
            raise
        except Exception:  # noqa: BLE001  (templates raise whatever they like to refuse a conversation)
            return None


def message_spans(
    chat: Chat, prompt: Tokens, render: Callable[[Chat], Tokens], *, bos: int | None = None
) -> tuple[MessageSpan, ...] | None:
    """Return where the messages of a chat lie in its prompt; None if the chat template does not show it.

    Args:
        chat: The messages, each with a ``role``.
        prompt: The tokens of the whole chat; tokens that invite the model to answer may follow.
        render: Renders a conversation with the same template, without a generation prompt.
        bos: The token that begins every text, if the tokenizer has one.
    """
    try:
        return LLMChat(prompt, chat, render, is_continued=False, bos=bos).messages(prompt).spans("messages")
    except RequestError:
        return None


ENGINE_GONE = "the engine that renders the chat is gone: ask for its messages while there is one"


class EngineGoneError(HeadgateError, RuntimeError):
    """The engine that would have to render a conversation is gone."""
