"""``llm.steering`` and ``async_llm.steering``: what acts on everybody, named modules, and what can be steered.

With data parallelism each engine core has its own global vectors and modules. Every call goes to all of them; if one
refuses a change, it is undone in the others. After a change they are compared, since another front end may have changed
the same at the same time.
"""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from headgate.capture.engine.contracts.core_calls import AsyncCoreClient, CoreCall, CoreClient, Operation, Result
from headgate.capture.engine.contracts.request_part import FlagGroup, PartRequestReader
from headgate.capture.probe import Probe, ProbeError
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import EngineStateError, RequestError, shown
from headgate.capture.schema.shared_methods import Awaited, Blocking, shared
from headgate.capture.schema.sites import site_map
from headgate.capture.schema.vocabulary import Vocabulary
from headgate.steering.config import parse_config
from headgate.steering.control.status import (
    DynamicStatus,
    ModuleStatus,
    ProbeStatus,
    RuleStatus,
    SaeStatus,
    SteeringStatus,
    module_of,
    modules_of,
    status_of,
)
from headgate.steering.core.audit import BY, OPERATOR, Actor, AuditEntry
from headgate.steering.core.probes import open_probe, refuse_unfit
from headgate.steering.core.saes import NO_SAES, open_sae
from headgate.steering.documents.features import PhaseFeatures, read_global_features
from headgate.steering.documents.gates import read_rule
from headgate.steering.documents.operations import read_site
from headgate.steering.documents.probes import ProbeSource, read_probe
from headgate.steering.documents.request import (
    ANSWER_FIELDS,
    FIELD_DOCS,
    MODULE_FIELDS,
    NESTED_NAMES,
    SteeringDocument,
    SteeringReader,
    document_of,
    open_reader,
    read_global_ops,
    read_module,
    sum_tiers,
)
from headgate.steering.documents.vectors import read_update
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.files.vector_files import load
from headgate.steering.flags import add_flags, read_flags
from headgate.steering.programs.wire import content_to_wire
from headgate.steering.spec import SteeringSpec, to_wire
from headgate.steering.vectors.phase_vectors import TIERS, Steerable, check_name

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on


AnyPath = str | os.PathLike[str]
Cores = TypeVar("Cores", CoreClient, AsyncCoreClient)
T = TypeVar("T")

_ATTEMPTS = 3


class _Kind(NamedTuple):
    """The engine core's methods for what can be registered by name, and the argument that has its content."""

    register: str
    unregister: str
    field: str


_KINDS = {
    "module": _Kind("register", "unregister", "spec"),
    "probe": _Kind("register_probe", "unregister_probe", "probe"),
    "rule": _Kind("register_rule", "unregister_rule", "rule"),
}


