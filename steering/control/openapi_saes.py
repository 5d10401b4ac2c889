"""The OpenAPI description of ``/v1/steering/saes``. Plain data."""

from __future__ import annotations

from typing import Any

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
