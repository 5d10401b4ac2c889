"""Every knob of steering, with its unit and what it costs; and the SAEs that it names: files, sites, and use.

The operator's document is ``additional_config={"headgate": {"steering": {...}}}`` (or vLLM's
``--additional-config``); its keys are the fields below, and unknown keys are refused.

`headgate.steering.flags` are the flags on vLLM's command line that make the same section.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from headgate.capture.probe import Probe, ProbeError
from headgate.capture.probe import load as load_probe
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.sites import NO_SHAPES, READ_ONLY, HookPoint, Site, SiteShape, parse_sites, sort_sites
from headgate.steering.controllers.loading import ControllerSpec, check_specs
from headgate.steering.features.importing import SaeSource, open_coder, sae_site
from headgate.steering.features.source_coder import CoderKind
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.gates.gate import COLUMNS_PER_GATE
from headgate.steering.vectors.phase_vectors import Steerable, check_name


@lru_cache(maxsize=1024)
def sites_of(source: str) -> tuple[Site, ...]:
    """Return the sites of an SAE as `SaeSource` is written: where it reads, and where it writes if it is a transcoder.

    Raises:
        FeatureFileError: If the files cannot be read, or neither they nor the source name the read site.
        OSError: Likewise.
    """
    path, site = SaeSource.parse(source)
    coder = open_coder(path, site=site)
    return (sae_site(coder), *coder.write_sites) if coder.is_transcoder else (sae_site(coder),)


MAX_ENCODED = 1 << 24
"""Features of an encoded SAE, at most: entries of programs name them by a float32."""


def why_not_encoded(coder: SparseCoder, hidden_size: int) -> str | None:
    """Say why an SAE cannot reconstruct a model's rows exactly; None if it can."""
    if coder.is_transcoder or coder.weights.source.skip is not None:
        return "is a transcoder, which reconstructs the rows of another site; SAEs can be encoded"
    if coder.kind is CoderKind.GROUPMAX:
        return (
            f"is of the kind {coder.kind.value}: it selects among the features of each group, which is not computed; "
            "relu, jumprelu, gated and top-k SAEs can be encoded"
        )
    if coder.num_features > MAX_ENCODED:
        return f"has {coder.num_features} features; up to {MAX_ENCODED} can be encoded"
    if coder.width != hidden_size:
        return f"has the width {coder.width}; rows of the model have {hidden_size} values"
    return None


def cross_stages(sites: Sequence[Site]) -> str:
    """Return why a transcoder whose sites lie on several pipeline stages is refused; `sites` as of `transcoders`."""
    return (
        f"a transcoder that reads at {sites[0].name} and writes at {', '.join(site.name for site in sites[1:])} cannot "
        "be used here: these sites are on different stages of the pipeline, and what a feature changes does not travel "
        "from one to the next"
    )


def _stream_sites() -> dict[str, Any]:
    return {"pre_attn": "all", "post_attn": "all", "post_mlp": "all"}


DEFAULT_SLOTS = 8192
DEFAULT_OPS = 8
MAX_OPS = 256
DEFAULT_FEATURES = 64
MAX_FEATURES = 1024
DEFAULT_GATES = 8
MAX_GATES = 64
DEFAULT_RULES = 8
MAX_RULES = 64
ENTRIES_PER_GATE = 5
"""Entries of a gate at one site, on the average; one is the attenuation that it may be."""
MAX_PROBE_UNITS = 2048
MAX_READ = 32
"""Probes that all controllers together read."""
MAX_DRIVEN = 32
"""Distinct contents that controllers turn on at a time."""
RESERVED_PART = 32
"""One extra slot for each this many slots of the pool, for operators' changes."""
MAX_WAITING = 1024
MAX_WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitLimits:
    """Limits of requests that wait for slots.

    Attributes:
        max_waiting: Requests at a time.
        max_wait_s: Seconds of one request.
    """

    max_waiting: float
    max_wait_s: float


class SteeringConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's configuration of steering.

    Attributes:
        max_steering_slots: Vectors on the device at a time, for requests, modules and global vectors together; slot 0
            is the zero vector. They take ``max_steering_slots * hidden_size`` elements of the model's dtype of device
            memory: in bfloat16, 8192 slots are 42 MB for a hidden size of 2560, and 134 MB for 8192. Requests whose
            vectors find no free slot wait.
        max_steering_configs: The same limit in other units: slots for this many distinct configurations with a vector
            at every site of `sites` in both phases, and for global vectors. A registered module counts as one
            configuration. More configurations fit if they have fewer vectors.
        max_vectors_per_request: Vectors of one request: one for each site and phase, counted once if both phases are
            equal. If None, every site in both phases, as far as the slots suffice. Each takes ``hidden_size`` elements
            of host memory while the request lives.
        max_waiting: Requests that may wait for slots at a time; further ones get HTTP 503 with ``Retry-After``. If
            None, 1024 on a server, and no limit for an `LLM`.
        max_wait_s: Seconds that a request may wait for slots before it gets HTTP 503. If None, 120 on a server, and no
            limit for an `LLM`.
        sites: ``{hook point: layers}`` that can be steered; requests choose any subset. Changes the compiled graph. A
            site takes 8 bytes of device memory for each batch row.
        op_sites: ``{hook point: layers}`` where operations can act, in addition to vectors; none if empty. Each adds a
            kernel to every forward pass, about 2 us while it is not used, and takes device memory for the programs of
            running requests: ``(2 * max_num_seqs + 3) * (4 * max_ops_per_site + 1) * 48`` bytes. In models whose layers
            pass on the stream alone (GPT-2, OPT, Phi, ...) ``post_attn`` op sites take ``max_num_batched_tokens *
            hidden_size * 4`` bytes more, once for all layers.
        gather_sites: ``{hook point: layers}`` of op sites whose rows are gathered with tensor parallelism, where ranks
            have the columns of their own heads or neurons: gates, probes and SAEs read whole rows there, and every
            operation acts. They become op sites. Sites that `probes` and `saes` read are gathered, too. On a GPU each
            gathers the rows of every forward, in use or not, and takes ``2 * max_num_batched_tokens * width`` elements
            of the model's dtype (more where several ranks hold one head), and half as many of float32, while it runs.
        max_ops_per_site: Operations of one request at one site in one phase, those of its modules included, and as many
            global ones.
        saes: ``{name: "PATH" or "PATH@SITE"}`` of SAEs and transcoders whose features requests may change. All their
            sites become op sites. With SAEs, or with `sae_root`, each op site takes ``(2 * max_num_seqs + 3) *
            max_sae_features * 96`` bytes of device memory more; with transcoders, or with `sae_root`,
            ``max_num_batched_tokens * max_sae_features * 4`` bytes are added once.
        sae_encode: Names of SAEs of `saes` with which requests may reconstruct rows, at most one for each site. Edits
            of features of a top-k SAE among them use its selection. Every worker that owns the site holds the weights
            on its device: ``2 * num_features * hidden_size`` elements, in bfloat16 for a model in bfloat16 and else in
            float32, and 16 bytes for each feature. On a GPU each SAE adds four kernels to every forward pass, and three
            for every 256 batch rows beyond the first, which end at once while they are not used (a top-k SAE six, and
            five); and working memory of 1024 bytes for each feature.
        sae_root: Folder whose SAEs may be registered while the engine runs; None permits none.
        max_sae_features: Features that one request may change at one site in one phase, its modules' included, and as
            many global ones. Each takes two slots, or one if its activation is not read. A transcoder's feature counts
            at every site that it reads or writes, and takes a slot for each; of features that are read, this is also
            the limit over all sites.
        max_gates: Gates of one request; 0 disables gates. Where there are op sites, gates take ``4 * 8 * max_gates``
            bytes of device memory for each batch row, twice that for each of `max_num_seqs` requests, and ``(2 *
            max_num_seqs + 3) * 5 * max_gates * 48`` bytes at each op site.
        max_rules: Rules that can be registered at a time; 0 disables rules. They take as much memory as gates, and ``(2
            * max_num_seqs + 3) * (2 * max_ops_per_site + max_sae_features) * 48`` bytes at each op site.
        max_probe_units: Hidden units of MLP probes, plus one for each such probe, that the gates of a request read at
            one site; rules and controllers have as many each. If None, the largest sum over the probes of `probes` at
            one site. Each takes ``(2 * max_num_seqs + 3) * 48`` bytes of device memory at each op site for gates, rules
            and controllers, as far as the engine has them.
        rules_file: File of rules to register at start, a list in YAML or JSON.
        probes: ``{name: path}`` of probes that gates can name (``.safetensors``). Their sites become op sites.
        modules: ``{name: path}`` of modules to load at start, in every format that `headgate.steering.load` reads;
            ``PATH@layer=20,concept=3`` if the file does not contain these. Each vector of a module takes a slot while
            it is registered.
        audit_file: File to which every engine core appends each change of global vectors and modules as a line of JSON.
        self_test: Check at start-up that every site responds to a vector, and refuse to serve if one does not.
        fire_counter: Count on the device how often each site ran, for debugging; one more kernel for each site.
        controllers: Plug-ins that read scores and change steering while requests run. With any, each op site takes ``(2
            * max_num_seqs + 3) * (4 * max_ops_per_site + 2 * max_sae_features + 64) * 48`` bytes of device memory more,
            each batch row 384 bytes and each of `max_num_seqs` requests twice that, and 18 KiB of pinned memory.
        controller_process: Whether controllers run in a process of their own, or in the engine core's. If None, in
            their own if the engine core has a process of its own.
        from_consumers: Whether capture consumers may steer running requests with ``context.steering.submit(action)``.
            Takes as much memory as controllers.
        lenses: ``{name: path}`` of lenses by which requests may name directions of tokens, as ``headgate lens import``
            writes them; the logit lens is always there.
    """

    max_steering_slots: int = DEFAULT_SLOTS
    max_steering_configs: int | None = None
    max_vectors_per_request: int | None = None
    max_waiting: int | None = None
    max_wait_s: float | None = None
    sites: dict[str, Any] = msgspec.field(default_factory=_stream_sites)
    op_sites: dict[str, Any] = msgspec.field(default_factory=dict)
    gather_sites: dict[str, Any] = msgspec.field(default_factory=dict)
    max_ops_per_site: int = DEFAULT_OPS
    saes: dict[str, str] = msgspec.field(default_factory=dict)
    sae_encode: list[str] = msgspec.field(default_factory=list)
    sae_root: str | None = None
    max_sae_features: int = DEFAULT_FEATURES
    max_gates: int = DEFAULT_GATES
    max_rules: int = DEFAULT_RULES
    max_probe_units: int | None = None
    rules_file: str | None = None
    probes: dict[str, str] = msgspec.field(default_factory=dict)
    modules: dict[str, str] = msgspec.field(default_factory=dict)
    audit_file: str | None = None
    self_test: bool = True
    fire_counter: bool = False
    controllers: list[ControllerSpec] = msgspec.field(default_factory=list)
    controller_process: bool | None = None
    from_consumers: bool = False
    lenses: dict[str, str] = msgspec.field(default_factory=dict)

    def steerable(
        self, *, num_layers: int, hidden_size: int, dtype: str, shapes: Mapping[Site, SiteShape] = NO_SHAPES
    ) -> Steerable:
        """Resolve the configured sites and limits for a model.

        Raises:
            ConfigError: If the model has no such sites, or an SAE cannot be encoded in full.
        """
        sites = self._sites(num_layers)
        op_sites = self._op_sites(num_layers)
        _check_encoded(self.encoded_saes(hidden_size), hidden_size, shapes)
        limit = self.max_vectors_per_request or 2 * len(sites)
        return Steerable(
            num_layers=num_layers,
            hidden_size=hidden_size,
            dtype=dtype,
            sites=sites,
            max_vectors=min(limit, self.num_slots(num_layers) - 1),
            op_sites=op_sites,
            max_ops_per_site=self.max_ops_per_site,
            max_sae_features=self.num_features,
            max_changes=self.num_changes,
            max_gates=self.max_gates,
            max_rules=self.max_rules,
            max_probe_units=self.num_probe_units,
            shapes={site: shapes[site] for site in sites if site in shapes},
            gathered=frozenset(
                site for site in self._gathered(num_layers) if site in shapes and shapes[site].shard == "columns"
            ),
        )

    @property
    def num_features(self) -> int:
        """Features of a request at one site; 0 if there can be no SAE."""
        return self.max_sae_features if self.saes or self.sae_root is not None else 0

    @property
    def num_changes(self) -> int:
        """Features of a request that may be read at one site and written at others; 0 if there can be no transcoder.

        Raises:
            ConfigError: If the files of an SAE cannot be read.
        """
        return self.num_features if self.sae_root is not None or self.transcoders() else 0

    def transcoders(self) -> dict[str, tuple[Site, ...]]:
        """Return the sites of each configured SAE that writes elsewhere than it reads, the one that it reads first.

        Raises:
            ConfigError: As `num_changes`.
        """
        sites = {name: self._sae_sites(name) for name in self.saes}
        return {name: found for name, found in sites.items() if len(found) > 1}

    @property
    def num_probe_units(self) -> int:
        """See `max_probe_units`; 0 if no MLP probe can be read.

        Raises:
            ConfigError: If the file of a probe cannot be read.
        """
        if self.max_probe_units is not None:
            return self.max_probe_units
        counts = Counter[Site]()
        for probe in (_probe(self, name) for name in self.probes):
            counts[probe.site] += 0 if probe.hidden is None else len(probe.hidden.weight) + 1
        return max(counts.values(), default=0)

    @property
    def max_entries(self) -> int:
        """Entries of a program at one site.

        Two for each operation, one for each feature, and one for a reconstruction if there can be one, of a request's
        and of the global ones; one for vectors; entries that evaluate gates; and entries of rules.
        """
        of_units = self.num_probe_units * (bool(self.max_gates) + bool(self.max_rules) + has_controllers(self))
        of_gates = ENTRIES_PER_GATE * (self.max_gates + self.max_rules)
        of_gates += self.entries_driven * bool(self.max_rules)
        of_controllers = (self.entries_driven + MAX_READ) * has_controllers(self)
        of_both = 2 * (2 * self.max_ops_per_site + self.num_features + bool(self.sae_encode)) + 1
        return of_both + of_gates + of_controllers + of_units

    @property
    def entries_driven(self) -> int:
        """Entries at one site of all that controllers turn on for a request."""
        return 2 * self.max_ops_per_site + self.num_features

    @property
    def num_columns(self) -> int:
        """Numbers that gates keep for each row: those of requests first, then those of rules, then of controllers."""
        return first_controller_column(self) + (MAX_READ + MAX_DRIVEN) * has_controllers(self)

    def encoded_saes(self, hidden_size: int) -> dict[Site, SparseCoder]:
        """Open the SAEs of `sae_encode`, by site.

        Raises:
            ConfigError: If one cannot reconstruct rows of `hidden_size` values exactly, or two act at one site.
        """
        found: dict[Site, SparseCoder] = {}
        for name in self.sae_encode:
            where = f"{WHERE}.sae_encode (--sae-encode): SAE {name!r}"
            path, site = SaeSource.parse(self.saes[name])
            try:
                coder = open_coder(path, name=name, site=site)
                site = sae_site(coder)
            except (FeatureFileError, OSError) as error:
                raise ConfigError(f"{where}: {error}") from error
            if (why := why_not_encoded(coder, hidden_size)) is not None:
                raise ConfigError(f"{where} {why}")
            if site in found:
                raise ConfigError(
                    f"{where} acts at {site.name}, and so does {found[site].name!r}; one SAE can be encoded at a site"
                )
            found[site] = coder
        return found

    def num_slots(self, num_layers: int) -> int:
        """Return the slots of the vector pool for a model, slot 0 included.

        Raises:
            ConfigError: As `steerable`.
        """
        if self.max_steering_configs is None:
            return self.max_steering_slots
        return 2 * len(self._sites(num_layers)) * (self.max_steering_configs + 1) + 1

    def num_reserved_slots(self, num_layers: int) -> int:
        """Return the slots of the pool beyond `num_slots`, which operators' changes take when all others are taken."""
        return self.num_slots(num_layers) // RESERVED_PART

    def wait_limits(self, *, is_offline: bool) -> WaitLimits:
        """Return the limits of requests that wait for slots; `is_offline`: of requests that an `LLM` makes."""
        max_waiting, max_wait_s = (math.inf, math.inf) if is_offline else (MAX_WAITING, MAX_WAIT_S)
        return WaitLimits(
            max_waiting=max_waiting if self.max_waiting is None else self.max_waiting,
            max_wait_s=max_wait_s if self.max_wait_s is None else self.max_wait_s,
        )

    def _sites(self, num_layers: int) -> tuple[Site, ...]:
        """Return all sites that can be steered, those of operations included, in the order of the forward pass."""
        found = sort_sites({*self._parsed("sites", num_layers), *self._op_sites(num_layers)})
        if fixed := [site.name for site in found if site.hook in READ_ONLY]:
            raise ConfigError(
                f"{WHERE}.sites: {', '.join(fixed)}: the choice of experts follows from router_logits and cannot be "
                "steered itself; steer router_logits"
            )
        return found

    def _op_sites(self, num_layers: int) -> tuple[Site, ...]:
        declared = self._parsed("op_sites", num_layers) if self.op_sites else ()
        of_files = {site: f"saes.{name} (--saes)" for name in self.saes for site in self._sae_sites(name)}
        of_files |= {_probe(self, name).site: f"probes.{name} (--probes)" for name in self.probes}
        for site, where in of_files.items():
            if site.hook is not HookPoint.FINAL_NORM and site.layer >= num_layers:
                raise ConfigError(f"{WHERE}.{where}: {site.name}: the model has {num_layers} layers")
        return sort_sites({*declared, *of_files, *self._gathered(num_layers)})

    def _gathered(self, num_layers: int) -> frozenset[Site]:
        """Return the op sites where something may read whole rows."""
        declared = self._parsed("gather_sites", num_layers) if self.gather_sites else ()
        read = (*(self._sae_sites(name)[0] for name in self.saes), *(_probe(self, name).site for name in self.probes))
        return frozenset((*declared, *read))

    def _sae_sites(self, name: str) -> tuple[Site, ...]:
        try:
            return sites_of(self.saes[name])
        except (FeatureFileError, OSError) as error:
            raise ConfigError(f"{WHERE}.saes.{name} (--saes): {error}") from error

    def _parsed(self, name: str, num_layers: int) -> tuple[Site, ...]:
        try:
            return parse_sites(getattr(self, name), num_layers, name)
        except RequestError as error:
            raise ConfigError(f"{WHERE}.{error}") from error


