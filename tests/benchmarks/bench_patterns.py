"""CPU time of attention patterns in a capture process: ``python -m tests.benchmarks.bench_patterns --requests N``.

Requests with 128 tokens of prompt generate 1024 together, eight at a time, and ask for the 32 largest keys of the eight
heads of one layer, of the sizes of Gemma 3 4B. No engine, and no GPU: printed are the CPU time of one request, and how
long the last answer takes after the last row has come.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from headgate.capture.schema.batch import FinalState
from headgate.capture.schema.consumer import (
    AttentionFacts,
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    RequestInfo,
    RowBlock,
    RowSpan,
    SpecContext,
)
from headgate.capture.schema.results import Origin
from headgate.capture.schema.sites import HookPoint, Site, SiteShape
from headgate.consumers.attention import AttentionConsumer

TOKENS, PROMPT, ROWS = 1024, 128, 8
_ROWS = torch.randn(1, 64 * PROMPT, 2048, dtype=torch.bfloat16)
Q, K = (Site(17, hook) for hook in (HookPoint.Q, HookPoint.K))
FACTS = AttentionFacts(num_heads=8, num_kv_heads=4, head_size=256, scale=1 / 16)
SHAPES = {Q: SiteShape(2048, "bfloat16", "replicated", 256), K: SiteShape(1024, "bfloat16", "replicated", 256)}
MODEL = ModelInfo(
    name="m", num_layers=34, hidden_size=2560, dtype="bfloat16", sites=(Q, K), context_length=4096, shapes=SHAPES,
    attention={17: FACTS},
)  # fmt: skip


def requests_of(count: int, *, is_streamed: bool) -> list[RequestInfo]:
    """The requests, checked as a server does it."""
    context = SpecContext(instance_name="attention", model=MODEL, params={}, client_request_id="r")
    asked = {"layers": [17], "queries": "all_generated", "top": 32}
    spec = AttentionConsumer.validate_client_spec(asked, context)
    spec = spec.with_positions(lambda selector: selector.resolve(PROMPT, "queries"))
    prompt = np.arange(PROMPT, dtype=np.int64)
    return [
        RequestInfo(
            request_id=str(number),
            client_request_id=str(number),
            prompt_token_ids=prompt,
            spec=spec,
            origin=Origin(None, str(number), is_streamed),
        )
        for number in range(count)
    ]


def blocks_of(site: Site, requests: list[RequestInfo], start: int, stop: int) -> RowBlock:
    """Rows of all requests at positions ``start : stop`` of one site."""
    size = stop - start
    spans = [RowSpan(request=one, start=number * size, stop=(number + 1) * size) for number, one in enumerate(requests)]
    positions = np.tile(np.arange(start, stop, dtype=np.int64), len(requests))
    rows = _ROWS[:, : len(positions), : MODEL.shape(site).width]
    return RowBlock(sites=(site,), rows=rows, positions=positions, spans=tuple(spans))


def run(count: int, *, is_streamed: bool) -> tuple[float, float]:
    """CPU milliseconds of a request, and seconds from the last row to the last answer."""
    torch.set_num_threads(1)
    consumer = AttentionConsumer({}, ConsumerContext(instance_name="attention", model=MODEL))
    requests = requests_of(count, is_streamed=is_streamed)
    began = time.process_time()
    for one in requests:
        consumer.begin(one)
    consumer.write([blocks_of(K, requests, 0, PROMPT)])
    for start in range(PROMPT, PROMPT + TOKENS, ROWS):
        consumer.write([blocks_of(site, requests, start, start + ROWS) for site in (Q, K)])
        time.sleep(0.05)
    last = time.perf_counter()
    tokens = np.arange(PROMPT + TOKENS + 1, dtype=np.int64)
    final = FinalState(num_prompt_tokens=PROMPT, token_ids=tokens, status="stop")
    answers = [consumer.finish(FinishedRequest(request=one, final=final, dropped_rows=0)) for one in requests]
    for answer in answers:
        assert answer is not None
        answer.result()
    waited = time.perf_counter() - last
    consumer.close(1)
    return 1000 * (time.process_time() - began) / count, waited


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8, help="that run at once")
    parser.add_argument("--streamed", action="store_true", help="their answers are streamed, with parts of patterns")
    arguments = parser.parse_args()
    cpu_ms, waited = run(arguments.requests, is_streamed=arguments.streamed)
    print(f"{cpu_ms:.0f} ms of CPU a request; {waited:.2f} s from row to answer")


if __name__ == "__main__":
    main()
