"""The result of a capture, as a request receives it, and rows that are kept for later requests.

How the answers of several pipeline stages become one result, and those of several samples the request's.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.errors import CaptureFileError, shown
from headgate.capture.schema.sites import Columns, Site

if TYPE_CHECKING:
    from torch import Tensor

MAX_KEPT_NAME = 256
"""Characters of the name under which rows are kept, at most."""

Status = Literal["ok", "partial_error", "error", "pending"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request's results go.

    Attributes:
        reply: Address of the result hub of the front end that owns the request; None if no caller waits.
        key: Random per request: what the hub knows it by. Those of one HTTP call begin alike; see `join_key`.
        is_streamed: Chunks of its answer take parts of its results.
    """

    reply: str | None
    key: str = field(repr=False)
    is_streamed: bool = False

    @property
    def call(self) -> str:
        """An id that all requests of one HTTP call share; a request of none is a call of its own."""
        return self.key.partition(_JOINT)[0]


_JOINT = "."


def join_key(call: str, key: str) -> str:
    """The key of a request that belongs to an HTTP call with the token `call`."""
    return f"{call}{_JOINT}{key}"


class MessageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat in its prompt, with the tokens that the chat template puts around its text.

    Attributes:
        role: As the client wrote it.
        start: Its first position.
        stop: The position after its last.
        token_ids: Its ``stop - start`` tokens.
    """

    role: str
    start: int
    stop: int
    token_ids: list[int]


class CaptureResult(msgspec.Struct, kw_only=True, omit_defaults=False):
    """The outcome of one request for one consumer.

    Attributes:
        status: ``ok``: every wanted row was delivered. ``partial_error``: some were, `error` says what is missing.
            ``error``: nothing usable. ``pending``: not done when the answer was sent; the capture continues.
        error: Text for people; None when `status` is ``ok``.
        payload: What the consumer reports: a file list, a score, ... From driver consumers of `LLM` and
            `AsyncLLM` any object; over HTTP and from workers JSON values only.
        num_rows: Positions captured.
        num_bytes: Bytes of rows delivered, over all sites.
        dropped_rows: Positions lost to overload.
        key: The consumer's name, under which a request finds the result; empty while a worker puts it together.
        messages: The boundaries of the chat's messages, in order; None unless ``capture_messages`` was set.
    """

    status: Status
    error: str | None = None
    payload: Any = None
    num_rows: int = 0
    num_bytes: int = 0
    dropped_rows: int = 0
    key: str = ""
    messages: Sequence[MessageSpan] | None = None

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook, with the payload's own if that has one: 20 KB at most."""
        facts = f"{self.num_rows} rows, {self.num_bytes} bytes, {self.dropped_rows} dropped"
        error = "" if self.error is None else f"<br>{_escaped(self.error)}"
        head = f"<div><b>CaptureResult</b> {_escaped(self.key)}: {self.status}; {facts}{error}</div>"
        show = getattr(self.payload, "_repr_html_", None)
        page = show() if callable(show) else None
        if not isinstance(page, str) or len(page.encode()) > _MAX_PAGE:
            page = f"<div>payload: {_escaped(shown(self.payload))}</div>"
        return head + page


_MAX_PAGE = 18_000
"""UTF-8 bytes of a payload's HTML, at most."""


def _escaped(text: str) -> str:
    return html.escape(text.encode("utf-8", "backslashreplace").decode()[:200])


@runtime_checkable
class SupportsSummary(Protocol):
    """A payload that is a live object: what it looks like where only JSON can go, over HTTP for instance."""

    def summary(self) -> dict[str, Any]:
        """JSON values that describe the payload; never its rows."""
        ...


def plain_payload(payload: Any) -> Any:
    """Return a payload's summary if it is a live object that has one; else the payload itself."""
    # As `SupportsSummary` has it: asking the protocol takes 20 µs, for each prompt of a call, on the event loop.
    summary = getattr(payload, "summary", None)
    return summary() if callable(summary) else payload


