"""The OpenAPI description of ``/v1/steering``: bodies, answers, examples. Classes of documents give the schemas."""

from __future__ import annotations

from typing import Any

from headgate.steering.control.status import (
    DynamicStatus,
    FoundFeatures,
    GlobalStatus,
    GlobalUpdate,
    Layers,
    ModuleStatus,
    ProbeStatus,
    RuleStatus,
    SaeDocument,
    SaeStatus,
    SlotStatus,
)
from headgate.steering.core.audit import ACTIONS, AuditEntry
from headgate.steering.documents.gates import RuleDocument
from headgate.steering.documents.probes import ProbeDocument
from headgate.steering.documents.request import SteeringDocument
from headgate.steering.documents.schema import Count, Name, Schema, object_of, schema_of
from headgate.steering.documents.vectors import Vectors

_ERROR = object_of(
    error={
        "type": "object",
        "properties": {
            "message": schema_of(str),
            "type": schema_of(str),
            "param": {**schema_of(str | None), "description": "The field that is wrong."},
            "code": schema_of(int),
        },
        "required": ["message", "type", "code"],
    }
)
_REASONS = {
    400: "The body is wrong; `param` names the field. Nothing has changed.",
    403: "The request lacks a key with the role, or the module belongs to another key.",
    404: "The server was started without steering, or there is no module of that name.",
    415: "The body is neither JSON nor msgpack.",
}
_READS, _WRITES = (404,), (400, 403, 404, 415)


