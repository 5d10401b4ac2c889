"""The one way in which a part joins headgate: hook implementations, published under the group ``headgate.parts``.

Capture, steering and the consumers' commands are parts, and so can be another author's package. A part is an
entry point ``NAME = "package.module"`` (or ``"package.module:object"``): the name is the part's, and that of its
section of ``additional_config["headgate"]``; the module or object implements any of the hooks of `PartSpecs`, each
marked with `headgate.capture.hookimpl`. pluggy checks their names and arguments when the part is loaded::

    from headgate.capture import hookimpl

    @hookimpl
    def headgate_worker(section):
        from my_package.worker import MyWorkerPart  # imports torch: only where it is needed

        return MyWorkerPart(section)

The module is imported in every process with headgate in it, the command line included, so it imports torch and vLLM
inside its functions alone. An engine opens only the parts that its configuration names. Where all that are installed
are asked (request fields, routes, metrics, checks, commands), one that fails is logged and left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.part_hooks import checked_hooks, hookspec
from headgate.capture.schema.sites import Site

if TYPE_CHECKING:
    from fastapi import APIRouter

    from headgate.capture.engine.contracts.core_part import CoreFacts, CorePart, CoreServices
    from headgate.capture.engine.contracts.request_part import RequestPart
    from headgate.capture.engine.contracts.route_part import RouteServices
    from headgate.capture.monitoring.metrics import MetricsPart
    from headgate.capture.monitoring.verify_checks import CheckPart


class StoredRequest(Protocol):
    """One request's rows, read when they are asked for."""

    @property
    def tag(self) -> str:
        """Its folder."""

    @property
    def request_id(self) -> str:
        """The client's name for it, or the request's own id."""

    @property
    def sites(self) -> Sequence[Site]:
        """In the order of the forward pass."""

    @property
    def num_rows(self) -> int:
        """Rows per site."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Among others ``model``, its name as the operator gave it, ``num_prompt_tokens`` and ``num_tokens``."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 ``[rows]``, ascending: the absolute position of each row."""

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64 ``[rows]``: the token whose forward gave the row."""

    def numpy(self, site: Site) -> npt.NDArray[Any]:
        """``[rows, hidden]`` in float16 or float32."""


logger = logging.getLogger("headgate")

GROUP = "headgate.parts"

Found = TypeVar("Found")


class PartSpecs:
    """The hooks by which a part joins. A part leaves out what it does not bring; None stands for nothing, too."""

    @hookspec(firstresult=True)
    def headgate_worker(self, section: Document) -> object | None:
        """Make the part's half in one vLLM worker, right after the worker loaded its model.

        Returns:
            An implementer of hooks of `worker_hooks.WorkerHooks`; None if the section leaves it nothing to do.

        Raises:
            ConfigError: If the section is wrong.
        """

    @hookspec(firstresult=True)
    def headgate_core(self, facts: CoreFacts, section: Document, services: CoreServices) -> CorePart:  # type: ignore[empty-body]
        """Make the part's half in one engine core, after its workers loaded the model.

        Raises:
            ConfigError: If the section is wrong.
        """

    @hookspec(firstresult=True)
    def headgate_takes_actions(self, section: Document) -> bool | None:
        """Whether the part's half in the engine core takes actions of capture consumers (`CoreServices.actions`).

        Raises:
            ConfigError: If the section is wrong.
        """

    @hookspec(firstresult=True)
    def headgate_requests(self) -> RequestPart | None:
        """Make the part's half where requests are made. Asked once in every process with vLLM in it."""

    @hookspec(firstresult=True)
    def headgate_routes(self, services: RouteServices) -> APIRouter | None:
        """Make the part's HTTP routes under ``/v1/``. Asked once in every API server, before the engine exists."""

    @hookspec(firstresult=True)
    def headgate_metrics(self) -> MetricsPart | None:
        """Make the part's share of the server's ``/metrics``. Asked in API servers."""

    @hookspec(firstresult=True)
    def headgate_commands(self) -> Mapping[str, str | tuple[str, str]] | None:
        """Name the part's sub-commands of ``headgate``, each with ``"module:attribute"``.

        The attribute is a function, which typer makes a command of, or a `typer.Typer`; imported when it is called.
        ``("module:attribute", "What it does.")`` also brings the line for ``headgate --help``, which then imports
        nothing.
        """

    @hookspec(firstresult=True)
    def headgate_captures(self, root: str) -> Iterable[StoredRequest] | None:
        """Open a root of captured rows for commands of other parts; None if it is none of this part's.

        Raises:
            CaptureFileError: If there is no such folder.
        """

    @hookspec(firstresult=True)
    def headgate_checks(self) -> CheckPart | None:
        """Make the part's share of ``headgate verify``."""