def _check_encoded(saes: Iterable[Site], hidden_size: int, shapes: Mapping[Site, SiteShape]) -> None:
    for site in saes:
        shape = shapes.get(site)
        if shape is not None and shape.width != hidden_size:
            raise ConfigError(
                f"{WHERE}.sae_encode (--sae-encode): {site.name} has rows of {shape.width} values; SAEs are encoded in "
                f"full where rows have {hidden_size} values, the hidden size"
            )


def has_controllers(config: SteeringConfig) -> bool:
    """Whether controllers, or capture consumers, steer running requests."""
    return bool(config.controllers) or config.from_consumers


def _probe(config: SteeringConfig, name: str) -> Probe:
    try:
        return load_probe(config.probes[name])
    except (ProbeError, OSError) as error:
        raise ConfigError(f"{WHERE}.probes.{name} (--probes): {error}") from error


def first_controller_column(config: SteeringConfig) -> int:
    """Return the first of `SteeringConfig.num_columns` that is the controllers': of scores, then of contents."""
    return COLUMNS_PER_GATE * (config.max_gates + config.max_rules)


WHERE = "additional_config['headgate']['steering']"
"""Path of the configuration, for errors."""


def parse_config(document: Mapping[str, Any] | None) -> SteeringConfig:
    """Read the value of ``additional_config["headgate"]["steering"]``.

    Raises:
        ConfigError: On an unknown key, a wrong type or a value out of range.
    """
    if document is not None and not isinstance(document, Mapping):
        raise ConfigError(f"{WHERE}: expected an object, got {document!r}")
    try:
        config = msgspec.convert(document or {}, SteeringConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{WHERE}: {error}") from error
    _check(config)
    return config


def _check(config: SteeringConfig) -> None:
    slots, limit = config.max_steering_slots, config.max_vectors_per_request
    if config.max_steering_configs is not None and config.max_steering_configs < 1:
        raise ConfigError(f"{WHERE}: max_steering_configs must be at least 1, got {config.max_steering_configs}")
    if config.max_steering_configs is not None and slots != DEFAULT_SLOTS:
        raise ConfigError(f"{WHERE}: max_steering_configs is another way to set max_steering_slots; give one of them")
    if slots < 2:
        raise ConfigError(f"{WHERE}: max_steering_slots must be at least 2 (slot 0 is the zero vector), got {slots}")
    if limit is not None and not 0 < limit < slots:
        raise ConfigError(
            f"{WHERE}: max_vectors_per_request must be from 1 to max_steering_slots - 1 = {slots - 1}, got {limit}"
        )
    if not 0 < config.max_ops_per_site <= MAX_OPS:
        raise ConfigError(f"{WHERE}: max_ops_per_site must be from 1 to {MAX_OPS}, got {config.max_ops_per_site}")
    for name, count, most in (("max_gates", config.max_gates, MAX_GATES), ("max_rules", config.max_rules, MAX_RULES)):
        if not 0 <= count <= most:
            raise ConfigError(f"{WHERE}: {name} must be from 0 to {most}, got {count}")
    if config.max_probe_units is not None and not 0 <= config.max_probe_units <= MAX_PROBE_UNITS:
        raise ConfigError(f"{WHERE}: max_probe_units must be from 0 to {MAX_PROBE_UNITS}, got {config.max_probe_units}")
    if config.max_waiting is not None and config.max_waiting < 0:
        raise ConfigError(f"{WHERE}: max_waiting must be at least 0, got {config.max_waiting}")
    if config.max_wait_s is not None and not config.max_wait_s > 0:
        raise ConfigError(f"{WHERE}: max_wait_s must be above 0, got {config.max_wait_s}")
    if not config.sites:
        raise ConfigError(f"{WHERE}: sites: name at least one hook point, such as {{'post_mlp': 'all'}}")
    _check_saes(config)
    check_specs(config.controllers)
    for section, paths, of in (
        ("modules", config.modules, "a module"),
        ("saes", config.saes, "an SAE"),
        ("probes", config.probes, "a probe"),
    ):
        for name, path in paths.items():
            try:
                check_name(name, section, of)
            except RequestError as error:
                raise ConfigError(f"{WHERE}.{error}") from error
            if not path:
                raise ConfigError(f"{WHERE}.{section}.{name}: the path is empty")


def _check_saes(config: SteeringConfig) -> None:
    if not 0 < config.max_sae_features <= MAX_FEATURES:
        raise ConfigError(f"{WHERE}: max_sae_features must be from 1 to {MAX_FEATURES}, got {config.max_sae_features}")
    for name in config.sae_encode:
        if name not in config.saes:
            known = ", ".join(sorted(config.saes)) or "none"
            raise ConfigError(f"{WHERE}.sae_encode (--sae-encode): {name!r} is not among the SAEs of --saes: {known}")
        if config.sae_encode.count(name) > 1:
            raise ConfigError(f"{WHERE}.sae_encode (--sae-encode): {name!r} is named twice")
