"""Tensor and pipeline parallel workers: the stream is captured once, by the stages that own its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headgate.capture.sites import Site
from headgate.consumers.reader import open_captures
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.tiny_models import tiny_model

HOOKS = ("pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_mlp")
SITES: dict[str, Any] = {**dict.fromkeys(HOOKS, "all"), "final_norm": "all"}
PROMPTS = [[3 + (7 * i) % 500 for i in range(40)], [9], [3 + (11 * i) % 500 for i in range(17)]]
NUM_OUTPUT = 5


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tensor", "pipeline"]
)
def test_rows_of_two_ranks_equal_the_solo_run(ranks, tmp_path, monkeypatch):
    from vllm import SamplingParams

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers on a machine with one NUMA node
    consumers = [{"name": "memory"}, {"name": "filesystem", "params": {"root": str(tmp_path)}}]
    llm = start_llm(
        model=tiny_model("llama"),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_batched_tokens=32,
        distributed_executor_backend="mp",
        additional_config={"headgate": {"capture": {"consumers": consumers, "sites": SITES}}},
        **ranks,
    )
    try:
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT)
        params.capture = {"memory": {"hooks": SITES}, "filesystem": {"hooks": SITES}}
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        stats = llm.collective_rpc("headgate_stats")
    finally:
        stop_llm(llm)

    num_stages = ranks.get("pipeline_parallel_size", 1)
    assert sum(found["capture"] is not None for found in stats) == num_stages
    reference = HFReference(tiny_model("llama"), "llama")
    assert len(list(tmp_path.rglob("*.safetensors"))) == num_stages * len(PROMPTS)
    captures = {capture.metadata["client_request_id"]: capture for capture in open_captures(tmp_path)}
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference.run(prompt, list(output.outputs[0].token_ids)).rows
        assert_all_rows(output, expected, num_rows=len(prompt) + NUM_OUTPUT - 1)
        assert output.capture_results["filesystem"].status == "ok"
        capture = captures[output.request_id]
        assert {site.name for site in capture.sites} == {site.name for site in expected}
        for site, rows in expected.items():
            assert relative_error(capture.tensor(site.name), rows) <= 1e-4, site


def assert_all_rows(output: Any, expected: dict[Site, torch.Tensor], num_rows: int) -> None:
    result = output.capture_results["memory"]
    assert result.status == "ok", result.error
    assert result.payload.positions.tolist() == list(range(num_rows))
    assert set(result.payload.sites) == set(expected)
    for site, rows in expected.items():
        assert relative_error(result.payload.rows[site], rows) <= 1e-4, site
