"""The operator's calls of one engine core about SAEs: register one, and list them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headgate.capture.engine.contracts.core_part import CoreServices
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.core.saes.registry import Sae, SaeRegistry, open_sae
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.sae_sources import cross_stages
from headgate.steering.vectors.phase_vectors import Steerable, check_name

NO_SAES = "this server takes no SAEs; the operator starts it with --saes or --sae-root"


class SaeCalls:
    """The methods that front ends call by name. Engine thread only.

    Workers hold no SAEs: the programs that requests and modules bring hold the rows of their features.

    Args:
        saes: Of the engine core.
        steerable: The model; None if no SAE can be registered.
        services: Calls the workers.
        version: Returns the number of changes so far, for the audit.
    """

    def __init__(
        self, saes: SaeRegistry, steerable: Steerable | None, services: CoreServices, version: Callable[[], int]
    ) -> None:
        self._saes = saes
        self._services = services
        self._steerable = steerable
        self._version = version

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """The methods by their names."""
        return {"register_sae": self._register, "unregister_sae": self._unregister, "saes": self._described}

    def _register(self, name: str, path: str, site: str | None, sha256: str | None) -> dict[str, Any]:
        """Open the SAE at a path, whose checksum the front end computed; earlier requests keep what they read."""
        check_name(name, "name", "an SAE")
        if self._steerable is None or not self._steerable.max_sae_features:
            raise RequestError("name", NO_SAES)
        earlier = self._saes.find(name)
        if earlier is not None and earlier.is_encoded:
            raise RequestError(
                "name", f"SAE {name!r} is encoded in full (--sae-encode), which is settled at start; use another name"
            )
        try:
            sae = open_sae(name, Path(path), None if site is None else Site.parse(site), self._steerable, sha256)
        except (OSError, FeatureFileError) as error:
            raise RequestError("path", str(error)) from error
        self._check_stages(sae)
        self._saes.put(sae)
        return {**sae.described(), **self._audited(sae.sha256)}

    def _check_stages(self, sae: Sae) -> None:
        facts = sae.facts
        names = [site.name for site in facts.sites]
        if facts.is_transcoder and not all(self._services.call_workers("is_in_one_stage", {"sites": names})):
            raise RequestError("path", cross_stages(facts.sites))

    def _unregister(self, name: str) -> dict[str, Any]:
        """Forget an SAE, if it is there: where one engine core could not register it, the others take it back."""
        self._saes.remove(name)
        return self._audited(None)

    def _described(self) -> list[dict[str, object]]:
        """Return the descriptions of all SAEs."""
        return [sae.described() for sae in self._saes.all()]

    def _audited(self, sha256: str | None) -> dict[str, Any]:
        return {"hash": {"prefill": sha256, "decode": sha256}, "version": self._version()}
