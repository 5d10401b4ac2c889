"""Chats become the tokens that `LLM.chat` makes of them, whichever part of headgate renders them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.capture import SamplingParams, prompt_tokens
from headgate.capture.schema.errors import RequestError
from headgate.consumers.harvest import VllmEngine
from tests.frontend.conftest import ENGINE, stop

pytestmark = pytest.mark.engine

CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};"
HEAD = "{% for m in messages %}[{{ m.role }}]"
TAIL = CALLS + "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
TEMPLATES = {
    "text": HEAD + "{{ m['content'] | trim }}" + TAIL,
    "parts": HEAD + "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}" + TAIL,
}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = {"role": "user", "content": "What is 2 + 2?"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "text": [ASKED],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}],
    "answered": [ASKED, {"role": "assistant", "content": "4"}],
    "tools": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}],
    "silent": [ASKED, {"role": "assistant", "tool_calls": [CALL]}],
    "parquet": [{**ASKED, "tool_calls": None, "name": None}, {"role": "assistant", "content": "4", "tool_calls": None}],
}
HELD = {
    "text": "What is 2 + 2?",
    "parts": "you",
    "answered": "]4;",
    "tools": '<add {"a": 1}>',
    "silent": "{",
    "parquet": "]4;",
}


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(str(model_dir), **ENGINE)
    yield llm
    stop(llm.llm_engine)


@pytest.fixture(params=[*TEMPLATES])
def templated(llm: Any, request: pytest.FixtureRequest) -> Any:
    llm.chat_template = TEMPLATES[request.param]
    return llm


@pytest.mark.parametrize("name", [*CHATS])
def test_a_harvest_has_the_tokens_of_a_chat(templated: Any, name: str) -> None:
    given = CHATS[name]
    is_open = given[-1]["role"] != "assistant"

    tokens = VllmEngine(templated).tokens(copy.deepcopy(given))

    params = SamplingParams(max_tokens=1)
    (output,) = templated.chat(
        copy.deepcopy(given),
        params,
        use_tqdm=False,
        add_generation_prompt=is_open,
        chat_template=templated.chat_template,  # which vLLM 0.26 does not look up by itself
    )
    assert tokens == output.prompt_token_ids
    assert HELD[name] in templated.get_tokenizer().decode(tokens)


def test_a_harvest_has_the_tokens_of_a_text(llm: Any) -> None:
    (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=1), use_tqdm=False)

    assert VllmEngine(llm).tokens("Once upon a time") == output.prompt_token_ids


@pytest.mark.parametrize("prompt", ["so " * 4000, [{"role": "user", "content": "so " * 4000}]])
def test_prompts_beyond_the_context_have_all_their_tokens(templated: Any, prompt: Any) -> None:
    tokens = VllmEngine(templated).tokens(prompt)

    assert len(tokens) > ENGINE["max_model_len"]
    assert templated.get_tokenizer().decode(tokens).count("so") == 4000


@pytest.mark.parametrize("name", ["text", "tools", "answered", "parquet"])
def test_messages_lie_where_the_template_puts_them(templated: Any, name: str) -> None:
    engine, chat = VllmEngine(templated), CHATS[name]

    spans = engine.messages(copy.deepcopy(chat))

    assert spans is not None
    whole = engine.tokens(copy.deepcopy(chat))
    texts = [templated.get_tokenizer().decode(whole[one.start : one.stop]) for one in spans]
    assert [text.partition("]")[0] for text in texts] == [f"[{message['role']}" for message in chat]
    assert all(text.endswith(";") for text in texts)
    assert "".join(texts) == templated.get_tokenizer().decode(whole).removesuffix("[assistant]")


def test_messages_that_the_template_mixes_are_not_guessed(llm: Any) -> None:
    llm.chat_template = "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}"

    assert VllmEngine(llm).messages([{"role": "user", "content": "a"}] * 2) is None


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([{"role": "user", "content": 5}], "vLLM cannot render it: TypeError"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "no"}}]}], "vLLM cannot render it"),
        ([3, 10**6], "expected token ids from 0 to 49151, got 1000000"),
        ([3, -1], "got -1"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_refused(templated: Any, prompt: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=f"^prompt: .*{reason}"):
        prompt_tokens(templated, prompt)


def test_a_template_that_refuses_a_chat_is_quoted(llm: Any) -> None:
    llm.chat_template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(RequestError, match="roles must alternate"):
        prompt_tokens(llm, [ASKED])


def test_facts_and_tokens_of_an_engine(llm: Any) -> None:
    engine = VllmEngine(llm)

    assert (engine.facts.dtype, engine.facts.max_length, engine.facts.hidden_size) == ("bfloat16", 2048, 576)
    assert engine.tokens([4, 5]) == [4, 5]
    assert engine.tokens([]) == []
