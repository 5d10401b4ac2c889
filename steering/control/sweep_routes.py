"""The HTTP route ``/v1/patch_sweep`` on vLLM's server: its cells, as server-sent events.

Servers alone load this module, which uses their FastAPI.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import StreamingResponse

from headgate.capture.engine.contracts.route_part import RouteServices, Vocabulary
from headgate.capture.schema.errors import OverloadedError, RequestError
from headgate.steering.control.handle import AsyncSteering
from headgate.steering.control.openapi_sweep import PATCH_SWEEP
from headgate.steering.control.patch_sweep import Baselines, Cell, Sweep, measure, read_cells, read_sweep, run

END = "data: [DONE]\n\n"


def open_sweep_route(services: RouteServices) -> APIRouter:
    """Return the router of ``/v1/patch_sweep``."""
    router = APIRouter(prefix="/v1", tags=["steering"])
    route = SweepRoute(services)
    router.add_api_route("/patch_sweep", route.sweep, methods=["POST"], response_model=None, **PATCH_SWEEP)
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
            sweep = read_sweep(document, steerable, self._services.find_kept, vocabulary)
            cells = await asyncio.to_thread(read_cells, sweep)
            try:
                baselines = await measure(sweep, self._services.score)
            except OverloadedError as error:
                raise HTTPException(503, str(error)) from None
        return StreamingResponse(
            self._events(sweep, cells, baselines, described(sweep, baselines, vocabulary)),
            media_type="text/event-stream",
        )

    async def _events(
        self, sweep: Sweep, cells: Sequence[Cell], baselines: Baselines, first: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        yield event(first)
        try:
            async with aclosing(run(sweep, cells, baselines, self._services.score)) as values:
                async for (site, position, _), value in values:
                    shown = value if math.isfinite(value) else None  # JSON has no infinity
                    yield event({"site": site.name, "position": position, "value": shown})
        except (RequestError, OverloadedError) as error:
            code = 503 if isinstance(error, OverloadedError) else 400
            told = {"message": str(error), "param": getattr(error, "field", None), "code": code}
            yield event({"error": told})
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
