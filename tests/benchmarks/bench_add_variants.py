"""Ways to add a vector in the traced forward: ``python -m tests.benchmarks.bench_add_variants MODEL SECONDS FOLDER``.

On one GPU. Every layer has three sites (`pre_attn`, `post_attn`, `post_mlp`); the engine core runs in the caller's
process, and nothing of headgate but the actions. Variants:

- stock: none.
- sites: one pool, one row of slots for each site, ``carry + pool[slots[site, :n]]``.
- tokens: the same with one row of slots for each token, ``carry + pool[slots[:n, site]]``.
- dense: a table for each site and one index for all, ``carry + table[site][row[:n]]``.
- pooled: what headgate does: sites, lowered so that the norms' kernels are cut as stock's are, and rows of slot 0 read
  no vector (`headgate.steering.worker.site_action`).
- rows: one pool, and a map of rows to slots that every site reads, ``carry + pool[map[site][row[:n]]]``.

Idle: all rows are the zero vector. Active: 64 rows are distinct.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from headgate.steering.worker.site_action import add_pooled, register_add_pooled
from tests.benchmarks import turns
from tests.benchmarks.turns import BATCHES, LONG, Job, Served, open_llm, run_rounds, start, stop, table

MAX_TOKENS = 8192
NUM_ROWS = 131
NUM_SLOTS = 8192
HOOKS = ("pre_attn", "post_attn", "post_mlp")
VARIANTS = ("stock", "sites", "pooled", "tokens", "dense", "rows")


def tensor(module: Any, name: str, hook: str) -> torch.Tensor:
    found: torch.Tensor = getattr(module, f"_headgate_{name}_{hook}")
    return found


def add_by_slot(module: Any, hook: str, site: Any) -> torch.Tensor:
    slots = tensor(module, "slots", hook)[: site.carry.shape[-2]]
    return site.carry + tensor(module, "pool", hook)[slots]


def add_by_row(module: Any, hook: str, site: Any) -> torch.Tensor:
    rows = tensor(module, "slots", hook)[: site.carry.shape[-2]]
    return site.carry + tensor(module, "pool", hook)[tensor(module, "map", hook)[rows]]


def add_pooled_rows(module: Any, hook: str, site: Any) -> torch.Tensor:
    steered: torch.Tensor = add_pooled(site.carry, tensor(module, "pool", hook), tensor(module, "slots", hook), 1.0)
    return steered


ADDS = {"pooled": add_pooled_rows, "rows": add_by_row}


class Tables:
    """What the actions of one variant read."""

    def __init__(self, variant: str, num_sites: int, hidden: int, dtype: torch.dtype) -> None:
        self._variant = variant
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.pool = torch.zeros(NUM_SLOTS, hidden, dtype=dtype, device="cuda")
        self.index = torch.zeros(num_sites, MAX_TOKENS, **ints)
        if variant == "tokens":
            self.index = torch.zeros(MAX_TOKENS, num_sites, **ints).T
        elif variant in ("dense", "rows"):
            self.index = torch.zeros(1, MAX_TOKENS, **ints).expand(num_sites, -1)
        self.map = torch.zeros(num_sites, NUM_ROWS, **ints)
        self.tables = torch.zeros(num_sites if variant == "dense" else 0, NUM_ROWS, hidden, dtype=dtype, device="cuda")

    def of_site(self, site: int) -> dict[str, torch.Tensor]:
        index = self.index[0] if self._variant in ("dense", "rows") else self.index[site]
        found = {"slots": index, "pool": self.tables[site] if self._variant == "dense" else self.pool}
        return {**found, "map": self.map[site]} if self._variant == "rows" else found

    def aim(self, *, is_active: bool) -> None:
        rows = torch.arange(MAX_TOKENS, device="cuda", dtype=torch.int32) % 64 + 1
        num_sites = len(self.map)
        if self._variant in ("dense", "rows"):
            self.index[0] = rows if is_active else 0
            self.map[:, 1:65] = torch.arange(1, 1 + 64 * num_sites, device="cuda", dtype=torch.int32).view(
                num_sites, 64
            )
        else:
            offsets = 64 * torch.arange(num_sites, device="cuda", dtype=torch.int32)[:, None]
            self.index.copy_((rows + offsets) if is_active else torch.zeros_like(offsets))
        torch.cuda.synchronize()


def install(variant: str) -> dict[str, Tables]:
    """Patch every worker to put one action at each site; returns what the actions share."""
    import vllm.v1.worker.worker_base as worker_base

    from headgate.capture.engine.model.find_layers import find_decoder_stack
    from headgate.capture.engine.site_action import SiteAction
    from headgate.capture.engine.worker.install import install_actions
    from headgate.capture.schema.sites import HookPoint, Site

    shared: dict[str, Tables] = {}

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.worker.load_model(*args, **kwargs)
        config = self.worker.vllm_config.model_config
        parent, name, layers = find_decoder_stack(self.worker.model_runner.get_model())
        sites = [Site(index, HookPoint(hook)) for index, _ in layers for hook in HOOKS]
        tables = shared["tables"] = Tables(variant, len(sites), config.get_hidden_size(), config.dtype)
        run = ADDS.get(variant, add_by_slot)
        actions = {site: [SiteAction(run=run, tensors=tables.of_site(at), order=20)] for at, site in enumerate(sites)}
        install_actions(parent, name, layers, actions)
        self.worker.vllm_config.additional_config = {"bench": variant}
        return result

    worker_base.WorkerWrapperBase.load_model = load_model
    return shared


class Added(Served):
    """The forward with one action at each site."""

    modes = ("idle", "active")

    def __init__(self, variant: str, model: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._shared: dict[str, Tables] = {}
        if variant == "stock":
            self.modes = ("idle",)
        else:
            register_add_pooled()
            self._shared = install(variant)
        self.llm = open_llm(model)

    def prepare(self, mode: str) -> None:
        if self._shared:
            self._shared["tables"].aim(is_active=mode == "active")


def main() -> None:
    """Start the engines and time them in turns."""
    model, seconds, folder, *variants = sys.argv[1:]
    turns.LOAD = turns.PREFILL  # decoding is what differs here
    turns.JOBS[:] = [*(Job(batch, 64, tokens) for batch in BATCHES for tokens in (1, LONG)), turns.PREFILL]
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    engines = start(target, Added, variants or VARIANTS, model)
    num_rounds = run_rounds(engines, float(seconds))
    lines = table(engines, dict.fromkeys(VARIANTS, "stock"))
    stop(engines)
    print(f"{num_rounds} rounds, engines in turns; ratios to stock of the same round, quartiles", *lines, sep="\n")


if __name__ == "__main__":
    main()
