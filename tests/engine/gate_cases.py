"""Requests with gates for the tests on real engines, with thresholds that their own rows cross."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.engine.gate_semantics import Effect, Names, additions, site_of
from tests.engine.hf_reference import Steering
from tests.engine.steering_cases import Case, Tiers, sites_of, vectors
from tests.engine.tiny_models import HIDDEN, VOCABULARY
from tests.fakes.saes import TinySae

PROMPTS = [
    [1, *((7 * i) % (VOCABULARY - 5) + 5 for i in range(38))],
    [1, *((11 * i) % (VOCABULARY - 5) + 5 for i in range(20))],
    [9],
]
LONG, SHORT, ONE = range(3)
NUM_OUTPUT = 8
SAE = TinySae(architecture="jumprelu", norm="layer_norm", width=HIDDEN, seed=3)
SAE_SITE = Site(1, HookPoint.POST_MLP)
MODULE = {
    "vectors": {"mlp_out": {1: vectors(["m"], 301, 0.4)["m"].tolist()}},
    "prefill_vectors": {"post_mlp": {2: vectors(["m"], 302, 0.4)["m"].tolist()}},
    "decode_vectors": {
        "post_mlp": {2: vectors(["m"], 303, 0.6)["m"].tolist(), 0: vectors(["m"], 304, 0.5)["m"].tolist()}
    },
}
EARLY, LATE = ("0.post_mlp", "1.pre_attn", "0.attn_in"), ("1.post_mlp", "2.mlp_in", "final_norm")
"""Before and behind `MIDDLE`."""
MIDDLE = "1.post_attn"


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """A request by name.

    Attributes:
        name: For failures.
        gates: As ``steering_gates``; the reference is told these.
        prompt: Index of one of `PROMPTS`.
        static: What it steers with beside them.
        old: As ``steering``, the predecessor's form of `gates`, to be sent in their place.
        n: Samples.
    """

    name: str
    gates: Sequence[Mapping[str, Any]] = ()
    prompt: int = LONG
    static: Case = field(default_factory=lambda: Case("none"))
    old: Sequence[Mapping[str, Any]] | None = None
    n: int = 1

    def fields(self) -> dict[str, Any]:
        """The request's fields."""
        found = self.static.fields()
        if self.gates:
            found["return_steering_trace"] = True
            found |= {"steering_gates": list(self.gates)} if self.old is None else {"steering": list(self.old)}
        return found

    def steering(self) -> Steering:
        """What Hugging Face is told of its static steering."""
        return self.static.steering()


class Maker:
    """Makes conditions that fire on some rows of a prompt and of the answer that an engine gives without steering.

    Args:
        rows: Of each of `PROMPTS`: ``[num_tokens, hidden]`` per site.
    """

    def __init__(self, rows: Sequence[Mapping[Site, Tensor]]) -> None:
        self._rows = rows
        self._seeds = iter(range(1000, 100000))

    def vector(self, scale: float = 0.5) -> list[float]:
        """Another vector."""
        found: list[float] = (scale * torch.randn(HIDDEN, generator=self._generator())).tolist()
        return found

    def vectors(self, *names: str, scale: float = 0.4) -> dict[str, Any]:
        """Another vector at each of some sites, nested as clients write them."""
        found: dict[str, Any] = {}
        for site in map(site_of, names):
            if site == FINAL_NORM_SITE:
                found[site.hook.value] = self.vector(scale)
            else:
                found.setdefault(site.hook.value, {})[site.layer] = self.vector(scale)
        return found

    def when(
        self, at: str = MIDDLE, prompt: int = LONG, *, q: float = 0.7, in_decode: bool = False, **more: Any
    ) -> dict[str, Any]:
        """A comparison that fires on the part 1 - `q` of the rows; with `in_decode`, on generated rows first.

        Further keys are the comparison's; ``below=True`` mirrors it, ``hysteresis=True`` takes a usual one, and
        ``cosine=True`` reads the angle.
        """
        site, num_prompt = site_of(at), len(PROMPTS[prompt])
        while True:
            weight = torch.randn(HIDDEN, generator=self._generator()) / HIDDEN**0.5
            rows, bias = self._rows[prompt][site].double(), 0.0 if more.get("cosine") else 0.25
            scores = rows @ weight.double() + bias
            if more.get("cosine"):
                scores /= rows.norm(dim=1) * weight.double().norm()
            scores = -scores if more.get("below") else scores
            ordered = scores.sort().values
            index = int(q * (len(ordered) - 1))
            threshold = float(ordered[index] + ordered[index + 1]) / 2 if len(ordered) > 1 else float(ordered[0]) - 0.1
            if not in_decode:
                break
            inside, behind = scores[:num_prompt].max(), scores[num_prompt + 1 :].max()
            if behind - inside > 0.1 * scores.std():
                threshold = float(inside + behind) / 2
                break
        read = {"cosine": weight.tolist(), "at": at}
        if not more.pop("cosine", False):
            read = {"probe": {"at": at, "weight": weight.tolist(), "bias": bias}}
        found = {**read, "below": -threshold} if more.pop("below", False) else {**read, "above": threshold}
        if more.get("hysteresis") is True:
            more["hysteresis"] = float(scores.std()) / 2
        return {**found, **more}

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(next(self._seeds))


