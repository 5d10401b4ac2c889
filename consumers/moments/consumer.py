"""The consumer that keeps moments of rows over all requests: its thread adds to them, another writes them to a file."""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import GIB
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
    read_params,
)
from headgate.capture.schema.errors import CaptureFileError, ConfigError, RequestError
from headgate.capture.schema.limits import check_tag
from headgate.capture.schema.positions import parse_positions
from headgate.capture.schema.results import ReportContext
from headgate.capture.schema.sites import Site, parse_hook
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.storage.store import check_name
from headgate.consumers.moments.entry import PHASES, MomentsEntry, MomentsKey, MomentsSettings, Phase
from headgate.consumers.moments.reader import report
from headgate.consumers.moments.state_file import (
    Entries,
    OwnedFile,
    encode_state,
    read_settings,
    read_state,
    state_files,
)

if TYPE_CHECKING:
    from torch import Tensor


Sites = tuple[Site, ...]
Float32Array = npt.NDArray[np.float32]

HOLD_ROWS = 16
"""Generated rows of each request and site that are held back at least: the engine runs ahead of a request's end."""

TAG = "tag"
"""Option of a request's spec: the tag that its rows count under."""


@dataclass(slots=True)
class _Held:
    """Rows at the same sites: pieces of ascending positions and ``[sites, rows, width]``."""

    pieces: deque[tuple[Int64Array, Tensor]] = field(default_factory=deque)
    num_rows: int = 0
    counted: list[Int64Array] = field(default_factory=list)  # positions of rows that are not held any more


class RunningRequest:
    """A request that has not ended: what was counted of it, and generated rows that are held back.

    Attributes:
        tag: Of the request.
        num_prompt: Length of its prompt.
        num_rows: Rows that were counted, over all sites.
        num_skipped: Rows left out at its beginning, over all sites.
        num_past_end: The part of `num_rows` that turned out to lie past its end.
    """

    def __init__(self, request: RequestInfo) -> None:
        self.tag: str = request.spec.options[TAG]
        self.num_prompt = request.num_prompt_tokens
        self.num_rows = 0
        self.num_skipped = 0
        self.num_past_end = 0
        self._held: dict[Sites, _Held] = defaultdict(_Held)

    def hold(self, sites: Sites, positions: Int64Array, rows: Tensor) -> None:
        """Keep a copy of rows, ``[sites, N, width]``: the block that they are part of belongs to many requests."""
        held = self._held[sites]
        held.pieces.append((positions.copy(), rows.clone()))
        held.num_rows += len(positions)

    def release(self, keep: int) -> list[tuple[Sites, Float32Array]]:
        """Return the oldest rows, which count from now on, ``[sites, N, width]``; at least `keep` of each site stay.

        Nothing is returned before there are as many again, so that rows come in pieces that are worth while.
        """
        released = []
        for sites, held in self._held.items():
            if held.num_rows <= 2 * keep:
                continue
            taken = []
            while held.pieces and held.num_rows - len(held.pieces[0][0]) >= keep:
                positions, rows = held.pieces.popleft()
                held.num_rows -= len(positions)
                held.counted.append(positions)
                taken.append(float32_of(rows))
            if taken:
                released.append((sites, np.concatenate(taken, axis=1)))
                self.num_rows += released[-1][1].shape[1] * len(sites)
        return released

    def cut(self, num_rows: int) -> None:
        """Forget rows at positions from `num_rows` on, and count those of them that were released already."""
        for sites, held in self._held.items():
            self.num_past_end += sum(int((positions >= num_rows).sum()) for positions in held.counted) * len(sites)
            ends = [int(np.searchsorted(positions, num_rows)) for positions, _ in held.pieces]
            held.pieces = deque(
                (positions[:end], rows[:, :end]) for (positions, rows), end in zip(held.pieces, ends, strict=True)
            )
            held.num_rows = sum(ends)


def float32_of(rows: Tensor) -> Float32Array:
    """Rows of any of the model dtypes as float32, which holds them exactly."""
    array: Float32Array = rows.float().numpy()
    return array


logger = logging.getLogger(__name__)


