"""Every attribute of vLLM that headgate wraps, each with its reason; `plugin.register` installs them.

`other_changes` lists what headgate adds or replaces in other ways. A test compares both with running engines.
"""

from __future__ import annotations

from headgate.capture.engine.core import block_keys, core_calls, engine_core, fan_out, part_services, steps_in_flight
from headgate.capture.engine.frontends import async_llm, input_processor, llm, output_processor, prompt_tokens, startup
from headgate.capture.engine.requests import sampling_params
from headgate.capture.engine.server import openai_routes, retry_after
from headgate.capture.engine.setup import cli_flags, startup_checks
from headgate.capture.engine.setup.patch_set import Patch

_CHAT = "vllm.entrypoints.openai.chat_completion"
_COMPLETION = "vllm.entrypoints.openai.completion"

SERVER_PATCHES = (
    *(
        Patch(
            module=f"{module}.protocol",
            target=f"{request}.to_sampling_params",
            wrap=openai_routes.to_sampling_params,
            why="takes our fields from the body of the request",
            parameters=("self", "max_tokens", "default_sampling_params"),
        )
        for module, request in ((_COMPLETION, "CompletionRequest"), (_CHAT, "ChatCompletionRequest"))
    ),
    Patch(
        module="vllm.entrypoints.openai.responses.protocol",
        target="ResponsesRequest.to_sampling_params",
        wrap=openai_routes.to_sampling_params,
        why="takes our fields from the body of /v1/responses",
        parameters=("self", "default_max_tokens", "default_sampling_params"),
    ),
    Patch(
        module="vllm.entrypoints.openai.responses.serving",
        target="OpenAIServingResponses.create_responses",
        wrap=openai_routes.create_responses,
        why="checks those fields before a stream has begun, for a real HTTP 400; puts results into the response",
        parameters=("self", "request", "raw_request"),
    ),
    Patch(
        module="vllm.entrypoints.openai.responses.serving",
        target="OpenAIServingResponses._generate_with_builtin_tools",
        wrap=openai_routes.generate_response,
        why="checks there what is to be captured of the prompt, for the same reason",
        parameters=("self", "request_id", "engine_input", "sampling_params"),
    ),
    *(
        Patch(
            module=f"vllm.entrypoints.speech_to_text.{task}.serving",
            target=f"OpenAIServing{task.title()}.create_{task}",
            wrap=openai_routes.create_from_audio,
            why=f"refuses our fields in the form of /v1/audio/{task}s, where they would be ignored",
            parameters=("self", "audio_data", "request"),
        )
        for task in ("transcription", "translation")
    ),
    Patch(
        module="vllm.entrypoints.scale_out.token_in_token_out.serving",
        target="ServingTokens.serve_tokens",
        wrap=openai_routes.serve_tokens,
        why="asks clients of /inference/v1/generate for a key to capture, as everywhere",
        parameters=("self", "request", "raw_request"),
    ),
    Patch(
        module="vllm.plugins",
        target="load_endpoint_plugins",
        wrap=retry_after.load_endpoint_plugins,
        why="where VLLM_PLUGINS keeps our routes out, says so to their callers",
        parameters=("supported_tasks",),
    ),
    Patch(
        module=f"{_COMPLETION}.serving",
        target="OpenAIServingCompletion.create_completion",
        wrap=openai_routes.create_completion,
        why="puts 'capture_results' into the response; looks up registered names before a stream has begun",
        parameters=("self", "request", "raw_request"),
    ),
    Patch(
        module=f"{_CHAT}.serving",
        target="OpenAIServingChat.create_chat_completion",
        wrap=openai_routes.create_chat_completion,
        why="the same, and finds the messages of the chat for selectors",
        parameters=("self", "request", "raw_request"),
    ),
)


_INPUT = "vllm.v1.engine.input_processor"
_OUTPUT = "vllm.v1.engine.output_processor"
_CLIENT = "vllm.v1.engine.core_client"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_SERIAL = "vllm.v1.serial_utils"
_CORE = "vllm.v1.engine.core"
_EXTRA_KEYS = ("request", "start_token_idx", "end_token_idx", "start_mm_idx")

