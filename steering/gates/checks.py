"""Which sites a gate may read and write, by the order in which one forward comes to them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site, sort_sites
from headgate.steering.gates.gate import Gate
from headgate.steering.programs.gate_codes import GateScope

_ATTENTION = (HookPoint.ATTN_IN, HookPoint.HOOK_Z, HookPoint.ATTN_OUT)
_MLP = (HookPoint.MLP_IN, HookPoint.MLP_OUT)
"""Branches that some models compute side by side, in an order of their own."""


def is_reached(write: Site, read: Site) -> bool:
    """Whether a number that is read at a site can act at another one in the same forward, or at the same.

    It cannot where the forward has been before, nor from a layer's attention in the MLP beside it.
    """
    is_beside = read.layer == write.layer and read.hook in _ATTENTION and write.hook in _MLP
    return not is_beside and sort_sites((write, read))[0] == read


def check_this_token(gate: Gate, reads: Collection[Site], writes: Collection[Site]) -> None:
    """Check that a gate of the scope `GateScope.THIS` can act on the row that it reads; others may write anywhere.

    Args:
        gate: The gate.
        reads: Sites that its condition reads, as far as they are known.
        writes: Sites that it writes, likewise.

    Raises:
        RequestError: Naming its scope, and one that works.
    """
    if gate.scope is not GateScope.THIS:
        return
    if all(is_reached(write, read) for read in reads for write in writes):
        return
    for read, write in product(sort_sites(reads), sort_sites(writes)):
        if not is_reached(write, read):
            raise RequestError(
                f"{gate.where}.scope",
                f"this_token cannot act: the gate reads at {read.name} and writes at {write.name}, which must not come "
                "before, nor be in the MLP beside a layer's attention; next_token works, or write at later sites",
            )


def check_reads(gate: Gate, reads: Collection[Site]) -> None:
    """Check that the scores of a gate come in one order in every model, whatever its scope.

    Args:
        gate: The gate.
        reads: Sites that its condition reads, as far as they are known.

    Raises:
        RequestError: Naming its condition, if it reads both in the attention and in the MLP of a layer.
    """
    if len(reads) < 2:
        return
    for one, other in product(sort_sites(reads), repeat=2):
        if one.layer == other.layer and one.hook in _ATTENTION and other.hook in _MLP:
            raise RequestError(
                f"{gate.where}.when",
                f"reads at {one.name} and at {other.name}, which some models compute side by side; read the stream "
                "between them, or use a gate for each",
            )
