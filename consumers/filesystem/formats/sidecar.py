"""What a file of captured rows says about itself, the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Literal

import msgspec

from headgate.capture.schema.consumer import ConsumerContext, FinishedRequest
from headgate.capture.schema.errors import CaptureFileError

FORMAT = "headgate-capture"
FORMAT_VERSION = 1
POSITIONS = "positions"
TOKEN_IDS = "token_ids"  # noqa: S105  (a tensor's name)
TEMP_FOLDER = ".tmp"
SHARD_FOLDER = "_shards"

LayoutName = Literal["request", "shards", "raw"]

SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64"}
ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a request's rows but the rows, their positions and their tokens.

    Attributes:
        request_id: What the file is named after, as the client or the front end wrote it.
        client_request_id: The id of the request in its API.
        engine_request_id: The id inside the engine, where each sample has its own.
        sample_index: Which of `num_samples` samples of one request.
        tag: The folder.
        name: File name without extension and stage: `request_id` made safe, with the sample's number.
        model: Name of the model as the operator gave it.
        dtype: ``bfloat16``, ``float16`` or ``float32``: of every row.
        versions: Of headgate, vllm and torch.
        sites: Names of the sites in this file, in the order of the forward pass.
        selector: Which positions the request asked for.
        num_rows: Rows per site.
        num_prompt_tokens: Length of the prompt; rows at positions below it are prefill.
        num_tokens: Prompt and output, the last one, which has no row, included.
        phases: ``{"prefill": [start, stop], "decode": [start, stop]}`` in rows, `stop` exclusive.
        status: How the request ended: ``stop``, ``length``, ``abort``, ``error`` ...
        dropped_rows: Rows that overload kept from this file.
        pp_rank: Pipeline stage that wrote this file, of `pp_size`: it holds the sites of its own layers.
        written_at: UTC, ISO 8601.
    """

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
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

    def to_strings(self) -> dict[str, str]:
        """The form that safetensors metadata takes: text as it is, everything else as JSON."""
        return {
            key: value if key in _TEXT_FIELDS else msgspec.json.encode(value).decode()
            for key, value in msgspec.to_builtins(self).items()
        }


_TEXT_FIELDS = {field.name for field in msgspec.structs.fields(Sidecar) if field.type is str}


def sidecar_of(
    finished: FinishedRequest, context: ConsumerContext, *, num_rows: int, num_prefill_rows: int, name: str
) -> Sidecar:
    """Describe a finished request's rows; `name` is the file's without extension and stage."""
    request, final, model = finished.request, finished.final, context.model
    return Sidecar(
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
        selector=request.spec.positions.to_wire(),
        num_rows=num_rows,
        num_prompt_tokens=final.num_prompt_tokens,
        num_tokens=len(final.token_ids),
        phases={"prefill": [0, num_prefill_rows], "decode": [num_prefill_rows, num_rows]},
        status=final.status,
        dropped_rows=finished.dropped_rows,
        pp_rank=context.pp_rank,
        pp_size=context.pp_size,
        written_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
    )


def read_sidecar(document: Mapping[str, Any], path: str) -> Sidecar:
    """Read a sidecar out of plain values.

    Raises:
        CaptureFileError: If it is of another version or lacks something.
    """
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise CaptureFileError(f"{path}: format version {version!r}; this headgate reads version {FORMAT_VERSION}")
    try:
        return msgspec.convert(dict(document), Sidecar)
    except msgspec.ValidationError as error:
        raise CaptureFileError(f"{path}: damaged metadata: {error}") from error


def sidecar_from_strings(metadata: Mapping[str, str], path: str) -> Sidecar:
    """Read what `Sidecar.to_strings` wrote; see `read_sidecar`."""
    try:
        document = {
            key: value if key in _TEXT_FIELDS else msgspec.json.decode(value) for key, value in metadata.items()
        }
    except msgspec.DecodeError as error:
        raise CaptureFileError(f"{path}: damaged metadata: {error}") from error
    return read_sidecar(document, path)
