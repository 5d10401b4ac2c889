"""What needs a process of its own: compile caches shared by servers with and without headgate, and the V2 runner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from headgate.capture.schema.sites import INNER_HOOKS, HookPoint, Site
from headgate.consumers.reader import open_captures
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.steering_cases import Tiers, sites_of, vectors
from tests.engine.tiny_models import LAYERS, tiny_model
from tests.fresh_python import fresh_cache, run_python

ROOT = Path(__file__).parents[2]
SITES: dict[str, Any] = dict.fromkeys((hook.value for hook in HookPoint if hook not in INNER_HOOKS), "all")
PROMPTS = [[1, *((7 * i + 3) % 500 + 5 for i in range(20))], [1, *((11 * i + 3) % 500 + 5 for i in range(45))], [9]]
EVERYWHERE = sites_of(*(hook for hook in HookPoint if hook not in INNER_HOOKS))
STEERED = [
    (PROMPTS[1], Tiers(base=vectors(EVERYWHERE, 1, 0.5))),
    (PROMPTS[0], Tiers(prefill=vectors(EVERYWHERE, 2, 0.5), decode=vectors(EVERYWHERE, 3, 0.5))),
]
REQUESTS = [*((prompt, Tiers()) for prompt in PROMPTS), *STEERED]
"""Those of a server with headgate: the first as without it, and steered ones."""

NUM_OUTPUT = 6
ENGINE = {
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "block_size": 32,
}
COMPILED = {
    "compilation_config": {
        "mode": 3,
        "compile_sizes": [],
        "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False},
    }
}


@pytest.fixture(scope="module", autouse=True)
def no_thread_of_tqdm() -> Iterator[None]:
    """Hugging Face's bars would start one here, and only a process without threads is forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "monitor_interval", 0)
        yield


def settings(root: Path) -> dict[str, Any]:
    consumer = {"name": "filesystem", "params": {"root": str(root)}}
    return {"headgate": {"capture": {"consumers": [consumer], "sites": SITES}, "steering": {"sites": SITES}}}


def run_job(tmp_path: Path, job: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run one engine in a process without another before it, and return what it printed."""
    file = tmp_path / "job.json"
    document = {"prompts": PROMPTS, "max_tokens": NUM_OUTPUT, **job}
    file.write_text(json.dumps(document, default=lambda vector: vector.tolist()))
    done = run_python(
        [str(ROOT / "tests" / "engine" / "one_run.py"), str(file)],
        environment=environment,
        may_fork="v2_runner" not in job["shims"],  # Triton's switch counts when it is imported
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def requests(tag: str) -> dict[str, Any]:
    """`REQUESTS`, with everything captured."""
    return {
        "prompts": [prompt for prompt, _ in REQUESTS],
        "capture": [
            {"filesystem": {"hooks": SITES, "tag": tag, "request_id": f"request-{index}"}}
            for index in range(len(REQUESTS))
        ],
        "steering": [tiers.fields() for _, tiers in REQUESTS],
    }


def assert_rows_match(root: Path, tag: str, tokens: list[list[int]]) -> None:
    """Every row on disk equals Hugging Face's on the same tokens, with the same vectors; so do the tokens."""
    reference = HFReference(tiny_model("llama"), "llama")
    found = {entry.metadata["request_id"]: entry for entry in open_captures(root) if entry.metadata["tag"] == tag}
    assert len(found) == len(REQUESTS)
    for index, (prompt, tiers) in enumerate(REQUESTS):
        entry, expected = found[f"request-{index}"], reference.run(prompt, tokens[index], tiers.steering())
        assert expected.next_tokens[len(prompt) - 1 :].tolist() == tokens[index]
        num_rows = len(prompt) + NUM_OUTPUT - 1
        assert torch.as_tensor(entry.positions).tolist() == list(range(num_rows))
        for site in expected.rows:
            assert relative_error(entry.tensor(site.name), expected.rows[site]) <= 1e-4, site


@pytest.mark.parametrize("shim", ["plain", "v2_runner"])
def test_both_model_runners_attribute_rows_alike(tmp_path, shim):
    root = tmp_path / "captures"
    job = {
        "model": str(tiny_model("llama")),
        "engine": {**ENGINE, "enforce_eager": True, "additional_config": settings(root)},
        **requests("runner"),
        "shims": [shim] if shim != "plain" else [],
    }

    result = run_job(tmp_path, job)

    assert result["runner"].startswith("vllm.v1.worker.cpu.") == (shim == "v2_runner")
    assert [found["filesystem"]["status"] for found in result["results"]] == ["ok"] * len(REQUESTS)
    assert_rows_match(root, "runner", result["tokens"])


def test_one_compile_cache_serves_off_on_off_and_other_sites_without_mixing_graphs(tmp_path):
    """The graph on disk of a server without headgate must never be loaded by one with it, nor the other way round."""
    root = tmp_path / "captures"
    cache = {
        "VLLM_CACHE_ROOT": str(fresh_cache(tmp_path / "cache")),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    base = {"model": str(tiny_model("llama")), "shims": ["vllm_compile"]}
    off = {**base, "engine": {**ENGINE, **COMPILED}}
    on = {**base, "engine": {**ENGINE, **COMPILED, "additional_config": settings(root)}, **requests("on")}
    elsewhere = tmp_path / "elsewhere"
    moved = {**base, "engine": {**ENGINE, **COMPILED, "additional_config": settings(elsewhere)}, **requests("moved")}

    first, captured, second, again = (run_job(tmp_path, job, **cache) for job in (off, on, off, moved))

    assert first["tokens"] == captured["tokens"][: len(PROMPTS)] == second["tokens"]
    assert captured["tokens"] == again["tokens"]
    assert_rows_match(root, "on", captured["tokens"])
    assert_rows_match(elsewhere, "moved", again["tokens"])
    assert (first["aot"]["compiled"], first["aot"]["loaded"]) == (1, 0)
    assert (captured["aot"]["compiled"], captured["aot"]["loaded"]) == (1, 0), "a graph without sites was loaded"
    assert second["aot"]["loaded"] == 1, "the first server's graph is no longer found"
    assert again["aot"]["loaded"] == 1, "another output folder forced a compilation"


def test_layers_of_the_tiny_model_are_what_the_test_assumes():
    assert Site.parse(f"{LAYERS - 1}.post_mlp") in HFReference(tiny_model("llama"), "llama").run([3, 4], [5]).rows
