"""The consumer that answers each request with attention patterns: what its queries look at, and how much.

A pattern is the softmax over keys of a query's scores, as the model's own attention computes it. Rows of the hook
points `q` and `k` come from the worker, `q` at the chosen queries and `k` at every position up to the last of them; the
rest is computed here, in float32, while the request runs.

Letters in names: Q queries, K keys, H heads, D the size of a head.
"""

from __future__ import annotations

import base64
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from itertools import groupby
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from pybase64 import b64encode
from safetensors import SafetensorError
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor

from headgate.capture.monitoring.machine_memory import share_of_memory
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import GIB, MIB
from headgate.capture.schema.consumer import (
    AttentionFacts,
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    OutputColumns,
    RequestInfo,
    RequestLengths,
    RowBlock,
    SpecContext,
    StoredOutputs,
    StreamingConsumer,
    check_fields,
    read_params,
)
from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError, RequestError, shown
from headgate.capture.schema.limits import count_rows
from headgate.capture.schema.positions import keys_before, parse_positions
from headgate.capture.schema.sites import HookPoint, Site, parse_layers, sort_sites
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.memory import BytesInUse

FIELDS = ("layers", "heads", "queries", "top", "dtype")
QUERIES = "queries"
WHOLE = ""
"""Name of a tensor of whole rows, after that of its layer."""
BLOCK_SCORES = 1 << 22
"""Scores that are in memory at a time: 16 MiB, and as much again for what is computed of them."""
RANKED_AT_ONCE = 1 << 18
"""Weights whose largest are found together: where all of them are equal, this takes 64 bytes for each."""
QUERIES_AT_ONCE = 32
"""Generated queries of a request that are computed together: fewer would cost more, since each time all keys are read.
Chunks of a stream do not wait for so many."""
PROMPT_QUERIES_AT_ONCE = 256
"""Queries of the prompt, which come many at a time, that are computed together."""
PART_BYTES = 1 * MIB
"""Bytes of patterns in a chunk of a stream, but for a single query's: the event loop writes them between others'."""
MAX_PATTERN_THREADS = 4
MIN_MEMORY, MAX_MEMORY = 256 * MIB, 16 * GIB
"""Bounds of the rows of running requests, where no others are configured."""
ITEM_SIZES = {"float32": 4, "float16": 2}
MAX_TOP = 4096

logger = logging.getLogger(__name__)


class AttentionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the attention consumer.

    Attributes:
        max_bytes: Bytes of patterns in the result of one prompt, all its samples and layers together; in base64 they
            take a third more. A request whose patterns could be larger is refused.
        max_scores: Scores that one prompt may cost: layers times heads times queries times keys, all its samples
            together. A request that could cost more is refused.
        memory_bytes: Bytes of rows that all running requests may hold in the memory of one worker's host; if None, an
            eighth of what is available there, within 256 MiB and 16 GiB. A request that could hold more by itself is
            refused; one that finds no room beside the others ends with an error.
    """

    max_bytes: int = 8 * MIB
    max_scores: int = 1 << 30
    memory_bytes: int | None = None

    @property
    def memory(self) -> int:
        """Bytes of rows that all running requests may hold."""
        return self.memory_bytes or _share_of_memory()


@cache
def _share_of_memory() -> int:
    """Bytes that a worker may use where it is not configured: what this process first found."""
    return share_of_memory(8, least=MIN_MEMORY, most=MAX_MEMORY)


def parse_params(params: Mapping[str, Any]) -> AttentionParams:
    """Read and check the parameters.

    Raises:
        ConfigError: Naming the parameter.
    """
    return read_params(AttentionParams, params, "attention", max_bytes=1, max_scores=1, memory_bytes=1)


class WantedPatterns(msgspec.Struct, frozen=True, kw_only=True):
    """The consumer's part of a checked request.

    Attributes:
        heads: Of each layer; None for all.
        top: How many keys of each query; None for whole rows.
        dtype: Of the probabilities: a key of `ITEM_SIZES`.
    """

    heads: tuple[int, ...] | None = None
    top: int | None = None
    dtype: Literal["float32", "float16"] = "float32"

    def row_bytes(self, num_keys: int) -> int:
        """Bytes of one head's pattern of one query."""
        size = ITEM_SIZES[self.dtype]
        return num_keys * size if self.top is None else self.top * (4 + size) + size


def served_layers(model: ModelInfo) -> tuple[int, ...]:
    """Layers whose queries and keys can both be captured."""
    sites = frozenset(model.sites)
    return tuple(
        site.layer for site in model.sites if site.hook is HookPoint.Q and Site(site.layer, HookPoint.K) in sites
    )


