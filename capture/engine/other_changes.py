"""Everything that headgate adds to vLLM, torch and uvicorn, or replaces there, without wrapping it by a `Patch`.

`patch_table` lists the wrapped attributes. A test compares both with what is really there in running engines.
"""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """Something that headgate adds to, or replaces in, another package without wrapping it by a `Patch`.

    Attributes:
        name: Module and attribute; a field of ours or a part's name stands for ``{...}``.
        kind: ``property`` or ``method`` of a class; ``instance``: an attribute of an object, or its class; ``value``: a
            constant of a module; ``registration``: an entry of a registry.
        where: The module of headgate that does it.
        why: Its purpose.
    """

    name: str
    kind: str
    where: str
    why: str


_WORKER = "vllm.v1.worker.worker_base"
_INSTALL = "headgate.capture.engine.worker.install"
_INDUCTOR = "headgate.capture.engine.compiler.inductor_heuristics"
_PARAMS = "headgate.capture.engine.requests.sampling_params"

CHANGES = (
    Change(
        "vllm.sampling_params.SamplingParams.{field}",
        *("property", _PARAMS, "fields of a request: capture, steering_vectors and so on, kept in extra_args"),
    ),
    Change(
        "vllm.sampling_params.BeamSearchParams.{field}",
        *("property", _PARAMS, "the same fields, refused: beam search can be neither captured nor steered"),
    ),
    Change(
        "vllm.entrypoints.llm.LLM.{part}",
        *("property", "headgate.capture.engine.frontends.engine_handles", "LLM.steering and its like"),
    ),
    Change(
        "vllm.v1.engine.async_llm.AsyncLLM.{part}",
        *("property", "headgate.capture.engine.frontends.engine_handles", "AsyncLLM.steering and its like"),
    ),
    Change(
        f"{_WORKER}.WorkerWrapperBase.load_model",
        *("method", _INSTALL, "installs headgate in a worker right after its model was loaded"),
    ),
    Change(f"{_WORKER}.WorkerBase.headgate_stats", "method", _INSTALL, "worker RPC: counters of every part"),
    Change(f"{_WORKER}.WorkerBase.headgate_call", "method", _INSTALL, "worker RPC: a method of one part"),
    Change(
        "{worker}.compile_or_warm_up_model",
        *("instance", _INSTALL, "self-tests every site once the model is warmed up"),
    ),
    Change("{worker}.shutdown", "instance", _INSTALL, "closes every part before the worker ends"),
    Change(
        "{model runner}.{method}",
        *("instance", "headgate.capture.engine.worker.runner", "follows the steps of one model runner"),
    ),
    Change(
        "{decoder layer, norm}.__class__",
        *("instance", "headgate.capture.engine.model.forward_wrappers", "a subclass whose forward runs the actions"),
    ),
    Change(
        "{EngineCore}.headgate_call",
        *("instance", "headgate.capture.engine.core.core_startup", "calls from the front end to a part's core"),
    ),
    Change(
        "{EngineCore}.step_fn",
        *("instance", "headgate.capture.engine.core.engine_core", "ends an engine whose workers no longer agree"),
    ),
    Change(
        "torch._inductor.codegen.common.CSEProxy.load",
        *("method", _INDUCTOR, "loads of headgate's buffers do not count in the choice of a kernel's blocks"),
    ),
    Change(
        "torch._inductor.codegen.simd_kernel_features.MemoryEstimator.remove_kernel_local",
        *("method", _INDUCTOR, "nor in the estimate of the memory that a kernel moves"),
    ),
    Change(
        "torch._inductor.codegen.triton.TritonKernel.codegen_kernel",
        *("method", _INDUCTOR, "keeps stock's blocks, and rewrites loads of kernels with headgate's buffers"),
    ),
    Change(
        "torch._inductor.lowering.lowerings",
        *("registration", "headgate.capture.engine.compiler", "lowerings of headgate's own custom operators"),
    ),
    Change("torch.ops.headgate", "registration", "headgate.capture.engine.compiler", "headgate's custom operators"),
    Change(
        "uvicorn.protocols.http.flow_control.HIGH_WATER_LIMIT",
        *("value", "headgate.capture.engine.server.body_middleware", "reads more of a long body ahead"),
    ),
)
