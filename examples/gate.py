"""A gate: three users in one batch, and a calming vector that acts on the angry one alone.

Usage: ``.venv/bin/python examples/gate.py MODEL_FOLDER``

A probe of anger and the vector from angry to calm are made of the same captured prompts. The gate compares the score
of the prompt's last token with the threshold, and adds the vector from that token to the end of the answer.
"""

import sys
from typing import Any

import numpy as np

from headgate.capture.schema.sites import Site
from headgate.steering import LLM, SamplingParams, captured_rows, mean_difference, probes

SITE = Site.parse("12.post_mlp")
TOPICS = ["my parcel", "my bill", "the train", "my order", "my new phone", "the hotel room", "my refund", "the food"]
ANGRY = [f"I am furious about {topic}! This is outrageous, and I hate all of you!" for topic in TOPICS]
CALM = [f"I am fine with {topic}. All is well, and I thank all of you." for topic in TOPICS]
QUESTIONS = {
    "angry": "I hate this! Nothing ever works! What is rain?",
    "calm": "Good morning! What is rain?",
    "plain": "Name three fruits.",
}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    # block_size is what vLLM's CPU attention needs; eager starts sooner; in float32 tokens do not depend on the batch.
    llm = LLM(
        sys.argv[1],
        capture_consumers=["memory"],
        capture_sites={"post_mlp": [SITE.layer]},
        steering={"op_sites": {"post_mlp": [SITE.layer]}},
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        enforce_eager=True,
    )
    rows = captured_rows(llm, [chat(text) for text in (*ANGRY, *CALM)], sites={"post_mlp": [SITE.layer]})[SITE]
    angry, calm = rows[: len(ANGRY)], rows[len(ANGRY) :]
    labels = ["angry"] * len(ANGRY) + ["calm"] * len(CALM)
    probe = probes.fit(rows.astype(np.float32), labels, at=SITE, positive="angry")  # 0 is halfway
    llm.steering.register_probe("anger", probe)
    print(f"probe at {SITE.name}: held-out AUROC {probe.metadata['held_out_auroc']}")

    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=32, **fields)

    gate = {
        "name": "calm-down",
        "when": {"probe": "anger", "above": 0.0, "pool": "last_prompt"},
        "then": {"vectors": mean_difference({SITE: calm}, {SITE: angry}).scaled(2.0)},
        "scope": "rest_of_request",
    }
    gated, plain = params(steering_gates=[gate], return_steering_trace=True), params()
    alone = [llm.chat([chat(text)], plain, use_tqdm=False)[0] for text in QUESTIONS.values()]
    batch = llm.chat([chat(text) for text in QUESTIONS.values()], [gated, gated, plain], use_tqdm=False)
    for name, before, after in zip(QUESTIONS, alone, batch, strict=True):
        print(f"{name:>5}  alone, no gate      {before.outputs[0].text!r}")
        trace, said = after.outputs[0].steering_trace, "no gate            "
        if trace is not None:
            at = trace["positions"].index(len(after.prompt_token_ids) - 1)
            fires = any(trace["gates"]["calm-down"]["applied"])
            said = f"score {trace['scores']['anger'][at]:+5.2f}: {'fires' if fires else 'quiet'}"
        print(f"{'':>5}  {said} {after.outputs[0].text!r}")
        same = before.outputs[0].token_ids == after.outputs[0].token_ids
        print(f"{'':>5}  {'the same tokens' if same else 'other tokens'}")
