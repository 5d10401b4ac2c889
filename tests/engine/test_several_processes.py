"""Consumers in two capture processes, and one in the worker, write the same rows of the same requests of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headgate.consumers.reader import open_captures
from tests.conftest import start_llm, stop_llm
from tests.engine.tiny_models import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.extended]

NAMES = ("first", "second", "here")
NUM_REQUESTS, NUM_TOKENS = 6, 5


def wanted(index: int) -> dict[str, object]:
    return {"hooks": {"post_mlp": "all"}, "request_id": f"r{index}"}


def run(root: Path) -> tuple[Any, Any, list[psutil.Process]]:
    """The outputs, the counters of each consumer, and the capture processes, once the engine has ended."""
    consumers: list[dict[str, Any]] = [
        {"name": "filesystem", "instance_name": name, "params": {"root": str(root / name)}} for name in NAMES
    ]
    consumers[-1]["location"] = "engine"
    capture = {"consumers": consumers, "sites": {"post_mlp": "all"}, "processes": 2}
    headgate = {"headgate": {"capture": capture}}
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128}
    llm = start_llm(in_process=True, model=tiny_model("llama"), additional_config=headgate, **settings)
    try:
        from headgate.capture import SamplingParams

        params = [
            SamplingParams(max_tokens=NUM_TOKENS, detokenize=False, capture=dict.fromkeys(NAMES, wanted(index)))
            for index in range(NUM_REQUESTS)
        ]
        prompts = [{"prompt_token_ids": [1, 2, 3 + index]} for index in range(NUM_REQUESTS)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        children = psutil.Process().children()
        beside = [child for child in children if "headgate.capture.capture_process" in child.cmdline()]
        (stats,) = llm.collective_rpc("headgate_stats")
    finally:
        stop_llm(llm)
    return outputs, stats["capture"]["consumers"], beside


def test_consumers_of_several_processes_and_of_the_worker_write_the_same(tmp_path: Path) -> None:
    outputs, counters, beside = run(tmp_path)

    results = [output.capture_results for output in outputs]
    assert [{name: result.status for name, result in each.items()} for each in results] == [
        dict.fromkeys(NAMES, "ok")
    ] * NUM_REQUESTS
    assert len(beside) == 2
    assert not any(child.is_running() for child in beside)
    counted = [(each["instance"], each["rows"], each["requests"]) for each in counters]
    assert counted == [(name, NUM_REQUESTS * (3 + NUM_TOKENS - 1), NUM_REQUESTS) for name in NAMES]
    first, second, here = ({each.request_id: each for each in open_captures(tmp_path / name)} for name in NAMES)
    assert set(first) == {f"r{index}" for index in range(NUM_REQUESTS)}
    for request_id, captured in first.items():
        for site in captured.sites:
            for other in (second[request_id], here[request_id]):
                assert np.array_equal(captured[site.name], other[site.name])