PATCHES = (
    Patch(
        module=_CORE,
        target="enable_envs_cache",
        wrap=engine_core.open_noted,
        why="the constructor of an engine core ends with it: opens what is configured there, or refuses to start",
        parameters=(),
    ),
    Patch(
        module=_CORE,
        target="EngineCore.preprocess_add_request",
        wrap=engine_core.preprocess_add_request,
        why="names of modules become content, once, before a prompt's blocks are hashed",
        parameters=("self", "request"),
    ),
    Patch(
        module=_CORE,
        target="EngineCoreProc._handle_client_request",
        wrap=engine_core.handle_client_request,
        why="a request that is refused at the scheduler would end the engine, or leave its reservations held",
        parameters=("self", "request_type", "request"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler.add_request",
        wrap=engine_core.add_request,
        why="requests wait for free slots outside the scheduler",
        parameters=("self", "request"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler.finish_requests",
        wrap=engine_core.finish_requests,
        why="aborts reach the requests that wait outside",
        parameters=("self", "request_ids", "finished_status"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler._preempt_request",
        wrap=part_services.preempt_request,
        why="rows of a request that ran while block keys changed are computed again under the present ones",
        parameters=("self", "request", "timestamp"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler.update_from_output",
        wrap=engine_core.update_from_output,
        why="the part takes what a step read before its tokens are; its notes leave with the requests' outputs",
        parameters=("self", "scheduler_output", "model_runner_output"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler.reset_prefix_cache",
        wrap=steps_in_flight.reset_prefix_cache,
        why="tokens of steps in flight would be dropped, although the rows after them were captured and reported",
        parameters=("self", "reset_running_requests"),
    ),
    Patch(
        module="vllm.v1.core.kv_cache_utils",
        target="generate_block_hash_extra_keys",
        wrap=block_keys.extra_keys,
        why="KV blocks of steered tokens are shared with tokens that were steered alike, and with no others",
        parameters=_EXTRA_KEYS,
    ),
    Patch(
        module="vllm.v1.core.block_pool",
        target="generate_block_hash_extra_keys",
        wrap=block_keys.follow_extra_keys,
        why="the same for a copy imported by name; the one in simple_kv_offload serves connectors, which are refused",
        parameters=_EXTRA_KEYS,
    ),
    Patch(
        module="vllm.sampling_params",
        target="SamplingParams.__repr__",
        wrap=sampling_params.short_repr,
        why="logs and crash dumps print every request's parameters: neither whole requests nor vectors",
        parameters=("self",),
    ),
    Patch(
        module="vllm.engine.arg_utils",
        target="EngineArgs.add_cli_args",
        wrap=cli_flags.add_cli_args,
        why="adds our flags (--capture-consumers, --enable-steering, ...) to vLLM's own commands",
        parameters=("parser",),
        only_refuses=True,
    ),
    Patch(
        module="vllm.engine.arg_utils",
        target="EngineArgs.from_cli_args",
        wrap=cli_flags.from_cli_args,
        why="turns those flags into additional_config; without it they would be read and ignored",
        parameters=("cls", "args"),
        only_refuses=True,
    ),
    Patch(
        module="vllm.engine.arg_utils",
        target="EngineArgs.create_engine_config",
        wrap=startup_checks.create_engine_config,
        why="refuses what cannot be served before any process is started",
        parameters=("self",),
        only_refuses=True,
    ),
    Patch(
        module=_INPUT,
        target="InputProcessor.__init__",
        wrap=input_processor.open_with_engine,
        why="opens headgate's front end with the engine's",
        parameters=("self", "vllm_config"),
    ),
    Patch(
        module=_INPUT,
        target="InputProcessor.process_inputs",
        wrap=input_processor.process_inputs,
        why="writes what a request asks into what is sent to the engine; nothing else is captured or steered",
        parameters=("self", "request_id", "prompt", "params"),
    ),
    Patch(
        module=_SERIAL,
        target="MsgpackEncoder.enc_hook",
        wrap=core_calls.enc_hook,
        why="sends a request's vectors to the engine core in a frame of their own; nothing of ours is sent without it",
        parameters=("self", "obj"),
    ),
    Patch(
        module=_SERIAL,
        target="MsgpackDecoder.ext_hook",
        wrap=core_calls.ext_hook,
        why="receives them there",
        parameters=("self", "code", "data"),
    ),
    Patch(
        module=_CLIENT,
        target="SyncMPClient._send_input",
        wrap=fan_out.send_input,
        why="what the samples of a prompt share, such as vectors, is sent with the first of them alone",
        parameters=("self", "request_type", "request"),
    ),
    Patch(
        module=_CLIENT,
        target="AsyncMPClient._send_input",
        wrap=fan_out.send_input,
        why="the same for `AsyncLLM`, to each of its engine cores",
        parameters=("self", "request_type", "request", "engine"),
    ),
    Patch(
        module=_CLIENT,
        target="AsyncMPClient._ensure_output_queue_task",
        wrap=core_calls.end_calls_with_receiving,
        why="a call into an engine core that ends would stay open, and a server that is asked to end would wait for it",
        parameters=("self",),
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        target="AsyncLLM.add_request",
        wrap=async_llm.add_request,
        why="knows when the samples of a prompt begin and end to be sent",
        parameters=("self", "request_id", "prompt", "params"),
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        target="AsyncLLM.__init__",
        wrap=startup.open_drivers_with_engine,
        why="opens the consumers that live in this process, before there are requests and off the event loop",
        parameters=("self", "vllm_config"),
    ),
    Patch(
        module="vllm.v1.engine.llm_engine",
        target="LLMEngine.__init__",
        wrap=startup.open_drivers_with_engine,
        why="the same",
        parameters=("self", "vllm_config"),
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        target="AsyncLLM.generate",
        wrap=async_llm.generate,
        why="checks requests in the call, for a real HTTP 400, and puts results on the last output",
        parameters=("self", "prompt", "sampling_params", "request_id"),
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        target="AsyncLLM.shutdown",
        wrap=async_llm.shutdown,
        why="closes the result hub and the consumers that live in this process",
        parameters=("self",),
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        target="AsyncLLM.check_health",
        wrap=async_llm.check_health,
        why="/health reports when results of captures can no longer come",
        parameters=("self",),
    ),
    Patch(
        module="vllm.v1.engine.llm_engine",
        target="LLMEngine.add_request",
        wrap=llm.add_request,
        why="checks requests, and remembers whose results to hand out",
        parameters=("self", "request_id", "prompt", "params"),
    ),
    Patch(
        module="vllm.v1.engine.llm_engine",
        target="LLMEngine.step",
        wrap=llm.step,
        why="puts results on finished outputs",
        parameters=("self",),
    ),
    Patch(
        module="vllm.v1.engine.llm_engine",
        target="LLMEngine.abort_request",
        wrap=llm.abort_request,
        why="forgets what an aborted request would have waited for",
        parameters=("self", "request_ids"),
    ),
    Patch(
        module="vllm.entrypoints.llm",
        target="LLM._run_engine",
        wrap=llm.run_engine,
        why="waits once, after the last request, and not once a request",
        parameters=("self",),
    ),
    Patch(
        module="vllm.entrypoints.llm",
        target="LLM._preprocess_chat_one",
        wrap=llm.keep_chat,
        why="remembers the conversation of a prompt, for selectors of one message",
        parameters=("self", "conversation"),
    ),
    *(
        Patch(
            module="vllm.renderers.base",
            target=f"BaseRenderer.{method}",
            wrap=prompt_tokens.render_chat,
            why="beginnings of a chat that selectors look at do not count as sending their images to the engine core",
            parameters=("self", "conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache"),
        )
        for method in ("render_chat", "render_chat_async")
    ),
    Patch(
        module=_OUTPUT,
        target="OutputProcessor.add_request",
        wrap=output_processor.add_request,
        why="notes capturing requests, whose end the engine cannot always see",
        parameters=("self", "request"),
    ),
    Patch(
        module=_OUTPUT,
        target="OutputProcessor.process_outputs",
        wrap=output_processor.process_outputs,
        why="sends the engine how many tokens were kept up to a stop string; keeps notes until there is an output",
        parameters=("self", "engine_core_outputs"),
    ),
    Patch(
        module=_OUTPUT,
        target="OutputProcessor.abort_requests",
        wrap=output_processor.abort_requests,
        why="the same for requests that are aborted",
        parameters=("self", "request_ids"),
    ),
    Patch(
        module="vllm.v1.engine.utils",
        target="CoreEngineProcManager.__init__",
        wrap=startup.open_manager,
        why="engine cores wait for workers as long as their consumers may take to close",
        parameters=("self", "local_engine_count", "start_index", "local_start_index", "vllm_config"),
    ),
    Patch(
        module="vllm.v1.engine.utils",
        target="shutdown",
        wrap=startup.shutdown,
        why="engine cores are killed no earlier than that",
        parameters=("procs", "timeout"),
    ),
    *(
        Patch(
            module=_CLIENT,
            target=f"{client}.shutdown",
            wrap=llm.shutdown,
            why="closes the result hub and the consumers that live in this process",
            parameters=("self",),
        )
        for client in ("InprocClient", "MPClient")
    ),
    Patch(
        module=_CLIENT,
        target="DPLBAsyncMPClient.abort_requests_async",
        wrap=engine_core.route_marks,
        why="with data parallelism, passes those counts on to the engines",
        parameters=("self", "request_ids"),
    ),
    Patch(
        module="vllm.v1.engine.core",
        target="EngineCore._initialize_kv_caches",
        wrap=engine_core.initialize_kv_caches,
        why="refuses to start an engine core or worker that headgate is not installed in",
        parameters=("self", "vllm_config"),
    ),
    Patch(
        module="vllm.v1.engine.core",
        target="EngineCore.abort_requests",
        wrap=engine_core.abort_requests,
        why="takes the front end's counts out of the requests to abort",
        parameters=("self", "request_ids"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler._free_request",
        wrap=engine_core.free_request,
        why="notes a request's tokens and why it ended: the worker sees its id only; frees what `core` keeps for it",
        parameters=("self", "request"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler._update_after_schedule",
        wrap=engine_core.update_after_schedule,
        why="sends those notes to the worker with the finished ids",
        parameters=("self", "scheduler_output"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler.has_finished_requests",
        wrap=engine_core.has_finished_requests,
        why="an idle engine takes one more step while a note is still to be sent",
        parameters=("self",),
    ),
    *SERVER_PATCHES,
)
