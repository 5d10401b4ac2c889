"""What a forward costs the GPU alone: ``python -m tests.benchmarks.bench_kernels MODEL OUT``.

One engine in one process for each of stock, steering, capture and both, all idle; ``--variants stock ops`` shows idle
op sites. The profiler adds up the kernels of
decode steps with 1, 16 and 64 requests, replayed from CUDA graphs, and of prompts of 4 x 1024 tokens. Kernel time does
not depend on the host, so it shows tenths of a per cent where clocks around a step show the host's noise. The engines
take turns once all are up, round by round; a figure is the median of its rounds.

Of two engines, also kernels that are the same (products, attention) differ by a per cent. So what the compiled kernels
take is shown by itself: those alone can be other kernels with headgate than without. Their difference from stock's is
given in per cent of all that stock takes. Writes OUT/kernels.json with every kernel; prints the sums.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.models import size_of
from tests.benchmarks.operations import op_sites
from tests.benchmarks.servers import FEATURES
from tests.benchmarks.turns import Served, open_llm, start, stop

VARIANTS = ("stock", "steering", "capture", "both")
ALL_VARIANTS = (*VARIANTS, "ops")
BATCHES = (1, 16, 64)
STEPS = 40
PROMPTS = 6
ROUNDS = 3
COMPILED = "triton_"
"""How the names of kernels begin that torch.compile makes."""


Kernels = dict[str, tuple[float, float]]
"""Microseconds and launches of each kernel in one step."""


class Profiled(Served):
    """One engine core in this process, and the kernels that it runs."""

    def __init__(self, variant: str, model: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if variant == "stock":
            os.environ["VLLM_PLUGINS"] = "none"
        ours: dict[str, Any] = {}
        if "steering" in FEATURES[variant]:
            ours["steering"] = {"op_sites": op_sites(size_of(model))} if "ops" in FEATURES[variant] else {}
        if "capture" in FEATURES[variant]:
            ours["capture"] = {"consumers": [{"name": "memory"}]}
        self.llm = open_llm(model, **({"additional_config": {"headgate": ours}} if ours else {}))
        self._engine = self.llm.llm_engine
        self._random = random.Random(0)
        self._num_made = 0

    def answer(self, asked: Any) -> dict[str, Kernels]:
        """Kernels of each kind of step; once for nothing: kernels are loaded, the clock of the GPU is up."""
        for batch in BATCHES:
            self._add(batch, 8)
            self._finish()
        return {f"bs{batch}": self._decode(batch) for batch in BATCHES} | {"prefill": self._prefill()}

    def _add(self, count: int, tokens: int, prompt: int = 64) -> None:
        from vllm import SamplingParams

        for _ in range(count):
            ids = self._random.choices(range(1000, 30_000), k=prompt)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0)
            self._engine.add_request(f"request-{self._num_made}", {"prompt_token_ids": ids}, params)
            self._num_made += 1

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _decode(self, batch: int) -> Kernels:
        self._add(batch, STEPS + 20)
        for _ in range(8):
            self._engine.step()
        found = self._profiled(STEPS, self._engine.step)
        self._finish()
        return found

    def _prefill(self) -> Kernels:
        def prompts() -> None:
            self._add(4, 1, 1024)
            self._finish()

        prompts()
        return self._profiled(PROMPTS, prompts)

    def _profiled(self, times: int, run: Any) -> Kernels:
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
        return {name: (total / times, launches[name] / times) for name, total in seconds.most_common()}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench_kernels", description=__doc__)
    parser.add_argument("model", help="model folder; see tests.benchmarks.models")
    parser.add_argument("out", type=Path, help="folder for the document and the logs")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=ALL_VARIANTS, metavar="variant")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    return parser.parse_args(arguments)


def main() -> int:
    """Start all engines, print and write what they found; returns the exit status."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    engines = start(options.out, Profiled, options.variants, options.model)
    rounds: dict[str, list[dict[str, Kernels]]] = {engine.name: [] for engine in engines}
    for _ in range(options.rounds):
        for engine in engines:
            rounds[engine.name].append(engine.ask("kernels"))
        (options.out / "kernels.json").write_text(json.dumps(rounds, indent=1))
    stop(engines)
    show(rounds)
    return int(len(engines) < len(options.variants))


def show(rounds: dict[str, list[dict[str, Kernels]]]) -> None:
    """A line for each variant: ms and launches of each kind of step, and the differences from stock."""
    for variant, found in rounds.items():
        cells = []
        for kind in found[0]:
            total, base = median_us(found, kind), median_us(rounds["stock"], kind) if "stock" in rounds else None
            launches = sum(launches for _, launches in found[0][kind].values())
            cell = f"{kind} {total / 1e3:7.3f} ms, {launches:.0f} kernels"
            if base is not None:
                compiled = median_us(found, kind, COMPILED) - median_us(rounds["stock"], kind, COMPILED)
                cell += f", all {100 * total / base - 100:+.1f}%, compiled {100 * compiled / base:+.2f}%"
            cells.append(cell)
        print(f"{variant:9}", "   ".join(cells), flush=True)


def median_us(found: list[dict[str, Kernels]], kind: str, prefix: str = "") -> float:
    """Microseconds of the kernels whose names begin with `prefix`."""
    return statistics.median(sum(us for name, (us, _) in one[kind].items() if name.startswith(prefix)) for one in found)


if __name__ == "__main__":
    sys.exit(main())
