"""One engine in a process of its own: ``python one_run.py JOB.json`` prints one line ``RESULT {json}``.

For tests that need a fresh process: compile caches, another model runner. The job says which shims to apply first;
they force paths that vLLM takes on GPUs only, so that a CPU machine exercises them. They are for tests alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def force_vllm_compile() -> None:
    """Let the CPU platform keep CompilationMode.VLLM_COMPILE: piecewise graphs, vLLM's backend and its AOT cache."""
    import dataclasses

    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        wanted, splitting_ops = compilation.mode, compilation.splitting_ops
        original(cls, vllm_config)
        if wanted != CompilationMode.VLLM_COMPILE:
            return
        compilation.mode, compilation.backend = wanted, "inductor"
        compilation.splitting_ops = splitting_ops
        passes = compilation.pass_config
        for field in dataclasses.fields(passes):
            if field.name.startswith(("fuse_", "enable_")) and isinstance(getattr(passes, field.name), bool | None):
                setattr(passes, field.name, False)
        passes.eliminate_noops = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    # The CPU build lacks the custom ops that this pass looks for.
    FixFunctionalizationPass.__call__ = lambda self, graph: None


def force_v2_runner() -> None:
    """Run vLLM's V2 model runner on the CPU: its Triton kernels go through Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return False

    class Backend:
        driver = Driver
        compiler = None

    triton.backends.backends["cpu"] = Backend


SHIMS = {"vllm_compile": force_vllm_compile, "v2_runner": force_v2_runner}


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, run the prompts together and say what came out."""
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], **job["engine"])
    params = []
    for index, _ in enumerate(job["prompts"]):
        made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=job["max_tokens"])
        if job.get("capture"):
            made.capture = job["capture"][index]
        for name, value in job["steering"][index].items() if job.get("steering") else ():
            setattr(made, name, value)
        params.append(made)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "results": [_plain(getattr(output, "capture_results", None)) for output in outputs],
        "runner": type(llm.llm_engine.model_executor.driver_worker.worker.model_runner).__module__,
        "aot": _aot_counts(),
    }


def _plain(results: Any) -> Any:
    if not results:
        return None
    return {
        name: {"status": found.status, "error": found.error, "num_rows": found.num_rows, "payload": found.payload}
        for name, found in results.items()
    }


def _aot_counts() -> dict[str, int]:
    from vllm.compilation.counter import compilation_counter

    return {
        "compiled": compilation_counter.num_aot_compiles,
        "loaded": compilation_counter.num_aot_artifacts_loaded,
    }


def main() -> None:
    """Apply the shims, then serve."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    job = json.loads(Path(sys.argv[1]).read_text())
    for name in job.get("shims", ()):
        SHIMS[name]()
    print("RESULT " + json.dumps(serve(job)), flush=True)


if __name__ == "__main__":
    main()
