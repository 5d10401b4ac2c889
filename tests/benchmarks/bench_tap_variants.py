"""Capture against stock vLLM on one GPU: ``python -m tests.benchmarks.bench_tap_variants MODEL SECONDS FOLDER``.

Variants, each an engine with every layer's `post_mlp` as a site:

- stock, stock-mp: no headgate; the engine core in the caller's process, or in one of its own (vLLM's default).
- traced, opaque: what the forward alone costs, in the caller's process. The scatter is traced and fused by the
  compiler, or is an op of its own that reads the wanted rows only. Idle: nobody wants a row, all go to one trash row.
  Spread: the same with 64 trash rows. Active: every row is wanted. Nothing is copied off the device.
- capture, staging, ring: headgate itself, engine core in a process of its own. Idle: no request captures. Else every
  request captures every row of every layer, or of one, for the consumer that the mode names; BENCH_FILES is the folder
  for files. As configured by default; with 4 GiB of staging memory; with that and a ring of two steps.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tests.benchmarks.turns import JOBS, Job, Served, open_llm, run_rounds, start, stop, table

MAX_TOKENS = 8192
NUM_TRASH = 64
SITES = {"post_mlp": "all"}
STOCK = {"stock": "stock", "traced": "stock", "opaque": "stock"}
VARIANTS = ("stock", "traced", "opaque", "stock-mp", "capture", "staging", "ring")
MODES = {
    "logging": ("logging", SITES),
    "filesystem": ("filesystem", SITES),
    "memory": ("memory", SITES),
    "files, 1 layer": ("filesystem", {"post_mlp": [17]}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "capture": {},
    "staging": {"staging_bytes": 4 << 30},
    "ring": {"staging_bytes": 4 << 30, "ring_rows": 2 * MAX_TOKENS},
}


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


_libraries: list[torch.library.Library] = []
"""A library's ops go with it."""


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
    _libraries.append(library)


def run_opaque(module: Any, hook: str, site: Any) -> torch.Tensor:
    rows, slots = getattr(module, f"_headgate_rows_{hook}"), getattr(module, f"_headgate_slots_{hook}")
    return site.carry + torch.ops.headgate_bench.tap(site.value, site.addend, slots, rows)


def install(variant: str) -> dict[str, Any]:
    """Patch every worker to put one capture action into each layer; returns what the actions share."""
    import vllm.v1.worker.worker_base as worker_base

    from headgate.capture.engine.model.find_layers import find_decoder_stack
    from headgate.capture.engine.site_action import SiteAction
    from headgate.capture.engine.worker import capture_part
    from headgate.capture.engine.worker.capture_part import unaliased
    from headgate.capture.engine.worker.install import install_actions
    from headgate.capture.schema.sites import HookPoint, Site

    shared: dict[str, Any] = {}
    run = capture_part.capture_traced if variant == "traced" else run_opaque
    if variant == "opaque":
        define_op()

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.worker.load_model(*args, **kwargs)
        config = self.worker.vllm_config
        parent, name, layers = find_decoder_stack(self.worker.model_runner.get_model())
        hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        ring = torch.zeros(len(layers), MAX_TOKENS + NUM_TRASH, hidden, dtype=dtype, device="cuda")
        slots = torch.full((MAX_TOKENS,), ring.shape[1] - 1, device="cuda")
        shared.update(ring=ring, slots=slots)
        actions = {
            Site(index, HookPoint.POST_MLP): [
                SiteAction(run=run, tensors={"rows": unaliased(ring[index]), "slots": slots}, order=0)
            ]
            for index, _ in layers
        }
        install_actions(parent, name, layers, actions)
        config.additional_config = {**(config.additional_config or {}), "bench": variant}
        return result

    worker_base.WorkerWrapperBase.load_model = load_model
    return shared


class Stock(Served):
    """No headgate."""

    def __init__(self, variant: str, model: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if variant in STOCK else "1"
        super().__init__(variant, model)


class Tapped(Served):
    """The forward with one action in each layer; who wants rows is said by writing the slots."""

    modes: Sequence[str] = ("idle", "active")

    def __init__(self, variant: str, model: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if variant == "traced":
            self.modes = ("idle", "spread", "active")
        self._shared = install(variant)
        super().__init__(variant, model)
        self._shared["ring"].zero_()

    def prepare(self, mode: str) -> None:
        own = torch.arange(MAX_TOKENS)
        trash = torch.full_like(own, MAX_TOKENS + NUM_TRASH - 1)
        self._shared["slots"].copy_({"idle": trash, "spread": MAX_TOKENS + own % NUM_TRASH, "active": own}[mode])
        torch.cuda.synchronize()

    def report(self) -> str:
        written = self._shared["ring"][:, 0].float().abs().sum(1) > 0
        return f"{int(written.sum())} of {len(written)} sites wrote their first row"


class Captured(Served):
    """headgate, with three consumers to choose from."""

    def __init__(self, variant: str, model: str) -> None:
        self.modes = ("idle", *MODES) if variant == "capture" else ("idle", "logging", "filesystem")
        self._root = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_FILES")))
        consumers = [
            {"name": "logging", "params": {"level": "debug"}},
            {"name": "filesystem", "params": {"root": str(self._root)}},
            {"name": "memory", "params": {"max_bytes": 64 << 30}},
        ]
        capture = {"consumers": consumers, "sites": SITES, **SETTINGS[variant]}
        self.llm = open_llm(model, additional_config={"headgate": {"capture": capture}})

    def params(self, mode: str, tokens: int) -> Any:
        made = super().params(mode, tokens)
        if mode != "idle":
            consumer, sites = MODES[mode]
            made.capture = {consumer: {"hooks": sites}}
        return made

    def check(self, mode: str, job: Job, outputs: Sequence[Any]) -> None:
        super().check(mode, job, outputs)
        if mode != "idle":
            assert {output.capture_results[MODES[mode][0]].status for output in outputs} == {"ok"}

    def settle(self, mode: str) -> None:
        for path in self._root.glob("default/*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def report(self) -> str:
        (stats,) = self.llm.collective_rpc("headgate_stats")
        shutil.rmtree(self._root)
        capture = stats["capture"]
        wanted = ("steps", "rows", "bytes", "stalls", "stall_s", "dropped_rows", "dispatch_errors")
        return ", ".join(f"{name} {capture[name]:.6g}" for name in wanted)


def make(variant: str, model: str) -> Served:
    """The engine of `variant`."""
    if variant.startswith("stock"):
        return Stock(variant, model)
    return Captured(variant, model) if variant in SETTINGS else Tapped(variant, model)


def main() -> None:
    """Start the engines, time them in turns, then stock once more on its own."""
    model, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    engines = start(folder, make, sys.argv[4:] or VARIANTS, model)
    if not engines:
        sys.exit("no engine started")
    num_rounds = run_rounds(engines, seconds)
    lines = table(engines, {name: STOCK.get(name, "stock-mp") for name in VARIANTS})
    stop(engines[1:])
    print(f"{num_rounds} rounds of {len(JOBS)} jobs, engines in turns; ratios to stock of the same round, quartiles")
    print("\n".join(lines), flush=True)
    first = engines[0]
    first.seconds = {}
    run_rounds([first], 10)
    print(f"{first.name} alone, after the others were gone:", *table([first], {first.name: ""})[1:], sep="\n")
    stop([first])


if __name__ == "__main__":
    main()
