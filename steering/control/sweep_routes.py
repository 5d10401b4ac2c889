"""The HTTP route ``/v1/patch_sweep`` on vLLM's server: its cells, as server-sent events.

Servers alone load this module, which uses their FastAPI.

A sweep patches rows of a kept clean run, one at a time, into a corrupted prompt. Each cell of the grid is one
generation of one token, with the row of one site and position replaced. Its value says how far the answer moved. The
prompts are compared first: rows of the same distance from the start, or from the end where the prompts differ in
length, belong together.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import msgspec
from fastapi import APIRouter, HTTPException, Request
from starlette.responses import StreamingResponse

from headgate.capture.schema.errors import OverloadedError, RequestError, shown
from headgate.capture.schema.positions import parse_positions
from headgate.capture.schema.results import FindKept, KeptRequest
from headgate.capture.schema.sites import Site
from headgate.capture.schema.vocabulary import read_token, read_tokens
from headgate.steering.control.handle import AsyncSteering
from headgate.steering.control.openapi import patch_sweep
from headgate.steering.documents.operations import REQUEST_FIELDS, RowSource, float32_row, read_at, read_source
from headgate.steering.documents.schema import Count, one_of
from headgate.steering.documents.vectors import check_scale
from headgate.steering.programs.operations import Float32Row, Method
from headgate.steering.vectors.phase_vectors import Steerable

if TYPE_CHECKING:
    from headgate.capture.engine.contracts.parts import RouteServices
    from headgate.capture.schema.vocabulary import Vocabulary

MAX_CELLS = 4096
"""Cells of one sweep, at most: each is a generation."""

MAX_IN_FLIGHT = 16
"""Generations of one sweep at a time, so that others' requests find room beside them."""

METRICS = ("logprob", "logit_diff", "recovered")


class KeptRun(msgspec.Struct, forbid_unknown_fields=True):
    """A request that has kept its rows, and which of its samples."""

    request: str
    sample: Count = 0


class SweepDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a sweep.

    Attributes:
        prompt: The corrupted prompt, or its tokens.
        source: The clean run: the name under which it has kept its rows.
        at: Sites, as an operation has them.
        positions: Positions of the prompt, as captures select them.
        answer: The token whose logprob counts.
        foil: The token it is compared with.
    """

    prompt: Annotated[Any, one_of(str, list[Count])]
    source: Annotated[Any, one_of(str, KeptRun)]
    at: Any
    positions: Any = "all_prompt"
    metric: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(METRICS)})] = METRICS[0]
    answer: Annotated[Any, one_of(str, Count)]
    foil: Annotated[Any, one_of(str, Count, None)] = None
    alpha: float = 1.0
    model: str | None = None


FIELDS = SweepDocument.__struct_fields__

Score = Callable[[Sequence[int], Sequence[int], Mapping[str, Any]], Awaitable[Sequence[float]]]
"""Scores one generation: tokens of the prompt, tokens to score, fields of the request. Returns their logprobs."""


class PatchedGeneration(NamedTuple):
    """One generation of a sweep.

    Attributes:
        site: Where the row is replaced.
        position: Position of the row in the corrupted prompt.
        row: The clean run's.
    """

    site: Site
    position: int
    row: Float32Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep, read and checked.

    Attributes:
        prompt: Tokens of the corrupted prompt.
        clean_prompt: Tokens of the clean one.
        sites: In the order of the forward pass.
        positions: Positions of the corrupted prompt, ascending; each with its partner in the clean one.
        skipped: Positions that were asked for and have no partner.
        kept: The clean run's rows.
        metric: One of `METRICS`.
        scored: The answer's token, and the foil's if there is one.
        alpha: As for the method ``replace``.
    """

    prompt: tuple[int, ...]
    clean_prompt: tuple[int, ...]
    sites: tuple[Site, ...]
    positions: Mapping[int, int]
    skipped: tuple[int, ...]
    kept: KeptRequest = field(repr=False)
    metric: str
    scored: tuple[int, ...]
    alpha: float

    def fields(self, cell: PatchedGeneration) -> dict[str, Any]:
        """Return the fields of a cell's request."""
        operation = {
            "at": cell.site,
            "method": Method.REPLACE.value,
            "vector": cell.row,
            "alpha": self.alpha,
            "positions": [cell.position],
        }
        return {REQUEST_FIELDS.ops[1]: [operation]}


