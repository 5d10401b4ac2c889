"""Reading what the filesystem consumer wrote, in all its layouts, as numpy or torch. Needs no vLLM.

::

    for capture in open_captures("captures"):
        print(capture.tag, capture.request_id, capture["12.post_mlp"].shape, capture.positions)

Nothing is read before it is used. What a killed process left unfinished is not there; a file that is
damaged is refused with `CaptureFileError`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.notebook import TextTable, norm_table, norms_by_position, page
from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import ITEM_SIZES, Site, sort_sites
from headgate.consumers.filesystem.formats.layout import SHARD_FOLDER, LayoutName, StoredStage, TensorRef
from headgate.consumers.filesystem.formats.raw_layout import read_raw_folder
from headgate.consumers.filesystem.formats.request_layout import read_request_file
from headgate.consumers.filesystem.formats.shard_layout import INDEX, read_shard
from headgate.consumers.filesystem.storage.source import LocalSource, Source, open_source
from headgate.consumers.filesystem.storage.store import FILE_SUFFIX, slug

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CaptureFolder", "StoredCapture", "open_capture", "open_captures"]

logger = logging.getLogger(__name__)

MAX_FETCHED = 64 << 20
"""Bytes of a capture whose norms a notebook shows, at most, if they have to be fetched whole."""

SHOWN_REQUESTS = 10
"""Requests of a folder that a notebook lists."""


_Found = tuple[Source, StoredStage]
"""A part of a request, and where its files are."""


class StoredCapture:
    """One request's rows on disk.

    Under pipeline parallelism each stage writes the sites of its own layers; here they are together again.

    Attributes:
        layout: ``request``, ``shards`` or ``raw``.
        tag: Its folder.
        request_id: The client's name for it, or the request's own id.
        name: `request_id` as a file name, with the sample's number if there were several.
        sites: In the order of the forward pass.
        num_rows: Rows per site.
        num_bytes: Bytes of the rows of all sites.
        messages: Role, start and stop of each message of its chat, in positions of the prompt; None if they were not
            captured with ``capture_messages``.
        metadata: The sidecar: see `headgate.consumers.filesystem.formats.layout.Sidecar`.
        paths: Its files; for ``shards`` the folder of its shard.
    """

    def __init__(self, found: Sequence[_Found]) -> None:
        parts = [part for _, part in found]
        self._source, first = found[0]
        self._first = first
        self._places = {name: (source, ref) for source, part in found for name, ref in part.tensors.items()}
        self.layout: LayoutName = first.layout
        self.tag = first.sidecar.tag
        self.request_id = first.sidecar.request_id
        self.name = first.sidecar.name
        self.sites = sort_sites(Site.parse(name) for name in self._places)
        self.num_rows = first.sidecar.num_rows
        self.num_bytes = sum(ref.num_bytes for _, ref in self._places.values())
        self.messages = first.sidecar.messages
        self.paths = tuple(dict.fromkeys(path for part in parts for path in part.paths))
        self.metadata: dict[str, Any] = msgspec.to_builtins(first.sidecar)
        self.metadata["sites"] = [site.name for site in self.sites]
        for source, part in found[1:]:
            if not np.array_equal(self.positions, _int64(source, part.positions)):
                raise CaptureFileError(f"{part.paths[0]}: not the positions that {first.paths[0]} has")

    def __repr__(self) -> str:
        sites = ", ".join(site.name for site in self.sites[:3]) + (", ..." if len(self.sites) > 3 else "")
        return f"<StoredCapture {self.tag}/{self.name} ({self.layout}): {self.num_rows} rows of {sites}>"

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook: facts, and norms by site and position of a few rows, which are read."""
        sidecar = self._first.sidecar
        facts = {
            "request": f"{self.tag}/{self.name}: {sidecar.status}",
            "rows": f"{self.num_rows} of {len(self.sites)} sites in {sidecar.dtype}; {sidecar.dropped_rows} dropped",
            "tokens of the prompt": sidecar.num_prompt_tokens,
            "model": sidecar.model,
            "files": f"{self.num_bytes / 1e6:.1f} MB, {self.layout}: {self.paths[0]}",
        }
        if not isinstance(self._source, LocalSource) and self.num_bytes > MAX_FETCHED:
            return page("StoredCapture", {**facts, "norms": f"not read: over {MAX_FETCHED} bytes to fetch"})
        heat = norms_by_position(self.sites, self.positions, lambda site, index: _widened(self._stored(site)[index]))
        return page("StoredCapture", facts, None if heat is None else norm_table(heat, len(self.sites)), heat)

    def __iter__(self) -> Iterator[Site]:
        """The sites, in the order of the forward pass."""
        return iter(self.sites)

    def __getitem__(self, site: Site | str) -> Tensor:
        """Return `tensor` of the site."""
        return self.tensor(site)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 ``[rows]``, ascending: the absolute position of each row."""
        return _int64(self._source, self._first.positions)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64 ``[rows]``: the token whose forward gave the row."""
        return _int64(self._source, self._first.token_ids)

    @property
    def is_prefill(self) -> npt.NDArray[np.bool_]:
        """bool ``[rows]``: True where the row's token was part of the prompt."""
        return self.positions < self._first.sidecar.num_prompt_tokens

    def in_role(self, role: str) -> npt.NDArray[np.bool_]:
        """bool ``[rows]``: True where the row's token is part of a message of that role. The answer is part of none.

        Raises:
            ValueError: If the file does not say where the messages are, or the chat has none of that role.
        """
        if self.messages is None:
            raise ValueError(f"{self!r} does not say where messages are: set capture_messages when capturing")
        found = [message for message in self.messages if message.role == role]
        if not found:
            known = ", ".join(dict.fromkeys(message.role for message in self.messages))
            raise ValueError(f"{role}: {self!r} has no message of that role; it has: {known}")
        positions = self.positions
        inside = np.zeros(len(positions), dtype=np.bool_)
        for message in found:
            inside |= (message.start <= positions) & (positions < message.stop)
        return inside

    def tensor(self, site: Site | str) -> Tensor:
        """``[rows, width]`` in the site's own dtype.

        Writing to it changes only this copy, never the file.

        Args:
            site: ``"12.post_mlp"``, ``"final_norm"``, an alias such as ``"12.resid_post"``, or a `Site`.

        Raises:
            KeyError: If the site was not captured; the message lists the captured ones.
        """
        import torch  # reading positions, metadata or numpy needs none

        source, ref = self._place(site)
        dtype = getattr(torch, ref.dtype)
        if not ref.num_bytes:
            return torch.empty(ref.shape, dtype=dtype)
        data = torch.from_numpy(source.array(ref.path, ref.offset, ref.num_bytes))
        return data.view(dtype).reshape(ref.shape)

    def numpy(self, site: Site | str) -> npt.NDArray[Any]:
        """``[rows, hidden]`` as numpy: float16 and float32 as they are, bfloat16 as float32, which holds it exactly.

        Raises:
            KeyError: As `tensor` does.
        """
        return _widened(self._stored(site))

    def outputs(self, site: Site | str) -> dict[str, npt.NDArray[Any]]:
        """Outputs that were stored in place of rows, by name: ``[rows, n]`` each, or with more axes.

        Those of `features` are ``ids``, int64, and ``values``, float32, the strongest first; where features were given,
        ``values`` alone, in their order. Those of `lens` are ``ids``, ``logprobs``, ``token_logprobs`` and
        ``token_ranks``. Those of `attention` are ``pattern``, ``[rows, heads, keys]``, or ``keys``, ``values`` and
        ``rest``; a row is a query.

        Raises:
            KeyError: As `tensor` does.
            ValueError: If the capture has rows of the model itself.
        """
        readout = self._first.sidecar.readout
        rows = self.numpy(site)
        if readout is None:
            raise ValueError(f"{self!r} has rows of the model, and no outputs of a readout")
        return readout.named(rows)

    def _stored(self, site: Site | str) -> npt.NDArray[Any]:
        """``[rows, hidden]`` as stored; of bfloat16 its bits as uint16."""
        source, ref = self._place(site)
        data = source.array(ref.path, ref.offset, ref.num_bytes)
        return data.view(np.uint16 if ref.dtype == "bfloat16" else ref.dtype).reshape(ref.shape)

    def _place(self, site: Site | str) -> tuple[Source, TensorRef]:
        try:
            name = (site if isinstance(site, Site) else Site.parse(site)).name
            return self._places[name]
        except (KeyError, ValueError):
            raise KeyError(f"{site}: not captured; {self!r} has {', '.join(s.name for s in self.sites)}") from None


