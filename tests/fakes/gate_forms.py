"""Gates as clients write them, for the small model of `tests.fakes.vector_forms`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.gates.gate import Always, Condition, ConditionGroup, Negation
from headgate.steering.vectors.phase_vectors import Steerable
from tests.fakes.op_fields import V, W
from tests.fakes.vector_forms import model

SITES = (
    *(Site(0, hook) for hook in (HookPoint.ATTN_OUT, HookPoint.POST_ATTN, HookPoint.MLP_OUT, HookPoint.POST_MLP)),
    *(Site(layer, HookPoint.POST_MLP) for layer in (1, 2)),
)
"""Where operations can act; vectors can at every site."""

PROBE = {"probe": "anger", "above": 0.5}
INLINE = {"at": "1.post_mlp", "weight": V, "bias": 0.25}
LATER = {"post_mlp": {2: V}}
EARLIER = {"post_mlp": {0: V}}
PACKED = {"dtype": "float32", "shape": [1, 6], "layer_indices": [1], "data": np.array([V], np.float32).tobytes()}


def gated(max_gates: int = 4, max_features: int = 3) -> Steerable:
    return replace(model(), op_sites=SITES, max_ops_per_site=8, max_sae_features=max_features, max_gates=max_gates)


def gate(**keys: Any) -> dict[str, Any]:
    """A gate with `keys` changed."""
    return {"when": PROBE, "then": {"module": "calm"}, **keys}


def old_gate(**keys: Any) -> dict[str, Any]:
    """A gate in the form of the field ``steering``, with `keys` changed."""
    probe = {"kind": "inline", "packed": {"post_mlp": PACKED}}
    return {
        "when": {"kind": "probe", "probe": probe, "threshold": 0.5, "sharpness": 4.0},
        "scope": "this_token",
        "apply": {"kind": "attenuate", "strength": 0.25},
        **keys,
    }


def plain(found: Any) -> Any:
    """A gate, or a part of one, as lists that can be compared: arrays by their values."""
    if isinstance(found, np.ndarray):
        return found.tolist()
    if isinstance(found, msgspec.Struct) or is_dataclass(found):
        names = found.__struct_fields__ if isinstance(found, msgspec.Struct) else [each.name for each in fields(found)]
        return [type(found).__name__, *(plain(getattr(found, name)) for name in names)]
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return [plain(each) for each in found] if isinstance(found, tuple) else found


def shape(condition: Condition) -> Any:
    """The tree of a condition, with ``None`` for each leaf."""
    if isinstance(condition, ConditionGroup):
        return [condition.combine.name.lower(), *map(shape, condition.conditions)]
    if isinstance(condition, Negation):
        return ["not", shape(condition.condition)]
    return condition.phase.value if isinstance(condition, Always) else None


_numbers = st.floats(-1e6, 1e6, width=32)
_amounts = st.floats(2**-10, 1e6, width=32)
_vectors = st.sampled_from([V, W, np.array(V), "calm", {"module": "calm", "site": "2.post_mlp"}])
_thresholds = st.one_of(_numbers.map(lambda t: {"above": t}), _numbers.map(lambda t: {"below": t}))
_pools = st.one_of(
    st.sampled_from(["token", "last_prompt", "prompt_mean"]),
    st.floats(2**-10, 1, width=32).map(lambda alpha: {"ema": alpha}),
)
_readings = st.one_of(
    st.sampled_from([{"probe": "anger"}, {"probe": "joy"}, {"sae": "sae", "feature": 7}]),
    st.builds(lambda vector, bias: {"probe": {"at": "0.post_mlp", "weight": vector, "bias": bias}}, _vectors, _numbers),
    _vectors.map(lambda vector: {"cosine": vector, "at": "1.post_mlp"}),
)
_leaves = st.builds(
    lambda reading, threshold, others: {**reading, **threshold, **others},
    _readings,
    _thresholds,
    st.fixed_dictionaries({}, optional={"hysteresis": st.floats(0, 1e6, width=32), "pool": _pools}),
)
conditions: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["always", "prompt", "generated"]) | _leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda listed: {"any": listed}),
        st.lists(inner, min_size=1, max_size=2).map(lambda listed: {"all": listed}),
        inner.map(lambda one: {"not": one}),
    ),
    max_leaves=3,
)
thens: st.SearchStrategy[Any] = st.one_of(
    st.just("observe"),
    st.floats(-4, 4, width=32).map(lambda factor: {"attenuate": factor}),
    _numbers.map(lambda scale: {"module": "calm", "scale": scale}),
    st.just({"vectors": {"post_mlp": {1: V, 2: {"vector": W, "scale": 2.0}}}}),
    st.just({"ops": [{"at": ["1.post_mlp", "2.post_mlp"], "method": "clamp", "vector": W, "min": 1.0}]}),
    st.just({"features": [{"sae": "sae", "feature": 3, "set": 2.0}, {"sae": "sae", "feature": 1, "add": 1.0}]}),
)
_strengths = st.one_of(
    st.just("binary"), _amounts.map(lambda gain: {"proportional": gain}), _amounts.map(lambda k: {"sigmoid": k})
)
_loops = st.fixed_dictionaries(
    {"setpoint": st.floats(-1e3, 1e3, width=32)},
    optional={
        **{key: st.floats(-10, 10, width=32) for key in ("kp", "ki", "kd")},
        **{"min": st.floats(-8, 0, width=32), "max": st.floats(0, 8, width=32)},
    },
).map(lambda pid: {"pid": pid})
_scopes = st.one_of(
    st.sampled_from([{"scope": scope} for scope in ("this_token", "next_token", "rest_of_request")]),
    st.just({"scope": "rest_of_conversation", "conversation_id": "one"}),
)


def _document(when: Any, then: Any, strength: Any, scope: dict[str, Any]) -> dict[str, Any]:
    if "attenuate" in then and "proportional" in strength:  # factors of a request's gates multiply, and are limited
        strength = {"proportional": min(strength["proportional"], 4.0)}
    return {"when": when, "then": then, "strength": strength, **scope}


def _loop_document(when: Any, then: Any, strength: Any, scope: str) -> dict[str, Any]:
    score = {key: value for key, value in when.items() if key not in ("above", "below", "hysteresis")}
    if score.get("pool") in ("last_prompt", "prompt_mean"):
        del score["pool"]
    return {"when": score, "then": then, "strength": strength, "scope": scope}


gate_documents = st.one_of(
    st.builds(_document, conditions, thens, _strengths, _scopes),
    st.builds(
        _loop_document,
        _leaves,
        thens.filter(lambda then: "attenuate" not in then),
        _loops,
        st.sampled_from(("this_token", "next_token")),
    ),
)
"""Gates of every form that read at sites which are not after those that they write."""
