"""Readings of steps become the traces of requests, counts of the rows that gates and rules wrote, and latches."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.steering.core.resolved import Resolved
from headgate.steering.core.rules.registry import KeptRule, RuleRegistry
from headgate.steering.gates.conversations import ConversationLatches, LatchKey
from headgate.steering.gates.gate import COUNT, FOLLOWING
from headgate.steering.gates.step_table import ReportedCounts, StepTable
from headgate.steering.gates.trace import BEFORE, NEVER, GateSource, Note, TraceLog, TraceWriter
from headgate.steering.vectors.dtypes import Float32Rows

MAX_NAMES = 256
"""Names of gates that are counted apart: clients choose them."""
OTHERS = "(others)"


class RowCounts:
    """How many rows gates and rules wrote, as far as workers reported them. Engine thread only.

    Attributes:
        rules: By the names of rules; of one that observes, rows on which it would have acted.
        gates: By the names of requests' gates; beyond `MAX_NAMES` names all others together.
    """

    def __init__(self) -> None:
        self.rules: Counter[str] = Counter()
        self.gates: Counter[str] = Counter()

    def name_of(self, gate: str) -> str:
        """Return the name under which a request's gate is counted, from now on at the latest, by its own."""
        name = gate if gate in self.gates or len(self.gates) < MAX_NAMES else OTHERS
        self.gates[name] += 0
        return name

    def add_gates(self, gates: Sequence[str], written: Iterable[int]) -> None:
        """Count rows that a request's own gates wrote, given in the order of their names."""
        for gate, count in zip(gates, written, strict=True):
            self.gates[self.name_of(gate)] += count


class CountedGates:
    """The gates of a request whose rows a worker counts by itself. It holds nothing that gates bring.

    Args:
        names: Names of the gates.
        columns: Each gate's column of the strength that acts.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[int]) -> None:
        self.names = tuple(names)
        self._columns = [column + COUNT for column in columns]
        self._reported = [0] * len(columns)

    def more(self, states: Float32Rows, *, is_last: bool) -> list[int]:
        """Return how many more rows each gate wrote.

        Args:
            states: The request's states, float32 ``[columns]``, as they are now.
            is_last: Whether its counts begin anew after this.
        """
        counts = [int(count) for count in np.nan_to_num(states[self._columns]).tolist()]
        more = [count - reported for count, reported in zip(counts, self._reported, strict=True)]
        self._reported = [0] * len(counts) if is_last else counts
        return more


class CountedRequest:
    """A request with gates of its own.

    Args:
        source: The gates.
        latch_keys: Keys of the ones that go on in a conversation, by their names.
        num_prompt: Tokens of its prompt.
        may_be_counted: Whether workers may count what its gates write.
    """

    def __init__(
        self, source: GateSource, latch_keys: Mapping[str, LatchKey], num_prompt: int, *, may_be_counted: bool = True
    ) -> None:
        self.source = source
        self._may_be_counted = may_be_counted
        self.latches = {
            key: column.column
            for column in self.source.layout.gates
            if (key := latch_keys.get(column.gate.name)) is not None
        }
        self.num_prompt = num_prompt
        self._columns = self.source.columns
        self.counted = CountedGates([gate.gate.name for gate in source.layout.gates], self._columns)

    @property
    def is_countable(self) -> bool:
        """Whether rows need not be sent: workers can count what is written, and nothing else reads the rows."""
        decode = self.source.decode
        may_be = self._may_be_counted and bool(self._columns)
        return may_be and not self.latches and decode.early.isdisjoint(self._columns)


HandedOn = dict[tuple[bytes, int], float]
"""Strengths that the last row of a request hands on to the next one, by the gate's content and column."""

_NO_END = np.iinfo(np.int64).max


