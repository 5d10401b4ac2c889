"""Steering's families on the server's page ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headgate.capture.monitoring.metrics import EngineStats, Family, Sample, each_worker

_CORE = (
    ("slots", "Vectors that fit on the device at a time."),
    ("slots_reserved", "Slots that are taken: by global vectors, modules and requests."),
    ("configs", "Distinct sets of vectors that have slots."),
    ("requests_running", "Steered requests that have their slots."),
    ("requests_waiting", "Steered requests that wait for slots."),
    ("modules", "Named modules that are registered."),
    ("global_vectors", "Global vectors that are set, over both phases."),
)
_ROWS = (
    ("gate_rows", "gate", "Rows that gates of requests wrote, where a trace is wanted or rules act."),
    ("rule_rows", "rule", "Rows that rules wrote; of one that observes, on which it would have."),
)
_FIGURES = (
    (
        "rows",
        "Rows that an SAE of --sae-encode reconstructed, without those at position 0 and those ten times as long as "
        "usual. Tensor-parallel workers count the same rows.",
    ),
    ("error", "Sum of the squared errors of these reconstructions, without edits of features."),
    (
        "variance",
        "Sum of the squared distances of these rows to their mean. The fraction of variance unexplained is error by "
        "variance.",
    ),
)
_WORKERS = (
    ("slots_live", "Slots whose vectors act on requests now."),
    ("slots_used", "Slots in use, those that are kept for later included."),
)


class SteeringMetrics:
    """Implements `headgate.capture.monitoring.metrics.MetricsPart`."""

    core_method = "counts"

    def families(self, engines: Sequence[EngineStats]) -> Iterator[Family]:
        """Make the families of every engine core and every worker."""
        return families(engines)


def families(engines: Sequence[EngineStats]) -> Iterator[Family]:
    """Yield the families of every engine core and every worker."""
    cores = [((str(engine),), stats.core) for engine, stats in enumerate(engines) if stats.core is not None]
    for name, about in _CORE:
        found = tuple(Sample(labels=where, value=core[name]) for where, core in cores)
        yield Family(name=f"headgate_steering_{name}", kind="gauge", about=about, labels=("engine",), samples=found)
    for name, label, about in _ROWS:
        rows = tuple(
            Sample(labels=(*where, key), value=count) for where, core in cores for key, count in core[name].items()
        )
        labels = ("engine", label)
        yield Family(name=f"headgate_steering_{name}", kind="counter", about=about, labels=labels, samples=rows)
    yield from _of_controllers(cores)
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
    for name, about in _FIGURES:
        found = tuple(
            Sample(labels=(*where, sae), value=figures[name])
            for where, counted in workers
            for sae, figures in counted["reconstructions"].items()
        )
        yield Family(
            name=f"headgate_sae_reconstruction_{name}",
            kind="counter",
            about=about,
            labels=("engine", "worker", "sae"),
            samples=found,
        )


def _of_controllers(cores: Sequence[tuple[tuple[str], Mapping[str, Any]]]) -> Iterator[Family]:
    """Yield the families of controllers, of each engine core's counts."""
    found = [(where, name, reported) for where, core in cores for name, reported in core["controllers"].items()]
    actions = tuple(
        Sample(labels=(*where, name, outcome), value=count)
        for where, name, reported in found
        for outcome, count in reported["actions"].items()
    )
    yield Family(
        name="headgate_steering_actions",
        kind="counter",
        about="Actions of controllers: those submitted, and by outcome.",
        labels=("engine", "controller", "outcome"),
        samples=actions,
    )
    yield Family(
        name="headgate_steering_controller_seconds",
        kind="counter",
        about="Time that controllers took.",
        labels=("engine", "controller"),
        samples=tuple(Sample(labels=(*where, name), value=reported["seconds"]) for where, name, reported in found),
    )
