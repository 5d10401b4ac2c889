"""Ray places the stages of a pipeline on two nodes: both capture, and the far one answers over TCP.

Needs ``ray[cgraph]``, which nothing else here does. Ray has no CPU devices for vLLM, so the nodes are told that they
have a GPU each, and vLLM that CPUs are such.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.schema.sites import HookPoint
from headgate.consumers.reader import open_captures
from tests.conftest import start_llm, stop_llm
from tests.deadlines import patience
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.steering_cases import sites_of
from tests.engine.tiny_models import tiny_model
from tests.fakes.far_host import FarHost, free_port, second_host

pytestmark = [pytest.mark.engine, pytest.mark.extended]

SITES = {"post_mlp": "all"}
PROMPT = [3 + (7 * i) % 500 for i in range(20)]
NODE = ["-m", "ray.scripts.scripts", "start", "--num-cpus=2", "--num-gpus=1", "--disable-usage-stats", "--block"]
STORE = "--object-store-memory=100000000"
JOINED = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.2)
"""
CPUS_ARE_GPUS = """
import importlib.machinery, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "vllm.platforms.cpu":
            return None
        spec = super().find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two nodes; yields headgate's settings of the network."""
    pytest.importorskip("ray")
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        host, network = second_host(stack, environment, tmp_path_factory)
        shim = tmp_path_factory.mktemp("shim")
        (shim / "sitecustomize.py").write_text(CPUS_ARE_GPUS)
        environment.setenv("PYTHONPATH", os.pathsep.join([str(shim), os.environ.get("PYTHONPATH", "")]))
        environment.setenv("RAY_ADDRESS", f"{host.here}:{free_port()}")
        stack.enter_context(head(host))
        host.start(*NODE, STORE, f"--address={os.environ['RAY_ADDRESS']}", f"--node-ip-address={host.there}")
        subprocess.run([sys.executable, "-c", JOINED, os.environ["RAY_ADDRESS"]], check=True, timeout=patience(120))
        yield network


def head(host: FarHost) -> Any:
    """Start the first node, in a session of its own, with its files where those of the other host are not."""
    port = os.environ["RAY_ADDRESS"].rpartition(":")[2]
    folder = Path(os.environ["TMPDIR"]) / "ray"
    flags = ["--head", f"--port={port}", f"--node-ip-address={host.here}", "--include-dashboard=false"]
    process = subprocess.Popen([sys.executable, *NODE, STORE, *flags, f"--temp-dir={folder}"], start_new_session=True)
    stack = ExitStack()
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return stack


def test_stages_that_ray_placed_on_two_nodes_capture_as_one(cluster: dict[str, Any], tmp_path: Path) -> None:
    from vllm import SamplingParams

    consumers = [
        {"name": "memory", "location": "driver"},
        {"name": "filesystem", "params": {"root": str(tmp_path)}},
    ]
    llm = start_llm(
        model=tiny_model("llama"),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        pipeline_parallel_size=2,
        distributed_executor_backend="ray",
        additional_config={
            "headgate": {"capture": {"consumers": consumers, "sites": SITES}, "network": cluster},
        },
    )
    try:
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=5)
        params.capture = {name: {"hooks": SITES} for name in ("memory", "filesystem")}
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    finally:
        stop_llm(llm)

    expected = HFReference(tiny_model("llama"), "llama").run(PROMPT, list(output.outputs[0].token_ids)).rows
    (written,) = open_captures(tmp_path)
    memory = output.capture_results["memory"]
    assert memory.status == "ok", memory.error
    for site in sites_of(HookPoint.POST_MLP):
        assert relative_error(memory.payload.rows[site], expected[site]) <= 1e-4
        assert relative_error(written.tensor(site), expected[site]) <= 1e-4
