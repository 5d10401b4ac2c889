"""Rows as the staging ring hands them over, kept in a list."""

from __future__ import annotations

from torch import Tensor

from headgate.capture.planning.step_plan import PackGroup, StepPlan
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.ring import StagingRing


def collected(ring: StagingRing, plan: StepPlan | None = None, *, patience_s: float = 0) -> list[StagedRows]:
    """Collect the kept rows, those of `plan` too if there is one; nothing is released meanwhile."""
    parts: list[StagedRows] = []
    if plan is not None:
        ring.keep(plan)
    ring.collect(parts.append, patience_s=patience_s)
    return parts


def groups_in(part: StagedRows) -> list[tuple[PackGroup, Tensor]]:
    """The groups of a part, each with its rows: ``[S, N, D]``, a view of the staging memory."""
    return [(group, part.view(group, start)) for group, start in part.places]
