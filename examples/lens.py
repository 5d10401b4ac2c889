"""The logit lens: what the model would say after each layer, token by token; then an answer steered by a lens.

Rows of the grid are layers, columns are tokens of the prompt and of the answer. Each cell is the token that the model's
own norm and head read in the stream there. The second answer gets a token's direction added at one layer.

Usage: ``.venv/bin/python examples/lens.py MODEL_FOLDER [TOKEN]``
"""

import sys
from typing import Any

from headgate.capture import LLM, SamplingParams

PROMPT = "Fact: the capital of Japan is"
WIDTH = 9


def shown(text: str) -> str:
    """A token in a cell."""
    return f"{text!r:.{WIDTH}}".ljust(WIDTH)


def print_grid(output: Any, token: str, tokenizer: Any) -> None:
    """Print the strongest token after each layer, and the rank of one token after the prompt."""
    read = output.capture_results["lens"].payload
    pieces = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    asked = len(output.prompt_token_ids) - 1
    print("layer  " + " ".join(shown(tokenizer.decode([piece])) for piece in pieces))
    for layer, found in read["layers"].items():
        cells = " ".join(shown(strongest[0]) for strongest in found["tokens"])
        print(f"{layer:>5}  {cells}  {token!r} is number {found['token_ranks'][asked][0] + 1}")


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    token = sys.argv[2] if len(sys.argv) > 2 else " Tokyo"
    # block_size is what vLLM's CPU attention needs; eager starts sooner.
    llm = LLM(
        sys.argv[1], capture_consumers=["lens"], steering=True, max_model_len=512, block_size=32, enforce_eager=True
    )
    last = llm.llm_engine.model_config.hf_text_config.num_hidden_layers - 1
    layers = [*range(0, last, 3), last]
    wanted = {"lens": {"layers": layers, "top": 1, "tokens": [token]}}
    plain = SamplingParams(temperature=0, max_tokens=3, capture=wanted)
    toward = [{"lens": "logit", "token": " Paris", "at": f"{2 * last // 3}.post_mlp", "scale": 150.0}]
    steered = SamplingParams(temperature=0, max_tokens=3, steering_vectors=toward)
    first, second = llm.generate([PROMPT, PROMPT], [plain, steered], use_tqdm=False)
    print_grid(first, token, llm.get_tokenizer())
    print(f"as it is:              {first.outputs[0].text!r}")
    print(f"steered toward Paris:  {second.outputs[0].text!r}")
