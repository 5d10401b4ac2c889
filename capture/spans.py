"""Spans over rows of a batch: which of consecutive rows are whose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.capture.batch import Int64Array

RequestSpans = tuple[tuple[str, int, int], ...]
"""``(req_id, start, stop)``, next to each other, in order."""

_numbers: Int64Array = np.arange(0)


def count_up(start: int, stop: int) -> Int64Array:
    """Numbers from `start` up to `stop`, exclusive: int64 ``[stop - start]``, read-only. All share one memory."""
    global _numbers
    if stop > len(_numbers):
        numbers = np.arange(max(stop, 2 * len(_numbers)))
        numbers.flags.writeable = False
        _numbers = numbers
    return _numbers[start:stop]


def prolonged(firsts: Sequence[int], starts: list[int], counts: Sequence[int]) -> Int64Array:
    """Numbers that count up from each entry of `firsts`, one run behind the other: int64 ``[N]``.

    Most runs are one number: with cold caches, ``np.repeat`` alone takes as long as all of this.

    Args:
        firsts: Of each run, its first number.
        starts: Where it begins among the ``N``.
        counts: How many numbers it has.
    """
    total = starts[-1] + counts[-1]
    if total == len(counts):
        return np.array(firsts, dtype=np.int64)
    made: Int64Array = np.empty(total, dtype=np.int64)
    made[starts] = firsts
    for first, start, num in zip(firsts, starts, counts, strict=True):
        if num > 1:
            made[start : start + num] = count_up(first, first + num)
    return made


def changes(values: Int64Array) -> Int64Array:
    """Where a value differs from the one before it, int64, ascending."""
    found: Int64Array = np.flatnonzero(values[1:] != values[:-1]) + 1
    return found


def spans_of(owners: Int64Array, req_ids: Sequence[str]) -> RequestSpans:
    """The spans of rows that lie next to each other by owner.

    Args:
        owners: int64 ``[N]``, whose each row is: indices into `req_ids`, ascending.
        req_ids: The requests.
    """
    starts = [0, *changes(owners).tolist()]
    stops = [*starts[1:], len(owners)]
    return tuple(zip([req_ids[owner] for owner in owners[starts].tolist()], starts, stops, strict=True))


def take_spans(spans: RequestSpans, index: Int64Array) -> RequestSpans:
    """The spans of the rows that are left when only those at `index` are kept.

    Args:
        spans: Together covering ``0 : N``.
        index: Ascending, each in ``0 : N``.
    """
    starts = np.searchsorted(index, [start for _, start, _ in spans]).tolist()
    stops = np.searchsorted(index, [stop for _, _, stop in spans]).tolist()
    return tuple(
        (req_id, start, stop) for (req_id, _, _), start, stop in zip(spans, starts, stops, strict=True) if start < stop
    )
