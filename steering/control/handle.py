"""``llm.steering`` and ``async_llm.steering``: global vectors, named modules, and what can be steered."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

from headgate.capture.engine.contracts.request_part import AsyncEngineCores, EngineCores
from headgate.capture.schema.sites import site_map
from headgate.steering.control import operations
from headgate.steering.control.operations import ModuleStatus, SteeringStatus
from headgate.steering.core.audit import OPERATOR, Actor, AuditEntry
from headgate.steering.requests.request_fields import MODULE_FIELDS
from headgate.steering.vectors.phase_vectors import Steerable

Path = str | os.PathLike[str]
Cores = TypeVar("Cores", EngineCores, AsyncEngineCores)


class _Described(Generic[Cores]):
    """The facts that are known without asking the engine.

    Attributes:
        steerable: The model and the limits of requests.
    """

    def __init__(self, cores: Cores, steerable: Steerable) -> None:
        self._cores: Cores = cores
        self.steerable = steerable

    def layers(self) -> dict[str, list[int]]:
        """Return the sites that can be steered: ``{hook point: layers}``; the final norm has no layers.

        ::

            llm.steering.layers()  # {"pre_attn": [0, 1, ...], "post_attn": [...], "post_mlp": [...]}
        """
        return site_map(self.steerable.sites)

    def __repr__(self) -> str:
        about = self.steerable
        return f"<steering of {len(about.sites)} sites of {about.hidden_size} values in {', '.join(self.layers())}>"


class Steering(_Described[EngineCores]):
    """Global vectors and named modules of an `LLM`; any thread that may use the `LLM`.

    Vectors are given in every form that a request's ``steering_vectors`` may have, and as `PhaseVectors`. Errors are
    `RequestError`, which are `ValueError`, and name the argument as their `field`; then nothing has changed.
    """

    def set(
        self, vectors: Any = None, *, prefill_vectors: Any = None, decode_vectors: Any = None, replace: bool = False
    ) -> SteeringStatus:
        """Add vectors to every request from the next step on, those that run included.

        ::

            llm.steering.set({"post_mlp": {12: direction}})
            llm.steering.set(decode_vectors={"post_mlp": {12: {"vector": direction, "scale": -2.0}}})

        Args:
            vectors: Acts at prompt and generated positions.
            prefill_vectors: Acts at prompt positions in addition.
            decode_vectors: Acts at generated positions in addition.
            replace: Remove everything else. Otherwise vectors replace those at the same site of the same tier, and
                zeros take them back.

        Raises:
            RequestError: If they cannot be read, or there is no room for them.
        """
        document = dict(zip(MODULE_FIELDS, (vectors, prefill_vectors, decode_vectors), strict=True))
        return self._cores.run(
            operations.set_global(document, self.steerable, replace=replace, num_engines=self._cores.num_engines)
        )

    def clear(self) -> SteeringStatus:
        """Remove all global vectors."""
        return self._cores.run(operations.clear_global(num_engines=self._cores.num_engines))

    def status(self) -> SteeringStatus:
        """Return global vectors, modules, and the vector slots in use."""
        return self._cores.run(operations.status())

    def register(
        self,
        name: str,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        path: Path | None = None,
    ) -> ModuleStatus:
        """Name vectors, so that requests need only say the name; an earlier module of the name is replaced.

        Requests that run already keep the content that the name had when they were made.

        ::

            llm.steering.register("calm", {"post_mlp": {12: direction}})
            llm.steering.register("calm", path="calm.safetensors")
            llm.generate(prompt, SamplingParams(steering_module_ref=("calm", 1.5)))

        Args:
            name: 1 to 256 printable characters.
            vectors: Acts at prompt and generated positions.
            prefill_vectors: Acts at prompt positions in addition.
            decode_vectors: Acts at generated positions in addition.
            path: A ``.safetensors``, ``.json`` or ``.gguf`` file in place of vectors; see `headgate.steering.load`.

        Raises:
            RequestError: If it cannot be read, or there is no room for it.
        """
        document = dict(zip(MODULE_FIELDS, (vectors, prefill_vectors, decode_vectors), strict=True))
        return self._cores.run(operations.register(name, document, path, self.steerable, self._cores.num_engines))

    def unregister(self, name: str) -> ModuleStatus:
        """Forget a module; requests that run already keep it.

        Raises:
            RequestError: If there is none of that name.
        """
        return self._cores.run(operations.unregister(name, self._cores.num_engines))

    def modules(self) -> dict[str, ModuleStatus]:
        """Return the registered modules, by name."""
        return self._cores.run(operations.modules())

    def audit(self) -> list[AuditEntry]:
        """Return the last 1000 changes of global vectors and modules, the newest last."""
        return self._cores.run(operations.audit())


class AsyncSteering(_Described[AsyncEngineCores]):
    """Global vectors and named modules of an `AsyncLLM`, on its event loop: every call is awaited.

    Vectors and files are read on a thread beside the loop; changes take effect in the order of the calls. With data
    parallelism each call reaches every engine core of this `AsyncLLM`, all or none. Changes are noted as those of `by`.
    """

    async def set(
        self,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        replace: bool = False,
        by: Actor = OPERATOR,
    ) -> SteeringStatus:
        """See `Steering.set`."""
        document = dict(zip(MODULE_FIELDS, (vectors, prefill_vectors, decode_vectors), strict=True))
        return await self._cores.run(
            operations.set_global(document, self.steerable, replace=replace, num_engines=self._cores.num_engines, by=by)
        )

    async def clear(self, *, by: Actor = OPERATOR) -> SteeringStatus:
        """See `Steering.clear`."""
        return await self._cores.run(operations.clear_global(num_engines=self._cores.num_engines, by=by))

    async def status(self) -> SteeringStatus:
        """See `Steering.status`."""
        return await self._cores.run(operations.status())

    async def register(
        self,
        name: str,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        path: Path | None = None,
        by: Actor = OPERATOR,
    ) -> ModuleStatus:
        """See `Steering.register`."""
        document = dict(zip(MODULE_FIELDS, (vectors, prefill_vectors, decode_vectors), strict=True))
        return await self._cores.run(
            operations.register(name, document, path, self.steerable, self._cores.num_engines, by)
        )

    async def unregister(self, name: str, *, by: Actor = OPERATOR) -> ModuleStatus:
        """See `Steering.unregister`."""
        return await self._cores.run(operations.unregister(name, self._cores.num_engines, by))

    async def modules(self) -> dict[str, ModuleStatus]:
        """See `Steering.modules`."""
        return await self._cores.run(operations.modules())

    async def audit(self) -> list[AuditEntry]:
        """See `Steering.audit`."""
        return await self._cores.run(operations.audit())
