"""An engine without a model: its rows follow from the prompt's name and the position, and go to real consumers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from headgate.capture.schema.errors import ConsumerError, RequestError
from headgate.capture.schema.results import CaptureResult, MessageSpan
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest
from headgate.consumers.harvest import EngineFacts, PromptSet, Wanted, open_prompts
from headgate.consumers.harvest.prompts import Chat, Prompt
from headgate.consumers.harvest.wanted import Task
from headgate.consumers.memory import CapturedRows, MemoryConsumer
from tests.fakes.capturing import Capturing, spec_context

FACTS = EngineFacts(
    model="example-model",
    revision="abc123",
    tokenizer="example-tokenizer",
    dtype="bfloat16",
    quantization=None,
    hidden_size=EXAMPLE_MODEL.hidden_size,
    max_length=64,
)
ROW_BYTES = 2 * EXAMPLE_MODEL.hidden_size


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


def prompt_file(path: Path, lengths: Sequence[int]) -> PromptSet:
    """Tokenized prompts of these lengths."""
    path.write_bytes(b"".join(msgspec.json.encode([7] * length) + b"\n" for length in lengths))
    return open_prompts(str(path))


class Unrenderable(str):
    """A prompt that no engine can take."""

    __slots__ = ()


class FakeEngine:
    """Runs prompts; see `HarvestEngine`. A text has a token for each character.

    Args:
        files: The consumer `filesystem` that rows go to; None gives them in the results, as `memory` does.
        kill_after: Prompts whose rows are written before the process is killed; None lets it live.
        aborts: Whether the prompt that ran at the kill is written as one that was aborted.
    """

    def __init__(self, files: Capturing | None = None, *, kill_after: int | None = None, aborts: bool = False) -> None:
        self.facts = FACTS
        self.held_bytes = 0
        self.peak_bytes = 0
        self.ran: list[int] = []
        self._files = files
        self._kill_after = kill_after
        self._aborts = aborts

    def tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Unrenderable):
            raise RequestError("messages", "the template refuses")
        return list(range(len(prompt)))

    def messages(self, chat: Chat) -> list[MessageSpan] | None:
        """A token for each message of a chat, and none for a chat whose first message is a tool's."""
        if chat[0]["role"] == "tool":
            return None
        return [MessageSpan(role=one["role"], start=at, stop=at + 1, token_ids=[at]) for at, one in enumerate(chat)]

    def run(
        self, tasks: Sequence[Task], wanted: Wanted, consumer: str, specs: Sequence[Mapping[str, Any]]
    ) -> list[CaptureResult]:
        return [self._one(task, wanted, spec) for task, spec in zip(tasks, specs, strict=True)]

    def _one(self, task: Task, wanted: Wanted, spec: Mapping[str, Any]) -> CaptureResult:
        is_last = len(self.ran) == self._kill_after
        if is_last and not self._aborts:
            raise Killed
        output = 1 + task.index * 5 % wanted.max_tokens
        request = self._request(task, spec, output, "abort" if is_last else "length")
        if self._files is None:
            payload = self._kept(CapturedRows(request.expected()))
        elif is_last and self._files.params.get("keep_aborted") is False:
            with suppress(ConsumerError):  # as its result says
                payload = self._files.feed.whole(request)
        else:
            payload = self._files.feed.whole(request)
        if is_last:
            raise Killed
        self.ran.append(task.index)
        return CaptureResult(status="ok", payload=payload, num_rows=len(request.wanted()))

    def _request(self, task: Task, spec: Mapping[str, Any], output: int, status: str) -> ExampleRequest:
        length = len(task.token_ids)
        if status == "abort":
            length, output = (length + 1) // 2, 1  # in the middle of its prompt
        shape: dict[str, Any] = {"prompt": length, "output": output, "status": status}
        if self._files is not None:
            return self._files.request(spec, client_id=task.name, engine_id=task.name, **shape)
        parsed = MemoryConsumer.validate_client_spec(spec, spec_context({}, task.name))
        return ExampleRequest(parsed, task.name, **shape)

    def _kept(self, rows: CapturedRows) -> CapturedRows:
        num_bytes = len(rows) * len(rows.sites) * ROW_BYTES
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(rows, self._drop, num_bytes)
        return rows

    def _drop(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