def num_heads(model: ModelInfo, layer: int) -> int:
    """Return the heads of a row of a layer's queries."""
    shape = model.shape(Site(layer, HookPoint.Q))
    return shape.width // shape.head_size


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"layers": ..., "heads": ..., "queries": SELECTOR, "top": N, "dtype": ...}``; `layers` is required.

    Returns:
        The spec: `q` at the queries, `k` at all positions up to the last of them; its options are a `WantedPatterns`.

    Raises:
        RequestError: Naming the field.
    """
    raw = check_fields(raw, context, FIELDS, 'such as {"layers": [5]}')
    layers = _layers(raw.get("layers"), context.model, f"{context.field}.layers")
    wanted = WantedPatterns(
        heads=_heads(raw.get("heads", "all"), min(num_heads(context.model, one) for one in layers), context.field),
        top=_top(raw.get("top"), f"{context.field}.top"),
        dtype=_dtype(raw.get("dtype", "float32"), f"{context.field}.dtype"),
    )
    parse = partial(parse_positions, context_length=context.model.context_length, takes_several=True)
    queries = context.parsed_once(raw.get(QUERIES, "last_prompt"), QUERIES, parse)
    return CaptureSpec(
        sites=sort_sites(Site(layer, hook) for layer in layers for hook in (HookPoint.Q, HookPoint.K)),
        positions=keys_before(queries),
        hook_positions={HookPoint.Q: queries},
        positions_field=QUERIES,
        options=msgspec.to_builtins(wanted),
    )


def _layers(raw: object, model: ModelInfo, field: str) -> tuple[int, ...]:
    served = served_layers(model)
    if raw is None:
        raise RequestError(field, f'required: a layer, a list of layers or "all"; there are {list(served)}')
    layers = served if raw == "all" else parse_layers(raw, model.num_layers, field)
    missing = [layer for layer in layers if layer not in served]
    if missing or not layers:
        named = f"layer {missing[0]}: " if missing else ""
        raise RequestError(
            field,
            f"{named}attention patterns need both hook points q and k of a layer, and this server's configuration has "
            f"them of {f'layers {list(served)}' if served else 'no layer'} (setting: capture.sites)",
        )
    return layers


def _heads(raw: object, count: int, field: str) -> tuple[int, ...] | None:
    if isinstance(raw, str) and raw == "all":
        return None
    listed = raw if isinstance(raw, list) else []
    are_heads = all(type(head) is int and 0 <= head < count for head in listed)
    if not listed or not are_heads or len(set(listed)) < len(listed):
        raise RequestError(
            f"{field}.heads", f'expected "all" or a list of different heads from 0 to {count - 1}, got {shown(raw)}'
        )
    return tuple(listed)


def _top(raw: object, field: str) -> int | None:
    if raw is None or (type(raw) is int and 1 <= raw <= MAX_TOP):
        return raw
    raise RequestError(field, f"expected a number of keys from 1 to {MAX_TOP}, or null for all, got {shown(raw)}")


def _dtype(raw: object, field: str) -> Literal["float32", "float16"]:
    if raw == "float32" or raw == "float16":
        return raw
    raise RequestError(field, f"expected one of {', '.join(ITEM_SIZES)}, got {shown(raw)}")


def check_lengths(spec: CaptureSpec, context: SpecContext, lengths: RequestLengths) -> None:
    """Refuse a request whose patterns could be too large, or cost too much.

    Raises:
        RequestError: Saying what to do.
    """
    params = context.parsed_params(parse_params)
    wanted = msgspec.convert(spec.options, WantedPatterns)
    heads = sum(
        num_heads(context.model, site.layer) if wanted.heads is None else len(wanted.heads)
        for site in spec.sites
        if site.hook is HookPoint.Q
    )
    num_queries = count_rows(spec.hook_positions[HookPoint.Q], lengths.num_prompt, lengths.num_rows)
    num_keys = count_rows(spec.positions, lengths.num_prompt, lengths.num_rows)
    rows = lengths.num_samples * heads * num_queries
    found = (
        ("max_bytes", rows * wanted.row_bytes(num_keys), params.max_bytes, "bytes of patterns", _HOW_SMALLER),
        ("max_scores", rows * num_keys, params.max_scores, "scores", "Choose "),
    )
    for name, count, limit, what, instead in found:
        if count > limit:
            raise RequestError(
                f"{context.field}.{QUERIES}",
                f"{num_queries} queries at up to {num_keys} keys, {heads} heads of all layers and "
                f"{lengths.num_samples} samples could come to {count} {what}; at most {limit} are allowed here "
                f"(parameter {name}). {instead}fewer queries, layers or heads, or lower max_tokens",
            )
    _check_memory(spec, context, lengths, num_queries, num_keys)


def _check_memory(
    spec: CaptureSpec, context: SpecContext, lengths: RequestLengths, num_queries: int, num_keys: int
) -> None:
    memory = context.parsed_params(parse_params).memory
    held = lengths.num_samples * sum(
        context.model.shape(site).row_bytes
        * (min(num_queries, PROMPT_QUERIES_AT_ONCE) if site.hook is HookPoint.Q else num_keys)
        for site in spec.sites
    )
    if held > memory:
        raise RequestError(
            f"{context.field}.layers",
            f"rows of {num_keys} keys, {len(spec.sites) // 2} layers and {lengths.num_samples} samples come to {held} "
            f"bytes; all requests together may hold {memory} here (parameter memory_bytes). Choose fewer layers "
            "or earlier queries, or lower max_tokens",
        )


_HOW_SMALLER = 'Set "top" to get the largest keys of each query alone, choose '


class Block(NamedTuple):
    """Patterns of some queries, before they are divided by their sums.

    Attributes:
        part: Which queries.
        begin: Position of the first key.
        weights_HQK: float32: exponentials of scores, 1 of the largest, 0 of keys that a query does not see.
        total_HQ1: Their sums, a sink's included: a weight divided by it is a probability.
    """

    part: slice
    begin: int
    weights_HQK: Tensor
    total_HQ1: Tensor


def pattern_blocks(
    q_QHD: Tensor, k_KHD: Tensor, queries: Int64Array, facts: AttentionFacts, heads: Sequence[int]
) -> Iterator[Block]:
    """Compute patterns block by block, so that what is in memory at a time is bounded.

    Args:
        q_QHD: ``[Q, num_heads, head_size]``: rows of `q`.
        k_KHD: ``[K, num_kv_heads, head_size]``: rows of `k`, at positions 0 to K - 1.
        queries: int64 ``[Q]``: positions of the queries, ascending, below K.
        facts: Of the layer.
        heads: Which heads, in the order of the result.

    Yields:
        A block: its keys are those from the first that one of its queries sees to the last query's position.
    """
    if not len(queries):
        return
    size = max(1, BLOCK_SCORES // max(1, len(heads) * len(k_KHD)))
    first = _first_key(queries, facts)
    k_GKD = k_KHD[first : int(queries[-1]) + 1].float().transpose(0, 1)
    for start in range(0, len(queries), size):
        part = slice(start, min(start + size, len(queries)))
        begin, stop = _first_key(queries[part], facts), int(queries[part][-1]) + 1
        scores = torch.empty(len(heads), len(queries[part]), stop - begin)
        q_HQD = q_QHD[part].transpose(0, 1)[list(heads)].float()
        for group, places in _runs([head * facts.num_kv_heads // facts.num_heads for head in heads]):
            k_KD = k_GKD[group, begin - first : stop - first]
            torch.mm(q_HQD[places].flatten(0, 1), k_KD.T, out=scores[places].flatten(0, 1))
        yield Block(part, begin, *_weights(scores, queries[part], begin, facts, heads))


def _runs(groups: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield runs of equal groups, and where they are: neighbouring heads with the same keys take one product."""
    start = 0
    for group, members in groupby(groups):
        stop = start + len(list(members))
        yield group, slice(start, stop)
        start = stop


