"""Capture and steering at every layer of an FP8 model and of requests with a LoRA adapter.

Each engine in a process of its own, four at once, with three layers of Llama-3-8B's width and random weights made here.
Requests that ask for nothing get stock's tokens and logprobs bit for bit, beside others that capture, steer and use the
adapter. What was added lies between the rows around it; the rows of the final norm give the engine's own logprobs;
all equal those of an eager run, and LoRA rows those of Hugging Face's model with the adapter merged. Needs
20 GB of GPU memory. To try them without a GPU: GPU_TEST_SIZES (JSON, entries of config.json) makes the model smaller,
GPU_TEST_KINDS chooses, and GPU_TEST_TIMEOUT_S gives the engines more time.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lora_fp8_runs import STRENGTH, is_plain, is_steered, vectors
from side_by_side import run_modes

from headgate.capture.engine.commands.verify import RANDOM_WEIGHTS
from headgate.capture.schema.sites import HookPoint, Site
from tests.benchmarks.models import write_model
from tests.engine.hf_reference import Reference, Steering, own_process, reference_rows, row_cosines
from tests.engine.lora_adapter import merge, write_adapter

HERE = Path(__file__).parent
RUNS = HERE / "lora_fp8_runs.py"
TIMEOUT_S = int(os.environ.get("GPU_TEST_TIMEOUT_S", "200"))
SIZES = {"num_hidden_layers": 3, "vocab_size": 32000} | json.loads(os.environ.get("GPU_TEST_SIZES", "{}"))
NUM_COMPARED = 6
MIN_COSINE = {"fp8": 0.97, "lora": 0.999, "merged": 0.99}
"""An FP8 value that falls on the other side of a rounding differs by 6 %: behind three layers, 0.988 was seen between a
graph's kernels and an eager run's. Merged weights are rounded to bfloat16 once more: 0.998 was seen. Another row's
cosine is under a half."""
UNDECIDED = 0.25
"""Two tokens whose logprobs are nearer may change places."""
KINDS = tuple(os.environ.get("GPU_TEST_KINDS", "fp8 lora").split())

Requests = list[dict[str, Any]]


class Runs(NamedTuple):
    """What the engines saw.

    Attributes:
        model: Folder of the model.
        seen: By kind and mode.
        merged: Hugging Face's rows with the adapter merged, for the first captured requests of the LoRA run.
        unmerged: The same without the adapter.
    """

    model: Path
    seen: dict[str, dict[str, Any]]
    merged: list[Reference]
    unmerged: list[Reference]

    def requests(self, run: str) -> Requests:
        """The requests of one run."""
        found: Requests = self.seen[run]["requests"]
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    config, model = folder / "config", folder / "model"
    write_model("llama3-8b", config, **SIZES)
    command = [sys.executable, "-m", RANDOM_WEIGHTS, str(config), str(model)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    adapter = write_adapter(model, folder / "adapter")
    usual = {"GPU_TEST_MODEL": str(model)}
    environments = {"fp8": usual, "lora": usual | {"GPU_TEST_ADAPTER": str(adapter)}}

    def run(kind: str) -> dict[str, dict[str, Any]]:
        environment = environments[kind]
        seen = run_modes(RUNS, (f"{kind}-stock", f"{kind}-graphs"), folder, TIMEOUT_S, **environment)
        replay = {"GPU_TEST_REPLAY": str(folder / f"{kind}-graphs.pt")}
        return seen | run_modes(RUNS, (f"{kind}-eager",), folder, TIMEOUT_S, **environment, **replay)

    with ThreadPoolExecutor(len(KINDS)) as pool:
        seen = {name: found for kind in pool.map(run, KINDS) for name, found in kind.items()}
    if "lora" not in KINDS:
        return Runs(model, seen, [], [])
    asked = [(entry["prompt"], entry["tokens"], steering_of(index)) for index, entry in compared(seen)]
    with own_process() as executor:
        both = [
            executor.submit(reference_rows, path, "llama", torch.bfloat16, asked).result()
            for path in (merge(model, adapter, folder / "merged"), model)
        ]
    return Runs(model, seen, *both)


def compared(seen: dict[str, dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """The first requests of the LoRA run that captured, with their indices."""
    found = enumerate(seen["lora-graphs"]["requests"])
    return [(index, entry) for index, entry in found if not is_plain(index)][:NUM_COMPARED]


def steering_of(index: int) -> Steering:
    """What Hugging Face adds for a request."""
    if not is_steered(index):
        return Steering()
    rows = {Site(layer, HookPoint.POST_MLP): row for layer, row in enumerate(added(index))}
    return Steering(prefill=rows, decode=rows)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def added(index: int) -> torch.Tensor:
    """What a request adds behind each layer, ``[num_layers, hidden]``; zeros if it does not steer."""
    made = torch.from_numpy(vectors(index, SIZES["num_hidden_layers"], SIZES.get("hidden_size", 4096)))
    return made if is_steered(index) else torch.zeros_like(made)


def test_requests_that_ask_for_nothing_get_stocks_tokens_and_logprobs_bit_for_bit(runs, kind):
    pairs = list(zip(runs.requests(f"{kind}-stock"), runs.requests(f"{kind}-graphs"), strict=True))
    plain = [pair for index, pair in enumerate(pairs) if is_plain(index)]

    assert len(plain) > 6
    assert [ours["tokens"] for _, ours in plain] == [stock["tokens"] for stock, _ in plain]
    assert [ours["logprobs"] for _, ours in plain] == [stock["logprobs"] for stock, _ in plain]


def test_captured_requests_are_complete_and_only_steered_ones_say_something_else(runs, kind):
    pairs = list(zip(runs.requests(f"{kind}-stock"), runs.requests(f"{kind}-graphs"), strict=True))

    for index, (stock, ours) in enumerate(pairs):
        if is_plain(index):
            continue
        assert ours["status"] == "ok", ours["error"]
        num_rows = len(ours["prompt"]) + len(ours["tokens"]) - 1
        assert ours["positions"].tolist() == list(range(num_rows))
        assert ours["token_ids"].tolist() == (ours["prompt"] + ours["tokens"])[:num_rows]
        is_other = ours["tokens"] != stock["tokens"] if is_steered(index) else is_contradicted(stock, ours)
        assert is_other == is_steered(index), f"request {index}"


def is_contradicted(stock: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether the first token that differs is one that stock would not nearly have chosen.

    vLLM's LoRA kernels add parts of a sum in the order in which programs end (atomics), so that the last bits of
    requests with an adapter differ from run to run, in stock too.
    """
    for chosen, got, logprobs in zip(stock["tokens"], ours["tokens"], stock["logprobs"], strict=True):
        if got != chosen:
            by_token = dict(logprobs)
            return by_token[chosen] - by_token.get(got, -math.inf) > UNDECIDED
    return False


