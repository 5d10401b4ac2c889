"""Readings of steps become the traces of requests, counts of the rows that gates and rules wrote, and latches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from headgate.steering.core.resolved import Resolved
from headgate.steering.core.rules.registry import RuleRegistry
from headgate.steering.core.rules.step_counts import CountedRequest, RowCounts, StepCounts
from headgate.steering.gates.conversations import ConversationLatches
from headgate.steering.gates.gate import FOLLOWING, Gate
from headgate.steering.gates.step_table import StepTable, ToldCounts
from headgate.steering.gates.trace import BEFORE, NEVER, GateSource, Note, TraceLog, TraceWriter
from headgate.steering.vectors.dtypes import Float32Rows


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
        self._told = [
            (ids[at], plan.scores, plan.gates, slice(end - 4 * size, end))
            for (at, _), plan, size, end in zip(writers, plans, sizes, ends, strict=True)
        ]
        self._before: StepTable | None = None
        """The last step."""

    def tells(self, step: StepTable) -> bool:
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
        self._before, self._next, told = step, firsts + 1, values.tobytes()
        return {
            req_id: {"first": first, "rows": 1, "scores": scores, "gates": gates, "values": told[part]}
            for (req_id, scores, gates, part), first in zip(self._told, firsts.tolist(), strict=True)
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

    def description(self, req_id: str) -> Sequence[Note]:
        """Return all pieces of the trace of a request that is described, in few."""
        log = self._logs.get(req_id)
        return () if log is None else log.notes

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
            discarded or self._decoded[0] is not known or not self._decoded[1].tells(step)
        ):
            self._decoded[1].leave()
            self._decoded = None
        if self._decoded is None and step.has_one_row_each and not discarded:
            found = [(at, writer) for at, one in enumerate(step.ids) if (writer := self._writers.get(one)) is not None]
            decoded = DecodedTraces(step.ids, found)
            self._decoded = (known, decoded) if decoded.tells(step) else None
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

    Attributes:
        traces: Traces of requests whose traces are wanted.
        beside: Returns, by the id of a request, what is read of its rows beside its gates and rules.
    """

    def __init__(self, rules: RuleRegistry, latches: ConversationLatches | None = None) -> None:
        self.traces = StepTraces()
        self.beside: Callable[[str], Sequence[GateSource]] = lambda _: ()
        self._counting = StepCounts(rules)
        self._rules = rules
        self._latches = latches
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

    def add(self, req_id: str, gates: Sequence[Gate], resolved: Resolved, num_prompt: int, *, is_traced: bool) -> bool:
        """Add a request; returns whether nothing is wanted of its gates but how many rows they write.

        Args:
            req_id: The request.
            gates: Its own.
            resolved: What they, and the rest of its steering, became.
            num_prompt: Tokens of its prompt.
            is_traced: Whether it wants its trace.
        """
        if not gates:
            self._counting.add(req_id, None)
            if is_traced:
                self.traces.add(req_id, GateSource.nothing(), num_prompt)
            return False
        own = CountedRequest(gates, resolved, num_prompt)
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
        """Let a prompt begin again under what acts now; see `ReadingCore.begin_again`."""
        self.settle()
        self._counting.begin_again(req_id)
        return self.traces.begin_again(req_id)

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known; one that ran is to be settled before."""
        self.traces.forget(req_id)
        self._latching.pop(req_id, None)
        self._counting.forget(req_id)

    def take_counts(self, counts: Iterable[ToldCounts]) -> None:
        """Take what workers have counted; see `StepCounts.take_counts`."""
        self._counting.take_counts(counts)

    def take(self, step: StepTable, discarded: Collection[str]) -> dict[str, Note]:
        """Return a piece of each request's trace, from what a step read; see `ReadingCore.take_readings`."""
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