class StrengthPlaces:
    """Where the strengths are found that are written on the rows of one request.

    Args:
        handed_on: The request's.

    Attributes:
        numbers: int64 ``[n, 7]``: the column of a strength, the first position of rows on which it is written and the
            one after the last, the position from which its gate or rule acts, the number of its name, whether the row
            before has it, and whether one that is not a number counts as 0.
        keys: The gate's or rule's content and column, ``[n]``.
        handed_on: As given.
    """

    def __init__(self, handed_on: HandedOn) -> None:
        self.handed_on = handed_on
        self.keys: list[tuple[bytes, int]] = []
        self._listed: list[tuple[int, ...]] = []

    @cached_property
    def numbers(self) -> Int64Array:
        """See the class; to be read once all are added."""
        return np.array(self._listed, np.int64).reshape(-1, 7)

    def add(self, source: GateSource, column: int, since: int, num_prompt: int, name: int) -> None:
        """Add a gate: in each phase, what acts on a row is its own strength, or that of the row before, or nothing."""
        is_late = column in source.prefill.late and column in source.decode.late
        phases = (source.prefill, since, num_prompt), (source.decode, max(since, num_prompt), _NO_END)
        for writes, begin, end in ((source.decode, since, _NO_END),) if is_late else phases:
            is_before = column not in writes.late
            if not is_before or column in writes.early:
                self._listed.append((column + FOLLOWING * is_before, begin, end, since, name, is_before, is_before))
                self.keys.append((source.key, column))

    def add_rule(self, rule: KeptRule, since: int, num_prompt: int, name: int) -> None:
        """Add a rule that acts from a position on."""
        if rule.is_counted_apart:
            for gate in rule.source.layout.gates:
                self.add(rule.source, gate.column, since, num_prompt, name)
            return
        self._listed.append((rule.counted_column, since, _NO_END, since, name, False, True))
        self.keys.append((rule.source.key, rule.counted_column))


class CountedRows:
    """Counts what gates and rules write on the rows of the same requests, step by step.

    Args:
        ids: The requests.
        places: Where the strengths of each are found; None if nothing acts on it.

    Attributes:
        ids: As given.
    """

    def __init__(self, ids: tuple[str, ...], places: Sequence[StrengthPlaces | None]) -> None:
        self.ids = ids
        self._places = [each for each in places if each is not None]
        numbers = np.concatenate([np.empty((0, 7), np.int64), *(each.numbers for each in self._places)])
        self._at = np.array([at for at, each in enumerate(places) if each is not None], np.int64)
        self._at = self._at.repeat([len(each.keys) for each in self._places])
        self._column, self._begin, self._end, self._since, self._name, is_before, is_finite = numbers.T
        self._is_before, self._is_finite = is_before > 0, is_finite > 0
        (self._handing_on,) = self._is_before.nonzero()
        self._before: Float32Rows = np.zeros(len(numbers), np.float32)
        if len(self._handing_on):
            known = [each.handed_on.get(key, 0.0) for each in self._places for key in each.keys]
            self._before = np.array(known, np.float32)

    def leave(self) -> None:
        """Let others go on."""
        if len(self._handing_on):
            handed_on = ((each.handed_on, key) for each in self._places for key in each.keys)
            for (known, key), is_before, value in zip(
                handed_on, self._is_before.tolist(), self._before.tolist(), strict=True
            ):
                if is_before:
                    known[key] = value

    def count(self, step: StepTable) -> Int64Array:
        """Return how many rows of a step were written by the numbers of names, int64 ``[names]``."""
        firsts, starts, signals = step.firsts[self._at], self._at, step.signals
        if step.has_one_row_each:
            lasts, last_positions = starts, firsts
            (which,) = ((firsts >= self._begin) & (firsts < self._end)).nonzero()
            offsets = np.zeros(len(which), np.int64)
        else:
            sizes = step.counts[self._at]
            starts = (step.counts.cumsum() - step.counts)[self._at]
            lasts, last_positions = starts + sizes - 1, firsts + sizes - 1
            begins = np.maximum(firsts, self._begin)
            numbers = np.maximum(np.minimum(last_positions + 1, self._end) - begins, 0)
            which = np.arange(len(numbers)).repeat(numbers)
            offsets = np.arange(len(which)) + (begins - firsts - numbers.cumsum() + numbers)[which]
        rows = starts[which] + offsets
        if len(self._handing_on):
            is_before = self._is_before[which]
            # Nothing is handed on within a step to the row from which a rule acts.
            is_first = (offsets == 0) | (firsts[which] + offsets == self._since[which])
            rows -= is_before & ~is_first
            values = signals[rows, self._column[which]]
            self._before[firsts == 0] = 0.0
            values = np.where(is_before & is_first, self._before[which], values)
            ours = self._handing_on[(last_positions >= self._since)[self._handing_on]]
            self._before[ours] = signals[lasts[ours], self._column[ours]]
        else:
            values = signals[rows, self._column[which]]
        hits = (values != 0) & ~(np.isnan(values) & self._is_finite[which])
        return np.bincount(self._name[which[hits]])