def _answers(schema: Schema, example: Any, *refused: int) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route by status: the success with an example, and the refusals."""
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


def _answer(kind: Any) -> Schema:
    return schema_of(kind, is_answer=True)


def _done(*schemas: Schema, **fields: Any) -> Schema:
    return object_of(*schemas, status={"type": "string", "enum": ["ok"]}, **fields)


def _read(summary: str, schema: Schema, example: Any, *refused: int) -> dict[str, Any]:
    return {"summary": summary, "responses": _answers(schema, example, *(refused or _READS))}


def _listed(summary: str, name: str, kind: Any, examples: list[Any], *refused: int) -> dict[str, Any]:
    schema = object_of(**{name: _answer(list[kind]), "count": Count})
    return _read(summary, schema, {name: examples, "count": len(examples)}, *refused)


def _change(summary: str, body: Schema, examples: dict[str, Any], answer: Schema, example: Any) -> dict[str, Any]:
    told = _answers(answer, {"status": "ok", **example}, *_WRITES)
    return {"summary": summary, "openapi_extra": _body(body, examples), "responses": told}


def _unregistered(what: str, name: str) -> dict[str, Any]:
    named = {"name": name}
    return _change(f"Forget a {what}", object_of(name=Name), {name: named}, _done(name=str), named)


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
    "prefill": {"hash": HASH, "sites": ["15.post_mlp"], "op_sites": [], "norms": {"15.post_mlp": 2.5}},
    "decode": {"hash": HASH[::-1], "sites": [], "op_sites": ["15.post_mlp"], "norms": {}},
    "version": 1,
}
_VECTORS: Schema = {**schema_of(Vectors), "description": "Act at prompt and generated positions."}


def _content(**fields: Any) -> Schema:
    """Return the schema of a body of vectors, operations and features, all optional, with required fields."""
    schema = object_of(schema_of(SteeringDocument), **fields)
    return {**schema, "properties": {**schema["properties"], "vectors": _VECTORS}}


_SET_BODY = _content()
_SET_BODY["properties"]["replace"] = {**schema_of(bool | None), "default": False}
SET = _change(
    "Set global steering vectors",
    _SET_BODY,
    {
        "lists": _SET_EXAMPLE,
        "packed": {"vectors": _PACKED_EXAMPLE, "replace": True},
        "features": {"decode_features": [{"sae": "gs2-17", "feature": 3124, "set": 38.5}]},
    },
    _done(_answer(GlobalUpdate)),
    {"hook_points": ["post_mlp", "pre_attn", "post_attn"], "layers_updated": [14, 20]},
)
CLEAR = _read("Take all global steering vectors away", _done(), {"status": "ok"}, 400, 403, 404)
REGISTER = _change(
    "Register a named steering module",
    _content(name=Name),
    {
        "creativity": {
            "name": "creativity",
            "vectors": {"post_mlp": {"15": [0.1, 0.2, 0.3]}},
            "prefill_vectors": {"pre_attn": {"15": {"vector": [0.3, 0.4, 0.5], "scale": 2.0}}},
            "decode_vectors": None,
        }
    },
    _done(_answer(ModuleStatus), modules=list[str]),
    {"name": "creativity", **_PHASES_EXAMPLE, "modules": ["creativity", "safety"]},
)
UNREGISTER = _unregistered("named steering module", "creativity")
STATUS = _read(
    "Global steering vectors, named modules, and vector slots",
    object_of(
        **{"global": _answer(GlobalStatus)},
        modules=_answer(dict[str, ModuleStatus]),
        slots=_answer(list[SlotStatus]),
        is_consistent=bool,
    ),
    {
        "global": {"tiers": {"base": ["15.post_mlp"], "prefill": ["15.pre_attn"]}, **_PHASES_EXAMPLE},
        "modules": {"creativity": {"name": "creativity", **_PHASES_EXAMPLE}},
        "slots": [{"capacity": 8191, "reserved": 6, "waiting": 0}],
        "is_consistent": True,
    },
)
LAYERS = _read(
    "What can be steered",
    _answer(Layers),
    {
        "hook_points": {"pre_attn": [0, 1, 2], "post_attn": [0, 1, 2], "post_mlp": [0, 1, 2]},
        "num_layers": 3,
        "hidden_size": 2560,
        "dtype": "bfloat16",
        "max_vectors_per_request": 18,
        "op_hook_points": {"post_mlp": [1]},
        "max_ops_per_site": 8,
    },
)
MODULES = _listed("Names of the registered steering modules", "modules", str, ["creativity", "safety", "formality"])
_ENTRY = _answer(AuditEntry)
_ENTRY["properties"]["action"]["enum"] = list(ACTIONS.values())
_ENTRY["properties"]["time"]["format"] = "date-time"
AUDIT = _read(
    "Who changed global vectors and named modules",
    object_of(entries={"type": "array", "items": _ENTRY}, size=Count),
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
)
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
SAES = _listed("SAEs and transcoders whose features requests can change", "saes", SaeStatus, [_SAE_EXAMPLE])
SAE_FEATURES = _read(
    "Features of an SAE by their labels",
    _answer(FoundFeatures),
    {"sae": "gs2-17", "num_labels": 16102, "features": [{"id": 3124, "label": "words about the sea"}], "count": 1},
    *(400, 404),
)
_FROM_QUERY = {"in": "query", "required": False}
SAE_FEATURES["openapi_extra"] = {
    "parameters": [
        {"name": "query", **_FROM_QUERY, "schema": {"type": "string", "default": ""}},
        {"name": "limit", **_FROM_QUERY, "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50}},
    ]
}
REGISTER_SAE = _change(
    "Register an SAE or a transcoder",
    schema_of(SaeDocument),
    {"gemma scope": {"name": "gs2-17", "path": "gs2-17.safetensors", "site": "17.post_mlp"}},
    _done(_answer(SaeStatus)),
    _SAE_EXAMPLE,
)

_SWEEP_EVENTS = (
    'data: {"metric": "recovered", "sites": ["9.post_mlp"], "positions": [4], "source_positions": [4], '
    '"tokens": [" Tower"], "skipped": [], "clean": 5.25, "corrupt": -1.5, "num_cells": 1}\n\n'
    'data: {"site": "9.post_mlp", "position": 4, "value": 0.83}\n\ndata: [DONE]\n\n'
)


def patch_sweep(document: Any) -> dict[str, Any]:
    """Return the description of the route ``/v1/patch_sweep``, whose body is a `document`."""
    refused = {status: answer for status, answer in _answers({}, None, *_WRITES).items() if status != 200}
    events = {"description": "The grid, then its cells.", "content": {"text/event-stream": {"example": _SWEEP_EVENTS}}}
    example = {
        "prompt": "The Colosseum is in the city of",
        "source": "clean-1",
        "at": {"hook": "post_mlp", "layers": "all"},
        "metric": "recovered",
        "answer": " Paris",
        "foil": " Rome",
    }
    return {
        "summary": "Patch rows of a kept run into a prompt, one site and position at a time",
        "openapi_extra": _body(schema_of(document), {"recovered": example}),
        "responses": {**refused, 200: events},
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
PROBES = _listed("Probes that gates can name", "probes", ProbeStatus, [_PROBE_EXAMPLE])
REGISTER_PROBE = _change(
    "Register a probe",
    schema_of(ProbeDocument),
    {
        "linear": {"name": "anger", "at": "12.post_mlp", "weight": [0.5, -1.0, 0.25], "bias": 0.1, "threshold": 0.5},
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
    _done(_answer(ProbeStatus)),
    _PROBE_EXAMPLE,
)
UNREGISTER_PROBE = _unregistered("probe", "anger")
_RULE_EXAMPLE = {
    "name": "calm-down",
    "applies_to": "all",
    "when": {"probe": "anger", "above": 0.5},
    "then": {"module": "calm", "scale": 2.0},
    "scope": "rest_of_request",
    "strength": "binary",
    "probes": ["anger"],
    "sites": ["12.post_mlp"],
    "observes": False,
    "sha256": HASH,
}
RULES = _listed(
    "Rules: gates that act on requests which did not ask", "rules", RuleStatus, [_RULE_EXAMPLE], *(403, 404)
)
REGISTER_RULE = _change(
    "Register a rule",
    schema_of(RuleDocument),
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
    _done(_answer(RuleStatus)),
    _RULE_EXAMPLE,
)
UNREGISTER_RULE = _unregistered("rule", "calm-down")
DYNAMIC = _read(
    "Probes, gates, rules and controllers, with what these came to",
    _answer(DynamicStatus),
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
)
