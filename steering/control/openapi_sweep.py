"""The OpenAPI description of ``POST /v1/patch_sweep``. Plain data."""

from __future__ import annotations

from typing import Any

from headgate.steering.control.openapi import COUNT, TEXT, answers_of, body_of, list_of, object_of

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
