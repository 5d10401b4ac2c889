"""One engine of the memory test: ``python memory_runs.py MODE CACHE``; MODE is stock, steering, capture or both.

Prints one line ``RAN {json}``: bytes of device memory in use (what the device says, beyond what was in use before),
bytes that headgate's parts account for, seconds to start and to compile, and tokens of the KV cache. CACHE is an empty
folder for what vLLM compiles: a cold start.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "stock": {},
    "steering": {"steering": {}},
    "capture": {"capture": {"consumers": [{"name": "logging", "params": {"level": "debug"}}]}},
}
MODES["both"] = {**MODES["steering"], **MODES["capture"]}


def free_bytes() -> int:
    """Of the device; of a machine without one: 0."""
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def device_bytes(worker: Any) -> int:
    """What headgate's parts account for, asked of a worker."""
    from headgate.capture.engine.worker.install import ENGINE_ATTRIBUTE

    return int(getattr(worker, ENGINE_ATTRIBUTE).device_bytes)


def main() -> None:
    """Start, say, end."""
    mode, cache = sys.argv[1:]
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CACHE_ROOT=cache)
    if mode == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    import engine_runs as base

    before, began = free_bytes(), time.perf_counter()
    llm = base.open_engine("graphs", {"headgate": MODES[mode]} if MODES[mode] else {})
    start_s = time.perf_counter() - began
    config = llm.llm_engine.vllm_config
    held = llm.collective_rpc(device_bytes) if mode != "stock" else [0]
    gc.collect()
    if before:
        import torch

        torch.cuda.empty_cache()
    said = {
        "used_bytes": before - free_bytes(),
        "device_bytes": sum(held),
        "start_s": round(start_s, 2),
        "compile_s": round(config.compilation_config.compilation_time, 2),
        "kv_tokens": config.cache_config.num_gpu_blocks,
    }
    print("RAN " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
