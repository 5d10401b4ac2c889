"""Captured requests as files: the sidecar that describes one, the interface of a layout, and where stored rows lie.

Three layouts implement `Layout`: `request_layout`, `raw_layout` and `shard_layout`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.files.reading import refusing
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import ConsumerContext, FinishedRequest, ModelInfo, OutputColumns, RequestInfo
from headgate.capture.schema.errors import CaptureFileError, NewerFormatError
from headgate.capture.schema.sites import ITEM_SIZES, Columns, Site, SiteShape
from headgate.consumers.filesystem.storage.store import Published, Target

FORMAT = "headgate-capture"
FORMAT_VERSION = 4
"""Version of outputs of readouts. Captures of some columns of rows are of version 3, those with rows of several shapes
of version 2, others of version 1, which every release reads."""
POSITIONS = "positions"
TOKEN_IDS = "token_ids"  # noqa: S105  (a tensor's name)
SHARD_FOLDER = "_shards"
READOUT = "readout"
"""Option of a resolved spec: a `StoredReadout`, without keys."""
OWNER = "owner"
"""Option of a resolved spec: see `Sidecar.owner`."""
LayoutName = Literal["request", "shards", "raw"]


class MessagePlace(msgspec.Struct, frozen=True):
    """A message of a chat in its prompt, with the tokens that the chat template puts around its text.

    Attributes:
        role: As the client wrote it.
        start: Its first position.
        stop: The position after its last.
    """

    role: str
    start: int
    stop: int


RowPooling = Literal["token", "last_prompt"]
"""Rows of a request whose scores decide whether it is recorded: each but that of position 0, whose token sees nothing
before it and whose row is many times as long as others; or that of the prompt's last token."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request with a condition (``if_probe``) was recorded or not: a probe's scores of its rows.

    Attributes:
        probe: The probe's name in the consumer's parameters.
        sha256: Of the probe.
        site: The site that it reads.
        above: It fires on a row whose score is above this number.
        pool: Rows that count.
        num_scored: Rows that counted and were there.
        num_not_finite: Rows of them whose score is not finite; they do not fire.
        num_fired: Rows of them on which the probe fired; 0 if nothing was recorded.
        highest: The highest finite score, a float32; None if there is none.
        at: Its position.
        positions: The first positions on which the probe fired, ascending; at most 64.
        scores: The score at each of `positions`.
    """

    probe: str
    sha256: str
    site: str
    above: float
    pool: RowPooling
    num_scored: int
    num_not_finite: int
    num_fired: int
    highest: float | None
    at: int | None
    positions: list[int]
    scores: list[float]


class StoredReadout(msgspec.Struct, frozen=True, kw_only=True):
    """The readout of rows whose outputs are stored in their place.

    Attributes:
        consumer: Name of the consumer whose readout it is.
        options: What the request asked of it, checked.
        outputs: Columns of the stored rows by name, and what they are; other columns have no meaning.
        keys: `headgate.capture.schema.consumer.Readout.key` by site.
        shapes: Shapes of outputs of a row that have one, by name; others are one list.
    """

    consumer: str
    options: dict[str, Any]
    outputs: dict[str, OutputColumns]
    keys: dict[str, str] = msgspec.field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)

    def named(self, rows: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
        """Return the outputs of rows ``[rows, outputs]`` by name; integers of what is not finite are -1."""
        found = {
            name: part if dtype == "float32" else np.where(np.isfinite(part), part, -1).astype(dtype)
            for name, (start, stop, dtype) in self.outputs.items()
            for part in (rows[:, start:stop],)
        }
        return found | {name: found[name].reshape(len(rows), *shape) for name, shape in self.shapes.items()}


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a request's rows, stored with them, their positions and their tokens.

    Attributes:
        request_id: The name that the client or the front end gave; the file is named after it.
        client_request_id: The id of the request in its API.
        engine_request_id: The id inside the engine, where each sample has its own.
        sample_index: Which of `num_samples` samples of one request.
        tag: The folder.
        name: File name without extension and stage: `request_id` made safe, with the sample's number.
        model: Name of the model as the operator gave it.
        hidden_size: Width of a row, unless `shapes` has another.
        dtype: ``bfloat16``, ``float16`` or ``float32``: of every row, unless `shapes` has another.
        versions: Of headgate, vllm and torch.
        sites: Names of the sites in this file, in the order of the forward pass.
        selector: The position selector that the request asked for; of a long list, how many and from where to where.
        num_rows: Rows per site.
        num_prompt_tokens: Length of the prompt; rows at positions below it are prefill.
        num_tokens: Prompt and output, the last one, which has no row, included.
        phases: ``{"prefill": [start, stop], "decode": [start, stop]}`` in rows, `stop` exclusive.
        status: How the request ended: ``stop``, ``length``, ``abort``, ``error`` ...
        dropped_rows: Rows that overload kept from this file.
        pp_rank: Pipeline stage that wrote this file, of `pp_size`: it holds the sites of its own layers.
        written_at: UTC, ISO 8601.
        messages: Those of the request's chat, in order; None if the request did not set ``capture_messages``.
        notes: By part, what it noted of the rows in this file (`of_rows`): of ``steering``, scores and strengths.
        shapes: ``{site: [width, dtype]}`` of the sites whose rows are not those of the residual stream.
        owner: Name of the key of the client whose request it was; None without keys, and of what the operator records.
        columns: ``{site: [[start, stop], ...]}``: what the rows are of the site's, where that is not all.
        if_probe: On which rows the probe fired without which they would not have been recorded; None if the request had
            no such condition.
        readout: Whose outputs the rows are; None if they are rows of the sites.
    """

    format: str = FORMAT
    format_version: int = 1
    request_id: str
    client_request_id: str
    engine_request_id: str
    sample_index: int
    num_samples: int
    tag: str
    name: str
    model: str
    num_layers: int
    hidden_size: int
    dtype: str
    versions: dict[str, str]
    sites: list[str]
    selector: Any
    num_rows: int
    num_prompt_tokens: int
    num_tokens: int
    phases: dict[str, list[int]]
    status: str
    dropped_rows: int
    pp_rank: int
    pp_size: int
    written_at: str
    messages: list[MessagePlace] | None = None
    notes: dict[str, Any] = msgspec.field(default_factory=dict)
    shapes: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    owner: str | None = None
    columns: dict[str, Columns] = msgspec.field(default_factory=dict)
    if_probe: Decision | None = None
    readout: StoredReadout | None = None

    def shape(self, site: str) -> SiteShape:
        """The shape of the rows of a site, by its name."""
        width, dtype = self.shapes.get(site, (self.hidden_size, self.dtype))
        return SiteShape(width, dtype)

    def document(self) -> dict[str, Any]:
        """The fields as plain values; `shapes`, `columns`, `owner`, `if_probe` and `readout` only if there are any."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        optional = ("shapes", "columns", "owner", "if_probe", "readout")
        return {name: value for name, value in found.items() if value or name not in optional}

    def to_strings(self) -> dict[str, str]:
        """The form that safetensors metadata takes: text as it is, everything else as JSON, and notes if there are."""
        return {
            key: value if key in _TEXT_FIELDS else msgspec.json.encode(value).decode()
            for key, value in self.document().items()
            if value or key != "notes"
        }


_TEXT_FIELDS = {field.name for field in msgspec.structs.fields(Sidecar) if field.type is str}


def of_rows(note: Any, positions: Int64Array) -> Any:
    """Return a note about the rows at some positions, ascending: what it has of others is left out.

    Args:
        note: Of a part. Without ``positions``, or if it is no object, it is returned as it is.
        positions: int64 ``[n]``.
    """
    if not isinstance(note, Mapping) or "positions" not in note:
        return note
    at = np.flatnonzero(np.isin(np.array(note["positions"], np.int64), positions)).tolist()
    return _picked(note, at, len(note["positions"]))


def _picked(value: Any, at: list[int], count: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _picked(each, at, count) for key, each in value.items()}
    is_by_row = isinstance(value, list) and len(value) == count
    if is_by_row and all(each is None or isinstance(each, int | float) for each in value):
        return [value[index] for index in at]
    return value


def sidecar_of(
    finished: FinishedRequest,
    context: ConsumerContext,
    *,
    positions: Int64Array,
    num_prefill_rows: int,
    name: str,
    decision: Decision | None = None,
) -> Sidecar:
    """Describe a finished request's rows.

    Args:
        finished: The request.
        context: The consumer's.
        positions: int64 ``[rows]``, ascending.
        num_prefill_rows: How many of them are the prompt's.
        name: The file's, without extension and stage.
        decision: See `Sidecar.if_probe`.
    """
    num_rows, request, final, model = len(positions), finished.request, finished.final, context.model
    return Sidecar(
        **_shapes_of(request, model),
        request_id=str(request.spec.options["request_id"]),
        client_request_id=request.client_request_id,
        engine_request_id=request.request_id,
        sample_index=request.sample_index,
        num_samples=request.num_samples,
        tag=str(request.spec.options["tag"]),
        name=name,
        model=model.name,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        dtype=model.dtype,
        versions=dict(context.versions),
        sites=[site.name for site in request.spec.sites],
        selector=request.spec.positions.described(),
        num_rows=num_rows,
        num_prompt_tokens=final.num_prompt_tokens,
        num_tokens=len(final.token_ids),
        phases={"prefill": [0, num_prefill_rows], "decode": [num_prefill_rows, num_rows]},
        status=final.status,
        dropped_rows=finished.dropped_rows,
        pp_rank=context.pp_rank,
        pp_size=context.pp_size,
        written_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        messages=msgspec.convert(request.spec.options.get("messages"), list[MessagePlace] | None),
        notes={part: of_rows(note, positions) for part, note in final.notes.items()},
        owner=request.spec.options.get(OWNER),
        if_probe=decision,
    )


def _shapes_of(request: RequestInfo, model: ModelInfo) -> dict[str, Any]:
    """Return the format's version, the shapes, the columns and the readout."""
    every = ((site.name, request.shape(site, model)) for site in request.spec.sites)
    shapes = {name: (shape.width, shape.dtype) for name, shape in every if shape[:2] != model.stream[:2]}
    columns = {site.name: columns for site, columns in request.spec.columns.items()}
    version = 3 if columns else 2 if shapes else 1
    found: dict[str, Any] = {"format_version": version, "shapes": shapes, "columns": columns}
    if (given := request.spec.options.get(READOUT)) is None:
        return found
    readout = msgspec.convert(given, StoredReadout)
    keys = {site.name: facts.key for site, facts in request.readouts.items()}
    return {**found, "format_version": FORMAT_VERSION, "readout": msgspec.structs.replace(readout, keys=keys)}


