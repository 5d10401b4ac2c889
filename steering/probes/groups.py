"""Directions between groups of captured rows that have names, such as ``pos_3 - default_1``: for roles and traits.

A role is played by some requests and not by others, a trait shown or not; each such group is a tag of a root of
captures, or an entry of a dictionary. The direction of ``A - B`` leads from the mean of B to the mean of A, at every
site, and how well it separates them is measured on requests that it was not made from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.engine.contracts.parts import stored_requests
from headgate.capture.probe import POOLINGS, FloatArray, ProbeError
from headgate.capture.schema.errors import shown
from headgate.capture.schema.results import StoredRequest
from headgate.capture.schema.sites import Site, sort_sites
from headgate.steering.probes.examples import Captures, Examples, RowPooling, finite, pooled
from headgate.steering.probes.fitting import site_of, split
from headgate.steering.probes.judging import roc
from headgate.steering.vectors.directions import mean_difference
from headgate.steering.vectors.phase_vectors import PhaseVectors, vectors_html

Groups = Captures | Mapping[str, Any]
"""A root of captures, or requests of one, whose tags are the groups; or rows by the name of a group: arrays
``[n, hidden]`` by site, or one array."""

_POOLINGS = (*POOLINGS, "response_mean")
_SHOWN = 12


class Expression(NamedTuple):
    """A difference of groups.

    Attributes:
        positive: Names of the groups that the direction leads to; their rows count as one set.
        negative: Names of the groups that it leads from.
    """

    positive: tuple[str, ...]
    negative: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Read ``A - B``; either side may be several groups, ``A + B``. The signs stand between blanks.

        Raises:
            ProbeError: If it is none, or names a group twice.
        """
        sides = re.split(r"\s-\s", text) if isinstance(text, str) else []
        names = [tuple(name.strip() for name in re.split(r"\s\+\s", side)) for side in sides]
        if len(names) != 2 or not all(name for side in names for name in side):
            raise ProbeError(f"expected a difference of two groups, such as 'pos_3 - default_1', got {shown(text)}")
        found = cls(*names)
        if len(set(found.names)) != len(found.names):
            raise ProbeError(f"{text}: a group is named twice")
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """All groups."""
        return self.positive + self.negative


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDirections:
    """A direction at each site, and how well it separates the groups.

    Attributes:
        vectors: The directions; pass them as ``steering_vectors``, or save this object.
        expression: As it was given.
        counts: By group: ``requests`` (of arrays, rows), and how many of them are ``held_out``.
        separation: AUROC of the direction on the held-out rows, by site: the chance that a positive row lies further
            along it than a negative one. Empty if none were held out.
        metadata: All this as texts, for files; ``counts`` and ``auroc`` are JSON.
    """

    vectors: PhaseVectors
    expression: str
    counts: Mapping[str, Mapping[str, int]]
    separation: Mapping[Site, float]
    metadata: Mapping[str, str]

    def _repr_html_(self) -> str:
        """Return them as HTML for a notebook: counts, AUROC and norms by site."""
        facts = {"expression": self.expression, "pooling": self.metadata["pooling"]}
        for name, found in self.counts.items():
            facts[f"group {name}"] = f"{found['requests']}, {found['held_out']} held out"
        tiers = {"": (self.vectors.sites, self.vectors.float32())}
        return vectors_html("GroupDirections", facts, tiers, self.separation)

    @property
    def best(self) -> Site:
        """The site with the largest AUROC, the earliest of equals.

        Raises:
            ProbeError: If no rows were held out.
        """
        if not self.separation:
            raise ProbeError("no rows were held out, so no site is known to be the best")
        return max(self.vectors.sites, key=lambda site: self.separation[site])

    def at(self, site: Site | str) -> PhaseVectors:
        """Return the direction of one site.

        Raises:
            ProbeError: If there is none; the message lists the sites.
        """
        wanted = site_of(site)
        rows = dict(zip(self.vectors.sites, self.vectors.float32(), strict=True))
        found = PhaseVectors.from_rows({wanted: rows[wanted]}) if wanted in rows else None
        if found is None:
            raise ProbeError(f"no direction at {wanted.name}; there are {_names(self.vectors.sites)}")
        return found


