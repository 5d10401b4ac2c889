"""A persona held near the assistant: the stream's projection onto an axis is capped, beside the plain request.

Usage: ``.venv/bin/python examples/cap.py MODEL_FOLDER``

Activation capping along the assistant axis (Lu et al., 2026): the axis points from role play to the usual assistant.
Where a row falls below what usual answers have, its projection is lifted to that bound; all other rows stay.
"""

import sys

import numpy as np

from headgate.steering import LLM, SamplingParams, contrast, ops

LAYERS, LATER = [12, 13, 14, 15], 20
QUESTIONS = ["What is rain?", "How do plants grow?", "Why is the sky blue?", "What do bees do?", "What is bread?"]
ROLE = "You are a ghost who wails and moans in riddles. Stay in character and never explain. "


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    # block_size is what vLLM's CPU attention needs; eager starts sooner; float32 is faster on most CPUs.
    llm = LLM(
        sys.argv[1],
        capture_consumers=["memory"],
        capture_sites={"post_mlp": [*LAYERS, LATER]},
        steering={"op_sites": {"post_mlp": LAYERS}},
        max_model_len=1024,
        block_size=32,
        enforce_eager=True,
        dtype="float32",
    )
    usual, played = [chat(text) for text in QUESTIONS], [chat(ROLE + text) for text in QUESTIONS]
    axes = contrast(llm, usual, played, sites={"post_mlp": [*LAYERS, LATER]}, normalize=True).float32()

    def projections(prompts: list[list[dict[str, str]]], *edits: ops.Op) -> tuple[np.ndarray, str]:
        """Of each generated row onto its layer's axis, ``[layers, rows]``; and the first answer."""
        wanted = {"memory": {"hooks": {"post_mlp": [*LAYERS, LATER]}, "positions": "all_generated"}}
        params = SamplingParams(temperature=0.0, max_tokens=32, capture=wanted, steering_ops=list(edits) or None)
        outputs = llm.chat(prompts, params, use_tqdm=False)
        kept = [output.capture_results["memory"].payload.rows.values() for output in outputs]
        found = [[rows.float().numpy() @ axis for rows, axis in zip(each, axes, strict=True)] for each in kept]
        return np.concatenate(found, axis=1), outputs[0].outputs[0].text

    bounds = np.quantile(projections(usual)[0], 0.25, axis=1)  # a quarter of the usual rows lies below
    caps = [ops.clamp(axes[at], f"{layer}.post_mlp", min=float(bounds[at])) for at, layer in enumerate(LAYERS)]
    for label, edits in (("plain", []), ("capped", caps)):
        found, text = projections(played, *edits)
        print(f"{label:>7}  assistant axis at layer {LATER}: {found[-1].mean():+7.2f}  {text!r}")
