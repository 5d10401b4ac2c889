"""What a lens costs: ``python -m tests.benchmarks.bench_lens [--model FOLDER]``.

Milliseconds of the readout of one site, on the GPU, from rows to the strongest tokens, for the sizes of Gemma 3 4B:
with the logit lens and with a Jacobian lens. With a model, which may have random weights, also tokens per second of 16
requests at once, without a lens, and with one at four layers of every token, in turns. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.lens import LensKind, load, save
from headgate.capture.schema.consumer import RowArguments
from headgate.consumers.lens import LensReadout, _Outputs, _Words
from tests.fakes.heads import Letters

VOCABULARY, HIDDEN, TOP = 262_144, 2560, 10
ROWS = (16, 64, 512)
IN_FLIGHT, NUM_TOKENS, PROMPT, ROUNDS = 16, 256, 128, 5


class Head:
    """A norm and a head of random weights, with float32 logits as `VllmHead` has them."""

    def __init__(self, device: torch.device) -> None:
        self.vocab_size, self.dtype = VOCABULARY, torch.bfloat16
        self.vocabulary = Letters(VOCABULARY, has_texts=False)
        self._weight = torch.randn(VOCABULARY, HIDDEN, device=device, dtype=self.dtype) / 50

    def norm(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(rows.to(self.dtype), (HIDDEN,))

    def logits(self, normed: Tensor) -> Tensor:
        return torch.mm(normed, self._weight.t(), out_dtype=torch.float32)


def readout_ms(folder: Path) -> dict[str, float]:
    """Milliseconds of one readout, by lens and rows."""
    device = torch.device("cuda")
    save(folder / "j.safetensors", LensKind.JACOBIAN, {0: np.eye(HIDDEN, dtype=np.float16)})
    readout = LensReadout(0, [load(folder / "j.safetensors")], _Outputs(20, 16), _Words())
    function = readout.with_head(device, Head(device))
    found = {}
    for number, name in enumerate(("logit", "jacobian")):
        for count in ROWS:
            rows = torch.randn(count, HIDDEN, device=device, dtype=torch.float64)
            host = np.full((count, readout.num_arguments), -1, np.int64)
            host[:, :4] = number, 0, TOP, 7
            arguments = RowArguments(host, torch.from_numpy(host).to(device))
            found[f"{name}, {count} rows"] = milliseconds(lambda rows=rows, given=arguments: function(rows, given))
    return found


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of twenty calls, of the GPU's time."""
    times = []
    with torch.inference_mode():
        for _ in range(25):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return median(times[5:])


def tokens_per_s(model: str) -> dict[str, float]:
    """Tokens per second of 16 requests, without a lens and with one."""
    from headgate.capture import LLM, SamplingParams

    sites = {"post_mlp": "all"}
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, capture_consumers=["lens"], capture_sites=sites)
    num_layers = llm.llm_engine.vllm_config.model_config.hf_text_config.num_hidden_layers
    layers = [num_layers * part // 4 for part in range(4)]
    plain: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    wanted = {"lens": {"layers": layers, "top": TOP, "positions": "all_generated"}}
    modes = {"plain": SamplingParams(**plain), "lens": SamplingParams(**plain, capture=wanted)}
    random, times = np.random.default_rng(0), {name: [] for name in modes}  # type: ignore[var-annotated]
    for _ in range(ROUNDS + 1):
        for name, params in modes.items():
            prompts = [{"prompt_token_ids": random.integers(5, 1000, PROMPT).tolist()} for _ in range(IN_FLIGHT)]
            start = time.monotonic()
            llm.generate(prompts, params, use_tqdm=False)
            times[name].append(IN_FLIGHT * NUM_TOKENS / (time.monotonic() - start))
    return {name: median(found[1:]) for name, found in times.items()}


def main() -> None:
    """Print the figures, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, such as `python -m tests.benchmarks.models FOLDER` writes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = {"ms": readout_ms(Path(folder))}
    for name, value in figures["ms"].items():
        print(f"{name:>24} {value:8.2f} ms")
    torch.cuda.empty_cache()
    if options.model:
        figures["tokens_per_s"] = found = tokens_per_s(options.model)
        print(f"{'plain':>24} {found['plain']:8.0f} tokens/s")
        print(f"{'lens at four layers':>24} {found['lens']:8.0f} tokens/s, {found['lens'] / found['plain'] - 1:+.1%}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
