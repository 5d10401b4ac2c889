"""The consumer that writes captured rows to files."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.machine_memory import available_memory, num_processors, share_of_memory
from headgate.capture.monitoring.stats import Figure
from headgate.capture.probe import Probe, check_fits
from headgate.capture.schema.config import GIB, MIB
from headgate.capture.schema.consumer import (
    CaptureConsumer,
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    Readout,
    ReadoutFacts,
    RequestInfo,
    RequestLengths,
    RowBlock,
    RowSpan,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
    read_params,
)
from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError, RequestError, shown
from headgate.capture.schema.limits import check_tag
from headgate.capture.schema.positions import parse_positions
from headgate.capture.schema.registry import load_consumer
from headgate.capture.schema.results import ReportContext, SentFile
from headgate.capture.schema.sites import Columns, Site, SiteShape, parse_hook
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.browsing import describe_capture, list_captures, send_capture
from headgate.consumers.filesystem.condition import (
    IF_PROBE,
    check_any_prompt,
    check_pool,
    parse_condition,
    read_probes,
    with_condition,
)
from headgate.consumers.filesystem.formats.layout import (
    OWNER,
    READOUT,
    Layout,
    LayoutName,
    MessagePlace,
    StoredReadout,
)
from headgate.consumers.filesystem.formats.raw_layout import RawLayout
from headgate.consumers.filesystem.formats.request_layout import RequestLayout
from headgate.consumers.filesystem.formats.shard_layout import ShardLayout
from headgate.consumers.filesystem.request_writer import (
    Outcome,
    RequestSlice,
    RequestWriter,
    RowGatherer,
    WritersOfRequests,
    WriterThread,
)
from headgate.consumers.filesystem.storage.local_store import LocalStore
from headgate.consumers.filesystem.storage.object_store import check_writable
from headgate.consumers.filesystem.storage.quota import FILE_BYTES, DiskQuota
from headgate.consumers.filesystem.storage.store import FILE_SUFFIX, TAKEN, check_name, slug, stem_of
from headgate.consumers.filesystem.uploading.remote_root import RemoteRoot
from headgate.consumers.filesystem.uploading.uploader import default_spool

if TYPE_CHECKING:
    from headgate.consumers.reader import StoredCapture


LAYOUTS: tuple[LayoutName, ...] = ("request", "shards", "raw")
READOUT_OPTIONS = ("tag", "request_id", "layout", "messages")
OPTIONS = (*READOUT_OPTIONS, IF_PROBE)
MAX_MESSAGES = 1024
MAX_POSITION = (1 << 31) - 1
MAX_ROLE = 128
"""Characters of a message's role, at most."""


_load = cache(load_consumer)


class ReadoutSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another consumer: the outputs of its readouts, or what it computes, are stored in place of rows.

    Attributes:
        consumer: Its name, as it is installed.
        params: Its parameters.
    """

    consumer: str
    params: dict[str, Any]

    @property
    def loaded(self) -> type[CaptureConsumer]:
        """Its class.

        Raises:
            ConfigError: If it is not installed, or names no outputs.
        """
        found = _load(self.consumer)
        if found.named_outputs.__func__ is CaptureConsumer.named_outputs.__func__:  # type: ignore[attr-defined]
            raise ConfigError(f"filesystem: reads.consumer: {self.consumer!r} has no outputs that can be stored")
        return found

    @property
    def computes(self) -> bool:
        """Whether an instance of it computes what is stored, of rows of the model: it has no readouts."""
        return self.loaded.stored_outputs.__func__ is not CaptureConsumer.stored_outputs.__func__  # type: ignore[attr-defined]

    def open(self, context: ConsumerContext) -> StreamingConsumer | None:
        """An instance, if it `computes`.

        Raises:
            ConfigError: If it cannot be opened.
        """
        if not self.computes:
            return None
        opened = self.loaded(self.params, context)
        if not isinstance(opened, StreamingConsumer):
            raise ConfigError(f"filesystem: reads.consumer: {self.consumer!r} is no StreamingConsumer")
        return opened

    def own_spec(self, spec: CaptureSpec) -> CaptureSpec:
        """A request's spec as the other consumer made it."""
        return replace(spec, options=spec.options[READOUT]["options"])

    def check_lengths(self, spec: CaptureSpec, context: SpecContext, lengths: RequestLengths) -> None:
        """See `CaptureConsumer.check_lengths`: the other consumer's limits, where it `computes`."""
        if self.computes:
            self.loaded.check_lengths(self.own_spec(spec), replace(context, params=self.params), lengths)

    def parse(self, raw: object, context: SpecContext) -> CaptureSpec:
        """Check the fields of the other consumer and those of files; the latter are options, unchecked.

        Raises:
            RequestError: Naming the field.
        """
        if not isinstance(raw, Mapping):
            raise RequestError(context.field, f"expected an object of fields of {self.consumer!r}, got {shown(raw)}")
        own = {name: raw[name] for name in READOUT_OPTIONS if name in raw}
        rest = {name: value for name, value in raw.items() if name not in own}
        within = replace(context, params=self.params, takes_columns=False)
        spec = self.loaded.validate_client_spec(rest, within)
        outputs = self.loaded.named_outputs(spec, within)
        readout = StoredReadout(consumer=self.consumer, options=dict(spec.options), outputs=outputs)
        return replace(spec, options={**own, READOUT: msgspec.to_builtins(readout)})


class FilesystemParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the filesystem consumer.

    Attributes:
        root: Folder, or URL of an object store (``s3://bucket/run``, ``gs://``, ``az://``), for all files. Credentials
            come from the environment and are refused in the URL.
        layout: For requests that name none.
        tag: For requests that name none.
        tags: Tags that requests may name, `tag` among them; any if None.
        threads: Writer threads; all rows of one request go through the same one. If None, a quarter of the processors
            that this process may use, within 2 and 8.
        fsync: Sync files and their folders to the disk before a request's result arrives. Without it a killed process
            still leaves only complete files, but a power failure may not.
        if_exists: If a file of that tag and request id exists: ``error`` ends the request with an error, ``number``
            writes ``{request_id}~2``. Nothing is ever overwritten.
        shard_bytes: Size at which a shard is full.
        max_request_bytes: Rows of one request kept in memory before they move to a temporary file in the root, and
            are therefore written twice; a quarter of `memory_bytes` if None.
        memory_bytes: Limit for the rows of all requests together, including rows queued for the writer threads; if
            None, a quarter of the memory that is available on this machine when the consumer is opened, within 256 MiB
            and 64 GiB. A quarter of it is reserved for new rows.
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
        if_probe: With `hooks`, record only requests on which a probe fires: ``{"probe": NAME, "above": NUMBER, "pool":
            "token" or "last_prompt"}``, as in requests.
        probes: Files of linear and cosine probes by name, each of one class, for `if_probe` and for requests that name
            one there. Their sites must be among the captured ones. With pipeline parallelism they need the location
            ``driver``.
        reads: Store what another consumer reads or computes of rows in their place: ``{"consumer": "features",
            "params": {...}}``, with its parameters. Requests then have the fields of that consumer, and ``tag``,
            ``request_id``, ``layout`` and ``messages``.
    """

    root: str
    layout: LayoutName = "request"
    tag: str = "default"
    tags: tuple[str, ...] | None = None
    threads: int | None = None
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
    if_probe: dict[str, Any] | None = None
    probes: dict[str, str] = msgspec.field(default_factory=dict)
    reads: ReadoutSource | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the root is in an object store."""
        return "://" in self.root and not self.root.startswith("file://")

    @property
    def spool_root(self) -> Path:
        """The folder where files wait for an object store."""
        return Path(self.spool).expanduser() if self.spool else default_spool()

    @property
    def local_root(self) -> Path:
        """The root as a local path."""
        return Path(self.root.removeprefix("file://")).expanduser()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Threads and memory of one instance.

    Attributes:
        threads: Writer threads.
        memory: Bytes of rows held in memory, of all requests.
        request_memory: The same of one request.
    """

    threads: int
    memory: int
    request_memory: int


def sizes_of(params: FilesystemParams, num_workers: int) -> Sizes:
    """The sizes that are configured, and for others what this machine has.

    Args:
        params: As configured.
        num_workers: Workers that have an instance each, and share the machine.
    """
    memory = params.memory_bytes or share_of_memory(4 * num_workers, least=GIB // 4, most=64 * GIB)
    return Sizes(
        threads=params.threads or min(max(num_processors() // 4, 2), 8),
        memory=memory,
        request_memory=params.max_request_bytes or memory // 4,
    )


def parse_params(params: Mapping[str, Any]) -> FilesystemParams:
    """Read and check the consumer's parameters; touches no disk.

    Raises:
        ConfigError: Naming the parameter.
    """
    parsed = read_params(FilesystemParams, params, "filesystem", **dict.fromkeys(_AT_LEAST_ONE, 1))
    try:
        for tag in parsed.tags or ():
            check_name(tag, "tags")
        check_tag(check_name(parsed.tag, "tag"), parsed.tags, "tag")
        parse_positions(parsed.positions, "positions")
        for hook in parsed.hooks or ():
            parse_hook(hook, f"hooks.{hook}")
    except RequestError as error:
        raise ConfigError(f"filesystem: {error}") from error
    _check_kind(parsed)
    if parsed.if_probe is not None and parsed.hooks is None:
        raise ConfigError("filesystem: if_probe is for what is recorded of every request: give hooks, too")
    if parsed.reads is not None and (parsed.hooks is not None or parsed.probes):
        raise ConfigError("filesystem: reads: an instance with it stores no rows: give hooks and probes to another one")
    if not parsed.root:
        raise ConfigError("filesystem: root must name a folder or the URL of an object store")
    if parsed.is_remote:
        check_writable(parsed.root)
    return parsed


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check and resolve ``{"hooks", "positions", "tag", "request_id", "layout", "messages", "if_probe"}``; ``hooks`` is
    required. With `FilesystemParams.reads` there are the fields of that consumer in place of some.

    Returns:
        The spec; its options are ``tag``, ``request_id``, ``layout`` and ``name``, the file's name; ``owner``, the
        client's name, if it has shown a key; ``messages``, where the chat's messages lie, if the request says so;
        ``readout``, a `StoredReadout`, with `FilesystemParams.reads`; and ``if_probe``, a `Condition`, whose probe's
        site is among the spec's.

    Raises:
        RequestError: Naming the field.
    """
    params = context.parsed_params(parse_params)
    reads = params.reads
    spec = parse_client_spec(raw, context, options=OPTIONS) if reads is None else reads.parse(raw, context)
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
    if context.owner is not None:
        resolved[OWNER] = context.owner
    if READOUT in options:
        resolved[READOUT] = options[READOUT]
    if "messages" in options:
        resolved["messages"] = _messages(options["messages"], f"{context.field}.messages")
    spec = replace(spec, options=resolved)
    if options.get(IF_PROBE) is None:
        return spec
    return with_condition(spec, options[IF_PROBE], context.parsed_params(configured_probes), context.field)


def configured_probes(params: Mapping[str, Any]) -> dict[str, Probe]:
    """Read the files of the parameter ``probes``; see `read_probes`."""
    return read_probes(parse_params(params).probes)


def _run(params: Mapping[str, Any]) -> str:
    """A name for the run of one engine, made once: ``20261127-153000-1f0c`` in UTC."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def own_paths(spec: CaptureSpec, context: SpecContext, num_samples: int) -> Sequence[str]:
    """Return the paths that a request with a chosen ``request_id`` writes; there must be no others of them.

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
    """Check where the messages of a chat lie, as given by a client that rendered it itself."""
    if not isinstance(value, list | tuple) or len(value) > MAX_MESSAGES:
        got = f"{len(value)} of them" if isinstance(value, list | tuple) else shown(value)
        raise RequestError(field, f"expected a list of at most {MAX_MESSAGES} messages; got {got}")
    end, reported = 0, []
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
        reported.append(msgspec.to_builtins(one))
    return reported


_LOCAL_ONLY = ("max_tag_bytes", "max_root_bytes")
_AT_LEAST_ONE = (
    *("threads", "shard_bytes", "max_request_bytes", "memory_bytes", "spool_bytes", "upload_threads"),
    *_LOCAL_ONLY,
)
_REMOTE_ONLY = ("spool", "spool_bytes", "upload_threads", "upload_wait_s")
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(FilesystemParams)}