class FetchedRows(Protocol):
    """The rows of one finished request, wherever they lie."""

    @property
    def sites(self) -> Sequence[Site]:
        """In the order of the forward pass."""

    @property
    def positions(self) -> Int64Array:
        """int64 ``[rows]``, ascending: the absolute position of each row."""

    @property
    def token_ids(self) -> Int64Array:
        """int64 ``[rows]``: the token whose forward gave the row."""

    def __getitem__(self, site: Site | str) -> Tensor:
        """``[rows, hidden]`` of one site in the model's dtype, on the CPU.

        Raises:
            KeyError: If it was not captured.
        """


@runtime_checkable
class RowFetcher(Protocol):
    """A class of consumers whose payload leads to the rows of its request: what handles of `LLM.capture` ask."""

    @classmethod
    def fetch_rows(cls, payload: Any) -> FetchedRows:
        """Return the rows of one sample's payload. Any thread of the process that received the result.

        Raises:
            CaptureFileError: If they cannot be read.
        """
        ...


class KeptRequest(Protocol):
    """The rows that one finished request left for later ones.

    Attributes:
        prompt_token_ids: int64 ``[num_prompt_tokens]``.
    """

    @property
    def prompt_token_ids(self) -> Int64Array: ...

    @property
    def columns(self) -> Mapping[Site, Columns]:
        """The columns of rows that were kept, of sites where these are not all."""
        ...

    def row(self, site: Site, position: int, field: str) -> Tensor:
        """Return one row, ``[width]`` of the site or of its `columns`, on the CPU; shared, so read-only.

        Args:
            site: Where it was captured.
            position: Absolute; a negative one counts from the end of the prompt.
            field: Path in the client's document of the object that asks, for errors.

        Raises:
            RequestError: Naming `site` or `position` below `field`, if the row was not captured.
        """
        ...


FindKept = Callable[[str, int, str], KeptRequest]
"""Finds the rows that the client at hand has kept: by name, sample and the path of the object that asks for them.

Raises a `RequestError` that names ``request`` or ``sample`` below that path, if there are none.
"""


@runtime_checkable
class RowKeeper(Protocol):
    """A consumer of the location ``driver`` that keeps rows of finished requests for later ones."""

    def find_kept(self, owner: str | None, name: str, sample_index: int, field: str) -> KeptRequest:
        """Return what a request of `owner` has kept under `name`; see `FindKept`. Any thread.

        Args:
            owner: Name of the client's key; None for clients without one. Others' rows are as good as not there.
            name: As the request that was captured gave it.
            sample_index: Which of its ``n`` samples.
            field: Path in the client's document of the object that asks, for errors.

        Raises:
            RequestError: Naming ``request`` or ``sample`` below `field`.
        """
        ...


CHUNK_VALUES = 4096
"""Numbers of a part of a streamed result, about."""

CHUNK_BYTES = 1 << 20
"""Bytes of parts of results that one chunk of a stream takes, unless one part alone has more."""


def size_of(payload: Any) -> int:
    """Return about how many bytes a part of a result takes in a chunk."""
    if isinstance(payload, dict):
        return sum(map(size_of, payload.values()))
    if isinstance(payload, list):
        return sum(map(size_of, payload))
    return len(payload) if isinstance(payload, str | bytes | msgspec.Raw) else 8


def encode_rows(payload: Any) -> Any:
    """Return a part of a result with its lists, which have one entry for each position, as JSON."""
    if isinstance(payload, dict):
        return {name: encode_rows(value) for name, value in payload.items()}
    return msgspec.Raw(msgspec.json.encode(payload)) if isinstance(payload, list) else payload


def join_rows(parts: Sequence[Any]) -> Any:
    """Join parts that `encode_rows` made, at least one and none without positions: nothing is encoded twice."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: join_rows([part[name] for part in parts]) for name in first}
    if isinstance(first, msgspec.Raw):
        return msgspec.Raw(b"[" + b",".join(memoryview(part)[1:-1] for part in parts) + b"]")
    return first


MAX_PARTS = 128
"""Parts of a running request's result that are kept one by one: each has lists of its own for each layer."""


