"""One engine of the test of changes in flight: ``python change_runs.py changes OUT.pt``.

The requests are those of `soak_runs`, sampled at temperature 1; before random steps global vectors are set or cleared,
modules are registered, and a rule that only observes comes and goes. Then each captured request runs once more, alone,
as one prompt, every row captured, under each version of the global vectors that it met.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np
import soak_runs
import torch
from soak_cases import Job

from tests.fakes.launches import Launches

base = soak_runs.base
SHARE = 0.25
"""Of the steps before which something changes."""
STEERED_LAYERS = base.LAYERS[1:3]


def global_vectors(version: int) -> dict[str, Any]:
    """The vectors of a version, for both phases."""
    rng = np.random.default_rng(50_000 + version)
    strength = soak_runs.STRENGTH
    return {
        "post_mlp": {
            layer: rng.normal(0, strength, base.HIDDEN).astype(np.float32).tolist() for layer in STEERED_LAYERS
        }
    }


def config() -> dict[str, Any]:
    """Capture and steering, with a site for the rule."""
    made = soak_runs.config()
    made["headgate"]["steering"] = {"op_sites": {"pre_attn": [base.LAYERS[1]]}}
    return made


class Changes(soak_runs.Schedule):
    """Makes a change before random steps.

    Attributes:
        version: Of the global vectors; 0: none.
        counts: Of changes, by kind.
        launches: Which launch each token came from.
    """

    def __init__(self, llm: Any, waiting: list[Job], seed: int) -> None:
        super().__init__(llm, "headgate", waiting)
        self.version, self.counts = 0, dict[str, int]()
        self.launches = Launches(llm.llm_engine.engine_core.engine_core, lambda: self.version)
        self._llm, self._rng, self._num_versions, self._has_rule = llm, random.Random(seed), 0, False

    def step(self) -> Any:
        """Change something or nothing, then go on."""
        if self._rng.random() < SHARE:
            kind = self._rng.choice(["set", "set", "clear", "register", "rule"])
            self.counts[kind] = self.counts.get(kind, 0) + 1
            getattr(self, f"_{kind}")()
        return super().step()

    def params(self, job: Job) -> Any:
        """Sampled, not greedy."""
        made = super().params(job)
        made.temperature = 1.0
        return made

    def _set(self) -> None:
        self._num_versions += 1
        self._llm.steering.set(global_vectors(self._num_versions), replace=True)
        self.version = self._num_versions

    def _clear(self) -> None:
        self._llm.steering.clear()
        self.version = 0

    def _register(self) -> None:
        self._llm.steering.register("other", global_vectors(-self._rng.randrange(1, 1000)))

    def _rule(self) -> None:
        if self._has_rule:
            self._llm.steering.unregister_rule("watch")
        else:
            when = {"cosine": [1.0] * base.HIDDEN, "at": f"{base.LAYERS[1]}.pre_attn", "above": -3.0}
            self._llm.steering.register_rule("watch", applies_to="opt_out", when=when, then="observe")
        self._has_rule = not self._has_rule


def soak(llm: Any) -> tuple[dict[int, dict[str, Any]], Changes]:
    """All requests together: what came of those that were not aborted, and the version behind each of their rows."""
    known = {job.index: job for job in soak_runs.jobs()}
    changes = Changes(llm, list(known.values()), soak_runs.SEED)
    found = changes.run(llm)
    llm.steering.clear()
    launches = changes.launches
    kept = {int(req_id.split("-")[0]): tokens for req_id, tokens in launches.kept.items()}
    begun_again = {int(req_id.split("-")[0]) for req_id in launches.begun_again}
    for index, entry in found.items():
        num_prompt = len(known[index].prompt)
        versions = [kept[index][at] for at in range(num_prompt, num_prompt + known[index].max_tokens)]
        assert all(len(runs) == 1 for runs in versions), (index, "a forward mixes versions")
        entry["versions"] = [runs[0][1] for runs in versions]
        entry["was_begun_again"] = index in begun_again
    return found, changes


def solo(llm: Any, seen: dict[int, dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Every captured request alone, by index and version."""
    by_version = defaultdict(list)
    for job in soak_runs.jobs():
        for version in sorted(set(seen[job.index]["versions"])) if job.hooks and job.index in seen else ():
            by_version[version].append(job)
    found = {}
    for version, jobs in sorted(by_version.items()):
        if version:
            llm.steering.set(global_vectors(version), replace=True)
        else:
            llm.steering.clear()
        prompts = [{"prompt_token_ids": [*job.prompt, *seen[job.index]["tokens"][:-1]]} for job in jobs]
        asked = [soak_runs.params(job, "headgate", 1, job.hooks, "all") for job in jobs]
        outputs = base.collect(llm.generate(prompts, asked, use_tqdm=False))
        found |= {(job.index, version): output for job, output in zip(jobs, outputs, strict=True)}
    return found


def main() -> None:
    """Serve, change, and compute anew."""
    _, out = sys.argv[1], sys.argv[2]
    llm = base.open_engine("graphs", config())
    began = time.perf_counter()
    seen, changes = soak(llm)
    soak_s = time.perf_counter() - began
    result = {"requests": seen, "solo": solo(llm, seen), "counts": changes.counts}
    result["num_preempted"] = changes.launches.num_preempted
    result["is_async"] = bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    torch.save(result, out)
    print(f"RAN changes {len(seen)} requests in {soak_s:.1f} s, {changes.counts}", flush=True)


if __name__ == "__main__":
    main()
