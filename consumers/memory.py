"""The consumer that keeps rows in RAM: for notebooks and tests, and for later requests that patch with them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.delivery.request_assembler import RequestCollector
from headgate.capture.monitoring.notebook import norm_table, norms_by_position, page
from headgate.capture.schema.config import GIB
from headgate.capture.schema.consumer import (
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    RowSpan,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
    read_params,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError, shown
from headgate.capture.schema.results import MAX_KEPT_NAME
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec


def rows_at(rows: Mapping[Site, Tensor], site: Site | str) -> Tensor:
    """Return the rows of one site, by its name, an alias or itself.

    Raises:
        KeyError: If it was not captured; the message lists the captured ones.
    """
    try:
        return rows[site if isinstance(site, Site) else Site.parse(site)]
    except (KeyError, ValueError):
        raise KeyError(f"{site}: not captured; there are {', '.join(one.name for one in rows)}") from None


class CapturedRows:
    """The payload of the memory consumer: one request's rows.

    ``rows["12.post_mlp"]`` is a tensor ``[num_rows, hidden]`` in the model's dtype; aliases and `Site` work too.

    Attributes:
        request_id: The id of the request in its API.
        sample_index: Which of its ``n`` samples.
        sites: In the order of the forward pass.
        rows: The tensors by site.
        positions: int64 ``[num_rows]``, ascending.
        token_ids: int64 ``[num_rows]``: the token whose forward gave the row.
        is_prefill: bool ``[num_rows]``: True where that token was part of the prompt.
        num_prompt_tokens: Length of the prompt.
        prompt_token_ids: int64 ``[num_prompt_tokens]``.
        status: How the request ended: ``stop``, ``length``, ``abort`` ...
        dropped_rows: Rows that overload kept from it.
        columns: What the rows hold of a row of the model, of sites where that is not all.
        kept_as: Name under which later requests find the rows; None if they are not kept.
    """

    def __init__(self, captured: CapturedRequest, *, kept_as: str | None = None) -> None:
        self.request_id = captured.request.client_request_id
        self.sample_index = captured.request.sample_index
        self.sites = captured.sites
        self.rows = captured.rows
        self.columns = captured.request.spec.columns
        self.positions = captured.positions
        self.token_ids = captured.token_ids
        self.is_prefill = captured.is_prefill
        self.num_prompt_tokens = captured.final.num_prompt_tokens
        self.prompt_token_ids = captured.request.prompt_token_ids
        self.kept_as = kept_as
        self.status = captured.final.status
        self.dropped_rows = captured.dropped_rows

    def __repr__(self) -> str:
        return f"<CapturedRows of {self.request_id}: {len(self)} rows of {', '.join(s.name for s in self.sites)}>"

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook: facts, and norms by site and position."""
        dtypes = sorted({str(rows.dtype).removeprefix("torch.") for rows in self.rows.values()})
        facts = {
            "request": f"{self.request_id}, sample {self.sample_index}: {self.status}",
            "rows": f"{len(self)} of {len(self.sites)} sites in {', '.join(dtypes)}; {self.dropped_rows} dropped",
            "tokens of the prompt": self.num_prompt_tokens,
        }
        heat = norms_by_position(self.sites, self.positions, lambda site, index: self.rows[site][index].float().numpy())
        table = None if heat is None else norm_table(heat, len(self.sites))
        return page("CapturedRows", facts, table, heat)

    def __len__(self) -> int:
        """Rows per site."""
        return len(self.positions)

    def __iter__(self) -> Iterator[Site]:
        """The sites, in the order of the forward pass."""
        return iter(self.sites)

    def __getitem__(self, site: Site | str) -> Tensor:
        """``[num_rows, hidden]`` of one site.

        Raises:
            KeyError: If it was not captured; the message lists the captured ones.
        """
        return rows_at(self.rows, site)

    def numpy(self, site: Site | str) -> npt.NDArray[Any]:
        """The rows as a numpy array; bfloat16 becomes float32, which holds it exactly."""
        rows = self[site]
        array: npt.NDArray[Any] = (rows.float() if rows.dtype is torch.bfloat16 else rows).numpy()
        return array

    def row(self, site: Site, position: int, field: str) -> Tensor:
        """One row; see `headgate.capture.schema.results.KeptRequest`."""
        if site not in self.rows:
            there = ", ".join(one.name for one in self.sites)
            raise RequestError(f"{field}.site", f"{site.name} was not captured of {self.kept_as!r}, but {there}")
        absolute = position if position >= 0 else position + self.num_prompt_tokens
        index = int(np.searchsorted(self.positions, absolute))
        if index == len(self) or self.positions[index] != absolute:
            raise RequestError(
                f"{field}.position", f"{self.kept_as!r} has no row of position {position}; {self._held()}"
            )
        return self.rows[site][index]

    def _held(self) -> str:
        if not len(self):
            return "it has none"
        first, last = int(self.positions[0]), int(self.positions[-1])
        return f"it has {len(self)} rows, of positions {first} to {last}, and {self.num_prompt_tokens} prompt tokens"

    def summary(self) -> dict[str, Any]:
        """The payload in JSON values: everything but the rows."""
        kept = {} if self.kept_as is None else {"kept_as": self.kept_as}
        return {
            "num_rows": len(self),
            "shapes": {site.name: list(self.rows[site].shape) for site in self.sites},
            "num_prefill_rows": int(self.is_prefill.sum()),
            "num_prompt_tokens": self.num_prompt_tokens,
            "status": self.status,
            "dropped_rows": self.dropped_rows,
            **kept,
        }


