"""Which requests and which of their rows a data set has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.positions import Message, Named, PositionSelector, parse_positions, run_of
from headgate.capture.schema.sites import Site, sort_sites
from headgate.consumers.datasets.index import EntryTable

Numbers = npt.NDArray[np.int64]
Ranges = tuple[Numbers, Numbers, Numbers]
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Selection:
    """A selection of requests and of rows in each; None everywhere selects all.

    Attributes:
        sites: Names of sites, in the order of the forward pass.
        phase: ``prefill`` or ``decode``.
        positions: A selector of positions.
        drops_bos: Leave out position 0.
        tags: Tags.
        roles: Roles of messages; a row counts if its position is in a message of one.
        since: Only requests written at this time or later, in milliseconds since 1970.
        until: Only requests written before.
    """

    sites: tuple[str, ...] | None = None
    phase: str | None = None
    positions: PositionSelector | None = None
    drops_bos: bool = False
    tags: frozenset[str] | None = None
    roles: frozenset[str] | None = None
    since: int | None = None
    until: int | None = None

    def entries(self, table: EntryTable) -> npt.NDArray[np.intp] | None:
        """Numbers of the entries that are selected; None if all are."""
        mask: npt.NDArray[np.bool_] | None = None

        def also(wanted: npt.NDArray[np.bool_]) -> None:
            nonlocal mask
            mask = wanted if mask is None else mask & wanted

        if self.tags is not None:
            also(np.isin(table.columns["tag"], [n for n, tag in enumerate(table.tags) if tag in self.tags]))
        if self.since is not None:
            also(table.columns["written"] >= self.since)
        if self.until is not None:
            also(table.columns["written"] < self.until)
        if self.roles is not None:
            also(np.diff(table.columns["message_stop"], prepend=0) > 0)
        if self.sites is not None:
            with_any = [n for n, group in enumerate(table.groups) if set(group.sites) & set(self.sites)]
            if len(with_any) < len(table.groups):
                also(np.isin(table.columns["group"], with_any))
        return None if mask is None else np.flatnonzero(mask)

    def row_ranges(self, table: EntryTable, entries: Numbers, positions_of: Callable[[int], Numbers]) -> Ranges:
        """The selected rows of each of `entries` as ranges.

        Args:
            table: Of the entries.
            entries: Their numbers.
            positions_of: Reads the positions of one entry.

        Returns:
            ``(index, start, stop)``: for each range, none of them empty, which of `entries` it is of, and its rows.
        """
        ranges = self._without_roles(table, entries, positions_of)
        return ranges if self.roles is None else _within_roles(self.roles, table, entries, positions_of, ranges)

    def _without_roles(self, table: EntryTable, entries: Numbers, positions_of: Callable[[int], Numbers]) -> Ranges:
        columns = {name: table.columns[name][entries] for name in ("rows", "prefill", "first", "step", "num_prompt")}
        start = np.zeros(len(entries), dtype=np.int64)
        stop = columns["rows"].astype(np.int64)
        if self.drops_bos:
            start[columns["first"] == 0] = 1
        if self.phase == "prefill":
            stop = np.minimum(stop, columns["prefill"])
        elif self.phase == "decode":
            start = np.maximum(start, columns["prefill"])
        index = np.arange(len(entries), dtype=np.int64)
        if self.positions is None:
            return _not_empty(index, start, stop)
        run = run_of(self.positions, columns["num_prompt"].astype(np.int64))
        if run is None:
            simple, (first, end) = np.zeros(len(entries), dtype=np.bool_), (start, stop)
        else:
            # In entries whose positions go up one by one.
            simple = (columns["step"] == 1) | (columns["rows"] == 0)
            first, end = (bound - columns["first"] for bound in run)
        start = np.where(simple, np.maximum(start, first), start)
        stop = np.where(simple, np.minimum(stop, end), stop)
        return _with_others(self.positions, table, entries, positions_of, (index, start, stop, simple))


def _with_others(
    selector: PositionSelector,
    table: EntryTable,
    entries: Numbers,
    positions_of: Callable[[int], Numbers],
    ranges: tuple[Numbers, Numbers, Numbers, npt.NDArray[np.bool_]],
) -> Ranges:
    """Ranges of the simple entries, and those of the others, each read and masked, in the order of the entries."""
    index, start, stop, simple = ranges
    found = [(index[simple], start[simple], stop[simple])]
    for number in np.flatnonzero(~simple):
        entry = int(entries[number])
        low, high = int(start[number]), int(stop[number])
        mask = _mask(selector, positions_of(entry)[low:high], int(table.columns["num_prompt"][entry]))
        edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
        starts, stops = edges[::2] + low, edges[1::2] + low
        found.append((np.full(len(starts), number, dtype=np.int64), starts, stops))
    index, start, stop = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(index, kind="stable")
    return _not_empty(index[order], start[order], stop[order])


def _mask(selector: PositionSelector, positions: Numbers, num_prompt: int) -> npt.NDArray[np.bool_]:
    try:
        resolved = selector.resolve(num_prompt, "positions")
    except RequestError:  # it selects nothing of a prompt of that length
        return np.zeros(len(positions), dtype=np.bool_)
    return resolved.mask(positions, np.full(len(positions), num_prompt, dtype=np.int64))


def _within_roles(
    roles: frozenset[str], table: EntryTable, entries: Numbers, positions_of: Callable[[int], Numbers], ranges: Ranges
) -> Ranges:
    """The parts of ranges whose positions are in messages of `roles`."""
    index, start, stop = ranges
    first, end = table.messages_of(entries[index])
    counts = end - first
    of_range = np.repeat(np.arange(len(index)), counts)
    message = np.arange(len(of_range)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    numbers = [number for number, role in enumerate(table.roles) if role in roles]
    chosen = np.isin(table.messages[message, 0], numbers)
    of_range, message = of_range[chosen], message[chosen]
    of_entry = entries[index[of_range]]
    begins, ends = (_rows_before(table, of_entry, table.messages[message, n], positions_of) for n in (1, 2))
    return _not_empty(index[of_range], np.maximum(start[of_range], begins), np.minimum(stop[of_range], ends))


def _rows_before(
    table: EntryTable, entries: Numbers, positions: npt.NDArray[np.int32], positions_of: Callable[[int], Numbers]
) -> Numbers:
    """For each of `entries`, its rows at positions below the one of `positions`."""
    rows, first, step = (table.columns[name][entries].astype(np.int64) for name in ("rows", "first", "step"))
    found: Numbers = np.clip(-((first - positions) // np.maximum(step, 1)), 0, rows)
    for entry in np.unique(entries[step == 0]):
        mine = entries == entry
        found[mine] = np.searchsorted(positions_of(int(entry)), positions[mine])
    return found


def _not_empty(index: Numbers, start: Numbers, stop: Numbers) -> Ranges:
    kept = start < stop
    if kept.all():
        return index, start, stop
    return index[kept], start[kept], stop[kept]


def parse_selection(
    *,
    sites: str | Site | Iterable[str | Site] | None,
    phases: str | Sequence[str] | None,
    positions: object,
    drop_bos: bool,
    tags: str | Iterable[str] | None,
    roles: str | Iterable[str] | None,
    since: object,
    until: object,
) -> Selection:
    """Read what the caller of `open_dataset` wrote.

    Raises:
        ValueError: Naming the argument, what was given and what is expected.
    """
    named = (phases,) if isinstance(phases, str) else tuple(phases or PHASES)
    if not set(named) <= set(PHASES):
        raise ValueError(f"phases: expected any of {', '.join(PHASES)}, got {shown(phases)}")
    selector = None if positions is None else parse_positions(positions, "positions")
    if isinstance(selector, Message):
        raise ValueError(  # noqa: TRY004  (its type is right, its value is not)
            f"positions: {shown(positions)} names a message; use roles='user' for the messages of a role, or select "
            "the message when capturing"
        )
    return Selection(
        sites=None if sites is None else parse_sites(sites),
        phase=None if set(named) == set(PHASES) else named[0],
        positions=None if selector == Named("all") else selector,
        drops_bos=drop_bos,
        tags=None if tags is None else frozenset((tags,) if isinstance(tags, str) else tags),
        roles=None if roles is None else frozenset((roles,) if isinstance(roles, str) else roles),
        since=_milliseconds(since, "since"),
        until=_milliseconds(until, "until"),
    )


def parse_sites(sites: str | Site | Iterable[str | Site]) -> tuple[str, ...]:
    """Names of sites in the order of the forward pass, aliases resolved.

    Raises:
        ValueError: If one of them is no site.
    """
    given = [sites] if isinstance(sites, str | Site) else list(sites)
    parsed = sort_sites({site if isinstance(site, Site) else Site.parse(site) for site in given})
    if not parsed:
        raise ValueError("sites: an empty list selects nothing; leave it out for all sites")
    return tuple(site.name for site in parsed)


def _milliseconds(when: object, field: str) -> int | None:
    if when is None:
        return None
    try:
        moment = datetime.fromisoformat(when) if isinstance(when, str) else when
    except ValueError as error:
        raise ValueError(f"{field}: expected a time such as 2026-01-31T12:00, got {shown(when)}") from error
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day)
    if not isinstance(moment, datetime):
        raise TypeError(f"{field}: expected a datetime, a date or text such as 2026-01-31, got {shown(when)}")
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return int(zoned.timestamp() * 1000)
