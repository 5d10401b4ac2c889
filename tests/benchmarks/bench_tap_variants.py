"""Two ways to capture inside a compiled graph, measured against stock: a traced scatter, and an opaque op.

``python bench_tap_variants.py VARIANT MODEL`` on a GPU host, VARIANT being stock, traced or opaque: one engine
each. Every layer's `post_mlp` is a site. Idle: every row goes to the trash row. Active: every row is wanted.
Prints one line.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from typing import Any

import torch
import triton
import triton.language as tl

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

MAX_TOKENS = 8192


@triton.jit
def _tap_kernel(value, addend, slots, ring, token, D, TRASH, BLOCK_D: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    if at == 0:
        tl.store(token, 0.0)
    slot = tl.load(slots + at)
    if slot != TRASH:
        offsets = tl.arange(0, BLOCK_D)
        mask = offsets < D
        row = tl.load(value + at * D + offsets, mask=mask).to(tl.float32)
        row += tl.load(addend + at * D + offsets, mask=mask).to(tl.float32)
        tl.store(ring + slot * D + offsets, row.to(ring.dtype.element_ty), mask=mask)


def define_op() -> None:
    """An op that hides its write to the ring and returns a zero, which keeps it alive in the graph."""
    library = torch.library.Library("headgate_bench", "FRAGMENT")
    library.define("tap(Tensor value, Tensor addend, Tensor slots, Tensor ring) -> Tensor")

    def tap(value: torch.Tensor, addend: torch.Tensor, slots: torch.Tensor, ring: torch.Tensor) -> torch.Tensor:
        token = torch.empty(1, dtype=value.dtype, device=value.device)
        num_tokens, hidden = value.shape
        block = triton.next_power_of_2(hidden)
        _tap_kernel[(num_tokens,)](value, addend, slots, ring, token, hidden, ring.shape[0] - 1, block, num_warps=8)
        return token

    library.impl("tap", tap, dispatch_key="CUDA")
    library._register_fake("tap", lambda value, addend, slots, ring: value.new_empty(1))
    define_op.library = library


def run_opaque(module: Any, hook: str, site: Any) -> torch.Tensor:
    rows, slots = getattr(module, f"_headgate_rows_{hook}"), getattr(module, f"_headgate_slots_{hook}")
    return site.carry + torch.ops.headgate_bench.tap(site.value, site.addend, slots, rows)


def install(variant: str) -> dict[str, Any]:
    """Patch every worker to put one capture action into each layer; returns what the actions share."""
    import vllm.v1.worker.worker_base as worker_base

    from headgate.capture.engine import tap
    from headgate.capture.engine.capturing import unaliased
    from headgate.capture.engine.discover import find_decoder_stack
    from headgate.capture.engine.install import install_actions
    from headgate.capture.engine.seam import SiteAction
    from headgate.capture.sites import HookPoint, Site

    shared: dict[str, Any] = {}
    run = tap.capture_traced if variant == "traced" else run_opaque
    if variant == "opaque":
        define_op()

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.worker.load_model(*args, **kwargs)
        config = self.worker.vllm_config
        parent, name, layers = find_decoder_stack(self.worker.model_runner.get_model())
        hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        ring = torch.zeros(len(layers), MAX_TOKENS + 1, hidden, dtype=dtype, device="cuda")
        slots = torch.full((MAX_TOKENS,), MAX_TOKENS, device="cuda")
        shared.update(ring=ring, slots=slots)
        actions = {
            Site(index, HookPoint.POST_MLP): [
                SiteAction(run=run, tensors={"rows": unaliased(ring[index]), "slots": slots}, order=0)
            ]
            for index, _ in layers
        }
        install_actions(parent, name, layers, actions)
        self.worker.model_runner.model_memory_usage += ring.numel() * ring.element_size()
        config.additional_config = {**(config.additional_config or {}), "bench": variant}
        return result

    worker_base.WorkerWrapperBase.load_model = load_model
    return shared


def main() -> None:
    """Start one engine and print its figures."""
    from vllm import LLM, SamplingParams

    variant, model = sys.argv[1], sys.argv[2]
    shared = install(variant) if variant != "stock" else {}
    started = time.perf_counter()
    llm = LLM(
        model,
        load_format="dummy",
        max_model_len=4096,
        gpu_memory_utilization=0.5,
        max_num_seqs=64,
        max_num_batched_tokens=MAX_TOKENS,
        enable_prefix_caching=False,
    )
    start_s = time.perf_counter() - started
    rng = random.Random(0)

    def seconds(batch: int, prompt: int, tokens: int, repeats: int = 5) -> float:
        taken = []
        for _ in range(repeats):
            ids = [{"prompt_token_ids": [rng.randrange(1000, 200_000) for _ in range(prompt)]} for _ in range(batch)]
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0)
            begin = time.perf_counter()
            llm.generate(ids, params, use_tqdm=False)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[1:])

    def figures() -> str:
        found = []
        for batch in (1, 16, 64):
            tpot = (seconds(batch, 64, 257) - seconds(batch, 64, 1)) / 256 * 1e3
            found.append(f"bs{batch} {tpot:.3f}")
        return " ".join([*found, f"prefill {seconds(16, 1024, 1, 7) * 1e3:.1f}"])

    line = f"{variant:8s} start {start_s:.0f}s | idle {figures()}"
    if shared:
        shared["slots"].copy_(torch.arange(MAX_TOKENS))
        line += f" | active {figures()} | sites written {int((shared['ring'][:, 0].float().abs().sum(1) > 0).sum())}"
    print("FIGURES " + line, flush=True)


if __name__ == "__main__":
    main()