MAX_ENDED = 4096
"""Requests that ended whose counts may still come; requests that never ran, or whose rows were sent, are among them."""
_AT_ONCE = 7
"""Steps of generated rows that are counted together: one by one, each would find the processor's caches cold. Blocks
have a power of two of tokens, and a step in which requests need new ones is long enough."""


class StepCounts:
    """Counts rows from what steps read. Input thread adds requests, engine thread does everything else.

    Args:
        rules: Rules of the engine core.
    """

    def __init__(self, rules: RuleRegistry) -> None:
        self._counts = RowCounts()
        self._uncounted: list[StepTable] = []
        """The last steps; whatever acts on their rows acts still."""
        self._rules = rules
        self._own: dict[str, CountedRequest] = {}
        """Requests with gates of their own."""
        self._ended: OrderedDict[str, CountedGates] = OrderedDict()
        """The last ones that ended, since what workers have counted of them comes later."""
        self._handed_on: dict[str, HandedOn] = {}
        """By request; another request with the same id has another object."""
        self._since: dict[str, int] = {}
        """Positions from which the present rules act, of requests that met a change."""
        self._known = object()
        """Another one whenever a request is added or forgotten, on whatever thread, and whenever rules change."""
        self._places: dict[str, StrengthPlaces] = {}
        """Places of the requests that had a step, as gates and rules act on them now."""
        self._names: dict[tuple[bool, str], int] = {}
        """Numbers of names, by whether it is a rule's."""
        self._counting: tuple[object, CountedRows] | None = None
        """`_known`, and what counts steps of the requests of the last step."""

    @property
    def counts(self) -> RowCounts:
        """Counts of rows, including the last step."""
        self.settle()
        return self._counts

    @property
    def awaits_counts(self) -> bool:
        """Whether workers may have counted rows that they did not send."""
        return bool(self._own or self._ended)

    @property
    def num_gated(self) -> int:
        """Requests with gates of their own."""
        return len(self._own)

    def own(self, req_id: str) -> CountedRequest | None:
        """Return the gates of a request's own; None if it has none."""
        return self._own.get(req_id)

    def add(self, req_id: str, own: CountedRequest | None) -> None:
        """Add a request, with or without gates of its own. Input thread."""
        if own is not None:
            self._own[req_id] = own
        self._known = object()

    def take_counts(self, counts: Iterable[ReportedCounts]) -> None:
        """Take what workers have counted by themselves."""
        for req_id, states, is_last, has_ended in counts:
            own = self._own.get(req_id)
            gates = self._ended.get(req_id) if own is None else own.counted
            if gates is not None:
                self._counts.add_gates(gates.names, gates.more(states, is_last=is_last))
            if has_ended:
                self._ended.pop(req_id, None)

    def settle(self) -> None:
        """Count the steps that were not counted yet; to be called before something acts no more, or acts anew."""
        steps, self._uncounted = self._uncounted, []
        for step in steps:
            self._count(step)

    def change_rules(self, firsts: Mapping[str, int]) -> None:
        """Let the present rules act on each request from a position on."""
        self._known = object()
        self._leave()
        acting = {rule.source.key for rule in self._rules.all()}
        for req_id, known in self._handed_on.items():
            own = self._own.get(req_id)
            kept = acting if own is None else acting | {own.source.key}
            for key in [each for each in known if each[0] not in kept]:
                del known[key]
        self._places = {}
        self._since.update(firsts)

    def begin_again(self, req_id: str) -> None:
        """Let the present rules act on a request from its first row on."""
        if self._since.pop(req_id, None) is not None:
            self._places.pop(req_id, None)
            self._known = object()

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known; one that ran is to be settled before."""
        own = self._own.pop(req_id, None)
        if own is not None and own.is_countable:
            self._ended[req_id] = own.counted
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        self._known = object()
        self._places.pop(req_id, None)
        self._handed_on.pop(req_id, None)
        self._since.pop(req_id, None)

    def take(self, step: StepTable) -> None:
        """Take a step in, to count it soon."""
        if self._own or self._rules.all():
            self._uncounted.append(step)
            if not step.has_one_row_each or len(self._uncounted) == _AT_ONCE:
                self.settle()

    def _count(self, step: StepTable) -> None:
        """Count what gates and rules wrote; steps mostly have the requests of the step before."""
        known, counting = self._known, self._counting
        if counting is None or counting[0] is not known or counting[1].ids != step.ids:
            self._leave()
            counting = self._counting = known, CountedRows(step.ids, list(map(self._places_of, step.ids)))
        found = counting[1].count(step).tolist()
        for (is_rule, name), count in zip(self._names, found, strict=False):  # those of the last names may be missing
            if count:
                (self._counts.rules if is_rule else self._counts.gates)[name] += count

    def _leave(self) -> None:
        if self._counting is not None:
            self._counting[1].leave()
            self._counting = None

    def _places_of(self, req_id: str) -> StrengthPlaces | None:
        if (known := self._places.get(req_id)) is not None:
            return known
        own, rules = self._own.get(req_id), self._rules.acting(req_id)
        if own is None and not rules:
            return None
        places = self._places[req_id] = StrengthPlaces(self._handed_on.setdefault(req_id, {}))
        if own is not None:
            for gate in own.source.layout.gates:
                name = self._number(self._counts.name_of(gate.gate.name), is_rule=False)
                places.add(own.source, gate.column, 0, own.num_prompt, name)
        for rule in rules:
            since, num_prompt = self._since.get(req_id, 0), self._rules.num_prompt(req_id)
            places.add_rule(rule, since, num_prompt, self._number(rule.name, is_rule=True))
        return places

    def _number(self, name: str, *, is_rule: bool) -> int:
        return self._names.setdefault((is_rule, name), len(self._names))


class DecodedTraces:
    """Writes of the generated rows of the same requests, step by step, what their `TraceWriter` would.

    Args:
        ids: The requests of the steps.
        writers: Writers of the wanted traces, each with the place of its request.
    """

    def __init__(self, ids: tuple[str, ...], writers: Sequence[tuple[int, TraceWriter]]) -> None:
        self._ids = ids
        self._at = np.array([at for at, _ in writers], np.int64)
        self._writers = [writer for _, writer in writers]
        plans = [writer.decoded() for writer in self._writers]
        self._next = np.array(
            [max(plan.since, writer.end) for plan, writer in zip(plans, self._writers, strict=True)], np.int64
        )
        """The first position of each request that can be written here."""
        sizes = [len(plan.columns) for plan in plans]
        self._rows = np.repeat(self._at, sizes)
        self._columns = np.array([column for plan in plans for column in plan.columns], np.int64)
        whose = np.array([one for plan in plans for one in plan.whose], np.int64)
        (self._held,), (self._never,) = (whose == BEFORE).nonzero(), (whose == NEVER).nonzero()
        ends = (4 * np.cumsum(sizes)).tolist()
        self._reported = [
            (ids[at], plan.scores, plan.gates, slice(end - 4 * size, end))
            for (at, _), plan, size, end in zip(writers, plans, sizes, ends, strict=True)
        ]
        self._before: StepTable | None = None
        """The last step."""

    def covers(self, step: StepTable) -> bool:
        """Whether it covers a step: one of a new generated row of each of its requests."""
        is_ours = step.has_one_row_each and self._ids == step.ids
        return is_ours and not np.count_nonzero(step.firsts[self._at] < self._next)

    def notes(self, step: StepTable) -> dict[str, Note]:
        """Return the pieces of a step that it covers; the signals must not change."""
        values = step.signals[self._rows, self._columns]
        if len(self._held):
            values[self._held] = np.nan_to_num(self._handed_on(), nan=0.0)
        if len(self._never):
            values[self._never] = 0.0
        firsts = step.firsts[self._at]
        self._before, self._next, reported = step, firsts + 1, values.tobytes()
        return {
            req_id: {"first": first, "rows": 1, "scores": scores, "gates": gates, "values": reported[part]}
            for (req_id, scores, gates, part), first in zip(self._reported, firsts.tolist(), strict=True)
        }

    def leave(self) -> None:
        """Let the writers go on."""
        if (before := self._before) is None:
            return
        for at, writer in zip(self._at.tolist(), self._writers, strict=True):
            writer.follow(int(before.firsts[at]) + 1, before.signals[at : at + 1].copy())

    def _handed_on(self) -> Float32Rows:
        """Return the strengths that the rows before hand on, float32 ``[n]``: 0 where there was none."""
        rows, columns = self._rows[self._held], self._columns[self._held]
        if self._before is not None:
            found: Float32Rows = self._before.signals[rows, columns]
            return found
        lasts = {at: writer.last for at, writer in zip(self._at.tolist(), self._writers, strict=True)}
        values = (
            0.0 if (last := lasts[at]) is None else last[0, column]
            for at, column in zip(rows.tolist(), columns.tolist(), strict=True)
        )
        return np.fromiter(values, np.float32, len(rows))


class StepTraces:
    """Follows requests whose traces are wanted. Input thread adds requests, engine thread does everything else."""

    def __init__(self) -> None:
        self._writers: dict[str, TraceWriter] = {}
        self._logs: dict[str, TraceLog] = {}
        """Logs of requests that capture."""
        self._known = object()
        """Another one whenever something else acts on a request, or another one is followed, on whatever thread."""
        self._decoded: tuple[object, DecodedTraces] | None = None
        """`_known`, and the writer of steps of generated rows, of the last step if that was one."""

    def add(self, req_id: str, own: GateSource, num_prompt: int) -> None:
        """Follow a request with gates of its own, or without any."""
        self._writers[req_id] = TraceWriter(own, num_prompt)
        self._known = object()

    def describe(self, req_id: str, own: GateSource | None, num_prompt: int) -> None:
        """Keep the whole trace of a request, whether or not it asks for it."""
        if req_id not in self._writers:
            self.add(req_id, GateSource.nothing() if own is None else own, num_prompt)
        self._logs[req_id] = TraceLog()

    def log(self, req_id: str) -> TraceLog | None:
        """Return the pieces of the trace of a request that is described, in few; None of others."""
        return self._logs.get(req_id)

    def keep(self, notes: Mapping[str, Note]) -> None:
        """Keep pieces of the traces of requests that are described."""
        for req_id, note in notes.items() if self._logs else ():
            if (log := self._logs.get(req_id)) is not None:
                log.add(note)

    def is_followed(self, req_id: str) -> bool:
        """Whether the trace of a request is wanted."""
        return req_id in self._writers

    def change_rules(self, req_id: str, since: int, rules: Sequence[GateSource]) -> None:
        """Let other rules act on a request that is followed, from a position on."""
        self._writers[req_id].change_rules(since, rules)
        self._known = object()

    def begin_again(self, req_id: str) -> Note | None:
        """Let a trace begin again, as the prompt does; return the piece that says so, None if no row was reported."""
        writer = self._writers.get(req_id)
        if writer is None or not writer.end:
            return None
        note = writer.begin_again()
        self.keep({req_id: note})
        return note

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is followed."""
        self._logs.pop(req_id, None)
        if self._writers.pop(req_id, None) is not None:
            self._known = object()

    def take(self, step: StepTable, discarded: Collection[str]) -> dict[str, Note]:
        """Return a piece of each request's trace, from what a step read; it is kept, too, for those described."""
        if not self._writers:
            return {}
        notes = self._notes(step, [req_id for req_id in discarded if req_id in self._writers])
        self.keep(notes)
        return notes

    def _notes(self, step: StepTable, discarded: Collection[str]) -> dict[str, Note]:
        """Write the pieces; a step of one generated row each costs little, since it comes for each token."""
        known = self._known
        if self._decoded is not None and (
            discarded or self._decoded[0] is not known or not self._decoded[1].covers(step)
        ):
            self._decoded[1].leave()
            self._decoded = None
        if self._decoded is None and step.has_one_row_each and not discarded:
            found = [(at, writer) for at, one in enumerate(step.ids) if (writer := self._writers.get(one)) is not None]
            decoded = DecodedTraces(step.ids, found)
            self._decoded = (known, decoded) if decoded.covers(step) else None
        if self._decoded is not None:
            return self._decoded[1].notes(step)
        notes: dict[str, Note] = {}
        for rows in step.rows(self._writers):
            writer = None if rows.req_id in discarded else self._writers.get(rows.req_id)
            if writer is not None and (note := writer.note(rows.first, rows.signals)) is not None:
                notes[rows.req_id] = note
        return notes


