"""The model's own way from the residual stream to logits: its final norm, and its ``compute_logits``.

Each family's ``compute_logits`` applies its head, logit scale and soft cap in the order of its forward, and cuts the
padding of the vocabulary off, so nothing of that is written again here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.model.find_layers import find_final_norm
from headgate.capture.engine.setup.vocabulary import ModelVocabulary, vocabulary_of_config
from headgate.capture.engine.vllm_types import VllmConfig
from headgate.capture.schema.errors import UnsupportedError

logger = logging.getLogger("headgate")

_PRECISION = "head_dtype"
"""Attribute of vLLM's `LogitsProcessor`: dtype of the head's product, of the model if None."""


class VllmHead:
    """Implements `headgate.capture.schema.consumer.ModelHead` for a model of vLLM.

    Made before actions are put into the forward: the norm's own forward is kept, which captures and steers nothing.

    Args:
        config: Of the engine.
        model: The model that the runner has.
        norm: Its final norm.
        device: Where it is.
    """

    def __init__(self, config: VllmConfig, model: nn.Module, norm: nn.Module, device: torch.device) -> None:
        processor: Any = vllm_names.LOGITS_PROCESSOR.get()
        self._config = config
        self._norm: Callable[[Tensor], Tensor] = norm.forward
        self._compute: Callable[[Tensor], Tensor] = model.compute_logits  # type: ignore[assignment]
        self.dtype: torch.dtype = config.model_config.dtype
        self._wide: Sequence[nn.Module] = ()
        found = [module for module in model.modules() if isinstance(module, processor) and _PRECISION in vars(module)]
        row = torch.ones(1, config.model_config.get_hidden_size(), dtype=self.dtype, device=device)
        if self.dtype is not torch.float32:
            self._wide = found
            reason = None if found else "this vLLM computes heads in no other"
            try:
                self.logits(row)
            except ValueError as error:  # a quantized head
                self._wide, reason = (), str(error)
            if reason is not None:
                logger.warning(
                    "the model's head computes in %s alone (%s), so logits that a lens reads are rounded to it, and "
                    "tokens whose logits are close may change places",
                    str(self.dtype).removeprefix("torch."),
                    reason,
                )
        self.vocab_size = self.logits(self.norm(row)).shape[1]

    @cached_property
    def vocabulary(self) -> ModelVocabulary:
        """The tokens as texts."""
        return vocabulary_of_config(self._config)

    def norm(self, rows: Tensor) -> Tensor:
        """Apply the final norm to rows of the stream ``[n, hidden]``; in the model's dtype."""
        return self._norm(rows.to(self.dtype))

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits, float32 ``[n, vocab_size]``, of normed rows.

        The product is accumulated and stored in float32 where vLLM can: with any head that is not quantized.
        """
        before = [getattr(module, _PRECISION) for module in self._wide]
        try:
            for module in self._wide:
                setattr(module, _PRECISION, torch.float32)
            return self._compute(normed).float()
        finally:
            for module, dtype in zip(self._wide, before, strict=True):
                setattr(module, _PRECISION, dtype)


def find_head(config: VllmConfig, model: nn.Module, parent: nn.Module, device: torch.device) -> VllmHead:
    """Find the head of the model.

    Args:
        config: Of the engine.
        model: The model that the runner has.
        parent: Owner of the list of decoder layers.
        device: Where the model is.

    Raises:
        UnsupportedError: If this worker has no whole head, or none that rows of any layer can be given to.
    """
    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            "it needs the model's whole head beside every layer: start the server with --tensor-parallel-size 1 and "
            f"--pipeline-parallel-size 1, not {parallel.tensor_parallel_size} and {parallel.pipeline_parallel_size}"
        )
    if getattr(config, "lora_config", None) is not None:
        raise UnsupportedError("it cannot use a head that LoRA adapters may change: start the server without LoRA")
    norm = find_final_norm(parent)
    if norm is None or not callable(getattr(model, "compute_logits", None)):
        what = f"no final norm was found in {type(parent).__name__}.forward"
        raise UnsupportedError(what if norm is None else f"{type(model).__name__} has no compute_logits")
    return VllmHead(config, model, parent.get_submodule(norm[0]), device)
