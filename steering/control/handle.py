"""``llm.steering`` and ``async_llm.steering``: what acts on everybody, named modules, and what can be steered."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headgate.capture.engine.contracts.request_part import FlagGroup, Operation, PartRequestReader
from headgate.capture.engine.core.core_calls import AsyncCoreClient, CoreClient
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.shared_methods import Awaited, Blocking, shared
from headgate.capture.schema.sites import site_map
from headgate.capture.schema.vocabulary import Vocabulary
from headgate.steering.config import parse_config
from headgate.steering.control import operations
from headgate.steering.control.operations import (
    DynamicStatus,
    ModuleStatus,
    ProbeSource,
    ProbeStatus,
    RuleStatus,
    SaeStatus,
    SteeringStatus,
)
from headgate.steering.core.audit import OPERATOR, Actor, AuditEntry
from headgate.steering.documents.request import (
    ANSWER_FIELDS,
    FIELD_DOCS,
    NESTED_NAMES,
    SteeringDocument,
    SteeringReader,
    document_of,
    open_reader,
)
from headgate.steering.flags import add_flags, read_flags
from headgate.steering.vectors.phase_vectors import Steerable

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on


Path = str | os.PathLike[str]
Cores = TypeVar("Cores", CoreClient, AsyncCoreClient)
T = TypeVar("T")


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
        document = document_of(vectors, others)
        return operations.set_global(
            document, self.steerable, replace=replace, num_engines=self._cores.num_engines, by=by
        )

    @shared
    def clear(self, *, by: Actor = OPERATOR) -> Operation[SteeringStatus]:
        """Remove all global vectors."""
        return operations.clear_global(num_engines=self._cores.num_engines, by=by)

    @shared
    def status(self) -> Operation[SteeringStatus]:
        """Return global vectors, modules, and the vector slots in use."""
        return operations.status()

    @shared
    def register(
        self,
        name: str,
        vectors: Any = None,
        *,
        path: Path | None = None,
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
        document = document_of(vectors, others)
        return operations.register(name, document, path, self.steerable, self._cores.num_engines, by)

    @shared
    def unregister(self, name: str, *, by: Actor = OPERATOR) -> Operation[ModuleStatus]:
        """Forget a module; requests that run already keep it.

        Raises:
            RequestError: If there is none of that name.
        """
        return operations.unregister(name, self._cores.num_engines, by)

    @shared
    def modules(self) -> Operation[dict[str, ModuleStatus]]:
        """Return the registered modules, by name."""
        return operations.modules()

    @shared
    def register_sae(self, name: str, path: Path, site: Any = None, *, by: Actor = OPERATOR) -> Operation[SaeStatus]:
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
        operation = operations.register_sae(name, path, site, self.steerable, self._cores.num_engines, by)
        return operation

    @shared
    def saes(self) -> Operation[dict[str, SaeStatus]]:
        """Return the SAEs whose features requests can change, by name."""
        return operations.saes()

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
        engines = self._cores.num_engines
        return operations.register_probe(name, probe, self.steerable, engines, by)

    @shared
    def unregister_probe(self, name: str, *, by: Actor = OPERATOR) -> Operation[ProbeStatus]:
        """Forget a probe; requests that run already keep it.

        Raises:
            RequestError: If there is none of that name.
        """
        return operations.unregister_probe(name, self._cores.num_engines, by)

    @shared
    def probes(self) -> Operation[dict[str, ProbeStatus]]:
        """Return the probes that gates can name, by name."""
        return operations.probes()

    @shared
    def audit(self) -> Operation[list[AuditEntry]]:
        """Return the last 1000 changes of global vectors, modules, SAEs, probes and rules, the newest last."""
        return operations.audit()

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
        return operations.register_rule(name, document, self.steerable, self._cores.num_engines, by)

    @shared
    def unregister_rule(self, name: str, *, by: Actor = OPERATOR) -> Operation[RuleStatus]:
        """Forget a rule; it acts on nothing from the next step on.

        Raises:
            RequestError: If there is none of that name.
        """
        return operations.unregister_rule(name, self._cores.num_engines, by)

    @shared
    def rules(self) -> Operation[dict[str, RuleStatus]]:
        """Return the registered rules, by name."""
        return operations.rules()

    @shared
    def dynamic(self) -> Operation[DynamicStatus]:
        """Return probes, rules and gates, with the rows that they wrote so far."""
        return operations.dynamic()


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
    """Implements `RequestPart`, `AnsweringPart` and `NestingPart` of `capture.engine.contracts.request_part`."""

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
