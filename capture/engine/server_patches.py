"""The attributes of vLLM's OpenAI-compatible server that headgate wraps; `patch_table` lists them with all others."""

from __future__ import annotations

from headgate.capture.engine.server import openai_routes, retry_after
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
        why="where VLLM_PLUGINS keeps our routes out, says so to those who call them",
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