class RequestReadings:
    """Follows requests through their steps' readings. Input thread adds requests, engine thread does everything else.

    Args:
        rules: Rules of the engine core.
        latches: Where gates of conversations are latched; None if there are none.
        is_counted_there: Whether workers may count what gates write, so that rows need not be sent.

    Attributes:
        traces: Traces of requests whose traces are wanted.
        beside: Returns, by the id of a request, what is read of its rows beside its gates and rules.
    """

    def __init__(
        self, rules: RuleRegistry, latches: ConversationLatches | None = None, *, is_counted_there: bool = True
    ) -> None:
        self.traces = StepTraces()
        self.beside: Callable[[str], Sequence[GateSource]] = lambda _: ()
        self._counting = StepCounts(rules)
        self._rules = rules
        self._latches = latches
        self._is_counted_there = is_counted_there
        self._latching: dict[str, CountedRequest] = {}
        """Requests with gates that go on in a conversation."""

    @property
    def counts(self) -> RowCounts:
        """Counts of rows, including the last step."""
        return self._counting.counts

    @property
    def awaits_counts(self) -> bool:
        """Whether workers may have counted rows that they did not send."""
        return self._counting.awaits_counts

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
        return self._counting.num_gated

    def add(self, req_id: str, resolved: Resolved, num_prompt: int, *, is_traced: bool) -> bool:
        """Add a request; returns whether nothing is wanted of its gates but how many rows they write.

        Args:
            req_id: The request.
            resolved: Its gates, and the rest of its steering.
            num_prompt: Tokens of its prompt.
            is_traced: Whether it wants its trace.
        """
        if resolved.gates is None:
            self._counting.add(req_id, None)
            if is_traced:
                self.traces.add(req_id, GateSource.nothing(), num_prompt)
            return False
        own = CountedRequest(resolved.gates, resolved.latch_keys, num_prompt, may_be_counted=self._is_counted_there)
        self._counting.add(req_id, own)
        if own.latches:
            self._latching[req_id] = own
        if is_traced:
            self.traces.add(req_id, own.source, num_prompt)
        return own.is_countable and not is_traced

    def describe(self, req_id: str, num_prompt: int) -> None:
        """Keep the whole trace of a request that captures, whether or not it asks for it. Input thread."""
        own = self._counting.own(req_id)
        self.traces.describe(req_id, None if own is None else own.source, num_prompt)

    def begin(self, req_id: str) -> None:
        """Let the present rules act on a request from its first row on."""
        if self.traces.is_followed(req_id):
            self.traces.change_rules(req_id, 0, self._sources(req_id))

    def settle(self) -> None:
        """Finish with the steps so far; to be called before something acts on their rows no more, or acts anew."""
        self._counting.settle()

    def change_rules(self, firsts: Mapping[str, int]) -> None:
        """Let the present rules act on each request from a position on."""
        self._counting.change_rules(firsts)
        for req_id, first in firsts.items():
            if self.traces.is_followed(req_id):
                self.traces.change_rules(req_id, first, self._sources(req_id))

    def begin_again(self, req_id: str) -> Note | None:
        """Let a prompt begin again under what acts now; see `CorePart.begin_again`."""
        self.settle()
        self._counting.begin_again(req_id)
        return self.traces.begin_again(req_id)

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known; one that ran is to be settled before."""
        self.traces.forget(req_id)
        self._latching.pop(req_id, None)
        self._counting.forget(req_id)

    def take_counts(self, counts: Iterable[ReportedCounts]) -> None:
        """Take what workers have counted; see `StepCounts.take_counts`."""
        self._counting.take_counts(counts)

    def take(self, step: StepTable, discarded: Collection[str]) -> dict[str, Note]:
        """Return a piece of each request's trace, from what a step read; see `CorePart.take_readings`."""
        self._counting.take(step)
        self._latch_own(step, discarded)
        return self.traces.take(step, discarded)

    def _latch_own(self, step: StepTable, discarded: Collection[str]) -> None:
        """Remember what has latched by the last row of each request, or before, for those of conversations."""
        if self._latches is None or not self._latching:
            return
        for rows in step.rows(self._latching):
            if rows.req_id not in discarded and len(rows.signals):
                last, columns = rows.signals[-1], self._latching[rows.req_id].latches
                strengths = {key: float(last[column + FOLLOWING]) for key, column in columns.items()}
                self._latches.latch({key: value for key, value in strengths.items() if math.isfinite(value)})

    def _sources(self, req_id: str) -> list[GateSource]:
        return [*(rule.source for rule in self._rules.acting(req_id)), *self.beside(req_id)]
