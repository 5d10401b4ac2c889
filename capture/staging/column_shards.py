"""Rows whose columns are spread over tensor-parallel ranks, on their way into the ring of the first rank.

The forward of every rank writes its part of each row to memory of its own. After the forward, the ranks gather the
parts of the rows that requests want, and the first rank puts the whole rows where its ring expects them. A step in
which no request wants such a row gathers nothing.

Shapes: R ranks, S sites, T batch rows, K wanted rows of a step, P columns of a part, W of a whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headgate.capture.planning.planner import StepPlanner
from headgate.capture.planning.step_plan import StepPlan
from headgate.capture.schema.batch import BatchView, Int64Array, NewRequest
from headgate.capture.schema.config import MIB
from headgate.capture.schema.sites import Site, SiteShape
from headgate.capture.schema.spec import SpecReader
from headgate.capture.staging.ring import NUM_TRASH_ROWS, StagingRing

GATHER_BYTES = 32 * MIB
"""Size of the parts that a rank sends at a time, at most, unless the rows of one site are more."""

Gather = Callable[[Tensor], Tensor]
"""A collective: from the tensor of each rank, ``[...]``, to those of all ranks, ``[R, ...]``."""


class ColumnShards:
    """The parts of rows that one rank computes. Step thread only.

    Every rank makes the same calls in the same steps, since each gathers with all others. So what is gathered follows
    from the requests and the layout of the step alone, never from what one rank knows of its consumers.

    Attributes:
        rows: For each site the part of each batch row, ``[T + NUM_TRASH_ROWS, P]``, on the device. Never moves.
        slots: int64 ``[T]``: the row of each batch row, which is its own number.
        device_bytes: Bytes of both.

    Args:
        shapes: Of the sites of this worker whose columns are spread, in any order that all ranks share.
        num_ranks: ``R``.
        max_tokens: ``T``.
        device: Where the forward runs.
        gather: The collective.
        ring: Of the first rank, with the place of each site in it; None on every other rank.
    """

    def __init__(
        self,
        shapes: Mapping[Site, SiteShape],
        *,
        num_ranks: int,
        max_tokens: int,
        device: torch.device,
        gather: Gather,
        ring: tuple[StagingRing, Mapping[Site, int]] | None,
    ) -> None:
        self._shapes = dict(shapes)
        self._num_ranks = num_ranks
        self._gather = gather
        self._ring = ring
        sites = tuple(shapes)
        self._specs = SpecReader(sites)
        self._planner = StepPlanner(sites)
        self._requests: set[str] = set()
        self._plan: StepPlan | None = None
        self._index: tuple[Int64Array | None, Tensor] = (None, torch.empty(0))
        with torch.inference_mode(False):
            self.rows = {
                site: torch.zeros(
                    max_tokens + NUM_TRASH_ROWS,
                    shape.part_width(num_ranks),
                    dtype=getattr(torch, shape.dtype),
                    device=device,
                )
                for site, shape in shapes.items()
            }
            self.slots = torch.arange(max_tokens, device=device)
        self.device_bytes = self.slots.nbytes + sum(rows.nbytes for rows in self.rows.values())

    def request_added(self, new: NewRequest) -> None:
        """Follow a request that captures."""
        capture = None if new.wire is None else new.wire.get("capture")
        if capture is None:
            return
        specs = dict(enumerate(self._specs.read(raw) for raw in capture["specs"].values()))
        if any(spec.sites for spec in specs.values()):
            self._requests.add(new.req_id)
            self._planner.add(new.req_id, new.num_prompt_tokens, specs)

    def request_finished(self, req_id: str) -> None:
        """Forget a request."""
        if req_id in self._requests:
            self._requests.remove(req_id)
            self._planner.remove(req_id)

    def step_begins(self, view: BatchView | None) -> None:
        """Plan a step before its forward."""
        if view is None or not self._requests:
            self._plan = None
        else:
            self._plan = self._planner.plan(view) if view.outcome is None else self._planner.candidates(view)

    def step_ends(self) -> None:
        """Gather the rows that are wanted, or may be, of a step whose forward was launched."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        if plan.token_rows is not self._index[0]:  # the same array in all steps of a run
            self._index = plan.token_rows, torch.from_numpy(plan.token_rows.copy()).to(self.slots.device)
        self.gather(plan.sites, self._index[1])

    def gather(self, sites: Iterable[Site], index_K: Tensor) -> None:
        """Gather the rows at some sites and put them into the ring, at the slots of their batch rows.

        Args:
            sites: The same, in the same order, on every rank.
            index_K: int64, on the device: the batch rows.
        """
        with torch.inference_mode():
            for chunk in self._chunks(tuple(sites), len(index_K)):
                parts_SKP = torch.stack([self.rows[site].index_select(0, index_K) for site in chunk])
                parts_RSKP = self._gather(parts_SKP)
                if self._ring is not None:
                    self._put(*self._ring, chunk, parts_RSKP, index_K)

    def _chunks(self, sites: Sequence[Site], num_rows: int) -> Iterable[Sequence[Site]]:
        """Yield sites of one shape, whose parts are sent at a time."""
        by_shape: dict[SiteShape, list[Site]] = {}
        for site in sites:
            by_shape.setdefault(self._shapes[site], []).append(site)
        for found in by_shape.values():
            part = self.rows[found[0]]
            size = max(GATHER_BYTES // (num_rows * part.shape[1] * part.element_size()), 1)
            for start in range(0, len(found), size):
                yield found[start : start + size]

    def _put(
        self,
        ring: StagingRing,
        places: Mapping[Site, int],
        sites: Sequence[Site],
        parts_RSKP: Tensor,
        index_K: Tensor,
    ) -> None:
        shape = self._shapes[sites[0]]
        slots_K = ring.slots.index_select(0, index_K)
        for place, site in enumerate(sites):
            rows_KW = whole_rows(parts_RSKP[:, place], shape.width)
            ring.site_rows[places[site]].index_put_((slots_K,), rows_KW)


def whole_rows(parts_RKP: Tensor, width: int) -> Tensor:
    """Return the rows ``[K, width]`` that the ranks' parts are of; heads that several ranks hold are in them once."""
    num_ranks, num_rows, part = parts_RKP.shape
    return parts_RKP[:: num_ranks * part // width].transpose(0, 1).reshape(num_rows, width)
