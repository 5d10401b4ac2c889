"""The OpenAPI description of ``/v1/steering``: bodies, answers, examples. Plain data."""

from __future__ import annotations

from typing import Any

from headgate.steering.programs.operations import Method
from headgate.steering.requests.feature_fields import EDIT_KEYS
from headgate.steering.requests.op_documents import METHOD_ALIASES

Schema = dict[str, Any]


def object_of(properties: Schema, *, required: tuple[str, ...] = (), is_open: bool = False) -> Schema:
    """Return the schema of an object."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": is_open}
    return {**schema, "required": list(required)} if required else schema


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def list_of(items: Schema) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items}


METHODS = [*(method.value for method in Method), *METHOD_ALIASES]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
_INDEX: Schema = {"type": "integer"}
_ROW: Schema = {**list_of({"type": "number"}), "description": "As many numbers as the model's hidden size."}

_VECTOR: Schema = {
    "anyOf": [_ROW, object_of({"vector": _ROW, "scale": {"type": "number", "default": 1.0}}, required=("vector",))]
}
_PACKED: Schema = object_of(
    {
        "dtype": {"type": "string", "enum": ["float32", "float16", "bfloat16", "float64"]},
        "shape": {**list_of(COUNT), "description": "[number of layers, hidden size]"},
        "layer_indices": list_of(_INDEX),
        "data": {**TEXT, "description": "The rows, little-endian: base64 in JSON, raw bytes in msgpack."},
        "scales": {**list_of({"type": "number"}), "description": "One for each layer; 1.0 if absent."},
    },
    required=("dtype", "shape", "layer_indices", "data"),
)
_VECTORS: Schema = {
    "anyOf": [
        {**_map({"anyOf": [_PACKED, _map(_VECTOR)]}), "minProperties": 1},
        {"type": "null"},
    ],
    "description": "{hook point: {layer: vector}}, or {hook point: packed rows}. `final_norm` has a vector itself.",
}


def _tiers(prefill: str, decode: str) -> Schema:
    return {
        "vectors": {**_VECTORS, "title": "Act at prompt and generated positions"},
        "prefill_vectors": {**_VECTORS, "title": prefill},
        "decode_vectors": {**_VECTORS, "title": decode},
    }


_AT: Schema = {
    "anyOf": [TEXT, object_of({"hook": TEXT, "layers": {}}, required=("hook",))],
    "description": 'A site, such as "12.post_mlp", or a hook point with layers as captures select them.',
}
_OP_VECTOR: Schema = {
    "anyOf": [
        _ROW,
        {**TEXT, "description": "Name of a module, whose vector at the site it is."},
        object_of({"module": TEXT, "site": TEXT}, required=("module",)),
        object_of({"dtype": TEXT, "shape": list_of(COUNT), "data": TEXT}, required=("dtype", "shape", "data")),
    ]
}
_NUMBER: Schema = {"type": "number"}
_OPERATION: Schema = object_of(
    {
        "at": _AT,
        "method": {"type": "string", "enum": METHODS},
        **dict.fromkeys(("vector", "target", "reference", "mean"), _OP_VECTOR),
        "plane": {**list_of(_OP_VECTOR), "minItems": 2, "maxItems": 2},
        **dict.fromkeys(("scale", "strength", "min", "max", "value", "alpha", "max_ratio", "degrees"), _NUMBER),
        "mask": list_of(_INDEX),
        "positions": {"description": "Rows it acts on, as captures select positions; all of the phase if absent."},
        **{key: {"type": "boolean", "default": False} for key in ("only_if_positive", "preserve_norm")},
    },
    required=("at", "method"),
)
_OPERATIONS: Schema = {"anyOf": [list_of(_OPERATION), {"type": "null"}]}
_CLAMPS: Schema = {
    "anyOf": [{"type": "object"}, {"type": "null"}],
    "description": '{hook: {layer: [{"vector", "min", "max", "strength"} or {"vector", "value", "strength"}]}}, or '
    "packed with `bounds` and `strengths`.",
}


_EDITS: Schema = {
    "anyOf": [
        list_of(
            object_of(
                {
                    "sae": {**TEXT, "description": "Name of an SAE of the server."},
                    "feature": COUNT,
                    **{key: {"type": "number"} for key in EDIT_KEYS},
                    "unit": {"type": "string", "enum": ["raw", "max_act"], "default": "raw"},
                    "only_if_active": {"type": "boolean", "default": False},
                },
                required=("sae", "feature"),
            )
        ),
        {"type": "null"},
    ],
    "description": f"Exactly one of {', '.join(EDIT_KEYS)} each; act behind all operations, at once.",
}


_RECONSTRUCTIONS: Schema = {
    "anyOf": [list_of(TEXT), {"type": "null"}],
    "description": "Names of SAEs of the server's --sae-encode: the row becomes what they decode of it, with the "
    "edits of their features; the reconstruction's error is dropped.",
}


def _document_tiers(schemas: Schema) -> Schema:
    """Fields of operations or features: base, prefill, decode."""
    about = {
        "": "Act at prompt and generated positions",
        "prefill_": "Act at positions of the prompt, behind them",
        "decode_": "Act at generated positions, behind them",
    }
    return {
        f"{phase}{name}": {**schema, "title": title}
        for name, schema in schemas.items()
        for phase, title in about.items()
    }


_TIERS = {
    **_tiers("Added to them at positions of the prompt", "Added to them at generated positions"),
    **_document_tiers(
        {"ops": _OPERATIONS, "clamps": _CLAMPS, "features": _EDITS, "sae_reconstruction": _RECONSTRUCTIONS}
    ),
}
STATUS_OK: Schema = {"type": "string", "enum": ["ok"]}
_CONTENT = object_of(
    {"hash": {"type": ["string", "null"]}, "sites": list_of(TEXT), "op_sites": list_of(TEXT)},
    required=("hash", "sites", "op_sites"),
)
_PHASES: Schema = {"prefill": _CONTENT, "decode": _CONTENT, "version": COUNT}
_MODULE = object_of({"name": TEXT, **_PHASES}, required=("name", *_PHASES))
_ERROR = object_of(
    {
        "error": object_of(
            {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": _INDEX,
            },
            required=("message", "type", "code"),
            is_open=True,
        )
    },
    required=("error",),
)

_REASONS = {
    400: "The body is wrong; `param` names the field. Nothing has changed.",
    403: "The request lacks a key with the role, or the module belongs to another key.",
    404: "The server was started without steering, or there is no module of that name.",
    415: "The body is neither JSON nor msgpack.",
}


def answers_of(schema: Schema, example: Any, *refused: int) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route: the good one with an example, and those that refuse, by status."""
    answers: dict[int | str, dict[str, Any]] = {
        200: {"description": "Done.", "content": {"application/json": {"schema": schema, "example": example}}}
    }
    for status in refused:
        answers[status] = {"description": _REASONS[status], "content": {"application/json": {"schema": _ERROR}}}
    return answers


