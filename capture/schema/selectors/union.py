"""The union of ranges and lists of positions, put so that no position is in it twice. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.errors import RequestError

MAX_POSITION = 2**31 - 1
NO_END = MAX_POSITION + 1
"""The stop of a range that goes on into the generated positions."""

MAX_LISTED = 1 << 15
"""Positions in one list. Reading so many takes the front end's event loop 2 to 4 ms, in whatever order they are."""

Wanted = range | Int64Array
"""Absolute positions, ascending, each once: evenly spaced ones as a range, with `NO_END` for those without an end."""


class Union(NamedTuple):
    """The union of several selections.

    Attributes:
        before: Positions with an end, none of them in `tail`; None if there are none.
        tail: A range without an end; None if there is none.
    """

    before: Wanted | None
    tail: range | None


def unite(chosen: Sequence[Wanted], field: str) -> Union:
    """Return the union of one or more selections.

    Args:
        chosen: At least one position each.
        field: Path of the selectors in the client's document, for errors.

    Raises:
        RequestError: If more than `MAX_LISTED` positions would have to be listed, or if no one range without an end
            says how it goes on.
    """
    tail, finite = _tail_of([each for each in chosen if isinstance(each, range) and each.stop == NO_END], field)
    finite += [each for each in chosen if not (isinstance(each, range) and each.stop == NO_END)]
    runs = _joined([each for each in finite if _is_run(each)])
    others = [each for each in finite if not _is_run(each)]
    if tail is not None and tail.step == 1:
        runs = [range(run.start, min(run.stop, tail.start)) for run in runs if run.start < tail.start]
    if not runs and not others:
        return Union(None, tail)
    is_one = len(runs) == 1 and not others and (tail is None or tail.step == 1)
    before = runs[0] if is_one else _without(_listed([*runs, *others], field), tail)
    if tail is not None and isinstance(before, range) and _is_followed(before, tail):
        return Union(None, range(before.start, NO_END, tail.step))
    return Union(before, tail)


def evenly_spaced(values: Int64Array) -> range | None:
    """Return ascending positions, at least one, as a range; None if they are not evenly spaced."""
    first, last = int(values[0]), int(values[-1])
    step = int(values[1]) - first if len(values) > 1 else 1
    spaced = range(first, last + 1, step)
    is_spaced = len(spaced) == len(values) and spaced[-1] == last and bool((np.diff(values) == step).all())
    return spaced if is_spaced else None


def _is_run(chosen: Wanted) -> bool:
    return isinstance(chosen, range) and chosen.step == 1


def _is_followed(before: range, tail: range) -> bool:
    """Whether `tail` goes on as `before` ends; a single position has no distance of its own."""
    return before[-1] + tail.step == tail.start and (len(before) == 1 or before.step == tail.step)


def _tail_of(tails: Sequence[range], field: str) -> tuple[range | None, list[Any]]:
    """Return a range without an end, and what comes before it of others that have none."""
    distinct = sorted(set(tails), key=lambda tail: (tail.step, tail.start))
    if not distinct:
        return None, []
    first, *others = distinct
    if first.step > 1 and others:
        raise RequestError(field, "one of several selectors without an end must have step 1")
    earlier = [range(tail.start, first.start, tail.step) for tail in others]
    return first, [tail for tail in earlier if tail]


def _joined(runs: Sequence[Any]) -> list[range]:
    """Consecutive positions as few runs, ascending and apart from each other."""
    joined: list[range] = []
    for run in sorted(runs, key=lambda run: (run.start, run.stop)):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return joined


def _listed(chosen: Sequence[Wanted], field: str) -> Int64Array:
    num_listed = sum(map(len, chosen))
    if num_listed > MAX_LISTED:
        raise RequestError(
            field, f"the selectors come to {num_listed} positions that are not in one run; at most {MAX_LISTED} can be"
        )
    return np.unique(np.concatenate([np.asarray(each, dtype=np.int64) for each in chosen]))


def _without(values: Int64Array, tail: range | None) -> Wanted | None:
    if tail is not None:
        values = values[(values < tail.start) | ((values - tail.start) % tail.step != 0)]
    if not len(values):
        return None
    spaced = evenly_spaced(values)
    return values if spaced is None else spaced
