"""Steering against stock vLLM on one GPU: ``python bench_steering_gpu.py MODEL SECONDS FOLDER [VARIANT ...]``.

Variants, each an engine with its core in a process of its own: stock-mp (no headgate), steering (all layers, three hook
points), both (with capture of every layer's `post_mlp` configured and idle). Modes: idle; named (all requests name one
registered module); inline1, inline16, inline64 (all requests bring vectors for all sites, of so many distinct
configs, as packed bfloat16). A config takes 34 x 3 slots.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from turns import Served, open_llm, run_rounds, start, stop, table

VARIANTS = ("stock-mp", "steering", "both")
HOOKS = ("pre_attn", "post_attn", "post_mlp")
NUM_LAYERS = 34
HIDDEN = 2560
STRENGTH = 0.02
MODULE = "bench"


@lru_cache(maxsize=128)
def packed(config: int) -> dict[str, Any]:
    """Vectors for every site in the packed form, bfloat16."""
    import torch

    rng, layers = np.random.default_rng(config), list(range(NUM_LAYERS))
    made = {}
    for hook in HOOKS:
        rows = torch.from_numpy(rng.normal(0, STRENGTH, (NUM_LAYERS, HIDDEN))).bfloat16()
        data = rows.view(torch.uint16).numpy().tobytes()
        made[hook] = {"dtype": "bfloat16", "shape": [NUM_LAYERS, HIDDEN], "layer_indices": layers, "data": data}
    return made


class Stock(Served):
    """No headgate."""

    def __init__(self, variant: str, model: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        super().__init__(variant, model)


class Steered(Served):
    """headgate with steering."""

    modes: Sequence[str] = ("idle", "named", "inline1", "inline16", "inline64")

    def __init__(self, variant: str, model: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        ours: dict[str, Any] = {"steering": {}}
        if variant == "both":
            ours["capture"] = {"consumers": [{"name": "logging", "params": {"level": "debug"}}]}
            self.modes = ("idle",)
        self.llm = open_llm(model, additional_config={"headgate": ours})
        self.llm.steering.register(MODULE, vectors=packed(999))

    def prepare(self, mode: str) -> None:
        self._num_made = 0

    def params(self, mode: str, tokens: int) -> Any:
        made = super().params(mode, tokens)
        if mode == "named":
            made.steering_name = MODULE
        elif mode != "idle":
            made.steering_vectors = packed(self._num_made % int(mode.removeprefix("inline")))
        self._num_made += 1
        return made

    def report(self) -> str:
        status = self.llm.steering.status()
        return f"{status}"


def make(variant: str, model: str) -> Served:
    """The engine of `variant`."""
    return Stock(variant, model) if variant.startswith("stock") else Steered(variant, model)


def main() -> None:
    """Start all engines, time them in turns, print the table."""
    model, seconds, folder, *variants = sys.argv[1:]
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    engines = start(target, make, variants or VARIANTS, model)
    rounds = run_rounds(engines, float(seconds))
    lines = table(engines, dict.fromkeys(VARIANTS, "stock-mp"))
    stop(engines)
    print(f"{rounds} rounds", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
