"""Static device memory that the forward pass scatters wanted rows into, and the copies out of it.

Shapes: S sites, R ring slots of a site, N rows of a group, D hidden size, A rows of the arena.

How long captured rows may wait in the ring for those of the next steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.monitoring.stats import StagingCounters
from headgate.capture.planning.step_plan import PackGroup, StepPlan, count_copies, joined, rows_between
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import MAX_LINGER_S
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import Site
from headgate.capture.staging.device_copy import PACK_BYTES, Copied, CudaCopier, DeviceCopier, HostCopier
from headgate.capture.staging.host_rows import Arena, CopyPart, Lease, StagedRows, as_int32, round_up

NUM_TRASH_ROWS = 64
"""Rows that nobody wants take turns: 8192 of them at one address would cost a prefill 3 % on an H200, at 64 nothing."""

KEPT_BYTES = 2 * PACK_BYTES
"""What is left in the ring to be copied out together: with more there is nothing to save."""


class _Kept(NamedTuple):
    """A step whose rows are in the ring."""

    plan: StepPlan
    base: int
    """Slot of its first wanted row; the others follow."""
    has_token_ids: bool
    since: float
    """When its forward was launched, in seconds of the monotonic clock."""

    @property
    def end(self) -> int:
        """The slot behind its last wanted row."""
        return self.base + len(self.plan.token_rows)


class StagingRing:
    """The memory that the forward pass writes captured rows to, and the way out of it.

    A step's rows get consecutive slots of every site's ring, and each step the ones behind the last step's. So the
    forward of a step waits for the copies of an earlier one only when the ring has gone round, and the rows of some
    small steps can be copied out together: `keep` leaves them where they are, `collect` copies all that was kept. All
    methods are for the step thread, with the stream of the forward pass current. Nothing is allocated after
    construction.

    Attributes:
        buffers: ``[S, R + NUM_TRASH_ROWS, D]`` on the device; each site's slots from ``R`` on take rows that nobody
            wants. Never moves.
        slots: int64 ``[max_tokens]`` on the device: the slot of each batch row, one from ``R`` on if nobody wants it.
            Never moves; the graph reads ``slots[:n]``.
        counters: What passed through.
        device_bytes: Memory on the device, buffers of the copies included.
        on_wait: Called before the step thread waits for host memory: whoever holds some on purpose is to let go of it.

    Args:
        sites: The worker's sites, in the order of the planner's site ids.
        num_rows: ``R``; at least `max_tokens`.
        max_tokens: Upper limit of batch rows in one forward, padding included.
        hidden_size: ``D``.
        dtype: Of the rows.
        device: Where the forward pass runs.
        staging_bytes: Size of the host memory; pinned if the device is a GPU.

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
    ) -> None:
        if num_rows < max_tokens:
            raise ConfigError(f"capture.ring_rows: {num_rows} rows cannot hold a step of {max_tokens} tokens")
        self.row_bytes = hidden_size * dtype.itemsize
        self._num_rows = num_rows
        self._arena = Arena(staging_bytes // self.row_bytes)
        self._max_piece_rows = _half_of(self._arena, len(sites), self.row_bytes)
        # Tensors that are made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            num_slots = num_rows + NUM_TRASH_ROWS
            self.buffers = torch.zeros(len(sites), num_slots, hidden_size, dtype=dtype, device=device)
            self._unwanted = num_rows + torch.arange(max_tokens, device=device) % NUM_TRASH_ROWS
            self.slots = self._unwanted.clone()
            self._token_ids = torch.zeros(num_slots, dtype=torch.int32, device=device)
            is_cuda = device.type == "cuda"
            self._arena_AD = torch.empty(self._arena.num_rows, hidden_size, dtype=dtype, pin_memory=is_cuda)
            make_link = CudaCopier if is_cuda else HostCopier
            link = make_link(self.buffers.view(-1, hidden_size), self.slots, self._max_piece_rows)
        self._link: DeviceCopier = link
        self._unwanted_on_host: Int64Array = self._unwanted.cpu().numpy()
        tensors = (self.buffers, self.slots, self._unwanted, self._token_ids)
        self.device_bytes = sum(tensor.nbytes for tensor in tensors) + link.device_bytes
        self.counters = StagingCounters()
        self.on_wait: Callable[[], object] = lambda: None
        self._log = SparseLog("capture staging")
        self._base = self._next_slot = self._num_set = self._kept_copies = 0
        self._live_slots = self.slots[:0]  # up to the last wanted row
        self._is_open = self._has_token_ids = False
        self._kept: list[_Kept] = []
        self._all_rows: Int64Array | None = None  # wanted rows of the last step, if it wanted all up to its last one

    @property
    def host_bytes(self) -> int:
        """Size of the host memory."""
        return self._arena_AD.nbytes

    @property
    def staged_bytes(self) -> int:
        """Host memory in use now. Any thread."""
        return self._arena.num_leased * self.row_bytes

    def reset(self) -> None:
        """As new: no row is wanted, and the ring holds zeros."""
        self.buffers.zero_()
        self.slots.copy_(self._unwanted)
        self._next_slot = self._num_set = 0
        self._is_open = False
        self._kept, self._kept_copies = [], 0
        self._all_rows = None

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
        """Whether so much is kept that nothing is saved by keeping more.

        A quarter of the ring may be full of it: the next rows must not have to wait for the copies of the last.
        """
        return self._kept_copies * self.row_bytes >= KEPT_BYTES or self.num_kept_rows >= self._num_rows // 4

    def has_to_collect(self, plan: StepPlan) -> bool:
        """Whether `begin` needs slots, for this plan, that lie behind the end of the ring while rows are kept in it."""
        return bool(self._kept) and self._next_slot + len(plan.token_rows) > self._num_rows

    def begin(self, plan: StepPlan | None, token_ids: torch.Tensor | None = None) -> None:
        """Choose the slots of a step before its forward. Idle steps after an idle step cost a comparison.

        Args:
            plan: What is wanted of it; None for nothing.
            token_ids: On the device: the token of each batch row, as the forward will read it, if that is known.

        Raises:
            RuntimeError: If kept rows are in the way; see `has_to_collect`.
        """
        self._is_open = plan is not None
        if plan is None:
            if self._num_set:
                self.slots[: self._num_set].copy_(self._unwanted[: self._num_set])
                self._num_set = 0
            self._all_rows = None
            return
        if self.has_to_collect(plan):
            raise RuntimeError("begin: the ring has come to its end, and what is kept in it was not collected")
        num_wanted = len(plan.token_rows)
        base, self._base = self._base, self._next_slot if self._next_slot + num_wanted <= self._num_rows else 0
        self._next_slot = self._base + num_wanted
        self._link.reserve(self._base, self._next_slot)
        self._set_slots(plan.token_rows, self._base - base)
        self._has_token_ids = token_ids is not None
        if token_ids is not None and num_wanted == self._num_set:  # every row: one plain copy, cheaper to launch
            target = self._token_ids.narrow(0, self._base, num_wanted)
            target.copy_(token_ids.narrow(0, 0, num_wanted), non_blocking=True)
        elif token_ids is not None:
            self._token_ids.index_put_((self._live_slots,), token_ids[: self._num_set].to(torch.int32))

    def _set_slots(self, token_rows: Int64Array, distance: int) -> None:
        """Bring the slots of a step's rows to the device; they are `distance` behind those of the step before."""
        if token_rows is self._all_rows:  # the planner gives the same array for the same rows, step after step
            self._live_slots.add_(distance)
            return
        num_set = int(token_rows[-1]) + 1
        if len(token_rows) == num_set:
            if num_set < self._num_set:
                self.slots[num_set : self._num_set].copy_(self._unwanted[num_set : self._num_set])
            self._num_set, self._live_slots, self._all_rows = num_set, self.slots[:num_set], token_rows
            torch.arange(self._base, self._next_slot, out=self._live_slots)
            return
        num_sent = max(num_set, self._num_set)
        slots = self._link.slots_to_fill()
        slots[:num_sent] = self._unwanted_on_host[:num_sent]
        slots[token_rows] = np.arange(self._base, self._next_slot)
        self._link.send_slots(num_sent)
        self._num_set, self._live_slots = num_set, self.slots[:num_set]
        self._all_rows = None

    def keep(self, plan: StepPlan) -> None:
        """Leave the rows of a step whose forward was launched in the ring, until `collect`.

        Args:
            plan: What `begin` got.
        """
        if not self._is_open:
            raise RuntimeError("the step was not begun, or was collected already")
        self._is_open = False
        self.counters.steps += 1
        self._kept_copies += plan.num_copies
        self._kept.append(_Kept(plan, self._base, self._has_token_ids, time.monotonic()))

    def collect(self, plan: StepPlan | None = None, *, patience_s: float) -> Iterator[StagedRows]:
        """Start the copies of all steps that were kept, and yield them.

        What needs more than half of the host memory comes in several parts; each holds all sites of its rows. Each
        part has to be handed on before the next is asked for, since the next may wait for its memory.

        Args:
            plan: Of a step that is to be kept first, if there is one.
            patience_s: Seconds to wait without any host memory becoming free; then the rest is lost, which is counted
                and logged.
        """
        if plan is not None:
            self.keep(plan)
        if not self._kept:
            return
        kept, self._kept, self._kept_copies = self._kept, [], 0
        self._link.wait_for_forward()
        num_rows, has_token_ids = kept[-1].end - kept[0].base, all(step.has_token_ids for step in kept)
        pieces = self._cut(joined([step.plan for step in kept]), num_rows, has_token_ids=has_token_ids)
        for number, piece in enumerate(pieces):
            lease = self._lease(piece.num_copies + piece.num_token_rows, patience_s)
            if lease is None:
                self._count_lost(pieces[number:], patience_s)
                break
            copied = self._copy(piece, lease, kept[0].base)
            yield StagedRows(piece, self._arena_AD, self._arena, lease, copied, kept[0].since)
        self._link.free_after_copy(kept[0].base, kept[-1].end)

    def _copy(self, piece: CopyPart, lease: Lease, base: int) -> Copied:
        index, start = self._link.index_to_fill(), 0
        stride = self.buffers.shape[1]
        for group in piece.groups:
            num_sites, num_rows = len(group.site_ids), len(group.rows)
            stop = start + num_sites * num_rows
            into = index[start:stop].reshape(num_sites, num_rows)
            np.add.outer(group.site_ids * stride, group.rows + base, out=into)
            start = stop
        if piece.num_token_rows:
            slot = base + piece.start
            target = as_int32(self._arena_AD, lease.start, piece.num_rows)
            self._link.fetch(self._token_ids[slot : slot + piece.num_rows], target)
        first = lease.start + piece.num_token_rows
        copied = self._link.gather(piece.num_copies, self._arena_AD[first : first + piece.num_copies])
        self.counters.bytes += piece.num_copies * self.row_bytes
        self.counters.rows += piece.num_rows
        return copied

    def _lease(self, count: int, patience_s: float) -> Lease | None:
        lease = self._arena.try_lease(count)
        if lease is None:
            started = time.monotonic()
            self.on_wait()
            lease = self._arena.lease(count, patience_s)
            self.counters.stalls += 1
            self.counters.stall_s += time.monotonic() - started
        return lease

    def _cut(self, groups: tuple[PackGroup, ...], num_rows: int, *, has_token_ids: bool) -> list[CopyPart]:
        """`groups` in parts that fit; all sites of a row are in one part."""
        num_all = count_copies(groups)
        if num_all <= self._max_piece_rows:
            return [self._piece(groups, 0, num_rows, num_all, has_token_ids)]
        num_copies = np.zeros(num_rows, dtype=np.int64)
        for group in groups:
            num_copies[group.rows] += len(group.site_ids)
        total = np.cumsum(num_copies)
        pieces, start = [], 0
        while start < len(total):
            before = int(total[start - 1]) if start else 0
            stop = int(np.searchsorted(total, before + self._max_piece_rows, side="right"))
            parts = (rows_between(group, start, stop) for group in groups)
            between = tuple(group for group in parts if group is not None)
            pieces.append(self._piece(between, start, stop - start, int(total[stop - 1]) - before, has_token_ids))
            start = stop
        return pieces

    def _piece(
        self, groups: tuple[PackGroup, ...], start: int, num_rows: int, num_copies: int, has_token_ids: bool
    ) -> CopyPart:
        num_token_rows = -(-4 * num_rows // self.row_bytes) if has_token_ids else 0
        return CopyPart(groups, start, num_rows, num_copies, num_token_rows)

    def _count_lost(self, pieces: Sequence[CopyPart], patience_s: float) -> None:
        self.counters.dropped_rows += sum(piece.num_rows for piece in pieces)
        self._log.error(f"rows were dropped: no staging memory became free for {patience_s:g} s")


def _half_of(arena: Arena, num_sites: int, row_bytes: int) -> int:
    """Rows of one part of a step: half of the host memory, so that one part is dispatched while the next is copied.

    It also leaves room for the rows' tokens.
    """
    half, needed = arena.num_rows // 2, round_up(num_sites)
    if half < needed:
        raise ConfigError(
            f"capture.staging_bytes: {arena.num_rows * row_bytes} bytes cannot hold two rows of each of {num_sites} "
            f"sites; at least {2 * needed * row_bytes} are needed"
        )
    return half


class Linger:
    """Follows the requests that run: rows wait as long as all of their consumers allow.

    Args:
        allowed_s: Seconds that each consumer allows, by its bit.
    """

    def __init__(self, allowed_s: Mapping[int, float]) -> None:
        self._allowed_s = dict(allowed_s)
        self._running: dict[str, float] = {}
        self.seconds = MAX_LINGER_S
        """From the launch of the forward that computed the first of them."""

    @property
    def least(self) -> float:
        """What all requests together would be allowed."""
        return min(self._allowed_s.values(), default=0.0)

    @property
    def is_anything_running(self) -> bool:
        """Whether there are requests that may get further steps."""
        return bool(self._running)

    def begin(self, req_id: str, bits: Iterable[int]) -> None:
        """A request was taken, which is for the consumers with these bits."""
        self._running[req_id] = allowed_s = min((self._allowed_s[bit] for bit in bits), default=MAX_LINGER_S)
        self.seconds = min(self.seconds, allowed_s)

    def stop(self, req_id: str) -> None:
        """It gets no further step. Its rows may be waiting, so what it allows counts until `collected`."""
        self._running.pop(req_id, None)

    def collected(self) -> None:
        """No row is waiting."""
        self.seconds = min(self._running.values(), default=MAX_LINGER_S)
