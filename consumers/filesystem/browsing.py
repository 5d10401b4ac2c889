"""A root as clients of a server see it: a list of their captures, and the rows of one.

A client names a capture by its tag and the name of its file or folder, which are compared with what is there and are
never joined to a path unchecked. Symbolic links are passed by. Whether a client may see a capture is decided by the
owner that the capture itself names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import CaptureFileError, NoCaptureError, RequestError, check_keys, shown
from headgate.capture.schema.results import ReportContext, SentFile
from headgate.capture.schema.sites import Site, site_map
from headgate.consumers.filesystem.formats.layout import (
    POSITIONS,
    SHARD_FOLDER,
    TOKEN_IDS,
    LayoutName,
    Sidecar,
    StoredStage,
    TensorRef,
)
from headgate.consumers.filesystem.formats.raw_layout import read_raw_folder
from headgate.consumers.filesystem.formats.request_layout import header, read_request_file
from headgate.consumers.filesystem.formats.shard_layout import SHARD, read_shard
from headgate.consumers.filesystem.storage.source import LocalSource
from headgate.consumers.filesystem.storage.store import FILE_SUFFIX

DEFAULT_PAGE, MAX_PAGE = 50, 500
"""Captures of one page: without ``limit``, and at most."""

MAX_NAME = 255
"""Characters of a file's name, at most, as file systems have it."""

MAX_OPENED = 2000
"""Files and folders that are opened for one page, at most; a page may then be short, and says where to go on."""

PIECE_BYTES = 1 << 20
_FIELDS = ("tag", "site", "role", "probe", "limit", "after")
_NAME = re.compile(r"[A-Za-z0-9~][A-Za-z0-9._~-]*")
_NUMBER = re.compile(r"[0-9]{1,18}")


class _Unit(NamedTuple):
    """A file of the layout ``request``, or a folder of ``raw`` or ``shards``; ordered by age."""

    stamp: int
    tag: str
    name: str
    layout: LayoutName


class _Query(NamedTuple):
    tag: str | None
    site: str | None
    role: str | None
    probe: str | None
    limit: int
    after: tuple[int, str, str, int] | None


def list_captures(root: Path, context: ReportContext) -> dict[str, Any]:
    """Return a page of the captures in a root that a client may see, the newest first.

    Fields of the query: ``tag``; ``site``, such as ``12.post_mlp``; ``role``, that a message of the chat has;
    ``probe``, that fired (`Sidecar.if_probe`); ``limit``; ``after``, the ``next`` of the page before.

    Raises:
        RequestError: Naming the field of the query that is wrong.
        CaptureFileError: If this machine has no such folder.
    """
    query = _checked(context.query)
    if not root.is_dir():
        raise CaptureFileError(f"{root}: no such folder on the API server's machine; captures may lie on the workers'")
    units = sorted(_units(root, query.tag, context), reverse=True)
    if query.after is not None:
        units = [unit for unit in units if unit[:3] <= query.after[:3]]
    found: list[dict[str, Any]] = []
    damaged: list[str] = []
    place = None
    for unit in islice(units, MAX_OPENED):
        try:
            for number, part in reversed(list(enumerate(_parts(root, unit)))):
                if query.after is not None and (*unit[:3], number) >= query.after:
                    continue
                if len(found) == query.limit:
                    return _page(found, damaged, place)
                place = (*unit[:3], number)
                if _is_wanted(part, query, context) and _may_see(part, context):
                    found.append(_entry(unit, number, part, context))
        except CaptureFileError as error:
            if context.allows_owner(None):  # whose it is cannot be read
                damaged.append(str(error))
    return _page(found, damaged, (*units[MAX_OPENED - 1][:3], 0) if len(units) > MAX_OPENED else None)


def describe_capture(root: Path, context: ReportContext, tag: str, name: str) -> dict[str, Any]:
    """Return the entry of one capture, its whole ``metadata``, and ``positions`` and ``token_ids`` of its rows.

    Raises:
        RequestError: If there is a query.
        NoCaptureError: If the client sees none of that name.
        CaptureFileError: If it is damaged.
    """
    check_keys(context.query, (), "", "the query")
    unit, number, part = _find(root, context, tag, name)
    metadata = _shown(part, context).document()
    metadata["sites"] = [site.name for site in _sites(part, context)]
    columns = {POSITIONS: _column(part.positions).tolist(), TOKEN_IDS: _column(part.token_ids).tolist()}
    return {**_entry(unit, number, part, context), "metadata": metadata, **columns}


