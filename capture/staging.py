"""Static device memory that the forward pass scatters wanted rows into, and the copies out of it.

Shapes: S sites, R ring slots of a site, N rows of a group, D hidden size, A rows of the arena.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headgate.capture.arena import Arena, Lease, round_up
from headgate.capture.batch import Int64Array
from headgate.capture.errors import ConfigError
from headgate.capture.links import Copied, CudaLink, HostLink, Link
from headgate.capture.plan import PackGroup, StepPlan
from headgate.capture.sites import Site
from headgate.capture.spans import take_spans
from headgate.capture.sparselog import SparseLog
from headgate.capture.stats import StagingCounters
from headgate.capture.tokens import Int32Array

NUM_TRASH_ROWS = 64
"""Rows that nobody wants take turns: 8192 of them at one address would cost a prefill 3 % on an H200, at 64 nothing."""


class _Piece(NamedTuple):
    """What is copied in one go: some of the step's wanted rows, at all their sites."""

    groups: tuple[PackGroup, ...]
    start: int
    """The first of the step's wanted rows."""
    num_rows: int
    """How many of them."""
    num_copies: int
    """Rows to copy, over all sites."""
    num_token_rows: int = 0
    """Rows of the arena that the tokens of the rows take, ahead of the rows; 0 if they are not known."""


class StagedRows:
    """Rows of one step, or of a part of it, on their way into host memory. For the dispatch thread.

    Their memory is leased: `wait`, read `groups`, copy out, `release`.
    """

    def __init__(self, piece: _Piece, arena_AD: Tensor, arena: Arena, lease: Lease, copied: Copied) -> None:
        self._piece = piece
        self._arena_AD = arena_AD
        self._arena = arena
        self._lease = lease
        self._copied = copied

    def wait(self) -> None:
        """Wait until the rows have arrived."""
        self._copied.wait()

    @property
    def contents(self) -> tuple[PackGroup, ...]:
        """What is there."""
        return self._piece.groups

    @property
    def num_bytes(self) -> int:
        """Bytes of the leased memory."""
        return self._lease.num_rows * self._arena_AD.shape[1] * self._arena_AD.element_size()

    @property
    def memory(self) -> Tensor:
        """``[A, D]``: all of the staging memory, in which `places` says what lies where."""
        return self._arena_AD

    @property
    def places(self) -> list[tuple[PackGroup, int]]:
        """What is there, and the row of `memory` at which its first site's first row lies.

        The rows of a site follow each other, and so do the sites: ``[S, N, D]`` from there on.
        """
        found, start = [], self._lease.start + self._piece.num_token_rows
        for group in self._piece.groups:
            found.append((group, start))
            start += len(group.site_ids) * len(group.rows)
        return found

    @property
    def groups(self) -> list[tuple[PackGroup, Tensor]]:
        """What is there, and its rows: ``[S, N, D]``, a view of the leased memory."""
        return [(group, self.view(group, start)) for group, start in self.places]

    def view(self, group: PackGroup, start: int) -> Tensor:
        """The rows of a group, ``[S, N, D]``, that begin at `start`; see `places`."""
        num_sites, num_rows = len(group.site_ids), len(group.rows)
        return self._arena_AD[start : start + num_sites * num_rows].view(num_sites, num_rows, -1)

    def token_ids(self, group: PackGroup) -> Int32Array | None:
        """The token that each row of `group` was computed from, int32 ``[N]``; None if nobody knows."""
        if not self._piece.num_token_rows:
            return None
        token_ids: Int32Array = _as_int32(self._arena_AD, self._lease.start, self._piece.num_rows).numpy()
        return token_ids[group.rows - self._piece.start]

    def release(self) -> None:
        """Give the memory back. The views of `groups` are void from here on."""
        self._copied.release()
        self._arena.release(self._lease)


