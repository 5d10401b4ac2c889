"""Conditions and effects of gates in every form; see `gate_cases`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.engine.gate_making import LATE, LONG, ONE, SAE_SITE, SHORT, GateCase, Maker
from tests.engine.steering_cases import Case, Tiers, vectors


def comparisons(make: Maker) -> Iterator[GateCase]:
    """Comparisons alone."""
    soft = {"strength": {"proportional": 0.8}}
    yield GateCase(
        name="below",
        gates=[_later(make, make.when(below=True, q=0.5)), _later(make, make.when(below=True, q=0.7, hysteresis=True))],
    )
    yield GateCase(
        name="below, soft",
        gates=[
            _later(make, make.when(below=True, hysteresis=True), **soft),
            _later(make, make.when(below=True), strength={"sigmoid": 1.5}, scope="rest_of_request"),
            _later(make, make.when(below=True, hysteresis=True), strength={"proportional": 0.8}, scope="next_token"),
        ],
    )
    yield GateCase(
        name="cosine",
        prompt=SHORT,
        gates=[
            _later(make, make.when(prompt=SHORT, cosine=True)),
            _later(make, make.when("2.pre_attn", SHORT, cosine=True, hysteresis=0.02), **soft),
        ],
    )
    yield GateCase(
        name="a token's prompt",
        prompt=ONE,
        gates=[
            _later(make, make.when(prompt=ONE, q=0.0, pool="last_prompt"), scope="next_token"),
            _later(make, make.when(prompt=ONE, q=0.6, pool={"ema": 0.5}, hysteresis=True), scope="rest_of_request"),
            _later(make, make.when(prompt=ONE, q=0.6), **soft),
        ],
    )


def loops(make: Maker) -> Iterator[GateCase]:
    """Control loops."""

    def loop(then: Any, scope: str, setpoint: float, prompt: int, **pid: Any) -> dict[str, Any]:
        when = make.when(prompt=prompt, **({"pool": pid.pop("pool")} if "pool" in pid else {}))
        when = {key: value for key, value in when.items() if key != "above"}
        return {"when": when, "then": then, "strength": {"pid": {"setpoint": setpoint, **pid}}, "scope": scope}

    for at, scope in enumerate(("this_token", "next_token")):
        early = ("0.post_mlp",) if scope == "next_token" else ()
        yield GateCase(
            name=f"loops, {scope}",
            prompt=(LONG, SHORT)[at],
            gates=[
                loop({"vectors": make.vectors(*early, *LATE[:2])}, scope, 1.5, (LONG, SHORT)[at], kd=0.4),
                loop({"vectors": make.vectors(LATE[1])}, scope, -0.8, (LONG, SHORT)[at], kp=0.3, ki=0.5, min=-0.7),
                loop(
                    {"vectors": make.vectors(LATE[0])}, scope, 0.4, (LONG, SHORT)[at], pool={"ema": 0.4}, kd=1.0, max=1
                ),
            ],
        )
    yield GateCase(
        name="loops, a token's prompt",
        prompt=ONE,
        gates=[
            loop({"vectors": make.vectors(LATE[0])}, "this_token", 2.0, ONE, kd=0.3),
            loop("observe", "this_token", 2.0, ONE),
        ],
    )


def trees(make: Maker) -> Iterator[GateCase]:
    """Conditions of others."""
    soft = {"strength": {"proportional": 0.8}}
    late = "2.pre_attn"
    yield GateCase(
        name="any, all, not",
        gates=[
            _later(make, {"any": [make.when("0.post_mlp", q=0.8), make.when(late, q=0.8)]}),
            _later(
                make,
                {"all": [make.when("0.post_mlp", q=0.3), {"not": make.when(late, q=0.5)}]},
                scope="rest_of_request",
            ),
            _later(
                make,
                {"not": {"any": [make.when(q=0.6, hysteresis=True), make.when("0.mlp_out", q=0.6)]}},
                scope="next_token",
            ),
        ],
    )
    yield GateCase(
        name="soft trees",
        prompt=SHORT,
        gates=[
            _later(make, {"any": [make.when(q=0.8, hysteresis=True), make.when(late, q=0.8, hysteresis=True)]}, **soft),
            _later(make, {"all": [{"not": make.when(q=0.8)}, make.when("0.mlp_in", q=0.5)]}, strength={"sigmoid": 1.0}),
            _later(make, {"not": make.when(q=0.4)}, strength={"sigmoid": 1.0}, scope="rest_of_request"),
        ],
    )
    yield GateCase(
        name="pooled trees",
        gates=[
            _later(make, {"not": make.when(pool="last_prompt", q=0.99)}),
            _later(make, {"all": [make.when(q=0.3), make.when(late, pool="prompt_mean", q=0.1)]}),
            _later(
                make,
                {"all": [make.when(q=0.5, pool={"ema": 0.5}), {"not": make.when(pool="last_prompt", q=0.99)}]},
                scope="rest_of_request",
            ),
        ],
    )


def always(make: Maker) -> Iterator[GateCase]:
    """Gates that read nothing."""
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


def phases(make: Maker) -> Iterator[GateCase]:
    """Conditions that hold in the prompt or in the answer alone; two or more for each prompt."""
    for prompt in (LONG, SHORT, ONE):
        when = make.when(prompt=prompt, q=0.4 if prompt == ONE else 0.5)
        alone = [
            {"when": "prompt", "then": {"vectors": make.vectors("1.post_mlp")}},
            {"when": "generated", "then": {"vectors": make.vectors("0.pre_attn")}, "scope": "rest_of_request"},
            {"when": {"not": "prompt"}, "then": {"vectors": make.vectors("0.post_mlp")}, "scope": "next_token"},
            _later(make, {"all": ["generated", when]}),
        ]
        latching = [
            _later(make, {"all": ["generated", when]}, scope="rest_of_request"),
            _later(make, {"all": [when, "prompt"]}, scope="rest_of_request"),
            _later(make, {"any": ["generated", {"not": when}]}, scope="next_token"),
        ]
        yield GateCase(name=f"phases, {prompt}", prompt=prompt, gates=alone)
        yield GateCase(name=f"phases, latching, {prompt}", prompt=prompt, gates=latching)
    for prompt in (LONG, SHORT):
        when = make.when(prompt=prompt, q=0.6, hysteresis=True)
        strong = {"strength": {"proportional": 1.7}}
        bounded = [
            _later(make, {"all": ["generated", when]}, **strong),
            _later(make, {"all": [when, {"not": "generated"}]}, **strong, scope="next_token"),
            _later(make, {"any": ["prompt", when]}, **strong),
        ]
        nested = [
            _later(make, {"not": {"all": ["prompt", when]}}, strength={"sigmoid": 1.0}),
            _later(make, {"all": [{"any": ["generated", "prompt"]}, when]}, **strong, scope="rest_of_request"),
        ]
        yield GateCase(name=f"phases, soft, {prompt}", prompt=prompt, gates=bounded)
        yield GateCase(name=f"phases, nested, {prompt}", prompt=prompt, gates=nested)


def features(make: Maker) -> Iterator[GateCase]:
    """Features of SAEs, read and written."""
    edits = [{"sae": "sae", "feature": 1, "set": 2.0}, {"sae": "sae", "feature": 2, "scale": 3.0}]
    yield GateCase(
        name="features",
        static=Case("base", Tiers(base=vectors([SAE_SITE], 701, 0.3))),
        gates=[
            {"when": {"sae": "sae", "feature": 4, "above": 0.3}, "then": {"features": edits}},
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


_LATER = (
    *("1.post_attn", "1.mlp_in", "1.mlp_out", "1.post_mlp"),
    *("2.pre_attn", "2.attn_out", "2.post_attn", "2.post_mlp", "final_norm"),
)
_EVERYWHERE = (
    *("0.pre_attn", "0.post_mlp", "1.mlp_out", "1.post_mlp", "0.post_attn"),
    *("2.attn_out", "1.attn_in", "2.post_mlp", "final_norm"),
)


def operations(make: Maker) -> Iterator[GateCase]:
    """Operations of all methods, in part and in full."""
    yield GateCase(
        name="operations",
        gates=[{"when": make.when(q=0.5), "then": {"ops": _ops(make, *_LATER)}}],
    )
    yield GateCase(
        name="operations in part",
        prompt=SHORT,
        gates=[
            {"when": make.when(prompt=SHORT, q=0.5), "then": {"ops": _ops(make, *_LATER)}, "strength": {"sigmoid": 0.5}}
        ],
    )
    for scope in ("next_token", "rest_of_request"):
        yield GateCase(
            name=f"operations, {scope}",
            prompt=SHORT,
            gates=[
                {
                    "when": make.when(prompt=SHORT, q=0.6),
                    "then": {"ops": _ops(make, *_EVERYWHERE)},
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


def _ops(make: Maker, *sites: str) -> list[dict[str, Any]]:
    """An operation of each method, at a site each."""
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


def _later(make: Maker, when: Any, **more: Any) -> dict[str, Any]:
    """A gate that writes behind all that is read here."""
    return {"when": when, "then": {"vectors": make.vectors("2.post_attn", "final_norm")}, **more}
