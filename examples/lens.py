"""The Jacobian lens: what the model is about to say, layer by layer, as a picture; then an answer steered by the lens.

Columns of the picture are tokens of the prompt and of the answer, rows are layers. A cell has the token that the lens
reads most strongly in the stream there, and its probability as the colour. The second answer gets the lens' direction
of a token added at one layer.

``headgate lens fit MODEL_FOLDER TEXT j.safetensors --layer 20 --layer 26 --num-tokens 32 --rounds 1`` makes the file of
the lens, in a minute or two for each layer; ``logit`` in its place is the lens that needs none.

Usage: ``.venv/bin/python examples/lens.py MODEL_FOLDER LENS [PNG or SVG]``
"""

import sys
from math import exp
from typing import Any

from headgate.capture import LLM, SamplingParams

PROMPT, SAID, TOWARD = "Fact: the capital of Japan is", " Tokyo", " Paris"


def shown(token: str) -> str:
    """A token in the picture, where a dollar would begin a formula."""
    return repr(token)[1:-1].replace("$", r"\$")


def draw(grid: dict[str, Any], columns: list[str], path: str) -> None:
    """Draw a lens' payload: the strongest token of each cell, over the probability that the lens gives to it."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    plt.rcParams["svg.fonttype"] = "none"  # text that can be searched, if PATH ends in .svg
    layers = list(grid["layers"])[::-1]
    found = [[exp(best[0]) for best in grid["layers"][layer]["logprobs"]] for layer in layers]
    figure, axes = plt.subplots(figsize=(1 + 0.9 * len(columns), 1.2 + 0.3 * len(layers)), layout="constrained")
    drawn = axes.imshow(found, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, layer in enumerate(layers):
        for column, (token, *_) in enumerate(grid["layers"][layer]["tokens"]):
            colour = "white" if found[row][column] > 0.5 else "black"
            axes.text(column, row, shown(token), ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(columns)), map(shown, columns), fontsize=8)
    axes.set_yticks(range(len(layers)), layers, fontsize=8)
    axes.set(ylabel="layer", title="what the lens reads")
    figure.colorbar(drawn, label="probability")
    figure.savefig(path, dpi=110)


def answer(llm: LLM, last: int, vectors: Any) -> tuple[float, str]:
    """Return the log-probability that the answer begins with `TOWARD`, and the answer."""
    read = {"lens": {"lens": "logit", "layers": last, "positions": "last_prompt", "top": 0, "tokens": [TOWARD]}}
    params = SamplingParams(temperature=0, max_tokens=4, capture=read, steering_vectors=vectors)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    # The logit lens after the last layer is the model's own head.
    ((logprob,),) = output.capture_results["lens"].payload["layers"][str(last)]["token_logprobs"]
    return logprob, output.outputs[0].text


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    folder, file, *picture = sys.argv[1:]
    name, lenses = ("logit", {}) if file == "logit" else ("j", {"j": file})
    consumer = {"name": "lens", "params": {"lenses": lenses}}
    # block_size is what vLLM's CPU attention needs; eager starts sooner.
    llm = LLM(folder, capture_consumers=[consumer], steering={"lenses": lenses}, block_size=32, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=4, capture={"lens": {"lens": name, "top": 1, "tokens": [SAID]}})
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    grid = output.capture_results["lens"].payload
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    asked = len(output.prompt_token_ids) - 1
    for layer, read in grid["layers"].items():
        cells = " ".join(f"{best[0]!r:.10}".ljust(10) for best in read["tokens"])
        print(f"{layer:>5}  {cells}  log-probability of {SAID!r} {read['token_logprobs'][asked][0]:.2f}")
    if picture:
        draw(grid, [llm.get_tokenizer().decode([token]) for token in tokens], picture[0])
    last = llm.llm_engine.model_config.hf_text_config.num_hidden_layers - 1
    layer = min(map(int, grid["layers"]), key=lambda layer: abs(layer - 4 * last // 5))
    toward = [{"lens": name, "token": TOWARD, "at": f"{layer}.post_mlp", "scale": 25.0}]
    for how, vectors in (("as it is", None), (f"steered toward {TOWARD!r} at layer {layer}", toward)):
        logprob, text = answer(llm, last, vectors)
        print(f"{how}: log-probability of {TOWARD!r} {logprob:.2f}, answer {text!r}")
