"""A gate: one question in two moods, and a vector that turns on for the angry one alone, within one batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from examples.demo.requests import Ask, send
from examples.demo.steer import EVERY_LAYER, Float64Array, gather, mean_rows
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering import probes
from headgate.steering.client import Answer, AsyncClient, Choice
from headgate.steering.vectors.directions import mean_difference
from headgate.steering.vectors.phase_vectors import PhaseVectors

LAYER = 12
"""Where the gate writes."""
PROBE_LAYER = 21
"""Where the probe reads: there the last token of an angry prompt lies furthest from that of a calm one."""
SCALE = 2.0
MOODS = {
    "angry": "I am furious about {}! This is outrageous, and I hate all of you!",
    "calm": "I am fine with {}. All is well, and I thank all of you.",
}
TOPICS = ("my parcel", "my bill", "the train", "my order", "my new phone", "the hotel room", "my refund", "the food")
QUESTIONS = {
    "angry": "I hate this! Nothing ever works! What is rain?",
    "calm": "I like this! Everything always works! What is rain?",
}
PLAIN = "Name a colour."
GATE, THRESHOLD, MAX_TOKENS = "calm-down", 0.0, 32


@dataclass(frozen=True, slots=True)
class Gated:
    """The answers of one batch, with what the gate did.

    Attributes:
        answers: By mood: text and trace of the gated answer.
        tokens: By mood: of the prompt and of the gated answer.
        begins: By mood: position of the first token of the answer.
        ungated: The answer to the angry question without the gate.
        is_plain_untouched: Whether the plain neighbour has the tokens that it had before, without the others.
    """

    answers: dict[str, Choice]
    tokens: dict[str, list[int]]
    begins: dict[str, int]
    ungated: str
    is_plain_untouched: bool

    def trace(self, mood: str) -> dict[str, Any]:
        """The trace of an answer."""
        found = self.answers[mood].steering_trace
        assert found is not None
        return found

    def applied(self, mood: str) -> list[float]:
        """The strength that was written at each row of `trace`."""
        applied: list[float] = self.trace(mood)["gates"][GATE]["applied"]
        return applied

    def scores(self, mood: str) -> list[float]:
        """The score of each row of `trace`; the probe comes with the gate and is called as it is."""
        scores: list[float] = self.trace(mood)["scores"][GATE]
        return scores

    def decisive_score(self, mood: str) -> float:
        """The score of the prompt's last row."""
        row: int = self.trace(mood)["positions"].index(self.begins[mood] - 1)
        return self.scores(mood)[row]


async def ask_in_two_moods(url: str, model: str, captures: Path) -> Gated:
    """Make probe and vector of captured prompts; ask, gated, in one batch.

    Raises:
        SteeringDemoError: If a capture failed.
    """
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0) as openai:
        await gather(send(openai, model, ask) for ask in mood_asks())
    angry, calm = (mean_rows(captures, f"mood-{mood}") for mood in MOODS)
    site = Site(LAYER, HookPoint.POST_MLP)
    vector = mean_difference({site: calm[LAYER]}, {site: angry[LAYER]}).scaled(SCALE)
    assert vector is not None
    probe = fit_probe(angry[PROBE_LAYER], calm[PROBE_LAYER])
    gate = {"steering_gates": [calm_down(probe, vector)], "return_steering_trace": True}
    async with AsyncClient(url, model=model) as client:
        before, ungated = await asyncio.gather(ask(client, PLAIN), ask(client, QUESTIONS["angry"]))
        *gated, after = await asyncio.gather(
            *(ask(client, question, **gate) for question in QUESTIONS.values()), ask(client, PLAIN)
        )
    prompts = {mood: answer.raw["prompt_token_ids"] for mood, answer in zip(MOODS, gated, strict=True)}
    choices = {mood: answer.choices[0] for mood, answer in zip(MOODS, gated, strict=True)}
    return Gated(
        answers=choices,
        tokens={mood: [*prompts[mood], *choices[mood].raw["token_ids"]] for mood in MOODS},
        begins={mood: len(prompts[mood]) for mood in MOODS},
        ungated=ungated.text,
        is_plain_untouched=before.choices[0].raw["token_ids"] == after.choices[0].raw["token_ids"],
    )


def mood_asks() -> list[Ask]:
    """Prompts of both moods; wanted is their last token's stream."""
    return [
        Ask(
            name=f"mood-{mood}-{number}",
            question=text.format(topic),
            wants="post_mlp at the last prompt token",
            capture={**EVERY_LAYER, "positions": "last_prompt", "tag": f"mood-{mood}"},
            max_tokens=1,
        )
        for mood, text in MOODS.items()
        for number, topic in enumerate(TOPICS)
    ]


def fit_probe(angry: Float64Array, calm: Float64Array) -> probes.Probe:
    """A probe of anger, from rows ``[prompts, hidden]``: 0 is halfway between the moods."""
    labels = ["angry"] * len(angry) + ["calm"] * len(calm)
    rows = np.concatenate([angry, calm]).astype(np.float32)
    return probes.fit(rows, labels, at=f"{PROBE_LAYER}.post_mlp", positive="angry")


def calm_down(probe: probes.Probe, vector: PhaseVectors) -> dict[str, Any]:
    """The gate: its condition brings the probe along, since the demo's server has no routes to register one."""
    reads = {"at": probe.site.name, "weight": probe.weight[0], "bias": float(probe.biases[0])}
    return {
        "name": GATE,
        "when": {"probe": reads, "above": THRESHOLD, "pool": "last_prompt"},
        "then": {"vectors": vector},
        "scope": "rest_of_request",
    }


async def ask(client: AsyncClient, question: str, **fields: Any) -> Answer:
    """Ask one question; the answer has the token ids of prompt and answer."""
    return await client.chat(question, max_tokens=MAX_TOKENS, temperature=0.0, return_token_ids=True, **fields)
