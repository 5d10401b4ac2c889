"""Attributes of vLLM's modules and classes that headgate wraps, each with its reason; `plugin.register` installs them.

Methods of one object are wrapped where the object is met: those of the model runner, by which a worker follows its
steps, in `headgate.capture.engine.worker.runner`.

`vllm_names` says where their modules and classes are in each release.

`other_changes` lists what headgate adds or replaces in other ways. A test compares both with running engines.
"""

from __future__ import annotations

from functools import partial

from headgate.capture.engine import vllm_names as names
from headgate.capture.engine.contracts import core_calls
from headgate.capture.engine.core import block_keys, engine_core, fan_out, part_services, steps_in_flight
from headgate.capture.engine.frontends import async_llm, input_processor, llm, output_processor, prompt_tokens, startup
from headgate.capture.engine.requests import sampling_params
from headgate.capture.engine.server import openai_routes, retry_after
from headgate.capture.engine.setup import cli_flags, startup_checks
from headgate.capture.engine.setup.patch_set import Patch

SERVER_PATCHES = (
    *(
        Patch(
            target=request.member("to_sampling_params"),
            wrap=openai_routes.to_sampling_params,
            why="takes our fields from the body of the request",
            parameters=("self", "max_tokens", "default_sampling_params"),
        )
        for request in (names.COMPLETION_REQUEST, names.CHAT_REQUEST)
    ),
    Patch(
        target=names.RESPONSES_REQUEST.member("to_sampling_params"),
        wrap=openai_routes.to_sampling_params,
        why="takes our fields from the body of /v1/responses",
        parameters=("self", "default_max_tokens", "default_sampling_params"),
    ),
    Patch(
        target=names.RESPONSES_ROUTE.member("create_responses"),
        wrap=openai_routes.create_responses,
        why="checks those fields before a stream has begun, for a real HTTP 400; puts results into the response",
        parameters=("self", "request", "raw_request"),
    ),
    Patch(
        target=names.RESPONSES_ROUTE.member("_generate_with_builtin_tools"),
        wrap=openai_routes.generate_response,
        why="checks there what is to be captured of the prompt, for the same reason",
        parameters=("self", "request_id", "engine_input", "sampling_params"),
    ),
    *(
        Patch(
            target=route.member(f"create_{task}"),
            wrap=openai_routes.create_from_audio,
            why=f"refuses our fields in the form of /v1/audio/{task}s, where they would be ignored",
            parameters=("self", "audio_data", "request"),
        )
        for task, route in (("transcription", names.TRANSCRIPTION_ROUTE), ("translation", names.TRANSLATION_ROUTE))
    ),
    Patch(
        target=names.TOKENS_ROUTE.member("serve_tokens"),
        wrap=openai_routes.serve_tokens,
        why="asks clients of /inference/v1/generate for a key to capture, as everywhere",
        parameters=("self", "request", "raw_request"),
    ),
    Patch(
        target=names.LOAD_ENDPOINT_PLUGINS,
        wrap=retry_after.load_endpoint_plugins,
        why="where VLLM_PLUGINS keeps our routes out, says so to their callers",
        parameters=("supported_tasks",),
    ),
    Patch(
        target=names.COMPLETION_ROUTE.member("create_completion"),
        wrap=openai_routes.create_completion,
        why="puts 'capture_results' into the response; looks up registered names before a stream has begun",
        parameters=("self", "request", "raw_request"),
    ),
    Patch(
        target=names.CHAT_ROUTE.member("create_chat_completion"),
        wrap=partial(openai_routes.create_completion, is_chat=True),
        why="the same, and finds the messages of the chat for selectors",
        parameters=("self", "request", "raw_request"),
    ),
)


_EXTRA_KEYS = ("request", "start_token_idx", "end_token_idx", "start_mm_idx")