def _check_kind(params: FilesystemParams) -> None:
    """Raise `ConfigError` if a parameter is for the other kind of root."""
    if not 0 <= params.upload_wait_s <= TIMEOUT_MAX:
        raise ConfigError(
            f"filesystem: upload_wait_s must be from 0 to {TIMEOUT_MAX:.0f} seconds, got {params.upload_wait_s}"
        )
    for name in _LOCAL_ONLY if params.is_remote else _REMOTE_ONLY:
        if getattr(params, name) != _DEFAULTS[name]:
            where = "a local root" if params.is_remote else "a root in an object store"
            raise ConfigError(f"filesystem: {name} needs {where}, {params.root} is none")


logger = logging.getLogger(__name__)

CUT_OFF = ("abort", "error")
"""Statuses of requests that ended before they had all their rows."""

MAX_GATHERED_BYTES = 32 << 20
"""Rows kept for a few steps, so that they can be cut out of their blocks together."""

MAX_SHARD_AGE_S = 600.0
"""Time for which a shard grows before it is uploaded, if it does not become full."""


class FilesystemConsumer(StreamingConsumer):
    """Writes each request's rows to files; `FilesystemParams` lists the parameters.

    A request asks with ``{"hooks", "positions", "tag", "request_id", "layout", "if_probe"}``; only ``hooks`` is
    required. Its result's payload lists the files (see `payload_of`) and comes once they are in place and, with fsync
    on, on the disk. With ``if_probe``, rows are collected as always, and nothing of them is left at the end unless the
    probe fired.

    Threads: the consumer's own thread cuts rows per request and hands them to `threads` writer threads, always the same
    one for a request; each of those keeps its requests to itself. When the disk does not keep up, the queues before
    the writers fill and `write` waits, so that the consumer's overload policy decides.

    A root in an object store is written to the spool of this machine in the same way, and uploaded from there.

    Raises:
        ConfigError: If the root cannot be written to.
    """

    location = "worker"
    takes_messages = True
    takes_columns = True
    takes_tag = True
    global_spec_param = "hooks"
    linger_s = 0.25  # files are complete when a request has ended, not before
    keeps_rows = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._settings = settings = parse_params(params)
        self._probes = _fitting_probes(params, context)
        self._sizes = sizes = sizes_of(settings, context.pp_size)
        self._remote = RemoteRoot(settings.root, settings.spool_root) if settings.is_remote else None
        self._quota = _quota(settings, self._remote)
        root, numbering = self._remote.path if self._remote else settings.local_root, settings.if_exists == "number"
        self._store = LocalStore(root, fsync=settings.fsync, numbering=numbering)
        self._source = None if settings.reads is None else settings.reads.open(context)
        if self._quota is not None:
            self._quota.open()
        if self._remote is not None:
            assert self._quota is not None  # noqa: S101  (of the spool)
            self._remote.start(
                f"headgate-{context.instance_name}",
                threads=settings.upload_threads,
                wait_s=settings.upload_wait_s,
                numbering=numbering,
                removed=self._quota.removed,
            )
        self._gatherer = RowGatherer(min(sizes.memory // 8, MAX_GATHERED_BYTES))
        self._sites: tuple[Site, ...] = ()  # of the last block, and the shapes of their rows
        self._shapes: dict[SiteShape, Site] = {}
        self._columns: Mapping[Site, Columns] = {}
        self._writers = WritersOfRequests(sizes.threads)
        self._outstanding: set[Outcome] = set()
        self._outstanding_lock = threading.Lock()  # guards both, which writer threads change
        self._decided = Counter[bool]()  # requests with a condition, by whether they were recorded
        self._request_writers = [self._new_request_writer() for _ in range(sizes.threads)]
        self._threads = [
            WriterThread(
                f"headgate-{context.instance_name}-{index}",
                queue_bytes=sizes.memory // 4 // sizes.threads,
                after_batch=writer.sync_stored,
                ended=writer.close,
            )
            for index, writer in enumerate(self._request_writers)
        ]
        self._log_sizes()

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        probes, condition = configured_probes(params), params.get(IF_PROBE)
        if (reads := parse_params(params).reads) is not None:
            reads.loaded.check_params(reads.params)
        if condition is not None:
            try:
                parse_condition(condition, probes, IF_PROBE)
            except RequestError as error:
                raise ConfigError(f"filesystem: {error}") from error

    @classmethod
    def offers(cls, params: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        probes = list(params.get("probes") or ())
        if (reads := parse_params(params).reads) is not None:
            return reads.loaded.offers(reads.params)
        return {IF_PROBE: probes} if probes else {}

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def check_lengths(cls, spec: CaptureSpec, context: SpecContext, lengths: RequestLengths) -> None:
        if IF_PROBE in spec.options:
            check_pool(spec, lengths.num_prompt, context.field)
        if (reads := context.parsed_params(parse_params).reads) is not None:
            reads.check_lengths(spec, context, lengths)

    @classmethod
    def readouts(cls, params: Mapping[str, Any], model: ModelInfo) -> dict[Site, Readout]:
        reads = parse_params(params).reads
        return {} if reads is None else dict(reads.loaded.readouts(reads.params, model))

    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec | None:
        raw = {name: context.params.get(name) for name in ("hooks", "positions", IF_PROBE)}
        given = {name: value for name, value in raw.items() if value is not None}
        # The rows are the operator's.
        return parse_request(given, replace(context, owner=None)) if "hooks" in given else None

    @classmethod
    def own_names(cls, spec: CaptureSpec, context: SpecContext, num_samples: int) -> Sequence[str]:
        return own_paths(spec, context, num_samples)

    @classmethod
    def fetch_rows(cls, payload: Any) -> StoredCapture:
        """See `headgate.capture.schema.results.RowFetcher`."""
        from headgate.consumers.reader import open_stored  # which imports this package

        return open_stored(payload)

    @classmethod
    def list_captures(cls, context: ReportContext) -> dict[str, Any]:
        """See `headgate.capture.schema.results.CaptureBrowser`."""
        return list_captures(_browsed(context), context)

    @classmethod
    def describe_capture(cls, context: ReportContext, tag: str, name: str) -> dict[str, Any]:
        """See `headgate.capture.schema.results.CaptureBrowser`."""
        return describe_capture(_browsed(context), context, tag, name)

    @classmethod
    def send_capture(cls, context: ReportContext, tag: str, name: str) -> SentFile:
        """See `headgate.capture.schema.results.CaptureBrowser`."""
        return send_capture(_browsed(context), context, tag, name)

    def begin(self, request: RequestInfo) -> None:
        if any(facts.key != self._readout_keys.get(site) for site, facts in request.readouts.items()):
            raise ConsumerError("a file of the readout has changed since the engine started; restart it to use it")
        if self._source is not None:
            self._source.begin(self._own_request(request))
        else:
            self._begin(request)

    def _begin(self, request: RequestInfo) -> None:
        if request.spec.sites:
            index = self._writers.begin(request.request_id)
            # No thread wakes up for it: the first rows bring the writer to it.
            self._threads[index].submit(partial(self._request_writers[index].begin, request), is_urgent=False)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        if self._source is not None:
            self._source.write(blocks)
        else:
            self._write(blocks)

    def _write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            data = self._bytes_of(block)
            self._gatherer.add(block if self._quota is None else self._quota.within(block, data), data)
        if self._gatherer.is_full:
            self._hand_over(self._gatherer.pop_all())

    def finish(self, finished: FinishedRequest) -> Any:
        if not finished.request.spec.sites:
            return None  # all of its sites belong to other pipeline stages
        if not self._settings.keep_aborted and finished.final.status in CUT_OFF:
            self.abandon(finished.request)
            raise ConsumerError(
                f"the request ended with {finished.final.status!r}, and its rows are not written (keep_aborted=false)"
            )
        if self._source is not None:
            finished = self._computed(self._source, finished)
        settle = self._book(finished.request)
        pieces = self._gatherer.pop(finished.request.request_id)
        outcome: Outcome = Future()
        with self._outstanding_lock:
            self._outstanding.add(outcome)
        outcome.add_done_callback(partial(self._stored, settle, _num_files(finished.request)))
        index = self._writers.end(finished.request.request_id)
        self._threads[index].submit(
            partial(self._request_writers[index].finish, finished, pieces, outcome),
            sum(piece.rows.nbytes for piece in pieces),
        )
        return outcome if self._remote is None else self._remote.after(outcome)

    def _own_request(self, request: RequestInfo) -> RequestInfo:
        """A request as the consumer knows it that computes what is stored; no chunk takes parts of that."""
        assert self._settings.reads is not None  # noqa: S101  (there is such a consumer)
        return replace(request, spec=self._settings.reads.own_spec(request.spec), origin=None)

    def _computed(self, source: StreamingConsumer, finished: FinishedRequest) -> FinishedRequest:
        """Put what was computed of a request in place of its rows, and return the request as one of such outputs.

        It waits for the rest of the computation; most was done while the request ran.
        """
        import torch

        request = self._own_request(finished.request)
        payload = source.finish(replace(finished, request=request))
        found = source.stored_outputs(payload.result() if isinstance(payload, Future) else payload)
        spec, width = finished.request.spec, max((part.stop for part in found.columns.values()), default=0)
        readout = msgspec.convert(spec.options[READOUT], StoredReadout)
        readout = msgspec.structs.replace(readout, outputs=found.columns, shapes=found.shapes)
        sites = tuple(found.rows)
        request = replace(
            finished.request,
            spec=replace(
                spec,
                sites=sites,
                positions=spec.positions_at(sites[0]),
                hook_positions={},
                options={**spec.options, READOUT: msgspec.to_builtins(readout)},
            ),
            readouts=dict.fromkeys(sites, ReadoutFacts(max(width, 1), "")),
        )
        self._begin(request)
        if count := len(found.positions):
            span = RowSpan(request=request, start=0, stop=count)
            rows = torch.stack([found.rows[site] for site in sites])
            self._write([RowBlock(sites=sites, rows=rows, positions=found.positions, spans=(span,))])
        return replace(finished, request=request)

    def abandon(self, request: RequestInfo) -> None:
        if self._source is not None:
            self._source.abandon(self._own_request(request))
        if self._quota is not None:
            self._quota.release(request.request_id)
        self._gatherer.pop(request.request_id)
        index = self._writers.end(request.request_id)
        self._threads[index].submit(partial(self._request_writers[index].abandon, request))

    def figures(self) -> Sequence[Figure]:
        """Return how conditions were decided, and what waits in the spool and was uploaded to an object store."""
        remote = () if self._remote is None else self._remote.figures()
        if not self._probes:
            return remote
        with self._outstanding_lock:
            decided = [
                ("recorded", "recorded", self._decided[True]),
                ("discarded", "not recorded", self._decided[False]),
            ]
        return (
            *remote,
            *(
                Figure(
                    name=f"if_probe_{name}", kind="counter", about=f"Requests with if_probe that were {what}.", value=n
                )
                for name, what, n in decided
            ),
        )

    def close(self, timeout_s: float) -> None:
        """Write all queued rows within `timeout_s` seconds; requests left over end with an error. Any thread."""
        deadline = time.monotonic() + timeout_s
        if self._source is not None:
            self._source.close(timeout_s / 2)
        for thread in self._threads:
            thread.close()
        ended = [thread.join(max(deadline - time.monotonic(), 0.0)) for thread in self._threads]
        with self._outstanding_lock:
            left = list(self._outstanding)
        for outcome in left:
            _give_up(outcome, timeout_s)
        if all(ended):
            self._store.close()
        else:  # the hanging threads may still write there; the next start removes the folder
            logger.error("%d writer threads did not end within %.1f s", ended.count(False), timeout_s)
        if self._remote is not None:
            self._remote.close(max(deadline - time.monotonic(), 0.0))

    @cached_property
    def _readout_keys(self) -> dict[Site, str]:
        """`Readout.key` of the files as they are now, by site."""
        return {site: readout.key for site, readout in self.readouts(self.params, self.context.model).items()}

    def _bytes_of(self, block: RowBlock) -> npt.NDArray[np.uint8]:
        """The rows of a block as uint8 ``[S, N, row_bytes]``."""
        import torch

        request = block.spans[0].request
        if block.sites is not self._sites or request.spec.columns != self._columns:
            self._sites, self._columns = block.sites, request.spec.columns
            self._shapes = {request.shape(site, self.context.model): site for site in block.sites}
        for shape, site in self._shapes.items():
            if block.rows.dtype != getattr(torch, shape.dtype) or block.rows.shape[2] != shape.width:
                given = f"{block.rows.dtype} and width {block.rows.shape[2]}"
                raise ConsumerError(
                    f"rows of {given}; the model has {shape.dtype} and width {shape.width} at {site.name}"
                )
        return block.rows.contiguous().view(torch.uint8).numpy()

    def _new_request_writer(self) -> RequestWriter:
        from headgate.capture.delivery.row_packets import RowPool  # which imports torch

        settings, sizes = self._settings, self._sizes
        return RequestWriter(
            self.context,
            _layouts(self._store, settings, self._remote),
            self._store.temp_path,
            RowPool(sizes.memory // 4 // sizes.threads),
            max_request_bytes=sizes.request_memory,
            memory_bytes=sizes.memory * 5 // 8 // sizes.threads,
            probes=self._probes,
        )

    def _log_sizes(self) -> None:
        sizes, name = self._sizes, self.context.instance_name
        logger.info(
            "filesystem consumer %r: %d writer threads and up to %.0f MiB of memory for rows. "
            "Its parameters threads and memory_bytes set other sizes",
            name,
            sizes.threads,
            sizes.memory / MIB,
        )
        if self._settings.memory_bytes is None and sizes.memory < GIB:
            logger.warning(
                "filesystem consumer %r: only %.0f MiB of memory are available, so rows of running requests may take "
                "%.0f MiB; what does not fit is written twice, first to a temporary file. Set memory_bytes for more",
                name,
                available_memory() / MIB,
                sizes.memory / MIB,
            )

    def _hand_over(self, gathered: Mapping[str, list[RequestSlice]]) -> None:
        """Queue rows for the writers of their requests; wait for room."""
        by_writer: dict[int, dict[str, list[RequestSlice]]] = defaultdict(dict)
        for request_id, pieces in gathered.items():
            by_writer[self._writers[request_id]][request_id] = pieces
        for index, of_writer in by_writer.items():
            num_bytes = sum(piece.rows.nbytes for pieces in of_writer.values() for piece in pieces)
            self._threads[index].submit(partial(self._request_writers[index].append, of_writer), num_bytes)

    def _book(self, request: RequestInfo) -> Callable[[int], None] | None:
        """Count the files that an ended request will have, if there is a limit.

        Returns:
            Takes the bytes that they have in the end; None without a limit.

        Raises:
            ConsumerError: If they, or the request's rows, do not fit.
        """
        if self._quota is None:
            return None
        self._quota.add(request.request_id, str(request.spec.options["tag"]), _num_files(request) * FILE_BYTES)
        try:
            return partial(self._quota.settle, self._quota.store(request.request_id))
        except ConsumerError:
            self.abandon(request)
            raise

    def _stored(self, settle: Callable[[int], None] | None, num_files: int, outcome: Outcome) -> None:
        payload = {} if outcome.exception() is not None else outcome.result()
        is_stored = bool(payload.get("paths"))
        with self._outstanding_lock:
            self._outstanding.discard(outcome)
            if IF_PROBE in payload:
                self._decided[is_stored] += 1
        if settle is not None:
            settle(payload["num_bytes"] + num_files * FILE_BYTES if is_stored else 0)


def _fitting_probes(params: Mapping[str, Any], context: ConsumerContext) -> dict[str, Probe]:
    """Read the configured probes.

    Raises:
        ConfigError: If one cannot read the model's rows, if its rows would be with another stage than others, or if the
            operator's own condition could record nothing.
    """
    probes = configured_probes(params)
    for name, probe in probes.items():
        check_fits(probe, context.model, f"filesystem: probes.{name}")
    if probes and context.pp_size > 1:
        raise ConfigError(
            "filesystem: probes: each pipeline stage would decide for itself what it records; set location=driver"
        )
    if params.get(IF_PROBE) is not None:
        _check_own_condition(params, context)
    return probes


def _check_own_condition(params: Mapping[str, Any], context: ConsumerContext) -> None:
    consumer = FilesystemConsumer
    asked = SpecContext(
        instance_name=context.instance_name,
        model=context.model,
        params=params,
        client_request_id="own",
        takes_columns=consumer.takes_columns,
    )
    try:
        if (spec := consumer.global_capture_spec(asked)) is not None:
            check_any_prompt(spec, context.model.context_length, asked.field)
    except RequestError as error:
        raise ConfigError(f"filesystem: {str(error).removeprefix(f'{asked.field}.')}") from error


def _browsed(context: ReportContext) -> Path:
    """The root, for clients that look into it.

    Raises:
        CaptureFileError: If it is none of this machine.
    """
    settings = parse_params(context.params)
    if settings.is_remote:
        raise CaptureFileError(
            f"{settings.root}: captures in an object store cannot be browsed over HTTP; open them with "
            "headgate.consumers.reader.open_captures"
        )
    return settings.local_root.resolve()


def _quota(settings: FilesystemParams, remote: RemoteRoot | None) -> DiskQuota | None:
    """Return what counts the bytes below a root with a limit, or in the spool, which always has one."""
    if remote is None:
        limits = settings.max_tag_bytes, settings.max_root_bytes
        return None if limits == (None, None) else DiskQuota(*limits, settings.local_root)

    def no_room(tag: str, limit: int) -> str:
        return (
            f"no room for this request in {remote.spool}, where files wait for {settings.root}: spool_bytes is "
            f"{limit}; see in the log why they are not uploaded, or raise it"
        )

    return DiskQuota(None, settings.spool_bytes, remote.spool, no_room=no_room)


def _layouts(store: LocalStore, settings: FilesystemParams, remote: RemoteRoot | None) -> dict[LayoutName, Layout]:
    return {
        "request": RequestLayout(store, durable=settings.fsync),
        "raw": RawLayout(store, durable=settings.fsync),
        "shards": ShardLayout(
            store,
            shard_bytes=settings.shard_bytes,
            max_age_s=MAX_SHARD_AGE_S if remote else None,
            left=remote.upload_folder if remote else None,
        ),
    }


def _num_files(request: RequestInfo) -> int:
    """Files that a request has for itself, by its layout; those of shards are shared."""
    files = {"request": 1, "raw": 2 * len(request.spec.sites), "shards": 0}
    return files[request.spec.options["layout"]]


def _give_up(outcome: Outcome, timeout_s: float) -> None:
    try:
        outcome.set_exception(ConsumerError(f"not written within the {timeout_s:.1f} s that closing may take"))
    except InvalidStateError:
        return  # written in the last moment
