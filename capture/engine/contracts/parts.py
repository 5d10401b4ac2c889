"""The one interface between capture's engine and the other packages of headgate: `Part`. Each brings one.

Capture, steering and the consumers' commands are parts. A part's name is that of its section of
``additional_config["headgate"]``. `PARTS` lists them: capture never imports the others. The interface is headgate's own
and no extension point; others write consumers (``vllm.capture_consumers``) and controllers (``headgate.controllers``).

The modules of the classes in `PARTS` are imported in every process with headgate in it, the command line included, so
they import torch and vLLM inside their methods alone. An engine opens only the parts that its configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.results import CaptureResult, KeptRequest, StoredRequest

if TYPE_CHECKING:
    from fastapi import APIRouter, Request

    from headgate.capture.engine.contracts.core_part import CoreFacts, CorePart, CoreServices
    from headgate.capture.engine.contracts.request_part import RequestPart
    from headgate.capture.engine.contracts.worker_hooks import WorkerHooks
    from headgate.capture.monitoring.metrics import MetricsPart
    from headgate.capture.monitoring.verify_checks import CheckPart
    from headgate.capture.schema.vocabulary import Vocabulary

PARTS = {
    "capture": "headgate.capture.engine.part:CaptureAsPart",
    "consumers": "headgate.consumers.part:ConsumersAsPart",
    "steering": "headgate.steering.part:SteeringAsPart",
}
"""Module and class of each part, by its name, in alphabetical order."""

Answer = TypeVar("Answer")


class RouteClient(NamedTuple):
    """The client of a request.

    Attributes:
        key: Name of the key that it was let in with; None if it needed none.
        address: At the other end of its connection; None if it has none.
        is_bound: Whether its key has a name of its own and is no operator's: others' modules are not its to change.
        forwarded: The address that its request says it was forwarded for (``X-Forwarded-For``); anybody can write that.
    """

    key: str | None
    address: str | None
    is_bound: bool
    forwarded: str | None = None


class RouteServices(Protocol):
    """Services of the server to one part's routes, which lie under ``/v1/``, where its API key covers them.

    Event loop only. An error that a route raises is answered with vLLM's own error bodies: a `RequestError` with status
    400 and the field as ``param``.

    Attributes:
        engine: Returns the server's `AsyncLLM`, or None while it is not there.
    """

    engine: Callable[[], Any]

    def handle(self) -> Any:
        """Return the attribute of ``AsyncLLM`` under the part's name.

        Raises:
            fastapi.HTTPException: With status 404 and how to start the server with the part, if it runs without.
        """
        ...

    async def require_key(self, request: Request) -> None:
        """Check a request, as a FastAPI dependency.

        Raises:
            fastapi.HTTPException: With status 403, unless the request carries one of the part's keys.
        """
        ...

    def has_key(self, request: Request) -> bool:
        """Whether `require_key` would let a request pass."""
        ...

    async def require_admin(self, request: Request) -> None:
        """Check a request for a key with the role ``admin``, as a FastAPI dependency.

        Raises:
            fastapi.HTTPException: With status 403, if it has none.
        """
        ...

    def client(self, request: Request) -> RouteClient:
        """Return the client of a request that `require_key` has let pass."""
        ...

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Read the body of a request as an object: JSON, or msgpack with raw bytes.

        Raises:
            RequestError: If it cannot be decoded, or is no object.
            fastapi.HTTPException: With status 415, if it is of neither type.
        """
        ...

    def find_kept(self, name: str, sample_index: int, field: str) -> KeptRequest:
        """Find the rows that the client at hand has kept; see `headgate.capture.schema.results.FindKept`.

        Raises:
            RequestError: Naming ``request`` or ``sample`` below `field`.
            fastapi.HTTPException: With status 403, if the client may not capture.
        """
        ...

    async def vocabulary(self) -> Vocabulary:
        """Return the tokens of the model that is served.

        Raises:
            RequestError: If the server has no tokenizer.
        """
        ...

    async def score(self, prompt: Sequence[int], token_ids: Sequence[int], fields: Document) -> Sequence[float]:
        """Generate one token after `prompt` and return the logprobs that some tokens had there.

        The request is admitted and refused as any other. Cancelling the call ends it.

        Args:
            prompt: Tokens.
            token_ids: Tokens to score.
            fields: Of parts, as a request has them.

        Raises:
            RequestError: As a request with these fields; also if this server cannot score chosen tokens.
            OverloadedError: If too many others want the same.
        """
        ...

    async def read_prompt(self, prompt: Sequence[int], instance: str, spec: object) -> CaptureResult:
        """Return what a consumer makes of a prompt; one token is generated and thrown away.

        Args:
            prompt: Tokens.
            instance: The consumer's name in requests.
            spec: What it gets of the prompt, as a request has it.

        Raises:
            RequestError: As a request with that spec.
            OverloadedError: If too many others want the same.
        """
        ...

    def client_errors(self) -> AbstractContextManager[None]:
        """Make a context in which each `RequestError` becomes an answer with status 400."""
        ...


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
