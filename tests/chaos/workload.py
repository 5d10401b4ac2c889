"""The requests of the chaos run: what each sends, and what is to be expected of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headgate.capture.schema.sites import HookPoint
from headgate.steering.client import extra_body
from tests.chaos.model import chat_prompt, tokens_of
from tests.engine.steering_cases import Tiers, document, sites_of, vectors
from tests.engine.tiny_models import LAYERS
from tests.gpu.soak_cases import Job, random_hooks, random_positions

MODEL_NAME = "tiny"
MOST_TOKENS = 20
NUM_PROMPTS, LONGEST_PROMPT = 24, 120
MAKE_FILES = ("filesystem", "far")
HAVE_MOODS = ("moody", "far_moody", "trickle")
QUEUE_ONLY = ("spilling", "dropping")
INSTANCES = (*MAKE_FILES, *HAVE_MOODS, *QUEUE_ONLY, "inline")
LAYOUTS = ("request", "shards", "raw")
WORDS = ("calm", "river", "stone", "a", "quick", "cloud", "no", "yes", "number", "é", "night")

STEERED_SITES = (HookPoint.PRE_ATTN, HookPoint.POST_MLP)
PLACES = sites_of(*STEERED_SITES)
STEERING: Mapping[str, Tiers] = {
    "both": Tiers(base=vectors(PLACES, 1)),
    "prefill": Tiers(prefill=vectors(PLACES[:2], 2)),
    "decode": Tiers(decode=vectors(PLACES[1:4], 3)),
    "large": Tiers(base=vectors(PLACES[:1], 4, 30.0)),
    "all tiers": Tiers(base=vectors(PLACES[:3], 5), prefill=vectors(PLACES[2:], 6), decode=vectors(PLACES, 7)),
}
"""What requests steer with; the same vectors are also registered as modules, `module_name`."""


def module_name(key: str) -> str:
    """The module that holds `STEERING[key]`."""
    return key.replace(" ", "-")


def module_body(key: str) -> dict[str, Any]:
    """What registers it."""
    return extra_body(name=module_name(key), **document(STEERING[key]))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt; `messages` are those of a chat, or None.

    Attributes:
        tokens: Ids, those of the chat template included.
    """

    index: int
    tokens: tuple[int, ...]
    messages: list[dict[str, str]] | None = None