def _int64(source: Source, column: npt.NDArray[np.int64] | TensorRef) -> npt.NDArray[np.int64]:
    if isinstance(column, TensorRef):
        return source.array(column.path, column.offset, column.num_bytes).view(np.int64)
    return column


def _widened(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows


class CaptureFolder:
    """All requests in roots of the filesystem consumer. Each iteration reads the folders, by tag, then by name.

    Attributes:
        damaged: Errors of the files that the last iteration omitted, if the folder was opened with ``strict=False``.
    """

    def __init__(self, roots: Sequence[str | os.PathLike[str]], *, strict: bool) -> None:
        self._roots = [open_source(os.fspath(root)) for root in roots]
        for root, (source, folder) in zip(roots, self._roots, strict=True):
            if not source.is_folder(folder):
                raise CaptureFileError(f"{root}: no such folder")
        self._strict = strict
        self.damaged: list[CaptureFileError] = []

    def __iter__(self) -> Iterator[StoredCapture]:
        return self._captures(self.tags, "")

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook: its tags and first requests. `damaged` is left as it is."""
        tags, damaged = self.tags, self.damaged
        facts = {"root": ", ".join(folder for _, folder in self._roots), f"{len(tags)} tags": ", ".join(tags) or "none"}
        try:
            first = list(islice(self, SHOWN_REQUESTS + 1))
        except CaptureFileError as error:
            return page("CaptureFolder", {**facts, "damaged": error})
        finally:
            self.damaged = damaged
        lines = [(one.tag, one.name, one.num_rows, len(one.sites), f"{one.num_bytes / 1e6:.1f}") for one in first]
        is_all = len(first) <= SHOWN_REQUESTS
        header = ("tag", "request", "rows", "sites", "MB")
        return page("CaptureFolder", facts, TextTable(header, lines[:SHOWN_REQUESTS], len(first) if is_all else None))

    @property
    def tags(self) -> list[str]:
        """The tags that have a folder."""
        names = {name for source, root in self._roots for name, is_folder in source.names(root) if is_folder}
        return sorted(name for name in names if not name.startswith((".", "_")))

    def find(self, request_id: str, tag: str | None = None) -> list[StoredCapture]:
        """Every capture of `request_id`: one per tag, sample and, in shards, request that used the id again."""
        tags = [known for known in self.tags if tag in (None, known)]  # a path such as "tag/" could lead elsewhere
        return [
            capture
            for capture in self._captures(tags, slug(request_id))
            if request_id in (capture.request_id, capture.name)
        ]

    def __getitem__(self, request_id: str) -> StoredCapture:
        """The one capture of `request_id`.

        Raises:
            KeyError: If there is none, or more than one; `find` returns them all.
        """
        found = self.find(request_id)
        if len(found) != 1:
            what = f"{len(found)} captures, use find(): {found}" if found else "no such capture"
            raise KeyError(f"{request_id}: {what}")
        return found[0]

    def _captures(self, tags: list[str], prefix: str) -> Iterator[StoredCapture]:
        self.damaged = []
        for tag in tags:
            stages: dict[tuple[object, ...], list[_Found]] = {}
            seen: Counter[tuple[object, ...]] = Counter()
            for source, part in self._found(tag, prefix):
                if part.sidecar.pp_size == 1:
                    yield StoredCapture([(source, part)])
                else:
                    # An id that was used twice comes twice from each stage, in the same order.
                    key = _request_key(part)
                    stages.setdefault((*key, seen[(*key, part.sidecar.pp_rank)]), []).append((source, part))
                    seen[(*key, part.sidecar.pp_rank)] += 1
            for found in stages.values():
                yield StoredCapture(found)

    def _found(self, tag: str, prefix: str) -> Iterator[_Found]:
        for source, root in self._roots:
            if source.is_folder(f"{root}/{tag}"):
                for part in self._parts(source, f"{root}/{tag}", prefix):
                    yield source, part

    def _parts(self, source: Source, folder: str, prefix: str) -> Iterator[StoredStage]:
        """Parts of a tag's folder whose names begin with `prefix`, and all requests in its shards."""
        for name, is_folder in source.names(folder):
            if name == SHARD_FOLDER and is_folder:
                for shard, _ in source.names(f"{folder}/{name}"):
                    yield from self._shard(source, f"{folder}/{name}/{shard}")
            elif name.startswith(prefix) and not name.startswith("."):
                part = self._file(source, f"{folder}/{name}", is_folder)
                if part is not None:
                    yield part

    def _file(self, source: Source, path: str, is_folder: bool) -> StoredStage | None:
        try:
            return _read_part(source, path, is_folder)
        except CaptureFileError as error:
            self._note(error)
            return None

    def _shard(self, source: Source, path: str) -> Iterator[StoredStage]:
        try:
            yield from read_shard(source, path)
        except CaptureFileError as error:
            self._note(error)

    def _note(self, error: CaptureFileError) -> None:
        if self._strict:
            raise error
        self.damaged.append(error)


def open_captures(root: str | os.PathLike[str], *more: str | os.PathLike[str], strict: bool = True) -> CaptureFolder:
    """Open roots of the filesystem consumer, folders or fsspec URLs, while they are written to or afterwards.

    Args:
        root: The consumer's ``root``.
        more: Those of other hosts: stages of a pipeline that lie in several roots are put together.
        strict: Raise on a damaged file; otherwise leave it out and note it in `CaptureFolder.damaged`.

    Raises:
        CaptureFileError: If there is no such folder.
    """
    return CaptureFolder([root, *more], strict=strict)


def open_capture(path: str | os.PathLike[str]) -> StoredCapture:
    """Open one file of the layout ``request`` or one folder of the layout ``raw``.

    Raises:
        CaptureFileError: If it is neither, or damaged.
    """
    source, where = open_source(os.fspath(path))
    part = _read_part(source, where, source.is_folder(where))
    if part is None:
        raise CaptureFileError(f"{path}: not written by headgate's filesystem consumer")
    return StoredCapture([(source, part)])


def open_stored(payload: Any) -> StoredCapture:
    """Open the rows of a result of the filesystem consumer.

    Args:
        payload: ``CaptureResult.payload`` of one sample; of several pipeline stages, the list of theirs.

    Raises:
        CaptureFileError: If a file is not there any more, or damaged.
    """
    stages = payload if isinstance(payload, list) else [payload]
    found: list[_Found] = []
    for stage in stages:
        if stage.get("stored") is False:
            decision = stage["if_probe"]
            raise CaptureFileError(
                f"nothing was recorded: the highest score of the probe {decision['probe']!r} is {decision['highest']} "
                f"(position {decision['at']}), not above {decision['above']}"
            )
        source, where = open_source(stage["paths"][0])
        if stage["layout"] == "shards":
            url = stage["paths"][0]
            part = _shard_requests(url, source.size(f"{where}/{INDEX}")).get(tuple(stage["rows"]))
        else:
            is_folder = stage["layout"] == "raw"
            part = _read_part(source, where.rpartition("/")[0] if is_folder else where, is_folder)
        if part is None:
            late = " yet: its upload had not ended when the result was given" if stage.get("uploaded") is False else ""
            raise CaptureFileError(
                f"{stage['paths'][0]}: the request that was written there is not there{late}; an engine on several "
                "hosts writes on the host of each stage"
            )
        found.append((source, part))
    return StoredCapture(found)


@lru_cache(maxsize=4)
def _shard_requests(url: str, index_bytes: int) -> dict[tuple[int, ...], StoredStage]:
    """The requests of a shard by their rows in its files, read once for each length of its index."""
    requests: dict[tuple[int, ...], StoredStage] = {}
    source, folder = open_source(url)
    for part in read_shard(source, folder):
        column = part.positions
        assert isinstance(column, TensorRef)  # noqa: S101  (of this layout)
        start = column.offset // ITEM_SIZES["int64"]
        requests[start, start + column.shape[0]] = part
    return requests


def _read_part(source: Source, path: str, is_folder: bool) -> StoredStage | None:
    if is_folder:
        return read_raw_folder(source, path)
    return read_request_file(source, path) if path.endswith(FILE_SUFFIX) else None


def _request_key(part: StoredStage) -> tuple[str, ...]:
    """The fields that the parts of one request, written by several pipeline stages, share."""
    sidecar = part.sidecar
    return part.layout, sidecar.name, sidecar.engine_request_id, sidecar.client_request_id
