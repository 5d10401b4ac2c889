"""The consumer that answers each request with the scores of probes for each of its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import msgspec
import numpy as np

from headgate.capture.probe import Probe, ProbeReadout, Scores, check_fits, keys_of, load_configured
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    Readout,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
    check_fields,
    parse_selector,
    read_params,
    select_sites,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError, shown
from headgate.capture.schema.sites import Site, site_map, sort_sites
from headgate.capture.schema.spec import CaptureSpec

PROBES = "probes"
"""Field of a request's spec: the names of configured probes. The option of that name has their checksums, too."""

FIELDS = (PROBES, "positions")


class ProbeParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the probe consumer.

    Attributes:
        probes: Files of probes by name, for requests to choose from.
        max_scores: Largest number of scores in the result of one sample: positions times classes, over all its probes.
    """

    probes: dict[str, str]
    max_scores: int = 65_536


def parse_params(params: Mapping[str, Any]) -> tuple[ProbeParams, dict[str, Probe]]:
    """Read and check the parameters, and the probes by name; see `load_configured`.

    Raises:
        ConfigError: Naming the parameter.
    """
    parsed = read_params(ProbeParams, params, "probe", max_scores=1)
    if not parsed.probes:
        raise ConfigError('probe: probes: name at least one, {"anger": "anger.safetensors"}')
    return parsed, load_configured(parsed.probes, "probe")


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"probes": [NAME, ...], "positions": SELECTOR}``; by default all probes, and all positions.

    Returns:
        The spec, with the sites of the chosen probes; its option ``probes`` is ``{NAME: sha256}``.

    Raises:
        RequestError: Naming the field; also if the server cannot capture the site of a probe.
    """
    _, known = parse_params(context.params)
    raw = check_fields(raw, context, FIELDS, 'such as {"probes": [NAME]}')
    names = _names(raw.get(PROBES, list(known)), known, f"{context.field}.{PROBES}")
    hooks = site_map(sort_sites({known[name].site for name in names}))
    return CaptureSpec(
        sites=select_sites(hooks, context),
        positions=parse_selector(raw, context),
        options={PROBES: {name: known[name].sha256 for name in names}},
    )


def _names(given: object, known: Mapping[str, Probe], field: str) -> list[str]:
    if not isinstance(given, list) or not given or len(given) > len(known):
        raise RequestError(field, f"expected a list of up to {len(known)} names, not empty; got {shown(given)}")
    for number, name in enumerate(given):
        if not isinstance(name, str) or name not in known:
            raise RequestError(
                f"{field}[{number}]", f"no such probe {shown(name)}; configured: {', '.join(sorted(known))}"
            )
    if len(set(given)) < len(given):
        raise RequestError(field, f"expected each name once, got {shown(given)}")
    return given


