"""Stock vLLM's answers: ``python -m tests.chaos.stock MODEL PROMPTS.json OUT.json``, in a process without headgate.

Each prompt is answered alone, and then all of them at once: what differs between the two is decided by the batch and
not by the prompt, and a prompt on which they differ, or where the two best tokens are close, says nothing about others.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.chaos.workload import MOST_TOKENS

MIN_MARGIN = 1e-3
"""Of the best token's logprob over the second's; sums in another order differ by 1e-5."""


def answers(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of each prompt, up to the first that is not clearly the best."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=MOST_TOKENS, logprobs=2)
    wanted: list[Any] = [{"prompt_token_ids": tokens} for tokens in prompts]
    together = llm.generate(wanted, params, use_tqdm=False)
    llm.reset_prefix_cache()
    alone = [llm.generate([one], params, use_tqdm=False)[0] for one in wanted]
    found = []
    for first, second in zip(together, alone, strict=True):
        clear = clear_tokens(first.outputs[0])
        assert clear == list(second.outputs[0].token_ids)[: len(clear)], "the answer depends on the batch"
        found.append(clear)
    return found


def clear_tokens(output: Any) -> list[int]:
    """The tokens before the first whose logprob is close to the second best."""
    tokens = []
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        best, second, *_ = sorted((entry.logprob for entry in entries.values()), reverse=True)
        if best - second < MIN_MARGIN:
            break
        tokens.append(token)
    return tokens


def main() -> None:
    """Answer, and write the answers."""
    os.environ.update(VLLM_PLUGINS="none", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM

    model, prompts, out = sys.argv[1:]
    llm = LLM(
        model, dtype="float32", enforce_eager=True, block_size=32, max_num_batched_tokens=256, disable_log_stats=True
    )
    Path(out).write_text(json.dumps(answers(llm, json.loads(Path(prompts).read_text()))))


if __name__ == "__main__":
    main()