def between(
    groups: Groups,
    expression: str,
    *,
    sites: Iterable[Site | str] | Site | str | None = None,
    pooling: RowPooling = "response_mean",
    held_out: float = 0.25,
    seed: int = 0,
    normalize: bool = False,
) -> GroupDirections:
    """Return the direction from one group of captured rows to another, at each site.

    ::

        pirate = between("captures", "pos_3 - default_1", sites=["12.post_mlp", "16.post_mlp"])
        pirate.separation, pirate.best
        llm.generate(prompt, SamplingParams(steering_vectors=pirate.at(pirate.best).scaled(4.0)))

    Args:
        groups: A root of captures, or requests of one, with the groups as tags; or a dictionary of rows by group:
            arrays or tensors ``[n, hidden]`` by site, or one array, of the one site in `sites`.
        expression: ``A - B``: the mean of A minus that of B. ``A + C - B`` takes the rows of A and C as one set.
        sites: The sites; all that every request has if None.
        pooling: The rows of a request that count: ``response_mean``, the mean over its generated tokens, or a pooling
            of probes: ``last_prompt``, ``prompt_mean``, ``token``. Rows of arrays are taken as they are.
        held_out: Share of each group's requests (of arrays, rows) that separation is measured on, and the direction is
            not made from; 0 for none.
        seed: Seed of the choice of these; the same at all sites.
        normalize: Scale every direction to length 1. Otherwise scale 1 moves the one mean onto the other.

    Raises:
        ProbeError: If a group or a row is missing, or two groups have the same mean; the message says which.
        CaptureFileError: If captures cannot be read.
    """
    parsed = Expression.parse(expression)
    if pooling not in _POOLINGS:
        raise ProbeError(f"expected one of {', '.join(_POOLINGS)}; got {shown(pooling)}", "pooling")
    if not 0 <= held_out < 1:
        raise ProbeError(f"expected a share held_out from 0 to below 1, got {held_out}")
    wanted = _sites(sites)
    examples = (
        _of_arrays(groups, parsed, wanted)
        if isinstance(groups, Mapping)
        else _of_captures(groups, parsed, wanted, pooling)
    )
    parts = {site: split(found, held_out, seed) for site, found in examples.items()}
    made = _difference({site: train for site, (train, _) in parts.items()}, parsed, normalize)
    rows = dict(zip(made.sites, made.float32(), strict=True))
    separation = {
        site: roc(test.rows @ rows[site].astype(np.float64), np.isin(test.labels, parsed.positive)).area
        for site, (_, test) in parts.items()
        if test is not None
    }
    counts = _counts(*next(iter(parts.values())))
    about = {"pooling": "none" if isinstance(groups, Mapping) else pooling, "held_out": repr(held_out)}
    model = next(iter(examples.values())).model
    about |= {"seed": str(seed), "normalize": str(normalize).lower(), **({"model": model} if model else {})}
    return GroupDirections(
        vectors=made,
        expression=expression,
        counts=counts,
        separation=MappingProxyType(separation),
        metadata=MappingProxyType({"expression": expression, **about, **_as_texts(counts, separation)}),
    )


def _sites(sites: Iterable[Site | str] | Site | str | None) -> tuple[Site, ...] | None:
    if sites is None:
        return None
    given: Iterable[Any] = [sites] if isinstance(sites, str | Site) else sites
    found = sort_sites({site_of(site) for site in given})
    if not found:
        raise ProbeError("expected one or more sites, got none", "sites")
    return found


def _of_captures(
    captures: Captures, expression: Expression, sites: Sequence[Site] | None, pooling: RowPooling
) -> dict[Site, Examples]:
    opened: Any = stored_requests(os.fspath(captures)) if isinstance(captures, str | os.PathLike) else captures
    known: set[str] = set()
    requests: list[StoredRequest] = []
    for request in opened:
        known.add(request.tag)
        if request.tag in expression.names:
            requests.append(request)
    _check_known(expression, known, "tag of the captures")
    if sites is None:
        sites = sort_sites(set.intersection(*(set(request.sites) for request in requests)))
        if not sites:
            raise ProbeError("the requests have no site in common; name those that matter: sites=")
    numbers: dict[tuple[str, str], int] = {}
    groups = [numbers.setdefault((request.tag, request.request_id), len(numbers)) for request in requests]
    model = next((str(request.metadata["model"]) for request in requests if request.metadata.get("model")), None)
    found = {}
    for site in sites:
        pieces = [pooled(request, site, pooling) for request in requests]
        sizes = [len(piece) for piece in pieces]
        found[site] = Examples(
            rows=finite(np.concatenate(pieces)),
            labels=np.repeat(np.array([request.tag for request in requests]), sizes),
            groups=np.repeat(np.array(groups, np.int64), sizes),
            model=model,
        )
    return found


