"""Traces of requests, from the readings of their steps: for requests that ask, and to describe what is captured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headgate.steering.core.rules.decoded_traces import DecodedTraces
from headgate.steering.gates.step_table import StepTable
from headgate.steering.gates.trace import GateSource, Note, TraceLog, TraceWriter


class StepTraces:
    """Follows requests whose traces are wanted. Input thread adds requests, engine thread does everything else."""

    def __init__(self) -> None:
        self._writers: dict[str, TraceWriter] = {}
        self._logs: dict[str, TraceLog] = {}
        """Of requests that capture."""
        self._known = object()
        """Another one whenever something else acts on a request, or another one is followed, on whatever thread."""
        self._decoded: tuple[object, DecodedTraces] | None = None
        """`_known`, and whatever tells of steps of generated rows, of the last step if that was one."""

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
        """Let a trace begin again, as the prompt does; return the piece that says so, None if no row was told."""
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
