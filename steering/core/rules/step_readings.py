"""Readings of steps become the traces of requests, counts of the rows that gates and rules wrote, and latches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from headgate.steering.core.resolved import Resolved
from headgate.steering.core.rules.registry import RuleRegistry
from headgate.steering.core.rules.row_counts import OwnGates, RowCounts
from headgate.steering.core.rules.step_counts import StepCounts
from headgate.steering.core.rules.step_traces import StepTraces
from headgate.steering.gates.conversations import ConversationLatches
from headgate.steering.gates.gate import Gate
from headgate.steering.gates.layout import FOLLOWING
from headgate.steering.gates.step_table import StepTable, ToldCounts
from headgate.steering.gates.trace import GateSource, Note


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
        self._counting = StepCounts(rules)
        self._rules = rules
        self._latches = latches
        self._latching: dict[str, OwnGates] = {}
        """Requests with gates that go on in a conversation."""

    @property
    def counts(self) -> RowCounts:
        """Of rows, those of the last step included."""
        return self._counting.counts

    @property
    def awaits_counts(self) -> bool:
        """Whether workers may have counted rows that they did not tell."""
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
        own = OwnGates(gates, resolved, num_prompt)
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