class _SteeringCalls(Generic[Cores]):
    """The calls of `Steering` and of `AsyncSteering`; changes are noted as those of `by`.

    Attributes:
        steerable: The model and the limits of requests.
        sae_root: Folder whose SAEs clients of a server may register; None if none.
    """

    def __init__(self, cores: Cores, steerable: Steerable, sae_root: str | None = None) -> None:
        self._cores: Cores = cores
        self.steerable = steerable
        self.sae_root = sae_root

    def layers(self) -> dict[str, list[int]]:
        """Return the sites that can be steered: ``{hook point: layers}``; the final norm has no layers.

        ::

            llm.steering.layers()  # {"pre_attn": [0, 1, ...], "post_attn": [...], "post_mlp": [...]}
        """
        return site_map(self.steerable.sites)

    def op_layers(self) -> dict[str, list[int]]:
        """Return those of `layers` where operations can act: the operator's ``--steering-op-sites``."""
        return site_map(self.steerable.op_sites)

    def __repr__(self) -> str:
        about = self.steerable
        return f"<steering of {len(about.sites)} sites of {about.hidden_size} values in {', '.join(self.layers())}>"

    @shared
    def set(
        self, vectors: Any = None, *, replace: bool = False, by: Actor = OPERATOR, **others: Unpack[SteeringDocument]
    ) -> Operation[SteeringStatus]:
        """Steer every request with vectors, operations and features from the next step on, running ones included.

        ::

            llm.steering.set({"post_mlp": {12: direction}})
            llm.steering.set(decode_vectors={"post_mlp": {12: {"vector": direction, "scale": -2.0}}})
            llm.steering.set(ops=[ops.ablate(direction, "12.post_mlp")])
            llm.steering.set(decode_features=[{"sae": "gs2-17", "feature": 3124, "set": 38.5}])

        Args:
            vectors: Act at prompt and generated positions.
            replace: Remove everything else. Otherwise vectors replace those at the same site of the same tier, and
                zeros take them back; operations replace all of the same tier, edits of features and reconstructions
                all of the same argument, and an empty list takes them back.
            others: Vectors of other phases, operations, edits of features and reconstructions: the keys of
                `SteeringDocument`.

        Raises:
            RequestError: If they cannot be read, or there is no room for them.
        """
        document, steerable = document_of(vectors, others), self.steerable
        updates = [read_update(document.get(field), steerable, field) for field in MODULE_FIELDS]
        ops: dict[str, SteeringSpec] = read_global_ops(document, steerable)
        features: dict[str, PhaseFeatures] = read_global_features(document, steerable)
        if not any(updates) and not ops and not features and not replace:
            raise RequestError(
                MODULE_FIELDS[0], "there is no vector, operation or feature to set; clear() takes all away"
            )
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
        args: dict[str, Any] = {"tiers": wire, "replace": replace, "cleared": cleared, "programs": [*ops, *features]}
        return (yield from self._change_global("set_global", args, by))

    @shared
    def clear(self, *, by: Actor = OPERATOR) -> Operation[SteeringStatus]:
        """Remove all global vectors."""
        return (yield from self._change_global("clear_global", {}, by))

    def _change_global(self, method: str, args: Mapping[str, Any], by: Actor) -> Operation[SteeringStatus]:
        def attempt() -> Operation[SteeringStatus]:
            undo = None
            if self._cores.num_engines > 1:
                (earlier, *_) = yield CoreCall(method="export_global", args={})
                undo = ("set_global", with_actor(by.undo(None), tiers=earlier, replace=True))
            return status_of((yield CoreCall(method=method, args=with_actor(by, **args), undo=undo)))

        return (yield from self._agreed(attempt))

    def _agreed(self, attempt: Callable[[], Operation[Result]]) -> Operation[Result]:
        """Repeat a change until all engine cores hold the same."""
        num_engines = self._cores.num_engines
        for _ in range(_ATTEMPTS):
            result = yield from attempt()
            if num_engines == 1 or status_of((yield CoreCall(method="status", args={}))).is_consistent:
                return result
        raise EngineStateError(
            f"steering: the {num_engines} engine cores do not agree after {_ATTEMPTS} attempts: others are changing "
            "the same; set or register it again when they have finished"
        )

    @shared
    def status(self) -> Operation[SteeringStatus]:
        """Return global vectors, modules, and the vector slots in use."""
        return status_of((yield CoreCall(method="status", args={})))

    @shared
    def register(
        self,
        name: str,
        vectors: Any = None,
        *,
        path: AnyPath | None = None,
        by: Actor = OPERATOR,
        **others: Unpack[SteeringDocument],
    ) -> Operation[ModuleStatus]:
        """Name vectors and operations, so that requests need only say the name; an earlier module is replaced.

        Requests that run already keep the content that the name had when they were made.

        ::

            llm.steering.register("calm", {"post_mlp": {12: direction}})
            llm.steering.register("calm", path="calm.safetensors")
            llm.steering.register("ablate refusal", ops=[ops.ablate(direction, "12.post_mlp")])
            llm.generate(prompt, SamplingParams(steering_module_ref=("calm", 1.5)))

        Args:
            name: 1 to 256 printable characters.
            vectors: Act at prompt and generated positions.
            path: A file of any format in place of vectors, such as ``"calm.safetensors"`` or
                ``"evil_response_avg_diff.pt@layer=19"``; see `headgate.steering.load`.
            others: Vectors of other phases, operations, edits of features and reconstructions: the keys of
                `SteeringDocument`.

        Raises:
            RequestError: If it cannot be read, or there is no room for it.
        """
        check_name(name, "name")
        wire = to_wire(_read(document_of(vectors, others), path, self.steerable))
        return module_of((yield from self._registered("module", name, wire, by)))

    @shared
    def unregister(self, name: str, *, by: Actor = OPERATOR) -> Operation[ModuleStatus]:
        """Forget a module; requests that run already keep it.

        Raises:
            RequestError: If there is none of that name.
        """
        check_name(name, "name")
        return module_of((yield from self._unregistered("module", name, by)))

    def _registered(self, kind: str, name: str, content: object, by: Actor) -> Operation[Mapping[str, Any]]:
        """Register something of a `_KINDS` by its wire form; return its description by the first engine core."""
        registering, unregistering, field = _KINDS[kind]

        def attempt() -> Operation[Mapping[str, Any]]:
            undo: tuple[str, Mapping[str, Any]] = (unregistering, with_actor(by.undo(None), name=name))
            if self._cores.num_engines > 1 and (again := (yield from self._restoring(kind, name, by))) is not None:
                undo = again
            args = with_actor(by, name=name, **{field: content})
            answers: Sequence[Mapping[str, Any]] = yield CoreCall(method=registering, args=args, undo=undo)
            return answers[0]

        return (yield from self._agreed(attempt))

    def _unregistered(self, kind: str, name: str, by: Actor) -> Operation[Mapping[str, Any]]:
        """Forget something of a `_KINDS`; return its description by the first engine core."""
        undo = (yield from self._restoring(kind, name, by)) if self._cores.num_engines > 1 else None
        answers: Sequence[Mapping[str, Any]] = yield CoreCall(
            method=_KINDS[kind].unregister, args=with_actor(by, name=name), undo=undo
        )
        return answers[0]

    def _restoring(self, kind: str, name: str, by: Actor) -> Operation[tuple[str, Mapping[str, Any]] | None]:
        """Make the call that registers something again as it is now, for its client; None if there is none."""
        (earlier, *_) = yield CoreCall(method=f"export_{kind}", args={"name": name})
        if earlier is None:
            return None
        (owner, *_) = yield CoreCall(method="owner", args={"name": name, "of": kind})
        registering, _, field = _KINDS[kind]
        return registering, with_actor(by.undo(owner), name=name, **{field: earlier})

    @shared
    def modules(self) -> Operation[dict[str, ModuleStatus]]:
        """Return the registered modules, by name."""
        return modules_of((yield CoreCall(method="modules", args={}))[0])

    @shared
    def register_sae(self, name: str, path: AnyPath, site: Any = None, *, by: Actor = OPERATOR) -> Operation[SaeStatus]:
        """Register an SAE, so that requests can change its features; an earlier one of the name is replaced.

        ::

            llm.steering.register_sae("gs2-17", "gemma-scope-2-4b-it/resid_post/layer_17_width_16k_l0_medium")
            llm.generate(prompt, SamplingParams(steering_features=[{"sae": "gs2-17", "feature": 3124, "set": 38.5}]))

        Args:
            name: 1 to 256 printable characters.
            path: A file of ``headgate sae import``, or an SAE as it was downloaded.
            site: Where it acts, such as ``"17.post_mlp"``; None if the files name it. Operations must be declared
                there.

        Raises:
            RequestError: If it cannot be read, or does not fit the model.
        """
        check_name(name, "name", "an SAE")
        if not self.steerable.max_sae_features:
            raise RequestError("name", NO_SAES)
        found = Path(path).absolute()
        where = None if site is None else read_site(site, "site")
        try:
            sae = open_sae(name, found, where, self.steerable)
        except (OSError, FeatureFileError) as error:
            raise RequestError("path", str(error)) from error
        args = {"name": name, "path": str(found), "site": None if where is None else where.name, "sha256": sae.sha256}

        def attempt() -> Operation[SaeStatus]:
            undo: tuple[str, Mapping[str, Any]] = ("unregister_sae", with_actor(by.undo(None), name=name))
            if self._cores.num_engines > 1:
                (first, *_) = yield CoreCall(method="saes", args={})
                earlier = next((one for one in first if one["name"] == name), None)
                if earlier is not None:
                    again = {key: earlier[key] for key in ("name", "site", "sha256")}
                    undo = "register_sae", with_actor(by.undo(None), path=earlier["source"], **again)
            answers = yield CoreCall(method="register_sae", args=with_actor(by, **args), undo=undo)
            return msgspec.convert(answers[0], SaeStatus)

        return (yield from self._agreed(attempt))

    @shared
    def saes(self) -> Operation[dict[str, SaeStatus]]:
        """Return the SAEs whose features requests can change, by name."""
        return (yield from _listed("saes", SaeStatus))

    @shared
    def register_probe(self, name: str, probe: ProbeSource, *, by: Actor = OPERATOR) -> Operation[ProbeStatus]:
        """Register a probe, so that gates can name it; an earlier one of the name is replaced.

        Requests that run already keep the probe that the name stood for when they were made.

        ::

            llm.steering.register_probe("anger", "anger.safetensors")
            llm.steering.register_probe("anger", {"at": "12.post_mlp", "weight": direction, "bias": -0.5})

        Args:
            name: 1 to 256 printable characters.
            probe: A `Probe`, a file of one, or its fields: `headgate.steering.documents.probes.PROBE_FIELDS`.
                Operations must be declared at its site.

        Raises:
            RequestError: If it cannot be read, or does not fit the model.
        """
        check_name(name, "name", "a probe")
        wire = content_to_wire(_read_probe(probe, self.steerable))
        return msgspec.convert((yield from self._registered("probe", name, wire, by)), ProbeStatus)

    @shared
    def unregister_probe(self, name: str, *, by: Actor = OPERATOR) -> Operation[ProbeStatus]:
        """Forget a probe; requests that run already keep it.

        Raises:
            RequestError: If there is none of that name.
        """
        check_name(name, "name", "a probe")
        return msgspec.convert((yield from self._unregistered("probe", name, by)), ProbeStatus)

    @shared
    def probes(self) -> Operation[dict[str, ProbeStatus]]:
        """Return the probes that gates can name, by name."""
        return (yield from _listed("probes", ProbeStatus))

    @shared
    def audit(self) -> Operation[list[AuditEntry]]:
        """Return the last 1000 changes of global vectors, modules, SAEs, probes and rules, the newest last."""
        answers: Sequence[list[AuditEntry]] = yield CoreCall(method="audit", args={})
        return answers[0]

    @shared
    def register_rule(
        self, /, name: str, *, applies_to: Any, when: Any, then: Any, by: Actor = OPERATOR, **others: Any
    ) -> Operation[RuleStatus]:
        """Register a rule, which acts from the next step on, on requests that run too; an earlier one is replaced.

        Probes, modules and SAEs that it names stay for it as they are now, whatever is registered later.

        ::

            llm.steering.register_rule(
                "calm-down", applies_to="all", when={"probe": "anger", "above": 0.5}, then={"module": "calm"}
            )
            llm.steering.register_rule("watch", applies_to="opt_out", when={"probe": "anger"}, then="observe")

        Args:
            name: 1 to 256 printable characters.
            applies_to: ``"all"`` requests; ``"opt_in"``, those whose ``steering_rules`` name it; or ``"opt_out"``,
                beside these all that have no such field.
            when: The condition, as of ``steering_gates``.
            then: What it turns on, as there; ``"observe"`` for nothing.
            others: ``strength`` and ``scope``, as there.

        Raises:
            RequestError: If it cannot be read, names something that is not there, or there is no room.
        """
        document = {"applies_to": applies_to, "when": when, "then": then, **others}
        wire = content_to_wire(read_rule(name, document, self.steerable))
        return msgspec.convert((yield from self._registered("rule", name, wire, by)), RuleStatus)

    @shared
    def unregister_rule(self, name: str, *, by: Actor = OPERATOR) -> Operation[RuleStatus]:
        """Forget a rule; it acts on nothing from the next step on.

        Raises:
            RequestError: If there is none of that name.
        """
        check_name(name, "name", "a rule")
        return msgspec.convert((yield from self._unregistered("rule", name, by)), RuleStatus)

    @shared
    def rules(self) -> Operation[dict[str, RuleStatus]]:
        """Return the registered rules, by name."""
        return (yield from _listed("rules", RuleStatus))

    @shared
    def dynamic(self) -> Operation[DynamicStatus]:
        """Return probes, rules and gates, with the rows that they wrote so far."""
        return DynamicStatus.of((yield CoreCall(method="dynamic", args={})))


