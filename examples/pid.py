"""A controller: holds how glad an answer is at a set point, token by token, for one of two requests in a batch.

Usage: ``.venv/bin/python examples/pid.py MODEL_FOLDER``

A probe of gladness and the vector from sad to glad are made of the same captured prompts. A second engine starts
with the controller ``pid``, which reads the probe behind each token and sets the scale of the vector for the next one.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.sites import Site
from headgate.steering import LLM, PhaseVectors, SamplingParams, captured_rows, mean_difference, probes, save

READ, WRITE = Site.parse("15.post_mlp"), Site.parse("12.post_mlp")
TOPICS = ["the weather", "my work", "the news", "my garden", "the film", "our trip", "the food", "my day"]
GLAD = [f"I am so happy about {topic}! It is wonderful, and I love it." for topic in TOPICS]
SAD = [f"I am so sad about {topic}. It is terrible, and I hate it." for topic in TOPICS]
QUESTION = "How was the week? Tell me in a few sentences."
SETPOINT = 2.5
SITES = {"post_mlp": [WRITE.layer, READ.layer]}


def chat(text: str) -> Any:
    return [{"role": "user", "content": text}]


def start(model: str, **steering: Any) -> LLM:
    # block_size is what vLLM's CPU attention needs; eager starts sooner; in float32 tokens do not depend on the batch.
    return LLM(
        model,
        capture_consumers=["memory"],
        capture_sites=SITES,
        steering={"op_sites": SITES, **steering},
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        enforce_eager=True,
        gpu_memory_utilization=0.4,  # of memory, for two engines
    )


def make_files(model: str, folder: Path) -> None:
    """Save a probe at `READ`, whose score is 1 for a glad row and -1 for a sad one, and a vector at `WRITE`."""
    rows = captured_rows(start(model), [chat(text) for text in (*GLAD, *SAD)], sites=SITES)
    glad, sad = ({site: each[:8] for site, each in rows.items()}, {site: each[8:] for site, each in rows.items()})
    towards = glad[READ].mean(axis=0) - sad[READ].mean(axis=0)
    weight = 2 * towards / (towards @ towards)
    bias = -weight @ (glad[READ].mean(axis=0) + sad[READ].mean(axis=0)) / 2
    probe = probes.Probe(site=READ, weight=weight[None].astype(np.float32), bias=np.array([bias], np.float32))
    probes.save(folder / "joy.safetensors", probe)
    vector: PhaseVectors = mean_difference({WRITE: glad[WRITE]}, {WRITE: sad[WRITE]})
    save(folder / "joyful.safetensors", vector)


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    with tempfile.TemporaryDirectory() as text:
        make_files(sys.argv[1], folder := Path(text))
        path = str(folder / "joy.safetensors")
        arguments = {"probe": path, "module": "joyful", "setpoint": SETPOINT, "kp": 1.0, "ki": 0.3}
        pid = {"name": "pid", "applies_to": "opt_in", "params": arguments}
        shadow = {"probe": path, "module": "joyful", "threshold": SETPOINT, "gain": 0}
        watch = {"name": "threshold", "instance_name": "watch", "params": shadow}
        llm = start(sys.argv[1], modules={"joyful": str(folder / "joyful.safetensors")}, controllers=[watch, pid])

    def params(*controllers: str) -> SamplingParams:
        fields: dict[str, Any] = {"steering_rules": list(controllers), "return_steering_trace": True}
        return SamplingParams(temperature=0.0, max_tokens=60, **fields)

    outputs = llm.chat([chat(QUESTION)] * 2, [params(), params("pid")], use_tqdm=False)
    for name, output in zip(("alone", "held"), outputs, strict=True):
        trace = output.outputs[0].steering_trace
        scores = [score for score in trace["scores"]["watch.score"] if score is not None][-20:]
        print(f"{name:>5}  {len(trace['actions'])} actions, score {np.mean(scores):+.2f} (wanted: {SETPOINT:+.2f})")
        print(f"       {output.outputs[0].text!r}")
