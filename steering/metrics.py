"""Steering's counters on ``/metrics``: entry point of the group ``headgate.metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headgate.capture.metrics import EngineStats, Family, MetricsPart, Sample, each_worker

_CORE: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("slots", "Vectors that fit on the device at a time.", lambda core: core["slots"]["capacity"]),
    (
        "slots_reserved",
        "Slots that are taken: by global vectors, modules and requests.",
        lambda core: core["slots"]["reserved"],
    ),
    ("configs", "Distinct sets of vectors that have slots.", lambda core: core["configs"]),
    ("requests_running", "Steered requests that have their slots.", lambda core: core["running"]),
    ("requests_waiting", "Steered requests that wait for slots.", lambda core: core["waiting"]),
    ("modules", "Named modules that are registered.", lambda core: len(core["modules"])),
    (
        "global_vectors",
        "Global vectors that are set, over both phases.",
        lambda core: sum(map(len, core["global"]["sites"].values())),
    ),
)
_WORKERS = (
    ("slots_live", "Distinct vectors that act on requests now."),
    ("slots_used", "Slots in use, those that are kept for later included."),
)


def open_metrics() -> MetricsPart:
    """Steering's part of the page."""
    return MetricsPart(families=families, core_method="status")


def families(engines: Sequence[EngineStats]) -> Iterator[Family]:
    """What every engine core and every worker holds."""
    cores = [((str(engine),), stats.core) for engine, stats in enumerate(engines) if stats.core is not None]
    for name, about, read in _CORE:
        found = tuple(Sample(labels=where, value=read(core)) for where, core in cores)
        yield Family(name=f"headgate_steering_{name}", kind="gauge", about=about, labels=("engine",), samples=found)
    workers = list(each_worker(engines))
    for name, about in _WORKERS:
        found = tuple(Sample(labels=where, value=counted[name]) for where, counted in workers)
        yield Family(
            name=f"headgate_steering_worker_{name}",
            kind="gauge",
            about=about,
            labels=("engine", "worker"),
            samples=found,
        )
