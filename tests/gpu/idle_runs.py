"""One engine of `test_idle_gpu`: ``python idle_runs.py VARIANT OUT`` writes tokens and logprobs as JSON.

GPU_TEST_MODEL is the model's folder; random weights will do.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.models import size_of
from tests.benchmarks.saes import write_sae

BRANCHES = ("attn_in", "attn_out", "mlp_in", "mlp_out")
HEADS = ("q", "k", "v", "hook_z")
PARTS: dict[str, dict[str, Any]] = {
    "stock": {},
    "stock-again": {},
    "capture": {"capture": {"consumers": [{"name": "memory"}]}},
    "steering": {"steering": {}},
    "both": {"capture": {"consumers": [{"name": "memory"}]}, "steering": {}},
    "ops": {"steering": {"op_sites": {"pre_attn": [1, 2], "post_attn": [1, 2], "post_mlp": [0, 1]}}},
    "ops-branches": {"steering": {"op_sites": {hook: [1, 2] for hook in BRANCHES}}},
    "ops-heads": {"steering": {"op_sites": {hook: [1, 2] for hook in HEADS}}},
    "saes": {"steering": {"saes": {"encoded": "1.post_mlp", "transcoder": "1.mlp_in"}, "sae_encode": ["encoded"]}},
}
"""SAEs are given by their sites; they are written beside the answers."""
LENGTHS = (1, 2, 3, 700, 1500)
NUM_REQUESTS = 40
MAX_TOKENS = 24


def with_saes(headgate: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the SAEs that a configuration names, and return it with their paths."""
    steering = headgate.get("steering", {})
    if "saes" not in steering:
        return headgate
    size = size_of(os.environ["GPU_TEST_MODEL"])
    found = {}
    for name, site in steering["saes"].items():
        path = write_sae(folder / name, 4096, size, layer=1, is_transcoder=name == "transcoder")
        found[name] = f"{path}@{site}"
    return {**headgate, "steering": {**steering, "saes": found}}


def prompts(longest: int, vocabulary: int) -> list[list[int]]:
    """Random prompts of `LENGTHS` and others, none longer than `longest` tokens."""
    rng, low = random.Random(0), min(1000, vocabulary // 2)
    lengths = [*LENGTHS, *(rng.randrange(4, 300) for _ in range(NUM_REQUESTS - len(LENGTHS)))]
    return [[rng.randrange(low, min(vocabulary, 200_000)) for _ in range(min(length, longest))] for length in lengths]


def told(output: Any) -> dict[str, Any]:
    """Tokens and logprobs of one answer."""
    (found,) = output.outputs
    return {
        "tokens": list(found.token_ids),
        "logprobs": [sorted((token, one.logprob) for token, one in step.items()) for step in found.logprobs],
    }


def main() -> None:
    """Serve all prompts at once, in an engine core in this process: so all engines see the same batches."""
    variant, out = sys.argv[1:3]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CACHE_ROOT"] = f"{out}.cache"  # each compiles for itself
    if not PARTS[variant]:
        os.environ["VLLM_PLUGINS"] = "none"
    from engine_runs import VOCABULARY, open_engine
    from vllm import SamplingParams

    os.environ.setdefault("GPU_TEST_ENGINE", json.dumps({"kv_cache_memory_bytes": 3 << 30, "max_model_len": 2048}))
    llm = open_engine(
        "stock" if not PARTS[variant] else "idle", {"headgate": with_saes(PARTS[variant], Path(out).parent)}
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=5, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": ids} for ids in prompts(max(LENGTHS), VOCABULARY)]
    answers = [told(output) for output in llm.generate(given, params, use_tqdm=False)]
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
