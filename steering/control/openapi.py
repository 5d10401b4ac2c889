"""The OpenAPI description of ``/v1/steering``: bodies, answers, examples. Plain data."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(properties: Schema, *, required: tuple[str, ...] = (), is_open: bool = False) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": is_open}
    return {**schema, "required": list(required)} if required else schema


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_INDEX: Schema = {"type": "integer"}
_ROW: Schema = {**_list({"type": "number"}), "description": "As many numbers as the model's hidden size."}

_VECTOR: Schema = {
    "anyOf": [_ROW, _object({"vector": _ROW, "scale": {"type": "number", "default": 1.0}}, required=("vector",))]
}
_PACKED: Schema = _object(
    {
        "dtype": {"type": "string", "enum": ["float32", "float16", "bfloat16", "float64"]},
        "shape": {**_list(_COUNT), "description": "[number of layers, hidden size]"},
        "layer_indices": _list(_INDEX),
        "data": {**_TEXT, "description": "The rows, little-endian: base64 in JSON, raw bytes in msgpack."},
        "scales": {**_list({"type": "number"}), "description": "One for each layer; 1.0 if absent."},
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


_TIERS = _tiers("Added to them at positions of the prompt", "Added to them at generated positions")
_STATUS_OK: Schema = {"type": "string", "enum": ["ok"]}
_CONTENT = _object({"hash": {"type": ["string", "null"]}, "sites": _list(_TEXT)}, required=("hash", "sites"))
_PHASES: Schema = {"prefill": _CONTENT, "decode": _CONTENT, "version": _COUNT}
_MODULE = _object({"name": _TEXT, **_PHASES}, required=("name", *_PHASES))
_ERROR = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": _TEXT,
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


def _answer(schema: Schema, example: Any, *refused: int) -> dict[int | str, dict[str, Any]]:
    answers: dict[int | str, dict[str, Any]] = {
        200: {"description": "Done.", "content": {"application/json": {"schema": schema, "example": example}}}
    }
    for status in refused:
        answers[status] = {"description": _REASONS[status], "content": {"application/json": {"schema": _ERROR}}}
    return answers


def _body(schema: Schema, examples: dict[str, Any]) -> dict[str, Any]:
    named = {name: {"value": value} for name, value in examples.items()}
    content = {kind: {"schema": schema} for kind in ("application/json", "application/msgpack")}
    content["application/json"]["examples"] = named
    return {"requestBody": {"required": True, "content": content}}


_HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
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
    "prefill": {"hash": _HASH, "sites": ["15.pre_attn", "15.post_mlp"]},
    "decode": {"hash": _HASH[::-1], "sites": ["15.post_mlp"]},
    "version": 1,
}

SET: dict[str, Any] = {
    "summary": "Set global steering vectors",
    "openapi_extra": _body(
        _object({**_TIERS, "replace": {"type": ["boolean", "null"], "default": False}}),
        {"lists": _SET_EXAMPLE, "packed": {"vectors": _PACKED_EXAMPLE, "replace": True}},
    ),
    "responses": _answer(
        _object(
            {"status": _STATUS_OK, "hook_points": _list(_TEXT), "layers_updated": _list(_INDEX)},
            required=("status", "hook_points", "layers_updated"),
        ),
        {"status": "ok", "hook_points": ["post_mlp", "pre_attn", "post_attn"], "layers_updated": [14, 20]},
        *(400, 403, 404, 415),
    ),
}
CLEAR: dict[str, Any] = {
    "summary": "Take all global steering vectors away",
    "responses": _answer(_object({"status": _STATUS_OK}, required=("status",)), {"status": "ok"}, 400, 403, 404),
}
REGISTER: dict[str, Any] = {
    "summary": "Register a named steering module",
    "openapi_extra": _body(
        _object({"name": {**_TEXT, "minLength": 1, "maxLength": 256}, **_TIERS}, required=("name",)),
        {
            "creativity": {
                "name": "creativity",
                "vectors": {"post_mlp": {"15": [0.1, 0.2, 0.3]}},
                "prefill_vectors": {"pre_attn": {"15": {"vector": [0.3, 0.4, 0.5], "scale": 2.0}}},
                "decode_vectors": None,
            }
        },
    ),
    "responses": _answer(
        _object(
            {"status": _STATUS_OK, "name": _TEXT, **_PHASES, "modules": _list(_TEXT)},
            required=("status", "name", *_PHASES, "modules"),
        ),
        {"status": "ok", "name": "creativity", **_PHASES_EXAMPLE, "modules": ["creativity", "safety"]},
        *(400, 403, 404, 415),
    ),
}
UNREGISTER: dict[str, Any] = {
    "summary": "Forget a named steering module",
    "openapi_extra": _body(
        _object({"name": {**_TEXT, "minLength": 1, "maxLength": 256}}, required=("name",)),
        {"creativity": {"name": "creativity"}},
    ),
    "responses": _answer(
        _object({"status": _STATUS_OK, "name": _TEXT}, required=("status", "name")),
        {"status": "ok", "name": "creativity"},
        *(400, 403, 404, 415),
    ),
}
STATUS: dict[str, Any] = {
    "summary": "Global steering vectors, named modules, and vector slots",
    "responses": _answer(
        _object(
            {
                "global": _object({"tiers": _map(_list(_TEXT)), **_PHASES}, required=("tiers", *_PHASES)),
                "modules": _map(_MODULE),
                "slots": _list(
                    _object(
                        {"capacity": _COUNT, "reserved": _COUNT, "waiting": _COUNT},
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
    "responses": _answer(
        _object(
            {
                "hook_points": _map(_list(_INDEX)),
                "num_layers": _COUNT,
                "hidden_size": _COUNT,
                "dtype": _TEXT,
                "max_vectors_per_request": _COUNT,
            },
            required=("hook_points", "num_layers", "hidden_size", "dtype", "max_vectors_per_request"),
        ),
        {
            "hook_points": {"pre_attn": [0, 1, 2], "post_attn": [0, 1, 2], "post_mlp": [0, 1, 2]},
            "num_layers": 3,
            "hidden_size": 2560,
            "dtype": "bfloat16",
            "max_vectors_per_request": 18,
        },
        404,
    ),
}
MODULES: dict[str, Any] = {
    "summary": "Names of the registered steering modules",
    "responses": _answer(
        _object({"modules": _list(_TEXT), "count": _COUNT}, required=("modules", "count")),
        {"modules": ["creativity", "safety", "formality"], "count": 3},
        404,
    ),
}
_ENTRY = _object(
    {
        "time": {**_TEXT, "format": "date-time"},
        "engine": _COUNT,
        "action": {"type": "string", "enum": ["set", "clear", "register", "unregister"]},
        "key": {"type": ["string", "null"], "description": "Name of the client's key; null if it needed none."},
        "address": {"type": ["string", "null"]},
        "name": {"type": ["string", "null"], "description": "The module; null for global vectors."},
        "prefill": {"type": ["string", "null"], "description": "Content hash of what acts afterwards."},
        "decode": {"type": ["string", "null"]},
        "version": _COUNT,
        "is_undo": {"type": "boolean", "description": "Whether it takes back what another engine core refused."},
    },
    required=("time", "engine", "action", "key", "address", "name", "prefill", "decode", "version", "is_undo"),
)
AUDIT: dict[str, Any] = {
    "summary": "Who changed global vectors and named modules",
    "responses": _answer(
        _object({"entries": _list(_ENTRY), "size": _COUNT}, required=("entries", "size")),
        {
            "entries": [
                {
                    "time": "2026-11-23T17:04:05.678Z",
                    "engine": 0,
                    "action": "register",
                    "key": "alice",
                    "address": "10.0.0.3",
                    "name": "creativity",
                    "prefill": _HASH,
                    "decode": _HASH[::-1],
                    "version": 1,
                    "is_undo": False,
                }
            ],
            "size": 1000,
        },
        *(403, 404),
    ),
}
