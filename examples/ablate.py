"""One direction ablated from every layer: what the model can no longer say in its stream, beside the plain request.

Usage: ``.venv/bin/python examples/ablate.py MODEL_FOLDER``

The method of "Refusal in Language Models Is Mediated by a Single Direction" (Arditi et al., 2024), with joy for
refusal: a model as small as SmolLM2 refuses nothing. The direction is made at one layer and taken out of the stream
behind every layer.
"""

import sys

from headgate.steering import LLM, SamplingParams, contrast, ops

LAYER, LATER = 12, 20
TOPICS = ["the weather", "my morning", "my work", "the train ride", "dinner with friends", "a letter from home"]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    # block_size is what vLLM's CPU attention needs; eager starts sooner; float32 is faster on most CPUs.
    llm = LLM(
        sys.argv[1],
        capture_consumers=["memory"],
        capture_sites={"post_mlp": [LAYER, LATER]},
        steering={"op_sites": {"post_attn": "all", "post_mlp": "all"}},
        max_model_len=1024,
        block_size=32,
        enforce_eager=True,
        dtype="float32",
    )
    glad = [chat(f"I feel wonderful and full of joy when I think about {topic}.") for topic in TOPICS]
    sad = [chat(f"I feel terrible and full of sorrow when I think about {topic}.") for topic in TOPICS]
    joy = contrast(llm, glad, sad, sites={"post_mlp": [LAYER]}, normalize=True).float32()[0]

    everywhere = [{"hook": hook, "layers": "all"} for hook in ("post_attn", "post_mlp")]
    wanted = {"memory": {"hooks": {"post_mlp": [LATER]}, "positions": "last_prompt"}}
    plain = SamplingParams(temperature=0.0, max_tokens=32, capture=wanted)
    ablated = SamplingParams(temperature=0.0, max_tokens=32, capture=wanted, steering_ops=[ops.ablate(joy, everywhere)])
    for label, params in (("plain", plain), ("ablated", ablated)):
        outputs = llm.chat([*glad, *sad], params, use_tqdm=False)  # both moods in one batch
        along = []
        for output in outputs:
            (rows,) = output.capture_results["memory"].payload.rows.values()
            along.append(float(rows.float().numpy()[-1] @ joy))  # of the prompt's last token
        apart = sum(along[: len(glad)]) / len(glad) - sum(along[len(glad) :]) / len(sad)
        print(f"{label:>8}  glad minus sad at layer {LATER}: {apart:+7.2f}  {outputs[0].outputs[0].text!r}")