def test_what_was_added_lies_between_the_rows_around_it(runs, kind):
    """A row is taken before the addition at its site, and the next layer's input after it."""
    for index, request in enumerate(runs.requests(f"{kind}-graphs")):
        for layer in range(SIZES["num_hidden_layers"] - 1) if not is_plain(index) else ():
            before, after = (request["rows"][name].float() for name in (f"{layer}.post_mlp", f"{layer + 1}.pre_attn"))
            error = float((after - before - added(index)[layer]).abs().max())
            assert error <= 0.05 * STRENGTH + 2**-6 * float(after.abs().max()), f"request {index}, layer {layer}"


def test_final_norm_rows_give_the_engines_own_logprobs(runs, kind):
    head = lm_head(runs.model)
    for index, request in enumerate(runs.requests(f"{kind}-graphs")):
        if is_plain(index):
            continue
        rows = request["rows"]["final_norm"][len(request["prompt"]) - 1 :]
        found = (rows.float() @ head.float().T).log_softmax(-1)
        for row, step in zip(found, request["logprobs"], strict=True):
            for token, logprob in step:
                assert abs(float(row[token]) - logprob) < 0.1, f"request {index}"


def lm_head(model: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    tensors = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return tensors["lm_head.weight"]


def test_rows_under_graphs_equal_those_of_an_eager_run(runs, kind):
    pairs = zip(runs.requests(f"{kind}-graphs"), runs.requests(f"{kind}-eager"), strict=True)
    for index, (ours, eager) in enumerate(pairs):
        for site in ours["rows"] if not is_plain(index) else ():
            cosine = row_cosines(ours["rows"][site], eager["rows"][site]).min()
            assert cosine >= MIN_COSINE[kind], f"request {index}, {site}: {cosine:.4f}"


@pytest.mark.skipif("lora" not in KINDS, reason="GPU_TEST_KINDS")
def test_lora_rows_equal_hugging_faces_with_the_adapter_merged(runs):
    last = Site(SIZES["num_hidden_layers"] - 1, HookPoint.POST_MLP)
    for (index, request), merged, unmerged in zip(compared(runs.seen), runs.merged, runs.unmerged, strict=True):
        for name, rows in request["rows"].items():
            cosine = row_cosines(rows, merged.rows[Site.parse(name)]).min()
            assert cosine >= MIN_COSINE["merged"], f"request {index}, {name}: {cosine:.4f}"
        with_it, without = ((request["rows"][last.name] - found.rows[last]).norm() for found in (merged, unmerged))
        assert with_it < 0.2 * without, f"request {index}: the adapter moved nothing"


def test_every_site_ran_in_every_forward(runs, kind):
    (stats,) = runs.seen[f"{kind}-graphs"]["stats"]

    for part in ("capture", "steering"):
        counts = set(stats[part]["run_counts"].values())
        assert len(counts) == 1
        assert counts.pop() > 16
