"""What a part of headgate takes from a request, and offers to users, in the process that owns requests.

A part publishes a function that returns its `RequestPart` under the entry-point group ``headgate.requests``, by the
name of its section of ``additional_config["headgate"]``. Its fields are known in every process with vLLM in it, also
where the section is not configured: a request that uses them there is refused instead of being served as if it had
not asked.

Capture is no such part: its requests are answered with results, which these are not. It has a front end of its own.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from headgate.capture.schema.consumer import ModelInfo

GROUP = "headgate.requests"

Known = Mapping[str, Mapping[str, Any]]
"""What the engine core says about each registered name, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRequest:
    """What one request asks of one part, checked. Requests may share one: nothing in it changes.

    Attributes:
        wire: What travels to the engine in the part's section of the wire dict: plain values and bytes.
        field: A field of the part that the request set, for errors that concern all of it.
        names: Registered names that it refers to, each with the field that names it.
        content: The same as `wire`, as the part itself knows it.
    """

    wire: Mapping[str, Any]
    field: str
    names: Mapping[str, str]
    content: Any = None


class PartRequestReader(Protocol):
    """A part's fields in the requests of one engine. Called on any thread, event loops included."""

    def read(self, values: Mapping[str, Any]) -> PartRequest | None:
        """Check the fields that a request set, by name; None if they come to nothing. The values stay as they are.

        Raises:
            RequestError: Naming the field that is wrong.
        """
        ...

    def names(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        """`PartRequest.names` of the same fields, without a look at anything else in them.

        Raises:
            RequestError: If they cannot be read.
        """
        ...

    def check(self, wanted: PartRequest, known: Known) -> None:
        """Check what `wanted` refers to by name.

        Raises:
            RequestError: Naming the field, if a name is unknown or cannot be used together with the rest.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreCall:
    """One call of a part's method in every engine core of a front end; they answer in one order.

    Attributes:
        method: Of the part's half in the engine core.
        args: Plain values and bytes.
        undo: Method and arguments that take it back, for those engine cores that did it when another refused.
    """

    method: str
    args: Mapping[str, Any]
    undo: tuple[str, Mapping[str, Any]] | None = None


Result = TypeVar("Result")
Operation = Generator[CoreCall, Sequence[Any], Result]
"""What a user's call comes to: it yields calls, is sent each engine core's answer, and returns the result."""


class EngineCores(Protocol):
    """The engine cores behind one `LLM` or `AsyncLLM`.

    Attributes:
        num_engines: Data-parallel engine cores that this front end talks to.
    """

    @property
    def num_engines(self) -> int: ...

    def run(self, operation: Operation[Result]) -> Any:
        """The operation's result; for `AsyncLLM`, an awaitable of it.

        Raises:
            RequestError: As the engine cores refused it; then none of them has done it.
            EngineStateError: If only some could do it, and it could not be taken back.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPart:
    """One part of headgate, in the front end.

    Attributes:
        fields: The part's fields of `SamplingParams`, each with a line on what it holds.
        how_to_start: What an operator does to configure the section, as a sentence.
        open: Makes the reader for an engine, from the section of its configuration; raises `ConfigError`.
        names_method: Method of the part in the engine core that lists the registered names: objects with a "name".
        check_method: Method of the part in the engine core that says, by refusing, why a request could not run now; its
            arguments are ``spec``, a `PartRequest.wire`, and `field`.
        handle: Makes what ``LLM`` has under the section's name, for an engine that configures it.
        async_handle: The same for ``AsyncLLM``.
        check_section: Checks a section of the configuration; raises `ConfigError`.
        add_flags: Adds the part's flags to an argument group of vLLM's command line.
        read_flags: Turns them into a section, given the section that stands in ``additional_config`` (or None).
            Returns None if no flag was given, and takes the values out of the namespace.
    """

    fields: Mapping[str, str]
    how_to_start: str
    open: Callable[[Mapping[str, Any], ModelInfo], PartRequestReader]
    names_method: str
    check_method: str
    handle: Callable[[EngineCores, PartRequestReader], Any]
    async_handle: Callable[[EngineCores, PartRequestReader], Any]
    check_section: Callable[[Mapping[str, Any]], object]
    add_flags: Callable[[Any], None]
    read_flags: Callable[[Namespace, Mapping[str, Any] | None], dict[str, Any] | None]


@cache
def request_parts() -> Mapping[str, RequestPart]:
    """Every part that is installed, by the name of its section."""
    return {entry.name: entry.load()() for entry in entry_points(group=GROUP)}
