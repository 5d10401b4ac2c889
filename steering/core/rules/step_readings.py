"""Readings of steps become the traces of requests, and counts of the rows that gates and rules wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from headgate.steering.core.resolved import Resolved
from headgate.steering.core.rules.registry import KeptRule, RuleRegistry
from headgate.steering.core.rules.row_counts import ActingGates, DecodedRows, OwnGates, RowCounts, Written
from headgate.steering.core.rules.step_traces import StepTraces
from headgate.steering.gates.conversations import ConversationLatches
from headgate.steering.gates.gate import Gate
from headgate.steering.gates.layout import FOLLOWING
from headgate.steering.gates.step_table import StepRows, StepTable
from headgate.steering.gates.trace import GateSource, Note

_AT_ONCE = 7
"""Steps of generated rows that are counted together: one by one, each would find the processor's caches cold. Blocks
have a power of two of tokens, and a step in which requests need new ones is long enough."""


class StepReadings:
    """Follows requests through their steps' readings. Input thread adds requests, engine thread does everything else.

    Args:
        rules: Of the engine core.
        latches: Where gates of conversations are latched; None if there are none.

    Attributes:
        traces: Of requests whose traces are wanted.
        beside: Returns, by the id of a request, what is read of its rows beside its gates and rules.
    """

    def __init__(self, rules: RuleRegistry, latches: ConversationLatches | None = None) -> None:
        self.traces = StepTraces()
        self.beside: Callable[[str], Sequence[GateSource]] = lambda _: ()
        self._counts = RowCounts()
        self._uncounted: list[StepTable] = []
        """The last steps; whatever acts on their rows acts still."""
        self._rules = rules
        self._latches = latches
        self._own: dict[str, OwnGates] = {}
        """Of requests with gates of their own."""
        self._latching: dict[str, OwnGates] = {}
        """Those among them that go on in a conversation."""
        self._apart: dict[str, dict[bytes, Written]] = {}
        """By request and rule, of rules whose strength may act on the row behind."""
        self._since: dict[str, int] = {}
        """Positions from which the present rules act, of requests that met a change."""
        self._known = object()
        """Another one whenever a request is added or forgotten, on whatever thread, and whenever rules change."""
        self._decoded: tuple[object, DecodedRows] | None = None
        """`_known`, and whatever counts steps of generated rows, of the last step if that was one."""

    @property
    def counts(self) -> RowCounts:
        """Of rows, those of the last step included."""
        self.settle()
        return self._counts

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
        own = OwnGates(gates, resolved, num_prompt)
        if gates:
            self._own[req_id] = own
        if own.latches:
            self._latching[req_id] = own
        self._known = object()
        if is_traced:
            self.traces.add(req_id, own.source, num_prompt)

    def describe(self, req_id: str, num_prompt: int) -> None:
        """Keep the whole trace of a request that captures, whether or not it asks for it. Input thread."""
        own = self._own.get(req_id)
        self.traces.describe(req_id, None if own is None else own.source, num_prompt)

    def begin(self, req_id: str) -> None:
        """Let the present rules act on a request from its first row on."""
        if self.traces.is_followed(req_id):
            self.traces.change_rules(req_id, 0, self._sources(req_id))

    def settle(self) -> None:
        """Count the steps that were not counted yet; to be called before something acts no more, or acts anew."""
        steps, self._uncounted = self._uncounted, []
        for step in steps:
            self._count(step)

    def change_rules(self, firsts: Mapping[str, int]) -> None:
        """Let the present rules act on each request from a position on."""
        self._known = object()
        acting = {rule.source.key for rule in self._rules.all()}
        for known in self._apart.values():
            for key in known.keys() - acting:
                del known[key]
        for req_id, first in firsts.items():
            self._since[req_id] = first
            if self.traces.is_followed(req_id):
                self.traces.change_rules(req_id, first, self._sources(req_id))

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known; one that ran is to be settled before."""
        self.traces.forget(req_id)
        self._own.pop(req_id, None)
        self._latching.pop(req_id, None)
        self._known = object()
        self._apart.pop(req_id, None)
        self._since.pop(req_id, None)

    def take(self, step: StepTable, discarded: Collection[str]) -> dict[str, Note]:
        """Return a piece of each request's trace, from what a step read; see `ReadingCore.take_readings`."""
        if self._own or self._rules.all():
            self._uncounted.append(step)
            if not step.has_one_row_each or len(self._uncounted) == _AT_ONCE:
                self.settle()
            self._latch_own(step, discarded)
        return self.traces.take(step, discarded)

    def _count(self, step: StepTable) -> None:
        """Count what gates and rules wrote; a step of one row each costs little, since it comes for each token."""
        known = self._known
        if self._decoded is not None and not (self._decoded[0] is known and self._decoded[1].counts(step)):
            self._decoded[1].leave()
            self._decoded = None
        if self._decoded is None and step.has_one_row_each:
            decoded = DecodedRows(step.ids, [*self._acting(step.ids)], self._counts)
            self._decoded = (known, decoded) if decoded.counts(step) else None
        if self._decoded is not None:
            self._decoded[1].count(step.signals)
            return
        for rows in step.rows(self._own):
            if (own := self._own.get(rows.req_id)) is not None and len(rows.signals):
                self._counts.add_gates(own.source, own.written(rows))
        if self._rules.all():
            self._count_rules(step)

    def _acting(self, req_ids: Sequence[str]) -> Iterator[ActingGates]:
        """Yield the gates and rules of the rows of a step in which each request has one."""
        for at, req_id in enumerate(req_ids):
            if (own := self._own.get(req_id)) is not None:
                yield ActingGates(at, 0, own.num_prompt, own.source, own.apart)
            for rule in self._rules.acting(req_id):
                since, num_prompt = self._since.get(req_id, 0), self._rules.num_prompt(req_id)
                apart = self._written(rule, req_id) if rule.is_counted_apart else None
                yield ActingGates(at, since, num_prompt, rule.source, apart, rule)

    def _latch_own(self, step: StepTable, discarded: Collection[str]) -> None:
        """Remember what has latched by the last row of each request, or before, for those of conversations."""
        if self._latches is None or not self._latching:
            return
        for rows in step.rows(self._latching):
            if rows.req_id not in discarded and len(rows.signals):
                last, columns = rows.signals[-1], self._latching[rows.req_id].latches
                strengths = {key: float(last[column + FOLLOWING]) for key, column in columns.items()}
                self._latches.latch({key: value for key, value in strengths.items() if math.isfinite(value)})

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
            self._counts.add_rules([rule for rule in rules if not rule.is_counted_apart], rows)
            for rule in (rule for rule in rules if rule.is_counted_apart):
                for at in members:
                    told = StepRows(ids[at], int(firsts[at]), signals[ends[at] - int(counts[at]) : ends[at]])
                    self._counts.rules[rule.name] += sum(self._written(rule, told.req_id).count(told))

    def _written(self, rule: KeptRule, req_id: str) -> Written:
        """Return what counts the rows of a request that a rule wrote whose strength may act on the row behind."""
        known = self._apart.setdefault(req_id, {})
        if (written := known.get(rule.source.key)) is None:
            written = known[rule.source.key] = Written(rule.source, self._rules.num_prompt(req_id))
        return written

    def _sources(self, req_id: str) -> list[GateSource]:
        return [*(rule.source for rule in self._rules.acting(req_id)), *self.beside(req_id)]
