"""Extra keys of KV blocks: what steered the tokens of a block. Pure functions of the content.

A block of the prompt is keyed by what acts in the prefill phase, a generated one by what acts in the decode phase, and
the one with tokens of both by both and by where the prompt ends in it. Blocks on which nothing acts have no key, so
they are shared with requests of an engine without steering.
"""

from __future__ import annotations

from typing import NamedTuple

TAG = "headgate"
"""First half of each extra key. The same for both phases: a steered answer can become the prompt of the next turn."""


class PhaseKeys(NamedTuple):
    """Names of what acts on a request in each phase; None where nothing does."""

    prefill: str | None
    decode: str | None


def phase_keys(
    *, global_prefill: bytes | None, global_decode: bytes | None, prefill: bytes | None, decode: bytes | None
) -> PhaseKeys:
    """Join the keys of global vectors and of a request's own, phase by phase."""
    return PhaseKeys(_join(global_prefill, prefill), _join(global_decode, decode))


def block_keys(start: int, end: int, num_prompt: int, keys: PhaseKeys) -> tuple[tuple[str, str], ...]:
    """The extra keys of the block of tokens ``start : end``: none, or one pair of `TAG` and a name.

    Args:
        start: Position of the block's first token.
        end: Position after its last.
        num_prompt: Length of the request's prompt.
        keys: What acts on the request.
    """
    prefill, decode = keys
    if prefill == decode or end <= num_prompt:
        name = prefill
    elif start >= num_prompt:
        name = decode
    else:
        name = f"{prefill or ''}:{decode or ''}@{num_prompt - start}"
    return ((TAG, name),) if name else ()


def _join(shared: bytes | None, own: bytes | None) -> str | None:
    """Either alone has the same name wherever it comes from: equal vectors make equal KV."""
    names = [key.hex() for key in (shared, own) if key]
    return "+".join(names) or None
