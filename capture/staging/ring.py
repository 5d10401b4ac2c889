"""Static device memory that the forward pass scatters wanted rows into, and the copies out of it.

Shapes: S sites, R ring slots of a site, K wanted rows of a step, D hidden size, W width of a site's rows, A rows of the
arena.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import attrgetter

import numpy as np
import torch

from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.monitoring.stats import StagingCounters
from headgate.capture.planning.step_plan import StepPlan, memory_rows
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import RING_BYTES, RING_SHARE
from headgate.capture.schema.consumer import OUTPUT_BYTES
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import NO_SHAPES, Site, SiteShape
from headgate.capture.staging.device_copy import Copied, DeviceCopier, RowRun, copier_of
from headgate.capture.staging.host_rows import (
    GRANULARITY,
    Lease,
    PinnedMemory,
    StagedRows,
    StagingMemory,
    cut_into_parts,
    numbers_at,
    round_up,
    rows_at,
)
from headgate.capture.staging.readouts import BoundReadout, RingReadouts

NUM_TRASH_ROWS = 64
"""Unwanted rows share this many slots: 8192 rows at one address slow a prefill by 3 % on an H200, at 64 by nothing."""


class _SlotTable:
    """The ring slot of each batch row, on the device. A step sends only the entries that change.

    Attributes:
        slots: int64 ``[max_tokens]``; entries from ``R`` on are slots of trash rows. Never moves.
        live: View of `slots` up to the last wanted row of the step.

    Args:
        num_rows: ``R``.
        max_tokens: Upper limit of batch rows in one forward, padding included.
        device: Where the forward pass runs.
    """

    def __init__(self, num_rows: int, max_tokens: int, device: torch.device) -> None:
        self._unwanted = num_rows + torch.arange(max_tokens, device=device) % NUM_TRASH_ROWS
        self._unwanted_on_host: Int64Array = self._unwanted.cpu().numpy()
        self.slots = self._unwanted.clone()
        self.live = self.slots[:0]
        self.num_live = 0
        self.device_bytes = self._unwanted.nbytes + self.slots.nbytes
        self._base = 0
        self._dense_rows: Int64Array | None = None  # wanted rows of the last step, if they were 0, 1, ..., K - 1

    def write(self, token_rows: Int64Array, base: int, copier: DeviceCopier) -> None:
        """Give the step's wanted rows the consecutive slots from `base` on, and every other row a trash row.

        Args:
            token_rows: int64 ``[K]``, ascending: see `StepPlan.token_rows`.
            base: Slot of the first wanted row.
            copier: Brings entries to the device.
        """
        distance, self._base = base - self._base, base
        if token_rows is self._dense_rows:  # the planner gives the same array for the same rows, step after step
            self.live.add_(distance)
            return
        num_before, self.num_live = self.num_live, int(token_rows[-1]) + 1
        self.live = self.slots[: self.num_live]
        if len(token_rows) == self.num_live:
            if self.num_live < num_before:
                self.slots[self.num_live : num_before].copy_(self._unwanted[self.num_live : num_before])
            torch.arange(base, base + self.num_live, out=self.live)
            self._dense_rows = token_rows
            return
        num_sent = max(self.num_live, num_before)
        slots = copier.slots_to_fill()
        slots[:num_sent] = self._unwanted_on_host[:num_sent]
        slots[token_rows] = np.arange(base, base + len(token_rows))
        copier.send_slots(num_sent)
        self._dense_rows = None

    def clear(self) -> None:
        """Make every row unwanted. After a step that was idle too, this costs a comparison."""
        if self.num_live:
            self.slots[: self.num_live].copy_(self._unwanted[: self.num_live])
            self.num_live = 0
        self._dense_rows = None

    def reset(self) -> None:
        """Make every row unwanted, whatever was written to `slots` from outside."""
        self.slots.copy_(self._unwanted)
        self.num_live = 0
        self._dense_rows = None


class _RingBlocks:
    """The rows of all sites, those of one shape in one block; block 0 has the rows of the stream's shape.

    Attributes:
        numbers: int64 ``[S]``: the block of each site.
        indices: int64 ``[S]``: its index there.
        flat_FD: ``[F, W]`` of each block, once it is allocated.

    Args:
        shapes: Of each site; None: that of the stream.
    """

    def __init__(self, shapes: Sequence[SiteShape | None]) -> None:
        kinds: dict[SiteShape | None, int] = {None: 0}
        self._counts = Counter[SiteShape | None]({None: 0})
        numbers, indices = [], []
        for shape in shapes:
            numbers.append(kinds.setdefault(shape, len(kinds)))
            indices.append(self._counts[shape])
            self._counts[shape] += 1
        self.numbers: Int64Array = np.array(numbers, np.int64)
        self.indices: Int64Array = np.array(indices, np.int64)
        self.flat_FD: list[torch.Tensor] = []

    def allocate(
        self, num_slots: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Allocate the blocks; return each site's rows, ``[num_slots, W]``, which are slices of them."""
        blocks = [
            torch.zeros(
                *(count, num_slots, hidden_size if shape is None else shape.width),
                dtype=dtype if shape is None else getattr(torch, shape.dtype),
                device=device,
            )
            for shape, count in self._counts.items()
        ]
        self.flat_FD = [block.view(-1, block.shape[2]) for block in blocks]
        places = zip(self.numbers.tolist(), self.indices.tolist(), strict=True)
        return tuple(blocks[block][index] for block, index in places)


