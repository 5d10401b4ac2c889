"""Slots, content keys and limits of a spec without names, and its description for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.core.admission import Demand, Load
from headgate.steering.programs.codes import CODE, CODE_MASK, SCORE_KIND_MASK, Code, ScoreKind, is_of_feature
from headgate.steering.programs.feature_edits import too_many_changes
from headgate.steering.programs.program import Program
from headgate.steering.spec import SteeringSpec, content_key_of
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import LIMIT, sum_key


def demand_of(spec: SteeringSpec) -> Demand:
    """Return the slots that a spec without names needs by itself."""
    prefill, decode = (
        load_of(vectors, [], [] if program is None else [(program, 1.0)]) for vectors, program in spec.phases
    )
    return Demand(prefill, decode)


def described(spec: SteeringSpec) -> dict[str, object]:
    """Return content keys (``hash``), sites and norms of both phases, plain values.

    With ``op_sites`` where there are programs.
    """
    demand = demand_of(spec)
    loads = {"prefill": demand.prefill, "decode": demand.decode}
    about: dict[str, object] = {
        "hash": {phase: load.key.hex() if load else None for phase, load in loads.items()},
        "sites": {"prefill": _sites(spec.prefill), "decode": _sites(spec.decode)},
        "norms": {"prefill": _norms(spec.prefill), "decode": _norms(spec.decode)},
    }
    if spec.prefill_program or spec.decode_program:
        programs = {"prefill": spec.prefill_program, "decode": spec.decode_program}
        about["op_sites"] = {phase: _op_sites(program) for phase, program in programs.items()}
    return about


def load_of(
    own: PhaseVectors | None, named: Sequence[tuple[PhaseVectors, float]], programs: Sequence[tuple[Program, float]]
) -> Load | None:
    """Return the load of a request's own vectors and modules, and of programs."""
    parts = [*named, (own, 1.0)] if own else named
    vectors = sum_key((vectors.key, scale) for vectors, scale in parts)
    key = content_key_of(vectors, ((program.key, scale) for program, scale in programs))
    if key is None:
        return None
    num_rows = sum(program.num_rows for program, _ in programs)
    return Load(key, len({site for vectors, _ in parts for site in vectors.sites}) + num_rows)


def _sites(vectors: PhaseVectors | None) -> list[str]:
    return [site.name for site in vectors.sites] if vectors else []


def _norms(vectors: PhaseVectors | None) -> dict[str, float]:
    if not vectors:
        return {}
    found = np.linalg.norm(vectors.float32().astype(np.float64), axis=1)  # squares of large values leave float32
    return dict(zip(_sites(vectors), found.tolist(), strict=True))


def _op_sites(program: Program | None) -> list[str]:
    return list(dict.fromkeys(site.name for site in program.sites)) if program else []


def check_limit(largest: float, dtype: StoredType, field: str) -> None:
    """Check that sums whose largest value can be `largest` stay below `LIMIT` for the model's element type.

    Raises:
        RequestError: Names `field`.
    """
    if not largest < LIMIT[dtype]:
        raise RequestError(
            field,
            f"the vectors times their scales reach {largest:.4g}; sums for a model in {dtype} must stay below "
            f"{LIMIT[dtype]:.4g}: use smaller vectors or scales",
        )


class Limits(NamedTuple):
    """Entries that programs of one phase may have at one site, a request's and its modules' together.

    Attributes:
        entries: Entries of operations.
        features: Features of SAEs.
        units: Entries of MLP probes that are read.
    """

    entries: int
    features: int
    units: int = 0


NO_ENTRIES = Limits(0, 0)


def check_shared(programs: Sequence[Program], limits: Limits, who: str, field: str) -> None:
    """Check the programs of a module or of the global state, in one phase.

    Raises:
        RequestError: Names `field`.
    """
    if any(program.groups for program in programs):
        raise RequestError(field, f"{who} limits an operation to positions; only requests can do that")
    check_programs(programs, limits, field, f"in {who}")