class StagingRing:
    """The memory that the forward pass writes captured rows to, and the way out of it.

    A step's rows get consecutive slots of every site's ring, and each step the ones behind the last step's. So the
    forward of a step waits for the packing of an earlier one only when the ring has gone round. All methods are for
    the step thread, with the stream of the forward pass current. Nothing is allocated after construction.

    Attributes:
        buffers: ``[S, R + NUM_TRASH_ROWS, D]`` on the device; each site's slots from ``R`` on take rows that nobody
            wants. Never moves.
        slots: int64 ``[max_tokens]`` on the device: the slot of each batch row, one from ``R`` on if nobody wants it.
            Never moves; the graph reads ``slots[:n]``.
        counters: What passed through.
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
            make_link = CudaLink if is_cuda else HostLink
            link = make_link(self.buffers.view(-1, hidden_size), self.slots, self._max_piece_rows)
        self._link: Link = link
        self._unwanted_on_host: Int64Array = self._unwanted.cpu().numpy()
        tensors = (self.buffers, self.slots, self._unwanted, self._token_ids)
        self.device_bytes = sum(tensor.nbytes for tensor in tensors) + link.device_bytes
        self.counters = StagingCounters()
        self.on_wait: Callable[[], object] = lambda: None
        self._log = SparseLog("capture staging")
        self._next_slot = 0
        self._base = 0
        self._num_set = 0
        self._is_open = False
        self._has_token_ids = False

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

    def begin(self, plan: StepPlan | None, token_ids: Tensor | None = None) -> None:
        """Choose the slots of a step before its forward. Idle steps after an idle step cost a comparison.

        Args:
            plan: What is wanted of it; None for nothing.
            token_ids: On the device: the token of each batch row, as the forward will read it, if that is known.
        """
        self._is_open = plan is not None
        if plan is None:
            if self._num_set:
                self.slots[: self._num_set].copy_(self._unwanted[: self._num_set])
                self._num_set = 0
            return
        num_wanted = len(plan.token_rows)
        self._base = self._next_slot if self._next_slot + num_wanted <= self._num_rows else 0
        self._next_slot = self._base + num_wanted
        self._link.reserve(self._base, self._next_slot)
        num_set = int(plan.token_rows[-1]) + 1
        num_sent = max(num_set, self._num_set)
        slots = self._link.slots_to_fill()
        slots[:num_sent] = self._unwanted_on_host[:num_sent]
        slots[plan.token_rows] = np.arange(self._base, self._next_slot)
        self._link.send_slots(num_sent)
        self._num_set = num_set
        self._has_token_ids = token_ids is not None
        if token_ids is not None and num_wanted == num_set:  # every row: one plain copy, much cheaper to launch
            self._token_ids[self._base : self._next_slot].copy_(token_ids[:num_set], non_blocking=True)
        elif token_ids is not None:
            self._token_ids.index_put_((self.slots[:num_set],), token_ids[:num_set].to(torch.int32))

    def collect(self, plan: StepPlan, *, patience_s: float) -> Iterator[StagedRows]:
        """Start the copies of a step whose forward was launched, and yield them.

        A step that needs more than half of the host memory comes in several parts; each holds all sites of its rows.
        Each part has to be handed on before the next is asked for, since the next may wait for its memory.

        Args:
            plan: What `begin` got.
            patience_s: Seconds to wait without any host memory becoming free; then the rest of the step is lost,
                which is counted and logged.
        """
        if not self._is_open:
            raise RuntimeError("collect: the step was not begun, or was collected already")
        self._is_open = False
        self._link.follow_forward()
        pieces = self._cut(plan)
        self.counters.steps += 1
        for number, piece in enumerate(pieces):
            lease = self._lease(piece.num_copies + piece.num_token_rows, patience_s)
            if lease is None:
                self._count_lost(pieces[number:], patience_s)
                break
            yield self._copy(piece, lease)
        self._link.mark_packed(self._base, self._next_slot)

    def _copy(self, piece: _Piece, lease: Lease) -> StagedRows:
        index, start = self._link.index_to_fill(), 0
        stride = self.buffers.shape[1]
        for group in piece.groups:
            num_sites, num_rows = len(group.site_ids), len(group.rows)
            stop = start + num_sites * num_rows
            into = index[start:stop].reshape(num_sites, num_rows)
            np.add.outer(group.site_ids * stride, group.rows + self._base, out=into)
            start = stop
        if piece.num_token_rows:
            slot = self._base + piece.start
            target = _as_int32(self._arena_AD, lease.start, piece.num_rows)
            self._link.fetch(self._token_ids[slot : slot + piece.num_rows], target)
        first = lease.start + piece.num_token_rows
        copied = self._link.gather(piece.num_copies, self._arena_AD[first : first + piece.num_copies])
        self.counters.bytes += piece.num_copies * self.row_bytes
        self.counters.rows += piece.num_rows
        return StagedRows(piece, self._arena_AD, self._arena, lease, copied)

    def _lease(self, count: int, patience_s: float) -> Lease | None:
        lease = self._arena.try_lease(count)
        if lease is None:
            started = time.monotonic()
            self.on_wait()
            lease = self._arena.lease(count, patience_s)
            self.counters.stalls += 1
            self.counters.stall_s += time.monotonic() - started
        return lease

    def _cut(self, plan: StepPlan) -> list[_Piece]:
        """`plan` in parts that fit; all sites of a row are in one part."""
        num_copies = np.zeros(len(plan.token_rows), dtype=np.int64)
        for group in plan.groups:
            num_copies[group.rows] += len(group.site_ids)
        total = np.cumsum(num_copies)
        if total[-1] <= self._max_piece_rows:
            return [self._piece(plan.groups, 0, total)]
        pieces, start = [], 0
        while start < len(total):
            before = int(total[start - 1]) if start else 0
            stop = int(np.searchsorted(total, before + self._max_piece_rows, side="right"))
            parts = (_rows_between(group, start, stop) for group in plan.groups)
            groups = tuple(group for group in parts if group is not None)
            pieces.append(self._piece(groups, start, total[start:stop] - before))
            start = stop
        return pieces

    def _piece(self, groups: tuple[PackGroup, ...], start: int, total: Int64Array) -> _Piece:
        num_token_rows = -(-4 * len(total) // self.row_bytes) if self._has_token_ids else 0
        return _Piece(groups, start, len(total), int(total[-1]), num_token_rows)

    def _count_lost(self, pieces: Sequence[_Piece], patience_s: float) -> None:
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


def _as_int32(arena_AD: Tensor, start: int, count: int) -> Tensor:
    """`count` integers in the arena, from row `start` on."""
    first = start * arena_AD.shape[1] * arena_AD.element_size()
    return arena_AD.view(-1).view(torch.uint8)[first : first + 4 * count].view(torch.int32)


def _rows_between(group: PackGroup, start: int, stop: int) -> PackGroup | None:
    """The group's rows at offsets ``start : stop`` of the step's wanted rows."""
    index: Int64Array = np.flatnonzero((group.rows >= start) & (group.rows < stop))
    if not len(index):
        return None
    return replace(
        group,
        rows=group.rows[index],
        positions=group.positions[index],
        masks=group.masks[index],
        spans=take_spans(group.spans, index),
    )
