"""Are the captured rows right? Hugging Face's own model, with its own hooks, on the same tokens, has the last word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from examples.demo.requests import EVERY_HOOK
from headgate.consumers.reader import StoredCapture


@dataclass(frozen=True, slots=True)
class HookError:
    """How far one hook point's rows are from Hugging Face's.

    Attributes:
        hook: The hook point.
        num_sites: Layers compared.
        num_rows: Rows compared, over all layers.
        scale: Largest element of theirs; the stream of the first token is far longer than the others.
        largest: Largest difference of one element.
        relative: Largest ``|ours - theirs| / |theirs|`` (Euclidean lengths) of one row.
    """

    hook: str
    num_sites: int
    num_rows: int
    scale: float
    largest: float
    relative: float


def compare(model: Path, capture: StoredCapture, dtype: str) -> list[HookError]:
    """Forward the captured tokens once through Hugging Face's model and compare every captured row.

    Needs a capture of all positions: row p of Hugging Face's answer depends on every token up to p.
    """
    theirs = reference(model, torch.from_numpy(capture.token_ids.copy()), getattr(torch, dtype))
    return [
        hook_error(hook, [(capture[site], theirs[site.name]) for site in capture.sites if str(site.hook) == hook])
        for hook in EVERY_HOOK
    ]


def hook_error(hook: str, pairs: list[tuple[Tensor, Tensor]]) -> HookError:
    """Compare ``(ours, theirs)`` of each layer; both ``[rows, hidden]``."""
    differences = [(ours.double() - theirs.double(), theirs.double()) for ours, theirs in pairs]
    return HookError(
        hook=hook,
        num_sites=len(pairs),
        num_rows=sum(len(ours) for ours, _ in pairs),
        scale=max(float(theirs.abs().max()) for _, theirs in differences),
        largest=max(float(difference.abs().max()) for difference, _ in differences),
        relative=max(
            float((difference.norm(dim=-1) / theirs.norm(dim=-1)).max()) for difference, theirs in differences
        ),
    )


def reference(model: Path, token_ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """``{site name: [tokens, hidden]}`` of every hook point of every layer, by forward hooks.

    Args:
        model: Folder of a Llama model.
        token_ids: int64 ``[tokens]``.
        dtype: Of the forward pass.
    """
    logging.disable_progress_bar()
    llama = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True).eval()
    with recorded(llama.model) as rows, torch.inference_mode():
        llama(token_ids[None])
    return rows


@contextmanager
def recorded(model: Any) -> Iterator[dict[str, Tensor]]:
    """Record every hook point of a Hugging Face Llama while it runs."""
    rows: dict[str, Tensor] = {}
    handles = [model.norm.register_forward_hook(keep_output(rows, "final_norm"))]
    for index, layer in enumerate(model.layers):
        handles += [
            layer.register_forward_pre_hook(keep_input(rows, f"{index}.pre_attn"), with_kwargs=True),
            layer.self_attn.register_forward_pre_hook(keep_input(rows, f"{index}.attn_in"), with_kwargs=True),
            layer.self_attn.o_proj.register_forward_pre_hook(keep_input(rows, f"{index}.hook_z"), with_kwargs=True),
            layer.self_attn.register_forward_hook(keep_output(rows, f"{index}.attn_out")),
            layer.post_attention_layernorm.register_forward_pre_hook(
                keep_input(rows, f"{index}.post_attn"), with_kwargs=True
            ),
            layer.mlp.register_forward_pre_hook(keep_input(rows, f"{index}.mlp_in"), with_kwargs=True),
            layer.mlp.register_forward_hook(keep_output(rows, f"{index}.mlp_out")),
            layer.register_forward_hook(keep_output(rows, f"{index}.post_mlp")),
        ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def keep_output(rows: dict[str, Tensor], name: str) -> Callable[[Any, Any, Any], None]:
    """A forward hook that keeps what the module returned."""

    def hook(module: Any, args: Any, output: Any) -> None:
        rows[name] = (output[0] if isinstance(output, tuple) else output)[0].clone()

    return hook


def keep_input(rows: dict[str, Tensor], name: str) -> Callable[[Any, Any, Any], None]:
    """A forward pre-hook that keeps what the module was given."""

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        rows[name] = (args[0] if args else kwargs["hidden_states"])[0].clone()

    return hook
