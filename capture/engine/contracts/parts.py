"""The one interface between capture's engine and the other packages of headgate: `Part`. Each brings one.

Capture, steering and the consumers' commands are parts. A part's name is that of its section of
``additional_config["headgate"]``. `PARTS` lists them: capture never imports the others. The interface is headgate's own
and no extension point; others write consumers (``vllm.capture_consumers``) and controllers (``headgate.controllers``).

The modules of the classes in `PARTS` are imported in every process with headgate in it, the command line included, so
they import torch and vLLM inside their methods alone. An engine opens only the parts that its configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.results import StoredRequest

if TYPE_CHECKING:
    from fastapi import APIRouter

    from headgate.capture.engine.contracts.core_part import CoreFacts, CorePart
    from headgate.capture.engine.contracts.request_part import RequestPart
    from headgate.capture.engine.contracts.worker_hooks import WorkerHooks
    from headgate.capture.engine.core.part_services import CoreServices
    from headgate.capture.engine.server.plugin_routes import RouteServices
    from headgate.capture.monitoring.metrics import MetricsPart
    from headgate.capture.monitoring.verify_checks import CheckPart

PARTS = {
    "capture": "headgate.capture.engine.part:CaptureAsPart",
    "consumers": "headgate.consumers.part:ConsumersAsPart",
    "steering": "headgate.steering.part:SteeringAsPart",
}
"""Module and class of each part, by its name, in alphabetical order."""

Answer = TypeVar("Answer")


class Part:
    """A part of headgate. The methods of this class bring nothing; a part overrides those for what it brings.

    Args:
        name: The part's.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def brings(self, method: str) -> bool:
        """Whether the part overrides the method of that name."""
        return getattr(type(self), method) is not getattr(Part, method)

    def worker(self, section: Document) -> WorkerHooks | None:
        """Make the part's half in one vLLM worker, right after the worker loaded its model.

        Returns:
            None if the section leaves it nothing to do.

        Raises:
            ConfigError: If the section is wrong.
        """
        return None

    def refused_with_drafts(self, section: Document) -> Iterable[str]:
        """Say what of the section cannot be served with speculative decoding, why, and what to do instead."""
        return ()

    def core(self, facts: CoreFacts, section: Document, services: CoreServices) -> CorePart:
        """Make the part's half in one engine core, after its workers loaded the model. One part alone has one.

        Raises:
            ConfigError: If the section is wrong.
        """
        raise NotImplementedError

    def takes_actions(self, section: Document) -> bool:
        """Whether the part's half in the engine core takes actions of capture consumers (`CoreServices.actions`).

        Raises:
            ConfigError: If the section is wrong.
        """
        return False

    def requests(self) -> RequestPart | None:
        """Make the part's half where requests are made. Asked once in every process with vLLM in it."""
        return None

    def routes(self, services: RouteServices) -> APIRouter | None:
        """Make the part's HTTP routes under ``/v1/``. Asked once in every API server, before the engine exists."""
        return None

    def metrics(self) -> MetricsPart | None:
        """Make the part's share of the server's ``/metrics``. Asked in API servers."""
        return None

    def commands(self) -> Mapping[str, tuple[str, str]]:
        """Name the part's sub-commands of ``headgate``: ``("module:attribute", "What it does.")`` of each.

        The attribute is a function, which typer makes a command of, or a `typer.Typer`; imported when it is called.
        """
        return {}

    def captures(self, root: str) -> Iterable[StoredRequest] | None:
        """Open a root of captured rows for commands of other parts; None if it is none of this part's.

        Raises:
            CaptureFileError: If there is no such folder.
        """
        return None

    def checks(self) -> CheckPart | None:
        """Make the part's share of ``headgate verify``."""
        return None


@cache
def load_part(name: str) -> Part:
    """Load the part of that name, a key of `PARTS`; no other is imported."""
    module, _, attribute = PARTS[name].partition(":")
    part: Part = getattr(import_module(module), attribute)(name)
    return part


def worker_part(name: str) -> Part:
    """Load the part of a section of ``additional_config["headgate"]``.

    Raises:
        ConfigError: If no part has such a section.
    """
    if name in PARTS and load_part(name).brings("worker"):
        return load_part(name)
    known = ", ".join(part for part in PARTS if load_part(part).brings("worker"))
    raise ConfigError(f"additional_config['headgate'] has no section {name!r}; known: {known}")


def collect(ask: Callable[[Part], Answer | None]) -> dict[str, Answer]:
    """Ask each part, and return the answers that are not None, by name."""
    return {name: found for name in PARTS if (found := ask(load_part(name))) is not None}


@cache
def request_parts() -> Mapping[str, RequestPart]:
    """Return the parts that have fields of requests, by the name of their section."""
    return collect(lambda part: part.requests())


@cache
def metrics_parts() -> Mapping[str, MetricsPart]:
    """Return the parts that have metrics, by the name of their section."""
    return collect(lambda part: part.metrics())


@cache
def check_parts() -> Mapping[str, CheckPart]:
    """Return the parts that ``headgate verify`` checks, by the name of their section."""
    return collect(lambda part: part.checks())


def core_part_names() -> frozenset[str]:
    """Return the names of the parts that have a half in the engine core."""
    return frozenset(name for name in PARTS if load_part(name).brings("core"))


def stored_requests(root: str) -> Iterable[StoredRequest]:
    """Open a folder of captured rows by the first part that can.

    Raises:
        ConfigError: If no part opens it.
        CaptureFileError: If there is no such folder, or, while it is iterated, if a file of it is damaged.
    """
    found = next(iter(collect(lambda part: part.captures(root)).values()), None)
    if found is None:
        raise ConfigError(f"{root}: no part of headgate opens folders of captured rows")
    return found
