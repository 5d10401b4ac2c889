"""Parameters of the operator and fields of a request, checked before anything is captured."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, Literal

import msgspec

from headgate.capture.monitoring.machine_memory import share_of_memory
from headgate.capture.schema.config import GIB
from headgate.capture.schema.consumer import SpecContext, parse_client_spec
from headgate.capture.schema.errors import ConfigError, RequestError, shown
from headgate.capture.schema.limits import check_tag
from headgate.capture.schema.selectors.parsing import parse_positions
from headgate.capture.schema.sites import parse_hook
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.formats.layout import LayoutName, MessagePlace
from headgate.consumers.filesystem.storage.object_store import check_writable
from headgate.consumers.filesystem.storage.store import FILE_SUFFIX, TAKEN, check_name, slug, stem_of
from headgate.consumers.filesystem.uploading.spool_folder import default_spool

LAYOUTS: tuple[LayoutName, ...] = ("request", "shards", "raw")
OPTIONS = ("tag", "request_id", "layout", "messages")
MAX_MESSAGES = 1024
MAX_POSITION = (1 << 31) - 1
MAX_ROLE = 128
"""Characters of a message's role, at most."""


class FilesystemParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the filesystem consumer.

    Attributes:
        root: Folder, or URL of an object store (``s3://bucket/run``, ``gs://``, ``az://``), for all files. Credentials
            come from the environment and are refused in the URL.
        layout: For requests that name none.
        tag: For requests that name none.
        tags: Tags that requests may name, `tag` among them; any if None.
        threads: Writer threads; all rows of one request go through the same one.
        fsync: Sync files and their folders to the disk before a request's result arrives. Without it a killed process
            still leaves only complete files, but a power failure may not.
        if_exists: If a file of that tag and request id exists: ``error`` ends the request with an error, ``number``
            writes ``{request_id}~2``. Nothing is ever overwritten.
        shard_bytes: Size at which a shard is full.
        max_request_bytes: Rows of one request kept in memory before they move to a temporary file in the root, and
            are therefore written twice; a quarter of `memory_bytes` if None.
        memory_bytes: Limit for the rows of all requests together, including rows queued for the writer threads; if
            None, a sixteenth of the machine's memory, within 1 and 32 GiB. A quarter of it is reserved for new rows.
        max_tag_bytes: Limit of files under one tag, including files of earlier runs; no limit if None. Each file counts
            4 KiB more than its bytes. A request whose rows or files do not fit ends with an error. Counted by each
            worker process separately. Local roots only.
        max_root_bytes: The same for the whole root, whose files are added up when the consumer is opened.
        spool: Local folder where files wait for an object store, and which outlives the process;
            ``$XDG_STATE_HOME/headgate/spool``, or the same under ``~/.local/state``, if None.
        spool_bytes: Limit of files that wait there for `root`; each file counts 4 KiB more than its bytes. A request
            whose rows do not fit ends with an error.
        upload_threads: Concurrent uploads of files or folders of each worker process; each takes up to 32 MiB.
        upload_wait_s: Seconds that a result waits for the upload of its files. After that it has ``"uploaded":
            false``, and the upload continues. While the store is unreachable no result waits.
        keep_aborted: Whether the rows of aborted and failed requests are written; without it their results are errors.
        hooks: ``{hook point: layers}`` to record for every request.
        positions: Which positions to record with `hooks`.
    """

    root: str
    layout: LayoutName = "request"
    tag: str = "default"
    tags: tuple[str, ...] | None = None
    threads: int = 4
    fsync: bool = True
    if_exists: Literal["error", "number"] = "error"
    shard_bytes: int = GIB
    max_request_bytes: int | None = None
    memory_bytes: int | None = None
    max_tag_bytes: int | None = None
    max_root_bytes: int | None = None
    spool: str | None = None
    spool_bytes: int = 64 * GIB
    upload_threads: int = 8
    upload_wait_s: float = 10.0
    keep_aborted: bool = True
    hooks: dict[str, Any] | None = None
    positions: Any = "all"

    @property
    def is_remote(self) -> bool:
        """Whether the root is in an object store."""
        return "://" in self.root and not self.root.startswith("file://")

    @property
    def memory(self) -> int:
        """Bytes of rows held in memory, of all requests."""
        return self.memory_bytes or share_of_memory(16, least=GIB, most=32 * GIB)

    @property
    def request_memory(self) -> int:
        """Bytes of rows held in memory, of one request."""
        return self.max_request_bytes or self.memory // 4

    @property
    def spool_root(self) -> Path:
        """The folder where files wait for an object store."""
        return Path(self.spool).expanduser() if self.spool else default_spool()

    @property
    def local_root(self) -> Path:
        """The root as a local path."""
        return Path(self.root.removeprefix("file://")).expanduser()


def parse_params(params: Mapping[str, Any]) -> FilesystemParams:
    """Read and check the consumer's parameters; touches no disk.

    Raises:
        ConfigError: Naming the parameter.
    """
    plain = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in params.items()}
    try:
        parsed = msgspec.convert(plain, FilesystemParams)
        for tag in parsed.tags or ():
            check_name(tag, "tags")
        check_tag(check_name(parsed.tag, "tag"), parsed.tags, "tag")
        parse_positions(parsed.positions, "positions")
        for hook in parsed.hooks or ():
            parse_hook(hook, f"hooks.{hook}")
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError(f"filesystem: {error}") from error
    _check_numbers(parsed)
    if not parsed.root:
        raise ConfigError("filesystem: root must name a folder or the URL of an object store")
    if parsed.is_remote:
        check_writable(parsed.root)
    return parsed


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check and resolve ``{"hooks", "positions", "tag", "request_id", "layout", "messages"}``; ``hooks`` is required.

    Returns:
        The spec; its options are ``tag``, ``request_id``, ``layout`` and ``name``, the file's name; and ``messages``,
        where those of the chat lie, if the request told.

    Raises:
        RequestError: Naming the field.
    """
    params = context.parsed_params(parse_params)
    spec = parse_client_spec(raw, context, options=OPTIONS)
    options = spec.options
    tag = check_name(options.get("tag", params.tag), f"{context.field}.tag")
    check_tag(tag, params.tags, f"{context.field}.tag")
    layout = options.get("layout", params.layout)
    if layout not in LAYOUTS:
        raise RequestError(f"{context.field}.layout", f"unknown layout {shown(layout)}; known: {', '.join(LAYOUTS)}")
    if "request_id" in options:
        request_id = name = check_name(options["request_id"], f"{context.field}.request_id")
    else:  # made by the front end or a proxy: the client may not even know it, so it is no reason to refuse
        request_id, name = context.client_request_id, slug(context.client_request_id)
        if name.isdecimal():  # `LLM` numbers its requests from 0 in every run
            name = f"{name}~{context.parsed_params(_run)}"
    resolved = {"tag": tag, "request_id": request_id, "name": name, "layout": layout}
    if "messages" in options:
        resolved["messages"] = _messages(options["messages"], f"{context.field}.messages")
    return CaptureSpec(sites=spec.sites, positions=spec.positions, options=resolved)


def _run(params: Mapping[str, Any]) -> str:
    """A name for the run of one engine, made once: ``20261127-153000-1f0c`` in UTC."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def own_paths(spec: CaptureSpec, context: SpecContext, num_samples: int) -> Sequence[str]:
    """Return the paths that a request with a chosen ``request_id`` writes, of which there must be no others.

    Raises:
        RequestError: If one of them exists.
    """
    options, settings = spec.options, context.parsed_params(parse_params)
    layout: LayoutName = options["layout"]
    is_chosen = options["name"] == options["request_id"] != context.client_request_id
    if not is_chosen or layout == "shards" or settings.if_exists == "number":
        return ()
    stems = [stem_of(options["name"], sample=(sample, num_samples), stage=(0, 1)) for sample in range(num_samples)]
    suffix = FILE_SUFFIX if layout == "request" else ""
    if settings.is_remote:
        return [f"{settings.root}/{options['tag']}/{stem}{suffix}" for stem in stems]
    folder = settings.local_root / options["tag"]
    for stem in stems:
        for name in (f"{stem}{suffix}", f"{stem}.pp0{suffix}"):  # the latter of a pipeline
            if os.path.lexists(folder / name):
                raise RequestError(f"{context.field}.request_id", f"{folder / name} {TAKEN}")
    return [str(folder / f"{stem}{suffix}") for stem in stems]


def _messages(value: object, field: str) -> list[dict[str, Any]]:
    """Check where the messages of a chat lie, as a client tells that rendered it itself."""
    if not isinstance(value, list | tuple) or len(value) > MAX_MESSAGES:
        got = f"{len(value)} of them" if isinstance(value, list | tuple) else shown(value)
        raise RequestError(field, f"expected a list of at most {MAX_MESSAGES} messages; got {got}")
    end, told = 0, []
    for number, given in enumerate(value):
        try:
            one = msgspec.convert(given, MessagePlace)
        except msgspec.ValidationError as error:
            raise RequestError(f"{field}[{number}]", f"expected role, start and stop of a message: {error}") from error
        if not end <= one.start < one.stop <= MAX_POSITION or len(one.role) > MAX_ROLE:
            raise RequestError(
                f"{field}[{number}]",
                f"expected a role of at most {MAX_ROLE} characters, and positions that ascend from message to message; "
                f"got {shown(given)}",
            )
        end = one.stop
        told.append(msgspec.to_builtins(one))
    return told


def parse_global(context: SpecContext) -> CaptureSpec | None:
    """The spec of every request, if the parameters have ``hooks``."""
    params = context.parsed_params(parse_params)
    if params.hooks is None:
        return None
    return parse_request({"hooks": params.hooks, "positions": params.positions}, context)


_LOCAL_ONLY = ("max_tag_bytes", "max_root_bytes")
_REMOTE_ONLY = ("spool", "spool_bytes", "upload_threads", "upload_wait_s")
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(FilesystemParams)}


def _check_numbers(params: FilesystemParams) -> None:
    """Raise `ConfigError` if a number is too small, or a parameter is for the other kind of root."""
    at_least_one = ("threads", "shard_bytes", "max_request_bytes", "memory_bytes", *_LOCAL_ONLY)
    for name in (*at_least_one, "spool_bytes", "upload_threads"):
        value = getattr(params, name)
        if value is not None and value < 1:
            raise ConfigError(f"filesystem: {name} must be at least 1, got {value}")
    if not 0 <= params.upload_wait_s <= TIMEOUT_MAX:
        raise ConfigError(
            f"filesystem: upload_wait_s must be from 0 to {TIMEOUT_MAX:.0f} seconds, got {params.upload_wait_s}"
        )
    for name in _LOCAL_ONLY if params.is_remote else _REMOTE_ONLY:
        if getattr(params, name) != _DEFAULTS[name]:
            where = "a local root" if params.is_remote else "a root in an object store"
            raise ConfigError(f"filesystem: {name} needs {where}, {params.root} is none")