def read_sidecar(document: Mapping[str, Any], path: str) -> Sidecar:
    """Read a sidecar out of plain values.

    Raises:
        NewerFormatError: If it is of a newer version.
        CaptureFileError: If it is of no version that there was, or lacks something.
    """
    version = document.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise NewerFormatError(f"{path}: format version {version}; this headgate reads up to version {FORMAT_VERSION}")
    if type(version) is not int or version < 1:
        raise CaptureFileError(f"{path}: format version {version!r}; this headgate reads 1 to {FORMAT_VERSION}")
    with refusing(path, CaptureFileError, "damaged metadata"):
        sidecar = msgspec.convert(dict(document), Sidecar)
        for name in sidecar.sites:
            Site.parse(name)
        for width, dtype in ((sidecar.hidden_size, sidecar.dtype), *sidecar.shapes.values()):
            if dtype not in ITEM_SIZES or sidecar.num_rows < 0 or width < 1:
                raise ValueError(f"{sidecar.num_rows} rows of {width} values of {dtype}")
    return sidecar


def sidecar_from_strings(metadata: Mapping[str, str], path: str) -> Sidecar:
    """Read what `Sidecar.to_strings` wrote; see `read_sidecar`."""
    with refusing(path, CaptureFileError, "damaged metadata"):
        document = {
            key: value if key in _TEXT_FIELDS else msgspec.json.decode(value) for key, value in metadata.items()
        }
    return read_sidecar(document, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """One request, ready to be stored.

    Attributes:
        target: Where.
        sidecar: What its file says about itself.
        positions: int64 ``[rows]``, ascending; the same for every site.
        pieces: For each site the bytes of its rows, in order.
        token_ids: int64 ``[rows]``.
    """

    target: Target
    sidecar: Sidecar
    positions: Int64Array
    pieces: Mapping[Site, Sequence[memoryview]]
    token_ids: Int64Array

    @property
    def num_rows(self) -> int:
        """Rows per site."""
        return len(self.positions)


class Layout(Protocol):
    """Writes whole requests as files of one kind. Used by one writer thread."""

    def check_free(self, target: Target) -> None:
        """Raise `ConsumerError` if nothing can be stored there because something is there already."""
        ...

    def store(self, finished: Finished) -> tuple[dict[str, Any], Published]:
        """Write one request; return the payload of its result, which may be sent once its files are synced.

        Raises:
            OSError: If the disk takes no more.
            ConsumerError: If it cannot be stored; the message says why.
        """
        ...

    def close(self) -> None:
        """Close what is open. May be called again."""
        ...


def payload_of(layout: LayoutName, finished: Finished, published: Published, *, durable: bool | None) -> dict[str, Any]:
    """The payload of a request's result.

    Keys: ``layout``, ``paths``, ``sites``, ``num_rows``, ``num_bytes`` (of the files) and ``durable``: whether the rows
    survive a power cut; None where the remote store decides. Of a request with a condition also ``stored``, true, and
    ``if_probe``, a `Decision`; see `unstored_payload`.
    """
    decision = finished.sidecar.if_probe
    return {
        **({} if decision is None else {"stored": True, "if_probe": msgspec.to_builtins(decision)}),
        "layout": layout,
        "paths": list(published.paths),
        "sites": finished.sidecar.sites,
        "num_rows": finished.num_rows,
        "num_bytes": published.num_bytes,
        "durable": durable,
    }


def unstored_payload(layout: LayoutName, decision: Decision) -> dict[str, Any]:
    """The payload of a request that was not recorded, since the probe did not fire: ``stored`` is false."""
    found: dict[str, Any] = {"stored": False, "if_probe": msgspec.to_builtins(decision), "layout": layout}
    return {**found, "paths": [], "sites": [], "num_rows": 0, "num_bytes": 0, "durable": None}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that lies in a file, row after row.

    Attributes:
        path: The file.
        offset: Its first byte there.
        dtype: A key of `ITEM_SIZES`.
        shape: Its sizes.
    """

    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in the file."""
        size = ITEM_SIZES[self.dtype]
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStage:
    """One request as it lies in the files of one pipeline stage.

    Attributes:
        layout: Its layout.
        sidecar: What its file says about itself.
        paths: Its files, or the folder of its shard.
        tensors: Where each site's rows are, by the site's name.
        positions: int64 ``[rows]``, or where they are.
        token_ids: int64 ``[rows]``, or where they are.
    """

    layout: LayoutName
    sidecar: Sidecar
    paths: tuple[str, ...]
    tensors: dict[str, TensorRef] = field(repr=False)
    positions: Int64Array | TensorRef = field(repr=False)
    token_ids: Int64Array | TensorRef = field(repr=False)
