"""Batches of rows as a reader of a stream gives them: the same form as those of data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.consumers.datasets.view import typed
from headgate.consumers.stream.arrow_rows import Bytes, Facts, RequestRows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """Some rows, with all that is known of them. The memory is the batch's own: it may be written to.

    Attributes:
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        data: uint8 ``[rows, row_bytes]`` by site.
        positions: int64 ``[rows]``: the absolute position of each row.
        token_ids: int64 ``[rows]``: the token whose forward gave each row.
        is_prefill: bool ``[rows]``: True where the row's token was part of the prompt.
        facts: ``[rows]``: request id, tag and sample of each row.
    """

    dtype: str
    data: Mapping[str, Bytes]
    positions: Int64Array
    token_ids: Int64Array
    is_prefill: BoolArray
    facts: Sequence[Facts]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def request_ids(self) -> list[str]:
        """``[rows]``: the id of each row's request."""
        return [facts.request_id for facts in self.facts]

    @property
    def tags(self) -> list[str]:
        """``[rows]``: the tag of each row's request."""
        return [facts.tag for facts in self.facts]

    def torch(self, site: str | None = None) -> Tensor:
        """``[rows, hidden]`` in the model's dtype; without a copy.

        Args:
            site: Its name; optional if there is only one.
        """
        import torch

        data = torch.from_numpy(self.data[self._site(site)])
        return data.view(getattr(torch, self.dtype))

    def numpy(self, site: str | None = None) -> npt.NDArray[Any]:
        """``[rows, hidden]``: float16 and float32 as they are, bfloat16 as float32, which holds it exactly."""
        return typed(self.data[self._site(site)], self.dtype)

    def float32(self, site: str | None = None) -> npt.NDArray[np.float32]:
        """float32 ``[rows, hidden]``, which holds every dtype of a model exactly."""
        return self.numpy(site).astype(np.float32, copy=False)

    def _site(self, site: str | None) -> str:
        if site is not None:
            return site
        if len(self.data) > 1:
            raise ValueError(f"the batch has several sites: name one of {', '.join(self.data)}")
        return next(iter(self.data))


def joined(pieces: Sequence[RequestRows], sites: Sequence[str], dtype: str) -> StreamBatch:
    """Rows of several requests, one after the other, as one batch of copies."""
    return StreamBatch(
        dtype=dtype,
        data={site: np.concatenate([piece.data[site] for piece in pieces]) for site in sites},
        positions=np.concatenate([piece.positions for piece in pieces]),
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        is_prefill=np.concatenate([piece.is_prefill for piece in pieces]),
        facts=[piece.facts for piece in pieces for _ in range(len(piece))],
    )
