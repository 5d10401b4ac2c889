"""The loop closed: capture contrast prompts, make a vector of them, steer with it beside a plain request, ablate it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from openai import AsyncOpenAI

from examples.demo.requests import Answer, Ask, send
from headgate.capture.schema.sites import HookPoint, Site
from headgate.consumers.reader import StoredCapture, open_captures
from headgate.steering import ops
from headgate.steering.vectors.directions import mean_difference
from headgate.steering.vectors.phase_vectors import PhaseVectors

Float64Array = npt.NDArray[np.float64]

LAYER = 12
STRENGTHS = (-3.0, 0.0, 3.0)
"""0 is not steered at all: it is the neighbour in the same batch."""
QUESTION = "How was your day?"
FEELINGS = {"glad": "wonderful and full of joy", "sad": "terrible and full of sorrow"}
TOPICS = (
    *("the weather", "my morning", "a walk in the park", "my work", "the train ride", "dinner with friends"),
    *("a letter from home", "my garden", "the new house", "a long day", "the concert", "my exam"),
)
EVERY_LAYER = {"hooks": {"post_mlp": "all"}}
OP_SITES = dict.fromkeys(("post_attn", "post_mlp"), "all")
"""Where the server lets operations act."""
ABLATED = "ablated-"
"""Tag of the contrast prompts out of whose stream the vector's direction is taken, before the feeling."""


class SteeringDemoError(RuntimeError):
    """A request of the loop failed; the message names it."""


@dataclass(frozen=True, slots=True)
class Steered:
    """One answer, steered with one strength.

    Attributes:
        strength: Multiple of the vector; 0 is the unsteered neighbour.
        text: The answer.
        mood: ``[layers]``: where the answer's mean stream lies between the two sets of prompts, layer by layer: 0 is
            the mean of the sad ones, 1 that of the glad ones.
    """

    strength: float
    text: str
    mood: Float64Array


@dataclass(frozen=True, slots=True)
class Apart:
    """How far glad prompts lie from sad ones along the vector's direction, layer by layer.

    Attributes:
        plain: ``[layers]``.
        ablated: The same prompts with that direction ablated behind every attention and every MLP.
    """

    plain: Float64Array
    ablated: Float64Array


async def steer(url: str, model: str, captures: Path) -> tuple[PhaseVectors, list[Steered], Apart]:
    """Make the vector, answer one question at all strengths, and ablate its direction, all at once.

    Raises:
        SteeringDemoError: If a capture failed.
    """
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0) as client:
        await gather(send(client, model, ask) for ask in contrast_asks())
        means = {feeling: mean_rows(captures, f"contrast-{feeling}") for feeling in FEELINGS}
        glad, sad = ({Site(LAYER, HookPoint.POST_MLP): rows[LAYER]} for rows in means.values())
        vector = mean_difference(glad, sad)
        ablation = {"steering_ops": [ops.ablate(vector.float32()[0].tolist(), everywhere())]}
        sent = [send(client, model, ask, steered_by(vector, s)) for s, ask in steered_asks()]
        answers = await gather([*sent, *(send(client, model, ask, ablation) for ask in contrast_asks(ABLATED))])
    glad_LD, sad_LD = (np.stack([rows.mean(axis=0) for rows in feeling]) for feeling in means.values())
    found = {capture.request_id: capture for capture in open_captures(captures) if capture.tag == "steered"}
    steered = [
        Steered(strength, answer.text, mood(found[answer.ask.name], glad_LD, sad_LD))
        for (strength, _), answer in zip(steered_asks(), answers, strict=False)
    ]
    ablated = [mean_rows(captures, f"{ABLATED}{feeling}") for feeling in FEELINGS]
    return vector, steered, Apart(apart(list(means.values()), vector), apart(ablated, vector))


async def gather(sent: Iterable[Any]) -> list[Answer]:
    """All answers, in order; refuses one whose capture failed."""
    answers: list[Answer] = await asyncio.gather(*sent)
    failed = [answer for answer in answers if answer.result.get("status") != "ok"]
    if failed:
        raise SteeringDemoError(f"{failed[0].ask.name}: {failed[0].result or 'no capture_results in the response'}")
    return answers


def contrast_asks(kind: str = "contrast-") -> list[Ask]:
    """Prompts that differ in the feeling alone; wanted is their last token's stream. Tags begin with `kind`."""
    return [
        Ask(
            name=f"{kind}{feeling}-{number}",
            question=f"I feel {words} when I think about {topic}.",
            wants="post_mlp at the last prompt token",
            capture={**EVERY_LAYER, "positions": "last_prompt", "tag": f"{kind}{feeling}"},
            max_tokens=1,
        )
        for feeling, words in FEELINGS.items()
        for number, topic in enumerate(TOPICS)
    ]


def steered_asks() -> list[tuple[float, Ask]]:
    """The same question once for each strength; wanted is the stream of the answer."""
    capture = {**EVERY_LAYER, "positions": "all_generated", "tag": "steered"}
    names = (f"steered-{number}" for number in range(len(STRENGTHS)))
    asks = (Ask(name, QUESTION, "post_mlp, the answer", capture, max_tokens=32) for name in names)
    return list(zip(STRENGTHS, asks, strict=True))


def steered_by(vector: PhaseVectors, strength: float) -> dict[str, Any]:
    """What the body of a request needs to be steered; nothing, to stay as it is."""
    scaled = vector.scaled(strength)
    return {} if scaled is None else {"steering_vectors": scaled.packed(as_text=True)}


def mean_rows(captures: Path, tag: str) -> list[Float64Array]:
    """Per layer, ``[prompts, hidden]``: the last prompt token of every request of `tag`."""
    found = [capture for capture in open_captures(captures) if capture.tag == tag]
    sites = found[0].sites
    return [np.concatenate([capture.numpy(site) for capture in found]).astype(np.float64) for site in sites]


def everywhere() -> list[dict[str, Any]]:
    """`OP_SITES` as an operation names sites."""
    return [{"hook": hook, "layers": layers} for hook, layers in OP_SITES.items()]


def apart(feelings: list[list[Float64Array]], vector: PhaseVectors) -> Float64Array:
    """``[layers]``: how far the means of two feelings' rows lie apart along the vector's direction."""
    glad_LD, sad_LD = (np.stack([rows.mean(axis=0) for rows in layers]) for layers in feelings)
    direction = vector.float32()[0].astype(np.float64)
    along: Float64Array = (glad_LD - sad_LD) @ (direction / np.linalg.norm(direction))
    return along


def mood(answer: StoredCapture, glad_LD: Float64Array, sad_LD: Float64Array) -> Float64Array:
    """`Steered.mood` of a captured answer."""
    stream_LD = np.stack([answer.numpy(site).astype(np.float64).mean(axis=0) for site in answer.sites])
    way_LD = glad_LD - sad_LD
    along: Float64Array = ((stream_LD - sad_LD) * way_LD).sum(axis=1) / (way_LD**2).sum(axis=1)
    return along
