"""Operations of users as calls of the engine cores, and the typed status in their answers. No transport.

With data parallelism each engine core has its own global vectors and modules. Every call goes to all of them; if one
refuses a change, it is undone in the others. After a change they are compared, since another front end may have changed
the same at the same time.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from headgate.capture.engine.contracts.request_part import CoreCall, Operation, Result
from headgate.capture.probe import Probe, ProbeError
from headgate.capture.schema.errors import EngineStateError, RequestError, shown
from headgate.steering.core.audit import BY, OPERATOR, Actor, AuditEntry
from headgate.steering.core.probes import check_fits, open_probe
from headgate.steering.core.saes import NO_SAES, open_sae
from headgate.steering.documents.features import read_global_features
from headgate.steering.documents.gates import RuleScope, Strength, Whom, read_rule
from headgate.steering.documents.operations import read_site
from headgate.steering.documents.probes import Pooling, read_probe
from headgate.steering.documents.request import MODULE_FIELDS, read_global_ops, read_module, sum_tiers
from headgate.steering.documents.schema import Amount, Count, Name, has
from headgate.steering.documents.vectors import read_update
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.files.vector_files import load
from headgate.steering.probes.wire import to_wire as probe_to_wire
from headgate.steering.spec import SteeringSpec, to_wire
from headgate.steering.vectors.phase_vectors import TIERS, Steerable, check_name

_ATTEMPTS = 3


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


def set_global(
    document: Mapping[str, Any], steerable: Steerable, *, replace: bool, num_engines: int, by: Actor = OPERATOR
) -> Operation[SteeringStatus]:
    """Set global vectors, operations and features: a document with the keys `DOCUMENT_FIELDS`.

    Zeros take the vector of a site back, an empty list the operations of a tier, or the edits or SAEs of a field.
    """
    updates = [read_update(document.get(field), steerable, field) for field in MODULE_FIELDS]
    ops = read_global_ops(document, steerable)
    features = read_global_features(document, steerable)
    if not any(updates) and not ops and not features and not replace:
        raise RequestError(MODULE_FIELDS[0], "there is no vector, operation or feature to set; clear() takes all away")
    tiers = [update and update.vectors for update in updates]
    sum_tiers(tiers, steerable, MODULE_FIELDS)
    wire = {
        name: to_wire(dataclasses.replace(ops.get(name, SteeringSpec()), prefill=tier))
        for name, tier in zip(TIERS, tiers, strict=True)
    }
    for name, edits in features.items():
        wire[name] = to_wire(SteeringSpec(prefill_features=edits.prefill, decode_features=edits.decode))
    cleared = {
        name: [site.name for site in update.cleared] for name, update in zip(TIERS, updates, strict=True) if update
    }
    order = ("set_global", {"tiers": wire, "replace": replace, "cleared": cleared, "programs": [*ops, *features]})
    return (yield from _change_global(order, num_engines, by))


def clear_global(*, num_engines: int, by: Actor = OPERATOR) -> Operation[SteeringStatus]:
    """Remove all global vectors."""
    return (yield from _change_global(("clear_global", {}), num_engines, by))


def audit() -> Operation[list[AuditEntry]]:
    """Ask for the last changes of global vectors and modules."""
    answers: Sequence[list[AuditEntry]] = yield CoreCall(method="audit", args={})
    return answers[0]


def status() -> Operation[SteeringStatus]:
    """Ask for global vectors, modules and slots."""
    return _status((yield CoreCall(method="status", args={})))


def register(
    name: str,
    document: Mapping[str, Any],
    path: str | os.PathLike[str] | None,
    steerable: Steerable,
    num_engines: int,
    by: Actor = OPERATOR,
) -> Operation[ModuleStatus]:
    """Register a module from a document with the keys `DOCUMENT_FIELDS`, or from a file."""
    check_name(name, "name")
    wire = to_wire(_read(document, path, steerable))

    def attempt() -> Operation[ModuleStatus]:
        undo: tuple[str, Mapping[str, Any]] = ("unregister", with_actor(by.undo(None), name=name))
        if num_engines > 1 and name in _by_name((yield CoreCall(method="modules", args={}))[0]):
            undo = yield from _restoring(name, by)
        answers = yield CoreCall(method="register", args=with_actor(by, name=name, spec=wire), undo=undo)
        return _module(answers[0])

    return (yield from agreed(attempt, num_engines))


def unregister(name: str, num_engines: int, by: Actor = OPERATOR) -> Operation[ModuleStatus]:
    """Forget a module."""
    check_name(name, "name")
    undo = (yield from _restoring(name, by)) if num_engines > 1 else None
    answers = yield CoreCall(method="unregister", args=with_actor(by, name=name), undo=undo)
    return _module(answers[0])


def _restoring(name: str, by: Actor) -> Operation[tuple[str, Mapping[str, Any]]]:
    """Make the call that registers a module again as it is now, for the client that it belongs to."""
    (earlier, *_) = yield CoreCall(method="export_module", args={"name": name})
    (owner, *_) = yield CoreCall(method="owner", args={"name": name})
    return "register", with_actor(by.undo(owner), name=name, spec=earlier)


def with_actor(by: Actor, **args: Any) -> Mapping[str, Any]:
    """Arguments of a change, with who asks for it; the operator's own process need not say so."""
    return args if by == OPERATOR else {**args, BY: by.to_wire()}


