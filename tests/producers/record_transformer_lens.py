"""Rows, an attention pattern and a logit lens of a model as TransformerLens 4 computes them.

``python record_transformer_lens.py MODEL FILE``. ``make test-producers`` runs it where there is TransformerLens; it
does not import headgate. The file has ``tokens`` ``[n]``, ``stream.L`` ``[n, D]`` after layer L, ``attention.L``
``[heads, n, n]``, and ``lens.L.ids`` and ``lens.L.logprobs`` ``[n, k]``, all float32 but for ids.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from transformer_lens import TransformerBridge

TEXT = "The cat sat on the mat. The cat sat on the"
STREAM, ATTENTION, LENS, TOP = (4, 28), (15,), (4, 20, 29), 10


def main(model: str, target: str) -> None:
    """Run the prompt and write what it gave."""
    bridge = TransformerBridge.boot_transformers(model, device="cpu", dtype=torch.float32)
    tokens = bridge.tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens)
        read = cache.logit_lens(
            layers=[layer + 1 for layer in LENS], positions=None, top_k=TOP, return_type="log_probs"
        ).readout
    found = {"tokens": tokens[0]}
    found |= {f"stream.{layer}": cache[f"blocks.{layer}.hook_resid_post"][0] for layer in STREAM}
    found |= {f"attention.{layer}": cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in ATTENTION}
    for place, layer in enumerate(LENS):
        found |= {f"lens.{layer}.ids": read.top_ids[place, 0], f"lens.{layer}.logprobs": read.values[place, 0]}
    save_file({name: values.contiguous() for name, values in found.items()}, target)
    print({name: list(values.shape) for name, values in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
