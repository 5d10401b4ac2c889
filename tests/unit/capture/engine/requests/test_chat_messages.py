"""Where the messages of a chat lie in its prompt, for templates of many kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.engine.requests.chat_messages import (
    ENGINE_GONE,
    EngineGoneError,
    LLMChat,
    drive,
    locate,
    pick,
    roles_of,
)
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import Message, Span

Chat = Sequence[Mapping[str, Any]]
BOS = 0


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def chatml(chat: Chat, *, opening: bool = False) -> list[int]:
    """As SmolLM2 and Qwen: a default system message where the chat has none."""
    turns = "".join(f"<{m['role']}>{m['content']}</>" for m in chat)
    default = "" if chat[0]["role"] == "system" else "<system>You are helpful</>"
    return encode(default + turns + ("<assistant>" if opening else ""))


def alternating(chat: Chat, *, opening: bool = False) -> list[int]:
    """As Gemma: a first token, turns taken strictly, no system message."""
    roles = [m["role"] for m in chat]
    if any(role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)):
        raise ValueError("roles must alternate")
    return [BOS, *encode("".join(f"[{m['role']}]{m['content']}." for m in chat) + ("[model]" if opening else ""))]


def dated(chat: Chat, *, opening: bool = False) -> list[int]:
    """As Llama 3.1: the first system message is rendered as no other."""
    system = chat[0]["content"] if chat[0]["role"] == "system" else ""
    rest = chat[1:] if system else chat
    turns = "".join(f"<{m['role']}>{m['content']}</>" for m in rest)
    return [BOS, *encode(f"<system>Date: today. {system}</>{turns}{'<assistant>' if opening else ''}")]


def thoughtless(chat: Chat, *, opening: bool = False) -> list[int]:
    """As Qwen3: an answer is rendered in another way once another message follows it."""
    parts = []
    for i, m in enumerate(chat):
        is_last = i == len(chat) - 1
        parts.append(f"<{m['role']}>{'(thought)' if is_last and m['role'] == 'assistant' else ''}{m['content']}</>")
    return encode("".join(parts) + ("<assistant>" if opening else ""))


def merging(chat: Chat, *, opening: bool = False) -> list[int]:
    """As Llama 2: the system message stands inside the first user turn."""
    system = chat[0]["content"] if chat[0]["role"] == "system" else ""
    rest = chat[1:] if system else chat
    if not rest:
        raise ValueError("no user message")
    turns = "".join(f"[INST]{system if i == 0 else ''}{m['content']}[/INST]" for i, m in enumerate(rest))
    return [BOS, *encode(turns)]


TALK = [message("user", "Hi"), message("assistant", "Hello you"), message("user", "Bye")]
SYSTEM_TALK = [message("system", "Be brief"), *TALK]


def span_of(template: Callable[..., list[int]], chat: Chat, index: int, role: str | None = None) -> Span:
    prompt = template(chat, opening=True)
    known = LLMChat({}, chat, template, is_continued=False, bos=BOS)
    return known.messages(prompt).select(Message(role, index), "capture.x.positions")


def text_of(template: Callable[..., list[int]], chat: Chat, index: int, role: str | None = None) -> str:
    span = span_of(template, chat, index, role)
    return "".join(map(chr, template(chat, opening=True)[span.start : span.stop]))


@pytest.mark.parametrize("template", [chatml, dated], ids=["default-system", "dated-system"])
@pytest.mark.parametrize("index", range(3))
def test_each_turn_is_found_without_what_the_template_puts_before_it(
    template: Callable[..., list[int]], index: int
) -> None:
    assert text_of(template, TALK, index) == f"<{TALK[index]['role']}>{TALK[index]['content']}</>"


@pytest.mark.parametrize("index", range(3))
def test_templates_that_insist_on_alternating_roles(index: int) -> None:
    assert text_of(alternating, TALK, index) == f"[{TALK[index]['role']}]{TALK[index]['content']}."


def test_the_token_that_begins_every_text_belongs_to_no_message() -> None:
    assert span_of(alternating, TALK, 0).start == 1


@pytest.mark.parametrize(
    ("template", "turn"), [(chatml, "<system>Be brief</>"), (dated, "<system>Date: today. Be brief</>")]
)
def test_a_system_message_is_its_whole_turn(template: Callable[..., list[int]], turn: str) -> None:
    assert text_of(template, SYSTEM_TALK, 0) == turn
    assert text_of(template, SYSTEM_TALK, 1) == "<user>Hi</>"


@pytest.mark.parametrize(
    ("role", "index", "content"),
    [("user", 0, "Hi"), ("user", -1, "Bye"), ("assistant", -1, "Hello you"), (None, 1, "Hi"), (None, -1, "Bye")],
)
def test_messages_are_counted_by_role_or_over_all(role: str | None, index: int, content: str) -> None:
    assert content in text_of(chatml, SYSTEM_TALK, index, role)


def test_two_equal_messages_are_told_apart() -> None:
    chat = [message("user", "again"), message("assistant", "yes"), message("user", "again")]

    first, last = span_of(chatml, chat, 0), span_of(chatml, chat, -1)

    assert first.stop is not None
    assert first.stop < last.start


@pytest.mark.parametrize(("role", "index"), [("tool", 0), ("user", 2), ("user", -3), (None, 3)])
def test_a_message_that_is_not_there(role: str | None, index: int) -> None:
    with pytest.raises(RequestError, match=r"capture\.x\.positions: there is no message .* user, assistant, user"):
        span_of(chatml, TALK, index, role)


def test_a_template_that_rewrites_earlier_turns_is_refused_for_those() -> None:
    with pytest.raises(RequestError, match="does not show where the message lies"):
        span_of(thoughtless, TALK, 1)


def test_a_template_that_mixes_messages_is_refused() -> None:
    with pytest.raises(RequestError, match="does not show where the message lies"):
        span_of(merging, SYSTEM_TALK, 1)


def test_a_message_that_the_prompt_continues_ends_with_it() -> None:
    chat = [message("user", "Hi"), message("assistant", "I say")]
    prompt = chatml(chat)[: -len("</>")]
    known = LLMChat({}, chat, chatml, is_continued=True, bos=None)

    span = known.messages(prompt).select(Message("assistant", -1), "field")

    assert "".join(map(chr, prompt[span.start : span.stop])) == "<assistant>I say"


def test_all_messages_of_a_chat_are_told() -> None:
    prompt = chatml(SYSTEM_TALK, opening=True)
    renderings: list[int] = []

    def render(part: Chat) -> list[int]:
        renderings.append(len(part))
        return chatml(part)

    known = LLMChat({}, SYSTEM_TALK, render, is_continued=False, bos=None).messages(prompt)
    spans = known.spans("field")

    assert [span.role for span in spans] == ["system", "user", "assistant", "user"]
    assert [span.token_ids for span in spans] == [prompt[span.start : span.stop] for span in spans]
    assert ["".join(map(chr, span.token_ids)) for span in spans] == [
        f"<{m['role']}>{m['content']}</>" for m in SYSTEM_TALK
    ]
    assert known.find("user", -1, "field") == spans[-1]
    assert renderings.count(4) == renderings.count(3) == 1
    assert sorted(renderings) == [1, 2, 2, 3, 4]  # and the first message once more, as a later turn


def test_a_message_that_the_template_does_not_show_is_named() -> None:
    known = LLMChat({}, TALK, thoughtless, is_continued=False, bos=None).messages(thoughtless(TALK, opening=True))

    with pytest.raises(RequestError, match=r"^messages\[1\]: this model's chat template does not show"):
        known.spans("messages")
    assert known.find(None, 0, "message").role == "user"


def tool_turns(chat: Chat, *, opening: bool = False) -> list[int]:
    """As Qwen and Hermes: results of tools that follow each other stand in one turn of the user."""
    text = ""
    for i, m in enumerate(chat):
        is_tool = m["role"] == "tool"
        opens = not is_tool or i == 0 or chat[i - 1]["role"] != "tool"
        closes = not is_tool or i == len(chat) - 1 or chat[i + 1]["role"] != "tool"
        calls = "".join(f"(call {call})" for call in m.get("tool_calls", ()))
        role = "user" if is_tool else m["role"]
        text += f"{f'<{role}>' if opens else ''}{'[result]' if is_tool else ''}{m['content']}{calls}"
        text += "</>" if closes else ""
    return encode(text + ("<assistant>" if opening else ""))


def test_calls_and_results_of_tools_are_messages_where_the_template_keeps_them_apart() -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": ["f"]}
    one = [message("user", "Hi"), calling, message("tool", "7"), message("assistant", "So 7")]
    two = [*one[:3], message("tool", "8"), one[3]]

    assert text_of(tool_turns, one, 0, "tool") == "<user>[result]7</>"
    assert text_of(tool_turns, one, 0, "assistant") == "<assistant>(call f)</>"
    assert text_of(tool_turns, two, -1, "assistant") == "<assistant>So 7</>"
    with pytest.raises(RequestError, match="does not show where the message lies"):
        span_of(tool_turns, two, 0, "tool")


def test_an_engine_that_is_gone_is_told_of() -> None:
    def render(part: Chat) -> list[int]:
        raise EngineGoneError(ENGINE_GONE)

    known = LLMChat({}, TALK, render, is_continued=False, bos=None).messages(chatml(TALK))

    with pytest.raises(EngineGoneError, match="the engine that renders the chat is gone"):
        known.spans("messages")


def test_a_prompt_that_was_cut_is_refused() -> None:
    known = LLMChat({}, TALK, chatml, is_continued=False, bos=None)

    with pytest.raises(RequestError, match="the text before it changes"):
        known.messages(chatml(TALK)[5:]).select(Message("user", -1), "field")


ROLES = st.sampled_from(["user", "assistant", "tool"])
CHATS = st.lists(st.builds(message, ROLES, st.text("ab ", max_size=4)), min_size=1, max_size=6)


@given(chat=CHATS, with_system=st.booleans(), data=st.data())
def test_the_turns_of_any_chat_follow_each_other(chat: list[dict[str, str]], with_system: bool, data: Any) -> None:
    chat = [*([message("system", "S")] if with_system else []), *chat]
    index = data.draw(st.integers(0, len(chat) - 1))

    turn = drive(locate(chat, index, is_continued=False, bos=None, field="f"), chatml)

    expected = f"<{chat[index]['role']}>{chat[index]['content']}</>"
    assert "".join(map(chr, turn.tokens[turn.start :])) == expected
    assert pick(Message(None, index), roles_of(chat), "f") == (index,)


@pytest.mark.parametrize("chat", [TALK, SYSTEM_TALK], ids=["default-system", "own-system"])
def test_the_turns_of_smollm2(model_dir: Path, chat: Chat) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def render(part: Chat) -> list[int]:
        return list(tokenizer.apply_chat_template(list(part), return_dict=False))

    prompt = list(tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=False))
    known = LLMChat({}, chat, render, is_continued=False, bos=tokenizer.bos_token_id)

    for index, turn in enumerate(chat):
        span = known.messages(prompt).select(Message(None, index), "field")
        text = tokenizer.decode(prompt[span.start : span.stop])
        assert text == f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n"
