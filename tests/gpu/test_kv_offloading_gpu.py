"""`tests/engine/test_kv_offloading.py` with vLLM's own copies between the GPU and pinned memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 26,  # memory is not profiled, which engines beside this one would disturb
    "attention_config": {"backend": "TRITON_ATTN"},  # others compute no float32
}


def test_blocks_come_back_to_requests_that_are_steered_alike(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "GPU_TEST_ENGINE": json.dumps(SETTINGS),
        "TRITON_F32_DEFAULT": "ieee",  # by default its products of float32 have TF32's ten bits
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    tests = ROOT / "tests" / "engine" / "test_kv_offloading.py"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--tb=short", str(tests)]

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)

    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-25:])
    assert " passed" in done.stdout
