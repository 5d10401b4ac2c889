"""The OpenAPI description of ``/v1/steering/probes``. Plain data."""

from __future__ import annotations

from typing import Any

from headgate.capture.probes.probe import POOLINGS
from headgate.steering.control.openapi import (
    COUNT,
    HASH,
    STATUS_OK,
    TEXT,
    Schema,
    answers_of,
    body_of,
    list_of,
    object_of,
)

_NAME: Schema = {**TEXT, "minLength": 1, "maxLength": 256}
_NUMBERS: Schema = list_of({"type": "number"})
_PACKED: Schema = object_of(
    {
        "dtype": {"type": "string", "enum": ["float32", "float16", "bfloat16", "float64"]},
        "shape": {**list_of(COUNT), "description": "[hidden size], or [classes, hidden size]"},
        "data": {**TEXT, "description": "The rows, little-endian: base64 in JSON, raw bytes in msgpack."},
    },
    required=("dtype", "shape", "data"),
)
_KIND: Schema = {"type": "string", "enum": ["linear", "cosine", "mlp"]}
_ROWS: Schema = {"anyOf": [_NUMBERS, list_of({"anyOf": [_NUMBERS, _PACKED]}), _PACKED]}
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
_EXAMPLE = {
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
        {"probes": [_EXAMPLE], "count": 1},
        404,
    ),
}
REGISTER: dict[str, Any] = {
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
        {"status": "ok", **_EXAMPLE},
        *(400, 403, 404, 415),
    ),
}
UNREGISTER: dict[str, Any] = {
    "summary": "Forget a probe",
    "openapi_extra": body_of(object_of({"name": _NAME}, required=("name",)), {"anger": {"name": "anger"}}),
    "responses": answers_of(
        object_of({"status": STATUS_OK, "name": TEXT}, required=("status", "name")),
        {"status": "ok", "name": "anger"},
        *(400, 403, 404, 415),
    ),
}
