"""Rows as the activation buffer of dictionary_learning's ``trainSAE``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.sites import Site
from headgate.consumers.datasets.feeds.torch_rows import tensor_of
from headgate.consumers.datasets.mixing import DEFAULT_REQUESTS, DEFAULT_ROWS, MixedBatches
from headgate.consumers.datasets.view import DatasetView


class RowBuffer:
    """Stands where ``trainSAE(data=...)`` expects an ``ActivationBuffer``.

    Each `iter` begins with the first row again: the trainer goes over the data once to find their norm and once to
    train. Batches are memory of their own, since it scales them in place.

    Attributes:
        config: Written to the trainer's ``config.json``; loaders read ``ctx_len`` there.

    Args:
        view: Rows of one site.
        batch_size: Rows in a batch.
        seed: Of the order.
        min_rows: Rows that are mixed.
        min_requests: Requests that are mixed.
        epochs: How often the data are gone through; None for ever: the trainer stops at its ``steps``.
        drop_sinks: As for `MixedBatches`.
        context_length: For ``ctx_len``; one more than the largest position if None.
        dtype: Of the tensors; the trainer's networks are float32.
        device: Where they are.

    Raises:
        ValueError: If the view has several sites.
    """

    def __init__(
        self,
        view: DatasetView,
        *,
        batch_size: int,
        seed: int = 0,
        min_rows: int = DEFAULT_ROWS,
        min_requests: int = DEFAULT_REQUESTS,
        epochs: int | None = None,
        drop_sinks: bool = False,
        context_length: int | None = None,
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(view.sites) != 1:
            raise ValueError(f"expected rows of one site, got {', '.join(view.sites)}")
        self._view = view
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "min_rows": min_rows,
            "min_requests": min_requests,
            "epochs": epochs,
            "drop_sinks": drop_sinks,
        }
        self._dtype, self._device = dtype, device
        self._running: Iterator[Tensor] | None = None
        site = Site.parse(view.sites[0])
        self.config: dict[str, Any] = {
            "ctx_len": _context_length(view) if context_length is None else context_length,
            "d_submodule": view.hidden_size,
            "io": "out",
            "out_batch_size": batch_size,
            "site": site.name,
            "layer": site.layer,
            "device": str(device),
        }

    def __iter__(self) -> Iterator[Tensor]:
        mixed = MixedBatches(self._view, **self._settings)
        return (tensor_of(batch, None, self._dtype, self._device) for batch in mixed)

    def __next__(self) -> Tensor:
        if self._running is None:
            self._running = iter(self)
        return next(self._running)


def _context_length(view: DatasetView) -> int:
    """One more than the largest position, which a range of rows ends with."""
    return int(view.positions(np.unique(view.ends - 1)).max()) + 1 if len(view) else 0