def with_actor(by: Actor, **args: Any) -> Mapping[str, Any]:
    """Arguments of a change, with who asks for it; the operator's own process need not say so."""
    return args if by == OPERATOR else {**args, BY: by.to_wire()}


def _listed(method: str, kind: type[T]) -> Operation[dict[str, T]]:
    """Ask for what is registered, by name."""
    answers: Sequence[Sequence[Mapping[str, Any]]] = yield CoreCall(method=method, args={})
    return {found["name"]: msgspec.convert(found, kind) for found in answers[0]}


def _read(document: Mapping[str, Any], path: AnyPath | None, steerable: Steerable) -> SteeringSpec:
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


def _read_probe(source: ProbeSource, steerable: Steerable) -> Probe:
    if isinstance(source, str | os.PathLike):
        try:
            return open_probe(Path(source), steerable)
        except (ProbeError, OSError) as error:
            raise RequestError("path", str(error)) from error
    if not isinstance(source, Probe | Mapping):
        raise RequestError("probe", f"expected a Probe, a path or an object of its fields, got {shown(source)}")
    probe = source if isinstance(source, Probe) else read_probe(source, steerable)
    refuse_unfit(probe, steerable)
    return probe


class Steering(_SteeringCalls[CoreClient], Blocking):
    """Global vectors and named modules of an `LLM`; any thread that may use the `LLM`.

    Vectors are given in every form that a request's ``steering_vectors`` may have, and as `PhaseVectors`. Errors are
    `RequestError`, which are `ValueError`, and name the argument as their `field`; then nothing has changed.
    """

    def _run(self, steps: Operation[T]) -> T:
        return self._cores.run(steps)