class Part:
    """One part that is installed: its hooks, checked, with their types.

    Args:
        name: Of its entry point.
        plugin: The module or object with the implementations.

    Raises:
        pluggy.PluginValidationError: If it implements a hook that does not exist, or with other arguments.
    """

    def __init__(self, name: str, plugin: object) -> None:
        self.name = name
        self._hook = checked_hooks(PartSpecs, {name: plugin}).hook

    def implements(self, hook: str) -> bool:
        """Whether the part has an implementation of the hook of that name."""
        return bool(getattr(self._hook, hook).get_hookimpls())

    def worker(self, section: Document) -> object | None:
        """Call ``headgate_worker``."""
        worker: object | None = self._hook.headgate_worker(section=section)
        return worker

    def core(self, facts: CoreFacts, section: Document, services: CoreServices) -> CorePart:
        """Call ``headgate_core``."""
        core: CorePart = self._hook.headgate_core(facts=facts, section=section, services=services)
        return core

    def takes_actions(self, section: Document) -> bool:
        """Call ``headgate_takes_actions``."""
        return bool(self._hook.headgate_takes_actions(section=section))

    def requests(self) -> RequestPart | None:
        """Call ``headgate_requests``."""
        requests: RequestPart | None = self._hook.headgate_requests()
        return requests

    def routes(self, services: RouteServices) -> APIRouter | None:
        """Call ``headgate_routes``."""
        routes: APIRouter | None = self._hook.headgate_routes(services=services)
        return routes

    def metrics(self) -> MetricsPart | None:
        """Call ``headgate_metrics``."""
        metrics: MetricsPart | None = self._hook.headgate_metrics()
        return metrics

    def commands(self) -> Mapping[str, str | tuple[str, str]]:
        """Call ``headgate_commands``."""
        return self._hook.headgate_commands() or {}

    def captures(self, root: str) -> Iterable[StoredRequest] | None:
        """Call ``headgate_captures``."""
        found: Iterable[StoredRequest] | None = self._hook.headgate_captures(root=root)
        return found

    def checks(self) -> CheckPart | None:
        """Call ``headgate_checks``."""
        checks: CheckPart | None = self._hook.headgate_checks()
        return checks


def part_names() -> list[str]:
    """Return the names of the installed parts, in alphabetical order; reads the metadata of every installed package."""
    return sorted(entry_points(group=GROUP).names)


def load_part(name: str) -> Part:
    """Load the installed part of that name; no other is imported.

    Raises:
        ConfigError: If there is none, or it cannot be imported, or its hooks are not those of `PartSpecs`.
    """
    found = entry_points(group=GROUP)
    if name not in found.names:
        raise ConfigError(f"no part {name!r} is installed; installed: {', '.join(sorted(found.names))}")
    return _load(name, found[name].value)


@cache
def _load(name: str, value: str) -> Part:
    try:
        return Part(name, EntryPoint(name, value, GROUP).load())
    except Exception as error:
        raise ConfigError(f"part {name!r} cannot be loaded from {value}: {type(error).__name__}: {error}") from error


def worker_part(name: str) -> Part:
    """Load the part of a section of ``additional_config["headgate"]``.

    Raises:
        ConfigError: If no installed part has such a section, or it cannot be loaded.
    """
    if name in part_names():
        part = load_part(name)
        if part.implements("headgate_worker"):
            return part
    known = ", ".join(collect(lambda part: part.implements("headgate_worker") or None))
    raise ConfigError(f"additional_config['headgate'] has no section {name!r}; known: {known}")


def collect(ask: Callable[[Part], Found | None], needed: Collection[str] = ()) -> dict[str, Found]:
    """Ask each installed part, and return the answers by name.

    Args:
        ask: Returns None for a part that brings nothing.
        needed: Parts whose failure is the caller's to know; that of any other part is logged, and it is left out.

    Raises:
        Exception: What loading or asking a part of `needed` raised.
    """
    collected = {}
    for name in part_names():
        try:
            found = ask(load_part(name))
        except Exception:
            if name in needed:
                raise
            logger.exception("headgate: part %r is left out", name)
            continue
        if found is not None:
            collected[name] = found
    return collected


@cache
def request_parts() -> Mapping[str, RequestPart]:
    """Return the installed parts that have fields of requests, by the name of their section."""
    return collect(Part.requests)


@cache
def metrics_parts() -> Mapping[str, MetricsPart]:
    """Return the installed parts that have metrics, by the name of their section."""
    return collect(Part.metrics)


@cache
def check_parts() -> Mapping[str, CheckPart]:
    """Return the installed parts that ``headgate verify`` checks, by the name of their section."""
    return collect(Part.checks)


@cache
def core_part_names() -> frozenset[str]:
    """Return the names of the installed parts that have a half in the engine core.

    Read once for a process: it takes 10 ms and more, and requests arrive on a busy thread.
    """
    return frozenset(collect(lambda part: part.implements("headgate_core") or None))


def stored_requests(root: str) -> Iterable[StoredRequest]:
    """Open a folder of captured rows by the first part that can.

    Raises:
        ConfigError: If no installed part opens it.
        CaptureFileError: If there is no such folder, or, while it is iterated, if a file of it is damaged.
    """
    for name in part_names():
        found = load_part(name).captures(root)
        if found is not None:
            return found
    raise ConfigError(f"{root}: no installed part opens folders of captured rows")
