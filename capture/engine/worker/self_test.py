"""Start-up proof that every site responds: dummy steps through the very graphs that will serve.

Catches a stale graph from a compile cache, a module whose forward is bypassed, and a hook at the wrong place: where
the sites allow it, the identities of the residual stream are checked on the captured rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.schema.errors import SelfTestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.staging.ring import StagingRing

logger = logging.getLogger("headgate")

SENTINEL = 12288.0
"""Exact in bf16, fp16 and fp32, and no value that a whole row of a residual stream holds."""
NUM_TOKENS = 4
MAX_RELATIVE_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def check_capture(
    staging: StagingRing | None, sites: Sequence[Site], facts: WorkerFacts, run: Callable[[int], object]
) -> None:
    """Drive one dummy step of a few tokens and one of a single token, and check what arrived in the ring.

    A worker without a ring of its own (tensor-parallel rank above 0) runs the steps with the others.

    Raises:
        SelfTestError: Naming the sites that did not respond, or whose values contradict each other.
    """
    sizes = tuple(size for size in (NUM_TOKENS, 1) if size <= facts.max_tokens)
    for num_tokens in sizes:
        if staging is None:
            run(num_tokens)
            continue
        with torch.inference_mode():
            _fill_with_sentinel(staging, num_tokens)
        run(num_tokens)
        with torch.inference_mode():
            rows = {site: staging.buffers[index, :num_tokens].float() for index, site in enumerate(sites)}
            _check_written(rows, num_tokens)
            _check_identities(rows, MAX_RELATIVE_ERROR[facts.dtype])
    if staging is not None:
        staging.reset()
        logger.info("capture: self-test passed, %d sites respond", len(sites))


def _fill_with_sentinel(staging: StagingRing, num_tokens: int) -> None:
    """Fill the ring with the sentinel and send the first batch rows to its first slots."""
    staging.reset()
    staging.buffers[:, :num_tokens].fill_(SENTINEL)
    staging.slots[:num_tokens].copy_(torch.arange(num_tokens, device=staging.slots.device))


def _check_written(rows: Mapping[Site, Tensor], num_tokens: int) -> None:
    silent = [site.name for site, values in rows.items() if bool((values == SENTINEL).all(dim=1).any())]
    if silent:
        raise SelfTestError(
            f"sites {', '.join(silent)} did not respond to a dummy step of {num_tokens} tokens: their code did not "
            "run. A stale compiled graph (remove vLLM's cache folder) or a model whose forward bypasses its modules"
        )


class Identity(NamedTuple):
    """``total = sum(parts)`` on the residual stream."""

    total: Site
    parts: tuple[Site, ...]


def identities(sites: Sequence[Site]) -> Iterator[Identity]:
    """Yield the identities that can be checked with `sites`: neighbouring layers, and each branch's addition."""
    for layer in sorted({site.layer for site in sites if site.layer >= 0}):
        mid = Site(layer, HookPoint.POST_ATTN)
        end = Site(layer, HookPoint.POST_MLP)
        begin = Site(layer, HookPoint.PRE_ATTN)
        attn, mlp = Site(layer, HookPoint.ATTN_OUT), Site(layer, HookPoint.MLP_OUT)
        for identity in (
            Identity(Site(layer + 1, HookPoint.PRE_ATTN), (end,)),
            Identity(mid, (begin, attn)),
            Identity(end, (mid, mlp)),
        ):
            if {identity.total, *identity.parts} <= set(sites):
                yield identity


def _check_identities(rows: Mapping[Site, Tensor], max_relative_error: float) -> None:
    """Check what can be checked. A dummy step's attention may leave its output uninitialised: what is not finite must
    then be so on both sides."""
    for identity in identities(tuple(rows)):
        total = rows[identity.total]
        summed = torch.stack([rows[part] for part in identity.parts]).sum(dim=0)
        is_finite = total.isfinite()
        scale = max(_largest(rows[site], is_finite) for site in (identity.total, *identity.parts))
        error = _largest(total - summed, is_finite)
        if not torch.equal(is_finite, summed.isfinite()) or error > max_relative_error * scale:
            parts = " + ".join(part.name for part in identity.parts)
            raise SelfTestError(
                f"{identity.total.name} is not {parts}: off by {error:.3g} at a scale of {scale:.3g}. The model's "
                "layers are not understood; take these sites out of capture.sites and report the architecture"
            )


def _largest(values: Tensor, where: Tensor) -> float:
    return float(torch.where(where, values, 0.0).abs().max())
