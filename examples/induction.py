"""Finds induction heads, which look back from a repeated token at what followed it the first time, and ablates them.

The model reads rows of random tokens twice. Each head's score is the probability that it gives, on average, to the
token after the first occurrence. Without the strongest heads the model predicts the second row worse; without as many
others it does not. A picture shows the strongest head's pattern if matplotlib is there.

Usage: ``.venv/bin/python examples/induction.py MODEL_FOLDER [PNG]``
"""

import sys
from typing import Any

import numpy as np
from transformers import AutoConfig

from headgate.capture import LLM, SamplingParams
from headgate.consumers.attention import fetch_patterns
from headgate.steering import ops

LENGTH, ROWS, SHOWN = 24, 8, 5


def draw(pattern: Any, layer: int, head: int, path: str) -> None:
    """Draw one head's pattern ``[queries, keys]``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    drawn = axes.imshow(
        pattern, cmap="Blues", vmin=0, vmax=1, extent=(-0.5, 2 * LENGTH - 0.5, 2 * LENGTH - 0.5, LENGTH - 0.5)
    )
    axes.set(title=f"layer {layer}, head {head}", xlabel="key", ylabel="query: the second time")
    figure.colorbar(drawn, label="probability")
    figure.savefig(path, dpi=110)


def repeated(llm: LLM, rows: list[list[int]], heads: Any) -> float:
    """Return the mean probability of the second row's tokens, with the heads ``(layer, head)`` ablated."""
    acting = [ops.ablate_heads(f"{layer}.hook_z", int(head)) for layer, head in heads]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, steering_ops=acting or None)
    outputs = llm.generate([{"prompt_token_ids": row * 2} for row in rows], params, use_tqdm=False)
    given = [[next(iter(each.values())).logprob for each in output.prompt_logprobs[LENGTH + 1 :]] for output in outputs]
    return float(np.exp(given).mean())


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    folder = sys.argv[1]
    config = AutoConfig.from_pretrained(folder)
    llm = LLM(
        folder,
        capture_consumers=["attention"],
        capture_sites={"q": "all", "k": "all"},
        steering={"op_sites": {"hook_z": "all"}},
        max_model_len=512,
        block_size=32,  # what vLLM's CPU attention needs
        enforce_eager=True,
    )
    random = np.random.default_rng(0)
    rows = [random.integers(1000, config.vocab_size, LENGTH).tolist() for _ in range(ROWS)]
    wanted = {"layers": "all", "queries": {"start": LENGTH, "stop": 2 * LENGTH}}
    params = SamplingParams(max_tokens=1, capture={"attention": wanted})
    found = []
    for output in llm.generate([{"prompt_token_ids": row * 2} for row in rows], params, use_tqdm=False):
        patterns = fetch_patterns(output.capture_results["attention"].payload)
        found.append(np.stack([patterns[name].numpy() for name in patterns]))  # [layers, queries, heads, keys]
    mean = np.mean(found, axis=0)
    # From the token at LENGTH + n to the one at n + 1, which followed it the first time.
    scores = np.diagonal(mean, offset=1, axis1=1, axis2=3).mean(axis=-1)
    order = np.stack(np.unravel_index(np.argsort(-scores, axis=None), scores.shape), axis=1)
    for layer, head in order[:SHOWN]:
        print(f"layer {layer}, head {head}: {scores[layer, head]:.2f}")
    others = np.random.default_rng(1).permutation(order[SHOWN:])[:SHOWN]
    for name, heads in (("no head", []), ("the first", order[:1]), ("all of these", order[:SHOWN]), ("others", others)):
        print(f"probability of the second row with {name} ablated: {repeated(llm, rows, heads):.2f}")
    if len(sys.argv) > 2:
        layer, head = map(int, np.unravel_index(scores.argmax(), scores.shape))
        draw(found[0][layer, :, head], layer, head, sys.argv[2])
