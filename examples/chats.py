"""A chat looked at message by message: how glad each token is, by a direction that other chats gave.

Usage: ``.venv/bin/python examples/chats.py MODEL_FOLDER [PNG]``

It prints the mean of each message and of the answer; PNG gets a picture of all tokens.
"""

import sys
from typing import Any

import torch

from headgate.capture import LLM, CaptureHandle, SamplingParams

LAYER = 20
SITE = f"{LAYER}.post_mlp"
TOPICS = ("the weather", "my morning", "my work", "the train ride", "dinner with friends", "a letter from home")
GLAD, SAD = (
    "I feel wonderful and full of joy when I think about",
    "I feel terrible and full of sorrow when I think about",
)
CHAT = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "My sister visits us today! I am so happy and excited."},
    {"role": "assistant", "content": "How lovely! Enjoy the day with her."},
    {"role": "user", "content": "She had an accident on the way. I am scared and I cannot stop crying."},
]


def means(llm: Any, mood: str) -> torch.Tensor:
    """The mean row of the user's message, without the tokens of the template, for each topic."""
    chats = [[{"role": "user", "content": f"{mood} {topic}."}] for topic in TOPICS]
    words = {"role": "user", "start": 3, "stop": -2}
    _, handles = llm.capture(chats, SamplingParams(max_tokens=1), sites=[SITE], positions=words, use_tqdm=False)
    return torch.stack([handle[SITE].double().mean(0) for handle in handles])


def draw(handle: CaptureHandle, scores: torch.Tensor, tokens: list[str], path: str) -> None:
    """A bar for each token, in the colour of its message's role."""
    import matplotlib.pyplot as plt

    colours = {"system": "tab:gray", "user": "tab:blue", "assistant": "tab:orange"}
    shown = ["lightgray"] * len(tokens)  # what the template puts between messages
    for message in handle.messages:
        shown[message.start : message.stop] = [colours[message.role]] * (message.stop - message.start)
    answer = len(scores) - len(handle.generated[SITE])
    shown[answer:] = ["tab:red"] * (len(tokens) - answer)
    plt.figure(figsize=(14, 3.6))
    plt.bar(range(len(tokens)), scores, color=shown)
    plt.xticks(range(len(tokens)), tokens, rotation=90, fontsize=7)
    plt.axhline(0, color="black", linewidth=0.5)
    plt.margins(x=0.005)
    plt.ylabel("sad            glad")
    for name, colour in (*colours.items(), ("answer", "tab:red")):
        plt.bar(0, 0, color=colour, label=name)
    plt.legend(ncols=4, loc="upper right", fontsize=8)
    plt.tight_layout()
    plt.savefig(path, dpi=110)


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    settings = {"max_model_len": 512, "block_size": 32, "enforce_eager": True}  # as vLLM's CPU attention needs it
    llm = LLM(sys.argv[1], capture_consumers=["memory"], capture_sites={"post_mlp": [LAYER]}, **settings)
    glad, sad = means(llm, GLAD).mean(0), means(llm, SAD).mean(0)
    unit, middle = (glad - sad) / (glad - sad).norm(), (glad + sad) / 2

    (output,), (handle,) = llm.capture(
        [CHAT], SamplingParams(max_tokens=24, temperature=0.0), sites=[SITE], use_tqdm=False
    )
    rows = handle.fetch()
    scores = (rows[SITE].double() - middle) @ unit
    scores[0] = 0  # an attention sink, whose row is as long as a hundred others
    tokens = [llm.get_tokenizer().decode(token) for token in rows.token_ids]
    for message in handle.messages:
        words = slice(tokens.index("\n", message.start) + 1, message.stop - 2)  # without the template's tokens
        print(f"{message.role:>9} {scores[words].mean():+6.2f}  {''.join(tokens[words])!r}")
    print(f"   answer {scores[len(scores) - len(handle.generated[SITE]) :].mean():+6.2f}  {output.outputs[0].text!r}")
    if sys.argv[2:]:
        draw(handle, scores, tokens, sys.argv[2])
