"""A small model's sites, a handful of configs that overlap, and the device that a table writes to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.vectors.dtypes import STORAGE, Float32Rows, Rows, StoredType, widen
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import Vectors, sum_of
from headgate.steering.worker.rows.row_table import RowTable
from headgate.steering.worker.rows.vector_pool import SlotPool

HIDDEN = 4
SITES = tuple(
    Site(layer, hook) for layer in range(2) for hook in (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
)


def vectors(rows: Mapping[int, float]) -> PhaseVectors:
    """Vectors at some of `SITES`, by index; the values of a row go up from the one given."""
    made = PhaseVectors.from_rows({SITES[i]: value + np.arange(HIDDEN) / 8 for i, value in rows.items()})
    assert made is not None
    return made


CONFIGS: tuple[PhaseVectors, ...] = (
    vectors({0: 1.0}),
    vectors({0: 2.0, 3: 1.0}),
    vectors({1: 1.0, 2: -1.0, 3: 1.0}),
    vectors(dict.fromkeys(range(6), 5.0)),
    vectors({i: 10.0 + i for i in range(6)}),
    vectors({5: 1e-3}),
    vectors({0: -1.0, 4: 0.37}),
    vectors({2: 100.0, 5: 7.3}),
)
"""Some share rows; the first and the last but one take each other's."""


def summed(names: tuple[int, ...], scale: float = 1.0) -> Vectors | None:
    """The sum of some of `CONFIGS`, the first of them times `scale`."""
    return sum_of((CONFIGS[name], scale if at == 0 else 1.0) for at, name in enumerate(names))


def expected(shared: Vectors | None, own: Vectors | None) -> Float32Rows:
    """Return the vectors that act at each site in one phase of a bfloat16 model, one site at a time."""
    values = np.zeros((len(SITES), HIDDEN), dtype=np.float32)
    for side in (shared, own):
        if side is not None:
            for site, row in zip(side.sites, side.float32(), strict=True):
                values[SITES.index(site)] += row
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return widen(rounded.astype(np.uint16), "bfloat16")


def table(*, num_slots: int = 65, num_rows: int = 19, dtype: StoredType = "bfloat16") -> RowTable:
    """A table on `SITES`."""
    return RowTable(sites=SITES, num_rows=num_rows, pool=SlotPool(num_slots, HIDDEN, dtype))


class Device:
    """The memory of the worker's device, which holds only the writes that it was told of."""

    def __init__(self, table: RowTable, *, num_slots: int = 65, dtype: StoredType = "bfloat16") -> None:
        self._dtype: StoredType = dtype
        self._table = table
        self.pool: Rows = np.zeros((num_slots, HIDDEN), dtype=STORAGE[dtype])
        self.map = np.zeros_like(table.map)

    def update(self) -> None:
        writes = self._table.take_writes()
        if writes is None:
            return
        assert 0 not in writes.rows
        self.map[:, writes.rows] = writes.columns
        if writes.slots is not None:
            assert 0 not in writes.slots.slots
            self.pool[writes.slots.slots] = writes.slots.vectors

    def added_at(self, row: int) -> Float32Rows:
        """Return the vectors that a token with this table row gets at each site, fp32 ``[sites, hidden]``."""
        return widen(self.pool[self.map[:, row]], self._dtype)


def view(*chunks: tuple[str, int, int]) -> BatchView:
    """A batch of (request, tokens in this step, tokens before it), one after the other."""
    counts = np.array([count for _, count, _ in chunks], dtype=np.int64)
    return BatchView(
        req_ids=tuple(req_id for req_id, _, _ in chunks),
        starts=np.cumsum(counts) - counts,
        num_scheduled=counts,
        num_computed=np.array([computed for _, _, computed in chunks], dtype=np.int64),
    )
