"""The front end of one engine, whatever is configured: what requests ask of each part, and who refuses what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace

from headgate.capture.engine.access.caller import owner_of_request
from headgate.capture.engine.contracts.core_calls import CoreCall, Operation, lift
from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.contracts.request_part import (
    Known,
    PartRequest,
    PartRequestReader,
    RequestPart,
)
from headgate.capture.engine.contracts.wire_format import OVERLOADED
from headgate.capture.engine.requests.call_context import Notes, taken
from headgate.capture.engine.requests.capture_frontend import FrontEnd
from headgate.capture.engine.requests.capture_request import refuse_unconfigured
from headgate.capture.engine.requests.sampling_params import (
    CAPTURE_FIELDS,
    CaptureRequest,
    HeadgateRequest,
    is_plain,
    read_fields,
    refuse_forged,
    refuse_unknown_in,
)
from headgate.capture.engine.vllm_types import Engine, RequestOutput, SamplingParams
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import OverloadedError, RequestError
from headgate.capture.schema.results import KeptRequest

REQUEST_READER = "_headgate_reader"
"""Attribute of vLLM's `InputProcessor`: its `RequestReader`."""


class OpenPart:
    """A part whose section an engine configures.

    The registered names are a cache: the engine core is the authority, and is asked again when a check fails.

    Attributes:
        name: Of its section.
        part: What is installed.
        reader: Reads its fields.
        known: What the engine core said last about each registered name.
        call_lock: Orders the operations of an `AsyncLLM`; see `AsyncCoreClient`.
    """

    def __init__(self, name: str, part: RequestPart, reader: PartRequestReader) -> None:
        self.name = name
        self.part = part
        self.reader = reader
        self.known: Known = {}
        self.call_lock = asyncio.Lock()

    def confirm(self, wanted: PartRequest) -> Operation[None]:
        """Ask the engine cores for their names, and check those in `wanted`.

        Raises:
            RequestError: If they cannot be used.
        """
        answers = yield CoreCall(method=self.part.names_method, args={})
        first, *others = [{str(entry["name"]): entry for entry in answer} for answer in answers]
        self.known = {name: entry for name, entry in first.items() if all(name in other for other in others)}
        self.reader.check(wanted, self.known)

    def is_confirmed(self, wanted: PartRequest) -> bool:
        """Whether the names in `wanted` can be used, as far as is known here."""
        if not wanted.names:
            return True
        if not wanted.names.keys() <= self.known.keys():
            return False
        try:
            self.reader.check(wanted, self.known)
        except RequestError:
            return False
        return True

    def explain(self, wanted: PartRequest) -> Operation[None]:
        """The engine core refused `wanted`: raise why, as far as that is still so.

        Raises:
            RequestError: Naming the field.
        """
        self.known = {}
        if not self.is_confirmed(wanted):
            yield from self.confirm(wanted)
        yield CoreCall(method=self.part.check_method, args={"spec": dict(wanted.wire), "field": wanted.field})


PartOperations = Iterator[tuple[str, Operation[None]]]
"""Questions to the engine cores, by the name of the part that asks them: for `run_each` or `run_each_async`."""