class LiveState:
    """Moments in memory, and the file that they go on from and are written to. Any thread may call.

    Attributes:
        problem: The reason why the last write failed; None if it did not.

    Args:
        root: Folder of the file.
        settings: Of the moments.
        flush_s: Seconds between two writes; if 0, `flush` alone writes.
        name: Of the thread that writes.

    Raises:
        ConfigError: If the root cannot be used, or holds damaged files or moments of other settings.
    """

    def __init__(self, root: Path, settings: MomentsSettings, *, flush_s: float, name: str) -> None:
        self.problem: str | None = None
        self._settings = settings
        self._flush_s = flush_s
        self._lock = threading.Lock()  # guards _entries and _is_dirty
        self._writing = threading.Lock()  # one writer of the file at a time
        self._is_dirty = False
        self._is_closed = threading.Event()
        self._file, self._entries = _open(root, settings)
        self._thread = threading.Thread(target=self._flush_now_and_then, name=name, daemon=True)
        if flush_s:
            self._thread.start()

    def add(self, tag: str, phase: Phase, sites: Sequence[Site], rows_SNW: Float32Array) -> None:
        """Add rows, ``[sites, N, width]``; they are copied."""
        with self._lock:
            self._is_dirty = True
            for site, rows in zip(sites, rows_SNW, strict=True):
                self._entry(MomentsKey(tag, site.name, phase)).add(rows)

    def skip(self, tag: str, phase: Phase, sites: Sequence[Site], num_rows: int) -> None:
        """Count rows at each of `sites` that were left out."""
        with self._lock:
            self._is_dirty = True
            for site in sites:
                self._entry(MomentsKey(tag, site.name, phase)).num_skipped += num_rows

    def flush(self) -> None:
        """Write the state, if anything has changed. A disk that takes no more is logged, and tried again next time."""
        with self._writing:
            with self._lock:
                if not self._is_dirty:
                    return
                content, self._is_dirty = encode_state(self._settings, self._entries), False
            try:
                self._file.replace(content)
            except OSError as error:
                with self._lock:
                    self._is_dirty = True
                self.problem = f"moments could not be written to {self._file.path}: {error}"
                logger.error(self.problem)  # noqa: TRY400  (the text says all)
            else:
                self.problem = None

    def close(self, timeout_s: float) -> None:
        """Write what is not written yet, and give the file up. May be called again."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._flush_s:
            self._thread.join(timeout_s)
        self.flush()
        self._file.close()

    def _entry(self, key: MomentsKey) -> MomentsEntry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = MomentsEntry(self._settings, key.site)
        return entry

    def _flush_now_and_then(self) -> None:
        while not self._is_closed.wait(self._flush_s):
            self.flush()


def _open(root: Path, settings: MomentsSettings) -> tuple[OwnedFile, Entries]:
    try:
        owned = OwnedFile(root)
    except OSError as error:
        raise ConfigError(f"moments: root {root} cannot be used: {error}") from error
    try:
        for path in state_files(root):
            settings.check_same(read_settings(path), str(path))
        if owned.path.exists():
            return owned, read_state(owned.path).entries
        owned.replace(encode_state(settings, {}))  # others see at once whose root it is
        return owned, {}  # noqa: TRY300
    except (CaptureFileError, OSError) as error:
        owned.close()
        raise ConfigError(f"moments: {error}") from error
    except BaseException:
        owned.close()
        raise


class MomentsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the moments consumer.

    Attributes:
        root: Folder of the state, on a local file system.
        tag: For requests that name none.
        tags: Further tags that requests may name; each has moments of its own.
        hooks: ``{hook point: layers}`` to record for every request.
        positions: Which positions to record with `hooks`. With ``all`` and ``all_prompt`` requests do not read the
            prefix cache.
        skip_positions: Omit this many positions at the beginning of each request; 1 omits the first token.
        max_norm: Omit longer rows, such as those of attention sinks: one number, or one for each site
            (``{"12.post_mlp": 300}``; other sites then have no limit). None omits no row.
        covariance: ``full`` keeps the whole matrix, ``sketch`` its largest directions, ``none`` only the variances;
            ``auto`` is ``full`` up to a hidden size of `full_width`, and ``sketch`` above.
        full_width: See `covariance`.
        rank: Directions of a sketch.
        quantile_error: Relative error of the quantiles of norms.
        flush_s: Seconds between two writes of a changed state; a killed process loses no more than that. 0 writes at
            the end of each request, before its result.
        max_bytes: Memory for the state of one process, with every site, phase and tag in use; writing it takes as
            much again.
    """

    root: str
    tag: str = "default"
    tags: tuple[str, ...] = ()
    hooks: dict[str, Any] | None = None
    positions: Any = "all"
    skip_positions: int = 0
    max_norm: float | dict[str, float] | None = None
    covariance: Literal["auto", "full", "sketch", "none"] = "auto"
    full_width: int = 1024
    rank: int = 64
    quantile_error: float = 0.01
    flush_s: float = 10.0
    max_bytes: int = 2 * GIB

    @property
    def folder(self) -> Path:
        """The root as a path."""
        return Path(self.root).expanduser()

    @property
    def all_tags(self) -> tuple[str, ...]:
        """Every tag that requests may name."""
        return tuple(dict.fromkeys((self.tag, *self.tags)))

    def settings(self, model: ModelInfo, consumer: str) -> MomentsSettings:
        """Return what the state of this configuration is made with, for the instance of that name."""
        kind = self.covariance
        if kind == "auto":
            widest = max((model.shape(site).width for site in model.sites), default=model.hidden_size)
            kind = "full" if widest <= self.full_width else "sketch"
        limits = self.max_norm if isinstance(self.max_norm, dict) else {"*": self.max_norm}
        return MomentsSettings(
            consumer=consumer,
            model=model.name,
            hidden_size=model.hidden_size,
            covariance=kind,
            rank=self.rank,
            quantile_error=self.quantile_error,
            skip_positions=self.skip_positions,
            max_norm={site: limit for site, limit in limits.items() if limit is not None},
            widths={
                site.name: model.shape(site).width
                for site in model.sites
                if model.shape(site).width != model.hidden_size
            },
        )

    def check_size(self, model: ModelInfo) -> None:
        """Raise `ConfigError` if the state could pass `max_bytes`."""
        settings = self.settings(model, "")
        of_sites = sum(settings.entry_bytes(site.name) for site in model.sites)
        num_bytes = len(PHASES) * len(self.all_tags) * of_sites
        if num_bytes > self.max_bytes:
            raise ConfigError(
                f"moments: the state of {len(model.sites)} sites, {len(PHASES)} phases and {len(self.all_tags)} tags "
                f"could take {num_bytes} bytes, and max_bytes is {self.max_bytes}; configure fewer capture.sites or "
                "tags, set covariance to sketch or none or lower rank, or raise max_bytes"
            )


