"""One request as a picture: how long the residual stream is at each layer and token, and where it turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from examples.demo.gate import THRESHOLD, Gated
from examples.demo.steer import Steered
from headgate.consumers.reader import StoredCapture

mpl.use("Agg")
import matplotlib.pyplot as plt

Float64Array = npt.NDArray[np.float64]

SHOWN_OF_PROMPT, SHOWN_OF_ANSWER = 20, 16
"""Rows in the picture of the gate: the user's message and what ends it, and the beginning of the answer."""


def draw(capture: StoredCapture, model: Path, target: Path) -> None:
    """Draw `post_mlp` of every layer of `capture` into the PNG file `target`."""
    stream = np.stack([capture.numpy(site) for site in capture.sites if str(site.hook) == "post_mlp"])  # [L, N, D]
    tokens = token_labels(capture, model)
    num_prompt = int(capture.is_prefill.sum())
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(17, 7.5), width_ratios=(2.1, 1), layout="constrained", facecolor="white"
    )
    figure.suptitle(f"Residual stream of one chat request, captured while vLLM served it: {model.name}", fontsize=14)
    draw_norms(figure, left, np.linalg.norm(stream.astype(np.float64), axis=-1), tokens, num_prompt)
    draw_similarity(figure, right, layer_similarity(stream[:, 1:].astype(np.float64)))
    figure.savefig(target, dpi=110)
    plt.close(figure)


def draw_moods(steered: Sequence[Steered], layer: int, target: Path) -> None:
    """Draw `Steered.mood` of every answer, layer by layer, into the PNG file `target`."""
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained", facecolor="white")
    first, num_layers = layer + 1, len(steered[0].mood)
    for answer in reversed(steered):  # the legend from top to bottom, as the lines are
        label = f"{answer.strength:+.0f}" if answer.strength else "unsteered"
        axes.plot(range(first, num_layers), answer.mood[first:], marker="o", markersize=4, label=label)
    for height, name in ((0.0, "mean of the\nsad prompts"), (1.0, "mean of the\nglad prompts")):
        axes.axhline(height, color="grey", linewidth=0.8)
        axes.annotate(name, (1.01, height), xycoords=("axes fraction", "data"), color="grey", va="center")
    axes.set_xticks(range(first, num_layers))
    axes.set_xlabel("layer")
    axes.set_ylabel("where the answer's stream lies")
    axes.set_title(f"One question, its answer steered at layer {layer} with a vector of joy, in one batch")
    axes.legend(title="strength")
    figure.savefig(target, dpi=110)
    plt.close(figure)


def draw_gate(gated: Gated, model: Path, target: Path) -> None:
    """Draw the scores of both gated answers by token into the PNG file `target`, shaded where the vector acted."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    figure, panels = plt.subplots(
        len(gated.answers), 1, figsize=(10, 8), sharey=True, layout="constrained", facecolor="white"
    )
    figure.suptitle("One question in two moods, with one gate, in one batch", fontsize=14)
    for axes, mood in zip(panels, gated.answers, strict=True):
        trace, begins = gated.trace(mood), gated.begins[mood]
        range_shown = range(begins - SHOWN_OF_PROMPT, begins + SHOWN_OF_ANSWER)
        shown = [at for at, position in enumerate(trace["positions"]) if position in range_shown]
        tokens = [gated.tokens[mood][trace["positions"][at]] for at in shown]
        axes.plot([gated.scores(mood)[at] for at in shown], marker="o", markersize=4, color="grey")
        decisive, score = shown.index(trace["positions"].index(begins - 1)), gated.decisive_score(mood)
        axes.plot(decisive, score, marker="o", markersize=10, color="tab:red")
        place = {"textcoords": "offset points", "xytext": (-8, 8), "ha": "right", "fontsize": 12}
        axes.annotate(f"{score:+.1f}", (decisive, score), color="tab:red", **place)
        axes.axhline(THRESHOLD, color="black", linewidth=1)
        axes.axvline(decisive + 0.5, color="grey", linestyle=":")
        for x, at in enumerate(shown):
            if gated.applied(mood)[at]:
                axes.axvspan(x - 0.5, x + 0.5, color="tab:green", alpha=0.25, linewidth=0)
        labels = visible(tokenizer.batch_decode([[token] for token in tokens]))
        axes.set_xticks(range(len(shown)), labels, rotation=90, fontsize=10, family="monospace")
        axes.set_xlim(-0.5, len(shown) - 0.5)
        axes.set_ylabel("score of anger", fontsize=11)
        state = (
            "above the threshold: the gate fires (green)"
            if any(gated.applied(mood))
            else "below the threshold: no steering"
        )
        axes.set_title(f"{mood}: the score at the prompt's last token (red) lies {state}", fontsize=12, loc="left")
    figure.savefig(target, dpi=90)
    plt.close(figure)


def draw_norms(figure: Any, axes: Any, norm_LN: Float64Array, tokens: list[str], num_prompt: int) -> None:
    """Heat map of vector lengths, layer by token; the answer begins at the white line."""
    image = axes.imshow(np.log10(norm_LN), origin="lower", aspect="auto", cmap="viridis", interpolation="nearest")
    axes.axvline(num_prompt - 0.5, color="white", linewidth=1.5)
    axes.text(num_prompt - 1, len(norm_LN) - 1.2, "prompt", color="white", ha="right", va="top")
    axes.text(num_prompt, len(norm_LN) - 1.2, "answer", color="white", ha="left", va="top")
    axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=6.5, family="monospace")
    axes.set_ylabel("layer")
    axes.set_title("Length of the stream leaving each layer (post_mlp), by token")
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("log10 of the Euclidean length")


def draw_similarity(figure: Any, axes: Any, similarity_LL: Float64Array) -> None:
    """Heat map of the mean cosine between the stream at two layers."""
    image = axes.imshow(similarity_LL, origin="lower", cmap="magma", interpolation="nearest")
    axes.set_xlabel("layer")
    axes.set_ylabel("layer")
    axes.set_title("Cosine between layers, mean over tokens\n(without the first, an attention sink)")
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)


def layer_similarity(stream_LND: Float64Array) -> Float64Array:
    """``[L, L]``: mean over tokens of the cosine between two layers' vectors of the same token."""
    unit_LND = stream_LND / np.linalg.norm(stream_LND, axis=-1, keepdims=True)
    similarity: Float64Array = np.einsum("and,bnd->ab", unit_LND, unit_LND) / stream_LND.shape[1]
    return similarity


def token_labels(capture: StoredCapture, model: Path) -> list[str]:
    """The text of each row's token, with spaces and line breaks made visible."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    texts = tokenizer.batch_decode([[token] for token in capture.token_ids.tolist()])
    return visible(texts)


def visible(texts: Sequence[str]) -> list[str]:
    """Texts of tokens with spaces and line breaks made visible."""
    return [text.replace("\n", "\\n").replace(" ", "\u2423") for text in texts]