def register_sae(
    name: str,
    path: str | os.PathLike[str],
    site: object,
    steerable: Steerable,
    num_engines: int,
    by: Actor = OPERATOR,
) -> Operation[SaeStatus]:
    """Register the SAE at a path; an earlier one of the name is replaced. Its files' checksum is computed here."""
    check_name(name, "name", "an SAE")
    if not steerable.max_sae_features:
        raise RequestError("name", NO_SAES)
    found = Path(path).absolute()
    where = None if site is None else read_site(site, "site")
    try:
        sae = open_sae(name, found, where, steerable)
    except (OSError, FeatureFileError) as error:
        raise RequestError("path", str(error)) from error
    args = {"name": name, "path": str(found), "site": None if where is None else where.name, "sha256": sae.sha256}

    def attempt() -> Operation[SaeStatus]:
        undo: tuple[str, Mapping[str, Any]] = ("unregister_sae", with_actor(by.undo(None), name=name))
        if num_engines > 1:
            (first, *_) = yield CoreCall(method="saes", args={})
            earlier = next((one for one in first if one["name"] == name), None)
            if earlier is not None:
                again = {key: earlier[key] for key in ("name", "site", "sha256")}
                undo = "register_sae", with_actor(by.undo(None), path=earlier["source"], **again)
        answers = yield CoreCall(method="register_sae", args=with_actor(by, **args), undo=undo)
        return msgspec.convert(answers[0], SaeStatus)

    return (yield from agreed(attempt, num_engines))


def saes() -> Operation[dict[str, SaeStatus]]:
    """Ask for the SAEs whose features can be changed, by name."""
    answers: Sequence[Sequence[Mapping[str, Any]]] = yield CoreCall(method="saes", args={})
    return {sae["name"]: msgspec.convert(sae, SaeStatus) for sae in answers[0]}


def modules() -> Operation[dict[str, ModuleStatus]]:
    """Ask for the registered modules, by name."""
    return _by_name((yield CoreCall(method="modules", args={}))[0])