def parse_params(params: Mapping[str, Any]) -> MomentsParams:
    """Read and check the parameters; touches no disk.

    Raises:
        ConfigError: Naming the parameter.
    """
    parsed = read_params(MomentsParams, params, "moments", skip_positions=0, full_width=0, rank=1, max_bytes=1)
    try:
        for tag in parsed.all_tags:
            check_name(tag, "tags")
        parse_positions(parsed.positions, "positions")
        for hook in parsed.hooks or ():
            parse_hook(hook, f"hooks.{hook}")
        if isinstance(parsed.max_norm, dict):
            parsed = msgspec.structs.replace(parsed, max_norm=_by_site(parsed.max_norm))
    except RequestError as error:
        raise ConfigError(f"moments: {error}") from error
    limits = parsed.max_norm.values() if isinstance(parsed.max_norm, dict) else (parsed.max_norm,)
    checks = {
        "root": (bool(parsed.root) and "://" not in parsed.root, "a folder of this machine"),
        "max_norm": (all(limit is None or limit > 0 for limit in limits), "above 0"),
        "quantile_error": (1e-4 <= parsed.quantile_error <= 0.5, "from 0.0001 to 0.5"),
        "flush_s": (parsed.flush_s >= 0 and math.isfinite(parsed.flush_s), "0 or more seconds"),
    }
    for name, (is_right, expected) in checks.items():
        if not is_right:
            raise ConfigError(f"moments: {name} must be {expected}, got {getattr(parsed, name)!r}")
    return parsed