def body_of(schema: Schema, examples: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a route, with examples."""
    named = {name: {"value": value} for name, value in examples.items()}
    content = {kind: {"schema": schema} for kind in ("application/json", "application/msgpack")}
    content["application/json"]["examples"] = named
    return {"requestBody": {"required": True, "content": content}}


HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_PACKED_EXAMPLE = {
    "post_mlp": {
        "dtype": "float32",
        "shape": [2, 3],
        "layer_indices": [14, 20],
        "data": "AACAPwAAAEAAAEBAAACAPwAAAEAAAEBA",
    }
}
_SET_EXAMPLE = {
    "vectors": {"post_mlp": {"14": [0.1, -0.2, 0.3], "20": {"vector": [0.5, 0.1, -0.4], "scale": 2.0}}},
    "prefill_vectors": {"pre_attn": {"14": [0.3, 0.4, 0.5]}},
    "decode_vectors": {"post_attn": {"14": [0.2, -0.1, 0.0]}},
    "replace": False,
}
_PHASES_EXAMPLE = {
    "prefill": {"hash": HASH, "sites": ["15.pre_attn", "15.post_mlp"], "op_sites": []},
    "decode": {"hash": HASH[::-1], "sites": ["15.post_mlp"], "op_sites": ["15.post_mlp"]},
    "version": 1,
}

SET: dict[str, Any] = {
    "summary": "Set global steering vectors",
    "openapi_extra": body_of(
        object_of({**_TIERS, "replace": {"type": ["boolean", "null"], "default": False}}),
        {
            "lists": _SET_EXAMPLE,
            "packed": {"vectors": _PACKED_EXAMPLE, "replace": True},
            "features": {"decode_features": [{"sae": "gs2-17", "feature": 3124, "set": 38.5}]},
        },
    ),
    "responses": answers_of(
        object_of(
            {"status": STATUS_OK, "hook_points": list_of(TEXT), "layers_updated": list_of(_INDEX)},
            required=("status", "hook_points", "layers_updated"),
        ),
        {"status": "ok", "hook_points": ["post_mlp", "pre_attn", "post_attn"], "layers_updated": [14, 20]},
        *(400, 403, 404, 415),
    ),
}
CLEAR: dict[str, Any] = {
    "summary": "Take all global steering vectors away",
    "responses": answers_of(object_of({"status": STATUS_OK}, required=("status",)), {"status": "ok"}, 400, 403, 404),
}
REGISTER: dict[str, Any] = {
    "summary": "Register a named steering module",
    "openapi_extra": body_of(
        object_of({"name": {**TEXT, "minLength": 1, "maxLength": 256}, **_TIERS}, required=("name",)),
        {
            "creativity": {
                "name": "creativity",
                "vectors": {"post_mlp": {"15": [0.1, 0.2, 0.3]}},
                "prefill_vectors": {"pre_attn": {"15": {"vector": [0.3, 0.4, 0.5], "scale": 2.0}}},
                "decode_vectors": None,
            }
        },
    ),
    "responses": answers_of(
        object_of(
            {"status": STATUS_OK, "name": TEXT, **_PHASES, "modules": list_of(TEXT)},
            required=("status", "name", *_PHASES, "modules"),
        ),
        {"status": "ok", "name": "creativity", **_PHASES_EXAMPLE, "modules": ["creativity", "safety"]},
        *(400, 403, 404, 415),
    ),
}
UNREGISTER: dict[str, Any] = {
    "summary": "Forget a named steering module",
    "openapi_extra": body_of(
        object_of({"name": {**TEXT, "minLength": 1, "maxLength": 256}}, required=("name",)),
        {"creativity": {"name": "creativity"}},
    ),
    "responses": answers_of(
        object_of({"status": STATUS_OK, "name": TEXT}, required=("status", "name")),
        {"status": "ok", "name": "creativity"},
        *(400, 403, 404, 415),
    ),
}
STATUS: dict[str, Any] = {
    "summary": "Global steering vectors, named modules, and vector slots",
    "responses": answers_of(
        object_of(
            {
                "global": object_of({"tiers": _map(list_of(TEXT)), **_PHASES}, required=("tiers", *_PHASES)),
                "modules": _map(_MODULE),
                "slots": list_of(
                    object_of(
                        {"capacity": COUNT, "reserved": COUNT, "waiting": COUNT},
                        required=("capacity", "reserved", "waiting"),
                    )
                ),
                "is_consistent": {"type": "boolean"},
            },
            required=("global", "modules", "slots", "is_consistent"),
        ),
        {
            "global": {"tiers": {"base": ["15.post_mlp"], "prefill": ["15.pre_attn"]}, **_PHASES_EXAMPLE},
            "modules": {"creativity": {"name": "creativity", **_PHASES_EXAMPLE}},
            "slots": [{"capacity": 8191, "reserved": 6, "waiting": 0}],
            "is_consistent": True,
        },
        404,
    ),
}
LAYERS: dict[str, Any] = {
    "summary": "What can be steered",
    "responses": answers_of(
        object_of(
            {
                "hook_points": _map(list_of(_INDEX)),
                "num_layers": COUNT,
                "hidden_size": COUNT,
                "dtype": TEXT,
                "max_vectors_per_request": COUNT,
                "op_hook_points": _map(list_of(_INDEX)),
                "max_ops_per_site": COUNT,
            },
            required=(
                *("hook_points", "op_hook_points", "num_layers", "hidden_size", "dtype"),
                *("max_vectors_per_request", "max_ops_per_site"),
            ),
        ),
        {
            "hook_points": {"pre_attn": [0, 1, 2], "post_attn": [0, 1, 2], "post_mlp": [0, 1, 2]},
            "num_layers": 3,
            "hidden_size": 2560,
            "dtype": "bfloat16",
            "max_vectors_per_request": 18,
            "op_hook_points": {"post_mlp": [1]},
            "max_ops_per_site": 8,
        },
        404,
    ),
}
MODULES: dict[str, Any] = {
    "summary": "Names of the registered steering modules",
    "responses": answers_of(
        object_of({"modules": list_of(TEXT), "count": COUNT}, required=("modules", "count")),
        {"modules": ["creativity", "safety", "formality"], "count": 3},
        404,
    ),
}
_REGISTERING = [f"{verb}{of}" for of in ("", "_sae", "_probe", "_rule") for verb in ("register", "unregister")]
_ENTRY = object_of(
    {
        "time": {**TEXT, "format": "date-time"},
        "engine": COUNT,
        "action": {
            "type": "string",
            "enum": ["set", "clear", *_REGISTERING],
        },
        "key": {"type": ["string", "null"], "description": "Name of the client's key; null if it needed none."},
        "address": {"type": ["string", "null"], "description": "The other end of the connection."},
        "forwarded_for": {
            "type": ["string", "null"],
            "description": "The header X-Forwarded-For, as a proxy or the client itself wrote it.",
        },
        "name": {"type": ["string", "null"], "description": "The module, SAE or probe; null for global vectors."},
        "prefill": {"type": ["string", "null"], "description": "Content hash of what acts afterwards."},
        "decode": {"type": ["string", "null"]},
        "version": COUNT,
        "is_undo": {"type": "boolean", "description": "Whether it takes back what another engine core refused."},
    },
    required=(
        *("time", "engine", "action", "key", "address", "forwarded_for", "name"),
        *("prefill", "decode", "version", "is_undo"),
    ),
)
AUDIT: dict[str, Any] = {
    "summary": "Who changed global vectors and named modules",
    "responses": answers_of(
        object_of({"entries": list_of(_ENTRY), "size": COUNT}, required=("entries", "size")),
        {
            "entries": [
                {
                    "time": "2026-11-23T17:04:05.678Z",
                    "engine": 0,
                    "action": "register",
                    "key": "alice",
                    "address": "10.0.0.3",
                    "forwarded_for": "203.0.113.7",
                    "name": "creativity",
                    "prefill": HASH,
                    "decode": HASH[::-1],
                    "version": 1,
                    "is_undo": False,
                }
            ],
            "size": 1000,
        },
        *(403, 404),
    ),
}