def _of_arrays(groups: Mapping[str, Any], expression: Expression, sites: Sequence[Site] | None) -> dict[Site, Examples]:
    _check_known(expression, set(groups), "group")
    rows = {name: _by_site(name, groups[name], sites) for name in expression.names}
    if sites is None:
        sites = sort_sites(set.intersection(*(set(found) for found in rows.values())))
    if not sites:
        raise ProbeError("the groups have no site in common")
    labels = np.repeat(list(rows), [len(found[sites[0]]) for found in rows.values()])
    made = {}
    for site in sites:
        sizes = {name: len(found[site]) for name, found in rows.items()}
        if sum(sizes.values()) != len(labels) or any(sizes[name] != (labels == name).sum() for name in sizes):
            raise ProbeError(f"{site.name}: has {sizes} rows, other than {sites[0].name}")
        widths = {name: found[site].shape[1] for name, found in rows.items()}
        if len(set(widths.values())) > 1:
            raise ProbeError(f"{site.name}: expected rows of one width, got {widths}")
        stacked = np.concatenate([found[site] for found in rows.values()])
        made[site] = Examples(rows=finite(stacked), labels=labels, groups=np.arange(len(labels)))
    return made


def _by_site(name: str, rows: Any, sites: Sequence[Site] | None) -> dict[Site, FloatArray]:
    if not isinstance(rows, Mapping):
        if sites is None or len(sites) != 1:
            raise ProbeError(f"{name}: one array is of one site; name it, such as sites='12.post_mlp'")
        rows = {sites[0]: rows}
    found = {site_of(site): _array(array, f"{name} at {site_of(site).name}") for site, array in rows.items()}
    missing = [site for site in sites or () if site not in found]
    if missing:
        raise ProbeError(f"{name}: has no rows at {_names(missing)}; there are {_names(list(found))}")
    return found


def _array(rows: Any, where: str) -> FloatArray:
    if hasattr(rows, "detach"):  # a torch tensor, perhaps in bfloat16, which numpy does not know
        rows = rows.detach().cpu().float().numpy()
    with np.errstate(over="ignore"):
        array: FloatArray = np.asarray(rows, np.float32)
    if array.ndim != 2 or not array.size:
        raise ProbeError(f"{where}: expected rows [n, hidden], not empty; got the shape {list(array.shape)}")
    return array


def _check_known(expression: Expression, known: set[Any], of: str) -> None:
    missing = [name for name in expression.names if name not in known]
    if missing:
        there = sorted(map(str, known))
        listed = ", ".join(there[:_SHOWN]) + (f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else "")
        raise ProbeError(f"no {of} is called {', '.join(map(repr, missing))}; there are {listed or 'none'}")


def _difference(train: Mapping[Site, Examples], expression: Expression, normalize: bool) -> PhaseVectors:
    def rows(names: tuple[str, ...]) -> dict[Site, npt.NDArray[Any]]:
        return {site: found.rows[np.isin(found.labels, names)] for site, found in train.items()}

    try:
        return mean_difference(rows(expression.positive), rows(expression.negative), normalize=normalize)
    except ValueError as error:
        raise ProbeError(f"{' + '.join(expression.positive)} - {' + '.join(expression.negative)}: {error}") from error


def _counts(train: Examples, test: Examples | None) -> Mapping[str, Mapping[str, int]]:
    def requests(examples: Examples | None, name: str) -> int:
        return 0 if examples is None else len(np.unique(examples.groups[examples.labels == name]))

    return MappingProxyType(
        {
            str(name): MappingProxyType(
                {"requests": requests(train, name) + requests(test, name), "held_out": requests(test, name)}
            )
            for name in np.unique(train.labels)
        }
    )


def _as_texts(counts: Mapping[str, Mapping[str, int]], separation: Mapping[Site, float]) -> dict[str, str]:
    texts = {"counts": msgspec.json.encode({name: dict(found) for name, found in counts.items()}).decode()}
    if separation:
        areas = {site.name: round(area, 6) for site, area in separation.items()}
        texts["auroc"] = msgspec.json.encode(areas).decode()
    return texts


def _names(sites: Iterable[Site]) -> str:
    return ", ".join(site.name for site in sites) or "none"
