"""Batches of rows, each with values at every site of its view."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headgate.consumers.datasets.view import Bytes, RowView, typed

if TYPE_CHECKING:
    from torch import Tensor

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Some rows, with all that is known of them. The memory is the batch's own: it may be written to.

    Attributes:
        view: Where they are from.
        numbers: int64 ``[rows]``: their numbers in the view.
        data: uint8 ``[rows, row_bytes]`` by site.
    """

    view: RowView
    numbers: Numbers
    data: Mapping[str, Bytes]

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        view = self.view
        return f"<RowBatch: {len(self)} rows of {', '.join(self.data)}, {view.dtype} [{view.hidden_size}]>"

    def torch(self, site: str | None = None) -> Tensor:
        """``[rows, hidden]`` in the model's dtype; without a copy.

        Args:
            site: Its name; optional if there is only one.
        """
        import torch

        view = self.view
        data = torch.from_numpy(self.data[self._site(site)])
        return data.view(getattr(torch, view.dtype)).reshape(len(self), view.hidden_size)

    def numpy(self, site: str | None = None) -> npt.NDArray[Any]:
        """``[rows, hidden]``: float16 and float32 as they are, bfloat16 as float32, which holds it exactly."""
        return typed(self.data[self._site(site)], self.view.dtype)

    def float32(self, site: str | None = None) -> npt.NDArray[np.float32]:
        """float32 ``[rows, hidden]``, which holds every dtype of a model exactly."""
        return self.numpy(site).astype(np.float32, copy=False)

    @property
    def positions(self) -> Numbers:
        """int64 ``[rows]``: the absolute position of each row."""
        return self.view.positions(self.numbers)

    @property
    def token_ids(self) -> Numbers:
        """int64 ``[rows]``: the token whose forward gave each row; read from the files now."""
        return self.view.token_ids(self.numbers)

    @property
    def requests(self) -> Numbers:
        """int64 ``[rows]``: a number for the request of each row, such as groups of a cross-validation."""
        return self.view.requests(self.numbers)

    @property
    def request_ids(self) -> list[str]:
        """``[rows]``: the id of each row's request."""
        numbers, inverse = np.unique(self.requests, return_inverse=True)
        names = [self.view.request_id(int(number)) for number in numbers]
        return [names[place] for place in inverse]

    @property
    def tags(self) -> list[str]:
        """``[rows]``: the tag of each row's request."""
        return [self.view.tag(int(number)) for number in self.requests]

    def _site(self, site: str | None) -> str:
        if site is not None:
            return site
        if len(self.view.sites) > 1:
            raise ValueError(f"the batch has several sites: name one of {', '.join(self.view.sites)}")
        return self.view.sites[0]


def plain_batches(view: RowView, batch_size: int) -> Iterator[RowBatch]:
    """All rows in order; the last batch may be smaller.

    Raises:
        ValueError: If `batch_size` is not at least 1.
    """
    check_positive(batch_size, "batch_size")
    return (
        RowBatch(view, np.arange(start, stop, dtype=np.int64), view.read(start, stop))
        for start in range(0, len(view), batch_size)
        for stop in [min(start + batch_size, len(view))]
    )


def check_positive(value: int, field: str) -> None:
    """Raise `ValueError` if `value` is below 1."""
    if value < 1:
        raise ValueError(f"{field}: must be at least 1, got {value}")