class StreamedParts:
    """The parts of one request's result that went out with a stream, as JSON: the whole result encodes nothing twice.

    Args:
        join: Joins parts that `encode_rows` made, of ascending positions.
    """

    def __init__(self, join: Callable[[Sequence[Any]], Any] = join_rows) -> None:
        self._join = join
        self._parts: list[Any] | None = []
        """None once they are not the whole result."""
        self._num_rows = 0
        """Positions of theirs are below it."""

    def encode(
        self, positions: Int64Array, num_values: int, payload_of: Callable[[slice], Any]
    ) -> Iterator[tuple[int, Any]]:
        """Yield parts with the payloads of new rows, each after the number of rows up to its last position.

        Args:
            positions: int64, ascending, of the new rows.
            num_values: Numbers of one row.
            payload_of: Makes the payload of some of them.
        """
        size = max(1, CHUNK_VALUES // num_values)
        for start in range(0, len(positions), size):
            rows = slice(start, start + size)
            part = encode_rows(payload_of(rows))
            self._num_rows = int(positions[rows][-1]) + 1
            if self._parts is not None:
                self._parts.append(part)
                if len(self._parts) >= MAX_PARTS:
                    self._parts = [self._join(self._parts)]
            yield self._num_rows, part

    def drop(self) -> None:
        """Keep no parts, now and later: they are not the whole result, or it is not made of them."""
        self._parts = None

    def whole(self, num_rows: int) -> Any:
        """Return the result of the rows below `num_rows`; None if there are none, or the parts do not make it."""
        return self._join(self._parts) if self._parts and self._num_rows <= num_rows else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportContext:
    """A client's question to a consumer whose state spans requests, and how much of it the client may see.

    Attributes:
        params: The consumer's configured parameters.
        query: Fields of the client's query, by name.
        allows_site: Whether the client's key allows a site; every site without keys.
        allows_tag: Whether it allows a tag.
        allows_owner: Whether the client may see rows that requests of this client left; see `SpecContext.owner`.
    """

    params: Mapping[str, Any]
    query: Mapping[str, str]
    allows_site: Callable[[Site], bool]
    allows_tag: Callable[[str], bool]
    allows_owner: Callable[[str | None], bool] = lambda owner: False


@runtime_checkable
class StateReporter(Protocol):
    """A consumer class that reports its state over all requests to clients: ``GET /v1/capture/INSTANCE``."""

    @classmethod
    def report(cls, context: ReportContext) -> dict[str, Any]:
        """Return the state in JSON values. In API servers, which may have no instance of it, on any thread.

        The state is where every instance leaves it, such as files below a root in ``context.params``.

        Raises:
            RequestError: Naming the field of the query that is wrong.
            CaptureFileError: If the state cannot be read.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SentFile:
    """A file that is read while it is sent.

    Attributes:
        num_bytes: Its length.
        pieces: Its bytes in order, each read when it is asked for. Raises `CaptureFileError` if they are not there.
    """

    num_bytes: int
    pieces: Iterator[bytes]


@runtime_checkable
class CaptureBrowser(Protocol):
    """A consumer class that shows clients what it has stored for them: ``GET /v1/capture/INSTANCE/captures``.

    In API servers, which may have no instance of it, on any thread.
    """

    @classmethod
    def list_captures(cls, context: ReportContext) -> dict[str, Any]:
        """Return a page of captures in JSON values, the newest first.

        Raises:
            RequestError: Naming the field of the query that is wrong.
            CaptureFileError: If the captures cannot be read here.
        """
        ...

    @classmethod
    def describe_capture(cls, context: ReportContext, tag: str, name: str) -> dict[str, Any]:
        """Return all about one capture in JSON values, with ``positions`` and ``token_ids`` of its rows.

        Raises:
            RequestError: Naming the field of the query that is wrong.
            NoCaptureError: If there is none.
            CaptureFileError: If it cannot be read.
        """
        ...

    @classmethod
    def send_capture(cls, context: ReportContext, tag: str, name: str) -> SentFile:
        """Return the rows of one capture as a file of the format safetensors.

        Raises:
            RequestError: Naming the field of the query that is wrong.
            NoCaptureError: If there is none.
            CaptureFileError: If it cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class CaptureResults:
    """All results of one request.

    Attributes:
        per_sample: For each of the ``n`` samples, instance name -> result.
        merged: Instance name -> result of the whole request: with ``n > 1`` its payload is the list of the
            samples' payloads.
    """

    per_sample: list[dict[str, CaptureResult]]
    merged: dict[str, CaptureResult]


def with_messages(results: CaptureResults, messages: Sequence[MessageSpan] | None) -> CaptureResults:
    """Return results that say where the messages of their request's chat lie; the same ones if that is None."""
    if messages is None:
        return results

    def without_rows(of_consumers: Mapping[str, CaptureResult]) -> dict[str, CaptureResult]:
        return {name: msgspec.structs.replace(result, messages=messages) for name, result in of_consumers.items()}

    return CaptureResults([without_rows(sample) for sample in results.per_sample], without_rows(results.merged))


def merge_stages(answers: Mapping[int, CaptureResult]) -> CaptureResult:
    """One sample's result for one consumer, from those of the pipeline stages that answered.

    Stages that had nothing to do (no rows, no payload, no error) are left out. If one is left its payload is the
    result's; of several it is a list, in the order of the stages.
    """
    stages = sorted(answers)
    busy = [stage for stage in stages if not _is_blank(answers[stage])] or stages[:1]
    if len(busy) == 1:
        return answers[busy[0]]
    return _merge([answers[stage] for stage in busy], [f"stage {stage}" for stage in busy], same_positions=True)


def merge_samples(samples: Sequence[CaptureResult]) -> CaptureResult:
    """The whole request's result for one consumer: the only sample's, or one whose payload lists the samples'."""
    if len(samples) == 1:
        return samples[0]
    return _merge(samples, [f"sample {index}" for index in range(len(samples))], same_positions=False)


def merge_status(statuses: Sequence[Status]) -> Status:
    """``pending`` if anything is; what all agree on; ``partial_error`` otherwise, since something was delivered."""
    if "pending" in statuses:
        return "pending"
    return statuses[0] if len(set(statuses)) == 1 else "partial_error"


def _is_blank(result: CaptureResult) -> bool:
    return result.status == "ok" and result.payload is None and not result.num_rows


def _merge(results: Sequence[CaptureResult], names: Sequence[str], *, same_positions: bool) -> CaptureResult:
    """Stages capture the same positions at other sites, samples other positions at the same sites."""
    errors = [f"{name}: {result.error}" for name, result in zip(names, results, strict=True) if result.error]
    total = max if same_positions else sum
    return CaptureResult(
        status=merge_status([result.status for result in results]),
        error="; ".join(errors) or None,
        payload=[result.payload for result in results],
        num_rows=total(result.num_rows for result in results),
        num_bytes=sum(result.num_bytes for result in results),
        dropped_rows=total(result.dropped_rows for result in results),
    )


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


def has_whole(request: StoredRequest, site: Site) -> bool:
    """Whether a request has rows of a site, and not some of their columns or outputs of a readout alone."""
    is_cut = site.name in request.metadata.get("columns", {}) or request.metadata.get("readout") is not None
    return site in request.sites and not is_cut


def whole_rows(request: StoredRequest, site: Site) -> npt.NDArray[Any]:
    """Return the rows of a site that a request has, ``[rows, width]`` of the site in float16 or float32.

    Raises:
        CaptureFileError: If some columns of the rows, or outputs of a readout, were captured alone.
    """
    if (readout := request.metadata.get("readout")) is not None:
        raise CaptureFileError(
            f"{request.tag}/{request.request_id}: has what {readout['consumer']!r} read of rows, not the rows; capture "
            "these"
        )
    if not has_whole(request, site):
        columns = request.metadata["columns"][site.name]
        raise CaptureFileError(
            f"{request.tag}/{request.request_id}: has the columns {list(map(list, columns))} of {site.name} alone; "
            "capture whole rows"
        )
    return request.numpy(site)
