"""Readings become entries: how the score of a row is computed. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headgate.capture.probes.probe import Activation, Probe, ProbeKind
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.gates.gate import FeatureReading, Gate, InlineProbe, ModuleThen, NamedProbe, Reading
from headgate.steering.programs.codes import Code, with_change
from headgate.steering.programs.feature_edits import FeatureEdit
from headgate.steering.programs.feature_lowering import reading_entry
from headgate.steering.programs.gate_codes import ScoreKind, UnitFunction
from headgate.steering.programs.operations import Float32Row, Lookup, ModuleVector
from headgate.steering.programs.program import Entry, Program
from headgate.steering.programs.stored_vectors import StoredVector, StoredVectors, store
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
            RequestError: If there is none of that name, or one row does not decide the activation of that feature.
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
        entries: Its entries, without the column: one, or of an MLP those of its units and the one that sums them up.
        threshold: The probe's own; None if it has none.
    """

    entries: tuple[Entry, ...]
    threshold: float | None

    @property
    def site(self) -> Site:
        """The site that is read."""
        return self.entries[-1].site

    def at(self, column: int) -> list[Entry]:
        """Return the entries, which write a column."""
        return [entry._replace(code=with_change(entry.code, column)) for entry in self.entries]


def read_score(reading: Reading, content: Content, vectors: StoredVectors) -> Score:
    """Return the entries of a reading.

    Args:
        reading: Reading of a gate.
        content: Gives probes, modules and SAEs by name.
        vectors: With `weights_of` the gates. Where the model's dtype is narrower than float32, a weight is stored as
            two rows: the rounded one, and what rounding took from it.

    Raises:
        RequestError: Naming the field of the gate, if the reading cannot be made here.
    """
    if isinstance(reading, NamedProbe):
        probe = content.probe(reading)
        _check_probe(probe, reading)
        check_site(probe.site, content.op_sites, reading.where)
        return Score(probe_entries(probe, vectors.dtype), probe.threshold)
    if isinstance(reading, InlineProbe):
        check_site(reading.site, content.op_sites, reading.where)
        weight = vectors.of(_weight(reading, content))
        return Score((_score(reading.site, weight, reading.bias, reading.is_cosine),), None)
    coder, site = content.coder(reading)
    check_site(site, content.op_sites, reading.where)
    try:
        entry = reading_entry(coder, site, reading.feature, vectors.dtype)
    except (FeatureFileError, OSError) as error:
        raise RequestError(reading.where, f"the SAE cannot be read: {error}") from error
    return Score((entry._replace(code=Code.SCORE | ScoreKind.ACTIVATION | entry.code),), None)


def weights_of(gates: Iterable[Gate]) -> list[Float32Row]:
    """Return the weights of probes that gates bring; those of modules are left out."""
    readings = [leaf.reading for gate in gates for leaf in gate.leaves]
    weights = [reading.weight for reading in readings if isinstance(reading, InlineProbe)]
    return [weight for weight in weights if not isinstance(weight, ModuleVector)]


def probe_entries(probe: Probe, dtype: StoredType) -> tuple[Entry, ...]:
    """Return the entries of a probe of one class, without the column."""
    bias = float(probe.biases[0])
    if probe.hidden is None:
        (weight,) = store([probe.weight[0]], dtype)
        return (_score(probe.site, weight, bias, probe.kind is ProbeKind.COSINE),)
    unit = Code.SCORE | ScoreKind.UNIT | _UNITS[probe.hidden.activation]
    entries = []
    for row, shift, factor in zip(
        probe.hidden.weight, probe.hidden.bias.tolist(), probe.weight[0].tolist(), strict=True
    ):
        if factor and row.any():
            (stored,) = store([row], dtype)
            read = _score(probe.site, stored, shift, False)
            entries.append(read._replace(code=unit, params=(*read.params, factor)))
        elif factor:  # Its value is the same for all rows.
            bias += factor * float(probe.hidden.activation.apply(np.array([shift]))[0])
    total = Entry(probe.site, Code.SCORE | ScoreKind.UNIT | UnitFunction.SUM, None, None, (0.0, 0.0, bias))
    return (*entries, total)


_UNITS = {Activation.RELU: UnitFunction.RELU, Activation.GELU: UnitFunction.GELU, Activation.SILU: UnitFunction.SILU}


def _check_probe(probe: Probe, reading: NamedProbe) -> None:
    if len(probe.classes) > 1:
        raise RequestError(
            reading.where,
            f"probe {reading.name!r} has {len(probe.classes)} classes; a gate reads probes of one class",
        )


def check_site(site: Site, op_sites: Sequence[Site], where: str) -> None:
    """Refuse a site where no gate can read.

    Raises:
        RequestError: Naming `where`.
    """
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


def _score(site: Site, weight: StoredVector, bias: float, is_cosine: bool) -> Entry:
    rest = weight.rest()
    scale = 1 / float(np.linalg.norm(weight.values)) if is_cosine else 1.0
    code = Code.SCORE | (ScoreKind.COSINE if is_cosine else ScoreKind.LINEAR)
    lower = None if rest is None else rest.stored
    params = (scale * weight.factor, 0.0 if rest is None else scale * rest.factor, bias)
    return Entry(site, code, weight.stored, lower, params)
