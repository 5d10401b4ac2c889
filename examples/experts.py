"""Which experts a mixture of experts sends two languages to; then the most German one is banned.

Each token of a layer goes to the experts that the router chooses. The expert whose share of the German tokens exceeds
its share of the English ones by most is banned for German prompts: its score is replaced, so others are chosen. The
English prompts of the same batch keep it.

Usage: ``.venv/bin/python examples/experts.py MODEL_FOLDER``, such as a folder of OLMoE-1B-7B or Qwen3-30B-A3B
"""

import sys
from typing import Any

import numpy as np

from headgate.capture import LLM, SamplingParams
from headgate.steering import ops

ENGLISH = [
    "The weather was fine this morning, so we went for a walk along the river.",
    "My brother works in a small town and takes the train every day.",
    "In the evening they cooked soup and talked about the children.",
    "A book that nobody reads any more lay open on the old table.",
]
GERMAN = [
    "Das Wetter war heute Morgen schön, deshalb gingen wir am Fluss spazieren.",
    "Mein Bruder arbeitet in einer kleinen Stadt und fährt jeden Tag mit dem Zug.",
    "Am Abend kochten sie eine Suppe und sprachen über die Kinder.",
    "Ein Buch, das niemand mehr liest, lag aufgeschlagen auf dem alten Tisch.",
]


def shares(outputs: list[Any], num_experts: int) -> Any:
    """Return the share of tokens that each layer sends to each expert, ``[layers, experts]``."""
    counted = []
    for site in outputs[0].capture_results["memory"].payload.sites:
        chosen = np.concatenate([output.capture_results["memory"].payload.rows[site].numpy() for output in outputs])
        counted.append(np.bincount(chosen.ravel(), minlength=num_experts) / len(chosen))
    return np.array(counted)


def mean_logprob(outputs: list[Any]) -> float:
    """Return the mean log-probability of the prompts' tokens."""
    steps = [step for output in outputs for step in output.prompt_logprobs[1:]]
    tokens = [token for output in outputs for token in output.prompt_token_ids[1:]]
    return float(np.mean([step[token].logprob for step, token in zip(steps, tokens, strict=True)]))


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    llm = LLM(
        sys.argv[1],
        capture_consumers=["memory"],
        capture_sites={"experts": "all"},
        steering={"op_sites": {"router_logits": "all"}},
        **{"max_model_len": 128, "block_size": 32, "enforce_eager": True},  # block_size: for vLLM's CPU attention
    )
    wanted = {"memory": {"hooks": {"experts": "all"}, "positions": "all_prompt"}}
    plain = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, capture=wanted)
    outputs = llm.generate([*ENGLISH, *GERMAN], plain, use_tqdm=False)
    sites = outputs[0].capture_results["memory"].payload.sites
    num_experts = llm.llm_engine.model_config.get_num_experts()
    english, german = (shares(each, num_experts) for each in (outputs[:4], outputs[4:]))
    number, expert = map(int, np.unravel_index((german - english).argmax(), german.shape))
    layer = sites[number].layer
    print(f"layer {layer}, expert {expert}: {german[number, expert]:.0%} of German tokens, ", end="")
    print(f"{english[number, expert]:.0%} of English ones")

    ban = ops.ban_experts(f"{layer}.router_logits", expert)
    banned = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, capture=wanted, steering_ops=[ban])
    again = llm.generate([*ENGLISH, *GERMAN], [plain] * 4 + [banned] * 4, use_tqdm=False)
    for name, before, after in (("English", outputs[:4], again[:4]), ("German", outputs[4:], again[4:])):
        share = shares(after, num_experts)[number, expert]
        print(f"{name}, banned for German: {share:.0%} of tokens, ", end="")
        print(f"mean log-probability {mean_logprob(before):.2f} -> {mean_logprob(after):.2f}")
