"""Ends an answer that stays on a forbidden subject."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headgate.steering.controllers import Action, Controller, Probe, RequestView, StepReadings, Stop, load_probe


class RefusalController(Controller):
    """Stops a request when so many generated rows in a row score above a threshold.

    Args:
        probe: Path of the file of the subject's probe.
        threshold: Of the score; the probe's own if None.
        patience: Rows in a row.
        reason: The client's ``stop_reason``.
    """

    def __init__(
        self, *, probe: str, threshold: float | None = None, patience: int = 3, reason: str = "forbidden subject"
    ) -> None:
        self._probe = load_probe(probe)
        found = self._probe.threshold if threshold is None else threshold
        if found is None or patience < 1:
            raise ValueError("threshold: the probe has none of its own, give one; patience: at least 1")
        self._threshold, self._patience, self._reason = found, patience, reason
        self._in_a_row: dict[str, int] = {}

    def probes(self) -> Mapping[str, Probe]:
        return {"subject": self._probe}

    def request_begins(self, request: RequestView) -> None:
        self._in_a_row[request.request] = 0

    def request_ends(self, request: RequestView) -> None:
        del self._in_a_row[request.request]

    def step(self, readings: StepReadings) -> Iterator[Action]:
        for row in readings.last_rows():
            if row.phase == "prefill":
                continue
            is_above = row.scores["subject"] > self._threshold
            self._in_a_row[row.request] = self._in_a_row[row.request] + 1 if is_above else 0
            if self._in_a_row[row.request] == self._patience:
                yield Stop(row.request, self._reason)
