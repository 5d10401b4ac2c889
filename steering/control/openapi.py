"""The OpenAPI description of ``/v1/steering``: bodies, answers, examples. Plain data."""

from __future__ import annotations

from typing import Any

from headgate.capture.probe import POOLINGS
from headgate.steering.documents.features import EDIT_KEYS
from headgate.steering.documents.operations import METHOD_ALIASES
from headgate.steering.gates.gate import PID_KEYS
from headgate.steering.programs.operations import Method

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
    """Return the answers of a route by status: the success with an example, and the refusals."""
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


_SAE: Schema = {
    "name": TEXT,
    "site": {**TEXT, "description": "Where it reads."},
    "write_sites": {**list_of(TEXT), "description": "Where it writes: an SAE where it reads, a transcoder elsewhere."},
    "width": COUNT,
    "num_features": COUNT,
    "activation": {"type": "string", "enum": ["relu", "jumprelu", "gated", "topk", "groupmax"]},
    "k": {"type": ["integer", "null"]},
    "norm": {"type": "string", "enum": ["none", "layer_norm", "constant_norm_rescale"]},
    "decision": {
        "type": "string",
        "enum": ["exact", "threshold", "none"],
        "description": "How one feature's activation is found: exactly; about, by a threshold in place of top-k; or "
        "not at all, so that features can only be added to.",
    },
    "has_max_act": {"type": "boolean", "description": "Whether the unit max_act can be used."},
    "is_encoded": {"type": "boolean", "description": "Whether sae_reconstruction can name it."},
    "format": TEXT,
    "model": {"type": ["string", "null"], "description": "That it was trained on, if its files tell."},
    "source": {**TEXT, "description": "Path of its files; without the role `steer` its last name alone."},
    "sha256": TEXT,
}
_SAE_EXAMPLE = {
    "name": "gs2-17",
    "site": "17.post_mlp",
    "write_sites": ["17.post_mlp"],
    "width": 2560,
    "num_features": 16384,
    "activation": "topk",
    "k": 50,
    "norm": "none",
    "decision": "threshold",
    "has_max_act": False,
    "is_encoded": False,
    "format": "saelens",
    "model": "google/gemma-3-4b-it",
    "source": "/data/saes/gs2-17.safetensors",
    "sha256": HASH,
}
SAES: dict[str, Any] = {
    "summary": "SAEs and transcoders whose features requests can change",
    "responses": answers_of(
        object_of({"saes": list_of(object_of(_SAE, required=tuple(_SAE))), "count": COUNT}, required=("saes", "count")),
        {"saes": [_SAE_EXAMPLE], "count": 1},
        404,
    ),
}
REGISTER_SAE: dict[str, Any] = {
    "summary": "Register an SAE or a transcoder",
    "openapi_extra": body_of(
        object_of(
            {
                "name": {**TEXT, "minLength": 1, "maxLength": 256},
                "path": {**TEXT, "description": "A file or folder below the server's --sae-root."},
                "site": {
                    "type": ["string", "null"],
                    "description": "Where it acts, if the files do not tell; not of transcoders.",
                },
            },
            required=("name", "path"),
        ),
        {"gemma scope": {"name": "gs2-17", "path": "gs2-17.safetensors", "site": "17.post_mlp"}},
    ),
    "responses": answers_of(
        object_of({"status": STATUS_OK, **_SAE}, required=("status", *_SAE)),
        {"status": "ok", **_SAE_EXAMPLE},
        *(400, 403, 404, 415),
    ),
}


