"""Readings of steps become the traces of requests, counts of the rows that gates and rules wrote, and latches."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.steering.core.resolved import Resolved
from headgate.steering.core.rules.registry import RuleRegistry
from headgate.steering.gates.conversations import ConversationLatches, LatchKey
from headgate.steering.gates.gate import COUNT, FOLLOWING, NamedProbe, Reading
from headgate.steering.gates.step_table import ReportedCounts, StepTable
from headgate.steering.gates.trace import BEFORE, NEVER, NOW, GateSource, Note, add_note
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
            for column in self.source.columns.gates
            if (key := latch_keys.get(column.gate.name)) is not None
        }
        self.num_prompt = num_prompt
        self._columns = self.source.strength_columns
        self.counted = CountedGates([gate.gate.name for gate in source.columns.gates], self._columns)

    @property
    def is_countable(self) -> bool:
        """Whether rows need not be sent: workers can count what is written, and nothing else reads the rows."""
        decode = self.source.decode
        may_be = self._may_be_counted and bool(self._columns)
        return may_be and not self.latches and decode.early.isdisjoint(self._columns)


UNCOUNTED = 0
"""The number of a name that nothing has."""
_NOWHERE = -1
"""A position that no row has."""


class RowValue(NamedTuple):
    """A number of each row of a request: a score, the strength that a gate shows, or the one that it writes.

    Attributes:
        key: The content of the gates that it is of, and the column.
        column: Where the signals of a row have it.
        whose: Of rows of the prompt, and of generated rows; see `GateSource.whose`.
        since: The first position of the rows that have it: NaN before.
        name: Number of the name under which rows on which it is not 0 are counted, or `UNCOUNTED`.
    """

    key: tuple[bytes, int]
    column: int
    whose: tuple[int, int]
    since: int
    name: int


class ReadRequest:
    """A request whose rows are read: their values, and what they hand on to rows to come.

    Args:
        values: Each number of a row; of a traced request in the order of `Note`.
        num_prompt: Tokens of its prompt.
        names: The names of scores and of gates in its trace; None if it is not traced.
        earlier: The request as it was followed before something else acted on it.

    Attributes:
        values: As given.
        names: As given.
        numbers: int64 ``[n, 6]``: column, whose of both phases, since and name of each value, and the prompt's tokens.
        end: Position after the last row of its trace.
        nexts: The position after the last row that was computed, and after the last one that was not computed again.
        held: float32 ``[2, n]``: what the rows before these positions hand on; 0 for values that take nothing from it.
    """

    def __init__(
        self,
        values: Sequence[RowValue],
        num_prompt: int,
        names: tuple[tuple[str, ...], tuple[str, ...]] | None,
        earlier: ReadRequest | None = None,
    ) -> None:
        self.values, self.names = values, names
        listed = [(value.column, *value.whose, value.since, value.name, num_prompt) for value in values]
        self.numbers: Int64Array = np.array(listed, np.int64).reshape(-1, 6)
        self.end: int = 0 if earlier is None else earlier.end
        self.nexts: tuple[int, int] = (_NOWHERE, _NOWHERE) if earlier is None else earlier.nexts
        self.held: Float32Rows = np.zeros((2, len(values)), np.float32)
        if earlier is not None:
            places = {value.key: at for at, value in enumerate(earlier.values)}
            for at, value in enumerate(values):
                if value.key in places:
                    self.held[:, at] = earlier.held[:, places[value.key]]
        self._num_prompt = num_prompt

    def reported(self, first: int, count: int) -> int:
        """Return how many of a step's rows, the first ones, are in the trace already; the others are from here on.

        Rows of a prompt without its first token are reported again: the token is to be of the last computation.
        """
        if first < self.end < self._num_prompt:
            self.end = first
        known = min(max(self.end - first, 0), count)
        self.end = max(self.end, first + count)
        return known


class StepValues:
    """Reads the values of the rows of the same requests, step by step.

    Letters in shape comments: R requests that are followed, V values of all of them, N values of all rows of a step.

    Args:
        ids: The requests of the steps.
        requests: The ones that are followed, each with its id's place.

    Attributes:
        ids: As given.
    """

    def __init__(self, ids: tuple[str, ...], requests: Sequence[tuple[int, ReadRequest]]) -> None:
        self.ids = ids
        self._requests = [request for _, request in requests]
        self._at = np.array([at for at, _ in requests], np.int64)
        sizes = [len(request.values) for request in self._requests]
        self._of = np.arange(len(sizes)).repeat(sizes)
        """The request of each value, int64 ``[V]``."""
        numbers = [np.empty((0, 6), np.int64), *(request.numbers for request in self._requests)]
        self._column, self._prefill, self._decode, self._since, self._name, self._num_prompt = np.concatenate(numbers).T
        (self._handing_on,) = (self._decode == BEFORE).nonzero()
        self._is_plain = not (self._prefill.any() or self._decode.any() or self._since.any())
        """Whether each value is in the signals of its row."""
        self._following = self._column.copy()
        self._following[self._handing_on] += FOLLOWING
        self._nexts = np.array([request.nexts for request in self._requests], np.int64).reshape(-1, 2).T
        held = [np.empty((2, 0), np.float32), *(request.held for request in self._requests)]
        self._held: Float32Rows = np.concatenate(held, axis=1)
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        self._parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def leave(self) -> None:
        """Let others go on."""
        for request, part, nexts in zip(self._requests, self._parts, self._nexts.T.tolist(), strict=True):
            request.held, (computed, new) = self._held[:, part], nexts
            request.nexts = computed, new

    def read(self, step: StepTable) -> tuple[Int64Array, Float32Rows]:
        """Return the value that each number is, int64 ``[N]``, and the numbers, float32 ``[N]``.

        They are those of one value after the other, of each for all rows of its request.
        """
        firsts, sizes = step.firsts[self._at], step.counts[self._at]
        starts = self._at if step.has_one_row_each else (step.counts.cumsum() - step.counts)[self._at]
        if step.has_one_row_each:
            which, offsets = np.arange(len(self._of)), np.zeros(len(self._of), np.int64)
        else:
            each = sizes[self._of]
            which = np.arange(len(each)).repeat(each)
            offsets = np.arange(len(which)) - (each.cumsum() - each).repeat(each)
        of = self._of[which]
        rows, positions = starts[of] + offsets, firsts[of] + offsets
        values: Float32Rows = step.signals[rows, self._column[which]]
        if not self._is_plain:
            is_prompt = positions < self._num_prompt[which]
            whose = np.where(is_prompt, self._prefill[which], self._decode[which])
            values[whose == NEVER] = 0.0
            if len(self._handing_on):
                (taken,) = (whose == BEFORE).nonzero()
                before = self._before(step, which[taken], rows[taken], offsets[taken], positions[taken])
                values[taken] = np.nan_to_num(before, nan=0.0)
            values[positions < self._since[which]] = np.nan
        if len(self._handing_on):
            self._hold(step, starts + sizes - 1, firsts + sizes)
        return which, values

    def _before(
        self, step: StepTable, which: Int64Array, rows: Int64Array, offsets: Int64Array, positions: Int64Array
    ) -> Float32Rows:
        """Return what the rows before some rows hand on; nothing to a request's first row, or under another rule.

        A row that begins a step takes it from the last row that was computed. After others in the step, the first row
        that was not computed before takes what was known before the step, although the row before is computed again.
        """
        computed, new = self._nexts[:, self._of[which]]
        begins = offsets == 0
        found: Float32Rows = step.signals[rows - ~begins, self._following[which]]
        found[begins | (positions <= self._since[which])] = 0.0
        goes_on, is_new = begins & (positions == computed), ~begins & (positions == new)
        found[goes_on] = self._held[0, which[goes_on]]
        found[is_new] = self._held[1, which[is_new]]
        return found

    def _hold(self, step: StepTable, lasts: Int64Array, nexts: Int64Array) -> None:
        """Keep what the last rows of a step hand on, at indices ``[R]``, to the positions after them."""
        which = self._handing_on
        of = self._of[which]
        handed_on = np.where(nexts[of] > self._since[which], step.signals[lasts[of], self._following[which]], 0.0)
        is_new = nexts >= self._nexts[1]
        self._held[0, which] = handed_on
        self._held[1, which] = np.where(is_new[of], handed_on, self._held[1, which])
        self._nexts = np.stack([nexts, np.maximum(nexts, self._nexts[1])])

    def count(self, which: Int64Array, values: Float32Rows) -> Int64Array:
        """Return how many rows were written by the numbers of names, int64 ``[names]``, of what `read` returned."""
        hits = (values != 0) & ~np.isnan(values)
        return np.bincount(self._name[which[hits]])

    def notes(self, step: StepTable, values: Float32Rows, discarded: Collection[str]) -> dict[str, Note]:
        """Return the pieces of traces, of what `read` returned; none of rows that were reported before."""
        found: dict[str, Note] = {}
        firsts, counts = step.firsts[self._at].tolist(), step.counts[self._at].tolist()
        end, listed = 0, values.tobytes()
        for at, first, count, request in zip(self._at.tolist(), firsts, counts, self._requests, strict=True):
            begin, end = end, end + count * len(request.values)
            if request.names is None or (req_id := self.ids[at]) in discarded:
                continue
            known = request.reported(first, count)
            if known < count:
                rows = values[begin:end].reshape(len(request.values), count).T[known:] if count > 1 else None
                found[req_id] = {
                    "first": first + known,
                    "rows": count - known,
                    "scores": request.names[0],
                    "gates": request.names[1],
                    "values": listed[4 * begin : 4 * end] if rows is None else rows.tobytes(),
                }
        return found


MAX_ENDED = 4096
"""Requests that ended whose counts may still come; requests that never ran, or whose rows were sent, are among them."""
_AT_ONCE = 7
"""Steps of generated rows that are counted together: one by one, each would find the processor's caches cold. Blocks
have a power of two of tokens, and a step in which requests need new ones is long enough."""


class RequestReadings:
    """Follows requests through their steps' readings. Input thread adds requests, engine thread does everything else.

    Args:
        rules: Rules of the engine core.
        latches: Where gates of conversations are latched; None if there are none.
        is_counted_there: Whether workers may count what gates write, so that rows need not be sent.

    Attributes:
        beside: Returns, by the id of a request, what is read of its rows beside its gates and rules.
    """

    def __init__(
        self, rules: RuleRegistry, latches: ConversationLatches | None = None, *, is_counted_there: bool = True
    ) -> None:
        self.beside: Callable[[str], Sequence[GateSource]] = lambda _: ()
        self._rules = rules
        self._latches = latches
        self._is_counted_there = is_counted_there
        self._counts = RowCounts()
        self._names: dict[tuple[bool, str], int] = {}
        """Numbers of names, by whether it is a rule's; those of `RowValue`, from 1 on."""
        self._own: dict[str, CountedRequest] = {}
        """Requests with gates of their own."""
        self._latching: dict[str, CountedRequest] = {}
        """Requests with gates that go on in a conversation."""
        self._ended: OrderedDict[str, CountedGates] = OrderedDict()
        """The last ones that ended, since what workers have counted of them comes later."""
        self._traced: dict[str, int] = {}
        """Tokens of the prompts of requests whose traces are wanted."""
        self._logs: dict[str, list[Note]] = {}
        """Pieces of the traces of requests that capture, in few; see `add_note`."""
        self._since: dict[str, int] = {}
        """Positions from which the present rules act, of requests that met a change."""
        self._followed: dict[str, ReadRequest] = {}
        """The requests that had a step, as gates and rules act on them now."""
        self._known = object()
        """Another one whenever a request is added or forgotten, on whatever thread, and whenever rules change."""
        self._reading: tuple[object, StepValues] | None = None
        """`_known`, and what reads steps of the requests of the last step."""
        self._unread: list[StepTable] = []
        """The last steps, if no trace is wanted; whatever acts on their rows acts still."""

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

    def add(self, req_id: str, resolved: Resolved, num_prompt: int, *, is_traced: bool) -> bool:
        """Add a request; returns whether nothing is wanted of its gates but how many rows they write.

        Args:
            req_id: The request.
            resolved: Its gates, and the rest of its steering.
            num_prompt: Tokens of its prompt.
            is_traced: Whether it wants its trace.
        """
        own = None
        if resolved.gates is not None:
            own = CountedRequest(resolved.gates, resolved.latch_keys, num_prompt, may_be_counted=self._is_counted_there)
            self._own[req_id] = own
            if own.latches:
                self._latching[req_id] = own
        if is_traced:
            self._traced[req_id] = num_prompt
        self._known = object()
        return own is not None and own.is_countable and not is_traced

    def describe(self, req_id: str, num_prompt: int) -> None:
        """Keep the whole trace of a request that captures, whether or not it asks for it. Input thread."""
        self._logs[req_id] = []
        self._traced[req_id] = num_prompt
        self._known = object()

    def log(self, req_id: str) -> list[Note] | None:
        """Return the pieces of the trace of a request that is described, in few, to which its next ones are added.

        Returns:
            None for any other request.
        """
        return self._logs.get(req_id)

    def keep(self, notes: Mapping[str, Note]) -> None:
        """Keep pieces of the traces of requests that are described."""
        for req_id, note in notes.items() if self._logs else ():
            if (log := self._logs.get(req_id)) is not None:
                add_note(log, note)

    def settle(self) -> None:
        """Finish with the steps so far; to be called before something acts on their rows no more, or acts anew."""
        steps, self._unread = self._unread, []
        for step in steps:
            self._read(step, ())

    def change_rules(self, firsts: Mapping[str, int]) -> None:
        """Let the present rules act on each request from a position on; one that acted before goes on."""
        self._leave()
        self._since.update(firsts)
        followed, self._followed = self._followed, {}
        for req_id, earlier in followed.items():
            self._follow(req_id, earlier)
        self._known = object()

    def begin_again(self, req_id: str) -> Note | None:
        """Let a prompt begin again under what acts now; see `CorePart.begin_again`."""
        self.settle()
        self._leave()
        self._since.pop(req_id, None)
        self._known = object()
        earlier = self._followed.pop(req_id, None)
        if earlier is None or not earlier.end:
            return None
        note = {"first": 0, "rows": 0, "scores": (), "gates": (), "values": b""}
        self.keep({req_id: note})
        return note

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known; one that ran is to be settled before."""
        own = self._own.pop(req_id, None)
        if own is not None and own.is_countable:
            self._ended[req_id] = own.counted
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        for known in (self._latching, self._traced, self._logs, self._since, self._followed):
            known.pop(req_id, None)
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

    def take(self, step: StepTable, discarded: Collection[str]) -> dict[str, Note]:
        """Return a piece of each request's trace, from what a step read; see `CorePart.take_readings`."""
        self._latch_own(step, discarded)
        if self._traced:
            self.settle()
            return self._read(step, discarded)
        if self._own or self._rules.all():
            self._unread.append(step)
            if not step.has_one_row_each or len(self._unread) == _AT_ONCE:
                self.settle()
        return {}

    def _read(self, step: StepTable, discarded: Collection[str]) -> dict[str, Note]:
        """Count what gates and rules wrote, and return traces; steps mostly have the requests of the step before."""
        known, reading = self._known, self._reading
        if reading is None or reading[0] is not known or reading[1].ids != step.ids:
            self._leave()
            found = [(at, self._followed.get(req_id) or self._follow(req_id)) for at, req_id in enumerate(step.ids)]
            reading = known, StepValues(step.ids, [(at, each) for at, each in found if each is not None])
            self._reading = reading
        which, values = reading[1].read(step)
        counts = reading[1].count(which, values).tolist()
        for (is_rule, name), count in zip(self._names, counts[1:], strict=False):  # those of the last may be missing
            if count:
                (self._counts.rules if is_rule else self._counts.gates)[name] += count
        notes = reading[1].notes(step, values, discarded) if self._traced else {}
        self.keep(notes)
        return notes

    def _leave(self) -> None:
        if self._reading is not None:
            self._reading[1].leave()
            self._reading = None

    def _follow(self, req_id: str, earlier: ReadRequest | None = None) -> ReadRequest | None:
        """Follow a request under what acts on it now; None if nothing does, and no trace is wanted."""
        own, rules, is_traced = self._own.get(req_id), self._rules.acting(req_id), req_id in self._traced
        if own is None and not rules and not is_traced:
            return None
        first = self._since.get(req_id, 0)
        since = {} if earlier is None else {value.key: value.since for value in earlier.values}

        def value(source: GateSource, column: int, whose: tuple[int, int] = (NOW, NOW), name: int = 0) -> RowValue:
            key, is_own = (source.key, column), own is not None and source is own.source
            return RowValue(key, column, whose, 0 if is_own else since.get(key, first), name)

        own_gates = GateSource.nothing() if own is None else own.source
        sources = [own_gates, *(rule.source for rule in rules), *(self.beside(req_id) if is_traced else ())]
        scores = {name: value(*found) for name, found in _scores(sources).items()} if is_traced else {}
        shown: dict[str, RowValue] = {}
        written: list[RowValue] = []
        for gate in own_gates.columns.gates:
            number = self._number(self._counts.name_of(gate.gate.name), is_rule=False)
            shown[gate.gate.name] = value(own_gates, gate.column + 1)
            written.append(value(own_gates, gate.column, own_gates.whose(gate.column), number))
        for rule in rules:
            number, observes = self._number(rule.name, is_rule=True), rule.rule.gate.then.observes
            for gate in rule.source.columns.gates:
                source, column, name = rule.source, gate.column, _unused(gate.gate.name, shown)
                shown[name] = value(source, column + 1, name=number if observes else UNCOUNTED)
                written.append(value(source, column, source.whose(column), UNCOUNTED if observes else number))
        values = [*scores.values(), *shown.values(), *written]
        if not is_traced:
            values = [each for each in values if each.name != UNCOUNTED]
        num_prompt = self._traced[req_id] if is_traced else own.num_prompt if own else self._rules.num_prompt(req_id)
        names = (tuple(scores), tuple(shown)) if is_traced else None
        followed = self._followed[req_id] = ReadRequest(values, num_prompt, names, earlier)
        return followed

    def _number(self, name: str, *, is_rule: bool) -> int:
        return self._names.setdefault((is_rule, name), len(self._names) + 1)

    def _latch_own(self, step: StepTable, discarded: Collection[str]) -> None:
        """Remember what has latched by the last row of each request, or before, for those of conversations."""
        if self._latches is None or not self._latching:
            return
        for rows in step.rows(self._latching):
            if rows.req_id not in discarded and len(rows.signals):
                last, columns = rows.signals[-1], self._latching[rows.req_id].latches
                strengths = {key: float(last[column + FOLLOWING]) for key, column in columns.items()}
                self._latches.latch({key: value for key, value in strengths.items() if math.isfinite(value)})


def _scores(sources: Iterable[GateSource]) -> dict[str, tuple[GateSource, int]]:
    """Return whose each score is, and its column, by its name: a probe that is read twice stands once."""
    readings: dict[str, Reading] = {}
    found: dict[str, tuple[GateSource, int]] = {}
    for source in sources:
        for score in source.columns.scores:
            if isinstance(score.reading, NamedProbe) and isinstance(readings.get(score.name), NamedProbe):
                continue
            name = _unused(score.name, found)
            readings[name], found[name] = score.reading, (source, score.column)
    return found


def _unused(name: str, names: Collection[str]) -> str:
    """Return the name in a trace of what a rule has: another one than any of `names`."""
    while name in names:
        name = f"{name} (rule)"
    return name
