"""Which sites the forward has computed when it is at another. Standard library only."""

from __future__ import annotations

from headgate.capture.schema.sites import HookPoint, Site, sort_sites

_ATTENTION = (HookPoint.ATTN_IN, HookPoint.HOOK_Z, HookPoint.ATTN_OUT)
_MLP = (HookPoint.MLP_IN, HookPoint.MLP_OUT)
"""Branches that some models compute side by side, in an order of their own."""


def is_computed_at(site: Site, later: Site) -> bool:
    """Whether every model has computed the row at `site` when it computes the one at `later`, which may be the same."""
    is_beside = site.layer == later.layer and site.hook in _ATTENTION and later.hook in _MLP
    return not is_beside and sort_sites((site, later))[1] == later