class StagingRing:
    """The memory that the forward pass writes captured rows to, and the way out of it.

    A step's rows get consecutive slots of every site's ring, and each step the ones after the last step's. So the
    forward of a step waits for the copies of an earlier one only when the ring has gone round, and the rows of some
    small steps can be copied out together: `keep` leaves them where they are, `collect` copies all kept rows. All
    methods are for the step thread, with the stream of the forward pass current. Nothing is allocated after
    construction.

    Attributes:
        site_rows: ``[R + NUM_TRASH_ROWS, W]`` on the device for each site; slots from ``R`` on take unwanted rows.
            Never moves. The rows of all sites of one shape are slices of one block.
        slots: int64 ``[max_tokens]`` on the device: the slot of each batch row, one from ``R`` on if it is unwanted.
            Never moves; the graph reads ``slots[:n]``.
        counters: Steps, rows and bytes that passed through, and stalls.
        device_bytes: Memory on the device, buffers of the copies included.
        memory: The host memory that rows are copied to.
        readouts: Of its sites; the session sets the arguments of requests there.
        on_wait: Called before the step thread waits for host memory, so that a holder of staged rows releases them.

    Args:
        sites: The worker's sites, in the order of the planner's site ids.
        num_rows: ``R``; at least `max_tokens`.
        max_tokens: Upper limit of batch rows in one forward, padding included.
        hidden_size: ``D``.
        dtype: Of the stream.
        device: Where the forward pass runs.
        staging_bytes: Size of the host memory; pinned if the device is a GPU.
        memory: That memory, of so many bytes, if another process reads it; else it is made here.
        readouts: Of some of the sites, in the order of the planner's.
        shapes: Of the sites whose rows are not those of the stream.

    Raises:
        ConfigError: If that cannot hold one row of every site.
    """

    def __init__(
        self,
        *,
        sites: Sequence[Site],
        num_rows: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        staging_bytes: int,
        memory: StagingMemory | None = None,
        readouts: Sequence[BoundReadout] = (),
        shapes: Mapping[Site, SiteShape] = NO_SHAPES,
    ) -> None:
        if num_rows < max_tokens:
            raise ConfigError(f"capture.ring_rows: {num_rows} rows cannot hold a step of {max_tokens} tokens")
        self._num_rows, self.row_bytes = num_rows, hidden_size * dtype.itemsize
        self._blocks = _RingBlocks(row_shapes := [shapes.get(site) for site in sites])
        self.readouts = RingReadouts(readouts, row_shapes, self._blocks.numbers.tolist(), self.row_bytes)
        num_host_rows = staging_bytes // self.row_bytes
        self._max_part_rows = most_part_rows(num_host_rows, self.readouts.row_cost, self.row_bytes)
        # Tensors that are made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._stride = num_rows + NUM_TRASH_ROWS
            self.site_rows = self._blocks.allocate(self._stride, hidden_size, dtype, device)
            self._slot_table = _SlotTable(num_rows, max_tokens, device)
            self._token_ids = torch.zeros(self._stride, dtype=torch.int32, device=device)
            memory = memory or PinnedMemory(num_host_rows, hidden_size, dtype, is_pinned=device.type == "cuda")
            self.slots = self._slot_table.slots
            self._copier = copier_of(self._blocks.flat_FD, self.slots, self._max_part_rows, reads_out=bool(readouts))
            memory.prove(self._copier)
        self.memory = memory
        own = sum(tensor.nbytes for tensor in (*self._blocks.flat_FD, self._token_ids))
        self.device_bytes = own + self._slot_table.device_bytes + self._copier.device_bytes
        self.counters = StagingCounters()
        self.on_wait: Callable[[], object] = lambda: None
        self._log = SparseLog("capture staging")
        self._is_open = False
        self._next_slot = self._kept_copies = 0
        self._kept: list[StepPlan] = []

    @property
    def host_bytes(self) -> int:
        """Size of the host memory."""
        return self.memory.rows_AD.nbytes

    @property
    def staged_bytes(self) -> int:
        """Host memory in use now. Any thread."""
        return self.memory.arena.num_leased * self.row_bytes

    def reset(self) -> None:
        """Empty the ring: no row is wanted, and its memory holds zeros."""
        for block in self._blocks.flat_FD:
            block.zero_()
        self._slot_table.reset()
        self._next_slot = 0
        self._is_open = False
        self.drop_kept()

    @property
    def kept_since(self) -> float | None:
        """When the forward of the first kept step was launched, on the monotonic clock; None if nothing is kept."""
        return self._kept[0].since if self._kept else None

    @property
    def num_kept_rows(self) -> int:
        """Wanted rows of the kept steps: slots that wait for `collect`."""
        return self._kept[-1].end - self._kept[0].base if self._kept else 0

    @property
    def is_well_filled(self) -> bool:
        """Whether enough is kept that waiting for more saves nothing.

        Kept rows fill at most about a quarter of the ring, so that the next steps do not wait for their copies.
        """
        max_rows = int(RING_SHARE * self._num_rows)
        return self._kept_copies * self.row_bytes >= RING_BYTES or self.num_kept_rows >= max_rows

    def drop_kept(self) -> None:
        """Let go of the rows of all steps that were kept; they are no longer wanted."""
        self._kept, self._kept_copies = [], 0

    def count_kept(self) -> None:
        """Count the wanted pairs of the kept steps again: some of the steps were decided, or collected."""
        self._kept_copies = sum(plan.num_copies for plan in self._kept)

    def has_to_collect(self, plan: StepPlan) -> bool:
        """Whether `begin` needs slots, for this plan, that lie past the end of the ring while rows are kept in it."""
        return bool(self._kept) and self._next_slot + len(plan.token_rows) > self._num_rows

    def begin(self, plan: StepPlan | None, token_ids: torch.Tensor | None = None) -> None:
        """Choose the slots of a step before its forward. Idle steps after an idle step cost a comparison.

        Args:
            plan: The rows wanted of it; None if there are none.
            token_ids: On the device: the token of each batch row, as the forward will read it, if that is known.

        Raises:
            RuntimeError: If kept rows are in the way; see `has_to_collect`.
        """
        self._is_open = plan is not None
        if plan is None:
            self._slot_table.clear()
            return
        if self.has_to_collect(plan):
            raise RuntimeError("begin: the ring has come to its end, and what is kept in it was not collected")
        num_wanted = len(plan.token_rows)
        plan.base = self._next_slot if self._next_slot + num_wanted <= self._num_rows else 0
        self._next_slot = plan.end
        self._copier.reserve(plan.base, plan.end)
        self._slot_table.write(plan.token_rows, plan.base, self._copier)
        plan.has_token_ids = token_ids is not None
        num_live = self._slot_table.num_live
        if token_ids is not None and num_wanted == num_live:  # every row: one plain copy, cheaper to launch
            target = self._token_ids.narrow(0, plan.base, num_wanted)
            target.copy_(token_ids.narrow(0, 0, num_wanted), non_blocking=True)
        elif token_ids is not None:
            self._token_ids.index_put_((self._slot_table.live,), token_ids[:num_live].to(torch.int32))

    def keep(self, plan: StepPlan) -> None:
        """Leave the rows of a step whose forward was launched in the ring, until `collect`.

        Args:
            plan: What `begin` got. If it is undecided, the step's rows stay until it is decided.
        """
        if not self._is_open:
            raise RuntimeError("the step was not begun, or was collected already")
        self._is_open = False
        self.counters.steps += 1
        self._kept_copies += plan.num_copies
        plan.since = time.monotonic()
        self._kept.append(plan)

    def collect(self, hand_over: Callable[[StagedRows], object], *, patience_s: float) -> None:
        """Start the copies of all kept steps up to the first undecided one, and hand their rows over.

        Rows that need more than half of the host memory come in several parts; each holds all sites of its rows.

        Args:
            hand_over: Called with each part once its copy was started. The receiver waits for the part and releases
                it. The next part may need its memory: a receiver that itself runs on the step thread releases a part
                before it returns.
            patience_s: Seconds to wait without any host memory becoming free; then the rest is lost, which is counted
                and logged.
        """
        plans = list(takewhile(attrgetter("is_decided"), self._kept))
        self._kept = self._kept[len(plans) :]
        self.count_kept()
        if not any(plan.groups for plan in plans):
            return
        first_slot, stop_slot = plans[0].base, plans[-1].end
        self._copier.wait_for_forward()
        parts = cut_into_parts(plans, max_copies=self._max_part_rows, row_bytes=self.row_bytes)
        try:
            for number, part in enumerate(parts):
                lease = self._lease(part.num_leased, patience_s)
                if lease is None:
                    self._count_lost(parts[number:], patience_s)
                    break
                copied = self.memory.announce(lease, self._copy(part, lease, first_slot), self._copier)
                hand_over(part.placed(lease, copied, self.memory.rows_AD, self.memory.arena))
        finally:
            self._copier.free_after_copy(first_slot, stop_slot)

    def _lease(self, count: int, patience_s: float) -> Lease | None:
        lease = self.memory.arena.try_lease(count)
        if lease is None:
            started = time.monotonic()
            self.on_wait()
            lease = self.memory.arena.lease(count, patience_s)
            self.counters.stalls += 1
            self.counters.stall_s += time.monotonic() - started
        return lease

    def _copy(self, part: StagedRows, lease: Lease, base: int) -> Copied:
        """Start the copy of a part into leased memory: the tokens of its rows, if they are known, rows, and outputs.

        Args:
            part: Rows of the kept steps. Those whose readouts fail are taken out of it.
            lease: Room for them.
            base: Slot of the kept steps' first wanted row.
        """
        first = lease.start + part.num_token_rows
        runs = self._fill_index(part, first, base)
        if part.num_token_rows:
            slot = base + part.start
            target = numbers_at(self.memory.rows_AD, lease.start, part.num_rows, torch.int32)
            self._copier.fetch(self._token_ids[slot : slot + part.num_rows], target)
        if any(group.site_set.is_read_out for group in part.groups):
            count = part.num_output_rows * self.row_bytes // OUTPUT_BYTES
            target_V = numbers_at(self.memory.rows_AD, first + part.num_copies, count, torch.float32)
            part.groups, num_bytes = self.readouts.run(part.groups, target_V, self._copier.read_out)
            self.counters.bytes += num_bytes
        copied = self._copier.gather(runs)
        self.counters.bytes += sum(run.target_ND.nbytes for run in runs)
        self.counters.rows += part.num_wanted
        return copied

    def _fill_index(self, part: StagedRows, first: int, base: int) -> list[RowRun]:
        """Fill in the flat indices of a part's rows; return the runs to copy: one of the stream, one a group of others.

        Args:
            part: Rows of the kept steps, those of the stream's shape first.
            first: Row of the arena at which the first group's rows lie.
            base: Slot of the kept steps' first wanted row.
        """
        index, start = self._copier.index_to_fill(), 0
        runs = [RowRun(0, 0, self.memory.rows_AD[first : first + part.num_copies])] if part.num_copies else []
        for group in part.groups:
            num_sites, num_rows = len(group.site_ids), len(group.rows)
            stop = start + num_sites * num_rows
            into = index[start:stop].reshape(num_sites, num_rows)
            sources = self.readouts.sources[group.site_ids]
            np.add.outer(self._blocks.indices[sources] * self._stride, group.rows + base, out=into)
            if group.shape is not None and not group.site_set.is_read_out:
                block = int(self._blocks.numbers[sources[0]])
                runs.append(RowRun(block, start, rows_at(self.memory.rows_AD, first, group)))
            first += memory_rows(group, self.row_bytes) or num_sites * num_rows
            start = stop
        return runs

    def _count_lost(self, parts: Sequence[StagedRows], patience_s: float) -> None:
        self.counters.dropped_rows += sum(part.num_wanted for part in parts)
        self._log.error(f"rows were dropped: no staging memory became free for {patience_s:g} s")


def most_part_rows(num_rows: int, num_sites: int, row_bytes: int) -> int:
    """Return the most rows of one part: half of the arena, so that one part is dispatched while the next is copied.

    Rounding leaves room for the tokens of the rows.

    Raises:
        ConfigError: If that is less than a row of every site.
    """
    usable = num_rows - num_rows % GRANULARITY
    half, needed = usable // 2, round_up(num_sites)
    if half < needed:
        raise ConfigError(
            f"capture.staging_bytes: {usable * row_bytes} bytes cannot hold two rows of each of {num_sites} "
            f"sites; at least {2 * needed * row_bytes} are needed"
        )
    return half