def read_sweep(document: Mapping[str, Any], steerable: Steerable, find: FindKept, vocabulary: Vocabulary) -> Sweep:
    """Read the body of a sweep.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    unknown = next((name for name in document if name not in FIELDS), None)
    if unknown is not None:
        raise RequestError(shown(unknown)[1:-1], f"is no field of this route; it has {', '.join(FIELDS)}")
    metric, scored = _metric(document, vocabulary)
    alpha = 1.0 if document.get("alpha") is None else check_scale(document["alpha"], "alpha")
    if not 0 < alpha <= 1:
        raise RequestError("alpha", f"lies above 0 and at most at 1, got {alpha}")
    sites = _sites(document, steerable)
    prompt = read_tokens(document.get("prompt"), vocabulary, "prompt")
    source = _source(document.get("source"))
    kept = find(source.request, source.sample, "source")
    clean = tuple(kept.prompt_token_ids.tolist())
    wanted = _positions(document.get("positions"), len(prompt))
    partners = align(clean, prompt)
    positions = {position: partners[position] for position in wanted if position in partners}
    if not positions:
        raise RequestError("positions", "none of them has a partner in the clean prompt: the prompts differ too much")
    if len(sites) * len(positions) > MAX_CELLS:
        cells = f"{len(sites)} sites and {len(positions)} positions"
        raise RequestError("positions", f"{cells} are more than {MAX_CELLS} cells: sweep fewer at a time")
    partial = next((site.name for site in sites if site in kept.columns), None)
    if partial is not None:
        raise RequestError("source", f"keeps some columns of {partial} alone; a sweep patches whole rows")
    return Sweep(
        prompt=prompt,
        clean_prompt=clean,
        sites=sites,
        positions=positions,
        skipped=tuple(position for position in wanted if position not in partners),
        kept=kept,
        metric=metric,
        scored=scored,
        alpha=alpha,
    )


def read_cells(sweep: Sweep) -> tuple[PatchedGeneration, ...]:
    """Return a cell for each site and position, the sites of one position together; thousands take a while.

    Raises:
        RequestError: If a row was not captured, or is not finite.
    """
    return tuple(
        PatchedGeneration(site, position, float32_row(sweep.kept.row(site, partner, "source"), "source"))
        for position, partner in sweep.positions.items()
        for site in sweep.sites
    )


def align(clean: Sequence[int], corrupt: Sequence[int]) -> dict[int, int]:
    """Return for each position of the corrupted prompt its partner in the clean one, as far as there is one.

    In prompts of one length the same positions belong together. Otherwise the tokens that both begin with belong
    together, and the tokens that both end with; tokens between them have no partner.
    """
    if len(clean) == len(corrupt):
        return {position: position for position in range(len(corrupt))}
    shortest = min(len(clean), len(corrupt))
    begin = next((i for i in range(shortest) if clean[i] != corrupt[i]), shortest)
    rest = shortest - begin
    end = next((i for i in range(rest) if clean[-1 - i] != corrupt[-1 - i]), rest)
    shift = len(clean) - len(corrupt)
    behind = range(len(corrupt) - end, len(corrupt))
    return {position: position for position in range(begin)} | {position: position + shift for position in behind}


class Baselines(NamedTuple):
    """The metric without patches.

    Attributes:
        clean: The clean prompt's value.
        corrupt: The corrupted prompt's value.
    """

    clean: float
    corrupt: float


class Value(NamedTuple):
    """The value of one cell."""

    cell: PatchedGeneration
    value: float


async def measure(sweep: Sweep, score: Score) -> Baselines:
    """Score both prompts as they are.

    Raises:
        RequestError: If they score alike, and the metric is ``recovered``.
    """
    clean, corrupt = [raw_value(await score(prompt, sweep.scored, {})) for prompt in (sweep.clean_prompt, sweep.prompt)]
    if sweep.metric == "recovered" and clean == corrupt:
        raise RequestError("metric", f"the clean and the corrupted prompt score alike, {clean}: nothing is to recover")
    return Baselines(clean, corrupt)


async def run(
    sweep: Sweep, cells: Sequence[PatchedGeneration], baselines: Baselines, score: Score
) -> AsyncGenerator[Value, None]:
    """Yield the values of cells as they come; closing it ends the generations that run.

    Raises:
        Exception: What a generation raises; the others are ended.
    """
    waiting = iter(cells)
    running: dict[asyncio.Task[Sequence[float]], PatchedGeneration] = {}

    def start(count: int) -> None:
        for _, cell in zip(range(count), waiting, strict=False):
            running[asyncio.ensure_future(_scored(score, sweep, cell))] = cell

    start(MAX_IN_FLIGHT)
    try:
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            start(len(done))
            for task in done:
                cell = running.pop(task)
                yield Value(cell, value_of(sweep, baselines, task.result()))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _scored(score: Score, sweep: Sweep, cell: PatchedGeneration) -> Sequence[float]:
    return await score(sweep.prompt, sweep.scored, sweep.fields(cell))


def raw_value(logprobs: Sequence[float]) -> float:
    """Return the answer's logprob, less the foil's if there is one: that is the difference of their logits."""
    return logprobs[0] - (logprobs[1] if len(logprobs) > 1 else 0.0)


def value_of(sweep: Sweep, baselines: Baselines, logprobs: Sequence[float]) -> float:
    """Return a cell's value; of ``recovered``, the part of the way from the corrupted to the clean prompt."""
    value = raw_value(logprobs)
    if sweep.metric != "recovered":
        return value
    return (value - baselines.corrupt) / (baselines.clean - baselines.corrupt)


