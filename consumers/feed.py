"""Example requests with known rows, and a feed that drives a consumer with them as headgate does, without threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.schema.batch import FinalState, Int64Array
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CaptureConsumer,
    CapturedRequest,
    FinishedRequest,
    HeadReadout,
    ModelHead,
    ModelInfo,
    Readout,
    ReadoutFacts,
    RequestInfo,
    RowArguments,
    RowBlock,
    RowSpan,
    StreamingConsumer,
)
from headgate.capture.schema.positions import PositionSelector
from headgate.capture.schema.sites import FINAL_NORM_SITE, Columns, HookPoint, Site, SiteShape, sort_sites
from headgate.capture.schema.spec import CaptureSpec

EXAMPLE_MODEL = ModelInfo(
    name="example-model",
    num_layers=4,
    hidden_size=16,
    dtype="bfloat16",
    sites=sort_sites(
        [
            *(Site(layer, hook) for layer in range(4) for hook in (HookPoint.PRE_ATTN, HookPoint.POST_MLP)),
            FINAL_NORM_SITE,
        ]
    ),
)
"""A model that exists only here: `pre_attn` and `post_mlp` of four layers, and the final norm, can be captured."""

TIMEOUT_S = 60.0
"""How long anything may take before a test says that it hangs."""


class ExampleRequest:
    """A request with known rows: each value follows from the request's id, the site and the position alone.

    Args:
        spec: What it wants.
        request_id: Its id inside the engine.
        prompt: Tokens of the prompt.
        output: Tokens that were generated; the last one has no row.
        status: How it ended.
        model: The model's shape.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        request_id: str = "request-1",
        *,
        prompt: int = 5,
        output: int = 4,
        status: str = "stop",
        model: ModelInfo = EXAMPLE_MODEL,
    ) -> None:
        self._model = model
        self._seed = list(request_id.encode())
        token_ids = np.random.default_rng(self._seed).integers(0, 50_000, prompt + output, dtype=np.int64)
        self.final = FinalState(num_prompt_tokens=prompt, token_ids=token_ids, status=status)
        self.info = RequestInfo(
            request_id=request_id,
            client_request_id=f"client-{request_id}",
            prompt_token_ids=token_ids[:prompt],
            spec=spec.with_positions(lambda selector: selector.resolve(prompt, "positions")),
        )

    def wanted(self, start: int = 0, stop: int | None = None, selector: PositionSelector | None = None) -> Int64Array:
        """The positions from `start` up to `stop`, by default the request's end, that a selector of its selects."""
        positions = np.arange(start, self.final.num_rows if stop is None else stop, dtype=np.int64)
        num_prompt = np.full(len(positions), self.info.num_prompt_tokens, dtype=np.int64)
        return positions[(selector or self.info.spec.positions).mask(positions, num_prompt)]

    def rows(self, site: Site, positions: Int64Array) -> Tensor:
        """``[len(positions), width]`` in the site's dtype: the columns that the request wants."""
        model, shape = self._model, self._model.shape(site)
        rows = np.empty((len(positions), shape.width))
        for index, position in enumerate(positions):
            seed = [*self._seed, model.sites.index(site), int(position)]
            rows[index] = np.random.default_rng(seed).normal(size=shape.width)
        found = torch.from_numpy(rows).to(getattr(torch, shape.dtype))
        columns = self.info.spec.columns.get(site)
        return torch.cat([found[:, start:stop] for start, stop in columns], dim=1) if columns else found

    def expected(self) -> CapturedRequest:
        """The request as a consumer should have it at the end."""
        spec, positions = self.info.spec, self.wanted()
        own = {hook: self.wanted(selector=each) for hook, each in spec.hook_positions.items()}
        return CapturedRequest(
            request=self.info,
            final=self.final,
            sites=spec.sites,
            rows={site: self.rows(site, own.get(site.hook, positions)) for site in spec.sites},
            positions=positions,
            token_ids=self.final.token_ids[positions],
            hook_positions=own,
        )


_Wanted = tuple[tuple[Site, ...], tuple[Columns, ...]]
"""Sites, and the columns of each."""


