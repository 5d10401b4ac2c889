"""Every POST route and websocket of vLLM 0.26 to 0.33, by what it does with headgate's fields.

A test compares the table with the routes of the vLLM that is installed, and with the source of its routers. Routes that
are not in it, of a later vLLM or of another plugin, refuse our fields as those that are known to ignore them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping


class Kind(enum.Enum):
    """Classes of routes, by what they do with headgate's fields."""

    SERVED = "reads them, or refuses them by itself"
    PARAMETERS = "its clients write SamplingParams: reads them from sampling_params.extra_args"
    REFUSED = "computes something that they would act on, without reading them: a body with one is refused"
    UPLOAD = "the same, with bodies of type multipart/form-data: its handler looks at the form, which is read once"
    NOT_GENERATING = "runs no forward pass: looks at nothing"


ROUTES: Mapping[str, Kind] = {
    "/v1/completions": Kind.SERVED,
    "/v1/chat/completions": Kind.SERVED,
    "/v1/chat/completions/batch": Kind.SERVED,
    "/v1/responses": Kind.SERVED,
    "/invocations": Kind.SERVED,
    # Rendering writes the fields into the sampling parameters that it answers with.
    "/v1/completions/render": Kind.SERVED,
    "/v1/chat/completions/render": Kind.SERVED,
    "/v1/responses/render": Kind.SERVED,
    "/inference/v1/generate": Kind.PARAMETERS,
    "/v1/messages": Kind.REFUSED,
    "/v1/messages/render": Kind.REFUSED,
    "/cohere/v2/chat": Kind.REFUSED,
    "/cohere/v2/chat/render": Kind.REFUSED,
    "/generative_scoring": Kind.REFUSED,
    "/v1/systemone": Kind.REFUSED,
    "/v1/decisions": Kind.REFUSED,
    "/v1/realtime": Kind.REFUSED,
    "/v1/embeddings": Kind.REFUSED,
    "/v2/embed": Kind.REFUSED,
    "/pooling": Kind.REFUSED,
    "/classify": Kind.REFUSED,
    "/score": Kind.REFUSED,
    "/v1/score": Kind.REFUSED,
    "/rerank": Kind.REFUSED,
    "/v1/rerank": Kind.REFUSED,
    "/v2/rerank": Kind.REFUSED,
    "/v1/audio/transcriptions": Kind.UPLOAD,
    "/v1/audio/translations": Kind.UPLOAD,
    **dict.fromkeys(
        (
            *("/ping", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel"),
            *("/v1/completions/derender", "/v1/chat/completions/derender"),
            *("/abort_requests", "/inference/v1/abort_requests", "/pause", "/resume", "/sleep", "/wake_up"),
            *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory"),
            *("/start_profile", "/stop_profile", "/collective_rpc", "/fault_tolerance/apply"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/scale_elastic_ep"),
            *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
            *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
            *("/weight_checker", "/is_scaling_elastic_ep"),
        ),
        Kind.NOT_GENERATING,
    ),
}
"""By path; names in braces stand for anything but a slash."""

_TEMPLATES = tuple(
    (re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), kind) for path, kind in ROUTES.items() if "{" in path
)


def kind_of(path: str) -> Kind:
    """Return what the route at `path` does; `Kind.REFUSED` if it is unknown."""
    found = ROUTES.get(path)
    if found is None:
        found = next((kind for template, kind in _TEMPLATES if template.fullmatch(path)), Kind.REFUSED)
    return found
