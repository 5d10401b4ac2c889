"""A part's half where requests are made: it reads their fields there, and offers methods to users.

The hook ``headgate_requests`` of a part returns its `RequestPart`. Its fields are known in every process with vLLM in
it, also where the part's section is not configured: a request that uses them there is refused instead of being served
as if it had not asked.

Capture is no such part: its requests are answered with results, which these are not. It has a front end of its own.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headgate.capture.engine.contracts.core_calls import AsyncCoreClient, CoreClient
from headgate.capture.schema.batch import Document
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.positions import PositionSelector, check_known
from headgate.capture.schema.results import FindKept
from headgate.capture.schema.vocabulary import Vocabulary


class FlagGroup(Protocol):
    """An `argparse.ArgumentParser`, or a group of one."""

    def add_argument(self, *names: str, **options: Any) -> object:
        """Add a flag, as argparse does."""
        ...


Known = Mapping[str, Document]
"""The engine core's description of each registered name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRequest:
    """One request's fields of one part, checked. Requests may share one: nothing in it changes.

    Attributes:
        wire: The part's section of the `RequestWire`: plain values and bytes.
        field: A field of the part that the request set, for errors that concern all of it.
        names: Registered names that it refers to, each with the field that names it.
        content: The same as `wire`, as the part itself knows it.
        wants_notes: The part's notes about the request's steps come with its outputs: see its reader's `read_notes`.
        reads_every_row: Every row of the prompt is to be forwarded: blocks in the prefix cache are not read.
        owned_field: Field whose content belongs to the client that sent it; None if none does. The reader of requests
            puts that client's name into `wire`, as ``owner``; the part's own reader does not know who asks.
        positions: Selectors that must select something of the request's prompt, by the paths of their fields.
        knows_positions: Whether they may also select some positions of the answer; see `check_known`.
    """

    wire: Document
    field: str
    names: Mapping[str, str]
    content: object = None
    wants_notes: bool = False
    reads_every_row: bool = False
    owned_field: str | None = None
    positions: Mapping[str, PositionSelector] = dataclasses.field(default_factory=dict)
    knows_positions: bool = True

    def check_positions(self, num_prompt: int) -> None:
        """Check the positions that are asked for, now that the prompt's length is known.

        Raises:
            RequestError: Naming the field whose positions are none of such a prompt, or of the answer unknown.
        """
        for where, selector in self.positions.items():
            selected = selector.resolve(num_prompt, where)
            if not self.knows_positions:
                check_known(selected, num_prompt, where)


class PartRequestReader(Protocol):
    """A part's fields in the requests of one engine. Called on any thread, event loops included."""

    def read(self, values: Document) -> PartRequest | None:
        """Check the fields that a request set, by name; None if they come to nothing. The values stay as they are.

        Raises:
            RequestError: Naming the field that is wrong.
        """
        ...

    def names(self, values: Document) -> Mapping[str, str]:
        """Read `PartRequest.names` of the same fields, and nothing else in them.

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

    def has_sources(self, values: Document) -> bool:
        """Whether fields that a request set name rows that earlier requests kept, as far as can be seen unread."""
        return False

    def read_with(self, values: Document, find: FindKept) -> PartRequest | None:
        """Do as `read`, with the rows that `find` returns. In the context of the client's call.

        Raises:
            RequestError: Naming the field that is wrong.
        """
        raise NotImplementedError

    def read_notes(self, wanted: PartRequest, notes: Sequence[Any], end: int | None) -> Document:
        """Return values for a request's outputs, of JSON, by names of `RequestPart.answer_fields`.

        Args:
            wanted: The request.
            notes: About one of its samples, in order, as `core_part.CorePart` returned them; tuples may have become
                lists. Of an output of new tokens alone those since the last such output, of other outputs all; none
                if there are no new ones.
            end: Tokens of the prompt and of the output that were kept, if the output is the sample's last; else None.
                Rows at positions from ``end - 1`` on belong to no token that was kept.
        """
        raise NotImplementedError


class RequestPart(Protocol):
    """A part's fields of requests, its settings, and what it offers to users.

    Attributes:
        fields: The part's fields of `SamplingParams`, each with a line on what it holds.
        how_to_start: What an operator does to configure the section, as a sentence.
        names_method: Method of the part in the engine core that lists the registered names: objects with a "name".
        check_method: Method of the part in the engine core that refuses a request which could not run now; its
            arguments are ``spec``, a `PartRequest.wire`, and `field`.
        answer_fields: Fields that ask for something in the answer, each with the name that the answer has for it: of
            an attribute of each sample's ``CompletionOutput``, and of a key of each choice. False is as good as absent
            in them.
        nested: Names that are read within the part's fields and look like fields themselves, each with the fields that
            have it within them. Beside one of these it is refused; where there is none it belongs to another client.
    """

    @property
    def answer_fields(self) -> Mapping[str, str]: ...

    @property
    def nested(self) -> Mapping[str, Sequence[str]]: ...

    @property
    def fields(self) -> Mapping[str, str]: ...

    @property
    def how_to_start(self) -> str: ...

    @property
    def names_method(self) -> str: ...

    @property
    def check_method(self) -> str: ...

    def open(self, section: Document, model: ModelInfo, vocabulary: Vocabulary | None = None) -> PartRequestReader:
        """Make the reader of requests for an engine.

        Args:
            section: The part's section of the engine's configuration.
            model: The model that the engine serves.
            vocabulary: Its tokens.

        Raises:
            ConfigError: If the section is wrong.
        """
        ...

    def handle(self, cores: CoreClient, reader: PartRequestReader) -> object:
        """Make what ``LLM`` has under the part's name; `reader` is what `open` made for that engine."""
        ...

    def async_handle(self, cores: AsyncCoreClient, reader: PartRequestReader) -> object:
        """Make what ``AsyncLLM`` has under the part's name; `reader` is what `open` made for that engine."""
        ...

    def check_section(self, section: Document) -> object:
        """Check a section of the configuration.

        Raises:
            ConfigError: If it is wrong.
        """
        ...

    def add_flags(self, group: FlagGroup) -> None:
        """Add the part's flags to an argument group of vLLM's command line."""
        ...

    def read_flags(self, args: Namespace, section: Document | None) -> dict[str, object] | None:
        """Take the values of the flags out of `args` and make a section of them; None if no flag was given.

        Args:
            args: The parsed command line.
            section: The section that stands in ``additional_config``, if any.
        """
        ...
