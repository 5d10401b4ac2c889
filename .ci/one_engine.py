"""Serves one captured and one steered request, as a user's program does: ``one_engine.py MODEL FOLDER``.

Run by `try_dist` from the installed wheel and by `test_lowest` with the oldest dependencies; it needs no test tools.
"""

import sys

import numpy as np

from headgate.consumers.reader import open_captures
from headgate.steering import LLM, SamplingParams

LAYER, SITE, HIDDEN = 12, "13.post_mlp", 576


def asked(name: str, **steering: object) -> SamplingParams:
    """What both requests capture."""
    capture = {"filesystem": {"hooks": {"post_mlp": [LAYER + 1]}, "positions": "all", "request_id": name}}
    return SamplingParams(max_tokens=4, temperature=0, capture=capture, capture_wait=True, **steering)


def main() -> None:
    """Serve them and compare their rows."""
    model, root = sys.argv[1:]
    llm = LLM(
        model,
        capture_consumers=[f"filesystem:root={root}"],
        capture_sites={"post_mlp": [LAYER, LAYER + 1]},
        steering=True,
        max_model_len=256,
        block_size=32,
        dtype="float32",
        enforce_eager=True,
        seed=0,
    )
    vector = np.full(HIDDEN, 2.0, np.float32)
    wanted = [asked("plain"), asked("steered", steering_vectors={"post_mlp": {LAYER: vector}})]
    outputs = llm.generate(["The capital of France is"] * 2, wanted)
    assert [each.capture_results["filesystem"].status for each in outputs] == ["ok", "ok"], outputs
    captures = open_captures(root)
    plain, steered = captures["plain"].numpy(SITE), captures["steered"].numpy(SITE)
    num_prompt = len(outputs[0].prompt_token_ids)
    assert plain.shape == (num_prompt + len(outputs[0].outputs[0].token_ids) - 1, HIDDEN), plain.shape
    assert np.isfinite(plain).all()
    assert np.isfinite(steered).all()
    moved = np.linalg.norm(steered[:num_prompt] - plain[:num_prompt], axis=1)
    assert (moved > 1).all(), moved
    print(f"captured {plain.shape[0]} rows of {SITE}; steered rows differ by {moved.min():.1f} to {moved.max():.1f}")


if __name__ == "__main__":
    main()
