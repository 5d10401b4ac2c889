"""Where there is no whole head, a lens is refused at the start, by what stands in its way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.worker.model_head import VllmHead, find_head
from headgate.capture.schema.errors import UnsupportedError


@pytest.mark.parametrize(
    ("lora", "message"),
    [(object(), "start the server without LoRA"), (None, r"no final norm was found in Linear\.forward")],
    ids=["lora", "norm"],
)
def test_a_worker_without_a_head_for_every_row_says_why(lora: object, message: str) -> None:
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    config: Any = SimpleNamespace(parallel_config=parallel, lora_config=lora)

    with pytest.raises(UnsupportedError, match=message):
        find_head(config, nn.Linear(2, 2), nn.Linear(2, 2), torch.device("cpu"))


VOCABULARY, HIDDEN, RANKS = 10, 4, 2
"""Six rows of the head on each rank: two of the last one's are padding."""
WHOLE = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(1))
PARTS = WHOLE.view(RANKS, 6, HIDDEN)
BIASES = torch.randn(RANKS, 6, generator=torch.Generator().manual_seed(2))


class RankProcessor(nn.Module):
    """As vLLM's `LogitsProcessor` on a rank that has a part of the vocabulary."""

    org_vocab_size = VOCABULARY

    def forward(self, head: nn.Module, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.tanh(self._get_logits(rows, head, bias)) * 3

    def _get_logits(self, rows: torch.Tensor, head: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = nn.functional.linear(rows, head.weight, bias)
        return (self._gather_logits(logits) if head.tp_size > 1 else logits)[..., : self.org_vocab_size]

    def _gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the other ranks take no part")


class RankModel(nn.Module):
    def __init__(self, rank: int, *, is_quantized: bool = False, is_biased: bool = False) -> None:
        super().__init__()
        self.head, self.processor, self.norm = nn.Module(), RankProcessor(), nn.Identity()
        self.head.weight = nn.Parameter(PARTS[rank].clone(), requires_grad=False)
        self.head.tp_size = RANKS  # type: ignore[assignment]
        self.bias = BIASES[rank].clone() if is_biased else None
        if is_quantized:
            self.head.scales = nn.Parameter(torch.ones(1))

    def compute_logits(self, rows: torch.Tensor) -> Any:
        return self.processor(self.head, rows, self.bias)

    def load_weights(self, weights: list[float]) -> int:
        return len(weights)


def gather(own: torch.Tensor) -> torch.Tensor:
    """What both ranks give: their weights, or their biases."""
    return PARTS if own.ndim == 2 else BIASES


class RankWorker:
    """As vLLM's, whose weights come past the model's own `load_weights`."""

    def reload_weights(self) -> str:
        return "reloaded"

    def start_weight_update(self) -> str:
        return "started"


def rank_head(model: nn.Module, rank: int = 0, worker: object = None) -> VllmHead:
    model_config = SimpleNamespace(dtype=torch.float32, get_hidden_size=lambda: HIDDEN)
    config: Any = SimpleNamespace(model_config=model_config)
    return VllmHead(config, model, model.norm, torch.device("cpu"), (gather, rank, worker))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("rank", range(RANKS))
def test_one_rank_reads_the_whole_vocabulary(rank: int, is_biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_names.LOGITS_PROCESSOR, "get", lambda: RankProcessor)
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(3))

    head = rank_head(RankModel(rank, is_biased=is_biased), rank)

    assert head.vocab_size == VOCABULARY
    expected = rows @ WHOLE.T + (BIASES.flatten() if is_biased else 0)
    torch.testing.assert_close(head.logits(rows), 3 * torch.tanh(expected[:, :VOCABULARY]))


def copy_in_place(tensor: torch.Tensor) -> str:
    """As vLLM's `reload_weights` of weights in the kernels' format, in the runner's mode."""
    with torch.inference_mode():
        tensor.copy_(torch.zeros_like(tensor))
    return "copied"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model, _: model.load_weights([1.0, 2.0]), 2),
        (lambda model, _: copy_in_place(model.head.weight), "copied"),
        (lambda model, _: copy_in_place(model.bias), "copied"),
        (lambda _, worker: worker.reload_weights(), "reloaded"),
        (lambda _, worker: worker.start_weight_update(), "started"),
    ],
    ids=["load_weights", "copied weight", "copied bias", "reload_weights", "start_weight_update"],
)
def test_the_parts_of_other_ranks_are_not_used_once_the_model_has_new_weights(
    change: Callable[[RankModel, RankWorker], object], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_names.LOGITS_PROCESSOR, "get", lambda: RankProcessor)
    model, worker = RankModel(0, is_biased=True), RankWorker()
    head = rank_head(model, worker=worker)

    assert change(model, worker) == expected

    with pytest.raises(UnsupportedError, match="new weights"):
        head.logits(torch.ones(1, HIDDEN))


@pytest.mark.parametrize("rank", range(RANKS))
def test_only_the_first_rank_holds_the_parts_once_its_head_is_dropped(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_names.LOGITS_PROCESSOR, "get", lambda: RankProcessor)
    model, worker = RankModel(rank), RankWorker()
    head = rank_head(model, rank, worker)
    parts = weakref.ref(head._compute.func.__self__)  # type: ignore[attr-defined]

    del head
    gc.collect()

    assert (parts() is not None) == (rank == 0)
    assert (model.load_weights([1.0]), worker.reload_weights()) == (1, "reloaded")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (RankModel(0, is_quantized=True), "cannot use a quantized head"),
        (RankModel(1), "stored in a form that is not known"),
        (nn.Sequential(nn.Identity()), r"cannot follow Other\.compute_logits"),
    ],
    ids=["quantized", "packed", "unknown"],
)
def test_a_head_that_ranks_cannot_share_is_refused(
    model: nn.Module, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of this rank's part must give what its own module gives."""

    class Other(nn.Module):
        norm = nn.Identity()

        def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
            return rows

    monkeypatch.setattr(vllm_names.LOGITS_PROCESSOR, "get", lambda: RankProcessor)

    with pytest.raises(UnsupportedError, match=message):
        rank_head(model if isinstance(model, RankModel) else Other())


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