MAX_GONE = 1024
"""Names that are remembered with the reason why their rows are gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepLimits:
    """Limits of what is kept.

    Attributes:
        max_bytes: Bytes of rows, of all clients.
        max_key_bytes: Bytes of rows that one client's key may hold; all clients without a key count as one.
        max_age_s: Seconds after which rows are given up.
    """

    max_bytes: int
    max_key_bytes: int
    max_age_s: float


class KeptName(NamedTuple):
    """A name of one client's.

    Attributes:
        owner: Name of its key; None without one.
        name: As the request gave it.
    """

    owner: str | None
    name: str


class _KeptRows(NamedTuple):
    samples: dict[int, CapturedRows]
    call: str
    num_bytes: int
    gone_at: float


class KeptRequests:
    """The rows that requests have kept, by client and name. Any thread.

    Where there is no room, the rows that were not used for the longest time give way: those of the same client if it
    holds too much, else those of any. Rows that are too old are given up when anything is kept or looked for.

    Args:
        limits: How much is kept, and for how long.
        clock: Seconds, monotonic.
    """

    def __init__(self, limits: KeepLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[KeptName, _KeptRows] = OrderedDict()
        self._gone: OrderedDict[KeptName, str] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: KeptName, rows: CapturedRows, *, call: str, num_bytes: int) -> None:
        """Keep the rows of one sample. Samples of one call come together; another call's take the place of them.

        Raises:
            ConsumerError: If they are larger than all that one client may keep, or another prompt of the same call
                has kept its rows under the name.
        """
        limit = min(self._limits.max_bytes, self._limits.max_key_bytes)
        with self._lock:
            self._forget_old()
            earlier = self._kept.get(key)
            if earlier is not None and earlier.call != call:
                earlier = None
            if earlier is not None and rows.sample_index in earlier.samples:
                raise ConsumerError(
                    f"another prompt of this call has kept its rows as {key.name!r}: one name, one prompt"
                )
            samples = {**(earlier.samples if earlier else {}), rows.sample_index: rows}
            total = num_bytes + (earlier.num_bytes if earlier else 0)
            if total > limit:
                raise ConsumerError(
                    f"the rows to be kept as {key.name!r} take {total} bytes, and a client may keep {limit} "
                    "(parameters keep_bytes and keep_key_bytes); capture fewer sites or positions"
                )
            self._kept.pop(key, None)
            self._make_room(key, total)
            self._gone.pop(key, None)
            self._kept[key] = _KeptRows(samples, call, total, self._clock() + self._limits.max_age_s)

    def find(self, key: KeptName, sample_index: int, field: str) -> CapturedRows:
        """Return what is kept under a name.

        Raises:
            RequestError: Naming ``request`` or ``sample`` below `field`, if there is nothing (any more).
        """
        with self._lock:
            self._forget_old()
            found = self._kept.get(key)
            if found is None:
                raise RequestError(f"{field}.request", self._why_not(key))
            self._kept.move_to_end(key)
        if sample_index not in found.samples:
            raise RequestError(
                f"{field}.sample", f"{key.name!r} has the samples {sorted(found.samples)}, not {sample_index}"
            )
        return found.samples[sample_index]

    def clear(self) -> None:
        """Give everything up."""
        with self._lock:
            self._kept.clear()

    def _why_not(self, key: KeptName) -> str:
        if key in self._gone:
            return f"the rows kept as {shown(key.name)} are gone: {self._gone[key]}; capture them again"
        return (
            f"nothing is kept as {shown(key.name)} for this client; a request that captures with the consumer 'memory' "
            'keeps its rows, once it is answered, if its spec has "keep": NAME'
        )

    def _forget_old(self) -> None:
        now = self._clock()
        for key in [key for key, kept in self._kept.items() if kept.gone_at <= now]:
            self._give_up(key, f"they were kept for {self._limits.max_age_s:g} s (keep_s)")

    def _make_room(self, key: KeptName, num_bytes: int) -> None:
        own = [other for other in self._kept if other.owner == key.owner]
        while sum(self._kept[other].num_bytes for other in own) + num_bytes > self._limits.max_key_bytes:
            self._give_up(own.pop(0), f"this client keeps at most {self._limits.max_key_bytes} bytes (keep_key_bytes)")
        while sum(kept.num_bytes for kept in self._kept.values()) + num_bytes > self._limits.max_bytes:
            self._give_up(next(iter(self._kept)), f"at most {self._limits.max_bytes} bytes are kept here (keep_bytes)")

    def _give_up(self, key: KeptName, reason: str) -> None:
        del self._kept[key]
        self._gone[key] = reason
        self._gone.move_to_end(key)
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)


KEEP = "keep"
"""Option of a request's spec: the name under which its rows are kept."""