def _by_site(limits: Mapping[str, float]) -> dict[str, float]:
    """The limits by the names that we write."""
    try:
        return {Site.parse(name).name: limit for name, limit in limits.items()}
    except ValueError as error:
        raise RequestError("max_norm", str(error)) from error


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"hooks", "positions", "tag"}``; ``hooks`` alone is required. The option ``tag`` of the spec is resolved.

    Raises:
        RequestError: Naming the field.
    """
    params = context.parsed_params(parse_params)
    spec = parse_client_spec(raw, context, options=(TAG,))
    tag = check_name(spec.options.get(TAG, params.tag), f"{context.field}.{TAG}")
    check_tag(tag, params.all_tags, f"{context.field}.{TAG}")
    return replace(spec, options={TAG: tag})


class MomentsConsumer(StreamingConsumer):
    """Keeps running moments by site, phase and tag, and writes them to `root`; `MomentsParams` lists the parameters.

    A request asks with ``{"hooks", "positions", "tag"}``. Its payload counts its rows over all sites: ``{"tag",
    "num_rows", "num_skipped", "num_past_end", "problem"}``. `num_past_end` are rows that were computed past the
    request's end, further than `HOLD_ROWS`, and are counted all the same; `problem` says why the state could not be
    written of late, and is None while it can. Rows of a request that fails are counted as far as they came.

    It runs in each worker that captures, and each worker owns one file of the root (`state_file`); the moments are all
    files together, so nothing counts twice under pipeline or data parallelism, with several API servers, or after a
    restart.

    Threads: the consumer's own adds rows; another writes the state now and then.

    Raises:
        ConfigError: If the root cannot be used, holds damaged files or moments that were made with other settings, or
            if the state could take more than `max_bytes`.
    """

    location = "worker"
    takes_tag = True
    global_spec_param = "hooks"
    linger_s = 0.25  # rows are not looked at

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._params = parse_params(params)
        self._params.check_size(context.model)
        self._requests: dict[str, RunningRequest] = {}
        self._state = LiveState(
            self._params.folder,
            self._params.settings(context.model, context.instance_name),
            flush_s=self._params.flush_s,
            name=f"headgate-{context.instance_name}-flush",
        )

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def report(cls, context: ReportContext) -> dict[str, Any]:
        return report(parse_params(context.params).folder, context)

    def begin(self, request: RequestInfo) -> None:
        self._requests[request.request_id] = RunningRequest(request)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            prompt: dict[str, list[Int64Array]] = defaultdict(list)  # by tag: which rows of the block
            for span in block.spans:
                running = self._requests[span.request.request_id]
                positions = block.positions[span.start : span.stop]
                first = int(np.searchsorted(positions, self._params.skip_positions))
                generated = max(first, int(np.searchsorted(positions, running.num_prompt)))
                self._skip(running, block.sites, positions[:first])
                if first < generated:
                    prompt[running.tag].append(np.arange(span.start + first, span.start + generated))
                    running.num_rows += (generated - first) * len(block.sites)
                if generated < len(positions):
                    running.hold(block.sites, positions[generated:], block.rows[:, span.start + generated : span.stop])
                    self._add_held(running, keep=HOLD_ROWS)
            for tag, found in prompt.items():
                self._state.add(tag, "prefill", block.sites, float32_of(block.rows)[:, np.concatenate(found)])

    def finish(self, finished: FinishedRequest) -> dict[str, Any] | None:
        running = self._requests.pop(finished.request.request_id)
        if not finished.request.spec.sites:
            return None  # all of its sites belong to other pipeline stages
        running.cut(finished.final.num_rows)
        self._add_held(running, keep=0)
        if not self._params.flush_s:
            self._state.flush()
        return {
            "tag": running.tag,
            "num_rows": running.num_rows,
            "num_skipped": running.num_skipped,
            "num_past_end": running.num_past_end,
            "problem": self._state.problem,
        }

    def abandon(self, request: RequestInfo) -> None:
        self._requests.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        self._state.close(timeout_s)
        self._requests.clear()

    def _skip(self, running: RunningRequest, sites: Sequence[Site], positions: Int64Array) -> None:
        """Count rows at the beginning of a request that are left out."""
        num_prompt = int(np.searchsorted(positions, running.num_prompt))
        running.num_skipped += len(positions) * len(sites)
        for phase, count in zip(PHASES, (num_prompt, len(positions) - num_prompt), strict=True):
            if count:
                self._state.skip(running.tag, phase, sites, count)

    def _add_held(self, running: RunningRequest, *, keep: int) -> None:
        """Count generated rows that were held back, but for the last `keep`."""
        for sites, rows in running.release(keep):
            self._state.add(running.tag, "decode", sites, rows)
