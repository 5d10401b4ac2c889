"""CPU time of results in an API server: ``python -m tests.benchmarks.bench_results``.

Milliseconds a request of 1024 generated tokens that is streamed token by token, in one process without an engine: rows
arrive eight at a time, each chunk is completed as the server does it, and the last one has the whole payload. What the
consumer's thread does for a part is counted, and what its queue and its socket take is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np

from headgate.capture.engine.requests.call_context import HttpCall, Slot
from headgate.capture.engine.server.openai_routes import answer_choices
from headgate.capture.links.hub import ExpectedRequest, ExpectedResults
from headgate.capture.links.messages import Result as Message
from headgate.capture.schema.positions import Named
from headgate.capture.schema.results import CaptureResult, CaptureResults
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.lens import LensParams, _Reading, _Settings
from headgate.steering.features.consumer import _RequestFeatures
from headgate.steering.features.labels import NO_LABELS

TOKENS, PROMPT, ROWS, TOP, ROUNDS = 1024, 128, 8, 20, 5
CHUNK = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a",'
    '"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}],"usage":null}\n\n'
)


class Result:
    """What a consumer has of the request: `write` adds rows and returns parts for chunks, `whole` is the payload."""

    write: Callable[[int], Iterable[tuple[int, Any]]]
    whole: Callable[[], Any]


class FeatureResult(Result):
    """The twenty strongest features of an SAE of 80k."""

    def __init__(self, encoding: str = "lists") -> None:
        random = np.random.default_rng(0)
        values = np.sort(random.gamma(2, 3, (TOKENS, TOP)).astype(np.float32), axis=1)[:, ::-1]
        self.outputs = np.concatenate([random.integers(0, 81_920, (TOKENS, TOP)), values], axis=1).astype(np.float32)
        options = {"sae": "x", "top": TOP, "above": 0.0, "encoding": encoding}
        self.found = _RequestFeatures(options, NO_LABELS, TOP, 1 << 20)

    def write(self, at: int) -> Iterable[tuple[int, Any]]:
        self.found.add(np.arange(PROMPT + at, PROMPT + at + ROWS), self.outputs[at : at + ROWS])
        return self.found.take_new()

    def whole(self) -> Any:
        return self.found.payload(PROMPT + TOKENS)


class Numbers:
    """A vocabulary whose texts are numbers."""

    has_texts, shown = True, str


class LensResult(Result):
    """The ten strongest tokens at four layers."""

    def __init__(self) -> None:
        settings, sites = _Settings(LensParams(), {}), [Site(layer, HookPoint.POST_MLP) for layer in (0, 8, 17, 25)]
        options = {"lens": "logit", "top": 10, "tokens": [], "words_only": False}
        spec = CaptureSpec(sites=tuple(sites), positions=Named("all"), options=options)
        self.sites, self.found = sites, _Reading(settings, spec, cast("Any", Numbers))
        self.outputs = np.random.default_rng(0).normal(-5, 1, (4, TOKENS, settings.layout.size)).astype(np.float32)
        self.outputs[..., : settings.layout.top] = np.random.default_rng(1).integers(0, 262_144, (4, TOKENS, 20))

    def write(self, at: int) -> Iterable[tuple[int, Any]]:
        self.found.add(self.sites, np.arange(PROMPT + at, PROMPT + at + ROWS), self.outputs[:, at : at + ROWS])
        return self.found.take_new()

    def whole(self) -> Any:
        return self.found.payload(PROMPT + TOKENS)


class PatternResult(Result):
    """The 32 largest keys of eight heads: bytes, at the end alone."""

    def whole(self) -> Any:
        return {"format": "safetensors", "data": "A" * (TOKENS * 8 * (32 * 8 + 4) * 4 // 3)}


def chunks_ms(result: Result | None) -> float:
    """CPU milliseconds of one request's chunks; None: it asks for nothing, and its chunks pass through."""

    table = ExpectedResults()
    table.add("k", ExpectedRequest(["x"], 1, 1))

    async def chunks(slot: Slot) -> AsyncGenerator[str, None]:
        for at in range(TOKENS):
            slot.num_rows[0] = PROMPT + at + 1
            if result is not None and at % ROWS == ROWS - 1 and hasattr(result, "write"):
                for last, payload in result.write(at + 1 - ROWS):
                    found = CaptureResult(status="ok", payload=payload)
                    table.add_part(Message(key="k", instance="x", result=found, num_rows=last))
            yield CHUNK
        if result is not None:
            whole = {"x": CaptureResult(status="ok", payload=result.whole(), num_rows=TOKENS)}
            slot.results = CaptureResults([whole], whole)
        yield "data: [DONE]\n\n"

    def take_new(sample: int, num_rows: int) -> Mapping[str, object]:
        new = table.take_parts("k", sample, "x", num_rows)
        return {"x": {"payload": new[0]}} if new else {}

    async def send() -> float:
        call, began = HttpCall(), time.process_time()
        slot = call.expect()
        slot.take_new = take_new if hasattr(result, "write") else None
        stream: Any = chunks(slot) if result is None else answer_choices(chunks(slot), call)
        async for chunk in stream:
            chunk.encode()
        return 1000 * (time.process_time() - began)

    return asyncio.run(send())


def main() -> None:
    """Print a line for each kind of result."""
    made: dict[str, Callable[[], Result] | None] = {
        "nothing": None,
        "features": FeatureResult,
        "in binary": partial(FeatureResult, "binary"),
        "lens": LensResult,
        "attention": PatternResult,
    }
    for name, make in made.items():
        best = min(chunks_ms(None if make is None else make()) for _ in range(ROUNDS))
        print(f"{name:>12} {best:7.1f} ms", flush=True)


if __name__ == "__main__":
    main()
