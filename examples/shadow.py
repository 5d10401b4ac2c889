"""A rule in shadow mode: how often would it act? Then the same rule, switched on, for users who did not ask for it.

Usage: ``.venv/bin/python examples/shadow.py MODEL_FOLDER``

The rule calms angry users, as the gate of ``gate.py`` does for requests that bring it. A rule that observes changes no
token; its rows are counted, here and in ``headgate_steering_rule_rows_total`` of a server's ``/metrics``.
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
TRAFFIC = [
    "I hate this! Nothing ever works! What is rain?",
    "Good morning! What is rain?",
    "I hate all of you! This is outrageous! Where is Rome?",
    "Thank you all. Where is Rome?",
]


def chats(texts: list[str]) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


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
    rows = captured_rows(llm, chats([*ANGRY, *CALM]), sites={"post_mlp": [SITE.layer]})[SITE]
    angry, calm = rows[: len(ANGRY)], rows[len(ANGRY) :]
    labels = ["angry"] * len(ANGRY) + ["calm"] * len(CALM)
    llm.steering.register_probe("anger", probes.fit(rows.astype(np.float32), labels, at=SITE, positive="angry"))
    when = {"probe": "anger", "above": 0.0, "pool": "last_prompt"}
    calming = {"vectors": mean_difference({SITE: calm}, {SITE: angry}).scaled(2.0)}

    def answers(**fields: Any) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=24, **fields)
        return [list(output.outputs[0].token_ids) for output in llm.chat(chats(TRAFFIC), params, use_tqdm=False)]

    def report(name: str, after: list[list[int]]) -> None:
        counted = {rule.name: rule.rows for rule in llm.steering.dynamic().rules}
        changed = [text for text, one, other in zip(TRAFFIC, before, after, strict=True) if one != other]
        print(f"{name}: rows by rule {counted}, {len(changed)} of {len(TRAFFIC)} answers changed {changed}")

    before = answers()
    llm.steering.register_rule("watch", applies_to="all", when=when, then="observe", scope="rest_of_request")
    report("shadow", answers())
    llm.steering.register_rule("calm-down", applies_to="opt_out", when=when, then=calming, scope="rest_of_request")
    report("on", answers())
    report("opted out", answers(steering_rules=[]))