def names() -> Names:
    """What names in the cases stand for."""
    base, decode = additions(MODULE["vectors"]), additions(MODULE["decode_vectors"])
    return Names(
        probes=named_probes(),
        modules={"calm": Effect(prefill=base + additions(MODULE["prefill_vectors"]), decode=base + decode)},
        saes={"sae": (SAE, SAE_SITE)},
    )


def named_probes() -> dict[str, dict[str, Any]]:
    """Probes that gates name."""
    first, second = (vectors(["p"], seed)["p"].tolist() for seed in (401, 402))
    return {
        "anger": {"at": "0.post_mlp", "weight": first, "bias": 0.5, "kind": "linear"},
        "angle": {"at": "2.pre_attn", "weight": second, "kind": "cosine"},
    }


def cases_of(rows: Sequence[Mapping[Site, Tensor]]) -> list[GateCase]:
    """All requests, unsteered neighbours among them."""
    make = Maker(rows)
    cases = [
        *_matrix(make),
        *_shapes(make),
        *_early(make),
        *_attenuating(make),
        *_together(make),
        *_named(make),
        *_operations(make),
        *_predecessor(make),
    ]
    for at in (3, 11, 19):
        cases.insert(at, GateCase(name=f"neighbour {at}", prompt=at % 3))
    return cases


def _matrix(make: Maker) -> Iterator[GateCase]:
    """Every scope with every pool, and in each request a gate of every strength."""
    scopes = ("this_token", "next_token", "rest_of_request")
    pools = ("token", {"ema": 0.3}, "last_prompt", "prompt_mean")
    for at, (scope, pool) in enumerate((scope, pool) for scope in scopes for pool in pools):
        prompt = at % 2
        lower = {"last_prompt": 0.0, "prompt_mean": 0.0}.get(pool if isinstance(pool, str) else "", 0.6)
        whens = [make.when(prompt=prompt, q=lower + 0.1 * each, pool=pool, hysteresis=True) for each in range(3)]
        strengths = ("binary", {"proportional": 1.3}, {"sigmoid": 0.7})
        yield GateCase(
            name=f"{scope}, {pool}",
            prompt=prompt,
            gates=[
                {
                    "name": f"g{index}",
                    "when": when,
                    "then": {"vectors": make.vectors(LATE[index], MIDDLE)},
                    "strength": strength,
                    "scope": scope,
                }
                for index, (when, strength) in enumerate(zip(whens, strengths, strict=True))
            ],
        )