class RequestReader:
    """Reads what requests ask. Any thread.

    Args:
        capture: Capture's front end; None if capture is not configured.
        parts: The other parts that are configured, by section.
    """

    def __init__(self, capture: FrontEnd | None = None, parts: Mapping[str, OpenPart] | None = None) -> None:
        self.capture = capture
        self.parts = parts or {}

    def read(self, params: SamplingParams, request_id: str) -> HeadgateRequest | None:
        """Check the fields of a `SamplingParams`, for a request whose results are not waited for.

        Returns:
            None if none of our fields is set and no consumer looks at the request unasked.

        Raises:
            RequestError: Naming the field that is wrong, or whose part is not configured.
            ConsumerError: If a consumer's own check failed.
        """
        if _asks_nothing(params, self.capture):
            return None
        if self.capture is None:
            return self._without_capture(params)
        refuse_forged(params)
        refuse_unknown_in(params)
        ask = self.capture.capture_reader.read(params, request_id) if _may_capture(params, self.capture) else None
        return self._with_parts(params, ask)

    def read_answered(self, params: SamplingParams, request_id: str, *, is_offline: bool) -> HeadgateRequest | None:
        """Check the fields like `read`, and add the address that results go to."""
        if _asks_nothing(params, self.capture):
            return None
        if self.capture is None:
            return self._without_capture(params, is_offline=is_offline)
        refuse_forged(params)
        refuse_unknown_in(params)
        ask = None
        if _may_capture(params, self.capture):
            ask = self.capture.read(params, request_id, is_offline=is_offline)
        return self._with_parts(params, ask, is_offline=is_offline)

    def _without_capture(self, params: SamplingParams, *, is_offline: bool = False) -> HeadgateRequest | None:
        refuse_forged(params)
        refuse_unknown_in(params)
        refuse_unconfigured(params)
        return self._with_parts(params, None, is_offline=is_offline)

    def _with_parts(
        self, params: SamplingParams, ask: CaptureRequest | None, *, is_offline: bool = False
    ) -> HeadgateRequest | None:
        wanted = {}
        is_set = False
        for name, part in request_parts().items():
            values = read_fields(params, part.fields)
            if not values:
                continue
            is_set = True
            before = taken()
            found = before.wanted[name] if before.has(name, values) else self._read(name, part, values)
            if found is not None:
                wanted[name] = _owned(found)
        if ask is None and not is_set:
            return None
        return HeadgateRequest(capture=ask, parts=wanted, is_offline=is_offline)

    def check_positions(self, headgate_request: HeadgateRequest, num_prompt: int) -> None:
        """Check the positions that parts are asked to act at, in a prompt of that length.

        Raises:
            RequestError: Naming the field.
        """
        for wanted in headgate_request.parts.values():
            if wanted.positions:
                wanted.check_positions(num_prompt)

    def read_parts(self, values: Document) -> dict[str, PartRequest | None]:
        """Read the fields of each part that has any set; None for a part whose fields request nothing.

        Fields that name kept rows are left out: whose they are is known in the context of the client's call alone.

        Raises:
            RequestError: As `read`.
        """
        found: dict[str, PartRequest | None] = {}
        for name, part in request_parts().items():
            given = {field: values[field] for field in part.fields if field in values}
            if given and not self._open(name, part, given).reader.has_sources(given):
                found[name] = self._read(name, part, given)
        return found

    def _read(self, name: str, part: RequestPart, values: Document) -> PartRequest | None:
        reader = self._open(name, part, values).reader
        has_sources = reader.has_sources(values)
        wanted = reader.read_with(values, self.find_kept) if has_sources else reader.read(values)
        return None if wanted is None else replace(wanted, wire=lift(wanted.wire))

    def find_kept(self, name: str, sample_index: int, field: str) -> KeptRequest:
        """Find rows that the client at hand has kept; see `FindKept`."""
        if self.capture is None:
            raise RequestError(
                f"{field}.request", "this engine was started without capture, so nothing is kept; add 'memory'"
            )
        return self.capture.find_kept(name, sample_index, field)

    def _open(self, name: str, part: RequestPart, values: Document) -> OpenPart:
        opened = self.parts.get(name)
        if opened is None:
            raise RequestError(next(iter(values)), f"this engine was started without {name}. {part.how_to_start}")
        return opened

    def is_confirmed(self, headgate_request: HeadgateRequest) -> bool:
        """Whether every registered name that is asked for can be used, as far as is known here."""
        return all(self.parts[name].is_confirmed(wanted) for name, wanted in headgate_request.parts.items())

    def confirm(self, headgate_request: HeadgateRequest) -> PartOperations:
        """Check registered names, asking the engine core about names that are not known here.

        Raises:
            RequestError: If one cannot be used.
        """
        for name, wanted in headgate_request.parts.items():
            if not self.parts[name].is_confirmed(wanted):
                yield name, self.parts[name].confirm(wanted)

    def confirm_names(self, values: Document) -> PartOperations:
        """Check the registered names in raw fields, before anything else of the request is looked at.

        Raises:
            RequestError: If one is unknown, or its part is not configured.
        """
        for name, part in request_parts().items():
            given = {field: values[field] for field in part.fields if values.get(field) is not None}
            if not given:
                continue
            opened = self._open(name, part, given)
            wanted = PartRequest(wire={}, field=next(iter(given)), names=opened.reader.names(given))
            if not opened.is_confirmed(wanted):
                yield name, opened.confirm(wanted)

    def explain(self, headgate_request: HeadgateRequest) -> PartOperations:
        """The engine core refused a request, for a name that is gone or for want of room: raise why, if it still would.

        Raises:
            RequestError: Naming the field.
        """
        for name, wanted in headgate_request.parts.items():
            yield name, self.parts[name].explain(wanted)


def _owned(found: PartRequest) -> PartRequest:
    """Return a part's request with the name of the client that sent it, if something of it is to belong to that one.

    Raises:
        UnknownKeyError: If that client has shown a key that is not known.
    """
    owner = None if found.owned_field is None else owner_of_request(found.owned_field)
    return found if owner is None else replace(found, wire={**found.wire, "owner": owner})


def _asks_nothing(params: SamplingParams, capture: FrontEnd | None) -> bool:
    """Whether nothing is to be read: most requests, which shall not pay for ours."""
    return is_plain(params) and (capture is None or not capture.capture_reader.has_unasked)


def _may_capture(params: SamplingParams, capture: FrontEnd) -> bool:
    """Whether a request sets a field of capture's, or a consumer may look at it unasked."""
    return capture.capture_reader.has_unasked or bool(read_fields(params, CAPTURE_FIELDS))


def read_notes(reader: RequestReader, headgate_request: HeadgateRequest, notes: Notes) -> Document:
    """Return the values that a request gets of the notes that an output of one of its samples brings, by name."""
    values: dict[str, object] = {}
    for name, wanted in headgate_request.parts.items():
        if wanted.wants_notes:
            values.update(reader.parts[name].reader.read_notes(wanted, notes.by_part.get(name, []), notes.end))
    return values


def is_refused(output: RequestOutput) -> bool:
    """Whether a `RequestOutput` ended because the engine core could not take the request, for whatever reason."""
    return output.finished and any(completion.finish_reason == "error" for completion in output.outputs)


def overload_of(output: RequestOutput) -> OverloadedError | None:
    """Return why the engine core sent a request away unserved, for want of room; None if it did not."""
    for completion in output.outputs:
        reason = completion.stop_reason
        if completion.finish_reason == "error" and isinstance(reason, str) and reason.startswith(OVERLOADED):
            return OverloadedError(reason.removeprefix(OVERLOADED))
    return None


def reader_of(engine: Engine) -> RequestReader:
    """The `RequestReader` of an `LLMEngine` or `AsyncLLM`."""
    return vars(engine.input_processor).get(REQUEST_READER) or RequestReader()
