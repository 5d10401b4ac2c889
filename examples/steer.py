"""The loop in one script: capture contrast prompts, make a vector of them, steer with it beside an unsteered request.

Usage: ``.venv/bin/python examples/steer.py MODEL_FOLDER``
"""

import sys

from headgate.steering import LLM, SamplingParams, contrast, save

LAYER = 12
TOPICS = ["the weather", "my morning", "my work", "the train ride", "dinner with friends", "a letter from home"]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    # block_size is what vLLM's CPU attention needs; eager starts sooner; float32 is faster on most CPUs.
    llm = LLM(
        sys.argv[1],
        capture_consumers=["memory"],
        capture_sites={"post_mlp": [LAYER, 20]},
        steering=True,
        max_model_len=1024,
        block_size=32,
        enforce_eager=True,
        dtype="float32",
    )
    glad = [chat(f"I feel wonderful and full of joy when I think about {topic}.") for topic in TOPICS]
    sad = [chat(f"I feel terrible and full of sorrow when I think about {topic}.") for topic in TOPICS]
    joy = contrast(llm, glad, sad, sites={"post_mlp": [LAYER]})
    save("joy.safetensors", joy)
    later = contrast(llm, glad, sad, sites={"post_mlp": [20]}, normalize=True).float32()[0]

    strengths = [-3.0, 0.0, 3.0, 6.0]  # one batch; 0 steers nothing
    wanted = {"memory": {"hooks": {"post_mlp": [20]}, "positions": "all_generated"}}
    params = [
        SamplingParams(temperature=0.0, max_tokens=32, steering_vectors=joy.scaled(strength), capture=wanted)
        for strength in strengths
    ]
    outputs = llm.chat([chat("How was your day?")] * len(params), params, use_tqdm=False)
    for strength, output in zip(strengths, outputs, strict=True):
        (rows,) = output.capture_results["memory"].payload.rows.values()
        along = float((rows.float().numpy() @ later).mean())
        print(f"{strength:+.0f}  joy at layer 20: {along:+7.2f}  {output.outputs[0].text!r}")
