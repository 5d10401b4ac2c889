"""A Jacobian lens by backward passes: seconds for a short prompt, where `headgate lens fit` takes minutes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from headgate.capture.lens import LensKind, save
from headgate.steering.lenses.commands import SKIPPED

AT_A_TIME = 96
"""Rows of a matrix that are computed together."""


class Read(NamedTuple):
    """What the lens reads after one layer.

    Attributes:
        strongest: The strongest token of each position of the prompt.
        logprob: Of the token that was asked for, after the prompt.
    """

    strongest: list[str]
    logprob: float


def fit_and_read(folder: Path, file: Path, layers: tuple[int, ...], texts: tuple[str, str, str]) -> dict[int, Read]:
    """Fit a lens by Hugging Face's model in float32, write it to a file, and read a prompt by it; in its own process.

    Args:
        folder: The model.
        file: The lens.
        layers: Its layers, ascending.
        texts: One to whose first tokens it is fitted, the prompt, and the token that is asked for.

    Returns:
        What it reads, by layer.
    """
    torch.set_num_threads(1)  # beside other processes, threads that wait for each other take five times as long
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fitted, prompt, (token,) = map(tokenizer.encode, texts)
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    found = jacobians(model, torch.tensor([fitted[: SKIPPED + 3]]), layers)
    save(file, LensKind.JACOBIAN, {layer: matrix.half().numpy() for layer, matrix in found.items()})
    read = {}
    with torch.no_grad():
        for layer, matrix in found.items():
            logprobs = model.lm_head(model.model.norm(states[layer + 1][0] @ matrix.T)).log_softmax(dim=-1)
            read[layer] = Read(tokenizer.batch_decode(logprobs.argmax(dim=-1)[:, None]), float(logprobs[-1, token]))
    return read


def jacobians(model: Any, ids: Tensor, layers: tuple[int, ...]) -> dict[int, Tensor]:
    """The derivative of the mean of the last layer's rows by what is added to each row after a layer.

    Args:
        model: Hugging Face's Llama, whose parameters need no gradients; of no use after that.
        ids: ``[1, tokens]``; rows from `SKIPPED` on count, but for the last. What is added to them leaves those before
            as they are, so these are computed once.
        layers: Ascending.

    Returns:
        ``[hidden, hidden]``, by layer.
    """
    first, last = layers[0], len(model.model.layers) - 1
    before = model.model(ids[:, :SKIPPED]).past_key_values
    fixed = model.model(ids, output_hidden_states=True).hidden_states[first + 1][:, SKIPPED:-1]
    rows: dict[int, Tensor] = {}
    for layer in (*layers[1:], last):
        model.model.layers[layer].register_forward_hook(lambda _, given, out, layer=layer: rows.update({layer: out}))
    model.model.layers = model.model.layers[first + 1 :]  # the others give what they gave
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for start in range(0, model.config.hidden_size, AT_A_TIME):
        past = deepcopy(before)
        past.batch_repeat_interleave(AT_A_TIME)
        rows[first] = fixed.repeat(AT_A_TIME, 1, 1).requires_grad_()
        model.model(inputs_embeds=rows[first], past_key_values=past)
        outputs = rows[last].mean(dim=1)[:, start : start + AT_A_TIME].diagonal().sum()
        by_layer = torch.autograd.grad(outputs, [rows[layer] for layer in layers])
        for layer, by_row in zip(layers, by_layer, strict=True):
            found[layer].append(by_row.sum(dim=1))
    return {layer: torch.cat(found[layer]) for layer in layers}
