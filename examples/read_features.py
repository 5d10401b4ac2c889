"""The ten strongest features of each token of an answer, with their labels.

Usage: ``.venv/bin/python examples/read_features.py MODEL_FOLDER``

The SAE is made on the spot, so that its features need no interpretation: a feature for each word of the model's own
output head, read at the last layer, of which the 32 strongest are active. A published SAE takes its place with
``saes={"sae": "PATH[@SITE]"}``, and its labels with ``headgate sae labels``.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from headgate.capture import LLM, SamplingParams
from headgate.steering.features.labels import write_labels

QUESTION = "Which animals live in the sea? Answer in one sentence."


def make_sae(model: Path, folder: Path) -> str:
    """Write an SAE and its labels in SAELens's format; return its site."""
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float()
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    words = [token for token, text in enumerate(texts) if text.startswith(" ") and text[1:].isalpha()]
    encoder = head[words] * weights["model.norm.weight"].float()  # the final norm's gain; its length is the SAE's norm
    width, count = encoder.shape[1], len(words)
    folder.mkdir()
    tensors = {"W_enc": encoder.T.contiguous(), "W_dec": head[words].contiguous()}
    tensors |= {"b_enc": torch.zeros(count), "b_dec": torch.zeros(width)}
    save_file(tensors, folder / "sae_weights.safetensors")
    about = {"architecture": "topk", "k": 32, "d_in": width, "d_sae": count, "dtype": "float32", "metadata": {}}
    about |= {"apply_b_dec_to_input": False, "normalize_activations": "constant_norm_rescale"}
    (folder / "cfg.json").write_text(json.dumps(about))
    write_labels(folder, {number: texts[token].strip() for number, token in enumerate(words)})
    return f"{config['num_hidden_layers'] - 1}.post_mlp"


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    model = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        site = make_sae(model, Path(folder) / "words")
        saes = {"words": f"{folder}/words@{site}"}
        # block_size is what vLLM's CPU attention needs; eager starts sooner.
        llm = LLM(
            str(model),
            capture_consumers=[{"name": "features", "params": {"saes": saes}}],
            capture_sites={"post_mlp": [int(site.partition(".")[0])]},
            **{"max_model_len": 1024, "block_size": 32, "enforce_eager": True, "dtype": "float32"},
        )
        wanted = {"features": {"positions": "all_generated", "top": 10}}
        params = SamplingParams(temperature=0.0, max_tokens=24, capture=wanted)
        (output,) = llm.chat([[{"role": "user", "content": QUESTION}]], params, use_tqdm=False)

    tokenizer, found = AutoTokenizer.from_pretrained(model), output.capture_results["features"].payload
    print(output.outputs[0].text)
    tokens = output.outputs[0].token_ids
    for token, ids, values in zip(tokens, found["ids"], found["values"], strict=False):
        shown = ", ".join(f"{found['labels'][str(one)]} {value:.1f}" for one, value in zip(ids, values, strict=True))
        print(f"{tokenizer.decode([token])!r:>14}  {shown}")
