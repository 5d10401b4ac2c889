"""An SAE trained on the rows of a text while vLLM reads it, and one of its features put to use in the same engine.

Usage: ``.venv/bin/python examples/train_sae.py MODEL_FOLDER PROMPTS OUT_FOLDER [ROWS]``

PROMPTS is a .txt, .jsonl or .parquet file, or a data set of Hugging Face. OUT_FOLDER gets the SAE as SAELens saves it,
and as ``sae.safetensors``, which ``headgate serve --saes`` takes, too.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from headgate.capture.schema.sites import Site
from headgate.consumers.harvest import LiveRows
from headgate.steering import LLM, SamplingParams
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.importing import read_source
from headgate.steering.features.source_coder import Hints

SITE, FEATURES, RATE, SPARSITY = Site.parse("12.post_mlp"), 2048, 1e-3, 0.03
CHAT = [{"role": "user", "content": "Tell me about your day."}]


def train(rows: Iterator[torch.Tensor], count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights of a relu SAE of about so many rows, as SAELens names them, and the activations of the last batch."""
    first = next(rows).float()
    scale, width = first.std(), first.shape[1]  # the SAE learns rows of length 1 in each element
    decoder = torch.nn.functional.normalize(torch.randn(FEATURES, width, generator=torch.manual_seed(0)), dim=1)
    w = {"W_dec": decoder, "W_enc": decoder.T.clone(), "b_enc": torch.zeros(FEATURES), "b_dec": first.mean(0) / scale}
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in w.values()], lr=RATE)
    seen = 0
    for step, batch in enumerate(itertools.chain([first], rows)):
        x = batch.float() / scale
        active = torch.relu((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
        error = (active @ w["W_dec"] + w["b_dec"] - x).square().sum(1).mean()
        loss = error + SPARSITY * (active * w["W_dec"].norm(dim=1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(x)
        if step % 10 == 0 or seen >= count:
            unexplained = float(error.detach() / (x - x.mean(0)).square().sum(1).mean())
            print(f"{seen:>8,} rows: {unexplained:.2f} unexplained, {int((active > 0).sum(1).float().mean())} active")
        if seen >= count:
            break
    factors = {"W_enc": 1 / scale, "W_dec": scale, "b_dec": scale, "b_enc": torch.ones(())}  # to rows as they are
    return {name: (weight.detach() * factors[name]).contiguous() for name, weight in w.items()}, active.detach()


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    out, count = Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 200_000
    sites = {"post_mlp": [SITE.layer]}
    steering = {"sites": sites, "op_sites": sites, "sae_root": str(out)}  # SAEs of this folder may be registered later
    # block_size is what vLLM's CPU attention needs; eager starts sooner.
    engine = {"max_model_len": 1024, "max_num_batched_tokens": 512, "block_size": 32, "enforce_eager": True}
    llm = LLM(sys.argv[1], capture_consumers=["memory"], capture_sites=sites, steering=steering, **engine)

    pool = min(4 * count, 100_000) * 1200  # bytes; a row of SmolLM2 takes 1168 there
    with LiveRows(llm, sys.argv[2], SITE.name, batch_size=256, max_bytes=pool, drop_first=1) as rows:
        weights, active = train(rows.of_one_site(), count)

    (out / "saelens").mkdir(parents=True)
    save_file(weights, out / "saelens" / "sae_weights.safetensors")
    about = {"architecture": "standard", "d_in": weights["W_enc"].shape[0], "d_sae": FEATURES, "dtype": "float32"}
    about |= {"apply_b_dec_to_input": True, "normalize_activations": "none", "metadata": {"hook_name": SITE.name}}
    (out / "saelens" / "cfg.json").write_text(json.dumps(about))
    write_coder(out / "sae.safetensors", read_source(out / "saelens", Hints()), name="mine", path=str(out / "saelens"))
    print(llm.steering.register_sae("mine", out / "sae.safetensors"))

    feature = int(active.amax(0).argmax())
    edit = {"sae": "mine", "feature": feature, "add": 2 * float(active[:, feature].amax())}
    for label, edits in (("as it is", {}), (f"with {feature}", {"steering_features": [edit]})):
        (output,) = llm.chat(CHAT, SamplingParams(max_tokens=24, temperature=0.0, **edits), use_tqdm=False)
        print(f"{label:>12}  {output.outputs[0].text!r}")
