"""vLLM's front end, engine core and scheduler over a worker without a model; see `fake_worker`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

ENTRY_POINTS = """
[vllm.general_plugins]
fake_worker = tests.fakes.worker_plugin:register

[vllm.capture_consumers]
rows = tests.fakes.consumers:Rows
everything = tests.fakes.consumers:Everything
broken = tests.fakes.consumers:Broken
"""

ENGINE: dict[str, Any] = {
    "block_size": 32,
    "disable_log_stats": True,
    "distributed_executor_backend": "uni",
    "dtype": "bfloat16",
    "enforce_eager": True,
    "load_format": "dummy",
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "worker_cls": "tests.fakes.worker.FakeWorker",
}


@pytest.fixture(scope="session", autouse=True)
def fake_packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed package, for this process and those it starts, that publishes the fakes."""
    site = tmp_path_factory.mktemp("site")
    info = site / "headgate_fakes-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-fakes\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    added = [str(site), str(ROOT)]
    sys.path[:0] = added
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *([before] if before else [])])
    # Binding threads takes vLLM 0.33 a NUMA node for each engine core, and a worker without a model has none to bind.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from headgate.capture.engine.worker import install

    real = install.install
    yield
    install.install = real
    for path in added:
        sys.path.remove(path)


def capture_settings(**settings: Any) -> dict[str, Any]:
    """``additional_config`` with the consumer `rows`, unless others are named."""
    return {"headgate": {"capture": {"consumers": [{"name": "rows"}], "result_timeout_s": 20.0, **settings}}}


def stop(engine: Any) -> None:
    """Shut an engine's core down."""
    engine.engine_core.shutdown()
    gc.collect()