class AsyncSteering(_SteeringCalls[AsyncCoreClient], Awaited):
    """Global vectors and named modules of an `AsyncLLM`, on its event loop: `Steering`, with every call awaited.

    Vectors and files are read on a thread beside the loop; changes take effect in the order of the calls. With data
    parallelism each call reaches every engine core of this `AsyncLLM`, all or none.
    """

    async def _run(self, steps: Operation[T]) -> T:
        return await self._cores.run(steps)


class SteeringRequests:
    """Implements `headgate.capture.engine.contracts.request_part.RequestPart`."""

    fields = FIELD_DOCS
    answer_fields = ANSWER_FIELDS
    nested = NESTED_NAMES
    how_to_start = (
        "Start it with --enable-steering, with headgate.steering.LLM(..., steering=True), or with "
        "additional_config={'headgate': {'steering': {}}}"
    )
    names_method = "names"
    check_method = "check"

    def open(
        self, section: Mapping[str, Any], model: ModelInfo, vocabulary: Vocabulary | None = None
    ) -> SteeringReader:
        """Make the reader for an engine whose configuration has a ``steering`` section."""
        return open_reader(section, model, vocabulary)

    def handle(self, cores: CoreClient, reader: PartRequestReader) -> Steering:
        """Make ``LLM.steering``."""
        return Steering(cores, reader.steerable)  # type: ignore[attr-defined]

    def async_handle(self, cores: AsyncCoreClient, reader: PartRequestReader) -> AsyncSteering:
        """Make ``AsyncLLM.steering``."""
        return AsyncSteering(cores, reader.steerable, reader.sae_root)  # type: ignore[attr-defined]

    def check_section(self, section: Mapping[str, Any]) -> None:
        """Check a ``steering`` section; raises `ConfigError` if it is wrong."""
        parse_config(section)

    def add_flags(self, group: FlagGroup) -> None:
        """Add ``--enable-steering`` and its like."""
        add_flags(group)

    def read_flags(self, args: Namespace, section: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Make a section of the flags; None if none was given."""
        return read_flags(args, section)
