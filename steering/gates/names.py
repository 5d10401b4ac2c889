"""The registered names that gates refer to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headgate.steering.gates.gate import FeatureReading, Gate, NamedProbe, Reading
from headgate.steering.programs.feature_edits import sae_key
from headgate.steering.programs.operations import ModuleVector, named_modules


def probe_key(name: str) -> str:
    """Return the key of a probe among the registered names of an engine core, which no module and no SAE can have."""
    return f"probe\n{name}"


def names_of(gates: Iterable[Gate]) -> dict[str, str]:
    """Return the modules, and the keys of SAEs and probes, that gates name, each with the path that names it first."""
    found: dict[str, str] = {}
    for gate in gates:
        for key, where in _names(gate):
            found.setdefault(key, where)
    return found


def _names(gate: Gate) -> Iterator[tuple[str, str]]:
    for leaf in gate.leaves:
        yield from _read(leaf.reading)
    yield from named_modules(gate.then.operations).items()
    for edit in gate.then.features:
        yield sae_key(edit.sae), edit.sae_at
    if gate.then.module is not None:
        yield gate.then.module.name, gate.then.module.where


def _read(reading: Reading) -> Iterator[tuple[str, str]]:
    if isinstance(reading, NamedProbe):
        yield probe_key(reading.name), reading.where
    elif isinstance(reading, FeatureReading):
        yield sae_key(reading.sae), f"{reading.where}.sae"
    elif isinstance(reading.weight, ModuleVector):
        yield reading.weight.module, f"{reading.where}.{'cosine' if reading.is_cosine else 'weight'}"
