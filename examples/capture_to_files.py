"""The quickstart: chat with a model in vLLM's own `LLM`, keep activations as files, read them back.

Usage: ``.venv/bin/python examples/capture_to_files.py MODEL_FOLDER [OUTPUT_FOLDER]``
"""

import sys

from headgate.capture import LLM, SamplingParams
from headgate.consumers.reader import open_captures

if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    model, root = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "captures"
    consumer = f"filesystem:root={root},if_exists=number"
    # block_size is what vLLM's CPU attention needs; eager starts sooner.
    llm = LLM(model, capture_consumers=[consumer], max_model_len=1024, block_size=32, enforce_eager=True)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=24,
        capture={"filesystem": {"hooks": {"post_mlp": [10, 20, -1]}, "positions": "all", "tag": "quickstart"}},
    )
    questions = ["What is 2 + 2?", "Name three fruits."]
    for output in llm.chat([[{"role": "user", "content": text}] for text in questions], params):
        print(output.outputs[0].text, output.capture_results["filesystem"])
    for capture in open_captures(root):
        print(capture, {site.name: tuple(capture[site].shape) for site in capture.sites})