PATCHES = (
    Patch(
        target=names.ENGINE_CORE_END_OF_INIT,
        wrap=engine_core.open_noted,
        why="the constructor of an engine core ends with it: opens what is configured there, or refuses to start",
        parameters=(),
    ),
    Patch(
        target=names.ENGINE_CORE.member("preprocess_add_request"),
        wrap=engine_core.preprocess_add_request,
        why="names of modules become content, once, before a prompt's blocks are hashed",
        parameters=("self", "request"),
    ),
    Patch(
        target=names.ENGINE_CORE_PROCESS.member("_handle_client_request"),
        wrap=engine_core.handle_client_request,
        why="a request that is refused at the scheduler would end the engine, or leave its reservations held",
        parameters=("self", "request_type", "request"),
    ),
    Patch(
        target=names.SCHEDULER.member("add_request"),
        wrap=engine_core.add_request,
        why="requests wait for free slots outside the scheduler",
        parameters=("self", "request"),
    ),
    Patch(
        target=names.SCHEDULER.member("finish_requests"),
        wrap=engine_core.finish_requests,
        why="aborts reach the requests that wait outside",
        parameters=("self", "request_ids", "finished_status"),
    ),
    Patch(
        target=names.SCHEDULER.member("_preempt_request"),
        wrap=part_services.preempt_request,
        why="rows of a request that ran while block keys changed are computed again under the present ones",
        parameters=("self", "request", "timestamp"),
    ),
    Patch(
        target=names.SCHEDULER.member("update_from_output"),
        wrap=engine_core.update_from_output,
        why="the part takes what a step read before its tokens are; its notes leave with the requests' outputs",
        parameters=("self", "scheduler_output", "model_runner_output"),
    ),
    Patch(
        target=names.SCHEDULER.member("reset_prefix_cache"),
        wrap=steps_in_flight.reset_prefix_cache,
        why="tokens of steps in flight would be dropped, although the rows after them were captured and reported",
        parameters=("self", "reset_running_requests"),
    ),
    Patch(
        target=names.BLOCK_EXTRA_KEYS,
        wrap=block_keys.extra_keys,
        why="KV blocks of steered tokens are shared with tokens that were steered alike, and with no others",
        parameters=_EXTRA_KEYS,
    ),
    Patch(
        target=names.BLOCK_EXTRA_KEYS_COPY,
        wrap=block_keys.follow_extra_keys,
        why="the same for a copy imported by name; the one in simple_kv_offload serves connectors, which are refused",
        parameters=_EXTRA_KEYS,
    ),
    Patch(
        target=names.OFFLOAD_STATE.member("update_offload_keys"),
        wrap=block_keys.offload_keys,
        why="blocks of a request whose steering changed are offloaded under the keys that they have now",
        parameters=("self",),
    ),
    Patch(
        target=names.SAMPLING_PARAMS.member("__repr__"),
        wrap=sampling_params.short_repr,
        why="logs and crash dumps print every request's parameters: neither whole requests nor vectors",
        parameters=("self",),
    ),
    Patch(
        target=names.ENGINE_ARGS.member("add_cli_args"),
        wrap=cli_flags.add_cli_args,
        why="adds our flags (--capture-consumers, --enable-steering, ...) to vLLM's own commands",
        parameters=("parser",),
        only_refuses=True,
    ),
    Patch(
        target=names.ENGINE_ARGS.member("from_cli_args"),
        wrap=cli_flags.from_cli_args,
        why="turns those flags into additional_config; without it they would be read and ignored",
        parameters=("cls", "args"),
        only_refuses=True,
    ),
    Patch(
        target=names.ENGINE_ARGS.member("create_engine_config"),
        wrap=startup_checks.create_engine_config,
        why="refuses what cannot be served before any process is started",
        parameters=("self",),
        only_refuses=True,
    ),
    Patch(
        target=names.INPUT_PROCESSOR.member("__init__"),
        wrap=input_processor.open_with_engine,
        why="opens headgate's front end with the engine's",
        parameters=("self", "vllm_config"),
    ),
    Patch(
        target=names.INPUT_PROCESSOR.member("process_inputs"),
        wrap=input_processor.process_inputs,
        why="writes what a request asks into what is sent to the engine; nothing else is captured or steered",
        parameters=("self", "request_id", "prompt", "params"),
    ),
    Patch(
        target=names.ENCODER.member("enc_hook"),
        wrap=core_calls.enc_hook,
        why="sends a request's vectors to the engine core in a frame of their own; nothing of ours is sent without it",
        parameters=("self", "obj"),
    ),
    Patch(
        target=names.DECODER.member("ext_hook"),
        wrap=core_calls.ext_hook,
        why="receives them there",
        parameters=("self", "code", "data"),
    ),
    Patch(
        target=names.SYNC_CLIENT.member("_send_input"),
        wrap=fan_out.send_input,
        why="what the samples of a prompt share, such as vectors, is sent with the first of them alone",
        parameters=("self", "request_type", "request"),
    ),
    Patch(
        target=names.ASYNC_CLIENT.member("_send_input"),
        wrap=fan_out.send_input,
        why="the same for `AsyncLLM`, to each of its engine cores",
        parameters=("self", "request_type", "request", "engine"),
    ),
    Patch(
        target=names.ASYNC_CLIENT.member("_ensure_output_queue_task"),
        wrap=core_calls.end_calls_with_receiving,
        why="a call into an engine core that ends would stay open, and a server that is asked to end would wait for it",
        parameters=("self",),
    ),
    Patch(
        target=names.ASYNC_LLM.member("add_request"),
        wrap=async_llm.add_request,
        why="knows when the samples of a prompt begin and end to be sent",
        parameters=("self", "request_id", "prompt", "params"),
    ),
    Patch(
        target=names.ASYNC_LLM.member("__init__"),
        wrap=startup.open_drivers_with_engine,
        why="opens the consumers that live in this process, before there are requests and off the event loop",
        parameters=("self", "vllm_config"),
    ),
    Patch(
        target=names.LLM_ENGINE.member("__init__"),
        wrap=startup.open_drivers_with_engine,
        why="the same",
        parameters=("self", "vllm_config"),
    ),
    Patch(
        target=names.ASYNC_LLM.member("generate"),
        wrap=async_llm.generate,
        why="checks requests in the call, for a real HTTP 400, and puts results on the last output",
        parameters=("self", "prompt", "sampling_params", "request_id"),
    ),
    Patch(
        target=names.ASYNC_LLM.member("shutdown"),
        wrap=async_llm.shutdown,
        why="closes the result hub and the consumers that live in this process",
        parameters=("self",),
    ),
    Patch(
        target=names.ASYNC_LLM.member("check_health"),
        wrap=async_llm.check_health,
        why="/health reports when results of captures can no longer come",
        parameters=("self",),
    ),
    Patch(
        target=names.LLM_ENGINE.member("add_request"),
        wrap=llm.add_request,
        why="checks requests, and remembers whose results to hand out",
        parameters=("self", "request_id", "prompt", "params"),
    ),
    Patch(
        target=names.LLM_ENGINE.member("step"),
        wrap=llm.step,
        why="puts results on finished outputs",
        parameters=("self",),
    ),
    Patch(
        target=names.LLM_ENGINE.member("abort_request"),
        wrap=llm.abort_request,
        why="forgets what an aborted request would have waited for",
        parameters=("self", "request_ids"),
    ),
    Patch(
        target=names.LLM.member("_run_engine"),
        wrap=llm.run_engine,
        why="waits once, after the last request, and not once a request",
        parameters=("self",),
    ),
    Patch(
        target=names.LLM.member("_preprocess_chat_one"),
        wrap=llm.keep_chat,
        why="remembers the conversation of a prompt, for selectors of one message",
        parameters=("self", "conversation"),
    ),
    *(
        Patch(
            target=names.RENDERER.member(method),
            wrap=prompt_tokens.render_chat,
            why="beginnings of a chat that selectors look at do not count as sending their images to the engine core",
            parameters=("self", "conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache"),
        )
        for method in ("render_chat", "render_chat_async")
    ),
    Patch(
        target=names.OUTPUT_PROCESSOR.member("add_request"),
        wrap=output_processor.add_request,
        why="notes capturing requests, whose end the engine cannot always see",
        parameters=("self", "request"),
    ),
    Patch(
        target=names.OUTPUT_PROCESSOR.member("process_outputs"),
        wrap=output_processor.process_outputs,
        why="sends the engine how many tokens were kept up to a stop string; keeps notes until there is an output",
        parameters=("self", "engine_core_outputs"),
    ),
    Patch(
        target=names.OUTPUT_PROCESSOR.member("abort_requests"),
        wrap=output_processor.abort_requests,
        why="the same for requests that are aborted",
        parameters=("self", "request_ids"),
    ),
    Patch(
        target=names.CORE_PROCESSES.member("__init__"),
        wrap=startup.open_manager,
        why="engine cores wait for workers as long as their consumers may take to close",
        parameters=("self", "local_engine_count", "start_index", "local_start_index", "vllm_config"),
    ),
    Patch(
        target=names.SHUT_DOWN_PROCESSES,
        wrap=startup.shutdown,
        why="engine cores are killed no earlier than that",
        parameters=("procs", "timeout"),
    ),
    *(
        Patch(
            target=client.member("shutdown"),
            wrap=llm.shutdown,
            why="closes the result hub and the consumers that live in this process",
            parameters=("self",),
        )
        for client in (names.IN_PROCESS_CLIENT, names.CORE_CLIENT)
    ),
    Patch(
        target=names.BALANCED_CLIENT.member("abort_requests_async"),
        wrap=engine_core.route_marks,
        why="with data parallelism, passes those counts on to the engines",
        parameters=("self", "request_ids"),
    ),
    Patch(
        target=names.ENGINE_CORE.member("_initialize_kv_caches"),
        wrap=engine_core.initialize_kv_caches,
        why="refuses to start an engine core or worker that headgate is not installed in",
        parameters=("self", "vllm_config"),
    ),
    Patch(
        target=names.ENGINE_CORE.member("abort_requests"),
        wrap=engine_core.abort_requests,
        why="takes the front end's counts out of the requests to abort",
        parameters=("self", "request_ids"),
    ),
    Patch(
        target=names.SCHEDULER.member("_free_request"),
        wrap=engine_core.free_request,
        why="notes a request's tokens and why it ended: the worker sees its id only; frees what `core` keeps for it",
        parameters=("self", "request"),
    ),
    Patch(
        target=names.SCHEDULER.member("_update_after_schedule"),
        wrap=engine_core.update_after_schedule,
        why="sends those notes to the worker with the finished ids",
        parameters=("self", "scheduler_output"),
    ),
    Patch(
        target=names.SCHEDULER.member("has_finished_requests"),
        wrap=engine_core.has_finished_requests,
        why="an idle engine takes one more step while a note is still to be sent",
        parameters=("self",),
    ),
    *SERVER_PATCHES,
)