_NAME, _OWNER = "name", "owner"


class MemoryParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the memory consumer.

    Attributes:
        max_bytes: RAM for rows of running requests, of results that are still in use, and of requests that keep them.
        keep_bytes: Bytes of rows that requests keep (``"keep": NAME``).
        keep_key_bytes: The same for one client's key; all clients without a key count as one.
        keep_s: Seconds after which kept rows are discarded.
    """

    max_bytes: int = 4 * GIB
    keep_bytes: int = GIB
    keep_key_bytes: int = GIB // 4
    keep_s: float = 3600.0


class MemoryConsumer(StreamingConsumer):
    """Keeps the rows of every request in RAM; the payload is a `CapturedRows`, which over HTTP is its summary.

    With ``"keep": NAME`` in its spec, a request leaves its rows for later ones of the same client, which patch with
    them (`headgate.capture.schema.results.RowKeeper`); it then waits for its result.

    `MemoryParams` lists the parameters. A request that would pass `max_bytes` ends with an error and gives its memory
    back at once; the memory of a payload comes free when its last holder drops it.
    """

    location = "driver"
    takes_columns = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        parsed = _parse(params)
        self._max_bytes = parsed.max_bytes
        limits = KeepLimits(max_bytes=parsed.keep_bytes, max_key_bytes=parsed.keep_key_bytes, max_age_s=parsed.keep_s)
        self._kept = KeptRequests(limits)
        self._used = BytesInUse()
        self._taken: dict[str, int] = {}  # bytes of each running request
        self._too_large: set[str] = set()
        self._rows = RequestCollector(context.model, _wrap)

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        _parse(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        spec = parse_client_spec(raw, context, options=(KEEP,))
        name = spec.options.get(KEEP)
        if name is None:
            return replace(spec, options={})
        field = f"{context.field}.{KEEP}"
        if not isinstance(name, str) or not 0 < len(name) <= MAX_KEPT_NAME or not name.isprintable():
            raise RequestError(
                field, f"expected a name of 1 to {MAX_KEPT_NAME} printable characters, got {shown(name)}"
            )
        if context.num_front_ends > 1:
            raise RequestError(
                field,
                f"this server has {context.num_front_ends} API processes, and later requests may come to another than "
                "the one that keeps the rows; start it with --api-server-count 1",
            )
        return replace(spec, options={_NAME: name, _OWNER: context.owner})

    @classmethod
    def awaits(cls, spec: CaptureSpec) -> bool:
        return _NAME in spec.options

    @classmethod
    def fetch_rows(cls, payload: CapturedRows) -> CapturedRows:
        """See `headgate.capture.schema.results.RowFetcher`."""
        return payload

    def find_kept(self, owner: str | None, name: str, sample_index: int, field: str) -> CapturedRows:
        """See `headgate.capture.schema.results.RowKeeper`."""
        return self._kept.find(KeptName(owner, name), sample_index, field)

    def begin(self, request: RequestInfo) -> None:
        self._taken[request.request_id] = 0
        self._rows.begin(request)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        self._rows.write(blocks, self._reserve)

    def finish(self, finished: FinishedRequest) -> CapturedRows:
        request = finished.request
        if request.request_id in self._too_large:
            self._too_large.discard(request.request_id)
            raise ConsumerError(
                f"the rows of request {request.client_request_id} do not fit: max_bytes is {self._max_bytes}, other "
                f"requests and results that are still in use hold {self._used.num_bytes}; capture less, let go of "
                "earlier results, or raise max_bytes"
            )
        num_bytes = self._taken.pop(request.request_id)
        try:
            payload: CapturedRows = self._rows.finish(finished)
        except BaseException:
            self._used.add(-num_bytes)
            raise
        weakref.finalize(payload, self._used.add, -num_bytes)
        options = request.spec.options
        if (name := options.get(_NAME)) is not None:
            call = request.client_request_id if request.origin is None else request.origin.call
            self._kept.keep(KeptName(options[_OWNER], name), payload, call=call, num_bytes=num_bytes)
        return payload

    def abandon(self, request: RequestInfo) -> None:
        self._too_large.discard(request.request_id)
        self._release(request)

    def close(self, timeout_s: float) -> None:
        self._taken.clear()
        self._kept.clear()
        self._rows.close(timeout_s)

    def _reserve(self, span: RowSpan, block: RowBlock) -> bool:
        """Take memory for the rows of `span`; if that is too much, release all that the request has."""
        request_id = span.request.request_id
        if request_id in self._too_large:
            return False
        num_bytes = (span.stop - span.start) * len(block.sites) * block.row_bytes
        if self._used.num_bytes + num_bytes > self._max_bytes:
            self._too_large.add(request_id)
            self._release(span.request)
            return False
        self._used.add(num_bytes)
        self._taken[request_id] += num_bytes
        return True

    def _release(self, request: RequestInfo) -> None:
        self._used.add(-self._taken.pop(request.request_id, 0))
        self._rows.abandon(request)


def _wrap(captured: CapturedRequest) -> CapturedRows:
    return CapturedRows(captured, kept_as=captured.request.spec.options.get(_NAME))


class BytesInUse:
    """Bytes in use. They are given back on whatever thread drops what they are of."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.RLock()  # reentrant: a garbage collection inside `add` may drop a payload

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


def _parse(params: Mapping[str, Any]) -> MemoryParams:
    parsed = read_params(MemoryParams, params, "memory", max_bytes=1, keep_bytes=1, keep_key_bytes=1)
    if not parsed.keep_s > 0:
        raise ConfigError(f"memory: keep_s must be above 0, got {parsed.keep_s}")
    return parsed
