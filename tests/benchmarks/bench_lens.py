"""What a lens costs: ``python -m tests.benchmarks.bench_lens [--model FOLDER]``.

For the sizes of Gemma 3 4B, with the logit lens and with a Jacobian lens: milliseconds of the GPU, and microseconds of
the step thread, from rows of one or four layers to the strongest tokens, as the worker computes them. With a model,
which may have random weights, also tokens per second of 16 requests at once, without a lens, with one at one layer of
every token, and at four, in turns. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.lens import LensKind, load, save
from headgate.capture.staging.readouts import BoundReadout, ReadoutJob, RowReader, bind
from headgate.consumers.lens import LensReadout, LensReduction, _Outputs
from tests.fakes.heads import Letters

VOCABULARY, HIDDEN, TOP = 262_144, 2560, 10
ROWS, LAYERS = (16, 64, 512), 4
IN_FLIGHT, SHORT, NUM_TOKENS, PROMPT, ROUNDS = 16, 64, 256, 128, 5


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


def readouts_of(folder: Path, device: torch.device, head: Head) -> list[BoundReadout]:
    """The readouts of four layers, as a worker binds them."""
    save(folder / "j.safetensors", LensKind.JACOBIAN, dict.fromkeys(range(LAYERS), np.eye(HIDDEN, dtype=np.float16)))
    lens, reduction = load(folder / "j.safetensors"), LensReduction(_Outputs(20, 16))
    reduce = cache(lambda shared: shared.with_head(device, head))
    return [
        bind(LensReadout(layer, [lens], reduction), layer, width=HIDDEN, device=device, name="lens", reduce=reduce)
        for layer in range(LAYERS)
    ]


def readout_figures(folder: Path) -> dict[str, dict[str, float]]:
    """GPU's milliseconds, and the step thread's microseconds of one call of all readouts, by lens, layers and rows."""
    device = torch.device("cuda")
    head = Head(device)
    readouts = readouts_of(folder, device, head)
    num_slots = max(ROWS)
    ring = torch.randn(LAYERS * num_slots, HIDDEN, device=device, dtype=head.dtype)
    reader = RowReader([ring], LAYERS * num_slots)
    found = {}
    for count in (64, 128, 256):
        rows = torch.randn(count, HIDDEN, device=device, dtype=head.dtype)
        found[f"head alone, {count} rows"] = call_times(lambda rows=rows: head.logits(rows))
    for number, name in enumerate(("logit", "jacobian")):
        for layers, count in [(1, count) for count in ROWS] + [(LAYERS, 16), (LAYERS, 128)]:
            host = np.full((count, readouts[0].num_arguments), -1, np.int64)
            host[:, :3] = number, 0, TOP
            size = count * readouts[0].num_outputs
            jobs = [
                ReadoutJob(0, readouts[layer], 0, layer * count, count, layer * size, host) for layer in range(layers)
            ]
            index = torch.cat([layer * num_slots + torch.arange(count, device=device) for layer in range(layers)])
            into = torch.empty(layers * size, device=device)

            def put(target: int, rows: Tensor, into: Tensor = into) -> None:
                into[target : target + rows.numel()].view(rows.shape).copy_(rows)

            def call(jobs: list[ReadoutJob] = jobs, index: Tensor = index, put: Any = put) -> None:
                assert not reader.run(jobs, index, put)

            found[f"{name}, {layers} x {count} rows"] = call_times(call)
            assert torch.isfinite(into.view(-1, readouts[0].num_outputs)[:, :TOP]).all()
    return found


def call_times(call: Callable[[], Any]) -> dict[str, float]:
    """Medians of twenty calls: milliseconds of the GPU, and microseconds until the call returns to an idle GPU."""
    gpu, host = [], []
    with torch.inference_mode():
        for _ in range(25):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin = time.perf_counter()
            start.record()
            call()
            end.record()
            host.append(1e6 * (time.perf_counter() - begin))
            end.synchronize()
            gpu.append(start.elapsed_time(end))
    return {"gpu_ms": median(gpu[5:]), "host_us": median(host[5:])}


def tokens_per_s(model: str) -> dict[str, dict[str, list[float]]]:
    """Quartiles of rounds, of 16 requests without a lens, with one at a layer, and at four, in turns.

    ``tokens_per_s`` is of whole answers, from the first prompt to the last result; ``step_ms`` is the time that a
    further token of all 16 takes, from the difference of long and short answers, without prompts and results.
    """
    from headgate.capture import LLM, SamplingParams

    lens: dict[str, Any] = {"capture_consumers": ["lens"], "capture_sites": {"post_mlp": "all"}}
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, **lens)
    num_layers = llm.llm_engine.vllm_config.model_config.hf_text_config.num_hidden_layers
    layers = {
        "plain": [],
        "one layer": [num_layers // 2],
        "four layers": [num_layers * part // LAYERS for part in range(LAYERS)],
    }
    random = np.random.default_rng(0)

    def seconds(name: str, num_tokens: int) -> float:
        wanted = {"lens": {"layers": layers[name], "top": TOP, "positions": "all_generated"}}
        plain: dict[str, Any] = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(**plain, capture=wanted if layers[name] else None)
        prompts = [{"prompt_token_ids": random.integers(5, 500, PROMPT).tolist()} for _ in range(IN_FLIGHT)]
        start = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = time.monotonic() - start
        for output in outputs if layers[name] else ():
            result = output.capture_results["lens"]
            found_rows = len(result.payload["positions"])  # the last token never passes through the model
            assert (result.status, found_rows) == ("ok", num_tokens - 1), (result.status, result.error, found_rows)
        return found

    names = list(layers)
    figures: dict[str, dict[str, list[float]]] = {name: {"tokens_per_s": [], "step_ms": []} for name in names}
    for number in range(ROUNDS + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            short, long = seconds(name, SHORT), seconds(name, NUM_TOKENS)
            if number:  # the first round warms up
                figures[name]["tokens_per_s"].append(IN_FLIGHT * NUM_TOKENS / long)
                figures[name]["step_ms"].append(1e3 * (long - short) / (NUM_TOKENS - SHORT))
    return {name: {key: quantiles(found) for key, found in both.items()} for name, both in figures.items()}


def main() -> None:
    """Print the figures, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, such as `python -m tests.benchmarks.models FOLDER` writes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = {"readouts": readout_figures(Path(folder))}
    for name, value in figures["readouts"].items():
        print(f"{name:>28} {value['gpu_ms']:8.2f} ms {value['host_us']:8.0f} us of the step thread", flush=True)
    print(json.dumps(figures), flush=True)
    torch.cuda.empty_cache()
    if options.model:
        figures["served"] = found = tokens_per_s(options.model)
        for name, value in found.items():
            change = {key: value[key][1] / found["plain"][key][1] - 1 for key in value}
            print(
                f"{name:>28} {value['tokens_per_s'][1]:8.0f} tokens/s ({change['tokens_per_s']:+.1%}), "
                f"{value['step_ms'][1]:6.2f} ms a step ({change['step_ms']:+.1%}); quartiles {value}"
            )
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