_SWEEP_EVENTS = (
    'data: {"metric": "recovered", "sites": ["9.post_mlp"], "positions": [4], "source_positions": [4], '
    '"tokens": [" Tower"], "skipped": [], "clean": 5.25, "corrupt": -1.5, "num_cells": 1}\n\n'
    'data: {"site": "9.post_mlp", "position": 4, "value": 0.83}\n\ndata: [DONE]\n\n'
)
PATCH_SWEEP: dict[str, Any] = {
    "summary": "Patch rows of a kept run into a prompt, one site and position at a time",
    "openapi_extra": body_of(
        object_of(
            {
                "prompt": {"anyOf": [TEXT, list_of(COUNT)], "description": "The corrupted prompt, or its tokens."},
                "source": {
                    "anyOf": [TEXT, object_of({"request": TEXT, "sample": COUNT}, required=("request",))],
                    "description": "The clean run: the name under which it has kept its rows.",
                },
                "at": {"description": "Sites, as an operation has them."},
                "positions": {"description": "Of the prompt, as captures select them.", "default": "all_prompt"},
                "metric": {**TEXT, "enum": ["logprob", "logit_diff", "recovered"], "default": "logprob"},
                "answer": {"anyOf": [TEXT, COUNT], "description": "The token whose logprob counts."},
                "foil": {"anyOf": [TEXT, COUNT, {"type": "null"}], "description": "The token it is compared with."},
                "alpha": {"type": "number", "default": 1.0},
                "model": TEXT,
            },
            required=("prompt", "source", "at", "answer"),
        ),
        {
            "recovered": {
                "prompt": "The Colosseum is in the city of",
                "source": "clean-1",
                "at": {"hook": "post_mlp", "layers": "all"},
                "metric": "recovered",
                "answer": " Paris",
                "foil": " Rome",
            }
        },
    ),
    "responses": {
        **{status: answer for status, answer in answers_of({}, None, 400, 403, 404, 415).items() if status != 200},
        200: {"description": "The grid, then its cells.", "content": {"text/event-stream": {"example": _SWEEP_EVENTS}}},
    },
}


_NAME: Schema = {**TEXT, "minLength": 1, "maxLength": 256}
_NUMBERS: Schema = list_of({"type": "number"})
_PACKED_ROWS: Schema = object_of(
    {
        "dtype": {"type": "string", "enum": ["float32", "float16", "bfloat16", "float64"]},
        "shape": {**list_of(COUNT), "description": "[hidden size], or [classes, hidden size]"},
        "data": {**TEXT, "description": "The rows, little-endian: base64 in JSON, raw bytes in msgpack."},
    },
    required=("dtype", "shape", "data"),
)
_KIND: Schema = {"type": "string", "enum": ["linear", "cosine", "mlp"]}
_ROWS: Schema = {"anyOf": [_NUMBERS, list_of({"anyOf": [_NUMBERS, _PACKED_ROWS]}), _PACKED_ROWS]}
_HIDDEN: Schema = {
    **object_of(
        {
            "weight": {**_ROWS, "description": "A row of the hidden size for each unit."},
            "bias": {**_NUMBERS, "description": "A number for each unit."},
            "activation": {"type": "string", "enum": ["relu", "gelu", "silu"]},
        },
        required=("weight", "bias", "activation"),
    ),
    "description": "The first layer of an MLP; then weight has a value for each of its units.",
}
_POOLING: Schema = {
    "type": "string",
    "enum": list(POOLINGS),
    "description": "The rows that it was made for; gates choose for themselves.",
}
_PROBE: Schema = {
    "name": TEXT,
    "at": {**TEXT, "description": "The site that it reads."},
    "kind": _KIND,
    "classes": list_of(TEXT),
    "hidden_size": COUNT,
    "threshold": {"type": ["number", "null"]},
    "pooling": _POOLING,
    "model": {"type": ["string", "null"], "description": "That it was made for, if known."},
    "metadata": {"type": "object", "additionalProperties": TEXT, "description": "About how it was made."},
    "sha256": TEXT,
}
_PROBE_EXAMPLE = {
    "name": "anger",
    "at": "12.post_mlp",
    "kind": "linear",
    "classes": ["positive"],
    "hidden_size": 3,
    "threshold": 0.5,
    "pooling": "token",
    "model": "google/gemma-3-4b-it",
    "metadata": {},
    "sha256": HASH,
}
PROBES: dict[str, Any] = {
    "summary": "Probes that gates can name",
    "responses": answers_of(
        object_of(
            {"probes": list_of(object_of(_PROBE, required=tuple(_PROBE))), "count": COUNT}, required=("probes", "count")
        ),
        {"probes": [_PROBE_EXAMPLE], "count": 1},
        404,
    ),
}
REGISTER_PROBE: dict[str, Any] = {
    "summary": "Register a probe",
    "openapi_extra": body_of(
        object_of(
            {
                "name": _NAME,
                "at": {**TEXT, "description": "A site where operations can act, such as 12.post_mlp."},
                "weight": {**_ROWS, "description": "One row of the hidden size, or one for each class."},
                "bias": {"anyOf": [{"type": "number"}, _NUMBERS, {"type": "null"}]},
                "kind": {"anyOf": [_KIND, {"type": "null"}], "default": "linear"},
                "threshold": {"type": ["number", "null"], "description": "Of the score, for a probe of one row."},
                "classes": {"anyOf": [list_of(_NAME), {"type": "null"}], "description": "A name for each row."},
                "pooling": {"anyOf": [_POOLING, {"type": "null"}], "default": "token"},
                "model": {"anyOf": [_NAME, {"type": "null"}]},
                "hidden": {"anyOf": [_HIDDEN, {"type": "null"}]},
            },
            required=("name", "at", "weight"),
        ),
        {
            "linear": {
                "name": "anger",
                "at": "12.post_mlp",
                "weight": [0.5, -1.0, 0.25],
                "bias": 0.1,
                "threshold": 0.5,
            },
            "mlp of two units": {
                "name": "mood",
                "at": "12.post_mlp",
                "kind": "mlp",
                "hidden": {
                    "weight": [[0.5, -1.0, 0.25], [0.1, 0.0, -0.3]],
                    "bias": [0.0, 0.2],
                    "activation": "gelu",
                },
                "weight": [1.0, -2.0],
            },
            "two classes, packed": {
                "name": "language",
                "at": "12.post_mlp",
                "weight": {"dtype": "float32", "shape": [2, 3], "data": "AACAPwAAAEAAAEBAAACAPwAAAEAAAEBA"},
                "kind": "cosine",
                "classes": ["french", "german"],
            },
        },
    ),
    "responses": answers_of(
        object_of({"status": STATUS_OK, **_PROBE}, required=("status", *_PROBE)),
        {"status": "ok", **_PROBE_EXAMPLE},
        *(400, 403, 404, 415),
    ),
}
UNREGISTER_PROBE: dict[str, Any] = {
    "summary": "Forget a probe",
    "openapi_extra": body_of(object_of({"name": _NAME}, required=("name",)), {"anger": {"name": "anger"}}),
    "responses": answers_of(
        object_of({"status": STATUS_OK, "name": TEXT}, required=("status", "name")),
        {"status": "ok", "name": "anger"},
        *(400, 403, 404, 415),
    ),
}


