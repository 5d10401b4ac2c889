"""Everything that headgate adds to vLLM, torch and uvicorn, or replaces there, without wrapping it by a `Patch`.

`patch_table` lists the wrapped attributes. A test compares both with what is really there in running engines.
"""

from __future__ import annotations

from typing import NamedTuple

from headgate.capture.engine import vllm_names as names


class Change(NamedTuple):
    """Something that headgate adds to, or replaces in, another package without wrapping it by a `Patch`.

    Attributes:
        name: Module and attribute, or class and attribute of its objects. ``{Worker}`` is any class with that word in
            its name; ``{field}``, in small letters, is any name.
        kind: ``property`` or ``method`` of a class; ``instance``: a method of one object, or its class; ``attribute``:
            an attribute of headgate's own, added to an object; ``value``: a constant of a module; ``registration``: an
            entry of a registry.
        where: The module of headgate that does it.
        why: Its purpose.
    """

    name: str
    kind: str
    where: str
    why: str


_INSTALL = "headgate.capture.engine.worker.install"
_HEAD = "headgate.capture.engine.worker.model_head"
_INDUCTOR = "headgate.capture.engine.compiler.inductor_heuristics"
_FORWARD = "headgate.capture.engine.model.forward_wrappers"
_CORE = "headgate.capture.engine.core"
_FRONT = "headgate.capture.engine.frontends"
_INPUT = "headgate.capture.engine.frontends.input_processor"
_RESULTS = "headgate.capture.engine.requests.capture_frontend"
_ANSWERS = "headgate.capture.engine.server.openai_routes"
_NOTED = "headgate.capture.engine.frontends.output_processor"
_READINGS = "headgate.capture.engine.worker.runner"
_PARAMS = "headgate.capture.engine.requests.sampling_params"

