"""Where there is no whole head, a lens is refused at the start, by what stands in its way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.worker.model_head import VllmHead, find_head
from headgate.capture.schema.errors import UnsupportedError


@pytest.mark.parametrize(
    ("tensor", "pipeline", "lora", "message"),
    [
        (2, 1, None, "--tensor-parallel-size 1 and --pipeline-parallel-size 1, not 2 and 1"),
        (1, 2, None, "not 1 and 2"),
        (1, 1, object(), "start the server without LoRA"),
        (1, 1, None, r"no final norm was found in Linear\.forward"),
    ],
    ids=["tensor", "pipeline", "lora", "norm"],
)
def test_a_worker_without_a_whole_head_says_why(tensor: int, pipeline: int, lora: object, message: str) -> None:
    parallel = SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    config: Any = SimpleNamespace(parallel_config=parallel, lora_config=lora)

    with pytest.raises(UnsupportedError, match=message):
        find_head(config, nn.Linear(2, 2), nn.Linear(2, 2), torch.device("cpu"))


class Processor(nn.Module):
    """As vLLM's `LogitsProcessor`, whose head may be quantized."""

    def __init__(self, *, is_quantized: bool) -> None:
        super().__init__()
        self.head_dtype: torch.dtype | None = None
        self.is_quantized = is_quantized

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        if self.head_dtype is not None and self.is_quantized:
            raise ValueError("only supported for an unquantized lm_head")
        return rows.to(self.head_dtype or rows.dtype) * 3


class Model(nn.Module):
    def __init__(self, processor: nn.Module) -> None:
        super().__init__()
        self.processor, self.norm = processor, nn.Identity()

    def compute_logits(self, rows: torch.Tensor) -> Any:
        return self.processor.compute(rows) if isinstance(self.processor, Processor) else rows * 3


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (Processor(is_quantized=False), None),
        (Processor(is_quantized=True), "only supported for an unquantized lm_head"),
        (nn.Identity(), "this vLLM computes heads in no other"),
    ],
    ids=["plain", "quantized", "older vLLM"],
)
def test_a_head_that_rounds_logits_is_named_in_the_log(
    processor: nn.Module, reason: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_names.LOGITS_PROCESSOR, "get", lambda: Processor)
    model_config = SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: 4)
    model = Model(processor)

    with caplog.at_level("WARNING", logger="headgate"):
        head = VllmHead(SimpleNamespace(model_config=model_config), model, model.norm, torch.device("cpu"))  # type: ignore[arg-type]

    assert head.vocab_size == 4
    logits = head.logits(torch.tensor([[1.0039062, 1, 1, 1]]).bfloat16())
    assert logits.dtype is torch.float32
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (reason is not None)
    assert all(f"computes in bfloat16 alone ({reason}" in text for text in texts)
