"""Requests with gates for the tests on real engines."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from headgate.capture.schema.sites import HookPoint, Site
from tests.engine.gate_forms import always, comparisons, features, loops, operations, phases, trees
from tests.engine.gate_making import EARLY, LATE, LONG, MIDDLE, SAE_SITE, SHORT, GateCase, Maker
from tests.engine.gate_semantics import site_of
from tests.engine.steering_cases import Case, Tiers, sites_of, vectors
from tests.engine.tiny_models import HIDDEN


def cases_of(rows: Sequence[Mapping[Site, Tensor]]) -> list[GateCase]:
    """All requests, unsteered neighbours among them."""
    make = Maker(rows)
    cases = [
        *_matrix(make),
        *comparisons(make),
        *loops(make),
        *trees(make),
        *always(make),
        *_early(make),
        *_attenuating(make),
        *_attenuating_early(make),
        *_attenuating_beside(make),
        *_together(make),
        *_named(make),
        *_networks(make),
        *features(make),
        *operations(make),
        *_predecessor(make),
        *phases(make),
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


def _attenuating_early(make: Maker) -> Iterator[GateCase]:
    before = Case("before", Tiers(base=vectors([site_of(name) for name in (*EARLY, *LATE)], 504, 0.3)))
    for prompt, q in ((LONG, 0.7), (SHORT, 0.9)):
        for scope in ("next_token", "rest_of_request"):
            yield GateCase(
                name=f"attenuate early, {scope}, {prompt}",
                prompt=prompt,
                static=before,
                gates=[{"when": make.when(prompt=prompt, q=q), "then": {"attenuate": 0.0}, "scope": scope}],
            )


def _attenuating_beside(make: Maker) -> Iterator[GateCase]:
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
    yield GateCase(
        name="attenuate nothing",
        prompt=SHORT,
        gates=[{"when": make.when(prompt=SHORT), "then": {"attenuate": 0.0}, "scope": "next_token"}],
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


def _networks(make: Maker) -> Iterator[GateCase]:
    for at, scope in enumerate(("this_token", "next_token", "rest_of_request")):
        yield GateCase(
            name=f"networks, {scope}",
            prompt=at % 2,
            gates=[
                {
                    "when": {"any": [make.network("gelu", at % 2, q=0.8), {"probe": "anger", "above": 3.0}]},
                    "then": {"vectors": make.vectors(*LATE)},
                    "scope": scope,
                },
                {
                    "when": {**make.network("silu", at % 2), "pool": {"ema": 0.5}},
                    "then": {"vectors": make.vectors(LATE[1])},
                    "strength": {"sigmoid": 0.8},
                },
                {"when": make.network("relu", at % 2, q=0.6), "then": {"vectors": make.vectors(LATE[0])}},
            ],
        )


def _predecessor(make: Maker) -> Iterator[GateCase]:
    def packed(name: str, vector: Sequence[float]) -> dict[str, Any]:
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
