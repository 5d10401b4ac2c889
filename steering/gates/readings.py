"""Readings become entries: how the score of a row is computed. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headgate.capture.probes.probe import Probe, ProbeKind
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.gates.gate import FeatureReading, InlineProbe, ModuleThen, NamedProbe, Reading
from headgate.steering.programs.codes import Code
from headgate.steering.programs.feature_edits import FeatureEdit
from headgate.steering.programs.feature_lowering import reading_entry
from headgate.steering.programs.gate_codes import ScoreKind
from headgate.steering.programs.lowering import split_row
from headgate.steering.programs.operations import Float32Row, Lookup, ModuleVector
from headgate.steering.programs.program import Entry, Program
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors


class Content(Protocol):
    """The content that names in gates stand for, in an engine core.

    Attributes:
        hidden_size: Width of the stream.
        op_sites: Declared sites, in the order of the forward pass.
    """

    @property
    def hidden_size(self) -> int: ...

    @property
    def op_sites(self) -> Sequence[Site]: ...

    def probe(self, reading: NamedProbe) -> Probe:
        """Return a registered probe.

        Raises:
            RequestError: If there is none of that name.
        """
        ...

    def coder(self, reading: FeatureReading) -> tuple[SparseCoder, Site]:
        """Return a registered SAE, and where it reads.

        Raises:
            RequestError: If there is none of that name, or it cannot tell the activation of that feature.
        """
        ...

    def vectors(self, phase: int) -> Lookup:
        """Return the lookup of modules' vectors in a phase: 0 is prefill, 1 decode."""
        ...

    def module(self, then: ModuleThen, phase: int) -> tuple[PhaseVectors | None, Program | None]:
        """Return a module's vectors and operations in a phase.

        Raises:
            RequestError: If there is none of that name.
        """
        ...

    def features(self, edits: Sequence[FeatureEdit]) -> Program | None:
        """Return the program of edits of features.

        Raises:
            RequestError: If an SAE or a feature is not there.
        """
        ...


class Score(NamedTuple):
    """A reading in terms of content.

    Attributes:
        entry: Its entry, without the column.
        threshold: The probe's own; None if it has none.
    """

    entry: Entry
    threshold: float | None


def read_score(reading: Reading, content: Content, dtype: StoredType) -> Score:
    """Return the entry of a reading.

    Args:
        reading: Of a gate.
        content: Gives probes, modules and SAEs by name.
        dtype: The model's. Where it is narrower than float32, a weight is stored as two rows: the rounded one, and
            what rounding took from it.

    Raises:
        RequestError: Naming the field of the gate, if the reading cannot be made here.
    """
    if isinstance(reading, NamedProbe):
        probe = content.probe(reading)
        _check_probe(probe, reading)
        is_cosine = probe.kind is ProbeKind.COSINE
        _check_site(probe.site, content.op_sites, reading.where)
        return Score(_score(probe.site, probe.weight[0], float(probe.biases[0]), is_cosine, dtype), probe.threshold)
    if isinstance(reading, InlineProbe):
        _check_site(reading.site, content.op_sites, reading.where)
        weight = _weight(reading, content)
        return Score(_score(reading.site, weight, reading.bias, reading.is_cosine, dtype), None)
    coder, site = content.coder(reading)
    _check_site(site, content.op_sites, reading.where)
    entry = reading_entry(coder, site, reading.feature, dtype)
    return Score(entry._replace(code=Code.SCORE | ScoreKind.ACTIVATION | entry.code), None)


def _check_probe(probe: Probe, reading: NamedProbe) -> None:
    if len(probe.classes) > 1:
        raise RequestError(
            reading.where,
            f"probe {reading.name!r} has {len(probe.classes)} classes; a gate reads probes of one class",
        )


def _check_site(site: Site, op_sites: Sequence[Site], where: str) -> None:
    if site not in op_sites:
        declared = ", ".join(each.name for each in op_sites) or "none"
        raise RequestError(
            where,
            f"no gate can read at {site.name}; declared sites: {declared}; the operator declares them with "
            "--steering-op-sites, or by --probes NAME=PATH",
        )


def _weight(reading: InlineProbe, content: Content) -> Float32Row:
    weight = reading.weight
    if not isinstance(weight, ModuleVector):
        return weight
    for phase in (0, 1):
        found = content.vectors(phase)(weight.module, weight.site)
        if found is not None:
            return found
    raise RequestError(reading.where, f"module {weight.module!r} has no vector at {weight.site.name}")


def _score(site: Site, weight: Float32Row, bias: float, is_cosine: bool, dtype: StoredType) -> Entry:
    whole, rest = split_row(weight, dtype)
    scale = 1 / float(np.linalg.norm(weight.astype(np.float64))) if is_cosine else 1.0
    code = Code.SCORE | (ScoreKind.COSINE if is_cosine else ScoreKind.LINEAR)
    lower = None if rest is None else rest.row
    params = (scale * whole.factor, 0.0 if rest is None else scale * rest.factor, bias)
    return Entry(site, code, whole.row, lower, params)