CHANGES = (
    Change(
        f"{names.SAMPLING_PARAMS}.{{field}}",
        *("property", _PARAMS, "fields of a request: capture, steering_vectors and so on, kept in extra_args"),
    ),
    Change(
        f"{names.BEAM_SEARCH_PARAMS}.{{field}}",
        *("property", _PARAMS, "the same fields, refused: beam search can be neither captured nor steered"),
    ),
    Change(
        f"{names.LLM}.{{part}}",
        *("property", "headgate.capture.engine.frontends.lazy_capture", "LLM.capture, LLM.steering and their like"),
    ),
    Change(
        f"{names.ASYNC_LLM}.{{part}}",
        *(
            "property",
            "headgate.capture.engine.frontends.lazy_capture",
            "AsyncLLM.capture, AsyncLLM.steering and their like",
        ),
    ),
    Change(
        f"{names.WORKER_WRAPPER}.load_model",
        *("method", _INSTALL, "installs headgate in a worker right after its model was loaded"),
    ),
    Change(f"{names.WORKER}.headgate_stats", "method", _INSTALL, "worker RPC: counters of every part"),
    Change(f"{names.WORKER}.headgate_call", "method", _INSTALL, "worker RPC: a method of one part"),
    Change(f"{names.WORKER}.headgate_setup", "method", _INSTALL, "worker RPC: what all workers must have alike"),
    Change(
        "{Worker}.compile_or_warm_up_model",
        *("instance", _INSTALL, "self-tests every site once the model is warmed up"),
    ),
    Change("{Worker}.shutdown", "instance", _INSTALL, "closes every part before the worker ends"),
    *(
        Change(
            name, "instance", _HEAD, "notices that the copied parts of the head are old: a lens with tensor parallelism"
        )
        for name in ("{model}.load_weights", "{Worker}.reload_weights", "{Worker}.start_weight_update")
    ),
    Change(
        "{ModelRunner}.{method}",
        *("instance", "headgate.capture.engine.worker.runner", "follows the steps of one model runner"),
    ),
    Change(
        "{layer or norm}.__class__",
        *("instance", "headgate.capture.engine.model.forward_wrappers", "a subclass whose forward runs the actions"),
    ),
    Change(
        "{EngineCore}.step_fn",
        *(
            "instance",
            f"{_CORE}.engine_core",
            "reports who waited too long, and what came ahead of time; ends an engine whose workers no longer agree",
        ),
    ),
    Change(
        "{Scheduler}.has_requests",
        *("instance", f"{_CORE}.steps_in_flight", "launches nothing while the steps in flight are waited for"),
    ),
    Change(
        "{EngineCore}.headgate_call",
        *("instance", "headgate.capture.engine.core.engine_core", "calls from the front end to a part's core"),
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
    Change("{Worker}.headgate_worker", "attribute", _INSTALL, "the parts at work in a worker"),
    Change("{layer or norm}._headgate_{tensor}", "attribute", _FORWARD, "static tensors of the actions of a site"),
    Change("EngineCore._headgate_core", "attribute", f"{_CORE}.engine_core", "the part in an engine core"),
    Change("{Scheduler}._headgate_core", "attribute", f"{_CORE}.engine_core", "the same, for calls of the scheduler"),
    Change("{Scheduler}._headgate_steps", "attribute", f"{_CORE}.steps_in_flight", "steps that were launched"),
    Change("{Scheduler}._headgate_ends", "attribute", f"{_CORE}.engine_core", "requests whose end the worker awaits"),
    Change("SchedulerOutput.headgate_final", "attribute", f"{_CORE}.engine_core", "how requests ended"),
    Change("ModelRunnerOutput.headgate_readings", "attribute", _READINGS, "what the parts read in a step"),
    Change("{Async}._headgate_step", "attribute", _READINGS, "the same, for an output that is not on the host yet"),
    Change("{Async}.__class__", "instance", _READINGS, "a subclass whose get_output completes what it returns"),
    Change("SamplingParams._headgate_block_keys", "attribute", f"{_CORE}.block_keys", "keys of blocks to be hashed"),
    Change("Request._headgate_hashed_with", "attribute", f"{_CORE}.block_keys", "keys of blocks that are hashed"),
    Change("InputProcessor._headgate_front_end", "attribute", _INPUT, "capture where requests are made"),
    Change("InputProcessor._headgate_reader", "attribute", _INPUT, "reads the fields of requests"),
    Change("InputProcessor._headgate_chat", "attribute", _INPUT, "the conversation of the next prompt"),
    Change("OutputProcessor._headgate_watched", "attribute", f"{_FRONT}.output_processor", "requests that capture"),
    Change("OutputProcessor._headgate_is_noted", "attribute", _NOTED, "whether notes are to be taken out"),
    Change("RequestState._headgate_notes", "attribute", _NOTED, "notes about a sample that its next output takes"),
    Change("RequestState.__class__", "instance", _NOTED, "of requests that ask for notes: their outputs have them"),
    Change(
        "RequestOutputCollector.__class__",
        *("instance", _NOTED, "of the same requests: outputs that are merged keep the notes of both"),
    ),
    Change("CompletionOutput._headgate_notes", "attribute", _NOTED, "those of an output, until it is handed out"),
    Change("CompletionOutput.steering_trace", "attribute", _NOTED, "what return_steering_trace asks for; else None"),
    Change(
        "LLMEngine._headgate_pending_results",
        "attribute",
        f"{_FRONT}.llm",
        "results that wait for their request's output",
    ),
    Change("{Client}._headgate_front_end", "attribute", f"{_FRONT}.llm", "closed with the engine core's client"),
    Change("RequestOutput.capture_results", "attribute", _RESULTS, "results of its captures; the class has none"),
    Change("CompletionOutput.capture_results", "attribute", _RESULTS, "those of one of its samples"),
    Change("CompletionOutput.hidden_states", "attribute", _RESULTS, "the tensor that return_hidden_states asks for"),
    Change("{Response}.capture_results", "attribute", _ANSWERS, "the same in answers of the server"),
    Change("{Response}.hidden_states", "attribute", _ANSWERS, "the same in answers of the server"),
    Change("{Choice}.hidden_states", "attribute", _ANSWERS, "the same in answers of the server"),
    Change("{Response}.steering_trace", "attribute", _ANSWERS, "the same in answers of the server"),
    Change("{Choice}.steering_trace", "attribute", _ANSWERS, "the same in answers of the server"),
    Change("GraphLowering.headgate_excluded", "attribute", _INDUCTOR, "buffers that are left out of the heuristics"),
    Change("TritonKernel.headgate_excluded", "attribute", _INDUCTOR, "those among them that a kernel reads"),
    Change(
        "uvicorn.protocols.http.flow_control.HIGH_WATER_LIMIT",
        *("value", "headgate.capture.engine.server.bodies.middleware", "reads more of a long body ahead"),
    ),
)
