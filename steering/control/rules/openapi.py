"""The OpenAPI description of ``/v1/steering/rules`` and ``/v1/steering/dynamic``. Plain data."""

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
from headgate.steering.gates.gate import PID_KEYS

_NAME: Schema = {**TEXT, "minLength": 1, "maxLength": 256}
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
_EXAMPLE = {
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
        {"rules": [_EXAMPLE], "count": 1},
        *(403, 404),
    ),
}
REGISTER: dict[str, Any] = {
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
        {"status": "ok", **_EXAMPLE},
        *(400, 403, 404, 415),
    ),
}
UNREGISTER: dict[str, Any] = {
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
_NUMBER: Schema = {"type": "number", "minimum": 0}
_CONTROLLER: Schema = {
    "name": TEXT,
    "entry_point": TEXT,
    "applies_to": _APPLIES_TO,
    "probes": {**list_of(TEXT), "description": "Names of the scores that it reads, as in traces."},
    "budget_ms": {**_NUMBER, "description": "Milliseconds that a step waits for it."},
    "steps": {**COUNT, "description": "That it was given."},
    "skipped": {**COUNT, "description": "Steps that came while it was busy, or after it was switched off."},
    "over_budget": {**COUNT, "description": "Steps that took longer."},
    "seconds": {**_NUMBER, "description": "That it took."},
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
