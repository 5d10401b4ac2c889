"""The condition of a request: its rows are recorded only if a probe fires on one of them.

Scores are those of `Probe.scores`, rounded to float32 as the consumer ``probe`` reports them. They are computed where
rows are collected, from the rows themselves, so a recorded request has the rows that its scores were computed from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.probe import Probe, ProbeKind, load_configured
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import ModelInfo, RequestInfo
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError, check_keys, shown
from headgate.capture.schema.positions import parts_of
from headgate.capture.schema.sites import Site, sort_sites
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.formats.layout import Decision, RowPooling

IF_PROBE = "if_probe"
"""Field of a request's spec, option of a resolved one, and parameter."""

MAX_FIRED = 64
"""Positions that a decision lists."""

SCORED_VALUES = 1 << 15
"""Values that are widened to float64 at a time: so few that torch and BLAS do not wake their threads for them."""

MOST_TRIED = 64
"""Positions of each part of a selection that are tried as the last one of a prompt."""

_FIELDS = ("probe", "above", "pool")
_MAX_ABOVE = float(np.finfo(np.float32).max)


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A request's condition, resolved; it travels as an option of the spec.

    Attributes:
        probe: Name of a configured probe.
        sha256: Of that probe, as the front end has it.
        above: The probe fires on scores above this number.
        pool: Rows that count.
    """

    probe: str
    sha256: str
    above: float
    pool: RowPooling


def read_probes(paths: Mapping[str, str]) -> dict[str, Probe]:
    """Read the probes that requests may name.

    Raises:
        ConfigError: If one cannot be read, has several classes, or is an MLP, which takes up to 100 times as long.
    """
    probes = load_configured(paths, "filesystem")
    for name, probe in probes.items():
        if len(probe.classes) > 1:
            raise ConfigError(
                f"filesystem: probes.{name}: has {len(probe.classes)} classes; a condition reads probes of one"
            )
        if probe.kind is ProbeKind.MLP:
            raise ConfigError(
                f"filesystem: probes.{name}: is an MLP; a condition reads linear and cosine probes, "
                "and the consumer 'probe' also an MLP"
            )
    return probes


def parse_condition(raw: object, probes: Mapping[str, Probe], where: str) -> Condition:
    """Read ``{"probe": NAME, "above": NUMBER, "pool": "token" or "last_prompt"}``; only ``probe`` is required.

    Args:
        raw: As a client or the operator wrote it. Without ``above`` the probe's own threshold counts, without ``pool``
            the probe's own pooling. A probe of the pooling ``prompt_mean`` has neither for single rows: both are
            required.
        probes: By name.
        where: Path of the condition, for errors.

    Raises:
        RequestError: Naming the field.
    """
    if not isinstance(raw, Mapping) or "probe" not in raw:
        raise RequestError(where, f'expected {{"probe": NAME, "above": NUMBER}}, got {shown(raw)}')
    check_keys(raw, _FIELDS, where, "a condition")
    name = raw["probe"]
    if not isinstance(name, str) or name not in probes:
        known = ", ".join(sorted(probes)) or "none; name files in the consumer's parameter probes"
        raise RequestError(f"{where}.probe", f"no such probe {shown(name)}; configured: {known}")
    probe = probes[name]
    for key in ("pool", "above"):
        if probe.pooling not in get_args(RowPooling) and key not in raw:
            raise RequestError(
                f"{where}.{key}",
                f"required: the probe {shown(name)} was made for the pooling {probe.pooling}, and a condition is on "
                "single rows: give pool and above",
            )
    pool = raw.get("pool", probe.pooling)
    if pool not in get_args(RowPooling):
        raise RequestError(f"{where}.pool", f"expected {' or '.join(get_args(RowPooling))}, got {shown(pool)}")
    return Condition(probe=name, sha256=probe.sha256, above=_above(raw, probe, f"{where}.above"), pool=pool)


def with_condition(spec: CaptureSpec, raw: object, probes: Mapping[str, Probe], field: str) -> CaptureSpec:
    """Add a condition to a spec, and the probe's site, which is recorded with the others.

    Args:
        spec: Resolved, without the condition.
        raw: See `parse_condition`.
        probes: By name.
        field: Path of the spec, for errors.

    Raises:
        RequestError: Naming the field.
    """
    condition = parse_condition(raw, probes, f"{field}.{IF_PROBE}")
    site = probes[condition.probe].site
    if site in spec.columns:
        raise RequestError(
            f"{field}.hooks",
            f"selects columns of {site.name}, and the probe {condition.probe!r} reads whole rows there",
        )
    options = {**spec.options, IF_PROBE: msgspec.to_builtins(condition)}
    added = {} if site in spec.sites else {site: IF_PROBE}
    return replace(spec, sites=sort_sites({*spec.sites, site}), site_fields=added, options=options)


def _above(raw: Mapping[str, Any], probe: Probe, field: str) -> float:
    above = raw.get("above", probe.threshold)
    if above is None and "above" not in raw:
        raise RequestError(field, f"required: the probe {shown(raw['probe'])} has no threshold of its own")
    if isinstance(above, bool) or not isinstance(above, int | float) or not -_MAX_ABOVE <= above <= _MAX_ABOVE:
        raise RequestError(field, f"expected a finite number, got {shown(above)}")
    return float(above)


def check_pool(spec: CaptureSpec, num_prompt: int, field: str) -> None:
    """Refuse a condition of a request that records none of the rows that could decide.

    Args:
        spec: With the option `IF_PROBE`, resolved, with absolute positions.
        num_prompt: Length of the prompt.
        field: Path of the spec, for errors.

    Raises:
        RequestError: Naming the field.
    """
    condition = _condition_of(spec)
    if condition.pool == "token":
        decides = any(int(part.wanted(num_prompt)[-1]) > 0 for part in parts_of(spec.positions))
        why = "token, and `positions` selects position 0 alone, which does not count"
    else:
        last = np.array([num_prompt - 1])
        decides = bool(spec.positions.mask(last, last + 1).all())
        why = "last_prompt, and `positions` leaves the prompt's last row out; add 'last_prompt'"
    if not decides:
        raise RequestError(f"{field}.{IF_PROBE}.pool", f"is {why}")


def check_any_prompt(spec: CaptureSpec, context_length: int, field: str) -> None:
    """Refuse the operator's condition if no prompt has a row that could decide.

    The shortest prompts are tried, of 2 tokens, the longest, and prompts that end with one of the first `MOST_TRIED`
    selected positions.

    Args:
        spec: As the operator wrote it; messages of a chat, which only a request has, are not judged.
        context_length: Of the model.
        field: Path of the spec, for errors.

    Raises:
        RequestError: Naming the field.
    """
    refusal = None
    lengths = [context_length, 2]
    while lengths:
        num_prompt = lengths.pop()
        try:
            selected = spec.positions.resolve(num_prompt, f"{field}.positions")
        except RequestError:  # of messages, or of a longer prompt
            continue
        if num_prompt == context_length:
            tried = {int(at) for part in parts_of(selected) for at in part.wanted(num_prompt)[:MOST_TRIED]}
            lengths += [at + 1 for at in tried if 2 < at + 1 < context_length]
        try:
            check_pool(replace(spec, positions=selected), num_prompt, field)
        except RequestError as error:
            refusal = error
        else:
            return
    if refusal is not None:
        raise refusal


def _condition_of(spec: CaptureSpec) -> Condition:
    return msgspec.convert(spec.options[IF_PROBE], Condition)


def scores_of(request: RequestInfo, model: ModelInfo, probes: Mapping[str, Probe]) -> ProbeScores:
    """Return what collects the scores of a request that begins.

    Args:
        request: The request, whose spec has the option `IF_PROBE`.
        model: The model being served.
        probes: By name, as they were read when the consumer was opened.

    Raises:
        ConsumerError: If the front end has read another probe under that name.
    """
    condition = _condition_of(request.spec)
    probe = probes.get(condition.probe)
    if probe is None or probe.sha256 != condition.sha256:
        raise ConsumerError(
            f"probe {condition.probe!r}: its file has changed since the engine started; restart the engine to use it"
        )
    return ProbeScores(condition, probe, request.shape(probe.site, model).dtype)


class ProbeScores:
    """The scores of one request's rows by the probe of its condition. Used by one thread.

    Args:
        condition: Of the request.
        probe: The probe that it names.
        dtype: Of the rows of the probe's site.
    """

    def __init__(self, condition: Condition, probe: Probe, dtype: str) -> None:
        self._condition = condition
        self._probe = probe
        self._dtype = dtype
        self._positions: list[Int64Array] = []
        self._scores: list[npt.NDArray[np.float32]] = []

    def add(self, sites: Sequence[Site], positions: Int64Array, data: npt.NDArray[np.uint8]) -> None:
        """Score rows, if those of the probe's site are among them.

        Args:
            sites: ``S`` sites.
            positions: int64 ``[N]``.
            data: uint8 ``[S, N, row_bytes]``.
        """
        if self._probe.site not in sites:
            return
        import torch

        rows = data[sites.index(self._probe.site)]
        size = max(SCORED_VALUES // self._probe.hidden_size, 1)
        for start in range(0, len(positions), size):
            part = np.ascontiguousarray(rows[start : start + size])
            values = torch.from_numpy(part).view(getattr(torch, self._dtype)).double().numpy()
            with np.errstate(over="ignore"):
                self._scores.append(self._probe.scores(values)[:, 0].astype(np.float32))
        self._positions.append(positions)

    def decide(self, positions: Int64Array, num_prompt: int) -> Decision:
        """Decide whether the request is recorded, now that its rows are known.

        Args:
            positions: int64 ``[rows]``: positions of the rows that would be recorded.
            num_prompt: Length of the prompt.
        """
        condition = self._condition
        at = np.concatenate([np.empty(0, np.int64), *self._positions])
        scores = np.concatenate([np.empty(0, np.float32), *self._scores]).astype(np.float64)
        counts = at == num_prompt - 1 if condition.pool == "last_prompt" else at > 0
        counts &= np.isin(at, positions)
        at, scores = at[counts], scores[counts]
        is_finite = np.isfinite(scores)
        fired = np.flatnonzero(is_finite & (scores > condition.above))
        best = int(np.where(is_finite, scores, -np.inf).argmax()) if is_finite.any() else None
        return Decision(
            probe=condition.probe,
            sha256=condition.sha256,
            site=self._probe.site.name,
            above=condition.above,
            pool=condition.pool,
            num_scored=len(at),
            num_not_finite=int(np.count_nonzero(~is_finite)),
            num_fired=len(fired),
            highest=None if best is None else float(scores[best]),
            at=None if best is None else int(at[best]),
            positions=at[fired[:MAX_FIRED]].tolist(),
            scores=scores[fired[:MAX_FIRED]].tolist(),
        )