def _shapes(make: Maker) -> Iterator[GateCase]:
    """Conditions of every form."""

    def gate(when: Any, **more: Any) -> dict[str, Any]:
        return {"when": when, "then": {"vectors": make.vectors("2.post_attn", "final_norm")}, **more}

    soft = {"strength": {"proportional": 0.8}}
    late = "2.pre_attn"
    yield GateCase(
        name="below", gates=[gate(make.when(below=True, q=0.5)), gate(make.when(below=True, q=0.7, hysteresis=True))]
    )
    yield GateCase(
        name="below, soft",
        gates=[
            gate(make.when(below=True, hysteresis=True), **soft),
            gate(make.when(below=True), strength={"sigmoid": 1.5}, scope="rest_of_request"),
            gate(make.when(below=True, hysteresis=True), strength={"proportional": 0.8}, scope="next_token"),
        ],
    )
    yield GateCase(
        name="cosine",
        prompt=SHORT,
        gates=[
            gate(make.when(prompt=SHORT, cosine=True)),
            gate(make.when(late, SHORT, cosine=True, hysteresis=0.02), **soft),
        ],
    )
    yield GateCase(
        name="any, all, not",
        gates=[
            gate({"any": [make.when("0.post_mlp", q=0.8), make.when(late, q=0.8)]}),
            gate({"all": [make.when("0.post_mlp", q=0.3), {"not": make.when(late, q=0.5)}]}, scope="rest_of_request"),
            gate(
                {"not": {"any": [make.when(q=0.6, hysteresis=True), make.when("0.mlp_out", q=0.6)]}}, scope="next_token"
            ),
        ],
    )
    yield GateCase(
        name="soft trees",
        prompt=SHORT,
        gates=[
            gate({"any": [make.when(q=0.8, hysteresis=True), make.when(late, q=0.8, hysteresis=True)]}, **soft),
            gate({"all": [{"not": make.when(q=0.8)}, make.when("0.mlp_in", q=0.5)]}, strength={"sigmoid": 1.0}),
            gate({"not": make.when(q=0.4)}, strength={"sigmoid": 1.0}, scope="rest_of_request"),
        ],
    )
    yield GateCase(
        name="pooled trees",
        gates=[
            gate({"not": make.when(pool="last_prompt", q=0.99)}),
            gate({"all": [make.when(q=0.3), make.when(late, pool="prompt_mean", q=0.1)]}),
            gate(
                {"all": [make.when(q=0.5, pool={"ema": 0.5}), {"not": make.when(pool="last_prompt", q=0.99)}]},
                scope="rest_of_request",
            ),
        ],
    )
    yield GateCase(
        name="always",
        prompt=SHORT,
        gates=[
            {"when": "always", "then": {"vectors": make.vectors("0.pre_attn", "1.post_mlp")}},
            {"when": "always", "then": {"vectors": make.vectors("0.hook_z", "2.post_mlp")}, "scope": "next_token"},
            {
                "when": "always",
                "then": {"vectors": make.vectors("0.attn_in", "final_norm")},
                "scope": "rest_of_request",
            },
            {"when": {"not": "always"}, "then": {"vectors": make.vectors("0.pre_attn")}},
            {"when": {"all": ["always", make.when(prompt=SHORT)]}, "then": {"vectors": make.vectors("2.mlp_out")}},
        ],
    )
    yield GateCase(
        name="always, both branches of a layer",
        prompt=SHORT,
        gates=[
            {"when": "always", "then": {"vectors": make.vectors("1.attn_out", "1.mlp_out")}},
            {"when": "always", "then": {"vectors": make.vectors("2.hook_z", "2.mlp_in")}, "scope": "rest_of_request"},
        ],
    )
    yield GateCase(
        name="a token's prompt",
        prompt=ONE,
        gates=[
            gate(make.when(prompt=ONE, q=0.0, pool="last_prompt"), scope="next_token"),
            gate(make.when(prompt=ONE, q=0.6, pool={"ema": 0.5}, hysteresis=True), scope="rest_of_request"),
            gate(make.when(prompt=ONE, q=0.6), **soft),
        ],
    )


