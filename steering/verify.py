"""Steering's part of ``headgate verify``: steered tokens change as they must, and no others do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headgate.capture.monitoring.verify_checks import (
    PLAIN,
    SERVED,
    Float32Rows,
    RequestAnswer,
    Runs,
    Scene,
    SceneRequest,
    Stage,
    Status,
    Verdict,
    difference,
    equality,
    noise_of,
    step_difference,
)
from headgate.capture.schema.sites import HookPoint, Site

STEERED = "steered"
SITES_IDLE, SITES_AT_PROMPTS, SITES_AT_ANSWERS = "sites idle", "sites at prompts", "sites at answers"

MATE, BOTH, DECODE, PREFILL, ZERO = "mate", "both", "decode", "prefill", "zero"
"""Roles of the requests of `STEERED`: not steered; steered in both phases; in one phase; by a vector of scale 0."""
ROLES = (MATE, BOTH, MATE, DECODE, MATE, PREFILL, MATE, ZERO)
FIELDS = {
    BOTH: "steering_vectors",
    DECODE: "decode_steering_vectors",
    PREFILL: "prefill_steering_vectors",
    ZERO: "steering_vectors",
}

STRENGTH = 64.0
SITE_STRENGTH = 1000.0
"""Sizes of a vector's values; the second changes every stream."""
SITE_PROMPT = 4
SITE_TOKENS = 2

