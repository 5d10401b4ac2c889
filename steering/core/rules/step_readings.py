"""Readings of steps become the traces of requests, and counts of the rows that gates and rules wrote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.steering.core.resolved import Resolved
from headgate.steering.core.rules.registry import KeptRule, RuleRegistry
from headgate.steering.gates.conversations import ConversationLatches, LatchKey
from headgate.steering.gates.gate import Gate
from headgate.steering.gates.layout import FOLLOWING, layout_of
from headgate.steering.gates.step_table import StepRows, StepTable
from headgate.steering.gates.trace import GateSource, Note, TraceWriter
from headgate.steering.vectors.dtypes import Float32Rows

MAX_NAMES = 256
"""Names of gates that are counted apart: clients choose them."""
OTHERS = "(others)"


class RowCounts:
    """How many rows gates and rules wrote, as far as workers told of them. Engine thread only.

    Attributes:
        rules: By the names of rules; of one that observes, rows on which it would have acted.
        gates: By the names of requests' gates; beyond `MAX_NAMES` names all others together.
    """

    def __init__(self) -> None:
        self.rules: Counter[str] = Counter()
        self.gates: Counter[str] = Counter()

    def name_of(self, gate: Gate) -> str:
        """Return the name under which a request's gate is counted, from now on at the latest."""
        name = gate.name if gate.name in self.gates or len(self.gates) < MAX_NAMES else OTHERS
        self.gates[name] += 0
        return name

    def add_gates(self, source: GateSource, written: Iterable[int]) -> None:
        """Count rows that a request's own gates wrote, given in their order."""
        for gate, count in zip(source.layout.gates, written, strict=True):
            self.gates[self.name_of(gate.gate)] += count

    def add_rules(self, rules: Sequence[KeptRule], signals: Float32Rows) -> None:
        """Count rows on all of which the same rules act: float32 ``[rows, columns]``."""
        strengths = np.nan_to_num(signals[:, [rule.counted_column for rule in rules]])
        for rule, count in zip(rules, np.count_nonzero(strengths, axis=0).tolist(), strict=True):
            self.rules[rule.name] += count


class _Written:
    """Counts the rows of one request that some gates wrote, where a strength may act on the row behind.

    Args:
        source: The gates.
        num_prompt: Tokens of its prompt.
    """

    def __init__(self, source: GateSource, num_prompt: int) -> None:
        self._source = source
        self._num_prompt = num_prompt
        self._last: Float32Rows | None = None
        """Signals ``[1, columns]`` of the last row."""

    def count(self, rows: StepRows) -> list[int]:
        """Return how many of a step's rows each gate wrote."""
        signals = rows.signals
        first = np.zeros_like(signals[:1]) if self._last is None or not rows.first else self._last
        before, self._last = np.concatenate([first, signals[:-1]]), signals[-1:].copy()
        num_prompt, source = max(self._num_prompt - rows.first, 0), self._source
        strengths = [source.applied(column, num_prompt, signals, before) for column in source.columns]
        return [int(np.count_nonzero(each)) for each in strengths]

    @property
    def last(self) -> Float32Rows | None:
        """Signals ``[1, columns]`` of the last row; None before the first."""
        return self._last

    def follow(self, last: Float32Rows) -> None:
        """Go on behind rows that were counted elsewhere, by the signals ``[1, columns]`` of the last one."""
        self._last = last


class _OwnGates:
    """A request with gates of its own.

    Args:
        gates: The gates.
        resolved: Their programs, and the keys of those that go on in a conversation.
        num_prompt: Tokens of its prompt.
    """

    def __init__(self, gates: Sequence[Gate], resolved: Resolved, num_prompt: int) -> None:
        self.source = GateSource.of(layout_of(gates), resolved.own)
        self.latches = {
            key: column.column
            for column in self.source.layout.gates
            if (key := resolved.latch_keys.get(column.gate.name)) is not None
        }
        self.num_prompt = num_prompt
        self._columns = self.source.columns
        self.apart = None if self.source.is_written_late else _Written(self.source, num_prompt)
        """Counts rows, if what acts is not what is written."""

    def written(self, rows: StepRows) -> list[int]:
        """Return how many of a step's rows each gate wrote."""
        if self.apart is not None:
            return self.apart.count(rows)
        signals = rows.signals
        if len(signals) == 1:
            return [int(signals[0, column] != 0) for column in self._columns]
        return [int(count) for count in np.count_nonzero(signals[:, self._columns], axis=0)]


class _Places(NamedTuple):
    """Signals of a step that say what some gates wrote on generated rows.

    Attributes:
        rows: int64 ``[n]``: of the step.
        columns: int64 ``[n]``.
        numbers: int64 ``[n]``: of the names of the gates.
    """

    rows: Int64Array
    columns: Int64Array
    numbers: Int64Array

    @classmethod
    def of(cls, places: Iterable[tuple[int, int, int]]) -> _Places:
        """Make it of row, column and number of each."""
        return cls(*np.array(list(places), np.int64).reshape(-1, 3).T)

    def values(self, signals: Float32Rows) -> Float32Rows:
        """Return the strengths, float32 ``[n]``."""
        found: Float32Rows = signals[self.rows, self.columns]
        return found


