"""Readings of steps become the traces of requests, and counts of the rows that gates and rules wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from headgate.steering.core.rules.registry import KeptRule, RuleRegistry
from headgate.steering.gates.gate import Gate
from headgate.steering.gates.layout import Layout, layout_of
from headgate.steering.gates.trace import Note, StepRows, TraceWriter, rows_of
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

    def add_gates(self, layout: Layout, rows: StepRows) -> None:
        """Count rows of a request with gates of its own."""
        for column in layout.gates:
            name = column.gate.name
            known = name if name in self.gates or len(self.gates) < MAX_NAMES else OTHERS
            self.gates[known] += int(np.count_nonzero(rows.signals[:, column.column]))

    def add_rules(self, rules: Sequence[KeptRule], signals: Float32Rows) -> None:
        """Count rows on all of which the same rules act: float32 ``[rows, columns]``."""
        strengths = np.nan_to_num(signals[:, [rule.counted_column for rule in rules]])
        for rule, count in zip(rules, np.count_nonzero(strengths, axis=0).tolist(), strict=True):
            self.rules[rule.name] += count


class StepReadings:
    """Follows requests through their steps' readings. Input thread adds requests, engine thread does everything else.

    Args:
        rules: Of the engine core.

    Attributes:
        counts: Of rows.
    """

    def __init__(self, rules: RuleRegistry) -> None:
        self.counts = RowCounts()
        self._rules = rules
        self._writers: dict[str, TraceWriter] = {}
        self._own: dict[str, Layout] = {}
        """Of requests with gates of their own."""
        self._since: dict[str, int] = {}
        """Positions from which the present rules act, of requests that met a change."""

    @property
    def num_gated(self) -> int:
        """Requests with gates of their own."""
        return len(self._own)

    def add(self, req_id: str, gates: Sequence[Gate], *, is_traced: bool) -> None:
        """Add a request."""
        own = layout_of(gates)
        if gates:
            self._own[req_id] = own
        if is_traced:
            self._writers[req_id] = TraceWriter(own)

    def begin(self, req_id: str) -> None:
        """Let the present rules act on a request from its first row on."""
        if (writer := self._writers.get(req_id)) is not None:
            writer.change_rules(0, self._layouts(req_id))

    def change_rules(self, firsts: Mapping[str, int]) -> None:
        """Let the present rules act on each request from a position on."""
        for req_id, first in firsts.items():
            self._since[req_id] = first
            if (writer := self._writers.get(req_id)) is not None:
                writer.change_rules(first, self._layouts(req_id))

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        self._writers.pop(req_id, None)
        self._own.pop(req_id, None)
        self._since.pop(req_id, None)

    def take(self, readings: Mapping[str, Any], discarded: Collection[str]) -> dict[str, Note]:
        """Return a piece of each request's trace, from what a step read; see `ReadingCore.take_readings`."""
        found: dict[str, Note] = {}
        if self._rules.all():
            self._count_rules(readings)
        for rows in rows_of(readings) if self._writers or self._own else ():
            if (own := self._own.get(rows.req_id)) is not None:
                self.counts.add_gates(own, rows)
            writer = None if rows.req_id in discarded else self._writers.get(rows.req_id)
            if writer is not None and (note := writer.note(rows.first, rows.signals)) is not None:
                found[rows.req_id] = note
        return found

    def _count_rules(self, readings: Mapping[str, Any]) -> None:
        """Count the rows of a step; steps that were launched before a change are passed over."""
        ids: list[str] = readings["ids"]
        firsts, counts = (np.frombuffer(readings[name], np.int64) for name in ("firsts", "counts"))
        signals = np.frombuffer(readings["values"], np.float32).reshape(-1, readings["columns"])
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
            self.counts.add_rules(rules, rows)

    def _layouts(self, req_id: str) -> list[Layout]:
        return [rule.layout for rule in self._rules.acting(req_id)]