def _first_key(queries: Int64Array, facts: AttentionFacts) -> int:
    """The first position that one of the queries sees."""
    return 0 if facts.window is None else max(0, int(queries[0]) - facts.window + 1)


def _weights(
    scores_HQK: Tensor, queries: Int64Array, begin: int, facts: AttentionFacts, heads: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Make the weights of a block of products of queries and keys, in place, and their sums; see `Block`."""
    at_Q, at_K = torch.from_numpy(queries), torch.arange(begin, begin + scores_HQK.shape[2])
    scores_HQK *= facts.scale
    if facts.soft_cap is not None:
        scores_HQK.div_(facts.soft_cap).tanh_().mul_(facts.soft_cap)
    if facts.slopes is not None:
        slopes = torch.tensor([facts.slopes[head] for head in heads])
        scores_HQK -= slopes[:, None, None] * (at_Q[:, None] - at_K)
    later = slice(int(queries[0]) + 1 - begin, None)  # keys before it come after no query
    scores_HQK[:, :, later].masked_fill_(at_K[later] > at_Q[:, None], -torch.inf)
    if facts.window is not None:
        before = slice(0, max(0, int(queries[-1]) - facts.window + 1 - begin))
        scores_HQK[:, :, before].masked_fill_(at_K[before] <= at_Q[:, None] - facts.window, -torch.inf)
    largest = scores_HQK.amax(dim=-1, keepdim=True)
    if facts.sinks is None:
        sinks = None
    else:
        sinks = torch.tensor([facts.sinks[head] for head in heads])[:, None, None]
        largest = torch.maximum(largest, sinks)
    scores_HQK.sub_(largest).exp_()
    total = scores_HQK.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += (sinks - largest).exp_()
    return scores_HQK, total


def whole_rows(blocks: Iterator[Block], shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Join blocks to ``[queries, heads, keys]``: zero after each query's own position."""
    found = torch.zeros(shape, dtype=dtype)
    for part, begin, weights, total in blocks:
        found[part, :, begin : begin + weights.shape[2]] = weights.div_(total).transpose(0, 1)
    return found


def top_keys(blocks: Iterator[Block], shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the keys with the largest probabilities of ``[queries, heads, top]``, largest first.

    Returns:
        ``keys``, int32, -1 where a query has fewer keys; ``values``, their probabilities; ``rest``, ``[queries,
        heads]``, the sum of all others.
    """
    keys = torch.full(shape, -1, dtype=torch.int32)
    values, rest = torch.zeros(shape, dtype=dtype), torch.zeros(shape[:2], dtype=dtype)
    for part, begin, weights, total in blocks:
        count = min(shape[2], weights.shape[2])
        largest, places = _largest(weights.numpy(), count)
        found = torch.from_numpy(largest).div_(total)
        at = torch.where(found > 0, torch.from_numpy(places) + begin, -1)
        keys[part, :, :count] = at.int().transpose(0, 1)
        values[part, :, :count] = found.to(dtype).transpose(0, 1)
        others = (weights.sum(dim=-1, keepdim=True) / total - found.sum(dim=-1, keepdim=True)).clamp_(min=0)
        rest[part] = others[:, :, 0].to(dtype).transpose(0, 1)
    return {"keys": keys, "values": values, "rest": rest}


def _largest(weights_HQK: npt.NDArray[np.float32], count: int) -> tuple[npt.NDArray[np.float32], Int64Array]:
    """Return the largest weights of each query, ``[H, Q, count]``, largest first, and their places.

    Of equal weights the first is taken; where fewer than `count` are above 0, zeros with places of no meaning follow,
    and a query whose weights are NaN has zeros alone. Most weights are never sorted: the `count` largest of the maxima
    of strided parts are a lower bound of what is wanted, and few other weights reach it.
    """
    *shape, num_keys = weights_HQK.shape
    rows = weights_HQK.reshape(-1, num_keys)
    size = max(1, RANKED_AT_ONCE // num_keys)
    found = [_largest_of(rows[start : start + size], count) for start in range(0, len(rows), size)]
    values, places = (np.concatenate(each).reshape(*shape, count) for each in zip(*found, strict=True))
    return values, places


def _largest_of(rows: npt.NDArray[np.float32], count: int) -> tuple[npt.NDArray[np.float32], Int64Array]:
    """Return what `_largest` does for rows ``[n, K]``, with shape ``[n, count]``."""
    num_keys = rows.shape[1]
    least = np.full(len(rows), np.finfo(np.float32).smallest_subnormal)
    size = count * (4 if num_keys >= 8 * count else 2)
    if (turns := num_keys // size) > 1:
        maxima = rows[:, num_keys - turns * size :].reshape(len(rows), turns, size).max(axis=1)
        maxima.partition(size - count, axis=1)
        np.maximum(least, maxima[:, size - count], out=least)
    at = np.flatnonzero(rows >= least[:, None])
    row = at // num_keys
    counts = np.bincount(row, minlength=len(rows))
    columns = np.arange(len(at)) - (np.cumsum(counts) - counts)[row]
    # Bits of floats that are not negative are in the order of the floats: one sort of integers, without arguments.
    packed = np.zeros((len(rows), max(count, int(counts.max(initial=0)))), dtype=np.int64)
    bits = rows.ravel()[at].view(np.int32).astype(np.int64)
    packed[row, columns] = bits << 32 | num_keys - (at - row * num_keys)
    packed.sort(axis=1)
    found = packed[:, : -count - 1 : -1]
    return (found >> 32).astype(np.int32).view(np.float32), num_keys - (found & 0xFFFFFFFF)


class _Rows:
    """Rows of one site so far, in memory that grows by a quarter at a time.

    Attributes:
        num_whole: Positions from 0 on that all have a row.
        num_expected: Rows that come with the prompt, or at a time.
    """

    def __init__(self, num_expected: int, width: int, dtype: torch.dtype) -> None:
        self.num_whole = 0
        self.num_expected = num_expected
        self._rows = torch.empty(max(num_expected, 32), width, dtype=dtype)
        self._positions = np.empty(len(self._rows), dtype=np.int64)
        self._count = 0

    def __len__(self) -> int:
        """Rows."""
        return self._count

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that are here, or come with the prompt."""
        return max(self._count, self.num_expected) * self._rows[0].nbytes

    @property
    def positions(self) -> Int64Array:
        """int64 ``[rows]``, ascending: a view, which the next call changes."""
        return self._positions[: self._count]

    def add(self, positions: Int64Array, rows: Tensor) -> None:
        """Copy rows, which come by ascending position."""
        start, stop = self._count, self._count + len(positions)
        if stop > len(self._rows):
            before = self._rows
            self._rows = before.new_empty(stop + stop // 4, before.shape[1])
            self._rows[:start] = before[:start]
            self._positions = np.resize(self._positions, len(self._rows))
        self._rows[start:stop] = rows
        self._positions[start:stop] = positions
        self._count = stop
        if self.num_whole == start:
            gaps = np.flatnonzero(positions != np.arange(start, stop))
            self.num_whole = start + (int(gaps[0]) if len(gaps) else len(positions))

    def first(self, num_rows: int) -> Tensor:
        """Return the first rows, which no later call changes."""
        return self._rows[:num_rows]

    def take(self, count: int) -> tuple[Int64Array, Tensor]:
        """Give up the first rows: return their positions, and them."""
        kept = self._count
        positions, rows = self._positions[:count].copy(), self._rows[:count].clone()
        self._count = kept - count
        self._positions[: self._count] = self._positions[count:kept].copy()
        self._rows[: self._count] = self._rows[count:kept].clone()
        return positions, rows


Result = TypeVar("Result")

_Pattern: TypeAlias = "Future[tuple[Int64Array, dict[str, Tensor]]]"
"""Positions of queries, and their patterns by name."""


@dataclass(slots=True)
class _Layer:
    """One layer of a running request.

    Attributes:
        q: Rows of queries whose patterns are not computed yet.
        k: Rows of all keys.
        found: Positions of queries, and their patterns by name.
    """

    q: _Rows
    k: _Rows
    found: list[_Pattern] = field(default_factory=list)

    @property
    def has_prompt(self) -> bool:
        """Whether all keys of the prompt that come are here, and with them its queries."""
        return self.k.num_whole >= self.k.num_expected

    def num_ready(self, num_prompt: int, *, is_streamed: bool, is_over: bool) -> int:
        """Count the queries at hand that are computed together now; 0 to wait for more.

        What is computed together follows from positions alone, and not from how rows arrive, since the last bits of
        probabilities depend on it; but for generated queries that do not wait for others.

        Args:
            num_prompt: Tokens of the prompt.
            is_streamed: Generated queries do not wait for others.
            is_over: No more come.
        """
        ready = self.q.positions[: np.searchsorted(self.q.positions, self.k.num_whole)]
        if in_prompt := int(np.searchsorted(ready, num_prompt)):
            count, size, may_wait = in_prompt, PROMPT_QUERIES_AT_ONCE, not self.has_prompt
        else:
            count, size, may_wait = len(ready), QUERIES_AT_ONCE, not is_streamed
        return 0 if may_wait and not is_over and count < size else min(count, size)


@dataclass(slots=True)
class _Request:
    """A running request.

    Attributes:
        info: The request.
        wanted: What it asks.
        layers: By number.
        num_sent: Of each layer, patterns that went to chunks of a stream.
        num_held: Bytes of rows that are counted for it.
        failure: Why it ends with an error; its rows are gone.
    """

    info: RequestInfo
    wanted: WantedPatterns
    layers: dict[int, _Layer]
    num_sent: int = 0
    num_held: int = 0
    failure: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows."""
        return sum(rows.num_bytes for layer in self.layers.values() for rows in (layer.q, layer.k))

    def drop(self) -> None:
        """Give its rows and patterns up."""
        for layer in self.layers.values():
            for part in layer.found:
                part.cancel()
        self.layers = {}


class _Work:
    """Calls for requests on threads: one request's in their order, and those for requests that have ended first.

    The client of an ended request waits for its patterns alone; rows of many running ones come together with its last.

    Args:
        num_threads: Number of threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="headgate-attention")
        self._lock = Lock()
        self._waiting = deque[tuple[object, Future[Any], Callable[[], Any]]]()
        self._urgent = deque[tuple[object, Future[Any], Callable[[], Any]]]()

    def submit(self, request: object, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Have `call` made for a request."""
        found = Future[Result]()
        with self._lock:
            self._waiting.append((request, found, partial(call, *arguments)))
        self._threads.submit(self._make_next)
        return found

    def hurry(self, request: object) -> None:
        """Have what waits for a request done before what waits for others."""
        with self._lock:
            self._urgent.extend(each for each in self._waiting if each[0] is request)
            self._waiting = deque(each for each in self._waiting if each[0] is not request)

    def close(self) -> None:
        """Cancel what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [*self._urgent, *self._waiting]
        for _, found, _ in left:
            found.cancel()

    def _make_next(self) -> None:
        with self._lock:
            _, found, call = (self._urgent or self._waiting).popleft()
        if found.set_running_or_notify_cancel():
            try:
                found.set_result(call())
            except BaseException as error:  # noqa: BLE001  it is the caller's
                found.set_exception(error)


class AttentionConsumer(StreamingConsumer):
    """Answers with attention patterns; `AttentionParams` lists the parameters.

    The payload is ``{"format": "safetensors", "num_bytes", "heads", "data": base64}``; `heads` is ``"all"`` or the
    chosen ones. Decoded, `data` has ``queries``, int64 ``[queries]``, and of each layer, such as 5, ``5.attention``,
    ``[queries, heads, keys]``, zero after the query's own position. With `top` it has ``5.attention.keys``, int32,
    ``5.attention.values``, both ``[queries, heads, top]``, and ``5.attention.rest``, ``[queries, heads]``.

    A request asks with ``{"layers": [...], "heads": [...], "queries": SELECTOR, "top": N, "dtype": ...}``; only
    `layers` is required. It waits for its result. Patterns are computed while the request runs, on threads of their
    own, as soon as `PROMPT_QUERIES_AT_ONCE` rows of the prompt's queries or `QUERIES_AT_ONCE` rows of generated ones
    are there, and each generated one at once if the answer is streamed: little is left to do after its end.

    Raises:
        ConfigError: If patterns of a layer whose `q` and `k` are captured cannot be computed, and where there is none.
    """

    location = "worker"
    reads_positions = False
    is_awaited = True
    sends_parts = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._memory = parse_params(params).memory
        self._in_use = BytesInUse()
        self._facts = _facts_of(context)
        self._requests: dict[str, _Request] = {}
        # Half of the processors at most: each thread's products run on so many of torch's own.
        num_threads = max(1, min(MAX_PATTERN_THREADS, len(os.sched_getaffinity(0)) // (2 * torch.get_num_threads())))
        self._work = _Work(num_threads)
        self._computing: set[Future[dict[str, Any]]] = set()
        self._is_closed = False

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def check_lengths(cls, spec: CaptureSpec, context: SpecContext, lengths: RequestLengths) -> None:
        check_lengths(spec, context, lengths)

    @classmethod
    def named_outputs(cls, spec: CaptureSpec, context: SpecContext) -> dict[str, OutputColumns]:
        """None before the length of rows is known; see `stored_outputs`."""
        wanted = msgspec.convert(spec.options, WantedPatterns)
        if wanted.dtype != "float32":
            raise RequestError(f"{context.field}.dtype", "files hold float32; leave it out")
        counts = {num_heads(context.model, site.layer) for site in spec.sites}
        if wanted.heads is None and len(counts) > 1:
            raise RequestError(
                f"{context.field}.heads",
                f"these layers have {' and '.join(map(str, sorted(counts)))} heads: for files, list the same of each",
            )
        return {}

    @classmethod
    def stored_outputs(cls, payload: Any) -> StoredOutputs:
        """``pattern``, ``[queries, heads, keys]``; with `top` ``keys``, ``values`` and ``rest``, as in the payload."""
        patterns = fetch_patterns(payload)
        rows: dict[Site, list[Tensor]] = {}
        columns: dict[str, OutputColumns] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in patterns:
            number, _, what = name.partition(".attention")
            found, what = patterns[name], what.removeprefix(".") or "pattern"
            listed = rows.setdefault(Site(int(number), HookPoint.Q), [])
            start, width = sum(part.shape[1] for part in listed), found[:1].numel() if len(found) else 0
            dtype: Literal["int64", "float32"] = "int64" if found.dtype == torch.int32 else "float32"
            columns[what], shapes[what] = OutputColumns(start, start + width, dtype), tuple(found.shape[1:])
            listed.append(found.float().flatten(1))  # positions of keys are exact in float32 up to 2^24
        return StoredOutputs(
            patterns.queries, {site: torch.cat(parts, dim=1) for site, parts in rows.items()}, columns, shapes
        )

    def begin(self, request: RequestInfo) -> None:
        for layer in {site.layer for site in request.spec.sites}:
            if layer not in self._facts:
                raise ConsumerError(
                    f"attention: the driver does not know layer {layer}; patterns are computed beside the worker, so "
                    "leave location out"
                )
            if whole := np.intersect1d(request.prompt_token_ids, self._facts[layer].whole_tokens).tolist():
                raise ConsumerError(
                    f"attention: tokens of an image (id {whole[0]}) see later ones, and patterns are causal; ask for "
                    "them with a prompt of text"
                )
        num_prompt, model = request.num_prompt_tokens, self.context.model
        rows = {}
        for site in request.spec.sites:
            shape, count = model.shape(site), count_rows(request.spec.positions_at(site), num_prompt, num_prompt)
            # Queries do not stay: patterns of so many are computed at once.
            count = min(count, PROMPT_QUERIES_AT_ONCE) if site.hook is HookPoint.Q else count
            rows[site] = _Rows(count, shape.width, getattr(torch, shape.dtype))
        layers = {
            site.layer: _Layer(rows[site], rows[Site(site.layer, HookPoint.K)])
            for site in request.spec.sites
            if site.hook is HookPoint.Q
        }
        wanted = msgspec.convert(request.spec.options, WantedPatterns)
        self._requests[request.request_id] = found = _Request(request, wanted, layers)
        self._hold(found)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        written: dict[str, _Request] = {}
        for block in blocks:
            for span in block.spans:
                req_id, part = span.request.request_id, slice(span.start, span.stop)
                written[req_id] = self._requests[req_id]
                if written[req_id].failure is not None:
                    continue
                for number, site in enumerate(block.sites):
                    layer = written[req_id].layers[site.layer]
                    rows = layer.q if site.hook is HookPoint.Q else layer.k
                    rows.add(block.positions[part], block.rows[number, part])
        for request in written.values():
            self._hold(request)
            self._compute(request)
            if request.info.is_streamed:
                self._send_new(request)

    def finish(self, finished: FinishedRequest) -> Future[dict[str, Any]] | None:
        found = self._requests.pop(finished.request.request_id)
        if found.failure is not None:
            raise ConsumerError(found.failure)
        if not found.layers:
            return None  # its layers belong to other pipeline stages
        self._compute(found, is_over=True)
        for number, layer in found.layers.items():
            if not layer.found:  # an answer without queries has the names, too
                nothing = np.empty(0, np.int64), layer.q.first(0), layer.k.first(0)
                layer.found.append(self._work.submit(found, self._patterns, number, found.wanted, *nothing))
        # After all its parts: a thread that waits for one waits for another thread at work.
        payload = self._work.submit(found, self._payload, found, finished.final.num_rows)
        self._work.hurry(found)
        self._computing.add(payload)
        payload.add_done_callback(self._computing.discard)
        payload.add_done_callback(lambda _: self._release(found))
        return payload

    def abandon(self, request: RequestInfo) -> None:
        if (found := self._requests.pop(request.request_id, None)) is not None:
            self._release(found)

    def close(self, timeout_s: float) -> None:
        self._requests.clear()
        wait(list(self._computing), timeout_s)
        self._is_closed = True
        self._work.close()

    def _hold(self, request: _Request) -> None:
        """Count the rows of a request; give it up if they have no room."""
        if request.failure is not None or not (more := request.num_bytes - request.num_held):
            return
        if self._in_use.num_bytes + more > self._memory:
            others = self._in_use.num_bytes - request.num_held
            request.failure = (
                f"attention: the rows of this request take {request.num_bytes} bytes so far, other requests hold "
                f"{others}, and all may hold {self._memory} (parameter memory_bytes); send it again later, or choose "
                "fewer layers"
            )
            self._release(request)
            return
        self._in_use.add(more)
        request.num_held += more

    def _release(self, request: _Request) -> None:
        self._in_use.add(-request.num_held)
        request.num_held = 0
        request.drop()

    def _compute(self, request: _Request, *, is_over: bool = False) -> None:
        """Begin to compute patterns of the queries at hand; see `_Layer.num_ready`."""
        num_prompt, is_streamed = request.info.num_prompt_tokens, request.info.is_streamed
        for number, layer in request.layers.items():
            while count := layer.num_ready(num_prompt, is_streamed=is_streamed, is_over=is_over):
                queries, q_rows = layer.q.take(count)
                k_rows = layer.k.first(int(queries[-1]) + 1)
                layer.found.append(
                    self._work.submit(request, self._patterns, number, request.wanted, queries, q_rows, k_rows)
                )

    def _send_new(self, request: _Request) -> None:
        """Let a chunk have the patterns that are new; none of the prompt has one before its last token."""
        layers = request.layers.values()
        count = min((len(layer.found) for layer in layers), default=0)
        if count <= request.num_sent or not all(layer.has_prompt for layer in layers):
            return
        found = {number: layer.found[request.num_sent : count] for number, layer in request.layers.items()}
        request.num_sent = count
        sent = self._work.submit(request, self._send, request.info, request.wanted, found)  # after them, as in `finish`
        sent.add_done_callback(_log_failure)

    def _send(self, request: RequestInfo, wanted: WantedPatterns, found: Mapping[int, Sequence[_Pattern]]) -> None:
        parts = {number: [part.result() for part in parts] for number, parts in found.items()}
        heads = sum(next(iter(listed[0][1].values())).shape[1] for listed in parts.values())
        for queries in _split(_common_queries(parts.values()), heads, wanted):
            self.send_part(request, _encoded(wanted, parts, queries), int(queries[-1]) + 1)

    def _patterns(
        self, number: int, wanted: WantedPatterns, queries: Int64Array, q_rows: Tensor, k_rows: Tensor
    ) -> tuple[Int64Array, dict[str, Tensor]]:
        """Return the queries, and their patterns in one layer by name."""
        facts = self._facts[number]
        q_QHD = q_rows.view(-1, facts.num_heads, facts.head_size)
        k_KHD = k_rows.view(-1, facts.num_kv_heads, facts.head_size)
        heads = wanted.heads or range(facts.num_heads)
        blocks = self._until_closed(pattern_blocks(q_QHD, k_KHD, queries, facts, heads))
        dtype: torch.dtype = getattr(torch, wanted.dtype)
        if wanted.top is None:
            return queries, {WHOLE: whole_rows(blocks, (len(queries), len(heads), len(k_rows)), dtype)}
        found = top_keys(blocks, (len(queries), len(heads), wanted.top), dtype)
        return queries, {f".{name}": tensor for name, tensor in found.items()}

    def _payload(self, request: _Request, num_rows: int) -> dict[str, Any]:
        num_keys = min(num_rows, *(layer.k.num_whole for layer in request.layers.values()))
        parts = {number: [part.result() for part in layer.found] for number, layer in request.layers.items()}
        queries = _common_queries(parts.values())
        return _encoded(request.wanted, parts, queries[queries < num_keys])

    def _until_closed(self, blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            if self._is_closed:
                raise ConsumerError("attention: the engine was shut down while the patterns were computed")
            yield block


def _split(queries: Int64Array, num_heads: int, wanted: WantedPatterns) -> Iterator[Int64Array]:
    """Split queries, ascending, into runs whose patterns, with `num_heads` heads of all layers, take `PART_BYTES`."""
    while len(queries):
        # Rows of a run are as long as its last query's.
        sizes = np.arange(1, len(queries) + 1) * num_heads * np.array([wanted.row_bytes(int(q) + 1) for q in queries])
        count = max(1, int(np.searchsorted(sizes, PART_BYTES, side="right")))
        yield queries[:count]
        queries = queries[count:]


def _log_failure(sent: Future[None]) -> None:
    """Log why a part of a stream was not sent, but not for a request that ended early: its patterns are cancelled."""
    if sent.cancelled() or isinstance(error := sent.exception(), CancelledError):
        return
    if error is not None:
        logger.error("attention: patterns were not sent with a chunk", exc_info=error)


def _facts_of(context: ConsumerContext) -> dict[int, AttentionFacts]:
    """The facts of this worker's layers that are served.

    Raises:
        ConfigError: If the patterns of one cannot be computed, or none is configured.
    """
    model = context.model
    layers = served_layers(model)
    if not layers:
        raise ConfigError(
            'attention: needs the hook points q and k of a layer among capture.sites, such as {"q": [5], "k": [5]}'
        )
    if not model.attention and context.pp_size == 1:
        raise ConfigError(
            "attention: computes patterns beside the worker, which knows the model's layers; leave location out"
        )
    facts = {}
    for layer in layers:
        found = model.attention.get(layer)
        if isinstance(found, str):
            raise ConfigError(f"attention: no patterns of layer {layer}: {found}; take its q or k out of capture.sites")
        if found is not None:  # else it belongs to another pipeline stage
            facts[layer] = found
    return facts


_Parts = Sequence[tuple[Int64Array, Mapping[str, Tensor]]]
"""Positions of queries, and their patterns by name, by ascending position."""


def _common_queries(layers: Iterable[_Parts]) -> Int64Array:
    """Return the queries that every layer has.

    Rows are missing where overload lost some: the result says so, and patterns of later queries would be wrong.

    Raises:
        ValueError: If parts of a layer overlap.
    """
    common: Int64Array = reduce(partial(np.intersect1d, assume_unique=True), map(_queries_of, layers))
    return common


def _queries_of(parts: _Parts) -> Int64Array:
    queries: Int64Array = np.concatenate([np.empty(0, np.int64), *(positions for positions, _ in parts)])
    if (np.diff(queries) <= 0).any():
        raise ValueError("a query is there twice")
    return queries


def _joined(parts: _Parts, queries: Int64Array) -> dict[str, Tensor]:
    """Join the patterns of one layer, by name, of the chosen queries alone; whole rows up to the last one's key."""
    chosen = [(_kept(positions, queries), tensors) for positions, tensors in parts]
    found = {}
    for name in parts[0][1] if parts else ():
        rows = [tensors[name][kept] for kept, tensors in chosen]
        if name == WHOLE:
            num_keys = int(queries[-1]) + 1 if len(queries) else 0
            joined, start = rows[0].new_zeros(len(queries), rows[0].shape[1], num_keys), 0
            for each in rows:
                joined[start : start + len(each), :, : each.shape[2]] = each[:, :, :num_keys]
                start += len(each)
            found[name] = joined
        else:
            found[name] = torch.cat(rows)
    return found


def _kept(positions: Int64Array, queries: Int64Array) -> slice | Tensor:
    """Return the places of a part's positions that are among the queries of all parts; both ascend."""
    start, stop = np.searchsorted(queries, (positions[0], positions[-1] + 1)) if len(positions) else (0, 0)
    return slice(None) if stop - start == len(positions) else torch.from_numpy(np.isin(positions, queries))


def _encoded(wanted: WantedPatterns, layers: Mapping[int, _Parts], queries: Int64Array) -> dict[str, Any]:
    """The payload with the patterns of some queries."""
    arrays = {QUERIES: queries}
    for number, parts in layers.items():
        for name, tensor in _joined(parts, queries).items():
            arrays[f"{number}.attention{name}"] = tensor.numpy()
    data = save(arrays)  # a third of the time that tensors take
    return {
        "format": "safetensors",
        "num_bytes": len(data),
        "heads": "all" if wanted.heads is None else list(wanted.heads),
        "data": b64encode(data).decode("ascii"),
    }


class Patterns:
    """The patterns of one sample.

    ``patterns["5.attention"]`` is a tensor ``[queries, heads, keys]``, ``patterns["5.attention.keys"]`` one of int32
    ``[queries, heads, top]``.

    Attributes:
        queries: int64 ``[queries]``: positions, ascending.
        heads: Which heads; None for all, in their order.
    """

    def __init__(self, queries: Int64Array, heads: Sequence[int] | None, tensors: Mapping[str, Tensor]) -> None:
        self.queries = queries
        self.heads = heads
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            KeyError: If there is none of that name; the message lists the names.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise KeyError(f"{name}: not among these patterns; there are {', '.join(self._tensors)}") from None


def fetch_patterns(payload: Any) -> Patterns:
    """Return the patterns in the payload of one sample's result, from an `LLM` or out of an answer over HTTP.

    Args:
        payload: The payload; or a list of the payloads of pipeline stages, or of chunks of a stream, which may be lists
            themselves: their queries are put together. Chunks may lack the last queries; the payload at the end of the
            stream has all.

    Raises:
        CaptureFileError: If it is no payload of the consumer `attention`, or damaged.
    """
    layers: dict[int, list[tuple[Int64Array, dict[str, Tensor]]]] = {}
    try:
        given = payload if isinstance(payload, list) else [payload]
        parts = [part for each in given for part in (each if isinstance(each, list) else [each])]
        for part in parts:
            tensors = load(base64.b64decode(part["data"], validate=True))
            queries: Int64Array = tensors.pop(QUERIES).numpy()
            by_layer: dict[int, dict[str, Tensor]] = {}
            for name in sorted(tensors):
                number, _, what = name.partition(".attention")
                by_layer.setdefault(int(number), {})[what] = tensors[name]
            for number, found in by_layer.items():
                layers.setdefault(number, []).append((queries, found))
        heads = parts[0]["heads"]
        for listed in layers.values():
            listed.sort(key=lambda one: int(one[0][0]) if len(one[0]) else -1)
        queries = _common_queries(layers.values()) if layers else np.empty(0, np.int64)
        joined = {
            f"{number}.attention{what}": tensor
            for number in sorted(layers)
            for what, tensor in _joined(layers[number], queries).items()
        }
    except (TypeError, KeyError, IndexError, ValueError, SafetensorError) as error:
        what = "expected a payload of the consumer 'attention'"
        raise CaptureFileError(f"{what}, got {shown(payload)}: {error!r}") from error
    return Patterns(queries, None if heads == "all" else heads, joined)