_APPLIES_TO: Schema = {
    "type": "string",
    "enum": ["all", "opt_in", "opt_out"],
    "description": "opt_in: requests whose steering_rules name it; opt_out: beside these all without that field.",
}
_STRENGTH: Schema = {
    "anyOf": [
        {"type": "string", "enum": ["binary"]},
        object_of({"proportional": {"type": "number"}}, required=("proportional",)),
        object_of({"sigmoid": {"type": "number"}}, required=("sigmoid",)),
        object_of(
            {
                "pid": object_of(
                    {key: {"type": "number"} for key in PID_KEYS},
                    required=("setpoint",),
                )
            },
            required=("pid",),
        ),
    ]
}
_SCOPE: Schema = {"type": "string", "enum": ["this_token", "next_token", "rest_of_request"]}
_RULE: Schema = {
    "name": TEXT,
    "applies_to": _APPLIES_TO,
    "scope": _SCOPE,
    "strength": _STRENGTH,
    "probes": {**list_of(TEXT), "description": "Names of the scores that it reads, as in traces."},
    "sites": {**list_of(TEXT), "description": "That it reads and writes."},
    "observes": {"type": "boolean"},
    "sha256": TEXT,
}
_RULE_EXAMPLE = {
    "name": "calm-down",
    "applies_to": "all",
    "scope": "rest_of_request",
    "strength": "binary",
    "probes": ["anger"],
    "sites": ["12.post_mlp"],
    "observes": False,
    "sha256": HASH,
}
RULES: dict[str, Any] = {
    "summary": "Rules: gates that act on requests which did not ask",
    "responses": answers_of(
        object_of(
            {"rules": list_of(object_of(_RULE, required=tuple(_RULE))), "count": COUNT}, required=("rules", "count")
        ),
        {"rules": [_RULE_EXAMPLE], "count": 1},
        *(403, 404),
    ),
}
REGISTER_RULE: dict[str, Any] = {
    "summary": "Register a rule",
    "openapi_extra": body_of(
        object_of(
            {
                "name": _NAME,
                "applies_to": _APPLIES_TO,
                "when": {
                    "anyOf": [{"type": "string"}, {"type": "object"}],
                    "description": "The condition, as of a gate in steering_gates.",
                },
                "then": {
                    "anyOf": [{"type": "string", "enum": ["observe"]}, {"type": "object"}],
                    "description": "As of a gate, without attenuate: module, vectors, ops or features.",
                },
                "strength": {"anyOf": [_STRENGTH, {"type": "null"}], "default": "binary"},
                "scope": {"anyOf": [_SCOPE, {"type": "null"}], "default": "this_token"},
            },
            required=("name", "applies_to", "when", "then"),
        ),
        {
            "a rule": {
                "name": "calm-down",
                "applies_to": "all",
                "when": {"probe": "anger", "above": 0.5},
                "then": {"module": "calm", "scale": 2.0},
                "scope": "rest_of_request",
            },
            "shadow mode": {
                "name": "watch",
                "applies_to": "opt_out",
                "when": {"cosine": [0.5, -1.0, 0.25], "at": "12.post_mlp", "above": 0.2},
                "then": "observe",
            },
        },
    ),
    "responses": answers_of(
        object_of({"status": STATUS_OK, **_RULE}, required=("status", *_RULE)),
        {"status": "ok", **_RULE_EXAMPLE},
        *(400, 403, 404, 415),
    ),
}
UNREGISTER_RULE: dict[str, Any] = {
    "summary": "Forget a rule",
    "openapi_extra": body_of(object_of({"name": _NAME}, required=("name",)), {"calm-down": {"name": "calm-down"}}),
    "responses": answers_of(
        object_of({"status": STATUS_OK, "name": TEXT}, required=("status", "name")),
        {"status": "ok", "name": "calm-down"},
        *(400, 403, 404, 415),
    ),
}
_ACTIVITY: Schema = {
    "name": TEXT,
    "applies_to": _APPLIES_TO,
    "observes": {"type": "boolean"},
    "rows": {**COUNT, "description": "That it wrote; if it observes, on which it would have."},
}
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_CONTROLLER: Schema = {
    "name": TEXT,
    "entry_point": TEXT,
    "applies_to": _APPLIES_TO,
    "probes": {**list_of(TEXT), "description": "Names of the scores that it reads, as in traces."},
    "budget_ms": {**_AMOUNT, "description": "Milliseconds that a step waits for it."},
    "steps": {**COUNT, "description": "That it was given."},
    "skipped": {**COUNT, "description": "Steps that came while it was busy, or after it was switched off."},
    "over_budget": {**COUNT, "description": "Steps that took longer."},
    "seconds": {**_AMOUNT, "description": "That it took."},
    "actions": {"type": "object", "additionalProperties": COUNT, "description": "Submitted, and by outcome."},
    "error": {"type": ["string", "null"], "description": "Why it was switched off."},
}
_DYNAMIC: Schema = {
    "probes": list_of(TEXT),
    "rules": list_of(object_of(_ACTIVITY, required=tuple(_ACTIVITY))),
    "gates": {
        "type": "object",
        "additionalProperties": COUNT,
        "description": "Rows that gates of requests wrote, by name; beyond 256 names all others as (others).",
    },
    "requests_with_gates": COUNT,
    "controllers": list_of(object_of(_CONTROLLER, required=tuple(_CONTROLLER))),
    "latches": {
        **object_of({"conversations": COUNT, "bytes": COUNT}, required=("conversations", "bytes")),
        "description": "Conversations in which gates are latched.",
    },
    "queue": {
        "anyOf": [object_of({"waiting": COUNT, "dropped": COUNT}, required=("waiting", "dropped")), {"type": "null"}],
        "description": "Actions of capture consumers; null if none are taken.",
    },
}
DYNAMIC: dict[str, Any] = {
    "summary": "Probes, gates, rules and controllers, with what these came to",
    "responses": answers_of(
        object_of(_DYNAMIC, required=tuple(_DYNAMIC)),
        {
            "probes": ["anger"],
            "rules": [{"name": "calm-down", "applies_to": "all", "observes": False, "rows": 12}],
            "gates": {"gate0": 3},
            "requests_with_gates": 1,
            "controllers": [
                {
                    "name": "pid",
                    "entry_point": "pid",
                    "applies_to": "all",
                    "probes": ["pid.score"],
                    "budget_ms": 5.0,
                    "steps": 900,
                    "skipped": 0,
                    "over_budget": 0,
                    "seconds": 0.04,
                    "actions": {"submitted": 514, "applied": 512, "rejected": 0, "dropped": 2},
                    "error": None,
                }
            ],
            "latches": {"conversations": 3, "bytes": 4096},
            "queue": {"waiting": 0, "dropped": 0},
        },
        *(403, 404),
    ),
}