class ProbeConsumer(StreamingConsumer):
    """Answers with the scores of each row; `ProbeParams` lists the parameters.

    The payload is ``{"positions": [...], "num_prompt_tokens": N, "probes": {NAME: {...}}}``. Of each probe it has
    ``site``, ``kind``, ``classes``, ``threshold`` and ``scores``: for each position a number, or, with several classes,
    a list of them; None where the row is not finite. Scores are those of `Probe.scores`, as float32.

    A request asks with ``{"probes": [NAME, ...], "positions": SELECTOR}``; neither is required. It waits for its
    result. The worker computes the scores where the rows are: all probes of a site are one readout, whose outputs come
    here. No row does.

    Raises:
        ConfigError: If a probe cannot be read, its site cannot be captured, or it is of another width.
    """

    location = "worker"
    is_awaited = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        settings, self._probes = parse_params(params)
        self._max_scores = settings.max_scores
        self._places: dict[str, int] = {}
        self._columns: dict[str, slice] = {}
        for names in _by_site(self._probes, context.model).values():
            readout = ProbeReadout([self._probes[name] for name in names])
            self._places |= {name: place for place, name in enumerate(names)}
            self._columns |= zip(names, readout.columns(), strict=True)
        self._requests: dict[str, _RequestScores] = {}

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def offers(cls, params: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        return {PROBES: list(params[PROBES])}

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def readouts(cls, params: Mapping[str, Any], model: ModelInfo) -> dict[Site, Readout]:
        _, probes = parse_params(params)
        names_at = _by_site(probes, model)
        return {site: ProbeReadout([probes[name] for name in names]) for site, names in names_at.items()}

    def begin(self, request: RequestInfo) -> None:
        for name, sha256 in request.spec.options[PROBES].items():
            probe, computed = self._probes[name], sha256
            if probe.site in request.spec.sites:
                facts = request.readouts.get(probe.site)
                computed = "none" if facts is None else keys_of(facts.key)[self._places[name]]
            if not probe.sha256 == sha256 == computed:
                raise ConsumerError(
                    f"probe {name!r}: its file has changed since the engine started; restart the engine to use it"
                )
        self._requests[request.request_id] = _RequestScores(self._max_scores)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            for number, site in enumerate(block.sites):
                wanted = {name for span in block.spans for name in span.request.spec.options[PROBES]}
                found = block.rows[number].double().numpy()
                here = [name for name in wanted if self._probes[name].site == site]
                self._add(block, {name: found[:, self._columns[name]] for name in here})

    def _add(self, block: RowBlock, scores: Mapping[str, Scores]) -> None:
        for span in block.spans:
            part = slice(span.start, span.stop)
            for name in scores.keys() & span.request.spec.options[PROBES].keys():
                self._requests[span.request.request_id].add(name, block.positions[part], scores[name][part])

    def finish(self, finished: FinishedRequest) -> dict[str, Any] | None:
        found = self._requests.pop(finished.request.request_id)
        sites = finished.request.spec.sites
        names = [name for name in finished.request.spec.options[PROBES] if self._probes[name].site in sites]
        if not names:
            return None  # their sites belong to other pipeline stages
        if found.is_full:
            raise ConsumerError(
                f"these scores are more than a result may hold here, {self._max_scores} numbers (parameter "
                "max_scores); ask for fewer positions or probes"
            )
        positions, scores = found.joined(names, finished.final.num_rows)
        return {
            "positions": positions.tolist(),
            "num_prompt_tokens": finished.final.num_prompt_tokens,
            "probes": {name: _scores_document(self._probes[name], scores[name]) for name in names},
        }

    def abandon(self, request: RequestInfo) -> None:
        self._requests.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        self._requests.clear()


class _RequestScores:
    """Positions and scores of one request so far, by probe.

    Attributes:
        is_full: They were more than `max_scores` numbers, and are thrown away.
    """

    def __init__(self, max_scores: int) -> None:
        self.is_full = False
        self._left = max_scores
        self._parts: defaultdict[str, list[tuple[Int64Array, Scores]]] = defaultdict(list)

    def add(self, name: str, positions: Int64Array, scores: Scores) -> None:
        """Add the scores ``[n, classes]`` of some rows."""
        self._left -= scores.size
        if self._left < 0:
            self.is_full = True
            self._parts.clear()
        if not self.is_full:
            # Copies: the slices would keep those of every request of the block.
            self._parts[name].append((positions.copy(), scores.copy()))

    def joined(self, names: Sequence[str], num_rows: int) -> tuple[Int64Array, dict[str, Scores]]:
        """Positions below `num_rows` that every probe has a score for, and the scores there, by probe.

        Sites have the same positions unless overload lost rows of some.
        """
        positions = {
            name: np.concatenate([np.empty(0, np.int64), *(p for p, _ in self._parts[name])]) for name in names
        }
        common = reduce(partial(np.intersect1d, assume_unique=True), positions.values())
        common = common[common < num_rows]
        scores = {}
        for name in names:
            parts = [part for _, part in self._parts[name]]
            whole = np.concatenate(parts) if parts else np.empty((0, 1))
            scores[name] = whole[np.isin(positions[name], common)]
        return common, scores


def _by_site(probes: Mapping[str, Probe], model: ModelInfo) -> dict[Site, list[str]]:
    """Names of the probes of each site, in the order of the configuration."""
    found: dict[Site, list[str]] = {}
    for name, probe in probes.items():
        check_fits(probe, model, f"probe: probes.{name}")
        found.setdefault(probe.site, []).append(name)
    return found


def _scores_document(probe: Probe, scores: Scores) -> dict[str, Any]:
    values = scores[:, 0] if len(probe.classes) == 1 else scores
    listed = values.astype(object)
    listed[~np.isfinite(values)] = None  # JSON has no NaN
    return {
        "site": probe.site.name,
        "kind": probe.kind.value,
        "classes": list(probe.classes),
        "threshold": probe.threshold,
        "scores": listed.tolist(),
    }
