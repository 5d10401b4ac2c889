"""Mixed rows as tensors: what SAELens' trainers, sparsify's coders and loops of one's own take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Batch(Protocol):
    """Rows of some sites."""

    def torch(self, site: str | None = None) -> Tensor:
        """``[rows, hidden]`` of one site; of the only one if none is named."""
        ...


class Batches(Protocol):
    """Batches without end or with one: of a data set, or of a stream (`headgate.consumers.stream.StreamReader`)."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that each batch has rows of."""
        ...

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]:
        """The place, to go on from with `load_state_dict`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        ...


class TensorBatches(Iterator[Tensor]):
    """The batches of one site: ``[rows, hidden]``, each in memory of its own.

    It is the `data_provider` of SAELens' `SAETrainer`, and its batches are the input of sparsify's `SparseCoder`.

    Args:
        batches: Rows of one site, as `Dataset.mixed` or a stream's reader gives them. With ``epochs=None`` a data set's
            never end.
        dtype: Of the tensors; the model's if None.
        device: Where they are.
    """

    def __init__(
        self, batches: Batches, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if len(batches.sites) != 1:
            raise ValueError(f"expected rows of one site, got {', '.join(batches.sites)}; see TensorsByHook")
        self.batches = batches
        self._dtype, self._device = dtype, device

    def __iter__(self) -> TensorBatches:
        return self

    def __next__(self) -> Tensor:
        return tensor_of(next(self.batches), None, self._dtype, self._device)

    def state_dict(self) -> dict[str, Any]:
        """See `Batches.state_dict`."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Batches.load_state_dict`."""
        self.batches.load_state_dict(state)


class TensorsByHook(Iterator[dict[str, Tensor]]):
    """The batches of several sites: ``{name: [rows, hidden]}``, whose rows are the same tokens at every site.

    It is the `data_provider` of SAELens' `MultiSAETrainer`.

    Args:
        batches: Rows of several sites.
        names: The trainer's name of each site; the sites' own if None.
        dtype: Of the tensors; the model's if None.
        device: Where they are.

    Raises:
        ValueError: If `names` lacks a site.
    """

    def __init__(
        self,
        batches: Batches,
        names: Mapping[str, str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._names = dict(names) if names is not None else {site: site for site in batches.sites}
        if self._names.keys() != set(batches.sites):
            raise ValueError(f"names: of {', '.join(self._names)}; the rows are of {', '.join(batches.sites)}")
        self.batches = batches
        self._dtype, self._device = dtype, device

    def __iter__(self) -> TensorsByHook:
        return self

    def __next__(self) -> dict[str, Tensor]:
        batch = next(self.batches)
        return {name: tensor_of(batch, site, self._dtype, self._device) for site, name in self._names.items()}

    def state_dict(self) -> dict[str, Any]:
        """See `Batches.state_dict`."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Batches.load_state_dict`."""
        self.batches.load_state_dict(state)


def tensor_of(batch: Batch, site: str | None, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    """A batch's rows at a site."""
    return batch.torch(site).to(device=device, dtype=dtype)
