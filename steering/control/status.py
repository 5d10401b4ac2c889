"""The typed status of steering, made of the answers of engine cores, and of a server's.

Clients import it: it needs neither the engine nor files of vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from headgate.steering.documents.gates import RuleScope, Strength, Whom
from headgate.steering.documents.probes import Pooling
from headgate.steering.documents.schema import Amount, Count, Name, has


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseContent:
    """The vectors and operations that act in one phase.

    Attributes:
        hash: Hexadecimal; equal if and only if they are. None if nothing acts.
        sites: Sites of vectors, such as ``"12.post_mlp"``, in the order of the forward pass.
        op_sites: Sites of operations.
        norms: Length of the vector at each of `sites`, before any scale of a request.
    """

    hash: str | None
    sites: tuple[str, ...]
    op_sites: tuple[str, ...] = ()
    norms: Mapping[str, Amount] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleStatus:
    """A registered module.

    Attributes:
        name: Its name in requests.
        prefill: Its vectors at prompt positions.
        decode: Its vectors at generated positions.
        version: Grows with every change in the engine core.
    """

    name: str
    prefill: PhaseContent
    decode: PhaseContent
    version: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalStatus:
    """The global vectors.

    Attributes:
        tiers: Sites of each tier that is set: ``base``, ``prefill``, ``decode``.
        prefill: Their sum at prompt positions.
        decode: Their sum at generated positions.
        version: Grows with every change in the engine core.
    """

    tiers: Mapping[str, tuple[str, ...]]
    prefill: PhaseContent
    decode: PhaseContent
    version: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotStatus:
    """Vector slots of one engine core.

    Attributes:
        capacity: Vectors that fit at a time.
        reserved: Slots that requests, modules and global vectors hold.
        waiting: Requests that wait for slots.
    """

    capacity: Count
    reserved: Count
    waiting: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class SteeringStatus:
    """The steering of an engine.

    Attributes:
        shared: The global vectors, which act on every request.
        modules: The registered modules, by name.
        slots: The slots of each engine core; one without data parallelism.
        is_consistent: Whether the engine cores hold the same vectors and modules. If not, set or register them again.
    """

    shared: GlobalStatus
    modules: Mapping[str, ModuleStatus]
    slots: tuple[SlotStatus, ...]
    is_consistent: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SaeStatus:
    """An SAE whose features requests can change.

    Attributes:
        name: Its name in requests.
        site: Where it reads.
        write_sites: Where it writes: an SAE where it reads, a transcoder elsewhere.
        width: Values of a row.
        num_features: Its features are 0 to ``num_features - 1``.
        activation: ``relu``, ``jumprelu``, ``gated``, ``topk`` or ``groupmax``.
        k: Number of active features; of ``topk`` and ``groupmax``.
        norm: Normalisation of rows before they are encoded.
        decision: How one feature's activation is found from its own row: ``exact``; by a ``threshold`` in place of the
            selection among all features, an approximation; or ``none``: then features can only be added to. Edits of a
            top-k SAE that `is_encoded` use the selection itself.
        has_max_act: Whether the unit ``max_act`` can be used.
        is_encoded: Whether rows are encoded in full for it, so that ``sae_reconstruction`` can name it: the operator's
            ``--sae-encode``.
        format: Format of its files.
        model: Name of the model that it was trained on, if its files give it.
        source: Path of its files; over HTTP its last name alone, without the role ``steer``.
        sha256: Hash of the files that it was published as, in hex.
    """

    name: str
    site: str
    write_sites: tuple[str, ...]
    width: Count
    num_features: Count
    activation: Literal["relu", "jumprelu", "gated", "topk", "groupmax"]
    k: int | None
    norm: Literal["none", "layer_norm", "constant_norm_rescale"]
    decision: Literal["exact", "threshold", "none"]
    has_max_act: bool
    is_encoded: bool
    format: str
    model: str | None
    source: str
    sha256: str


class LabelledFeature(msgspec.Struct, frozen=True, kw_only=True):
    """A feature with its label.

    Attributes:
        id: Its number.
        label: The text that ``headgate sae labels`` has kept.
    """

    id: int
    label: str


class FoundFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """Features of an SAE whose labels fit a query.

    Attributes:
        sae: Its name.
        num_labels: Labels that it has in all.
        features: The shortest labels first.
        count: How many are here.
    """

    sae: str
    num_labels: Count
    features: tuple[LabelledFeature, ...]
    count: Count


class GlobalUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The places that a change of the global vectors named.

    Attributes:
        hook_points: In the order of the request.
        layers_updated: Ascending.
    """

    hook_points: tuple[str, ...]
    layers_updated: tuple[int, ...]


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """The sites that can be steered.

    Attributes:
        hook_points: Layers of each; the final norm has none.
        op_hook_points: The hook points where operations can act.
        num_layers: Decoder layers of the model.
        hidden_size: Values of a vector.
        dtype: Element type of the model, to which sums of vectors are rounded.
        max_vectors_per_request: One for each site and phase, counted once if both phases are alike.
        max_ops_per_site: Operations of one request at one site in one phase.
    """

    hook_points: dict[str, list[int]]
    num_layers: Count
    hidden_size: Count
    dtype: str
    max_vectors_per_request: Count
    op_hook_points: dict[str, list[int]] = {}
    max_ops_per_site: Count = 0


class SaeDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body that registers an SAE.

    Attributes:
        path: A file or folder below the server's --sae-root.
        site: Where it acts, if the files do not say so; not for transcoders.
    """

    name: Name
    path: str
    site: str | None = None


def status_of(answers: Sequence[Mapping[str, Any]]) -> SteeringStatus:
    """Return the status that the answers of all engine cores give."""
    first = answers[0]
    return SteeringStatus(
        shared=GlobalStatus(
            tiers=msgspec.convert(first["global"]["tiers"], dict[str, tuple[str, ...]]), **_content(first["global"])
        ),
        modules=modules_of(first["modules"]),
        slots=tuple(SlotStatus(**answer["slots"], waiting=answer["waiting"]) for answer in answers),
        is_consistent=all(_identity(answer) == _identity(first) for answer in answers),
    )


def _identity(answer: Mapping[str, Any]) -> tuple[Any, ...]:
    hashes = {module["name"]: module["hash"] for module in answer["modules"]}
    return answer["global"]["hash"], hashes, answer["saes"], answer["probes"], answer["rules"]


def modules_of(described: Sequence[Mapping[str, Any]]) -> dict[str, ModuleStatus]:
    """Return modules by name, as an engine core describes them."""
    return {module["name"]: module_of(module) for module in described}


def module_of(described: Mapping[str, Any]) -> ModuleStatus:
    """Return a module, as an engine core describes it."""
    return ModuleStatus(name=described["name"], **_content(described))


def _content(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of both phases, and its version."""
    given = [key for key in ("hash", "sites", "op_sites", "norms") if key in described]
    phases = {
        phase: msgspec.convert({key: described[key][phase] for key in given}, PhaseContent)
        for phase in ("prefill", "decode")
    }
    return {**phases, "version": described["version"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeStatus:
    """A registered probe.

    Attributes:
        name: Its name in gates.
        at: The site that it reads.
        kind: ``linear``, ``cosine`` or ``mlp``.
        classes: A name for each of its scores.
        hidden_size: Values of a row.
        threshold: Threshold of its score, if one was chosen.
        pooling: The rows that it was made for: ``token``, ``last_prompt`` or ``prompt_mean``.
        model: That it was made for, if known.
        metadata: About how it was made.
        sha256: Hex, of its content.
    """

    name: str
    at: str
    kind: Literal["linear", "cosine", "mlp"]
    classes: tuple[str, ...]
    hidden_size: Count
    threshold: float | None
    pooling: Pooling
    model: str | None
    metadata: Mapping[str, str]
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleStatus:
    """A registered rule.

    Attributes:
        name: Its name in requests and traces.
        applies_to: ``all``, ``opt_in`` or ``opt_out``.
        when: Its condition as clients write it; None stands for a vector that the rule itself brought.
        then: Its effect as clients write it, without vectors: of operations and features only where they act.
        scope: On which rows it acts: ``this_token``, ``next_token`` or ``rest_of_request``.
        strength: ``"binary"``, ``{"proportional": gain}``, ``{"sigmoid": sharpness}`` or ``{"pid": {...}}``.
        probes: Names of the scores that it reads, as in traces.
        sites: That it reads and writes.
        observes: Whether nothing acts: it is traced and counted.
        sha256: Hex, of its content.
    """

    name: str
    applies_to: Whom
    when: str | dict[str, Any]
    then: str | dict[str, Any]
    scope: RuleScope
    strength: Strength
    probes: tuple[str, ...]
    sites: tuple[str, ...]
    observes: bool
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleActivity:
    """A registered rule, and the rows that it wrote so far.

    Attributes:
        name: The rule's.
        applies_to: ``all``, ``opt_in`` or ``opt_out``.
        observes: Whether nothing acts.
        rows: Rows that it wrote; if it observes, rows on which it would have.
    """

    name: str
    applies_to: Whom
    observes: bool
    rows: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerActivity:
    """A controller, with its figures of all engine cores.

    Attributes:
        name: Its name in traces and metrics.
        entry_point: In the group ``headgate.controllers``.
        applies_to: ``all``, ``opt_in`` or ``opt_out``.
        probes: Names of the scores that it reads, as in traces.
        budget_ms: Milliseconds that a step waits for it.
        steps: Steps that were sent to it.
        skipped: Steps that came while it was busy, or after it was switched off.
        over_budget: Steps that took longer than `budget_ms`.
        seconds: Seconds that it took, in total.
        actions: Its actions by outcome: how many were ``submitted``, and how many were ``applied``,
            ``rejected`` or ``dropped``.
        error: Why it was switched off; None while it is on everywhere.
    """

    name: str
    entry_point: str
    applies_to: Whom
    probes: tuple[str, ...]
    budget_ms: Amount
    steps: Count
    skipped: Count
    over_budget: Count
    seconds: Amount
    actions: Mapping[str, Count]
    error: str | None

    @classmethod
    def joined(cls, reported: Sequence[Mapping[str, Any]]) -> ControllerActivity:
        """Join what each engine core reports of one controller."""
        first, actions = reported[0], Counter[str]()
        for each in reported:
            actions.update(each["actions"])
        summed = ("steps", "skipped", "over_budget", "seconds")
        sums = {name: sum(each[name] for each in reported) for name in summed}
        error = next((each["error"] for each in reported if each["error"] is not None), None)
        kept = {name: first[name] for name in ("name", "entry_point", "applies_to", "budget_ms")}
        return cls(**kept, probes=tuple(first["probes"]), actions=dict(actions), error=error, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicStatus:
    """Probes, gates, rules and controllers of all engine cores, with the rows and actions that these came to.

    Attributes:
        probes: Names of registered probes.
        rules: Registered rules.
        gates: Rows that gates of requests wrote, by their names; beyond 256 names all others are counted as
            ``(others)``.
        requests_with_gates: Requests with gates of their own, now.
        controllers: Controllers that were started.
        latches: ``conversations`` in which gates are latched, and the ``bytes`` that they take.
        queue: Actions of capture consumers that are ``waiting``, and that were ``dropped``; None if none are taken.
    """

    probes: tuple[str, ...]
    rules: tuple[RuleActivity, ...]
    gates: Mapping[str, Count]
    requests_with_gates: Count
    controllers: tuple[ControllerActivity, ...] = ()
    latches: Annotated[Mapping[str, int], has(conversations=Count, bytes=Count)] = field(default_factory=dict)
    queue: Annotated[Mapping[str, int], has(waiting=Count, dropped=Count)] | None = None

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]]) -> DynamicStatus:
        """Join the answers of all engine cores."""
        first = answers[0]
        rows, gates = Counter[str](), Counter[str]()
        for answer in answers:
            rows.update({rule["name"]: rule["rows"] for rule in answer["rules"]})
            gates.update(answer["gates"])
        queues = [answer["queue"] for answer in answers if answer["queue"]]
        reported = zip(*(answer["controllers"] for answer in answers), strict=True)
        kept = ("name", "applies_to", "observes")
        return cls(
            probes=tuple(first["probes"]),
            rules=tuple(
                RuleActivity(**{key: rule[key] for key in kept}, rows=rows[rule["name"]]) for rule in first["rules"]
            ),
            gates=dict(gates),
            requests_with_gates=sum(answer["requests_with_gates"] for answer in answers),
            controllers=tuple(map(ControllerActivity.joined, reported)),
            latches=_summed([answer["latches"] for answer in answers]),
            queue=_summed(queues) if queues else None,
        )


def _summed(figures: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in figures) for name in figures[0]}