MAX_MISSED = 0.05
"""Largest deviation of the gain of a stream from the vector, relative to the vector's length."""
ROUNDING = {"float32": 1e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""Largest change by rounding, relative to a row's length, by element type of the model."""


class SteeringChecks:
    """Implements `headgate.capture.monitoring.verify_checks.CheckPart`."""

    consumers = ()

    def section(self, given: Mapping[str, Any], *, counts: bool) -> dict[str, Any]:
        """Return the user's section, with the counter of runs on or off."""
        return {**given, "fire_counter": counts}

    def scenes(self, stage: Stage) -> Iterator[Scene]:
        """Yield each site in each phase, and all kinds of requests in one batch; nothing in eager mode."""
        if stage.earlier is not None:
            return
        steerable: Sequence[Site] = stage.llm.steering.steerable.sites
        yield from _sites_scenes(stage, steerable)
        site = steered_site(steerable, stage.sites)
        requests = [
            SceneRequest(
                label=f"{role} {site.name}",
                prompt=plain.prompt,
                max_tokens=plain.max_tokens,
                fields=_fields(role, site, vector(index, stage.width(site))),
                captures=True,
            )
            for index, (plain, role) in enumerate(zip(stage.plain, cycle(ROLES), strict=False))
        ]
        yield Scene(name=STEERED, requests=requests)

    def judge(self, runs: Runs) -> Iterator[Verdict]:
        """Yield the verdicts: on each site, on neighbours, on changed and unchanged answers, on each token's vector."""
        served = runs[SERVED][0]
        scenes, noise = served.scenes, noise_of([served])
        for phase, name, step in (("prompts", SITES_AT_PROMPTS, 0), ("answers", SITES_AT_ANSWERS, 1)):
            yield judge_sites(f"every site steers {phase}", scenes[SITES_IDLE], scenes[name], step=step, noise=noise)
        plain, steered = scenes[PLAIN], scenes[STEERED]
        yield judge_mates(plain, steered, noise)
        yield judge_unchanged(plain, steered, noise)
        yield judge_changed(plain, steered, noise)
        yield judge_tokens(steered, served.facts.dtype)


def steered_site(steerable: Sequence[Site], captured: Sequence[Site]) -> Site:
    """Return the site of `STEERED`: a captured one whose stream is captured again right after, if there is one."""
    for site in captured:
        if site in steerable and _next(site) in captured:
            return site
    return steerable[0]


def _next(site: Site) -> Site | None:
    """Return the site where the same stream is seen next, with nothing in between; None if there is none."""
    return Site(site.layer + 1, HookPoint.PRE_ATTN) if site.hook is HookPoint.POST_MLP else None


def vector(index: int, width: int, strength: float = STRENGTH) -> Float32Rows:
    """Return the vector ``[width]`` of one request; another one for each index."""
    return np.random.default_rng(index).normal(0, strength, width).astype(np.float32)


def _fields(role: str, site: Site, values: Float32Rows) -> dict[str, Any]:
    if role == MATE:
        return {}
    entry: Any = {"vector": values, "scale": 0.0} if role == ZERO else values
    return {FIELDS[role]: _nested(site, entry)}


def _nested(site: Site, entry: Any) -> dict[str, Any]:
    return {site.hook.value: entry if site.hook is HookPoint.FINAL_NORM else {site.layer: entry}}


def _sites_scenes(stage: Stage, steerable: Sequence[Site]) -> Iterator[Scene]:
    """Yield scenes of one request for each site, steered there alone; too short for the prefix cache."""
    tokens = list(chain.from_iterable(request.prompt for request in stage.plain))
    for name, field in (
        (SITES_IDLE, None),
        (SITES_AT_PROMPTS, FIELDS[PREFILL]),
        (SITES_AT_ANSWERS, FIELDS[DECODE]),
    ):
        requests = []
        for index, site in enumerate(steerable):
            values = vector(index, stage.width(site), SITE_STRENGTH)
            prompt = list(islice(cycle(tokens), SITE_PROMPT * index, SITE_PROMPT * (index + 1)))
            fields = {field: _nested(site, values)} if field else {}
            requests.append(SceneRequest(label=site.name, prompt=prompt, max_tokens=SITE_TOKENS, fields=fields))
        yield Scene(name=name, requests=requests)


def judge_sites(
    check: str, idle: Sequence[RequestAnswer], steered: Sequence[RequestAnswer], *, step: int, noise: float
) -> Verdict:
    """Judge requests that are each steered at one site: the `step`-th token must change, and no earlier one.

    One vector that is added to all keys of a prompt changes only rounding there, since attention compares them with
    each other: the token after the first must change, whose own key is another.

    Args:
        check: The statement that is checked.
        idle: Answers without steering.
        steered: Answers to the same requests with steering.
        step: The first token that the vectors act on.
        noise: Difference of logprobs without any change.
    """
    silent, early, wrong = [], [], 0
    for before, after in zip(idle, steered, strict=True):
        are_all_keys = step == 0 and Site.parse(before.label).hook is HookPoint.K
        at, start = int(are_all_keys) or step, difference([_cut(before, step)], [_cut(after, step)])
        if start.largest > 2 * noise:
            early.append(before.label)
        elif difference([_cut(before, at)], [_cut(after, at)]).num_other == 0 and not (
            step_difference(before.logprobs[at], after.logprobs[at]) > 2 * noise
        ):
            silent.append(before.label)
        wrong += before.prompt != after.prompt
    if silent or early or wrong or not idle:
        parts = (("no effect at", silent), ("acts on tokens before it should at", early))
        text = "; ".join(f"{what} {_few(sites)}" for what, sites in parts if sites)
        return Verdict(check, Status.FAILED, text or "no site was steered")
    return Verdict(check, Status.PASSED, f"{len(idle)} sites, each with a vector of its own")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _cut(answer: RequestAnswer, num_tokens: int) -> RequestAnswer:
    """Return the first tokens of an answer."""
    cut = {"tokens": answer.tokens[:num_tokens], "logprobs": answer.logprobs[:num_tokens]}
    return msgspec.structs.replace(answer, **cut)


class _Pair(NamedTuple):
    plain: RequestAnswer
    steered: RequestAnswer


def _role(answer: RequestAnswer) -> str:
    return answer.label.split()[0]


def _pairs(plain: Sequence[RequestAnswer], steered: Sequence[RequestAnswer], roles: Iterable[str]) -> list[_Pair]:
    return [_Pair(a, b) for a, b in zip(plain, steered, strict=True) if _role(b) in roles]


def judge_mates(plain: Sequence[RequestAnswer], steered: Sequence[RequestAnswer], noise: float) -> Verdict:
    """Judge unsteered requests: their answers must be those of a batch without steered requests."""
    mates = _pairs(plain, steered, (MATE,))
    found = difference([pair.plain for pair in mates], [pair.steered for pair in mates])
    return equality("batch-mates of steered requests keep their answers", found, noise=noise)


def judge_unchanged(plain: Sequence[RequestAnswer], steered: Sequence[RequestAnswer], noise: float) -> Verdict:
    """Judge that scale 0 changes nothing, and that steering of the answer leaves the first token alone."""
    pairs = _pairs(plain, steered, (ZERO,))
    pairs += [_Pair(_cut(a, 1), _cut(b, 1)) for a, b in _pairs(plain, steered, (DECODE,))]
    found = difference([pair.plain for pair in pairs], [pair.steered for pair in pairs])
    return equality("scale 0, and an answer's vector at the first token, change nothing", found, noise=noise)


def judge_changed(plain: Sequence[RequestAnswer], steered: Sequence[RequestAnswer], noise: float) -> Verdict:
    """Judge that every steered request gets another answer than without steering."""
    check = "steered requests get other answers"
    pairs = _pairs(plain, steered, (BOTH, DECODE, PREFILL))
    same = [pair.steered.label for pair in pairs if not difference([pair.plain], [pair.steered]).largest > 2 * noise]
    if same or not pairs:
        return Verdict(check, Status.FAILED, f"{len(same)} of {len(pairs)} got the same: {_few(same)}")
    others = sum(pair.plain.tokens != pair.steered.tokens for pair in pairs)
    return Verdict(check, Status.PASSED, f"{len(pairs)} requests got other logprobs, {others} of them other tokens")


def judge_tokens(steered: Sequence[RequestAnswer], dtype: str) -> Verdict:
    """Judge that from one site to the next the stream gains each token's vector, and nothing where there is none."""
    check = "every token gets its own vector, and no other"
    site = Site.parse(steered[0].label.split()[1])
    after = _next(site)
    if after is None or not all(a.rows and {site.name, after.name} <= a.rows.values.keys() for a in steered):
        needed = "open post_mlp of one layer and pre_attn of the next for capture to see it"
        return Verdict(
            check, Status.SKIPPED, f"steered at {site.name}, where the stream is not seen before and after; {needed}"
        )
    num_steered, num_others, worst = 0, 0, 0.0
    for index, answer in enumerate(steered):
        gain = _gain(index, answer, (site.name, after.name), dtype)
        if gain.problem is not None:
            return Verdict(check, Status.FAILED, f"request {index} ({_role(answer)}): {gain.problem}")
        worst = max(worst, gain.worst)
        num_steered, num_others = num_steered + gain.num_steered, num_others + gain.num_others
    text = f"{num_steered} steered tokens, off by {worst:.1e} of the vector at most; {num_others} others"
    return Verdict(check, Status.PASSED, text)


class _Gain(NamedTuple):
    num_steered: int = 0
    num_others: int = 0
    worst: float = 0.0
    problem: str | None = None


def _gain(index: int, answer: RequestAnswer, sites: tuple[str, str], dtype: str) -> _Gain:
    """Compare the gain of one request's stream between two sites with the vectors of its tokens."""
    assert answer.rows is not None  # noqa: S101  (judge_tokens has looked)
    before, behind = (answer.rows.at(site) for site in sites)
    wanted = _wanted(answer, vector(index, before.shape[1]))
    if not before.shape == behind.shape == wanted.shape:
        return _Gain(problem=f"{len(before)} and {len(behind)} rows of {len(wanted)} tokens")
    missed, length = np.linalg.norm(behind - before - wanted, axis=1), np.linalg.norm(wanted, axis=1)
    is_wrong = ~(missed <= MAX_MISSED * length + ROUNDING[dtype] * (np.linalg.norm(before, axis=1) + length))
    if is_wrong.any():
        at, num_wrong = int(is_wrong.argmax()), int(is_wrong.sum())
        text = f"off by {missed[at]:.3g} at position {at}, where its vector is {length[at]:.3g} long"
        return _Gain(problem=f"{text}; {num_wrong} of {len(wanted)} tokens are wrong")
    is_steered = length > 0
    worst = float((missed[is_steered] / length[is_steered]).max(initial=0.0))
    return _Gain(int(is_steered.sum()), int((~is_steered).sum()), worst)


def _wanted(answer: RequestAnswer, values: Float32Rows) -> Float32Rows:
    """Return the vectors ``[rows, hidden]`` that each token's stream is to gain."""
    num_prompt = len(answer.prompt)
    wanted = np.zeros((num_prompt + len(answer.tokens) - 1, len(values)), np.float32)
    role = _role(answer)
    if role in (BOTH, PREFILL):
        wanted[:num_prompt] = values
    if role in (BOTH, DECODE):
        wanted[num_prompt:] = values
    return wanted
