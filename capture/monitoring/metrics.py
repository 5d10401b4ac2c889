"""Data of headgate's section of ``/metrics``: families of samples, and the statistics that parts make them from.

The hook ``headgate_metrics`` of a part returns its `MetricsPart`. It is called in API servers alone; counters live in
the workers and engine cores, and are fetched when the page is asked for. Nothing is counted twice, however many API
servers share an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One value.

    Attributes:
        labels: Values of `Family.labels`, in their order.
        value: The value; of a histogram, the sum of what was observed.
        counts: Of a histogram: observations up to each of `Family.bounds`, each by itself, and those above the last.
    """

    labels: tuple[str, ...]
    value: float
    counts: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Samples of one name.

    Attributes:
        name: Without the ``_total`` of counters.
        kind: Counters only ever grow while the process lives.
        about: A sentence, with the unit.
        labels: Names.
        samples: Each with other labels.
        bounds: Of a histogram, in seconds, ascending.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: tuple[str, ...]
    samples: tuple[Sample, ...]
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """One engine core, as far as one part is concerned.

    Attributes:
        workers: What each of its workers counts, None for one that does not take part.
        core: What the part's half in the engine core answers, if it was asked.
    """

    workers: Sequence[Mapping[str, Any] | None]
    core: Mapping[str, Any] | None = None


class MetricsPart(Protocol):
    """One part of headgate on the page.

    Attributes:
        core_method: Method of the part in the engine core whose answer is fetched; None if there is none.
    """

    @property
    def core_method(self) -> str | None: ...

    def families(self, engines: Sequence[EngineStats]) -> Iterable[Family]:
        """Make the part's families from what was fetched of each engine core."""
        ...


def each_worker(engines: Sequence[EngineStats]) -> Iterable[tuple[tuple[str, str], Mapping[str, Any]]]:
    """``((engine, worker), what it counts)`` of every worker that takes part; both are counted from 0."""
    for engine, stats in enumerate(engines):
        for worker, counted in enumerate(stats.workers):
            if counted is not None:
                yield (str(engine), str(worker)), counted