def _early(make: Maker) -> Iterator[GateCase]:
    """Gates that write before they read, and everywhere."""
    everywhere = (*EARLY, MIDDLE, *LATE)
    for prompt in (LONG, SHORT):
        for scope in ("next_token", "rest_of_request"):
            for in_decode in (False, True):
                yield GateCase(
                    name=f"early, {scope}, {prompt}, {in_decode}",
                    prompt=prompt,
                    gates=[
                        {
                            "when": make.when(prompt=prompt, in_decode=in_decode, q=0.9),
                            "then": {"vectors": make.vectors(*where, scale=0.3)},
                            "scope": scope,
                            "strength": strength,
                        }
                        for where, strength in (
                            (EARLY, "binary"),
                            (everywhere, {"sigmoid": 0.8}),
                        )
                    ],
                )
    yield GateCase(
        name="at the end",
        prompt=SHORT,
        gates=[
            {
                "when": make.when("final_norm", SHORT, q=0.6, hysteresis=True),
                "then": {"vectors": make.vectors("0.pre_attn", "1.attn_out", "final_norm")},
                "scope": "next_token",
            },
            {"when": make.when("final_norm", SHORT, q=0.6), "then": {"vectors": make.vectors("final_norm")}},
            {
                "when": make.when("2.post_mlp", SHORT, pool="prompt_mean", q=0.1),
                "then": {"vectors": make.vectors("0.post_attn")},
                "scope": "rest_of_request",
            },
        ],
    )


def _attenuating(make: Maker) -> Iterator[GateCase]:
    where = [site_of(name) for name in (MIDDLE, *LATE)]
    tiers = Tiers(
        base=vectors(where, 501, 0.3), prefill=vectors(where[:2], 502, 0.3), decode=vectors(where[1:], 503, 0.3)
    )
    ablate = {"method": "ablate", "vector": np.asarray(make.vector()), "scale": 1.0}
    replace = {"method": "replace", "vector": np.asarray(make.vector()), "alpha": 0.5, "positions": [2, 5, 20, 23, 40]}
    static = Case("static", tiers, operations=(("both", site_of(LATE[0]), ablate), ("both", site_of(MIDDLE), replace)))
    before = Case("before", Tiers(base=vectors([site_of(name) for name in (*EARLY, *LATE)], 504, 0.3)))
    yield GateCase(
        name="attenuate",
        static=static,
        gates=[
            {"when": make.when(q=0.5), "then": {"attenuate": 0.2}},
            {
                "when": make.when(q=0.8),
                "then": {"attenuate": -1.5},
                "strength": {"sigmoid": 1.0},
                "scope": "rest_of_request",
            },
        ],
    )
    for prompt, in_decode in ((LONG, False), (SHORT, True)):
        for scope in ("next_token", "rest_of_request"):
            yield GateCase(
                name=f"attenuate early, {scope}, {prompt}",
                prompt=prompt,
                static=before,
                gates=[
                    {"when": make.when(prompt=prompt, in_decode=in_decode), "then": {"attenuate": 0.0}, "scope": scope}
                ],
            )
    yield GateCase(
        name="attenuate nothing",
        prompt=SHORT,
        gates=[{"when": make.when(prompt=SHORT), "then": {"attenuate": 0.0}, "scope": "next_token"}],
    )
    clamp = {"method": "clamp", "vector": np.asarray(make.vector()), "min": -0.1, "max": 0.2, "strength": 1.0}
    rotate = {"at": LATE[0], "method": "rotate", "plane": [make.vector(), make.vector()], "degrees": 75.0}
    yield GateCase(
        name="attenuate, beside operations",
        static=Case(
            "clamp", Tiers(base=vectors([site_of(LATE[0])], 505, 0.5)), operations=(("both", site_of(LATE[0]), clamp),)
        ),
        gates=[
            {"when": make.when(q=0.3), "then": {"ops": [rotate]}},
            {"when": make.when(q=0.9), "then": {"attenuate": 0.5}},
        ],
    )


