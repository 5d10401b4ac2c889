"""One engine of the soak of drafts: ``draft_soak_runs.py MODE OUT.pt``; MODE is one of `MODES`.

Random requests come and go, are preempted for want of KV blocks and aborted, greedy ones and sampled ones. All capture
random sites at random positions. Of the environment: DRAFT_SOAK_TOKENS is how many tokens the requests of a mode have
that are not aborted, SOAK_TIMEOUT_S how long the test may take. Requests arrive in 45 % of it: later ones are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from draft_runs import Mode, described, drafts_of, open_engine, told_of
from soak_cases import HOOKS, Job, random_jobs
from soak_runs import SEED, Schedule, params

from tests.engine.one_run import force_v2_runner
from tests.engine.tiny_models import LAYERS, tiny_model

MODES = {
    "ngram": Mode("ngram"),
    "draft model": Mode("draft_model"),
    "eagle": Mode("eagle", is_v2=True, is_eager=False),
}
NUM_TOKENS = int(os.environ.get("DRAFT_SOAK_TOKENS", "400000"))
TIMEOUT_S = float(os.environ.get("SOAK_TIMEOUT_S", "450"))
SECONDS = 0.45 * TIMEOUT_S
TEMPERATURES = (0.0, 0.2, 1.0)
ACCEPTED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5, 0.3]}
"""Models of random weights guess few tokens: vLLM accepts drafts at random here, and answers with them."""
MAX_LENGTH = 1024
CROWDED = {
    "max_model_len": MAX_LENGTH,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 600,
}
"""Blocks for about 30 requests of those that come, so that some are preempted."""


def model_folder() -> Path:
    """The tiny Llama, for texts of `MAX_LENGTH`."""
    tiny = tiny_model("llama")
    folder = tiny.with_name(f"{tiny.name}-{MAX_LENGTH}")
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    shutil.copy(tiny / "model.safetensors", folder)
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_LENGTH}))
    return folder


def jobs(name: str) -> list[Job]:
    """The requests of a mode, in the order of their arrival: as many as have `NUM_TOKENS` tokens."""
    return list(
        _enough(
            random_jobs(
                SEED + list(MODES).index(name),
                max(NUM_TOKENS // 50, 1),
                layers=range(LAYERS),
                vocabulary=500,
                longest=200,
                most_tokens=600,
                per_step=0.6,
                first_token=3,
                captured=1.0,
            )
        )
    )


def _enough(found: list[Job]) -> Iterator[Job]:
    num_tokens = 0
    for job in found:
        yield job
        num_tokens += 0 if job.abort_step else len(job.prompt) + job.max_tokens
        if num_tokens >= NUM_TOKENS:
            return


class Arrivals(Schedule):
    """Requests of several temperatures, until the time is over."""

    def __init__(self, llm: Any, waiting: list[Job]) -> None:
        super().__init__(llm, "headgate", waiting)
        self._end = time.monotonic() + SECONDS

    def params(self, job: Job) -> Any:
        """Sampled at one of `TEMPERATURES`."""
        made = params(job, "headgate", job.max_tokens, job.hooks, job.positions)
        made.temperature = TEMPERATURES[job.index % len(TEMPERATURES)]
        return made

    def step(self) -> Any:
        """Let no more come if the time is over."""
        if time.monotonic() > self._end:
            self._waiting.clear()
        return super().step()


def main() -> None:
    """Serve one mode."""
    name, out = sys.argv[1], sys.argv[2]
    mode = MODES[name]
    consumers = [{"name": "memory", "params": {"max_bytes": 64 << 30}}]
    capture = {"consumers": consumers, "sites": {**dict.fromkeys(HOOKS, "all"), "final_norm": "all"}}
    folder = model_folder()
    can_dictate = torch.cuda.is_available() or mode.is_v2  # the first runner has no such kernel for CPUs
    drafts = {**drafts_of(mode.method, folder), **(ACCEPTED if mode.method != "ngram" and can_dictate else {})}
    if mode.is_v2 and not torch.cuda.is_available():
        force_v2_runner()
    llm = open_engine(
        mode, model=folder, **CROWDED, speculative_config=drafts, additional_config={"headgate": {"capture": capture}}
    )
    given = [job if not job.is_steered else replace(job, is_steered=False) for job in jobs(name)]
    began = time.perf_counter()
    found = Arrivals(llm, given).run(llm)
    took = time.perf_counter() - began
    torch.save({"requests": found, "stats": llm.collective_rpc("headgate_stats"), **told_of(llm)}, out)
    num_tokens = sum(len(entry["prompt"]) + len(entry["tokens"]) for entry in found.values())
    served = f"{len(found)} of {len(given)} requests, {num_tokens} tokens in {took:.0f} s"
    print(f"RAN {name}: {served}, {described(told_of(llm))}")


if __name__ == "__main__":
    main()
