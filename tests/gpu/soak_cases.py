"""The random requests of the soak test, and what is to be expected of them: no engine, no torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HOOKS = ("pre_attn", "post_attn", "post_mlp")
NUM_PREFIXES = 6
PREFIX = 96
"""Tokens that several prompts share: a few blocks of the KV cache."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request.

    Attributes:
        index: Its number, and its id.
        prompt: Token ids.
        max_tokens: Tokens that it generates.
        step: The engine's step before which it arrives.
        abort_step: The step before which it is aborted, if it still runs then; None: it is not.
        hooks: The sites that it captures, as the field takes them; empty: it captures nothing.
        positions: The selector.
        is_steered: Whether it brings vectors, of its own.
    """

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    step: int
    abort_step: int | None
    hooks: Mapping[str, Any]
    positions: Any
    is_steered: bool

    @property
    def num_rows(self) -> int:
        """Positions that are computed, if it runs to its end."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether it captures prompt positions before the last, which a cached prompt has no rows of."""
        return bool(self.hooks) and any(position < len(self.prompt) - 1 for position in self.expected_positions())

    def expected_positions(self) -> list[int]:
        """The positions that it captures: the slow and obvious reading of its selector."""
        num_prompt, every, selector = len(self.prompt), range(self.num_rows), self.positions
        if selector == "all":
            return list(every)
        if selector == "all_prompt":
            return list(range(num_prompt))
        if selector == "all_generated":
            return [position for position in every if position >= num_prompt]
        if selector == "last_prompt":
            return [num_prompt - 1]
        if isinstance(selector, list):
            wanted = {position if position >= 0 else position + num_prompt for position in selector}
            return [position for position in every if position in wanted]
        start = selector["start"] + (num_prompt if selector["start"] < 0 else 0)
        stop, step = selector.get("stop", self.num_rows), selector.get("step", 1)
        return [position for position in range(start, stop, step) if position < self.num_rows]

    def expected_sites(self, num_layers: int) -> set[str]:
        """The names of the sites that it captures."""
        names = {"final_norm"} if "final_norm" in self.hooks else set()
        for hook in self.hooks.keys() - {"final_norm"}:
            names |= {f"{layer % num_layers}.{hook}" for layer in self.hooks[hook]}
        return names


def random_jobs(
    seed: int,
    count: int,
    *,
    layers: Sequence[int],
    vocabulary: int,
    longest: int = 700,
    most_tokens: int = 48,
    per_step: float = 2.5,
    first_token: int = 1000,
    captured: float = 0.6,
) -> list[Job]:
    """`count` requests in the order of their arrival, `per_step` of them before each step on average.

    Args:
        seed: Equal seeds give equal jobs.
        count: How many.
        layers: Those that can be captured.
        vocabulary: Token ids are below it.
        longest: Tokens of the longest prompts.
        most_tokens: Generated tokens of the longest answers.
        per_step: Arrivals for each step of the engine.
        first_token: Token ids are at least this.
        captured: Share of the requests that capture.
    """
    rng = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(first_token, vocabulary) for _ in range(length))

    prefixes, jobs, when = [tokens(PREFIX) for _ in range(NUM_PREFIXES)], [], 0.0
    for index in range(count):
        when += rng.expovariate(per_step)
        length = rng.choice([1, rng.randint(2, 40), rng.randint(2, 200), rng.randint(2, longest)])
        prompt = (rng.choice(prefixes) if rng.random() < 0.4 else ()) + tokens(length)
        jobs.append(random_job(rng, index, int(when), prompt, layers, most_tokens, captured))
    return jobs


def random_job(
    rng: random.Random,
    index: int,
    step: int,
    prompt: tuple[int, ...],
    layers: Sequence[int],
    most_tokens: int,
    captured: float,
) -> Job:
    """A request for `prompt` that arrives before `step`."""
    max_tokens = rng.choice([1, 2, rng.randint(3, most_tokens), rng.randint(3, most_tokens)])
    is_aborted = max_tokens > 2 and rng.random() < 0.15
    return Job(
        index=index,
        prompt=prompt,
        max_tokens=max_tokens,
        step=step,
        abort_step=step + rng.randint(1, max_tokens - 1) if is_aborted else None,
        hooks=random_hooks(rng, layers) if rng.random() < captured else {},
        positions=random_positions(rng, len(prompt)),
        is_steered=rng.random() < 0.3,
    )


def random_hooks(rng: random.Random, layers: Sequence[int]) -> dict[str, Any]:
    """One to three hook points, each of some layers."""
    found: dict[str, Any] = {
        hook: rng.sample(list(layers), rng.randint(1, len(layers))) for hook in rng.sample(HOOKS, rng.randint(1, 3))
    }
    return {**found, "final_norm": "all"} if rng.random() < 0.3 else found


def random_positions(rng: random.Random, num_prompt: int) -> Any:
    """A selector of any form."""
    return rng.choice(
        [
            "all",
            "all_prompt",
            "all_generated",
            "last_prompt",
            sorted({rng.randrange(-num_prompt, num_prompt + 8) for _ in range(4)}),
            {"start": rng.randrange(-num_prompt, num_prompt)},
            {"start": 0, "stop": num_prompt + rng.randrange(1, 9), "step": rng.randrange(1, 5)},
        ]
    )