class _Decoding:
    """Counts what gates wrote on one generated row of each of the same requests, in steps behind one another.

    Args:
        ids: The requests.
        own: Of those with gates, by their ids.
        counts: Of rows.
        known: As `StepReadings` had it before.
    """

    def __init__(self, ids: Sequence[str], own: Mapping[str, _OwnGates], counts: RowCounts, known: object) -> None:
        self._ids, self._known = ids, known
        self._counts = counts
        gated = [(at, each) for at, req_id in enumerate(ids) if (each := own.get(req_id)) is not None]
        self._at = np.array([at for at, _ in gated], np.int64)
        self._num_prompt = np.array([each.num_prompt for _, each in gated], np.int64)
        numbers: dict[str, int] = {}
        late: list[tuple[int, int, int]] = []
        early: list[tuple[int, int, int]] = []
        for at, each in gated:
            for gate in each.source.layout.gates:
                number = numbers.setdefault(counts.name_of(gate.gate), len(numbers))
                if gate.column in each.source.decode.late:
                    late.append((at, gate.column, number))
                elif gate.column in each.source.decode.early:
                    early.append((at, gate.column + FOLLOWING, number))
        self._names = list(numbers)
        self._late, self._early = _Places.of(late), _Places.of(early)
        self._apart = [(at, each.apart) for at, each in gated if each.apart is not None]
        self._before: Float32Rows | None = None
        """Signals of the last step, whose strengths may act on the rows of this one."""
        self.latching = [(at, each.latches) for at, each in gated if each.latches]

    def counts(self, step: StepTable, known: object) -> bool:
        """Whether it counts a step: one of a generated row for each of its requests, as `StepReadings` knows them."""
        is_ours = step.has_one_row_each and self._known is known and self._ids == step.ids
        return is_ours and not np.count_nonzero(step.firsts[self._at] < self._num_prompt)

    def count(self, signals: Float32Rows) -> None:
        """Count a step that it counts, by its signals, which nobody changes."""
        hits = self._late.numbers[self._late.values(signals) != 0]
        if len(self._early.rows):
            before = self._lasts(signals) if self._before is None else self._before
            strengths = np.nan_to_num(self._early.values(before), nan=0.0)
            hits = np.concatenate([hits, self._early.numbers[strengths != 0]])
        self._before = signals
        for number, count in enumerate(np.bincount(hits, minlength=len(self._names)).tolist()):
            if count:
                self._counts.gates[self._names[number]] += count

    def leave(self) -> None:
        """Let requests go on that others count."""
        if (before := self._before) is not None:
            for at, written in self._apart:
                written.follow(before[at : at + 1].copy())

    def _lasts(self, signals: Float32Rows) -> Float32Rows:
        """Return the signals of the row before each of a step's, as far as they are known; 0 otherwise."""
        found = np.zeros_like(signals)
        for at, written in self._apart:
            if written.last is not None:
                found[at] = written.last[0]
        return found