class Feed:
    """Drives one consumer on the calling thread: `begin`, `step` as often as need be, `finish`.

    Rows of sites with a readout of the consumer's class are read out on the CPU, as a worker would.

    Args:
        consumer: To be driven.
        head: Of the model, for a `HeadReadout`.
    """

    def __init__(self, consumer: CaptureConsumer, head: ModelHead | None = None) -> None:
        assert isinstance(consumer, BatchedConsumer | StreamingConsumer), "subclass one of these two"
        self.consumer = consumer
        self._sink = Assembler(consumer) if isinstance(consumer, BatchedConsumer) else consumer
        readouts = type(consumer).readouts(consumer.params, consumer.context.model)
        self._facts = {
            site: ReadoutFacts(readout.num_outputs, readout.key, readout.num_arguments)
            for site, readout in readouts.items()
        }
        self._functions = {site: _on_host(readout, head) for site, readout in readouts.items()}

    def begin(self, *requests: ExampleRequest) -> None:
        """Announce requests."""
        for request in requests:
            sites = request.info.spec.sites
            facts = {site: self._facts[site] for site in sites if site in self._facts}
            request.info = replace(request.info, readouts=facts)
            self._sink.begin(request.info)

    def step(self, spans: Mapping[ExampleRequest, tuple[int, int]], *, sites_per_block: int | None = None) -> None:
        """One step of the model: for each request the positions ``start : stop``, as far as they are wanted.

        Args:
            spans: By request, in the order of the batch; requests that want the same sites share a block.
            sites_per_block: Cut blocks so that none has more sites; None leaves them whole.
        """
        groups: dict[_Wanted, list[tuple[ExampleRequest, Int64Array]]] = {}
        for request, (start, stop) in spans.items():
            for sites, selector in request.info.spec.selections:
                positions = request.wanted(start, stop, selector)
                if len(positions):
                    columns = tuple(request.info.spec.columns.get(site, ()) for site in sites)
                    groups.setdefault((sites, columns), []).append((request, positions))
        blocks = [
            self._read_out(make_block(sites[first : first + (sites_per_block or len(sites))], group))
            for alike, group in groups.items()
            for sites in self._of_one_shape(*alike)
            for first in range(0, len(sites), sites_per_block or len(sites))
        ]
        if blocks:
            self.write(blocks)

    def _of_one_shape(self, sites: Sequence[Site], columns: Sequence[Columns]) -> list[tuple[Site, ...]]:
        """Split sites by the shape of their rows, and by the columns that are wanted, as a worker does."""
        found: dict[tuple[bool, SiteShape, Columns], list[Site]] = {}
        for site, wanted in zip(sites, columns, strict=True):
            is_read_out = site in self._facts
            shape = self._facts[site].shape if is_read_out else self.consumer.context.model.shape(site)
            found.setdefault((is_read_out, shape, wanted), []).append(site)
        return [tuple(each) for each in found.values()]

    def _read_out(self, block: RowBlock) -> RowBlock:
        if block.sites[0] not in self._functions:
            return block
        found = []
        for site, rows_ND in zip(block.sites, block.rows.double(), strict=True):
            count = self._facts[site].num_arguments
            given = (_arguments(block, count),) if count else ()
            found.append(self._functions[site](rows_ND, *given).float())
        return replace(block, rows=torch.stack(found))

    def write(self, blocks: Sequence[RowBlock]) -> None:
        """Hand over blocks as they are; `step` makes them."""
        before = [block.rows.clone() for block in blocks]
        self._sink.write(blocks)
        for block, rows in zip(blocks, before, strict=True):
            assert torch.equal(block.rows.view(torch.uint8), rows.view(torch.uint8)), "rows are shared: do not write"

    def finish(self, request: ExampleRequest, *, dropped_rows: int = 0) -> Any:
        """End a request; return its payload, waiting for it if the consumer gave a future."""
        finished = FinishedRequest(request=request.info, final=request.final, dropped_rows=dropped_rows)
        payload = self._sink.finish(finished)
        return payload.result(TIMEOUT_S) if isinstance(payload, Future) else payload

    def finish_later(self, request: ExampleRequest) -> Any:
        """End a request; return what the consumer returned, be it a payload or a future."""
        return self._sink.finish(FinishedRequest(request=request.info, final=request.final))

    def abandon(self, request: ExampleRequest) -> None:
        """Notify the consumer that a request failed and will not be finished."""
        self._sink.abandon(request.info)

    def whole(self, request: ExampleRequest) -> Any:
        """A request from beginning to end, its rows in one step; return its payload."""
        self.begin(request)
        self.step({request: (0, request.final.num_rows)})
        return self.finish(request)


def _on_host(readout: Readout, head: ModelHead | None) -> Callable[..., Tensor]:
    device = torch.device("cpu")
    if not isinstance(readout, HeadReadout):
        return readout.on(device)
    assert head is not None, "this readout needs the model's head: Feed(consumer, head)"
    transport, reduce = readout.transport(device), readout.reduction.with_head(device, head)
    return lambda rows, *arguments: reduce(transport(rows, *arguments), *arguments)


def _arguments(block: RowBlock, count: int) -> RowArguments:
    """The arguments that the requests of a block give to each of its rows."""
    found = np.full((len(block.positions), count), -1, np.int64)
    for span in block.spans:
        given = span.request.spec.arguments
        found[span.start : span.stop, : len(given)] = given
    return RowArguments(found, torch.from_numpy(found))


def make_block(sites: Sequence[Site], group: Sequence[tuple[ExampleRequest, Int64Array]]) -> RowBlock:
    """One block with the rows of several requests, one after the other."""
    spans, stop = [], 0
    for request, positions in group:
        start, stop = stop, stop + len(positions)
        spans.append(RowSpan(request=request.info, start=start, stop=stop))
    rows = torch.stack([torch.cat([request.rows(site, positions) for request, positions in group]) for site in sites])
    positions = np.concatenate([positions for _, positions in group])
    return RowBlock(sites=tuple(sites), rows=rows, positions=positions, spans=tuple(spans))
