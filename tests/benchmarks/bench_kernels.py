"""What a forward costs the GPU alone: ``python -m tests.benchmarks.bench_kernels MODEL OUT``.

One engine in one process for each of stock, steering, capture and both, all idle. The profiler adds up the kernels of
decode steps with 1, 16 and 64 requests, replayed from CUDA graphs, and of prompts of 4 x 1024 tokens. Kernel time does
not depend on the host, so it shows tenths of a per cent where clocks around a step show the host's noise. The engines
start side by side and are measured one after the other. Writes OUT/kernels.json with every kernel; prints the sums.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.benchmarks.servers import FEATURES
from tests.benchmarks.turns import open_llm

VARIANTS = ("stock", "steering", "capture", "both")
BATCHES = (1, 16, 64)
STEPS = 40
PROMPTS = 6


class Engine:
    """One engine core in this process, and the kernels that it runs.

    Args:
        variant: Of `VARIANTS`.
        model: Its folder.
    """

    def __init__(self, variant: str, model: str) -> None:
        ours: dict[str, Any] = {}
        if "steering" in FEATURES[variant]:
            ours["steering"] = {}
        if "capture" in FEATURES[variant]:
            ours["capture"] = {"consumers": [{"name": "memory"}]}
        self._engine = open_llm(model, **({"additional_config": {"headgate": ours}} if ours else {})).llm_engine
        self._random = random.Random(0)
        self._num_made = 0

    def add(self, count: int, tokens: int, prompt: int = 64) -> None:
        """Requests of random tokens."""
        from vllm import SamplingParams

        for _ in range(count):
            ids = self._random.choices(range(1000, 30_000), k=prompt)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0)
            self._engine.add_request(f"request-{self._num_made}", {"prompt_token_ids": ids}, params)
            self._num_made += 1

    def finish(self) -> None:
        """Run until nothing is left."""
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def decode(self, batch: int) -> dict[str, list[float]]:
        """Kernels of decode steps."""
        self.add(batch, STEPS + 20)
        for _ in range(8):
            self._engine.step()
        found = self._profiled(STEPS, self._engine.step)
        self.finish()
        return found

    def prefill(self) -> dict[str, list[float]]:
        """Kernels of steps of prompts."""

        def prompts() -> None:
            self.add(4, 1, 1024)
            self.finish()

        prompts()
        return self._profiled(PROMPTS, prompts)

    def _profiled(self, times: int, run: Any) -> dict[str, list[float]]:
        """``{kernel: [microseconds, launches]}``, each for one of `times` runs."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(times):
                run()
            torch.cuda.synchronize()
        seconds, launches = Counter[str](), Counter[str]()
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                seconds[event.name] += event.device_time
                launches[event.name] += 1
        return {name: [total / times, launches[name] / times] for name, total in seconds.most_common()}


def measure(variant: str, model: str, out: Path) -> None:
    """The process of one engine."""
    engine = Engine(variant, model)
    with (out / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for batch in BATCHES:  # once for nothing: kernels are loaded, the clock of the GPU is up
            engine.add(batch, 8)
            engine.finish()
        found = {f"bs{batch}": engine.decode(batch) for batch in BATCHES} | {"prefill": engine.prefill()}
        (out / f"kernels-{variant}.part").write_text(json.dumps(found))


def main() -> int:
    """Start all engines, print and write what they found; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench_kernels", description=__doc__)
    parser.add_argument("model", help="model folder; see tests.benchmarks.models")
    parser.add_argument("out", type=Path, help="folder for the document and the logs")
    parser.add_argument("--variant", help="for the processes that this one starts")
    options = parser.parse_args()
    if options.variant:
        measure(options.variant, options.model, options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    started = []
    for variant in VARIANTS:
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        environment["VLLM_CACHE_ROOT"] = str(options.out / f"kernels-{variant}.cache")
        if variant == "stock":
            environment["VLLM_PLUGINS"] = "none"
        command = [sys.executable, "-m", "tests.benchmarks.bench_kernels", options.model, str(options.out)]
        with (options.out / f"kernels-{variant}.log").open("wb") as log:
            started.append(subprocess.Popen([*command, "--variant", variant], stdout=log, stderr=log, env=environment))
    codes = [process.wait() for process in started]
    found = {}
    for variant in VARIANTS:
        part = options.out / f"kernels-{variant}.part"
        if part.exists():
            found[variant] = json.loads(part.read_text())
            part.unlink()
    (options.out / "kernels.json").write_text(json.dumps(found, indent=1))
    show(found)
    return int(any(codes) or len(found) < len(VARIANTS))


def show(found: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    """A line for each variant: ms and launches of each kind of step, and the difference from stock."""
    for variant, kinds in found.items():
        cells = []
        for kind, kernels in kinds.items():
            total, launches = (sum(one[index] for one in kernels.values()) for index in (0, 1))
            base = sum(one[0] for one in found.get("stock", {}).get(kind, kernels).values())
            cells.append(f"{kind} {total / 1e3:8.3f} ms {100 * total / base - 100:+5.1f}% {launches:6.0f} kernels")
        print(f"{variant:9}", "   ".join(cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