def _read(document: Mapping[str, Any], path: str | os.PathLike[str] | None, steerable: Steerable) -> SteeringSpec:
    given = {field: value for field, value in document.items() if value is not None}
    if path is None:
        return read_module(given, steerable)
    if given:
        raise RequestError("path", f"give a file or vectors, not both; got a path and {', '.join(given)}")
    try:
        return load(path).spec(steerable)
    except OSError as error:
        raise RequestError("path", f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
    except ValueError as error:  # a VectorFileError, or a RequestError that names a tier of the file
        raise RequestError("path", f"{os.fspath(path)}: {error}") from error


def _change_global(order: tuple[str, Mapping[str, Any]], num_engines: int, by: Actor) -> Operation[SteeringStatus]:
    def attempt() -> Operation[SteeringStatus]:
        undo = None
        if num_engines > 1:
            (earlier, *_) = yield CoreCall(method="export_global", args={})
            undo = ("set_global", with_actor(by.undo(None), tiers=earlier, replace=True))
        return _status((yield CoreCall(method=order[0], args=with_actor(by, **order[1]), undo=undo)))

    return (yield from agreed(attempt, num_engines))


def agreed(attempt: Callable[[], Operation[Result]], num_engines: int) -> Operation[Result]:
    """Repeat a change until all engine cores hold the same."""
    for _ in range(_ATTEMPTS):
        result = yield from attempt()
        if num_engines == 1 or _status((yield CoreCall(method="status", args={}))).is_consistent:
            return result
    raise EngineStateError(
        f"steering: the {num_engines} engine cores do not agree after {_ATTEMPTS} attempts: others are changing the "
        "same; set or register it again when they have finished"
    )


def _status(answers: Sequence[Mapping[str, Any]]) -> SteeringStatus:
    first = answers[0]
    return SteeringStatus(
        shared=GlobalStatus(
            tiers=msgspec.convert(first["global"]["tiers"], dict[str, tuple[str, ...]]), **_content(first["global"])
        ),
        modules=_by_name(first["modules"]),
        slots=tuple(SlotStatus(**answer["slots"], waiting=answer["waiting"]) for answer in answers),
        is_consistent=all(_identity(answer) == _identity(first) for answer in answers),
    )


def _identity(answer: Mapping[str, Any]) -> tuple[Any, ...]:
    hashes = {module["name"]: module["hash"] for module in answer["modules"]}
    return answer["global"]["hash"], hashes, answer["saes"], answer["probes"], answer["rules"]


def _by_name(described: Sequence[Mapping[str, Any]]) -> dict[str, ModuleStatus]:
    return {module["name"]: _module(module) for module in described}


def _module(described: Mapping[str, Any]) -> ModuleStatus:
    return ModuleStatus(name=described["name"], **_content(described))


def _content(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of both phases, and its version."""
    given = [key for key in ("hash", "sites", "op_sites", "norms") if key in described]
    phases = {
        phase: msgspec.convert({key: described[key][phase] for key in given}, PhaseContent)
        for phase in ("prefill", "decode")
    }
    return {**phases, "version": described["version"]}


def _register_named(kind: str, name: str, content: object, num_engines: int, by: Actor) -> Operation[Mapping[str, Any]]:
    """Register a ``probe`` or a ``rule`` by its wire form; return its description by the first engine core."""

    def attempt() -> Operation[Mapping[str, Any]]:
        undo: tuple[str, Mapping[str, Any]] = (f"unregister_{kind}", with_actor(by.undo(None), name=name))
        if num_engines > 1 and (again := (yield from _restoring_named(kind, name, by))) is not None:
            undo = again
        args = with_actor(by, name=name, **{kind: content})
        answers: Sequence[Mapping[str, Any]] = yield CoreCall(method=f"register_{kind}", args=args, undo=undo)
        return answers[0]

    return (yield from agreed(attempt, num_engines))


def _unregister_named(kind: str, name: str, num_engines: int, by: Actor) -> Operation[Mapping[str, Any]]:
    """Forget a ``probe`` or a ``rule``; return its description by the first engine core."""
    undo = (yield from _restoring_named(kind, name, by)) if num_engines > 1 else None
    answers: Sequence[Mapping[str, Any]] = yield CoreCall(
        method=f"unregister_{kind}", args=with_actor(by, name=name), undo=undo
    )
    return answers[0]


def _restoring_named(kind: str, name: str, by: Actor) -> Operation[tuple[str, Mapping[str, Any]] | None]:
    """Make the call that registers a probe or rule again as it is now, for its client; None if there is none."""
    (earlier, *_) = yield CoreCall(method=f"export_{kind}", args={"name": name})
    if earlier is None:
        return None
    (owner, *_) = yield CoreCall(method="owner", args={"name": name, "of": kind})
    return f"register_{kind}", with_actor(by.undo(owner), name=name, **{kind: earlier})


ProbeSource = Probe | str | os.PathLike[str] | Mapping[str, Any]
"""A probe, a file of one, or a document of its fields."""


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


def register_probe(
    name: str, source: ProbeSource, steerable: Steerable, num_engines: int, by: Actor = OPERATOR
) -> Operation[ProbeStatus]:
    """Register a probe; an earlier one of the name is replaced."""
    check_name(name, "name", "a probe")
    wire = probe_to_wire(_read_probe(source, steerable))
    return msgspec.convert((yield from _register_named("probe", name, wire, num_engines, by)), ProbeStatus)


def unregister_probe(name: str, num_engines: int, by: Actor = OPERATOR) -> Operation[ProbeStatus]:
    """Forget a probe."""
    check_name(name, "name", "a probe")
    return msgspec.convert((yield from _unregister_named("probe", name, num_engines, by)), ProbeStatus)


def probes() -> Operation[dict[str, ProbeStatus]]:
    """Ask for the registered probes, by name."""
    answers: Sequence[Sequence[Mapping[str, Any]]] = yield CoreCall(method="probes", args={})
    return {found["name"]: msgspec.convert(found, ProbeStatus) for found in answers[0]}


def _read_probe(source: ProbeSource, steerable: Steerable) -> Probe:
    if isinstance(source, str | os.PathLike):
        try:
            return open_probe(Path(source), steerable)
        except (ProbeError, OSError) as error:
            raise RequestError("path", str(error)) from error
    if not isinstance(source, Probe | Mapping):
        raise RequestError("probe", f"expected a Probe, a path or an object of its fields, got {shown(source)}")
    probe = source if isinstance(source, Probe) else read_probe(source, steerable.hidden_size)
    try:
        check_fits(probe, steerable)
    except ProbeError as error:
        raise RequestError(error.field or "probe", error.message) from error
    return probe


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleStatus:
    """A registered rule.

    Attributes:
        name: Its name in requests and traces.
        applies_to: ``all``, ``opt_in`` or ``opt_out``.
        scope: On which rows it acts: ``this_token``, ``next_token`` or ``rest_of_request``.
        strength: ``"binary"``, ``{"proportional": gain}``, ``{"sigmoid": sharpness}`` or ``{"pid": {...}}``.
        probes: Names of the scores that it reads, as in traces.
        sites: That it reads and writes.
        observes: Whether nothing acts: it is traced and counted.
        sha256: Hex, of its content.
    """

    name: str
    applies_to: Whom
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


def dynamic() -> Operation[DynamicStatus]:
    """Ask for the activity of gates, rules and controllers."""
    answers: Sequence[Mapping[str, Any]] = yield CoreCall(method="dynamic", args={})
    rows, gates = Counter[str](), Counter[str]()
    for answer in answers:
        rows.update({rule["name"]: rule["rows"] for rule in answer["rules"]})
        gates.update(answer["gates"])
    rules = tuple(
        RuleActivity(
            name=rule["name"], applies_to=rule["applies_to"], observes=rule["observes"], rows=rows[rule["name"]]
        )
        for rule in answers[0]["rules"]
    )
    return DynamicStatus(
        probes=tuple(answers[0]["probes"]),
        rules=rules,
        gates=dict(gates),
        requests_with_gates=sum(answer["requests_with_gates"] for answer in answers),
        controllers=tuple(
            ControllerActivity.joined(each) for each in zip(*(answer["controllers"] for answer in answers), strict=True)
        ),
        latches=_summed([answer["latches"] for answer in answers]),
        queue=_summed(queues) if (queues := [answer["queue"] for answer in answers if answer["queue"]]) else None,
    )


def _summed(figures: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in figures) for name in figures[0]}


def register_rule(
    name: str, document: Mapping[str, Any], steerable: Steerable, num_engines: int, by: Actor = OPERATOR
) -> Operation[RuleStatus]:
    """Register a rule; an earlier one of the name is replaced."""
    wire = read_rule(name, document, steerable).to_wire()
    return msgspec.convert((yield from _register_named("rule", name, wire, num_engines, by)), RuleStatus)


def unregister_rule(name: str, num_engines: int, by: Actor = OPERATOR) -> Operation[RuleStatus]:
    """Forget a rule."""
    check_name(name, "name", "a rule")
    return msgspec.convert((yield from _unregister_named("rule", name, num_engines, by)), RuleStatus)


def rules() -> Operation[dict[str, RuleStatus]]:
    """Ask for the registered rules, by name."""
    answers: Sequence[Sequence[Mapping[str, Any]]] = yield CoreCall(method="rules", args={})
    return {found["name"]: msgspec.convert(found, RuleStatus) for found in answers[0]}
