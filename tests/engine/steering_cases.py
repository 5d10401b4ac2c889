"""What requests steer with in the tests on real engines, as a client says it and as Hugging Face is told it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.engine.hf_reference import ANATOMIES, Reference, Steering, relative_error
from tests.engine.tiny_models import HIDDEN, LAYERS, VOCABULARY

MAX_ERROR = 1e-4
Vectors = Mapping[Site, Tensor]


def vectors(sites: Iterable[Site], seed: int, scale: float = 1.0, hidden: int = HIDDEN) -> dict[Site, Tensor]:
    """Another random vector at each of `sites`, fp32 ``[hidden]``; a value is `scale` in size."""
    generator = torch.Generator().manual_seed(seed)
    return {site: scale * torch.randn(hidden, generator=generator) for site in sites}


def sites_of(*hooks: HookPoint, layers: Iterable[int] = range(LAYERS)) -> list[Site]:
    """The sites of `hooks` at every one of `layers`."""
    chosen = list(layers)
    inner = [Site(layer, hook) for hook in hooks for layer in chosen if hook is not HookPoint.FINAL_NORM]
    return inner + ([FINAL_NORM_SITE] if HookPoint.FINAL_NORM in hooks else [])


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """What one request steers with.

    Attributes:
        base: At all positions.
        prefill: Added at the positions of the prompt.
        decode: Added at generated positions.
        scale: Of all of them.
    """

    base: Vectors = field(default_factory=dict)
    prefill: Vectors = field(default_factory=dict)
    decode: Vectors = field(default_factory=dict)
    scale: float = 1.0

    def fields(self) -> dict[str, Any]:
        """The request's fields, in a form of their own each: lists, arrays with a scale, tensors."""
        found: dict[str, Any] = {}
        if self.base:
            found["steering_vectors"] = _nested(
                {site: {"vector": vector.tolist(), "scale": self.scale} for site, vector in self.base.items()}
            )
        if self.prefill:
            found["prefill_steering_vectors"] = _nested(
                {site: {"vector": vector.numpy(), "scale": self.scale} for site, vector in self.prefill.items()}
            )
        if self.decode:
            found["decode_steering_vectors"] = _nested(
                {site: self.scale * vector for site, vector in self.decode.items()}
            )
        return found

    def steering(self) -> Steering:
        """What Hugging Face adds."""
        return Steering(
            prefill=added([(self.base, self.scale), (self.prefill, self.scale)]),
            decode=added([(self.base, self.scale), (self.decode, self.scale)]),
        )


def document(tiers: Tiers) -> dict[str, Any]:
    """`tiers` as a module, or the global vectors, are written: ``vectors``, ``prefill_vectors``, ``decode_vectors``."""
    return {name.replace("steering_vectors", "vectors"): value for name, value in tiers.fields().items()}


def added(parts: Iterable[tuple[Vectors, float]]) -> dict[Site, Tensor]:
    """The sum of scaled vectors, site by site."""
    total: dict[Site, Tensor] = {}
    for part, scale in parts:
        for site, vector in part.items():
            total[site] = total.get(site, torch.zeros_like(vector)) + scale * vector
    return total


def _nested(values: Mapping[Site, Any]) -> dict[str, Any]:
    hooks: dict[str, Any] = {}
    for (layer, hook), value in values.items():
        if hook is HookPoint.FINAL_NORM:
            hooks[hook.value] = value
        else:
            hooks.setdefault(hook.value, {})[layer] = value
    return hooks


@dataclass(frozen=True, slots=True)
class Case:
    """A request by name.

    Attributes:
        name: For failures.
        tiers: What it steers with; nothing: a neighbour.
        scores_prompt: Whether it asks for the logprobs of its prompt too.
    """

    name: str
    tiers: Tiers = field(default_factory=Tiers)
    scores_prompt: bool = False


def hooks_of(family: str) -> list[HookPoint]:
    """Hook points of a family of tiny models, in the order of their names."""
    missing = {HookPoint.POST_ATTN} if ANATOMIES[family].mid is None else set()
    return sorted(set(HookPoint) - missing)


def cases_of(family: str) -> list[Case]:
    """One request for each hook point and each kind of steering, unsteered neighbours among them."""
    hooks = hooks_of(family)
    cases = [
        Case(
            hook.value,
            Tiers(prefill=vectors(sites_of(hook), 10 + at), decode=vectors(sites_of(hook), 30 + at)),
            scores_prompt=hook is HookPoint.FINAL_NORM,
        )
        for at, hook in enumerate(hooks)
    ]
    stream, everywhere = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_MLP), sites_of(*hooks)
    usual = Tiers(base=vectors(stream, 50))
    everything = Tiers(
        base=vectors(everywhere, 51, 0.5),
        prefill=vectors(everywhere, 52, 0.5),
        decode=vectors(everywhere, 53, 0.5),
    )
    return [
        *cases,
        Case("neighbour"),
        Case("everything", everything),
        Case("prefill only", Tiers(prefill=vectors(stream, 54))),
        Case("decode only", Tiers(decode=vectors(stream, 55)), scores_prompt=True),
        Case("negative", replace(usual, scale=-1.0)),
        Case("scale 0", replace(usual, scale=0.0)),
        Case("large", replace(usual, scale=300.0)),
        Case("last neighbour"),
    ]


def logprobs_of(steps: Sequence[Any], vocabulary: int = VOCABULARY) -> Tensor:
    """``[len(steps), vocabulary]`` of a request that asked for all; nan where there is none."""
    found = torch.full((len(steps), vocabulary), torch.nan)
    for row, step in zip(found, steps, strict=True):
        row[list(step)] = torch.tensor([entry.logprob for entry in step.values()])
    return found


def check_logprobs(output: Any, reference: Reference) -> None:
    """Tokens exactly, and the logprobs of every token of the vocabulary, against Hugging Face's logits.

    Args:
        output: A finished greedy request with ``logprobs=-1``.
        reference: Hugging Face on its tokens, with the same vectors.
    """
    tokens, num_prompt = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
    expected = reference.logits.float().log_softmax(-1)
    assert reference.next_tokens[num_prompt - 1 :].tolist() == tokens
    error = relative_error(logprobs_of(output.outputs[0].logprobs), expected[num_prompt - 1 :])
    assert error <= MAX_ERROR, f"logprobs of the answer: relative error {error:.2g}"
    if output.prompt_logprobs and num_prompt > 1:
        error = relative_error(logprobs_of(output.prompt_logprobs[1:]), expected[: num_prompt - 1])
        assert error <= MAX_ERROR, f"logprobs of the prompt: relative error {error:.2g}"
