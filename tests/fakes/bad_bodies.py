"""Bodies that a server must refuse with status 400 and the field that is to blame, as JSON values."""

from __future__ import annotations

from typing import Any

from tests.fakes.steering_forms import BAD, HIDDEN, LAYERS, ROW, listed, packed

Fields = dict[str, Any]

VECTOR = listed(ROW)
HOOKS = {"hooks": {"post_mlp": [3, 5]}}
LONG = "x" * 100_000
NOT_ENCODED = "!" * (HIDDEN * 4 // 3 * 4)


def _at(positions: Any) -> Fields:
    return {"capture": {"rows": {**HOOKS, "positions": positions}}}


def _hooks(hooks: Any) -> Fields:
    return {"capture": {"rows": {"hooks": hooks}}}


CAPTURES: dict[str, tuple[Fields, str]] = {
    "capture: a text": ({"capture": "rows"}, "capture"),
    "capture: a list": ({"capture": ["rows"]}, "capture"),
    "capture: a number": ({"capture": 1}, "capture"),
    "capture: true": ({"capture": True}, "capture"),
    "capture: empty": ({"capture": {}}, "capture"),
    "capture: nobody": ({"capture": {"nobody": HOOKS}}, "capture.nobody"),
    "capture: a consumer of the operator's": ({"capture": {"everything": HOOKS}}, "capture.everything"),
    "capture: a spec that is a text": ({"capture": {"rows": "all"}}, "capture.rows"),
    "capture: a spec that is a list": ({"capture": {"rows": [HOOKS]}}, "capture.rows"),
    "capture: a long text": ({"capture": LONG}, "capture"),
    "capture: a long name": ({"capture": {LONG: HOOKS}}, f"capture.{LONG}"[:300] + "..."),
    "capture: a long spec": ({"capture": {"rows": [LONG] * 100}}, "capture.rows"),
    "capture: a long key": ({"capture": {"rows": {**HOOKS, LONG: 1}}}, f"capture.rows.{LONG}"[:300] + "..."),
    "capture: no hooks": ({"capture": {"rows": {}}}, "capture.rows.hooks"),
    "capture: an unknown key": ({"capture": {"rows": {**HOOKS, "root": "/etc"}}}, "capture.rows.root"),
    "hooks: a list": (_hooks(["post_mlp"]), "capture.rows.hooks[0]"),
    "hooks: empty": (_hooks({}), "capture.rows.hooks"),
    "hooks: null": (_hooks(None), "capture.rows.hooks"),
    "hooks: unknown": (_hooks({"post_lunch": [3]}), "capture.rows.hooks.post_lunch"),
    "hooks: a long list of them": (_hooks([LONG] * 100), "capture.rows.hooks[0]"),
    "hooks: a long list of layers": (_hooks({"post_mlp": [LONG] * 100}), "capture.rows.hooks.post_mlp"),
    "hooks: a layer too high": (_hooks({"post_mlp": [LAYERS]}), "capture.rows.hooks.post_mlp"),
    "hooks: a layer too low": (_hooks({"post_mlp": [-LAYERS - 1]}), "capture.rows.hooks.post_mlp"),
    "hooks: a layer that is not configured": (_hooks({"post_mlp": [4]}), "capture.rows.hooks.post_mlp"),
    "hooks: a hook that is not configured": (_hooks({"pre_attn": [3]}), "capture.rows.hooks.pre_attn"),
    "hooks: a layer that is a text": (_hooks({"post_mlp": ["3"]}), "capture.rows.hooks.post_mlp"),
    "hooks: half a layer": (_hooks({"post_mlp": [3.5]}), "capture.rows.hooks.post_mlp"),
    "hooks: true for a layer": (_hooks({"post_mlp": [True]}), "capture.rows.hooks.post_mlp"),
    "hooks: no layers": (_hooks({"post_mlp": []}), "capture.rows.hooks.post_mlp"),
    "hooks: an empty range": (_hooks({"post_mlp": {"ranges": [[5, 3]]}}), "capture.rows.hooks.post_mlp.ranges[0]"),
    "hooks: half a range": (_hooks({"post_mlp": {"ranges": [[5]]}}), "capture.rows.hooks.post_mlp.ranges[0]"),
    "hooks: an unknown way to say layers": (_hooks({"post_mlp": {"every": 2}}), "capture.rows.hooks.post_mlp"),
    "positions: unknown": (_at("everywhere"), "capture.rows.positions"),
    "positions: a long text": (_at(LONG), "capture.rows.positions"),
    "positions: a long list of texts": (_at([LONG] * 100), "capture.rows.positions"),
    "positions: long keys": (_at({LONG: 0}), "capture.rows.positions"),
    "positions: empty": (_at([]), "capture.rows.positions"),
    "positions: null": (_at(None), "capture.rows.positions"),
    "positions: a number": (_at(3), "capture.rows.positions"),
    "positions: a text among them": (_at([0, "1"]), "capture.rows.positions[1]"),
    "positions: half a position": (_at([0.5]), "capture.rows.positions[0]"),
    "positions: true": (_at([True]), "capture.rows.positions[0]"),
    "positions: far too high": (_at([2**70]), "capture.rows.positions[0]"),
    "positions: before the prompt": (_at([-999]), "capture.rows.positions"),
    "positions: step 0": (_at({"step": 0}), "capture.rows.positions.step"),
    "positions: step -1": (_at({"start": 5, "step": -1}), "capture.rows.positions.step"),
    "positions: an empty span": (_at({"start": 5, "stop": 5}), "capture.rows.positions"),
    "positions: a bound that is a text": (_at({"start": "0"}), "capture.rows.positions.start"),
    "positions: an unknown key": (_at({"from": 0}), "capture.rows.positions"),
    "positions: a role that is a number": (_at({"role": 7}), "capture.rows.positions.role"),
    "positions: an index that is a text": (_at({"role": "user", "index": "0"}), "capture.rows.positions.index"),
    "positions: no such message": (_at({"role": "tool", "index": 9}), "capture.rows.positions"),
    "positions: no selector among several": (_at(["all", LONG]), "capture.rows.positions[1]"),
    "positions: one of several before the prompt": (_at(["all", [-999]]), "capture.rows.positions[1]"),
    "positions: a part that is a text": (_at({"role": "user", "start": "0"}), "capture.rows.positions.start"),
    "positions: include_generated is a text": (
        _at({"role": "user", "include_generated": "yes"}),
        "capture.rows.positions.include_generated",
    ),
    "capture_messages: a text": ({"capture": {"rows": HOOKS}, "capture_messages": "yes"}, "capture_messages"),
    "capture_messages: nothing is captured": ({"capture_messages": True}, "capture_messages"),
    "capture_wait: a text": ({"capture": {"rows": HOOKS}, "capture_wait": "yes"}, "capture_wait"),
    "capture_wait: a number": ({"capture": {"rows": HOOKS}, "capture_wait": 1}, "capture_wait"),
}


def _vectors(given: Any) -> Fields:
    return {"steering_vectors": {"post_mlp": given}}


def _packed(**changes: Any) -> Fields:
    return _vectors({key: value for key, value in packed([3], **changes).items() if value is not None})


_HOOK = "steering_vectors.post_mlp"

STEERS: dict[str, tuple[Fields, str]] = {
    **{f"steering: {name}": case for name, case in BAD.items()},
    "vectors: a text": ({"steering_vectors": "calm"}, "steering_vectors"),
    "vectors: true": ({"steering_vectors": True}, "steering_vectors"),
    "vectors: a hook with a list": (_vectors(VECTOR), _HOOK),
    "vectors: a hook with a number": (_vectors(1.0), _HOOK),
    "vectors: a layer with a number": (_vectors({"3": 1.0}), f"{_HOOK}.3"),
    "vectors: a layer with nothing": (_vectors({"3": None}), f"{_HOOK}.3"),
    "vectors: a layer with a text": (_vectors({"3": "AAAA"}), f"{_HOOK}.3"),
    "vectors: lists in the list": (_vectors({"3": [VECTOR]}), f"{_HOOK}.3"),
    "vectors: one number too many": (_vectors({"3": [*VECTOR, 0.0]}), f"{_HOOK}.3"),
    "vectors: null among the numbers": (_vectors({"3": [*VECTOR[1:], None]}), f"{_HOOK}.3"),
    "vectors: true among the numbers": (_vectors({"3": [*VECTOR[1:], True]}), f"{_HOOK}.3"),
    "vectors: too large for float32": (_vectors({"3": [*VECTOR[1:], 1e300]}), f"{_HOOK}.3"),
    "vectors: too large for float64": (_vectors({"3": [*VECTOR[1:], 10**400]}), f"{_HOOK}.3"),
    "vectors: one layer twice": (_vectors({"3": VECTOR, str(3 - LAYERS): VECTOR}), f"{_HOOK}.{3 - LAYERS}"),
    "vectors: half a layer": (_vectors({"3.5": VECTOR}), _HOOK),
    "vectors: an empty name for a layer": (_vectors({"": VECTOR}), _HOOK),
    "vectors: an empty hook point": ({"steering_vectors": {"": {"3": VECTOR}}}, "steering_vectors."),
    "vectors: layers of the final norm": (
        {"steering_vectors": {"final_norm": {"3": VECTOR}}},
        "steering_vectors.final_norm",
    ),
    "vectors: a long name of a hook": (
        {"steering_vectors": {LONG: {"3": VECTOR}}},
        "steering_vectors",
    ),
    "vectors: a long name of a layer": (_vectors({LONG: VECTOR}), _HOOK),
    "vectors: a long text": (_vectors({"3": LONG}), f"{_HOOK}.3"),
    "scale: a text": (_vectors({"3": {"vector": VECTOR, "scale": "2"}}), f"{_HOOK}.3.scale"),
    "scale: null": (_vectors({"3": {"vector": VECTOR, "scale": None}}), f"{_HOOK}.3.scale"),
    "scale: true": (_vectors({"3": {"vector": VECTOR, "scale": True}}), f"{_HOOK}.3.scale"),
    "scale: too large": (_vectors({"3": {"vector": VECTOR, "scale": 1e39}}), f"{_HOOK}.3.scale"),
    "scale: alone": (_vectors({"3": {"scale": 2.0}}), f"{_HOOK}.3"),
    "scale: an unknown key beside it": (_vectors({"3": {"vector": VECTOR, "strength": 2.0}}), f"{_HOOK}.3"),
    "packed: no dtype": (_packed(dtype=None), _HOOK),
    "packed: no shape": (_packed(shape=None), _HOOK),
    "packed: no layers": (_packed(layer_indices=None), _HOOK),
    "packed: an unknown key": (_packed(pickle="gASV"), _HOOK),
    "packed: an unknown dtype": (_packed(dtype="object"), f"{_HOOK}.dtype"),
    "packed: a dtype that is a list": (_packed(dtype=["float32"]), f"{_HOOK}.dtype"),
    "packed: a shape that is a text": (_packed(shape="1"), f"{_HOOK}.shape"),
    "packed: a shape of three": (_packed(shape=[1, 1, HIDDEN]), f"{_HOOK}.shape"),
    "packed: a negative shape": (_packed(shape=[-1, HIDDEN]), f"{_HOOK}.shape"),
    "packed: a shape for two layers": (_packed(shape=[2, HIDDEN]), f"{_HOOK}.shape"),
    "packed: an empty list of layers": (_packed(layer_indices=[]), f"{_HOOK}.layer_indices"),
    "packed: a layer too high": (_packed(layer_indices=[LAYERS]), f"{_HOOK}.layer_indices"),
    "packed: a layer that is null": (_packed(layer_indices=[None]), f"{_HOOK}.layer_indices"),
    "packed: too many layers": (_packed(layer_indices=[3] * (LAYERS + 1)), f"{_HOOK}.layer_indices"),
    "packed: no base64": (_packed(data=NOT_ENCODED), f"{_HOOK}.data"),
    "packed: data that is a list": (_packed(data=VECTOR), f"{_HOOK}.data"),
    "packed: data that is null": (_vectors({**packed([3]), "data": None}), f"{_HOOK}.data"),
    "packed: too little data": (_packed(data="AAAA"), f"{_HOOK}.data"),
    "packed: scales for two layers": (_packed(scales=[1.0, 2.0]), f"{_HOOK}.scales"),
    "packed: a scale that is a text": (_packed(scales=["1"]), f"{_HOOK}.scales[0]"),
    "name: empty": ({"steering_name": ""}, "steering_name"),
    "name: far too long": ({"steering_name": "x" * 10_000}, "steering_name"),
    "name: a line break": ({"steering_name": "calm\n"}, "steering_name"),
    "name: an empty list": ({"steering_name": []}, "steering_name"),
    "name: an object": ({"steering_name": {"name": "calm"}}, "steering_name"),
    "name: a list with a number": ({"steering_name": ["calm", 7]}, "steering_name"),
    "name: twice": ({"steering_name": ["calm", "calm"]}, "steering_name"),
    "name: too many": ({"steering_name": [f"m{i}" for i in range(65)]}, "steering_name"),
    "reference: a scale that is a text": ({"steering_module_ref": ["calm", "2"]}, "steering_module_ref"),
    "reference: a scale too large": ({"steering_module_ref": ["calm", 1e39]}, "steering_module_ref.scale"),
    "reference: three items": ({"steering_module_ref": [["calm", 1.0, 2.0]]}, "steering_module_ref"),
    "reference: an unknown key": ({"steering_module_ref": {"name": "calm", "by": 2.0}}, "steering_module_ref"),
    "reference: what is named already": (
        {"steering_name": "calm", "steering_module_ref": ["calm", 2.0]},
        "steering_module_ref",
    ),
}

_SET, _REGISTER, _UNREGISTER = "/v1/steering/set", "/v1/steering/modules/register", "/v1/steering/modules/unregister"
_ONE = {"post_mlp": {"3": VECTOR}}

ROUTES: dict[str, tuple[str, Fields, str]] = {
    "set: nothing": (_SET, {}, "vectors"),
    "set: null": (_SET, {"vectors": None}, "vectors"),
    "set: a field of requests": (_SET, {"steering_gates": []}, "steering_gates"),
    "set: replace that is a text": (_SET, {"vectors": _ONE, "replace": "yes"}, "replace"),
    "set: a wrong width": (_SET, {"vectors": {"post_mlp": {"3": [1.0]}}}, "vectors.post_mlp.3"),
    "set: an unknown hook": (_SET, {"decode_vectors": {"x": {"3": VECTOR}}}, "decode_vectors.x"),
    "set: too large in sum": (
        _SET,
        {"vectors": {"post_mlp": {"3": [3e38] * HIDDEN}}, "prefill_vectors": {"post_mlp": {"3": [3e38] * HIDDEN}}},
        "prefill_vectors",
    ),
    "register: no name": (_REGISTER, {"vectors": _ONE}, "name"),
    "register: a name that is null": (_REGISTER, {"name": None, "vectors": _ONE}, "name"),
    "register: an empty name": (_REGISTER, {"name": "", "vectors": _ONE}, "name"),
    "register: a name with a line break": (_REGISTER, {"name": "a\nb", "vectors": _ONE}, "name"),
    "register: a file of the server's": (_REGISTER, {"name": "a", "path": "/etc/passwd"}, "path"),
    "register: no vectors": (_REGISTER, {"name": "a"}, "vectors"),
    "register: vectors that are a text": (_REGISTER, {"name": "a", "vectors": "calm"}, "vectors"),
    "unregister: no name": (_UNREGISTER, {}, "name"),
    "unregister: a list": (_UNREGISTER, {"name": ["a"]}, "name"),
}