def _together(make: Maker) -> Iterator[GateCase]:
    static = Case(
        "static",
        Tiers(base=vectors(sites_of(HookPoint.POST_MLP, HookPoint.POST_ATTN), 601, 0.3)),
        operations=(("both", SAE_SITE, {"method": "ablate", "vector": np.asarray(make.vector()), "scale": 1.0}),),
    )
    one = {"vectors": make.vectors("1.post_mlp", "2.post_mlp")}
    yield GateCase(
        name="many on one vector, with others",
        static=static,
        gates=[
            {"name": "a", "when": make.when("1.post_mlp", q=0.5), "then": one},
            {"name": "b", "when": make.when("0.pre_attn", q=0.5), "then": one, "scope": "next_token"},
            {"name": "c", "when": make.when("1.post_mlp", q=0.8), "then": one, "scope": "rest_of_request"},
            {"name": "d", "when": make.when("2.post_mlp", q=0.5), "then": "observe", "strength": {"sigmoid": 1.0}},
            {
                "name": "e",
                "when": make.when("2.hook_z", q=0.5),
                "then": {"vectors": make.vectors("2.hook_z", "2.attn_out")},
            },
            {"name": "f", "when": make.when("final_norm", q=0.5), "then": "observe", "scope": "rest_of_request"},
        ],
    )
    yield GateCase(
        name="two samples",
        n=2,
        static=static,
        gates=[
            {"when": make.when(q=0.8), "then": one, "scope": "rest_of_request", "strength": {"sigmoid": 1.0}},
            {
                "when": make.when("2.mlp_in", q=0.8, pool={"ema": 0.4}),
                "then": {"vectors": make.vectors(*EARLY)},
                "scope": "next_token",
            },
        ],
    )


def _named(make: Maker) -> Iterator[GateCase]:
    yield GateCase(
        name="named probes and modules",
        gates=[
            {
                "when": {"probe": "anger", "above": 0.5, "hysteresis": 4.0},
                "then": {"module": "calm", "scale": 0.7},
                "scope": "next_token",
            },
            {"when": {"probe": "anger", "below": 0.3}, "then": {"vectors": make.vectors("1.mlp_out")}},
            {
                "when": {"all": [{"probe": "angle", "above": 0.0}, {"probe": "anger", "above": -3}]},
                "then": {"module": "calm"},
                "scope": "rest_of_request",
            },
        ],
    )
    yield GateCase(
        name="a module on the very token",
        prompt=SHORT,
        gates=[
            {
                "when": make.when("0.mlp_in", SHORT, q=0.5),
                "then": {"module": "calm", "scale": -1.5},
                "strength": {"sigmoid": 2.0},
            },
        ],
    )
    features = [{"sae": "sae", "feature": 1, "set": 2.0}, {"sae": "sae", "feature": 2, "scale": 3.0}]
    yield GateCase(
        name="features",
        static=Case("base", Tiers(base=vectors([SAE_SITE], 701, 0.3))),
        gates=[
            {"when": {"sae": "sae", "feature": 4, "above": 0.3}, "then": {"features": features}},
            {
                "when": make.when(q=0.6),
                "then": {"features": [{"sae": "sae", "feature": 3, "add": 1.0}]},
                "strength": {"sigmoid": 1.0},
            },
            {
                "when": {"sae": "sae", "feature": 0, "above": 0.2},
                "then": {"features": [{"sae": "sae", "feature": 5, "set": 2.0}]},
                "scope": "next_token",
            },
            {
                "when": {"sae": "sae", "feature": 0, "below": 0.1},
                "then": {"vectors": make.vectors("0.post_mlp")},
                "scope": "next_token",
            },
        ],
    )


