"""The kind of the forward that is launched, or recorded in a CUDA graph, right now."""

from __future__ import annotations


def has_one_row_each() -> bool:
    """Whether each request of the forward has one row, for certain.

    Operations ask while vLLM runs or records the forward. False if nothing tells: in graphs of pieces of it, and
    where attention has no metadata.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return False
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        return False
    return all(getattr(of_layer, "max_query_len", None) == 1 for of_layer in metadata.values())
