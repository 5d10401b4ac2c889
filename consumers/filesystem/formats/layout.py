"""What a layout is: how one whole request becomes files, and how it is found and read again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from headgate.capture.schema.batch import Int64Array
from headgate.consumers.filesystem.formats.sidecar import LayoutName, Sidecar
from headgate.consumers.filesystem.formats.tensor_file import TensorRef
from headgate.consumers.filesystem.storage.names import Target
from headgate.consumers.filesystem.storage.store import Published, Settling
from headgate.consumers.filesystem.writing.spool import WholeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """One request, ready to be stored.

    Attributes:
        target: Where.
        sidecar: What its file says about itself.
        rows: Its rows and positions.
        token_ids: int64 ``[rows]``.
    """

    target: Target
    sidecar: Sidecar
    rows: WholeRequest
    token_ids: Int64Array


@dataclass(frozen=True, slots=True)
class Stored:
    """A request whose rows are written.

    Attributes:
        payload: What its result says, as JSON values.
        settling: What must be settled before the result may say it.
    """

    payload: dict[str, Any]
    settling: Settling


class Layout(Protocol):
    """Used by one writer thread."""

    def check_free(self, target: Target) -> None:
        """Raise `ConsumerError` if nothing can be stored there because something is there already."""
        ...

    def store(self, finished: Finished) -> Stored:
        """Write one request.

        Raises:
            OSError: If the disk takes no more.
            ConsumerError: If it cannot be stored; the message says why.
        """
        ...

    def close(self) -> None:
        """Close what is open. May be called again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
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


def payload_of(layout: LayoutName, finished: Finished, published: Published, *, durable: bool | None) -> dict[str, Any]:
    """What a request's result says.

    Keys: ``layout``, ``paths``, ``sites``, ``num_rows``, ``num_bytes`` (of the files) and ``durable``: whether the rows
    survive a power cut; None where the remote store decides.
    """
    return {
        "layout": layout,
        "paths": list(published.paths),
        "sites": finished.sidecar.sites,
        "num_rows": finished.rows.num_rows,
        "num_bytes": published.num_bytes,
        "durable": durable,
    }