class StepReadings:
    """Follows requests through their steps' readings. Input thread adds requests, engine thread does everything else.

    Args:
        rules: Of the engine core.
        latches: Where gates of conversations are latched; None if there are none.

    Attributes:
        counts: Of rows.
        beside: Returns, by the id of a request, what is read of its rows beside its gates and rules.
    """

    def __init__(self, rules: RuleRegistry, latches: ConversationLatches | None = None) -> None:
        self.counts = RowCounts()
        self.beside: Callable[[str], Sequence[GateSource]] = lambda _: ()
        self._rules = rules
        self._latches = latches
        self._writers: dict[str, TraceWriter] = {}
        self._own: dict[str, _OwnGates] = {}
        """Of requests with gates of their own."""
        self._apart: dict[str, dict[bytes, _Written]] = {}
        """By request and rule, of rules whose strength may act on the row behind."""
        self._since: dict[str, int] = {}
        """Positions from which the present rules act, of requests that met a change."""
        self._known = object()
        """Another one whenever a request is added or forgotten, on whatever thread."""
        self._decoding: _Decoding | None = None

    @property
    def latches(self) -> dict[str, int]:
        """Conversations with gates that are latched, and the memory that they take."""
        known = self._latches
        if known is None:
            return {"conversations": 0, "bytes": 0}
        return {"conversations": len(known), "bytes": known.num_bytes}

    @property
    def num_gated(self) -> int:
        """Requests with gates of their own."""
        return len(self._own)

    def add(self, req_id: str, gates: Sequence[Gate], resolved: Resolved, num_prompt: int, *, is_traced: bool) -> None:
        """Add a request.

        Args:
            req_id: The request.
            gates: Its own.
            resolved: What they, and the rest of its steering, became.
            num_prompt: Tokens of its prompt.
            is_traced: Whether it wants its trace.
        """
        own = _OwnGates(gates, resolved, num_prompt)
        if gates:
            self._own[req_id] = own
        self._known = object()
        if is_traced:
            self._writers[req_id] = TraceWriter(own.source, num_prompt)

    def begin(self, req_id: str) -> None:
        """Let the present rules act on a request from its first row on."""
        if (writer := self._writers.get(req_id)) is not None:
            writer.change_rules(0, self._sources(req_id))

    def change_rules(self, firsts: Mapping[str, int]) -> None:
        """Let the present rules act on each request from a position on."""
        acting = {rule.source.key for rule in self._rules.all()}
        for known in self._apart.values():
            for key in known.keys() - acting:
                del known[key]
        for req_id, first in firsts.items():
            self._since[req_id] = first
            if (writer := self._writers.get(req_id)) is not None:
                writer.change_rules(first, self._sources(req_id))

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        self._writers.pop(req_id, None)
        self._own.pop(req_id, None)
        self._known = object()
        self._apart.pop(req_id, None)
        self._since.pop(req_id, None)

    def take(self, step: StepTable, discarded: Collection[str]) -> dict[str, Note]:
        """Return a piece of each request's trace, from what a step read; see `ReadingCore.take_readings`."""
        found: dict[str, Note] = {}
        if self._rules.all():
            self._count_rules(step)
        if self._own:
            self._count_own(step, discarded)
        if self._writers:
            for rows in step.rows(self._writers):
                writer = None if rows.req_id in discarded else self._writers.get(rows.req_id)
                if writer is not None and (note := writer.note(rows.first, rows.signals)) is not None:
                    found[rows.req_id] = note
        return found

    def _count_own(self, step: StepTable, discarded: Collection[str]) -> None:
        """Count what requests' own gates wrote; a step of one row each costs little, since it comes for each token."""
        known, decoding = self._known, self._decoding
        if decoding is not None and not decoding.counts(step, known):
            decoding.leave()
            self._decoding = decoding = None
        if decoding is None and step.has_one_row_each:
            decoding = _Decoding(step.ids, self._own, self.counts, known)
        if decoding is not None and decoding.counts(step, known):
            self._decoding = decoding
            decoding.count(step.signals)
            for at, latches in decoding.latching:
                if step.ids[at] not in discarded:
                    self._latch(latches, step.signals[at])
            return
        for rows in step.rows(self._own):
            if (own := self._own.get(rows.req_id)) is not None and len(rows.signals):
                self.counts.add_gates(own.source, own.written(rows))
                if rows.req_id not in discarded:
                    self._latch(own.latches, rows.signals[-1])

    def _latch(self, columns: Mapping[LatchKey, int], signals: Float32Rows) -> None:
        """Remember the strengths that go on behind a row: they were latched there, or before."""
        strengths = {key: float(signals[column + FOLLOWING]) for key, column in columns.items()}
        if self._latches is not None and strengths:
            self._latches.latch({key: strength for key, strength in strengths.items() if math.isfinite(strength)})

    def _count_rules(self, step: StepTable) -> None:
        """Count the rows of a step; steps that were launched before a change are passed over."""
        ids, firsts, counts, signals, _ = step
        ends = np.cumsum(counts).tolist()
        groups: dict[int, tuple[tuple[KeptRule, ...], list[int]]] = {}
        for at, (req_id, first) in enumerate(zip(ids, firsts.tolist(), strict=True)):
            rules = self._rules.acting(req_id)
            if rules and first >= self._since.get(req_id, 0):
                groups.setdefault(id(rules), (rules, []))[1].append(at)
        for rules, members in groups.values():
            rows = signals
            if len(members) < len(ids):
                is_member = np.zeros(len(ids), np.bool_)
                is_member[members] = True
                rows = signals[np.repeat(is_member, counts)]
            self.counts.add_rules([rule for rule in rules if not rule.is_counted_apart], rows)
            for rule in (rule for rule in rules if rule.is_counted_apart):
                for at in members:
                    told = StepRows(ids[at], int(firsts[at]), signals[ends[at] - int(counts[at]) : ends[at]])
                    self._count_apart(rule, told)

    def _count_apart(self, rule: KeptRule, rows: StepRows) -> None:
        """Count the rows of one request that a rule wrote whose strength may act on the row behind."""
        known = self._apart.setdefault(rows.req_id, {})
        if (written := known.get(rule.source.key)) is None:
            written = known[rule.source.key] = _Written(rule.source, self._rules.num_prompt(rows.req_id))
        self.counts.rules[rule.name] += sum(written.count(rows))

    def _sources(self, req_id: str) -> list[GateSource]:
        return [*(rule.source for rule in self._rules.acting(req_id)), *self.beside(req_id)]
