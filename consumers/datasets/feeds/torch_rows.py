"""Rows as a `torch.utils.data.IterableDataset`, split over ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from headgate.consumers.datasets.mixing import DEFAULT_REQUESTS, DEFAULT_ROWS, MixedBatches
from headgate.consumers.datasets.view import DatasetView


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


class TorchRows(IterableDataset[Any]):
    """Mixed batches for ``DataLoader(rows, batch_size=None, num_workers=...)``: each row once, over all of them.

    An item is a batch: a tensor ``[rows, hidden]``, or one for each site by its name if there are several. Ranks and
    workers get disjoint parts, whose numbers of batches can differ by some; each mixes `min_rows` rows of its own.

    Its state can be saved where the iteration runs: in this process with ``num_workers=0``, else by torchdata's
    `StatefulDataLoader`, which asks its workers.

    Args:
        view: The rows: `Dataset.rows`.
        batch_size: Rows in a batch.
        seed: Of the order.
        min_rows: Rows that are mixed in each worker.
        min_requests: Requests that are mixed in each worker.
        drop_sinks: As for `MixedBatches`.
        dtype: Of the tensors; the model's if None.
        rank: This process's number; that of `torch.distributed` if None.
        world_size: Number of processes; likewise.
    """

    def __init__(
        self,
        view: DatasetView,
        *,
        batch_size: int,
        seed: int = 0,
        min_rows: int = DEFAULT_ROWS,
        min_requests: int = DEFAULT_REQUESTS,
        drop_sinks: bool = False,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size: give both, or neither")
        self._view = view
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "min_rows": min_rows,
            "min_requests": min_requests,
            "drop_sinks": drop_sinks,
        }
        self._dtype = dtype
        self._place = _place_of(rank, world_size)
        self._epoch = 0
        self._state: dict[str, Any] | None = None
        self._running: MixedBatches | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; without it every one has the same."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Tensor | dict[str, Tensor]]:
        rank, world_size = self._place
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        part = rank * count + number, world_size * count
        mixed = MixedBatches(self._view, **self._settings, first_epoch=self._epoch, part=part)
        if self._state is not None:
            mixed.load_state_dict(self._state)
            self._state = None
        self._running = mixed
        return self._tensors(mixed)

    def state_dict(self) -> dict[str, Any]:
        """The place in the iteration that began last; see `MixedBatches.state_dict`.

        Raises:
            RuntimeError: If none has begun in this process.
        """
        if self._running is None:
            if self._state is not None:
                return self._state
            raise RuntimeError("no iteration has begun in this process; with workers, use StatefulDataLoader")
        return self._running.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where `state_dict` was taken."""
        self._state, self._epoch, self._running = state, state["epoch"], None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": None}

    def _tensors(self, mixed: MixedBatches) -> Iterator[Tensor | dict[str, Tensor]]:
        sites = self._view.sites
        for batch in mixed:
            tensors = {site: tensor_of(batch, site, self._dtype, "cpu") for site in sites}
            yield tensors if len(sites) > 1 else tensors[sites[0]]


def _place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