def send_capture(root: Path, context: ReportContext, tag: str, name: str) -> SentFile:
    """Return the rows of one capture as a file of safetensors: ``positions``, ``token_ids`` and its sites.

    The query may have ``sites``, some of the capture's with commas between them; without it they are all.

    Raises:
        RequestError: Naming ``sites``.
        NoCaptureError: If the client sees none of that name.
        CaptureFileError: If it is damaged.
    """
    check_keys(context.query, ("sites",), "", "the query")
    _, _, part = _find(root, context, tag, name)
    known = [site.name for site in _sites(part, context)]
    wanted = _site_names(context.query["sites"], known) if "sites" in context.query else known
    columns = {POSITIONS: _column(part.positions), TOKEN_IDS: _column(part.token_ids)}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        **{name: ("int64", (len(column),)) for name, column in columns.items()},
        **{site: (part.tensors[site].dtype, part.tensors[site].shape) for site in wanted},
    }
    strings = msgspec.structs.replace(_shown(part, context), sites=wanted).to_strings()
    head = header(tensors, strings)
    refs = [part.tensors[site] for site in wanted]
    size = len(head) + sum(column.nbytes for column in columns.values()) + sum(ref.num_bytes for ref in refs)
    return SentFile(num_bytes=size, pieces=_pieces([head, *(each.tobytes() for each in columns.values())], refs))


def _pieces(first: Sequence[bytes], refs: Sequence[TensorRef]) -> Iterator[bytes]:
    yield from first
    for ref in refs:
        for start in range(0, ref.num_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, ref.num_bytes - start)
            yield LocalSource().array(ref.path, ref.offset + start, size).tobytes()


def _find(root: Path, context: ReportContext, tag: str, name: str) -> tuple[_Unit, int, StoredStage]:
    missing = NoCaptureError(f"no capture {shown(name)} under the tag {shown(tag)} that this client may see")
    stem, _, number = name.partition(":")
    is_named = all(len(part) <= MAX_NAME and _NAME.fullmatch(part) for part in (tag, stem))
    is_named = is_named and (not number or _NUMBER.fullmatch(number) is not None)
    unit = _named(root, tag, stem, in_shard=bool(number)) if is_named and context.allows_tag(tag) else None
    if unit is None:
        raise missing
    try:
        part = next(islice(_parts(root, unit), int(number or 0), None), None)
    except CaptureFileError:
        if context.allows_owner(None):
            raise
        raise missing from None
    if part is None or not _may_see(part, context):
        raise missing
    return unit, int(number or 0), part


def _named(root: Path, tag: str, stem: str, *, in_shard: bool) -> _Unit | None:
    folders = (tag, SHARD_FOLDER) if in_shard else (tag,)
    paths = [root.joinpath(*folders[: depth + 1]) for depth in range(len(folders))] + [root.joinpath(*folders, stem)]
    if any(path.is_symlink() for path in paths) or not paths[-1].exists():
        return None
    is_file = paths[-1].is_file()
    return _Unit(0, tag, stem, "shards" if in_shard else "request" if is_file else "raw")


