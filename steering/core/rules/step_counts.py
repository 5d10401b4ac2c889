"""Counts of the rows that gates and rules wrote, step by step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from headgate.steering.core.rules.registry import KeptRule, RuleRegistry
from headgate.steering.core.rules.row_counts import (
    ActingGates,
    CountedGates,
    DecodedRows,
    OwnGates,
    RowCounts,
    Written,
)
from headgate.steering.gates.step_table import StepRows, StepTable, ToldCounts

MAX_ENDED = 4096
"""Requests that ended whose counts may still come; those that never ran, or were told row by row, are among them."""
_AT_ONCE = 7
"""Steps of generated rows that are counted together: one by one, each would find the processor's caches cold. Blocks
have a power of two of tokens, and a step in which requests need new ones is long enough."""


class StepCounts:
    """Counts rows from what steps read. Input thread adds requests, engine thread does everything else.

    Args:
        rules: Of the engine core.
    """

    def __init__(self, rules: RuleRegistry) -> None:
        self._counts = RowCounts()
        self._uncounted: list[StepTable] = []
        """The last steps; whatever acts on their rows acts still."""
        self._rules = rules
        self._own: dict[str, OwnGates] = {}
        """Of requests with gates of their own."""
        self._ended: OrderedDict[str, CountedGates] = OrderedDict()
        """Of the last ones that ended, since what workers have counted of them comes later."""
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
    def awaits_counts(self) -> bool:
        """Whether workers may have counted rows that they did not tell."""
        return bool(self._own or self._ended)

    @property
    def num_gated(self) -> int:
        """Requests with gates of their own."""
        return len(self._own)

    def own(self, req_id: str) -> OwnGates | None:
        """Return the gates of a request's own; None if it has none."""
        return self._own.get(req_id)

    def add(self, req_id: str, own: OwnGates | None) -> None:
        """Add a request, with or without gates of its own. Input thread."""
        if own is not None:
            self._own[req_id] = own
        self._known = object()

    def take_counts(self, counts: Iterable[ToldCounts]) -> None:
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
        acting = {rule.source.key for rule in self._rules.all()}
        for known in self._apart.values():
            for key in known.keys() - acting:
                del known[key]
        self._since.update(firsts)

    def begin_again(self, req_id: str) -> None:
        """Let the present rules act on a request from its first row on."""
        if self._since.pop(req_id, None) is not None:
            self._known = object()

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known; one that ran is to be settled before."""
        own = self._own.pop(req_id, None)
        if own is not None and own.is_countable:
            self._ended[req_id] = own.counted
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        self._known = object()
        self._apart.pop(req_id, None)
        self._since.pop(req_id, None)

    def take(self, step: StepTable) -> None:
        """Take a step in, to count it soon."""
        if self._own or self._rules.all():
            self._uncounted.append(step)
            if not step.has_one_row_each or len(self._uncounted) == _AT_ONCE:
                self.settle()

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
                self._counts.add_gates(own.counted.names, own.written(rows))
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

    def _count_rules(self, step: StepTable) -> None:
        """Count the rows of a step; those computed again from before a change are passed over, one by one."""
        groups: dict[int, tuple[tuple[KeptRule, ...], list[StepRows]]] = {}
        end = 0
        for req_id, first, count in zip(step.ids, step.firsts.tolist(), step.counts.tolist(), strict=True):
            end += count
            rules, since = self._rules.acting(req_id), max(self._since.get(req_id, 0), first)
            if rules and since < first + count:
                told = StepRows(req_id, since, step.signals[end - (first + count - since) : end])
                groups.setdefault(id(rules), (rules, []))[1].append(told)
        for rules, members in groups.values():
            are_all = sum(len(told.signals) for told in members) == len(step.signals)
            rows = step.signals if are_all else np.concatenate([told.signals for told in members])
            self._counts.add_rules([rule for rule in rules if not rule.is_counted_apart], rows)
            for rule in (rule for rule in rules if rule.is_counted_apart):
                for told in members:
                    self._counts.rules[rule.name] += sum(self._written(rule, told.req_id).count(told))

    def _written(self, rule: KeptRule, req_id: str) -> Written:
        """Return what counts the rows of a request that a rule wrote whose strength may act on the row behind."""
        known = self._apart.setdefault(req_id, {})
        if (written := known.get(rule.source.key)) is None:
            written = known[rule.source.key] = Written(rule.source, self._rules.num_prompt(req_id))
        return written