def _metric(document: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[str, tuple[int, ...]]:
    metric = document.get("metric") or METRICS[0]
    if metric not in METRICS:
        raise RequestError("metric", f"expected one of {', '.join(METRICS)}; got {shown(metric)}")
    if document.get("answer") is None:
        raise RequestError("answer", "is missing: the token to score, as a text or an id")
    scored = [read_token(document["answer"], vocabulary, "answer")]
    foil = document.get("foil")
    if metric == "logprob" and foil is not None:
        raise RequestError("foil", "logprob is that of the answer alone; for the difference, set the metric logit_diff")
    if metric == "logit_diff" and foil is None:
        raise RequestError("foil", "is missing: the token that logit_diff compares the answer with")
    if foil is not None:
        scored.append(read_token(foil, vocabulary, "foil"))
        if scored[0] == scored[1]:
            raise RequestError("foil", "is the answer's own token")
    return metric, tuple(scored)


def _source(value: object) -> RowSource:
    named = value if isinstance(value, Mapping) else {"request": value}
    return read_source({**named, "position": 0}, "source")


def _sites(document: Mapping[str, Any], steerable: Steerable) -> tuple[Site, ...]:
    if document.get("at") is None:
        raise RequestError("at", 'is missing: sites, such as {"hook": "post_mlp", "layers": "all"}')
    sites = read_at(document["at"], steerable.num_layers, "at")
    missing = next((site for site in sites if site not in steerable.op_sites), None)
    if missing is not None:
        known = shown([site.name for site in steerable.op_sites])
        raise RequestError(
            "at", f"{missing.name} takes no operations on this server (--steering-op-sites); declared: {known}"
        )
    return sites


def _positions(value: object, num_prompt: int) -> list[int]:
    selector = parse_positions("all_prompt" if value is None else value, "positions").resolve(num_prompt, "positions")
    wanted = selector.wanted(num_prompt)
    found = [int(position) for position in wanted[: num_prompt + 1] if position < num_prompt]
    if not found or int(wanted[min(len(wanted), num_prompt + 1) - 1]) >= num_prompt:
        raise RequestError("positions", f"only positions of the prompt can be patched, and it has {num_prompt}")
    return found


END = "data: [DONE]\n\n"


def open_sweep_route(services: RouteServices) -> APIRouter:
    """Return the router of ``/v1/patch_sweep``."""
    router = APIRouter(prefix="/v1", tags=["steering"])
    route = SweepRoute(services)
    router.add_api_route(
        "/patch_sweep", route.sweep, methods=["POST"], response_model=None, **patch_sweep(SweepDocument)
    )
    return router


class SweepRoute:
    """The route. Errors before the first event are HTTP errors; later ones are the last event."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services

    async def sweep(self, request: Request) -> StreamingResponse:
        """Patch rows of a kept clean run into a corrupted prompt, one site and position at a time.

        Every cell of the grid is one generation of one token; its value is the metric. Answered with server-sent
        events: the grid and the values without patches first, then each cell when it is there.
        """
        steerable = cast("AsyncSteering", self._services.handle()).steerable
        with self._services.client_errors():
            document = await self._services.read_object(request)
            vocabulary = await self._services.vocabulary()
            sweep = await asyncio.to_thread(read_sweep, document, steerable, self._services.find_kept, vocabulary)
            cells = await asyncio.to_thread(read_cells, sweep)
            try:
                baselines = await measure(sweep, self._services.score)
            except OverloadedError as error:
                raise HTTPException(503, str(error)) from None
        first = await asyncio.to_thread(described, sweep, baselines, vocabulary)
        return StreamingResponse(self._events(sweep, cells, baselines, first), media_type="text/event-stream")

    async def _events(
        self, sweep: Sweep, cells: Sequence[PatchedGeneration], baselines: Baselines, first: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        yield event(first)
        try:
            async with aclosing(run(sweep, cells, baselines, self._services.score)) as values:
                async for (site, position, _), value in values:
                    shown = value if math.isfinite(value) else None  # JSON has no infinity
                    yield event({"site": site.name, "position": position, "value": shown})
        except (RequestError, OverloadedError) as error:
            code = 503 if isinstance(error, OverloadedError) else 400
            reported = {"message": str(error), "param": getattr(error, "field", None), "code": code}
            yield event({"error": reported})
        yield END


def event(document: Mapping[str, Any]) -> str:
    """Return one server-sent event; values are finite numbers."""
    return f"data: {json.dumps(document, allow_nan=False)}\n\n"


def described(sweep: Sweep, baselines: Baselines, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the first event: the grid, and the metric without patches."""
    return {
        "metric": sweep.metric,
        "sites": [site.name for site in sweep.sites],
        "positions": list(sweep.positions),
        "source_positions": list(sweep.positions.values()),
        "tokens": [vocabulary.shown(sweep.prompt[position]) for position in sweep.positions],
        "skipped": list(sweep.skipped),
        "clean": baselines.clean,
        "corrupt": baselines.corrupt,
        "num_cells": len(sweep.sites) * len(sweep.positions),
    }