def _units(root: Path, only: str | None, context: ReportContext) -> Iterator[_Unit]:
    """Yield the files and folders under the tags that a client may see, by `scandir` and without opening one."""
    for tag in _entries(root):
        if not tag.is_dir(follow_symlinks=False) or (only is not None and tag.name != only):
            continue
        if not context.allows_tag(tag.name):
            continue
        for entry in _entries(tag.path):
            if entry.name.endswith(FILE_SUFFIX) and entry.is_file(follow_symlinks=False):
                yield from _unit(tag.name, entry, "request", entry.path)
            elif entry.is_dir(follow_symlinks=False):
                yield from _unit(tag.name, entry, "raw", entry.path)
        for entry in _entries(f"{tag.path}/{SHARD_FOLDER}"):
            if entry.is_dir(follow_symlinks=False):
                # A shard grows: the time at which it began stays, and with it its place in the list.
                yield from _unit(tag.name, entry, "shards", f"{entry.path}/{SHARD}")


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    if os.path.islink(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith((".", "_"))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _unit(tag: str, entry: os.DirEntry[str], layout: LayoutName, stamped: str) -> Iterator[_Unit]:
    with suppress(FileNotFoundError):  # gone since
        yield _Unit(os.stat(stamped, follow_symlinks=False).st_mtime_ns, tag, entry.name, layout)


def _parts(root: Path, unit: _Unit) -> Iterator[StoredStage]:
    source = LocalSource()
    if unit.layout == "shards":
        yield from read_shard(source, f"{root}/{unit.tag}/{SHARD_FOLDER}/{unit.name}")
        return
    read = read_request_file if unit.layout == "request" else read_raw_folder
    part = read(source, f"{root}/{unit.tag}/{unit.name}")
    if part is not None:
        yield part


def _sites(part: StoredStage, context: ReportContext) -> list[Site]:
    return [site for site in map(Site.parse, part.sidecar.sites) if context.allows_site(site)]


def _may_see(part: StoredStage, context: ReportContext) -> bool:
    return context.allows_owner(part.sidecar.owner) and (not part.sidecar.sites or bool(_sites(part, context)))


def _shown(part: StoredStage, context: ReportContext) -> Sidecar:
    """The sidecar, without scores of a site that the client may not see."""
    decision = part.sidecar.if_probe
    if decision is None or context.allows_site(Site.parse(decision.site)):
        return part.sidecar
    return msgspec.structs.replace(part.sidecar, if_probe=None)


def _is_wanted(part: StoredStage, query: _Query, context: ReportContext) -> bool:
    roles = {message.role for message in part.sidecar.messages or ()}
    decision = _shown(part, context).if_probe
    is_probed = query.probe is None or (decision is not None and decision.probe == query.probe)
    return is_probed and query.site in (None, *part.sidecar.sites) and query.role in (None, *roles)


def _entry(unit: _Unit, number: int, part: StoredStage, context: ReportContext) -> dict[str, Any]:
    sidecar, sites = _shown(part, context), _sites(part, context)
    messages = sidecar.messages
    return {
        "tag": unit.tag,
        "name": f"{unit.name}:{number}" if unit.layout == "shards" else unit.name,
        "request_id": sidecar.request_id,
        "layout": unit.layout,
        "written_at": sidecar.written_at,
        "model": sidecar.model,
        "status": sidecar.status,
        "num_rows": sidecar.num_rows,
        "num_prompt_tokens": sidecar.num_prompt_tokens,
        "num_bytes": sum(part.tensors[site.name].num_bytes for site in sites),
        "dropped_rows": sidecar.dropped_rows,
        "sites": site_map(sites),
        "roles": None if messages is None else list(dict.fromkeys(message.role for message in messages)),
        "if_probe": msgspec.to_builtins(sidecar.if_probe),
        "stage": [sidecar.pp_rank, sidecar.pp_size],
    }


def _column(column: npt.NDArray[np.int64] | TensorRef) -> npt.NDArray[np.int64]:
    if isinstance(column, TensorRef):
        return LocalSource().array(column.path, column.offset, column.num_bytes).view(np.int64)
    return column


def _page(found: list[dict[str, Any]], damaged: list[str], place: tuple[int, str, str, int] | None) -> dict[str, Any]:
    following = None if place is None else "/".join(map(str, place))
    return {"captures": found, "count": len(found), "next": following, "damaged": damaged}


def _checked(query: Mapping[str, str]) -> _Query:
    check_keys(query, _FIELDS, "", "the query")
    site = query.get("site")
    try:
        name = None if site is None else Site.parse(site).name
    except ValueError as error:
        raise RequestError("site", str(error)) from None
    limit = query.get("limit", str(DEFAULT_PAGE))
    if not re.fullmatch(r"[0-9]{1,9}", limit) or not 1 <= int(limit) <= MAX_PAGE:
        raise RequestError("limit", f"expected a number from 1 to {MAX_PAGE}, got {shown(limit)}")
    place = _place(query.get("after"))
    return _Query(query.get("tag"), name, query.get("role"), query.get("probe"), int(limit), place)


def _place(text: str | None) -> tuple[int, str, str, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,19})/([^/]+)/([^/]+)/(\d{1,18})", text, re.ASCII)
    if found is None:
        raise RequestError("after", f"expected the next of the page before, got {shown(text)}")
    return int(found[1]), found[2], found[3], int(found[4])


def _site_names(text: str, known: Sequence[str]) -> list[str]:
    wanted = set()
    for name in text.split(","):
        try:
            site = Site.parse(name).name
        except ValueError as error:
            raise RequestError("sites", str(error)) from None
        if site not in known:
            raise RequestError("sites", f"{site} is not in this capture; it has {', '.join(known)}")
        wanted.add(site)
    return [name for name in known if name in wanted]
