"""The chat requests of the demo: real questions, each with its own idea of what to capture."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

LAYERS_SHOWN = [5, 15, 25]
EVERY_HOOK = {
    **dict.fromkeys(("pre_attn", "attn_in", "hook_z", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_mlp"), "all"),
    "final_norm": "all",
}
"""In the order of the forward pass."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One chat request.

    Attributes:
        name: Its file's name.
        question: What the user says.
        wants: What to capture, in words.
        capture: The same as the filesystem consumer reads it; None captures nothing.
        max_tokens: Length of the answer at most.
    """

    name: str
    question: str
    wants: str
    capture: dict[str, Any] | None
    max_tokens: int = 24


ASKS = (
    Ask("capital", "What is the capital of France?", "every hook point, every token", {"hooks": EVERY_HOOK}),
    Ask("sea", "Write one sentence about the sea.", "post_mlp, every token", {"hooks": {"post_mlp": "all"}}, 40),
    Ask(
        "probe-japan",
        "Is Paris in Japan? Answer yes or no.",
        "post_mlp at the last prompt token",
        {"hooks": {"post_mlp": "all"}, "positions": "last_prompt", "tag": "probe"},
    ),
    Ask(
        "probe-fire",
        "Is fire cold? Answer yes or no.",
        "post_mlp at the last prompt token",
        {"hooks": {"post_mlp": "all"}, "positions": "last_prompt", "tag": "probe"},
    ),
    Ask(
        "branches",
        "Name three fruits.",
        "attn_out and mlp_out of 3 layers, the answer",
        {"hooks": dict.fromkeys(("attn_out", "mlp_out"), LAYERS_SHOWN), "positions": "all_generated"},
    ),
    Ask(
        "user-turn",
        "How do plants make food?",
        "the last 4 layers, the user's message",
        {"hooks": {"post_mlp": {"ranges": [[-4, 30]]}}, "positions": {"role": "user", "index": -1}},
    ),
    Ask(
        "every-fourth",
        "Who wrote Hamlet?",
        "final_norm, every 4th token",
        {"hooks": {"final_norm": "all"}, "positions": {"start": 0, "step": 4}, "layout": "raw"},
    ),
    Ask("plain", "What is 2 + 2?", "nothing", None),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        ask: The request.
        text: The answer.
        num_prompt_tokens: Tokens of the prompt, chat template included.
        num_answer_tokens: Tokens of the answer.
        result: ``capture_results["filesystem"]`` of the response: status, error, payload, counts.
    """

    ask: Ask
    text: str
    num_prompt_tokens: int
    num_answer_tokens: int
    result: dict[str, Any] = field(default_factory=dict)


async def send_all(url: str, model: str) -> list[Answer]:
    """Send every request at once through the OpenAI client and wait for all answers."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0) as client:
        return await asyncio.gather(*(send(client, model, ask) for ask in ASKS))


async def send(client: AsyncOpenAI, model: str, ask: Ask, steering: dict[str, Any] | None = None) -> Answer:
    """Send one chat request; capturing and steering are more fields of its body."""
    body = dict(steering or {})
    if ask.capture is not None:
        body |= {"capture": {"filesystem": {"request_id": ask.name, **ask.capture}}, "capture_wait": True}
    response = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": ask.question}],
        max_tokens=ask.max_tokens,
        temperature=0.0,
        extra_body=body or None,
    )
    assert response.usage is not None
    results = (response.model_extra or {}).get("capture_results") or {}
    return Answer(
        ask=ask,
        text=(response.choices[0].message.content or "").strip(),
        num_prompt_tokens=response.usage.prompt_tokens,
        num_answer_tokens=response.usage.completion_tokens,
        result=results.get("filesystem", {}),
    )
