"""The engine that a harvest runs its prompts on: vLLM's `LLM`, or anything that does the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from headgate.capture import message_spans
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.results import CaptureResult, MessageSpan
from headgate.consumers.harvest.prompts import Chat, Prompt, is_chat
from headgate.consumers.harvest.wanted import Task, Wanted


class EngineFacts(NamedTuple):
    """The model that an engine has loaded.

    Attributes:
        model: Its name or folder, as the engine was given it.
        revision: Of its weights; None for a folder that does not name one.
        tokenizer: Name or folder of its tokenizer.
        dtype: ``bfloat16``, ``float16`` or ``float32``: of every row.
        quantization: Of its weights; None if there is none.
        hidden_size: Width of a row.
        max_length: Tokens that it takes, of prompt and answer.
    """

    model: str
    revision: str | None
    tokenizer: str
    dtype: str
    quantization: str | None
    hidden_size: int
    max_length: int


class HarvestEngine(Protocol):
    """Runs prompts and captures their rows. Used by one thread."""

    @property
    def facts(self) -> EngineFacts:
        """The model."""
        ...

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        """The tokens of a prompt.

        Raises:
            RequestError: If the model cannot take it, such as a chat that its template refuses.
        """
        ...

    def messages(self, chat: Chat) -> Sequence[MessageSpan] | None:
        """Where the messages of a chat lie in its tokens; None if the chat template does not show it."""
        ...

    def run(
        self, tasks: Sequence[Task], wanted: Wanted, consumer: str, specs: Sequence[Mapping[str, Any]]
    ) -> list[CaptureResult]:
        """Run prompts and return when their rows have reached the consumer.

        Args:
            tasks: The prompts.
            wanted: How answers are generated.
            consumer: Instance name of a configured consumer.
            specs: For each prompt, what it asks of the consumer.
        """
        ...


class VllmEngine:
    """An `LLM` of vLLM with headgate's capture.

    A chat that ends with an answer is taken as it is; to any other, the head of an answer is added.

    Args:
        llm: `headgate.capture.LLM`, or vLLM's own with ``additional_config``.
    """

    def __init__(self, llm: Any) -> None:
        config = llm.llm_engine.vllm_config.model_config
        self._llm = llm
        self.facts = EngineFacts(
            model=config.model,
            revision=config.revision or getattr(config.hf_config, "_commit_hash", None),
            tokenizer=config.tokenizer,
            dtype=str(config.dtype).removeprefix("torch."),
            quantization=config.quantization,
            hidden_size=config.get_hidden_size(),
            max_length=config.max_model_len,
        )

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        return self._render(prompt, is_open=not is_chat(prompt) or prompt[-1]["role"] != "assistant")

    def messages(self, chat: Chat) -> Sequence[MessageSpan] | None:
        bos = getattr(self._llm.renderer.tokenizer, "bos_token_id", None)
        return message_spans(chat, self.tokens(chat), partial(self._render, is_open=False), bos=bos)

    def _render(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], *, is_open: bool) -> list[int]:
        from headgate.capture import prompt_tokens  # imports vLLM, which is there if an `LLM` is

        return prompt_tokens(self._llm, prompt, add_generation_prompt=is_open)

    def run(
        self, tasks: Sequence[Task], wanted: Wanted, consumer: str, specs: Sequence[Mapping[str, Any]]
    ) -> list[CaptureResult]:
        if wanted.temperature:
            _refuse_seeds_in_chunks(self._llm.llm_engine.vllm_config)
        from headgate.capture import SamplingParams  # imports vLLM, which is there if an `LLM` is

        params = [
            SamplingParams(
                max_tokens=wanted.max_tokens,
                temperature=wanted.temperature,
                seed=task.index if wanted.temperature else None,
                detokenize=False,
                capture={consumer: dict(spec)},
            )
            for task, spec in zip(tasks, specs, strict=True)
        ]
        prompts = [{"prompt_token_ids": list(task.token_ids)} for task in tasks]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.capture_results[consumer] for output in outputs]


def _refuse_seeds_in_chunks(config: Any) -> None:
    """Refuse what vLLM's workers on CPUs die of: a seed, which makes a run repeatable, and a prompt in chunks.

    Raises:
        ConfigError: If prompts may be computed in chunks on a CPU.
    """
    if config.device_config.device_type == "cpu" and config.scheduler_config.enable_chunked_prefill:
        raise ConfigError(
            "temperature: each prompt has a seed, and vLLM on a CPU ends at a prompt with a seed that is computed in "
            "chunks; give --no-enable-chunked-prefill (enable_chunked_prefill=False), or leave temperature at 0"
        )


def engine_of(llm: object) -> HarvestEngine:
    """An engine for whatever a user has: one already, or an `LLM`.

    Raises:
        ConfigError: If it is neither.
    """
    if hasattr(llm, "llm_engine"):
        return VllmEngine(llm)
    if all(hasattr(llm, name) for name in ("facts", "tokens", "messages", "run")):
        return llm  # type: ignore[return-value]
    raise ConfigError(f"expected an LLM of vLLM or a HarvestEngine, got {type(llm).__name__}")
