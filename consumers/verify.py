"""The consumers' part of ``headgate verify``: what lenses, attention patterns and features say of rows must agree.

Consumers that the user names by ``--capture-consumers`` are checked, and only these: each in two ways that share no
more than the rows, or against the model's own answer. One engine is enough for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from headgate.capture.monitoring.verify_checks import (
    PLAIN,
    SERVED,
    ConsumerReading,
    RequestAnswer,
    Runs,
    Scene,
    Stage,
    Status,
    Verdict,
    difference,
    equality,
    noise_of,
    step_difference,
)
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.sites import HookPoint, Site
from headgate.consumers.attention import fetch_patterns

READ, READ_AGAIN, NOT_READ = "read", "read again", "not read"
TOP, GIVEN = 5, 8
"""Strongest tokens, keys and features that are asked for; features that are asked for by their ids, from 0 on."""
ROUNDING = {"float32": 1e-3, "float16": 0.04, "bfloat16": 0.25}
"""How far logits of a dtype may be from those of a lens, which are float32."""
MAX_ERROR = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
"""How far probabilities, and activations relative to the largest, of the same rows may be apart."""


class ReadingChecks:
    """Implements `headgate.capture.monitoring.verify_checks.CheckPart`."""

    @property
    def consumers(self) -> Sequence[str]:
        """The consumers that have a check."""
        return tuple(CHECKS)

    def section(self, given: Mapping[str, Any], *, counts: bool) -> dict[str, Any]:
        """Return the section of the user: consumers have none."""
        return dict(given)

    def scenes(self, stage: Stage) -> Iterator[Scene]:
        """The plain requests, twice, with everything that is read of them in one way and in another."""
        if stage.kind != SERVED:
            return
        found = [(each, _asked(each, stage)) for each in stage.consumers]
        asked = {each.instance: both for each, both in found if not isinstance(both, str)}
        unchecked = {_check(each.instance, each.name): why for each, why in found if isinstance(why, str)}
        for place, name in enumerate((READ, READ_AGAIN)):
            capture = {instance: both[place] for instance, both in asked.items() if place < len(both)}
            if capture:
                requests = [replace(request, fields={"capture": capture}) for request in stage.plain]
                yield Scene(name=name, requests=requests, unchecked=unchecked)
        if unchecked and not asked:
            yield Scene(name=NOT_READ, requests=stage.plain[:1], unchecked=unchecked)

    def judge(self, runs: Runs) -> Iterator[Verdict]:
        """Neighbours, and each consumer that was asked."""
        served = runs[SERVED][0]
        for check, why in served.unchecked.items():
            yield Verdict(check, Status.SKIPPED, why)
        answers = served.scenes.get(READ)
        if answers is None:
            return
        again = served.scenes.get(READ_AGAIN, answers)
        yield equality(
            "lenses, patterns and features change no answer",
            difference(served.scenes[PLAIN], answers),
            noise=noise_of([served]),
        )
        kinds = {name: each.consumer for one in (*answers, *again) for name, each in one.readings.items()}
        for instance, kind in kinds.items():
            problem_of = CHECKS[kind][1]
            problems = (
                _problem(instance, problem_of, one, one if kind == "lens" else other, served.facts.dtype)
                for one, other in zip(answers, again, strict=True)
            )
            found = next((f"request {at}: {text}" for at, text in enumerate(problems) if text), None)
            status = Status.PASSED if found is None else Status.FAILED
            yield Verdict(_check(instance, kind), status, found or f"{len(answers)} requests")


def _check(instance: str, kind: str) -> str:
    return f"{instance}: {CHECKS[kind][0]}"


def _asked(consumer: CaptureConsumerSpec, stage: Stage) -> tuple[dict[str, Any], ...] | str:
    """Return what a consumer is asked in each of the two scenes, or in the first alone; or why it is not asked."""
    if consumer.name == "lens":
        top = min(TOP, consumer.params.get("max_top", TOP))
        return ({"layers": [-1], "top": top, "positions": "all_generated"},)
    if consumer.name == "attention":
        layers = [
            site.layer
            for site in stage.sites
            if site.hook is HookPoint.K and Site(site.layer, HookPoint.Q) in stage.sites
        ]
        if not layers:
            return "q and k of no layer are both captured: add them to --capture-sites"
        return {"layers": layers[:1]}, {"layers": layers[:1], "top": TOP}
    if (top := consumer.params.get("top", GIVEN)) < GIVEN:
        return f"its parameter top is {top}: {GIVEN} features by their ids are needed"
    alike = {"sae": next(iter(consumer.params["saes"])), "positions": "all_prompt"}
    return {**alike, "top": TOP}, {**alike, "features": list(range(GIVEN))}


Problem = Callable[[RequestAnswer, Any, Any, str], str | None]


def _problem(instance: str, problem_of: Problem, one: RequestAnswer, other: RequestAnswer, dtype: str) -> str | None:
    readings: list[ConsumerReading] = []
    for answer in (one, other):
        reading = answer.readings.get(instance)
        if reading is None or reading.status != "ok":
            return "no result" if reading is None else f"{reading.status}: {reading.error}"
        readings.append(reading)
    return problem_of(one, readings[0].payload, readings[1].payload, dtype)


def lens_problem(answer: RequestAnswer, payload: Any, _: Any, dtype: str) -> str | None:
    """The logit lens after the last layer reads the logprobs that the model samples from."""
    first = len(answer.prompt)
    positions = list(range(first, first + len(answer.tokens) - 1))
    if payload["positions"] != positions:
        return f"positions {payload['positions']}; expected {positions}"
    (read,) = payload["layers"].values()
    for step, own in enumerate(answer.logprobs[1:]):
        found = dict(zip(read["ids"][step], read["logprobs"][step], strict=True))
        if not step_difference(own, found) <= ROUNDING[dtype]:
            return f"position {positions[step]}: {found}; the model's own are {own}"
    return None


def attention_problem(_: RequestAnswer, payload: Any, largest: Any, dtype: str) -> str | None:
    """Rows sum to 1, and the largest keys are those of the whole rows."""
    whole, top = fetch_patterns(payload), fetch_patterns(largest)
    if not whole:
        return "there are no patterns"
    for name in whole:
        weights, keys, values = whole[name].double(), top[f"{name}.keys"].long(), top[f"{name}.values"].double()
        if not float((weights.sum(dim=-1) - 1).abs().max()) <= MAX_ERROR[dtype]:
            return f"{name}: rows sum to {weights.sum(dim=-1).flatten().tolist()}"
        count = min(TOP, weights.shape[-1])
        expected = weights.topk(count, dim=-1).values
        own = weights.gather(-1, keys[..., :count].clamp(min=0))
        for found in (values[..., :count], own):
            if not torch.allclose(found, expected, rtol=0, atol=MAX_ERROR[dtype]):
                return f"{name}: the largest are {found.flatten().tolist()}; expected {expected.flatten().tolist()}"
    return None


def features_problem(_: RequestAnswer, payload: Any, given: Any, dtype: str) -> str | None:
    """Features that are asked for by ids have the activations of the strongest, or smaller ones than these."""
    if payload["positions"] != given["positions"] or not payload["positions"]:
        return f"positions {payload['positions']}, and {given['positions']}"
    rows = zip(payload["ids"], payload["values"], given["ids"], given["values"], strict=True)
    for position, (ids, values, asked, found) in zip(payload["positions"], rows, strict=True):
        strongest = dict(zip(ids, values, strict=True))
        allowed = MAX_ERROR[dtype] * max(values, default=1.0)
        if None in (*values, *found):
            return f"position {position}: a row that is not finite"
        least = min(values) if len(values) == TOP else 0.0
        for feature, value in zip(asked, found, strict=True):
            wanted = strongest.get(feature, min(value, least))
            if not abs(value - wanted) <= allowed:
                return f"position {position}: feature {feature} is {value}; the strongest are {strongest}"
    return None


CHECKS: Mapping[str, tuple[str, Problem]] = {
    "attention": ("patterns sum to 1, and the largest keys are theirs", attention_problem),
    "features": ("features have the activations of the strongest", features_problem),
    "lens": ("the last layer's tokens are the model's own", lens_problem),
}
