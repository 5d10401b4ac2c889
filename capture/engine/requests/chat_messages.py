"""Where the messages of a chat lie in its prompt.

A chat template says nothing about boundaries, so they are found by rendering beginnings of the conversation with the
same template: message i begins where the conversation before it ends. What was rendered must then be a prefix of the
real prompt, token by token; where a template does not keep messages apart, a selector is refused, never guessed.

A template may put something before the first message that belongs to none (a default system message, a list of
tools). What the first message itself looks like is seen by rendering it again as a later turn. Before a system
message that comes first, templates put nothing but the token that begins every text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import Message, Span

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


def pick(selector: Message, chat: Chat, field: str) -> int:
    """Index in `chat` of the message that `selector` means.

    Raises:
        RequestError: If there is none.
    """
    matching = [i for i, message in enumerate(chat) if selector.role in (None, message.get("role"))]
    try:
        return matching[selector.index]
    except IndexError:
        roles = ", ".join(str(message.get("role")) for message in chat)
        wanted = f"message {selector.index}" + (f" of role {selector.role!r}" if selector.role else "")
        raise RequestError(field, f"there is no {wanted}; the chat has: {roles}") from None


def locate(chat: Chat, index: int, *, is_continued: bool, bos: int | None, field: str) -> Rendering:
    """Find message `index` of `chat`. A generator: whoever drives it renders, blocking or not.

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
    """A conversation that `LLM.chat` is about to add as a request.

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

    def find_message(self, tokens: Tokens) -> Callable[[Message, str], Span]:
        """Resolves message selectors for the prompt of these tokens."""

        def find(selector: Message, field: str) -> Span:
            index = pick(selector, self._chat, field)
            rendering = locate(self._chat, index, is_continued=self._is_continued, bos=self._bos, field=field)
            return drive(rendering, self._try_render).span(tokens, field)

        return find

    def _try_render(self, chat: Chat) -> Tokens | None:
        try:
            return self._render(chat)
        except Exception:  # noqa: BLE001  (templates raise whatever they like to refuse a conversation)
            return None
