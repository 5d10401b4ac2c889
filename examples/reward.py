"""A GRPO-shaped loop: groups of answers, rewards from activations, a training step, new weights in the running engine.

An answer's reward is how far its activations point along a direction of joy. A copy of the model is trained here, and
the engine takes its weights through vLLM's own ``reload_weights``.

Usage: ``.venv/bin/python examples/reward.py MODEL_FOLDER [STEPS]``
"""

import sys
import tempfile
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headgate.capture import LLM, SamplingParams

LAYER, GROUP, RATE = 20, 4, 2e-4
CHATS = [[{"role": "user", "content": text}] for text in ("How was your day?", "Tell me about the sea.")]
JOY, SORROW = "I feel wonderful and full of joy today.", "I feel terrible and full of sorrow today."


def direction(policy: Any, tokenizer: Any) -> Any:
    """The difference of two sentences' last rows, at the site ``LAYER.post_mlp``."""
    rows = []
    for text in (JOY, SORROW):
        with torch.no_grad():
            states = policy(tokenizer(text, return_tensors="pt").input_ids, output_hidden_states=True).hidden_states
        rows.append(states[LAYER + 1][0, -1].float().numpy())
    return rows[0] - rows[1]


def logprobs(policy: Any, prompt: list[int], answer: list[int]) -> Any:
    """Logprobs of the tokens of an answer."""
    logits = policy(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    folder, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8
    tokenizer, policy = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    # Above LAYER: to choose other tokens is all it can learn.
    trained = policy.float().requires_grad_(False).model.layers[-4:].requires_grad_(True)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=RATE, weight_decay=0.0)
    work = tempfile.TemporaryDirectory()
    np.save(f"{work.name}/joy.npy", direction(policy, tokenizer))
    params = {"layer": LAYER, "direction": f"{work.name}/joy.npy", "scale": 10.0, "transform": "tanh"}
    # block_size is what vLLM's CPU attention needs; eager starts sooner.
    sites = {"post_mlp": [LAYER]}
    settings = {"max_model_len": 512, "block_size": 32, "enforce_eager": True}
    llm = LLM(folder, capture_consumers=[{"name": "reward", "params": params}], capture_sites=sites, **settings)
    sampling = SamplingParams(n=GROUP, max_tokens=12, seed=0, logprobs=0, capture={"reward": {}})
    for step in range(steps):
        found: list[float] = []
        off: list[float] = []
        if step:
            optimizer.step()
            optimizer.zero_grad()
            policy.bfloat16().save_pretrained(f"{work.name}/policy")  # both sides round alike
            policy.float()
            llm.collective_rpc("reload_weights", kwargs={"weights_path": f"{work.name}/policy"})
            llm.reset_prefix_cache()
        for output in llm.chat(CHATS, sampling, use_tqdm=False):
            rewards = np.array([one.capture_results["reward"].payload["reward"] for one in output.outputs])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            found.extend(rewards)
            for one, advantage in zip(output.outputs, advantages, strict=True):
                tokens = list(one.token_ids)
                ours = logprobs(policy, output.prompt_token_ids, tokens)
                served = torch.tensor(
                    [chances[token].logprob for chances, token in zip(one.logprobs, tokens, strict=True)]
                )
                off.append(float((ours.detach() - served).abs().mean()))
                (-float(advantage) * ours.mean() / (GROUP * len(CHATS))).backward()
        print(f"step {step}: mean reward {np.mean(found):+.4f}, engine and trainer differ by {np.mean(off):.4f}")
    work.cleanup()
