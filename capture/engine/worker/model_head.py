"""The model's own way from the residual stream to logits: its final norm, and its ``compute_logits``.

Each family's ``compute_logits`` applies its head, logit scale and soft cap in the order of its forward, and cuts the
padding of the vocabulary off, so nothing of that is written again here.

With tensor parallelism each rank has the rows of the head for its part of the vocabulary. The first rank alone collects
what a lens reads, at times that the others do not know, so it cannot ask them then: it takes a copy of their parts at
the start, and vLLM's own code computes with each part in turn.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.model.find_layers import find_final_norm
from headgate.capture.engine.setup.vocabulary import ModelVocabulary, vocabulary_of_config
from headgate.capture.engine.vllm_types import VllmConfig
from headgate.capture.schema.config import MIB
from headgate.capture.schema.errors import UnsupportedError

logger = logging.getLogger("headgate")

_PRECISION = "head_dtype"
"""Attribute of vLLM's `LogitsProcessor`: dtype of the head's product, of the model if None."""


class HeadShards:
    """All parts of a head that tensor-parallel ranks share, on the first of them.

    Every rank makes one at the same point of the start.

    Args:
        model: The model that the runner has.
        processors: Its modules of vLLM's class `LogitsProcessor`.
        normed: One normed row, ``[1, hidden]``.
        gather: Collective: from a tensor of each rank, ``[...]``, to those of all, ``[ranks, ...]``.
        rank: Of this worker, among the ranks that share the head.
        worker: vLLM's, whose methods take new weights.

    Raises:
        UnsupportedError: If logits are computed in a way that is not known, or the head is quantized.
    """

    def __init__(
        self,
        model: nn.Module,
        processors: Sequence[nn.Module],
        normed: Tensor,
        gather: Callable[[Tensor], Tensor],
        rank: int,
        worker: object = None,
    ) -> None:
        self._processor, self._head, bias = _called_with(model, processors, normed)
        tensors = {**dict(self._head.named_parameters()), **dict(self._head.named_buffers())}
        if tensors.keys() - {"weight", "bias"} or not tensors["weight"].is_floating_point():
            raise UnsupportedError(
                "with tensor parallelism it cannot use a quantized head: start the server with "
                "--tensor-parallel-size 1, or with an unquantized lm_head"
            )
        self._weight: Tensor = tensors["weight"]
        self._copied = [self._weight] if bias is None else [self._weight, bias]
        self._version = self._count_writes()
        self._is_old = False
        weights, biases = gather(self._weight.detach()), None if bias is None else gather(bias.detach())
        self._parts: list[tuple[nn.Module, Tensor | None]] = []
        for number, weight in enumerate(weights):
            part = _single(self._head) if number == rank else _with_weight(self._head, weight)
            self._parts.append((part, None if biases is None else biases[number].clone()))
        self._check(weights[rank], normed, rank)
        if rank == 0:
            self._watch(model, "load_weights")
            self._watch(worker, "reload_weights")
            self._watch(worker, "start_weight_update")
            logger.info(
                "capture: %.1f MiB of device memory for the other ranks' parts of the head, which a lens reads by",
                self._weight.nbytes * (len(weights) - 1) / MIB,
            )

    def _check(self, copied: Tensor, normed: Tensor, rank: int) -> None:
        """Compare the product with a copy of this rank's part with what the model's own module gives."""
        expected, found = (
            self._processor_logits(part, normed, self._parts[rank][1])
            for part in (self._parts[rank][0], _with_weight(self._head, copied))
        )
        if not torch.allclose(expected.float(), found.float(), rtol=1e-2, atol=1e-2):
            raise UnsupportedError(
                "the weights of the model's head are stored in a form that is not known, so the ranks' parts cannot be "
                "put together: start the server with --tensor-parallel-size 1"
            )

    def _watch(self, owner: object, method: str) -> None:
        """Notice new weights that `method` takes, if `owner` has it.

        The owner holds these parts from then on.
        """
        take: Callable[..., object] | None = getattr(owner, method, None)
        if take is None:
            return

        @wraps(take)
        def taking(*args: object, **kwargs: object) -> object:
            self._is_old = True
            return take(*args, **kwargs)

        setattr(owner, method, taking)

    def _count_writes(self) -> int:
        """How often this rank's own tensors were written in place; a write through ``.data`` is not counted."""
        return sum(tensor._version for tensor in self._copied)

    def _processor_logits(self, head: nn.Module, normed: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = getattr(type(self._processor), _GET_LOGITS)(self._processor, normed, head, bias)
        return found

    def compute(self, compute: Callable[[Tensor], Tensor], normed: Tensor) -> Tensor:
        """Return what `compute`, the model's ``compute_logits``, returns, over the whole vocabulary.

        Raises:
            UnsupportedError: If the model got new weights since the start: by its ``load_weights``, by the worker's
                ``reload_weights`` or ``start_weight_update``, or by a write in place. Writes through ``.data`` and into
                the memory itself, in code that calls none of these, are not noticed.
        """
        if self._is_old or self._count_writes() != self._version:
            raise UnsupportedError("the model has new weights, and the other ranks' parts of its head are old: restart")

        def whole(normed: Tensor, *_: object, **__: object) -> Tensor:
            logits = torch.cat([self._processor_logits(part, normed, bias) for part, bias in self._parts], dim=-1)
            return logits[..., : self._processor.org_vocab_size]

        return _replacing(self._processor, whole, lambda: compute(normed))


_GET_LOGITS, _GATHER_LOGITS = "_get_logits", "_gather_logits"
"""Methods of vLLM's `LogitsProcessor`: the head's product over the whole vocabulary, and its collective."""


def _replacing(processor: nn.Module, get_logits: Callable[..., Tensor], run: Callable[[], Tensor]) -> Tensor:
    """Run with another method in place of `_get_logits`, and without a collective."""
    vars(processor).update({_GET_LOGITS: get_logits, _GATHER_LOGITS: lambda logits: logits})
    try:
        return run()
    finally:
        del vars(processor)[_GET_LOGITS], vars(processor)[_GATHER_LOGITS]


def _called_with(
    model: nn.Module, processors: Sequence[nn.Module], normed: Tensor
) -> tuple[nn.Module, nn.Module, Tensor | None]:
    """Return what computes the model's logits: its processor, its head, and the head's bias."""
    found: list[tuple[nn.Module, nn.Module, Tensor | None]] = []
    for processor in processors:
        if not hasattr(processor, _GET_LOGITS) or not hasattr(processor, _GATHER_LOGITS):
            break

        def note(
            rows: Tensor, head: nn.Module, bias: Tensor | None = None, *_: object, _by: nn.Module = processor
        ) -> Tensor:
            found.append((_by, head, bias))
            return rows

        _replacing(processor, note, lambda: model.compute_logits(normed))  # type: ignore[operator]
        if found:
            return found[0]
    raise UnsupportedError(
        f"with tensor parallelism it cannot follow {type(model).__name__}.compute_logits: start the server with "
        "--tensor-parallel-size 1"
    )


def _single(head: nn.Module) -> nn.Module:
    """Return a head that counts as whole; it shares its tensors with `head`."""
    found = copy.copy(head)
    vars(found)["tp_size"] = 1
    return found


def _with_weight(head: nn.Module, weight: Tensor) -> nn.Module:
    """Return a head that counts as whole, with a copy of another rank's rows."""
    found = _single(head)
    found._parameters = {**head._parameters, "weight": nn.Parameter(weight.clone(), requires_grad=False)}
    if hasattr(found, "cpu_linear"):
        vars(found)["cpu_linear"] = nn.functional.linear  # on CPUs vLLM packs the weights of the head into this
    return found


class VllmHead:
    """Implements `headgate.capture.schema.consumer.ModelHead` for a model of vLLM.

    Made before actions are put into the forward: the norm's own forward is kept, which captures and steers nothing.

    Args:
        config: Of the engine.
        model: The model that the runner has.
        norm: Its final norm.
        device: Where it is.
        ranks: With tensor parallelism, the collective of `HeadShards`, the number of this rank, and the worker.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: nn.Module,
        norm: nn.Module,
        device: torch.device,
        ranks: tuple[Callable[[Tensor], Tensor], int, object] | None = None,
    ) -> None:
        processor: Any = vllm_names.LOGITS_PROCESSOR.get()
        self._config = config
        self._norm: Callable[[Tensor], Tensor] = norm.forward
        self._compute: Callable[[Tensor], Tensor] = model.compute_logits  # type: ignore[assignment]
        self.dtype: torch.dtype = config.model_config.dtype
        self._wide: Sequence[nn.Module] = ()
        processors = [module for module in model.modules() if isinstance(module, processor)]
        row = torch.ones(1, config.model_config.get_hidden_size(), dtype=self.dtype, device=device)
        if ranks is not None:
            self._compute = partial(HeadShards(model, processors, self.norm(row), *ranks).compute, self._compute)
        if self.dtype is not torch.float32:
            self._wide = [module for module in processors if _PRECISION in vars(module)]
            reason = None if self._wide else "this vLLM computes heads in no other"
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


def find_head(
    config: VllmConfig,
    model: nn.Module,
    parent: nn.Module,
    device: torch.device,
    gather: Callable[[Tensor], Tensor] = lambda tensor: tensor[None],
    rank: int = 0,
    worker: object = None,
) -> VllmHead:
    """Find the head of the model. With tensor parallelism every rank does so at the same point of the start.

    Args:
        config: Of the engine.
        model: The model that the runner has.
        parent: Owner of the list of decoder layers.
        device: Where the model is.
        gather: Collective of the tensor-parallel ranks; see `HeadShards`.
        rank: Of this worker among them.
        worker: vLLM's.

    Raises:
        UnsupportedError: If this worker has no head, or none that rows of any layer can be given to.
    """
    if getattr(config, "lora_config", None) is not None:
        raise UnsupportedError("it cannot use a head that LoRA adapters may change: start the server without LoRA")
    norm = find_final_norm(parent)
    if norm is None or not callable(getattr(model, "compute_logits", None)):
        what = f"no final norm was found in {type(parent).__name__}.forward"
        raise UnsupportedError(what if norm is None else f"{type(model).__name__} has no compute_logits")
    ranks = (gather, rank, worker) if config.parallel_config.tensor_parallel_size > 1 else None
    return VllmHead(config, model, parent.get_submodule(norm[0]), device, ranks)