def make_prompts(seed: int) -> list[Prompt]:
    """Prompts that all requests share, so that the prefix cache is used; every third is a chat."""
    rng = random.Random(seed)
    found = []
    for index in range(NUM_PROMPTS):
        if index % 3 == 0:
            words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
            messages = [{"role": "system", "content": "Be kind."}] if rng.random() < 0.5 else []
            messages.append({"role": "user", "content": words})
            found.append(Prompt(index=index, tokens=tuple(tokens_of(chat_prompt(messages))), messages=messages))
        else:
            length = rng.choice([1, rng.randint(2, 30), rng.randint(33, LONGEST_PROMPT)])
            found.append(Prompt(index=index, tokens=tuple(rng.randrange(3, 500) for _ in range(length))))
    return found


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One request.

    Attributes:
        index: Its number.
        prompt: As given.
        max_tokens: It always generates as many.
        num_samples: ``n``; several are sampled at random, one is greedy.
        steering: Key of `STEERING`, or None.
        jobs: What it captures by consumer: sites and positions as the soak test knows them.
        moods: Of those consumers that have moods.
        stream: Whether the answer is streamed.
        waits: ``capture_wait``.
        vanish_after: The client goes away after so many chunks; None: it stays.
        path: Route.
        body: What is sent.
    """

    index: int
    prompt: Prompt
    max_tokens: int
    num_samples: int
    steering: str | None
    jobs: Mapping[str, Job]
    moods: Mapping[str, str]
    stream: bool
    waits: bool
    vanish_after: int | None
    path: str
    body: dict[str, Any] = field(repr=False)

    @property
    def key(self) -> str:
        """What its files are called."""
        return f"s{self.index}"


@dataclass(frozen=True)
class Mix:
    """How requests are chosen.

    Attributes:
        moods: Share of the captures by a consumer with moods that make it fail.
        vanishing: Share of the streams whose client goes away.
    """

    moods: float = 0.0
    vanishing: float = 0.0


CALM = Mix()
ROUGH = Mix(moods=0.12, vanishing=0.2)


class Workload:
    """An endless supply of requests; equal seeds give equal ones."""

    def __init__(self, seed: int) -> None:
        self.prompts = make_prompts(seed)
        self._rng = random.Random(seed + 1)
        self._numbers: Iterator[int] = iter(range(10**9))

    def next(self, mix: Mix) -> Shot:
        """The next request."""
        rng, index = self._rng, next(self._numbers)
        prompt = rng.choice(self.prompts)
        num_samples = rng.choice([2, 3]) if rng.random() < 0.15 else 1
        max_tokens = rng.choice([1, 2, rng.randint(3, MOST_TOKENS), rng.randint(3, MOST_TOKENS)])
        jobs = self._jobs(prompt, max_tokens, num_samples) if rng.random() < 0.65 else {}
        moods = {
            name: rng.choice(["raise", "raise", "slow", "hang"] if rng.random() < 0.2 else ["raise", "slow"])
            if rng.random() < mix.moods
            else "fine"
            for name in jobs
            if name in HAVE_MOODS
        }
        steering = rng.choice(sorted(STEERING)) if rng.random() < 0.35 else None
        stream = rng.random() < 0.35
        vanishes = stream and rng.random() < mix.vanishing
        waits = rng.random() < 0.7
        shot = Shot(
            index=index,
            prompt=prompt,
            max_tokens=max_tokens,
            num_samples=num_samples,
            steering=steering,
            jobs=jobs,
            moods=moods,
            stream=stream,
            waits=waits,
            vanish_after=rng.randint(0, max_tokens) if vanishes else None,
            path="/v1/completions" if prompt.messages is None else "/v1/chat/completions",
            body={},
        )
        shot.body.update(self._body(shot))
        return shot

    def _jobs(self, prompt: Prompt, max_tokens: int, num_samples: int) -> dict[str, Job]:
        rng, found = self._rng, {}
        for name in rng.sample(INSTANCES, rng.choice([1, 1, 2, 3])):
            # The tokens of samples are known from their rows alone if no answer comes: all of them are wanted then.
            positions = "all" if num_samples > 1 else random_positions(rng, len(prompt.tokens))
            job = Job(
                index=0,
                prompt=prompt.tokens,
                max_tokens=max_tokens,
                step=0,
                abort_step=None,
                hooks=random_hooks(rng, range(LAYERS)),
                positions=positions,
                is_steered=False,
            )
            if job.expected_positions():
                found[name] = job
        return found

    def _body(self, shot: Shot) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "max_tokens": shot.max_tokens,
            # No seed: with one, chunked prefill ends stock vLLM's engine on the CPU.
            "temperature": 0 if shot.num_samples == 1 else 1.0,
            "n": shot.num_samples,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": shot.stream,
        }
        if shot.prompt.messages is None:
            body["prompt"] = list(shot.prompt.tokens)
        else:
            body["messages"] = shot.prompt.messages
        if shot.steering is not None and rng.random() < 0.5:
            body["steering_name"] = module_name(shot.steering)
        elif shot.steering is not None:
            body |= extra_body(**STEERING[shot.steering].fields())
        if shot.jobs:
            body["capture"] = {name: self._spec(shot, name, job) for name, job in shot.jobs.items()}
            body["capture_wait"] = shot.waits
        return body

    def _spec(self, shot: Shot, name: str, job: Job) -> dict[str, Any]:
        spec: dict[str, Any] = {"hooks": dict(job.hooks), "positions": job.positions}
        if name in MAKE_FILES:
            spec |= {"request_id": shot.key, "layout": self._rng.choice(LAYOUTS), "tag": self._rng.choice("ab")}
        if name in HAVE_MOODS:
            spec["mood"] = shot.moods[name]
        return spec