def _operations(make: Maker) -> Iterator[GateCase]:
    def ops(*sites: str) -> list[dict[str, Any]]:
        found = [
            {"method": "ablate", "vector": make.vector(), "scale": 1.0},
            {"method": "clamp", "vector": make.vector(), "min": -0.1, "max": 0.2, "strength": 0.8},
            {"method": "rotate", "plane": [make.vector(), make.vector()], "degrees": 60.0},
            {"method": "swap", "vector": make.vector(), "target": make.vector()},
            {"method": "affine", "vector": make.vector(), "reference": make.vector(), "alpha": 0.3},
            {"method": "mean_ablate", "vector": make.vector(), "mean": make.vector()},
            {"method": "norm_scaled_add", "vector": make.vector(), "scale": 0.4, "max_ratio": 0.25},
            {"method": "set", "vector": make.vector(), "value": 0.7, "strength": 1.0},
            {"method": "replace", "vector": make.vector(), "alpha": 0.3},
        ]
        return [{"at": site, **document} for site, document in zip(sites, found, strict=True)]

    later = (
        "1.post_attn",
        "1.mlp_in",
        "1.mlp_out",
        "1.post_mlp",
        "2.pre_attn",
        "2.attn_out",
        "2.post_attn",
        "2.post_mlp",
        "final_norm",
    )
    any_site = (
        "0.pre_attn",
        "0.post_mlp",
        "1.mlp_out",
        "1.post_mlp",
        "0.post_attn",
        "2.attn_out",
        "1.attn_in",
        "2.post_mlp",
        "final_norm",
    )
    yield GateCase(
        name="operations",
        gates=[{"when": make.when(q=0.5), "then": {"ops": ops(*later)}}],
    )
    yield GateCase(
        name="operations in part",
        prompt=SHORT,
        gates=[{"when": make.when(prompt=SHORT, q=0.5), "then": {"ops": ops(*later)}, "strength": {"sigmoid": 0.5}}],
    )
    for scope in ("next_token", "rest_of_request"):
        yield GateCase(
            name=f"operations, {scope}",
            prompt=SHORT,
            gates=[
                {
                    "when": make.when(prompt=SHORT, q=0.6),
                    "then": {"ops": ops(*any_site)},
                    "strength": {"sigmoid": 1.0},
                    "scope": scope,
                }
            ],
        )
    keeping = {"at": LATE[0], "method": "additive", "vector": make.vector(), "scale": 1.0, "preserve_norm": True}
    yield GateCase(
        name="the length is kept",
        prompt=SHORT,
        gates=[{"when": make.when(prompt=SHORT, q=0.6), "then": {"ops": [keeping]}}],
    )


def _predecessor(make: Maker) -> Iterator[GateCase]:
    def packed(name: str, vector: Sequence[float]) -> dict[str, Any]:
        import base64

        layer, hook = name.split(".")
        data = base64.b64encode(np.asarray([vector], np.float32).tobytes()).decode()
        return {hook: {"dtype": "float32", "shape": [1, HIDDEN], "layer_indices": [int(layer)], "data": data}}

    weight, vector = make.vector(0.2), make.vector()
    read = {
        "kind": "probe",
        "probe": {"kind": "inline", "packed": packed(MIDDLE, weight)},
        "threshold": 0.2,
        "sharpness": 3.0,
    }
    add = {"kind": "add", "steer": {"kind": "inline", "packed": packed("2.post_mlp", vector)}, "strength": 0.6}
    named = {"kind": "add", "steer": {"kind": "name", "name": "calm"}, "strength": 0.5}
    when = {"probe": {"at": MIDDLE, "weight": weight, "bias": 0.0}, "above": 0.2}
    then = {"vectors": {"post_mlp": {2: (0.6 * np.asarray(vector)).tolist()}}}
    yield GateCase(
        name="the predecessor's",
        prompt=SHORT,
        static=Case("base", Tiers(base=vectors([Site(2, HookPoint.POST_MLP)], 801, 0.4))),
        gates=[
            {"when": when, "then": then, "strength": {"sigmoid": 3.0}, "scope": "this_token"},
            {"when": when, "then": then, "scope": "next_token"},
            {"when": when, "then": {"attenuate": 0.25}, "scope": "rest_of_request"},
            {"when": "always", "then": {"module": "calm", "scale": 0.5}, "scope": "next_token"},
        ],
        old=[
            {"when": read, "scope": "this_token", "apply": add},
            {"when": read, "scope": "next_step", "apply": add},
            {"when": read, "scope": "rest_of_request", "apply": {"kind": "attenuate", "strength": 0.25}},
            {"when": {"kind": "always"}, "scope": "next_step", "apply": named},
        ],
    )