def check_phases(phases: Sequence[Sequence[Program]], limits: Limits, field: str) -> None:
    """Check the programs of each phase with `check_programs`; phases that have the same ones are checked once.

    Raises:
        RequestError: Names `field`.
    """
    checked: list[list[int]] = []
    for programs in phases:
        if programs and (listed := [id(program) for program in programs]) not in checked:
            check_programs(programs, limits, field)
            checked.append(listed)


_FIRST_OF_GATES, _RECONSTRUCT = int(Code.SCORE), int(Code.RECONSTRUCT)
_UNIT, _UNIT_MASK = Code.SCORE | ScoreKind.UNIT, CODE_MASK | SCORE_KIND_MASK
"""Python compares members of an enumeration several times as slowly as numbers."""


def check_programs(
    programs: Sequence[Program], limits: Limits, field: str, where: str = "with those of the modules"
) -> None:
    """Check that programs that act together fit, and do not change one feature or reconstruct one row twice.

    Args:
        programs: Programs of one phase.
        limits: Limits of their entries at one site.
        field: For errors.
        where: Where they come from, for errors.

    Raises:
        RequestError: Names `field`.
    """
    entries: dict[Site, int] = defaultdict(int)
    features: dict[Site, int] = defaultdict(int)
    units: dict[Site, int] = defaultdict(int)
    reconstructed: set[Site] = set()
    num_changes = 0
    for program in programs:
        if max(program.kinds) < Code.RECONSTRUCT:
            for site, count in program.runs:
                entries[site] += count
            continue
        num_changes += program.num_changes
        for site, code in zip(program.sites, program.codes[:, CODE].tolist(), strict=True):
            kind = code & CODE_MASK
            if kind >= _FIRST_OF_GATES:  # the columns of gates limit these
                if code & _UNIT_MASK == _UNIT:
                    units[site] += 1
            elif kind == _RECONSTRUCT:
                if site in reconstructed:
                    raise RequestError(field, f"{where}, rows are reconstructed twice at {site.name}")
                reconstructed.add(site)
            elif is_of_feature(code):
                features[site] += 1
            else:
                entries[site] += 1
    _check_written([program for program in programs if program.changes_features], field, where)
    _check_changes(num_changes, limits.features, field, where)
    _check_counts(entries, features, units, limits, field, where)


def _check_written(changing: Sequence[Program], field: str, where: str) -> None:
    """Refuse a feature that programs change twice at a site."""
    # One program has each row once, so that the row's number stands for its bytes.
    written = [program.written_rows if len(changing) == 1 else program.written_features for program in changing]
    seen: set[tuple[Site, int | bytes]] = set()
    for site, row in (found for features in written for found in features.values()):
        if (site, row) in seen:
            raise RequestError(field, f"{where}, a feature of an SAE is changed twice at {site.name}")
        seen.add((site, row))


def _check_counts(
    entries: Mapping[Site, int],
    features: Mapping[Site, int],
    units: Mapping[Site, int],
    limits: Limits,
    field: str,
    where: str,
) -> None:
    for what, limit, counts, flag in (
        ("operations", limits.entries, entries, "--max-steering-ops-per-site"),
        ("features", limits.features, features, "--max-sae-features"),
        ("MLP probes", limits.units, units, "--max-probe-units"),
    ):
        crowded = next((site for site, count in counts.items() if count > limit), None)
        if crowded is not None:
            raise RequestError(
                field,
                f"{where}, the {what} at {crowded.name} make {counts[crowded]} entries, at most {limit} fit; the "
                f"operator sets {flag}",
            )


def _check_changes(num_changes: int, limit: int, field: str, where: str) -> None:
    if num_changes > limit:
        raise RequestError(
            field,
            f"{where}, {num_changes} features of transcoders are changed; {too_many_changes(limit)}",
        )
